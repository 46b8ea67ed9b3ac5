"""Operations on one file system object, in the thread of a lane: blocking, and allowing for how fsspec really behaves.

fsspec names the methods but leaves much of what they do to each file system. We do not rely on `exists` and `isdir`
(any error means no), `find` and `walk` (they skip folders that cannot be listed), `rm_file` and `rmdir` (WebDAV removes
everything below), or on closing a file after a failure (that writes what there is).
"""

from __future__ import annotations

import contextlib
import datetime as dt
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_async.core.model import Checksum
from ckpt_async.errors import FailureReason, IntegrityError, StoreError
from ckpt_async.stores.checksums import Digest, checksum_of
from ckpt_async.stores.fsspec.lanes import FileSystem
from ckpt_async.stores.interface import ObjectInfo
from ckpt_async.stores.tree import OWN

ALGORITHM = "crc64nvme"
_SLICE_BYTES = 4 << 20
# How often to retry when another process removes a folder, which it found empty, before it is used.
_PARENT_ATTEMPTS = 5

# On SSH, rename atomically replaces what is there (posix-rename@openssh.com), and rmdir fails on a non-empty folder.
_POSIX = frozenset({"sftp", "ssh", "sshfs"})
_MODIFIED = ("mtime", "modified", "LastModified", "last_modified", "updated", "modify", "created")


@dataclass(frozen=True, slots=True)
class Manners:
    """How a file system behaves, as known for its kind or found out by `probe`."""

    is_posix: bool = False
    renames: bool = False  # if not, an object is written under its final key from the start
    replaces: bool = False  # a rename replaces what is there
    has_folders: bool = True  # they must be created
    has_times: bool = True
    copies: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """One file. `etag` tells versions apart as well as the file system can: by size and time if it has no ETags."""

    size_bytes: int
    etag: str
    modified_at: float | None

    def info(self, key: str, checksum: Checksum | None = None) -> ObjectInfo:
        return ObjectInfo(key, self.size_bytes, self.etag, checksum, self.modified_at)


def is_posix(file_system: FileSystem) -> bool:
    protocols = file_system.protocol
    return not _POSIX.isdisjoint([protocols] if isinstance(protocols, str) else protocols)


class Files:
    """Files below `root`, a path in the file system's notation. Used by one thread at a time."""

    def __init__(self, file_system: FileSystem, root: str, manners: Manners, made: set[str]) -> None:
        self._fs, self._root, self._manners = file_system, root, manners
        self._made = made  # folders known to exist, shared with the other lanes

    def path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    # --- looking -------------------------------------------------------------------------------------------

    def found(self, key: str) -> Found:
        """Look up a file. Raises FileNotFoundError if it is missing or is not a file."""
        self._fs.invalidate_cache()
        info = self._fs.info(self.path(key))
        if info.get("type") != "file":
            raise FileNotFoundError(key)
        return _found(info)

    def is_folder(self, key: str) -> bool:
        self._fs.invalidate_cache()
        try:
            return bool(self._fs.info(self.path(key)).get("type") == "directory")
        except FileNotFoundError:
            return False

    def is_root_there(self) -> bool:
        """Return whether the root is a folder. Raises StoreError if a file is in its place, or above it on a POSIX-like
        file system: that is a wrong URL, not a first launch.
        """
        self._fs.invalidate_cache()
        path = self._root
        while path.strip("/"):
            try:
                kind = self._fs.info(path).get("type")
            except FileNotFoundError:
                if not self._manners.is_posix:
                    return False  # an object above it would not matter either
                path = path.rstrip("/").rpartition("/")[0]
                continue
            if kind == "directory":
                return path == self._root
            raise StoreError(
                "there is a file instead of a folder",
                reason=FailureReason.OTHER,
                operation="open",
                key=path,
                hint="check the URL",
            )
        return path == self._root and self.is_folder("")

    def walk(self, folder: str, prefix: str) -> Iterator[tuple[str, Found]]:
        """Yield every file below `folder` ("" or ending in "/") whose key starts with `prefix`, in no particular order,
        without following links. Errors are raised: a partial listing would be taken for a complete one.
        """
        path = self.path(folder.removesuffix("/"))
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return  # it never existed, or was deleted since its parent was read: the caller checks the root
        for entry in entries:
            whole = str(entry["name"]).rstrip("/")
            if whole.strip("/") == path.strip("/"):
                continue  # a file of that name, or the folder's own marker
            key = folder + whole.rpartition("/")[2]
            if entry.get("type") == "directory":
                below = f"{key}/"
                if key != OWN and (below.startswith(prefix) or prefix.startswith(below)):
                    yield from self.walk(below, prefix)
            elif entry.get("type") == "file" and key.startswith(prefix):
                yield key, _found(entry)

    def read(self, key: str, offset: int, size_bytes: int, take: Callable[[memoryview], object]) -> None:
        """Read exactly these bytes. Raises IntegrityError if the file ends earlier."""
        path, end = self.path(key), offset + size_bytes
        if self._manners.is_posix:
            self._read_opened(path, key, offset, end, take)
            return
        while offset < end:
            stop = min(end, offset + _SLICE_BYTES)
            data = self._fs.cat_file(path, start=offset, end=stop)
            _check_length(key, data, stop - offset)
            take(memoryview(data))
            offset = stop

    def _read_opened(
        self, path: str, key: str, offset: int, end: int, take: Callable[[memoryview], object]
    ) -> None:
        with self._fs.open(path, "rb") as file:
            # Paramiko: without it, each 32 KiB waits for the previous ones.
            ahead = getattr(file, "readv", None)
            if ahead is None:
                file.seek(offset)
            else:
                _say_once(file)
            while offset < end:
                count = min(end - offset, _SLICE_BYTES)
                data = b"".join(ahead([(offset, count)])) if ahead else file.read(count)
                _check_length(key, data, count)
                take(memoryview(data))
                offset += count

    def checksum(self, key: str, size_bytes: int) -> Checksum:
        """Return the checksum of what is read from the file: the file system keeps none."""
        digest = Digest(ALGORITHM)
        self.read(key, 0, size_bytes, digest.update)
        return digest.checksum()

    # --- writing -------------------------------------------------------------------------------------------

    def write(self, key: str, pieces: Iterable[bytes], size_bytes: int, checksum: Checksum) -> Found:
        """Write under a temporary name, read back, and rename into place, if the file system can rename. A failure
        leaves nothing behind.
        """
        at = f"{OWN}/{secrets.token_hex(16)}" if self._manners.renames else key
        before = self._found_or_none(key) if at == key else None
        try:
            self._into_parent(at, lambda: self._write_whole(at, pieces, size_bytes, checksum, key))
            try:
                self._read_back(at, size_bytes, checksum, key)
                if at != key:
                    self._into_parent(key, lambda: self._rename(at, key))
            except FileNotFoundError as error:
                raise StoreError(
                    f"what was written does not exist: {error}",
                    reason=FailureReason.TRANSIENT,
                    operation="put",
                    key=key,
                ) from error
        except BaseException:
            with contextlib.suppress(Exception):
                # A partial object, in place of what was there.
                if at != key or self._found_or_none(key) != before:
                    self._fs.rm_file(self.path(at))
            raise
        return self.found(key)

    def _found_or_none(self, key: str) -> Found | None:
        try:
            return self.found(key)
        except FileNotFoundError:
            return None

    def _write_whole(
        self, at: str, pieces: Iterable[bytes], size_bytes: int, checksum: Checksum, key: str
    ) -> None:
        file = self._fs.open(self.path(at), "wb")
        try:
            if hasattr(file, "set_pipelined"):
                # paramiko: without it, each 32 KiB waits for the previous ones; `close` reports the errors
                file.set_pipelined(True)
            digest, written = Digest(checksum.algorithm), 0
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
                written += len(piece)
            if written != size_bytes or digest.checksum() != checksum:
                raise IntegrityError("the bytes do not have the declared checksum", operation="put", key=key)
            file.close()
        except BaseException:
            _discard(file)
            raise

    def _read_back(self, at: str, size_bytes: int, checksum: Checksum, key: str) -> None:
        there = self.found(at)
        digest = Digest(checksum.algorithm)
        if there.size_bytes == size_bytes:
            self.read(at, 0, size_bytes, digest.update)
        if there.size_bytes != size_bytes or digest.checksum() != checksum:
            with contextlib.suppress(Exception):
                self._fs.rm_file(self.path(at))
            raise IntegrityError("what was read back differs from what was sent", operation="put", key=key)

    def _rename(self, at: str, key: str) -> None:
        source, target = self.path(at), self.path(key)
        if not self._manners.replaces:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(target)
        rename(self._fs, source, target)

    def _into_parent(self, key: str, place: Callable[[], None]) -> None:
        """Call `place` after creating the parent folders, and again if another process has removed one in between."""
        parent = key.rpartition("/")[0]
        for _ in range(_PARENT_ATTEMPTS):
            self.make_folder(parent)
            try:
                place()
            except FileNotFoundError:
                self._made.discard(parent)
            else:
                return
        self.make_folder(parent)
        place()

    def make_folder(self, folder: str) -> None:
        if folder in self._made or not self._manners.has_folders:
            return
        try:
            self._fs.makedirs(self.path(folder), exist_ok=True)
        except Exception:
            # Another process may have made it at the same time; file systems report that in different ways.
            if not self.is_folder(folder):
                raise
        self._made.add(folder)

    def copy(self, source: str, key: str) -> None:
        """Copy a file, replacing what is there."""
        one, other = self.path(source), self.path(key)
        if (webdav := _webdav(self._fs)) is not None:
            self._into_parent(key, lambda: webdav.copy(one, other, overwrite=True))
        else:
            self._into_parent(key, lambda: self._fs.cp_file(one, other))

    def delete(self, key: str) -> None:
        """Delete a file, and the folders that it leaves empty. Looks first, because WebDAV would delete a folder with
        all its contents.
        """
        try:
            self.found(key)
            self._fs.rm_file(self.path(key))
        except FileNotFoundError:
            return
        if self._manners.is_posix:
            with contextlib.suppress(OSError):
                while key := key.rpartition("/")[0]:
                    self._made.discard(key)
                    self._fs.rmdir(self.path(key))

    def left_over(self, before: float) -> list[str]:
        """Delete the temporary files of writers that died, and return their keys."""
        old = [key for key, found in self._own() if (found.modified_at or before) < before]
        for key in old:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self.path(key))
        return old

    def _own(self) -> Iterator[tuple[str, Found]]:
        return self.walk(f"{OWN}/", f"{OWN}/")


def probe(file_system: FileSystem, root: str) -> tuple[Manners, float | None]:
    """Find out how the file system behaves, by means of two small files; return that and the modification time of the
    one just written. Errors are passed on: a place that cannot be written is no place for checkpoints.
    """
    posix = is_posix(file_system)
    # To begin with, assume that folders must be created and that nothing can be renamed.
    files = Files(file_system, root, Manners(is_posix=posix), set())
    files.make_folder(OWN)
    has_folders = files.is_folder(OWN)
    one, two = (f"{OWN}/probe-{secrets.token_hex(8)}" for _ in "ab")
    written: Found | None = None
    replaces = False
    can_rename = posix or _renames(file_system)
    try:
        written = files.write(one, [b"a"], 1, checksum_of(b"a", ALGORITHM))
        files.write(two, [b"b"], 1, checksum_of(b"b", ALGORITHM))
        if can_rename:
            with contextlib.suppress(Exception):
                rename(file_system, files.path(two), files.path(one))
                found: list[bytes] = []
                files.read(one, 0, 1, lambda piece: found.append(bytes(piece)))
                replaces = found == [b"b"]
    finally:
        for each in (one, two):
            with contextlib.suppress(Exception):
                file_system.rm_file(files.path(each))
    manners = Manners(
        is_posix=posix,
        renames=can_rename,
        replaces=replaces,
        has_folders=has_folders,
        has_times=written.modified_at is not None,
        copies=not posix and _overrides(file_system, "cp_file", "_cp_file"),
    )
    return manners, written.modified_at


def rename(file_system: FileSystem, source: str, target: str) -> None:
    """Rename a file with a single request."""
    if (webdav := _webdav(file_system)) is not None:
        webdav.move(source, target, overwrite=True)  # webdav4's own `mv` copies and then deletes a file
    else:
        file_system.mv(source, target)


def _renames(file_system: FileSystem) -> bool:
    return _webdav(file_system) is not None or _overrides(file_system, "mv", "mv_file", "_mv_file")


def _webdav(file_system: FileSystem) -> Any:
    """Return webdav4's client, which can overwrite; its file system never does."""
    client = getattr(file_system, "client", None)
    return client if hasattr(client, "move") and hasattr(client, "copy") else None


def _overrides(file_system: FileSystem, *names: str) -> bool:
    """Return whether the file system has its own implementation: fsspec's would move the bytes through this machine, or
    does not exist.
    """
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    kind = type(file_system)
    ours = (getattr(kind, name, None) for name in names)
    theirs = [getattr(base, name, None) for base in (AbstractFileSystem, AsyncFileSystem) for name in names]
    return any(each is not None and each not in theirs for each in ours)


def _discard(file: Any) -> None:
    """Let go of an incomplete file. Closing it would store it, on file systems that send a file when it is closed."""
    with contextlib.suppress(Exception):
        if not hasattr(file, "discard"):
            file.close()
            return
        file.discard()
        if hasattr(file, "_upload_chunk"):  # fsspec's AbstractBufferedFile
            file.closed = True  # else its finalizer would close it


def _say_once(file: Any) -> None:
    """Silence the thread in which paramiko reads ahead: when the connection breaks, it ends with a traceback on stderr.
    The reader gets an exception anyway.
    """
    asks = getattr(file, "_prefetch_thread", None)
    if asks is not None:

        def ask(*arguments: Any) -> None:
            with contextlib.suppress(EOFError, OSError):
                asks(*arguments)

        file._prefetch_thread = ask  # noqa: SLF001


def _check_length(key: str, data: bytes, wanted: int) -> None:
    if len(data) != wanted:
        raise IntegrityError("was truncated while being read", operation="get", key=key)


def _found(info: Mapping[str, Any]) -> Found:
    size_bytes = info.get("size")
    if not isinstance(size_bytes, int):
        raise StoreError(
            f"the file system does not report the size of {info.get('name')!r}", reason=FailureReason.OTHER
        )
    modified_at = next((at for name in _MODIFIED if (at := _seconds(info.get(name))) is not None), None)
    etag = info.get("etag") or info.get("ETag")
    if not (isinstance(etag, str) and etag):
        etag = f'"{size_bytes:x}-{int((modified_at or 0) * 1e6):x}"'
    return Found(size_bytes, etag, modified_at)


def _seconds(at: object) -> float | None:
    if isinstance(at, str):
        try:
            at = dt.datetime.fromisoformat(at)
        except ValueError:
            return None
    if isinstance(at, dt.datetime):
        return (at if at.tzinfo is not None else at.replace(tzinfo=dt.UTC)).timestamp()
    return float(at) if isinstance(at, int | float) and not isinstance(at, bool) else None
