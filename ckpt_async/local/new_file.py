"""A file that appears under its name once it is whole."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ckpt_async.errors import CkptAsyncError, DestinationError
from ckpt_async.local.durable import fsync_descriptor
from ckpt_async.local.folder import is_disk_full, no_space

# What file systems and kernels that cannot make a file without a name answer.
_NO_NAMELESS = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL})
_BUFFER_BYTES = 1 << 20


@contextlib.contextmanager
def new_file(target: Path, *, overwrite: bool) -> Iterator[IO[bytes]]:
    """A binary file that has the name `target` when the context is left, and never had it before; missing folders are
    made. Left by an exception, or killed, it is gone, and what was there before stays.

    Until it is named the file has no name at all, so that the kernel removes it behind a SIGKILL. Where a file system
    cannot do this, it is a hidden file beside `target`, which stays behind then. The bytes are durable once the caller
    fsyncs them; those that replace a file are it first.

    Raises DestinationError if the target exists (with `overwrite`, if it is a folder) or cannot be written,
    NoSpaceError if the disk is full.
    """
    if os.path.lexists(target) and (not overwrite or target.is_dir()):
        raise _taken(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        hidden = target.with_name(f".ckpt_async-{secrets.token_hex(8)}.tmp")
        with _open(hidden) as file:
            try:
                yield file
                file.flush()
                _publish(file, hidden, target, overwrite)
            finally:
                hidden.unlink(missing_ok=True)
    except CkptAsyncError:
        raise
    except OSError as error:
        if is_disk_full(error):
            raise no_space(target) from error
        raise DestinationError(f"{str(target)!r} cannot be written: {error.strerror or error}") from error


def _open(hidden: Path) -> IO[bytes]:
    if os.path.exists("/proc/self/fd"):  # where a nameless file gets its name
        try:
            descriptor = os.open(hidden.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666)
            return os.fdopen(descriptor, "wb", _BUFFER_BYTES)
        except OSError as error:
            if error.errno not in _NO_NAMELESS:
                raise
    return hidden.open("xb", _BUFFER_BYTES)


def _publish(file: IO[bytes], hidden: Path, target: Path, overwrite: bool) -> None:
    if overwrite and os.path.lexists(target):
        fsync_descriptor(file.fileno(), target)  # the old one is given up for bytes that are on disk
    if not hidden.exists():
        _name(file, hidden if overwrite else target)
    if hidden.exists():
        _rename(hidden, target, overwrite)


def _name(file: IO[bytes], path: Path) -> None:
    """Give a nameless file its first name."""
    try:
        # With the descriptor of a folder, though it does not count, `link` follows the link in /proc.
        os.link(f"/proc/self/fd/{file.fileno()}", path, src_dir_fd=file.fileno(), follow_symlinks=True)
    except FileExistsError:
        raise _taken(path) from None


def _rename(hidden: Path, target: Path, overwrite: bool) -> None:
    if not overwrite:
        try:
            os.link(hidden, target)  # unlike a rename, it replaces nothing
            return
        except FileExistsError:
            raise _taken(target) from None
        except OSError:  # no hard links here
            if os.path.lexists(target):
                raise _taken(target) from None
    os.replace(hidden, target)


def _taken(target: Path) -> DestinationError:
    if target.is_dir():
        return DestinationError(f"{str(target)!r} is a folder: it was left alone", hint="use another name")
    return DestinationError(
        f"{str(target)!r} already exists: it was left alone", hint="use another name, or pass overwrite=True"
    )
