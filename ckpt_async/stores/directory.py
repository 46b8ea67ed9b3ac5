"""A folder as a store, `file:///folder`: a local disk, NFS, Lustre, or a mounted bucket.

Every write goes through these steps: temporary file in the same file system → write → fsync → read back → link or
replace → fsync of the parent and of every newly made folder. The checksum that the store answers is computed from what
it reads back, though the page cache may have served that read.

Times are the file system's: the store touches a file in the folder and reads its time, which NFS takes from its server.
Only a store that was opened read-only has to rely on this machine's clock.

Create-once is a hard link, which is atomic on POSIX file systems and NFS (open(2), O_EXCL). A compare-and-swap excludes
other writers by flock. Where one of the two does not exclude the writers of other machines, which only the type of the
file system tells, writes are not conditional: rank 0 alone decides.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from io import FileIO
from pathlib import Path

from ckpt_async.core.keys import PRIVATE, RESERVE
from ckpt_async.core.model import Checksum
from ckpt_async.errors import (
    IntegrityError,
    PreconditionFailedError,
)
from ckpt_async.filesystems import excludes_all_writers, filesystem_of
from ckpt_async.stores.bodies import LocalWriter, send_in_thread
from ckpt_async.stores.checks import check_prefix, check_size
from ckpt_async.stores.checksums import Digest, checksum_of
from ckpt_async.stores.interface import (
    REQUEST_TIMEOUT_S,
    Body,
    Capabilities,
    Condition,
    Create,
    Enough,
    Listing,
    Match,
    ObjectInfo,
    Sink,
    SmallGet,
    SmallPut,
)
from ckpt_async.stores.one_by_one import put_one_by_one
from ckpt_async.stores.tree import Tree, sync_folder, unlink_if_there
from ckpt_async.stores.whole import WholeObjects, check_folder_key, check_limit, check_range, check_same
from ckpt_async.threads import in_thread

logger = logging.getLogger(__name__)

_ALGORITHM = "crc64nvme"
# Large enough that a thread hop per slice costs nothing, small enough to stay in the cache.
_SLICE_BYTES = 4 << 20
# How many small objects are read per thread hop: one hop for each object would cost a third of the throughput. A
# cancelled call waits for all of them.
_AT_A_TIME = 8
# Page size of a listing that may end early. It is large because each further page reads again the folders that lead to
# where it starts.
PAGE_KEYS = 20_000


class DirectoryStore(WholeObjects):
    """Objects as files below `root`. Blocking calls run in the loop's default executor.

    A cancelled call returns only after its running disk operation has ended, because that uses the buffer and
    descriptor.
    """

    no_parts = "a folder has no multipart uploads"

    def __init__(self, root: Path | str, *, url: str = "") -> None:
        self._tree = Tree(Path(root))
        capabilities = Capabilities(conditional_put=True, multipart=False, checksum_algorithm=_ALGORITHM)
        super().__init__(url or f"file://{self._tree.root}", capabilities)

    async def open(
        self,
        *,
        is_read_only: bool = False,
        request_timeout_s: float = REQUEST_TIMEOUT_S,  # noqa: ARG002  threads are waited for
    ) -> None:
        """Make the folder if it is missing and try one write, one hard link and one lock in it.

        `conditional_put` is False where hard links do not work, and on file systems of which it is not known that they
        exclude the writers of other machines. That is logged.
        """
        with self._tree.translating("open", str(self._tree.root)):
            if is_read_only:
                await in_thread(self._tree.open_to_read)
                return
            can_link = await in_thread(self._tree.open_to_write)
            place = await in_thread(filesystem_of, self._tree.root)
        why = ""
        if not can_link:
            why = f"rank 0 alone decides: there are no hard links on {place or 'this file system'}"
        elif not excludes_all_writers(place):
            why = f"rank 0 alone decides: what one machine sees on {place} may not be what another sees"
        if why:
            logger.warning("store_promises_less url=%s %s", self._url, why)
        self._capabilities = replace(
            self._capabilities, conditional_put=not why, place=place, remarks=(why,) if why else ()
        )

    async def close(self) -> None:
        await in_thread(self._tree.close)

    async def put(
        self, key: str, body: Body, checksum: Checksum, *, condition: Condition = None
    ) -> ObjectInfo:
        check_folder_key(key, "put")
        with self._tree.translating("put", key):
            held = contextlib.ExitStack()
            try:
                # Of a file, the mode; a record may be read by all who may read the folder.
                mode = getattr(body, "mode", 0o666)
                temporary, file = await in_thread(self._tree.create_temporary, held, mode)
                if not key.startswith(PRIVATE):
                    await in_thread(self._tree.take_space, temporary, body.size_bytes, held)
                await send_in_thread(body, LocalWriter(partial(_write_all, file.fileno())))
                stored = await in_thread(_sync_and_read_back, file, checksum.algorithm)
                if stored != checksum:
                    raise IntegrityError(
                        f"the bytes have {stored.value}, not {checksum.value}", operation="put", key=key
                    )
                status = await in_thread(self._publish, temporary, key, condition)
            finally:
                await in_thread(held.close)
        return _info(key, status, stored)

    async def put_many(self, puts: Iterable[SmallPut], stored: Callable[[ObjectInfo], None]) -> None:
        await put_one_by_one(self, puts, stored)

    async def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        check_folder_key(key, "get")
        with self._tree.translating("get", key):
            return await in_thread(self._read_whole, key, max_size_bytes)

    async def get_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> ObjectInfo:
        check_folder_key(key, "get_range")
        return await in_thread(self._read_range, key, offset, size_bytes, sink)

    async def get_many(self, gets: Iterable[SmallGet], got: Callable[[SmallGet, memoryview], None]) -> None:
        left = iter(gets)
        while await in_thread(self._read_many, itertools.islice(left, _AT_A_TIME), got):
            pass

    async def head(self, key: str) -> ObjectInfo:
        """As specified, with a checksum: computing it reads the whole file."""
        check_folder_key(key, "head")
        with self._tree.translating("head", key):
            return await in_thread(self._read_back, key)

    async def list(self, prefix: str, *, start_after: str = "", enough: Enough | None = None) -> Listing:
        check_prefix(prefix, "list")
        with self._tree.translating("list", prefix):
            return await in_thread(self._walk, prefix, start_after, enough)

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_folder_key(key, "delete")
        for key in keys:
            with self._tree.translating("delete", key):
                await in_thread(self._delete, key)

    async def delete_if(self, key: str, etag: str) -> None:
        check_folder_key(key, "delete")
        with self._tree.translating("delete", key):
            await in_thread(self._delete, key, etag)

    async def copy(self, source: str, etag: str, key: str) -> None:
        """Make a hard link: another name for the same file. Without hard links, the bytes are copied."""
        check_folder_key(source, "copy")
        check_folder_key(key, "copy")
        with self._tree.translating("copy", source):
            await in_thread(self._copy, source, etag, key)

    # --- writing; everything below blocks and runs in a worker thread --------------------------------------

    def _publish(self, temporary: Path, key: str, condition: Condition) -> os.stat_result:
        """Make a finished, synced file visible under its key, durably, and return the status of what is visible now."""
        target = self._tree.path(key)
        is_exclusive = isinstance(condition, Match) or self._tree.ignores_case
        with self._tree.locked() if is_exclusive else contextlib.nullcontext():
            self._tree.check_spelling(key)
            match condition:
                case None:
                    self._tree.into_parent(target, lambda: os.replace(temporary, target))
                case Create():
                    try:
                        self._tree.into_parent(target, lambda: os.link(temporary, target))
                    except OSError:  # some say EPERM or EIO rather than EEXIST
                        if not os.path.lexists(target):
                            raise
                        raise PreconditionFailedError(operation="put", key=key) from None
                case Match(etag):
                    _make_newer(temporary, self._check_is(key, etag, "put"))
                    os.replace(temporary, target)
            self._tree.check_spelling(key)  # some change it: lowntfs-3g makes all names lower case
        status = os.stat(target, follow_symlinks=False)
        sync_folder(target.parent)
        return status

    def _check_is(self, key: str, etag: str, operation: str) -> os.stat_result:
        """Return the status of the version of a file that is there now, unless it has another ETag. Needs the lock.

        Shared file systems remember for a while what a name stood for. So a new name is made for the file.
        """
        with contextlib.ExitStack() as held:
            try:
                status = os.lstat(self._tree.link_temporary(key, held) or self._tree.path(key))
            except FileNotFoundError:
                raise PreconditionFailedError("there is no object", operation=operation, key=key) from None
        check_same(key, _etag(status), etag, operation)
        return status

    def _copy(self, source: str, etag: str, key: str) -> None:
        with contextlib.ExitStack() as held:
            descriptor = self._tree.open(source)
            held.callback(os.close, descriptor)
            check_same(source, _etag(os.fstat(descriptor)), etag, "copy")
            temporary = self._tree.link_temporary(source, held)
            # Files are never modified in place: the file that was linked is either the one opened above, or has just
            # been swapped in.
            if temporary is None:
                temporary = self._copy_bytes(descriptor, held)
            else:
                check_same(source, _etag(os.stat(temporary)), etag, "copy")
            self._publish(temporary, key, None)

    def _copy_bytes(self, source: int, held: contextlib.ExitStack) -> Path:
        temporary, file = self._tree.create_temporary(held, os.fstat(source).st_mode)
        with file:
            offset = 0
            while data := os.pread(source, _SLICE_BYTES, offset):
                _write_all(file.fileno(), memoryview(data))
                offset += len(data)
            os.fsync(file.fileno())
        return temporary

    def _delete(self, key: str, etag: str | None = None) -> None:
        path = self._tree.path(key)
        if not self._tree.has(path):
            self._tree.check_there("delete", key)
            if etag is not None:
                raise PreconditionFailedError(operation="delete", key=key)
            return
        with self._tree.locked():
            if etag is not None:
                self._check_is(key, etag, "delete")
            unlink_if_there(path)
            sync_folder(path.parent)
        if key != RESERVE:
            self._tree.reserve()  # again, if it was released
        # Best effort: a parent that is in use stays, and a shared file system may refuse.
        parent = path.parent
        with contextlib.suppress(OSError):
            while parent != self._tree.root:
                parent.rmdir()
                parent = parent.parent

    # --- reading -------------------------------------------------------------------------------------------

    def _read_whole(self, key: str, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        with open(self._tree.open(key), "rb") as file:
            status = os.fstat(file.fileno())
            check_limit(key, status.st_size, max_size_bytes)
            data = file.read()
        return data, _info(key, status, checksum_of(data, _ALGORITHM))

    def _read_many(self, gets: Iterable[SmallGet], got: Callable[[SmallGet, memoryview], None]) -> int:
        """Return how many were read."""
        num_read = 0
        for each in gets:
            check_folder_key(each.key, "get")
            with self._tree.translating("get", each.key):
                data, _ = self._read_whole(each.key, each.size_bytes)
                check_size(len(data), each)
            got(each, memoryview(data))  # its errors are not translated
            num_read += 1
        return num_read

    def _read_range(self, key: str, offset: int, size_bytes: int, sink: Sink) -> ObjectInfo:
        with self._tree.translating("get_range", key):
            descriptor = self._tree.open(key)
        try:
            status = os.fstat(descriptor)
            check_range(key, status.st_size, offset, size_bytes)
            end = offset + size_bytes
            buffer = memoryview(bytearray(min(size_bytes, _SLICE_BYTES)))
            while offset < end:
                with self._tree.translating("get_range", key):
                    count = os.preadv(descriptor, [buffer[: end - offset]], offset)
                    if count == 0:
                        raise IntegrityError("was truncated while being read", operation="get_range", key=key)
                sink(buffer[:count])  # its errors are not translated
                offset += count
        finally:
            os.close(descriptor)
        return _info(key, status)

    def _read_back(self, key: str) -> ObjectInfo:
        descriptor = self._tree.open(key)
        try:
            return _info(key, os.fstat(descriptor), _checksum_file(descriptor, _ALGORITHM))
        finally:
            os.close(descriptor)

    def _walk(self, prefix: str, start_after: str, enough: Enough | None) -> Listing:
        self._tree.check_there("list", prefix)
        now = self._tree.now()
        start = prefix.rpartition("/")[0]
        found: list[ObjectInfo] = []
        is_whole = True
        for key, entry in self._tree.files(f"{start}/" if start else "", now, start_after):
            if not key.startswith(prefix):
                continue
            if enough is not None and found and len(found) % PAGE_KEYS == 0 and enough(found):
                is_whole = False
                break
            with contextlib.suppress(FileNotFoundError):  # deleted since its folder was read
                found.append(_info(key, entry.stat(follow_symlinks=False)))
        self._tree.check_there("list", prefix)
        return Listing(tuple(found), now, is_whole)


def _make_newer(path: Path, than: os.stat_result) -> None:
    """Raise a file's time until it is greater than another's. So every version of a swapped object differs from all
    earlier ones: an inode number can be given out again, within one tick of the file system's clock, which is a second
    on some. Raises OSError if it keeps no times.
    """
    os.utime(path)
    for step_ns in (1, 10**9):
        if os.stat(path).st_mtime_ns > than.st_mtime_ns:
            return
        os.utime(path, ns=(than.st_mtime_ns + step_ns, than.st_mtime_ns + step_ns))
    if os.stat(path).st_mtime_ns <= than.st_mtime_ns:
        raise OSError(errno.EINVAL, "the file system does not keep the time that a file is given", str(path))


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _sync_and_read_back(file: FileIO, algorithm: str) -> Checksum:
    """Do so, and close the file."""
    with file:
        os.fsync(file.fileno())
        return _checksum_file(file.fileno(), algorithm)


def _checksum_file(descriptor: int, algorithm: str) -> Checksum:
    digest = Digest(algorithm)
    buffer = memoryview(bytearray(_SLICE_BYTES))
    offset = 0
    while count := os.preadv(descriptor, [buffer], offset):
        digest.update(buffer[:count])
        offset += count
    return digest.checksum()


def _info(key: str, status: os.stat_result, checksum: Checksum | None = None) -> ObjectInfo:
    return ObjectInfo(key, status.st_size, _etag(status), checksum, status.st_mtime)


def _etag(status: os.stat_result) -> str:
    """Return the ETag of one version of a file, without reading it."""
    return f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"'
