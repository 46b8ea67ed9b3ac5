"""A file that appears under its name only when it is complete."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ckpt_async.core import errnos
from ckpt_async.errors import CkptAsyncError, DestinationError
from ckpt_async.local.durable import fsync_descriptor
from ckpt_async.local.folder import no_space

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
        if errnos.is_full(error):
            raise no_space(target) from error
        raise DestinationError(f"{str(target)!r} cannot be written: {error.strerror or error}") from error


def _open(hidden: Path) -> IO[bytes]:
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
        _name(file, hidden if overwrite else target)
    if hidden.exists():
        _rename(hidden, target, overwrite)


def _name(file: IO[bytes], path: Path) -> None:
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


def _taken(target: Path) -> DestinationError:
    if target.is_dir():
        return DestinationError(f"{str(target)!r} is a folder; it was left alone", hint="use another name")
    return DestinationError(
        f"{str(target)!r} already exists; it was left alone", hint="use another name, or pass overwrite=True"
    )
