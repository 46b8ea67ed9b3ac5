"""A folder as a store, `file:///folder`: a local disk, NFS, Lustre, or a mounted bucket.

Every write is: temporary file in the same file system → write → fsync → read back → link or replace → fsync
of the parent and of every newly made folder. What the store answers as checksum is computed from what it
reads back; the page cache may have served that read.

The time is the file system's: that of a file touched in the folder, which NFS takes from its server. Only a store that
was opened to be read has to go by this machine's clock.

What is weaker than S3: a compare-and-swap excludes other writers by flock, which some network file systems keep to one
host. Create-once is a hard link, atomic on POSIX file systems and NFS (open(2), O_EXCL).
"""

# ruff: noqa: ARG002 - the multipart methods take what the protocol says, and refuse
from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ckpt_async.core.keys import DATA, PRIVATE
from ckpt_async.core.model import Checksum
from ckpt_async.errors import (
    FailureReason,
    IntegrityError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    PreconditionFailedError,
    SourceError,
    StoreError,
)
from ckpt_async.stores import check_key, check_prefix, check_size
from ckpt_async.stores.checksums import Digest
from ckpt_async.stores.interface import (
    Body,
    Capabilities,
    Condition,
    Create,
    Enough,
    Expected,
    Listing,
    Match,
    MultipartInfo,
    ObjectInfo,
    Sink,
    SmallGet,
    SmallPut,
    StoredPart,
    known,
    put_one_by_one,
)
from ckpt_async.threads import in_thread

# Temporary files and the lock; below a name that no key may start with. Left-overs are harmless.
_OWN = f"{PRIVATE}/tmp"  # noqa: S108 - a key, not a path
_LOCK = "lock"

_ALGORITHM = "crc64nvme"
# Large enough that a thread hop per slice costs nothing, small enough to stay in the cache.
_SLICE_BYTES = 4 << 20
# Small objects that are read in one go: a thread hop for each would take a third of the throughput, and whoever cancels
# waits for all of them.
_AT_A_TIME = 8
# A parent that `delete` finds empty may vanish between its making and its use.
_PARENT_ATTEMPTS = 10
# Holders keep the lock for a rename and an fsync; beyond this one of them hangs.
_LOCK_TIMEOUT_S = 30.0
_LOCK_POLL_S = 0.002
# Far above the time any upload goes without a write.
_LEFT_OVER_AGE_S = 24 * 3600.0
# Far above the time from the making of a folder to its first file.
_EMPTY_AGE_S = 60.0

_DISK = {
    errno.ENOSPC: "the file system is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EIO: "the device reports errors: see dmesg",
    errno.ESTALE: "the network file system was exported anew: mount it again",
}
_SCARCE = {
    errno.EMFILE: "this process has too many files open: raise `ulimit -n`",
    errno.ENFILE: "the machine has too many files open",
    errno.ENOMEM: "memory is short",
    errno.EAGAIN: "memory or threads are short",
}
_AUTH = {
    errno.EACCES: "this user may not: check owner and mode",
    errno.EPERM: "this user may not: check owner and mode",
}


class DirectoryStore:
    """Objects as files below `root`. Blocking calls run in the loop's default executor.

    A cancelled call returns only when its running disk operation has: buffer and descriptor are in use.
    """

    def __init__(self, root: Path | str, *, url: str = "") -> None:
        self._root = Path(root)
        self._own = self._root / _OWN
        self._url = url or f"file://{self._root}"
        self._may_write = False  # these are known after `open`
        self._has_own = False
        self._capabilities = Capabilities(
            conditional_put=True,
            multipart=False,
            checksum_algorithm=_ALGORITHM,
            max_put_size_bytes=1 << 62,  # the file system decides
        )

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def open(self, *, is_read_only: bool = False) -> None:
        """Make the folder if it is missing and try one write, one hard link and one lock in it.

        Where hard links do not work, `conditional_put` is False.
        """
        place = str(self._root)
        with _translating("open", place):
            if is_read_only:
                if not await in_thread(self._root.is_dir):
                    raise StoreError(
                        "no such folder", reason=FailureReason.NOT_FOUND, operation="open", key=place
                    )
                self._has_own = await in_thread(self._own.is_dir)
                return
            can_link = await in_thread(self._probe)
        self._may_write = True
        self._capabilities = replace(self._capabilities, conditional_put=can_link)

    async def close(self) -> None:
        """Nothing is held open between calls."""

    async def put(
        self, key: str, body: Body, checksum: Expected, *, condition: Condition = None
    ) -> ObjectInfo:
        self._check_key(key, "put")
        checksum = await known(checksum)
        with _translating("put", key):
            temporary, descriptor = await in_thread(self._create_temporary)
            try:
                try:
                    await _write(descriptor, body, key)
                    stored = await in_thread(_sync_and_read_back, descriptor, checksum.algorithm)
                finally:
                    os.close(descriptor)
                if stored != checksum:
                    raise IntegrityError(
                        f"the bytes have {stored.value}, not {checksum.value}", operation="put", key=key
                    )
                status = await in_thread(self._publish, temporary, key, condition)
            finally:
                await in_thread(_unlink_if_there, temporary)
        return _info(key, status, stored)

    async def put_many(self, puts: Iterable[SmallPut], stored: Callable[[ObjectInfo], None]) -> None:
        await put_one_by_one(self, puts, stored)

    async def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        self._check_key(key, "get")
        with _translating("get", key):
            return await in_thread(self._read_whole, key, max_size_bytes)

    async def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> ObjectInfo:
        self._check_key(key, "get_range")
        return await in_thread(self._read_range, key, offset, size_bytes, sink)

    async def get_many(self, gets: Sequence[SmallGet], got: Callable[[SmallGet, memoryview], None]) -> None:
        for start in range(0, len(gets), _AT_A_TIME):
            await in_thread(self._read_many, gets[start : start + _AT_A_TIME], got)

    async def head(self, key: str) -> ObjectInfo:
        """As promised, with a checksum: reads the whole file to compute it."""
        self._check_key(key, "head")
        with _translating("head", key):
            return await in_thread(self._read_back, key)

    async def list(
        self,
        prefix: str,
        *,
        start_after: str = "",
        enough: Enough | None = None,
    ) -> Listing:
        check_prefix(prefix, "list")
        with _translating("list", prefix):
            return await in_thread(self._walk, prefix, start_after)

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._check_key(key, "delete")
        for key in keys:
            with _translating("delete", key):
                await in_thread(self._delete, key)

    async def create_multipart(self, key: str) -> str:
        _refuse_multipart("create_multipart", key)

    async def put_part(
        self, key: str, upload_id: str, number: int, body: Body, checksum: Expected
    ) -> StoredPart:
        _refuse_multipart("put_part", key)

    async def list_parts(self, key: str, upload_id: str) -> Sequence[StoredPart]:
        _refuse_multipart("list_parts", key)

    async def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[StoredPart], checksum: Checksum, size_bytes: int
    ) -> ObjectInfo:
        _refuse_multipart("complete_multipart", key)

    async def abort_multipart(self, key: str, upload_id: str) -> None:
        _refuse_multipart("abort_multipart", key)

    async def list_multiparts(self, prefix: str) -> Sequence[MultipartInfo]:
        """None: there are no multipart uploads here."""
        check_prefix(prefix, "list_multiparts")
        return []

    # --- names; everything below blocks and runs in a worker thread ----------------------------------------

    def _check_key(self, key: str, operation: str) -> None:
        check_key(key, operation)
        if key == _OWN or key.startswith(f"{_OWN}/"):
            raise StoreError(
                "the store keeps its own files here",
                reason=FailureReason.OTHER,
                operation=operation,
                key=key,
            )

    def _path(self, key: str) -> Path:
        """The file of a key. A link among its folders could lead out of the root: refused (I10)."""
        path = self._root / key
        parent = path.parent
        while parent != self._root:
            if parent.is_symlink():
                raise OSError(errno.ELOOP, "a folder on the way is a symbolic link", str(parent))
            parent = parent.parent
        return path

    def _open(self, key: str) -> int:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            descriptor = os.open(self._path(key), flags)
        except (FileNotFoundError, NotADirectoryError) as error:
            self._check_there("get", key)
            raise FileNotFoundError(errno.ENOENT, "there is no such file", key) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, "not a regular file", key)
        return descriptor

    # --- writing -------------------------------------------------------------------------------------------

    def _probe(self) -> bool:
        _make_folders(self._own)
        self._has_own = True
        temporary, descriptor = self._create_temporary()
        self._remove_left_overs(os.fstat(descriptor).st_mtime)
        linked = temporary.with_name(f"{temporary.name}.link")
        try:
            os.write(descriptor, b"probe")
            os.fsync(descriptor)
            with self._locked():
                pass
            try:
                os.link(temporary, linked)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                    raise
                return False
            return True
        finally:
            os.close(descriptor)
            _unlink_if_there(temporary)
            _unlink_if_there(linked)

    def _remove_left_overs(self, now: float) -> None:
        """Drop temporary files of writers that died, best effort."""
        oldest = now - _LEFT_OVER_AGE_S
        for entry in os.scandir(self._own):
            with contextlib.suppress(OSError):
                if entry.name != _LOCK and entry.stat(follow_symlinks=False).st_mtime < oldest:
                    os.unlink(entry)

    def _create_temporary(self) -> tuple[Path, int]:
        path = self._own / secrets.token_hex(16)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with self._in_place("put"):
            return path, os.open(path, flags, 0o666)

    def _publish(self, temporary: Path, key: str, condition: Condition) -> os.stat_result:
        """Make a finished, synced file visible under its key, durably; returns what is visible now."""
        target = self._path(key)
        match condition:
            case None:
                self._into_parent(target, lambda: os.replace(temporary, target))
            case Create():
                try:
                    self._into_parent(target, lambda: os.link(temporary, target))
                except FileExistsError:
                    raise PreconditionFailedError(operation="put", key=key) from None
            case Match(etag):
                with self._locked():
                    self._swap(temporary, target, key, etag)
        status = os.stat(target, follow_symlinks=False)
        _sync_folder(target.parent)
        return status

    def _swap(self, temporary: Path, target: Path, key: str, etag: str) -> None:
        try:
            current = os.stat(target, follow_symlinks=False)
        except FileNotFoundError:
            raise PreconditionFailedError("there is no object", operation="put", key=key) from None
        if _etag(current) != etag:
            raise PreconditionFailedError(operation="put", key=key)
        # An inode number can come back within one tick of the file system's clock, and an old ETag with it:
        # a growing time makes every version of a swapped object differ from all before.
        os.utime(temporary)
        if os.stat(temporary).st_mtime_ns <= current.st_mtime_ns:
            os.utime(temporary, ns=(current.st_mtime_ns + 1, current.st_mtime_ns + 1))
        os.replace(temporary, target)

    def _into_parent(self, target: Path, place: Callable[[], None]) -> None:
        for _ in range(_PARENT_ATTEMPTS):
            try:
                return place()
            except FileNotFoundError:
                self._check_there("put")
                with contextlib.suppress(FileNotFoundError):  # a delete took the one just made: again
                    _make_folders(target.parent)
        return place()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude the compare-and-swaps and deletes of every other process and thread.

        The lock file is never removed: whoever waits on it must wait on the same inode. The wait is bounded,
        for the holder may be a stopped process.
        """
        with self._in_place("lock"):
            descriptor = os.open(self._own / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            deadline = time.monotonic() + _LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock") from None
                    time.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(descriptor)

    def _delete(self, key: str) -> None:
        path = self._path(key)
        if not os.path.lexists(path) or path.is_dir():
            self._check_there("delete", key)
            return
        with self._locked():
            _unlink_if_there(path)
            _sync_folder(path.parent)
        # Best effort: a parent in use stays, and a shared file system may refuse.
        parent = path.parent
        with contextlib.suppress(OSError):
            while parent != self._root:
                parent.rmdir()
                parent = parent.parent

    # --- reading -------------------------------------------------------------------------------------------

    def _read_whole(self, key: str, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        with open(self._open(key), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size > max_size_bytes:
                raise ObjectTooLargeError(
                    f"has {status.st_size} bytes, more than {max_size_bytes}",
                    operation="get",
                    key=key,
                )
            data = file.read()
        digest = Digest(_ALGORITHM)
        digest.update(data)
        return data, _info(key, status, digest.checksum())

    def _read_many(self, gets: Sequence[SmallGet], got: Callable[[SmallGet, memoryview], None]) -> None:
        for each in gets:
            self._check_key(each.key, "get")
            with _translating("get", each.key):
                data, _ = self._read_whole(each.key, each.size_bytes)
                check_size(len(data), each)
            got(each, memoryview(data))  # what it raises is not ours

    def _read_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> ObjectInfo:
        with _translating("get_range", key):
            descriptor = self._open(key)
        try:
            status = os.fstat(descriptor)
            end = offset + size_bytes
            if end > status.st_size:
                raise StoreError(
                    f"bytes {offset}+{size_bytes} are beyond the object's {status.st_size}",
                    reason=FailureReason.OTHER,
                    operation="get_range",
                    key=key,
                )
            buffer = memoryview(bytearray(min(size_bytes, _SLICE_BYTES)))
            while offset < end:
                with _translating("get_range", key):
                    count = os.preadv(descriptor, [buffer[: end - offset]], offset)
                    if count == 0:
                        raise IntegrityError("was cut short beneath us", operation="get_range", key=key)
                sink(buffer[:count])  # what it raises is not ours
                offset += count
        finally:
            os.close(descriptor)
        return _info(key, status)

    def _read_back(self, key: str) -> ObjectInfo:
        descriptor = self._open(key)
        try:
            return _info(key, os.fstat(descriptor), _checksum_file(descriptor, _ALGORITHM))
        finally:
            os.close(descriptor)

    def _walk(self, prefix: str, start_after: str) -> Listing:
        self._check_there("list", prefix)
        now = self._now()
        start = prefix.rpartition("/")[0]
        found: list[ObjectInfo] = []
        for key, entry in self._files(f"{start}/" if start else "", now):
            if key.startswith(prefix) and key > start_after:
                with contextlib.suppress(FileNotFoundError):  # deleted since its folder was read
                    found.append(_info(key, entry.stat(follow_symlinks=False)))
        self._check_there("list", prefix)
        return Listing(tuple(sorted(found, key=lambda info: info.key)), now)

    def _check_there(self, operation: str, key: str = "") -> None:
        """What is missing is not empty. The folder of our own is what a mount point without its file system lacks: so
        nobody makes it anew, or checkpoints would be committed into a place where nobody will look.
        """
        if not self._root.is_dir() or (self._has_own and not self._own.is_dir()):
            raise StoreError(
                f"{self._root} is not the folder any more that it was",
                reason=FailureReason.TRANSIENT,
                operation=operation,
                key=key,
                hint="was it unmounted, moved or emptied?",
            )

    @contextlib.contextmanager
    def _in_place(self, operation: str) -> Iterator[None]:
        """Around what needs the folder of our own. Readers find none where a run was copied without it."""
        if not self._has_own:
            self._check_there(operation)
            _make_folders(self._own)
            self._has_own = True
        try:
            yield
        except FileNotFoundError:
            self._check_there(operation)
            raise

    def _now(self) -> float:
        """By the clock that sets the times of files: that of a network file system's server."""
        if not self._may_write:
            return time.time()
        with self._in_place("list"):
            descriptor = os.open(self._own / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.utime(descriptor)
            return os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)

    def _files(self, folder: str, now: float) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Every regular file below `folder` ("" or ending in '/'), in no order; links are not followed."""
        path = self._path(folder) if folder else self._root
        try:
            entries = list(os.scandir(path))
        except (FileNotFoundError, NotADirectoryError):
            return  # deleted since its parent was read
        if not entries and self._may_write and folder.startswith((DATA, f"{PRIVATE}/")):
            _remove_left_behind(path, now)
        for entry in entries:
            key = folder + entry.name
            if entry.is_dir(follow_symlinks=False):
                if key != _OWN:
                    yield from self._files(f"{key}/", now)
            elif entry.is_file(follow_symlinks=False):
                yield key, entry


def _remove_left_behind(folder: Path, now: float) -> None:
    """An empty folder, unless it was just made: who deletes a last file may die before he deletes its folder."""
    with contextlib.suppress(OSError):
        if folder.stat().st_mtime < now - _EMPTY_AGE_S:
            folder.rmdir()


async def _write(descriptor: int, body: Body, key: str) -> None:
    written = 0
    async for chunk in body.chunks():
        await in_thread(_write_all, descriptor, chunk)
        written += len(chunk)
    if written != body.size_bytes:
        raise SourceError(
            f"the body of {key!r} gave {written} of {body.size_bytes} bytes",
            reason=FailureReason.SOURCE_CHANGED,
        )


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _sync_and_read_back(descriptor: int, algorithm: str) -> Checksum:
    os.fsync(descriptor)
    return _checksum_file(descriptor, algorithm)


def _checksum_file(descriptor: int, algorithm: str) -> Checksum:
    digest = Digest(algorithm)
    buffer = memoryview(bytearray(_SLICE_BYTES))
    offset = 0
    while count := os.preadv(descriptor, [buffer], offset):
        digest.update(buffer[:count])
        offset += count
    return digest.checksum()


def _make_folders(path: Path) -> None:
    """Make a folder and its missing parents, each durable in its own parent."""
    if path.is_dir():
        return
    _make_folders(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir()
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # removed by a delete since: with it went what was to be made durable
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unlink_if_there(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _info(key: str, status: os.stat_result, checksum: Checksum | None = None) -> ObjectInfo:
    return ObjectInfo(key, status.st_size, _etag(status), checksum, status.st_mtime)


def _etag(status: os.stat_result) -> str:
    """Of one version of a file, without reading it."""
    return f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"'


def _refuse_multipart(operation: str, key: str) -> NoReturn:
    raise StoreError(
        "a folder has no multipart uploads", reason=FailureReason.OTHER, operation=operation, key=key
    )


@contextlib.contextmanager
def _translating(operation: str, key: str) -> Iterator[None]:
    """Turn every OSError into a StoreError of the right reason."""
    try:
        yield
    except FileNotFoundError as error:
        raise ObjectNotFoundError(operation=operation, key=key) from error
    except OSError as error:
        number = error.errno or 0
        if number in _DISK:
            reason, hint = FailureReason.DISK, _DISK[number]
        elif number in _AUTH:
            reason, hint = FailureReason.AUTH, _AUTH[number]
        elif number in _SCARCE:
            reason, hint = FailureReason.TRANSIENT, _SCARCE[number]
        elif isinstance(error, TimeoutError):
            reason, hint = FailureReason.TIMEOUT, "is a writer stopped, or the file system hung?"
        else:
            reason, hint = FailureReason.OTHER, ""
        raise StoreError(str(error), reason=reason, operation=operation, key=key, hint=hint) from error
