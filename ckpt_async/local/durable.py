"""Durable writes: fsync, files that are replaced whole, symlinks that are never missing."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ckpt_async.core import errnos
from ckpt_async.errors import InvalidNameError


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
