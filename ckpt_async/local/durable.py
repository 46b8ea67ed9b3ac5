"""Durable writes: fsync, files that are replaced whole, symlinks that are never missing."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from ckpt_async.core import errnos
from ckpt_async.errors import CkptAsyncError, DestinationError, InTheWayError, InvalidNameError
from ckpt_async.local.folder import no_space


class FsyncError(OSError):
    """The disk did not accept what was written. This is final: the kernel may have dropped the pages, and the next
    fsync reports success (https://lwn.net/Articles/752063/), so a successful retry must not be trusted.
    """


def is_final(error: OSError) -> bool:
    """Return whether the disk has failed, as opposed to lack of space or permission."""
    return isinstance(error, FsyncError) or errnos.meaning_of(error)[0] is errnos.Meaning.DAMAGED


def fsync_path(path: str | os.PathLike[str]) -> None:
    """fsync a file or folder. Raises FsyncError; other OSErrors if it cannot be opened."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync_descriptor(descriptor, path)
    finally:
        os.close(descriptor)


def fsync_descriptor(descriptor: int, path: str | os.PathLike[str]) -> None:
    """fsync an open file or folder; error messages call it `path`. Raises FsyncError; OSError if there is no space for
    the names in a folder, of which none is dropped: a full btrfs refuses before it writes anything.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if errnos.is_full(error) and stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise FsyncError(error.errno, f"fsync failed ({error.strerror})", os.fspath(path)) from error


def with_those_above(folders: Iterable[str], top: str) -> set[str]:
    """These folders, which are in `top`, and every folder on the way to them, `top` included. All of them must be
    fsynced, or power loss may take a new folder with everything in it.
    """
    found = set(folders)
    for folder in found.copy():
        above = folder
        while len(above) > len(top) and (above := above.rpartition("/")[0]) not in found:
            found.add(above)
    return found


def write_durably(path: Path, data: bytes) -> None:
    """Replace the content of `path` with `data` atomically; durable on return. Readers see either the old or the
    new content, never a mixture.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # after a failure this may be repeated: it writes another file
        temporary.replace(path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:  # errors of write() have no file name
            error.filename = str(path)
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def point_symlink(link: Path, target: Path, private: Path) -> None:
    """Make `link` a relative symlink to `target`; readers never find it missing (fault F20). Whatever a kill
    leaves half done is in `private`, where the next `Folder` removes it.

    The link's folder is made if it is missing. Refuses to replace anything that is not a symlink, or not a folder,
    because that belongs to the user.
    """
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise InvalidNameError(f"{str(link.parent)!r} is not a folder; nothing is linked there") from None
    if os.path.lexists(link):
        if not link.is_symlink():
            raise InvalidNameError(f"{str(link)!r} exists and is not a symlink; it was left alone")
        if os.readlink(link) == os.path.relpath(target, link.parent):
            return
    temporary = private / f"{link.name}.{os.getpid()}.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(target, link.parent))
    temporary.replace(link)
    fsync_path(link.parent)


# --- a file that appears under its name only when it is complete --------------------------------------------


_BUFFER_BYTES = 1 << 20


@contextlib.contextmanager
def new_file(target: Path, *, overwrite: bool) -> Iterator[IO[bytes]]:
    """Yield a binary file that gets the name `target` when the block ends, and not before; missing folders are
    created. If the block raises or the process is killed, the new file is gone, and whatever `target` was before
    stays.

    Until then the file has no name at all, so the kernel removes it even after a SIGKILL. On file systems without
    support for this, it is a hidden file beside `target`, which a SIGKILL leaves behind. The bytes are durable once
    the caller fsyncs them; bytes that replace a file are fsynced first.

    Raises DestinationError if the target exists (with `overwrite`, if it is a folder) or cannot be written,
    NoSpaceError if the disk is full.
    """
    if os.path.lexists(target) and (not overwrite or target.is_dir()):
        raise _taken(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        hidden = target.with_name(f".ckpt-async-{secrets.token_hex(8)}.tmp")
        with _open_new(hidden) as file:
            try:
                yield file
                file.flush()
                _publish(file, hidden, target, overwrite)
            finally:
                hidden.unlink(missing_ok=True)
    except CkptAsyncError:
        raise
    except OSError as error:
        if errnos.is_full(error):
            raise no_space(target) from error
        raise DestinationError(f"{str(target)!r} cannot be written: {error.strerror or error}") from error


def _open_new(hidden: Path) -> IO[bytes]:
    if os.path.exists("/proc/self/fd"):  # a nameless file gets its name through this folder
        try:
            descriptor = os.open(hidden.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666)
            return os.fdopen(descriptor, "wb", _BUFFER_BYTES)
        except OSError as error:
            if error.errno not in errnos.UNSUPPORTED:  # by the file system, or the kernel
                raise
    return hidden.open("xb", _BUFFER_BYTES)


def _publish(file: IO[bytes], hidden: Path, target: Path, overwrite: bool) -> None:
    if overwrite and os.path.lexists(target):
        fsync_descriptor(file.fileno(), target)  # the old file is given up only for bytes that are on disk
    if not hidden.exists():
        _give_name(file, hidden if overwrite else target)
    if hidden.exists():
        _rename(hidden, target, overwrite)


def _give_name(file: IO[bytes], path: Path) -> None:
    """Give a nameless file its first name."""
    try:
        # Passing `src_dir_fd` makes `os.link` follow the symlink in /proc; its value does not matter for an
        # absolute path.
        os.link(f"/proc/self/fd/{file.fileno()}", path, src_dir_fd=file.fileno(), follow_symlinks=True)
    except FileExistsError:
        raise _taken(path) from None


def _rename(hidden: Path, target: Path, overwrite: bool) -> None:
    if not overwrite:
        try:
            os.link(hidden, target)  # unlike a rename, this replaces nothing
            return
        except FileExistsError:
            raise _taken(target) from None
        except OSError:  # no hard links on this file system
            if os.path.lexists(target):
                raise _taken(target) from None
    os.replace(hidden, target)


def _taken(target: Path) -> InTheWayError:
    if target.is_dir():
        return InTheWayError(f"{str(target)!r} is a folder; it was left alone", hint="use another name")
    return InTheWayError(
        f"{str(target)!r} already exists; it was left alone", hint="use another name, or pass overwrite=True"
    )
