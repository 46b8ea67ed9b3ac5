"""The file object of `Uploader.open`: a shard that is uploaded while it is written."""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ckpt_async.errors import InvalidShardError
from ckpt_async.threads import promptly

BUFFER_BYTES = 1 << 20


class ShardWriter(io.BufferedWriter):
    """A new, seekable binary file whose `close` enqueues it. If its `with` block raises, or it is dropped without
    `close`, it is removed, and the checkpoint goes on without it.

    Finished parts are sent while later ones are written. Going back to change them is allowed; they are then sent
    again.
    """

    def __init__(
        self,
        path: Path,
        enqueue: Callable[[], None],
        drop: Callable[[], None],
        drop_later: Callable[[], None],
        *,
        replaces_before: float,
    ) -> None:
        """Open the file. When it ends, `enqueue` or `drop` is called, or `drop_later`, which must take no lock, by
        the garbage collector. An existing file that was last modified before `replaces_before` (Unix time) was left
        by an earlier launch and is replaced, never written to; any other raises InvalidShardError.
        """
        self.path = path
        self._enqueue, self._drop, self._drop_later = enqueue, drop, drop_later
        self._pid = os.getpid()
        self._has_ended = True  # until opening has succeeded
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.realpath(path.parent) != str(path.parent):
            raise InvalidShardError(f"a symbolic link on the path to {str(path)!r} leads out of the folder")
        _remove_left(path, replaces_before)
        try:
            raw = io.FileIO(path, "xb")
        except FileExistsError:
            raise InvalidShardError(
                f"{str(path)!r} already exists", hint="a shard is never overwritten: use another name or step"
            ) from None
        super().__init__(raw, BUFFER_BYTES)
        self._has_ended = False

    @promptly()
    def close(self) -> None:
        """Finish the file and enqueue it. If this raises, with the errors of `Uploader.enqueue`, the file stays and
        can be passed to `enqueue`. Idempotent.
        """
        if self._has_ended or self._is_foreign():
            return
        try:
            self._has_ended = True
            self.flush()
            super().close()
            self._enqueue()
        except BaseException:
            with contextlib.suppress(OSError):
                super().close()  # after Ctrl-C, the file is whole all the same
            self._drop()
            raise

    def abandon(self) -> None:
        """Remove the file instead of enqueueing it. Idempotent; does nothing once the file was closed."""
        if self._remove():
            self._drop()

    def _remove(self) -> bool:
        if self._has_ended or self._is_foreign():
            return False
        self._has_ended = True
        with contextlib.suppress(OSError):
            super().close()
        self.path.unlink(missing_ok=True)
        return True

    def _is_foreign(self) -> bool:
        """Return whether this is a forked child, whose copy must neither write nor remove its parent's file."""
        return os.getpid() != self._pid

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    def __del__(self) -> None:
        """Abandon a file that was dropped without `close`: the garbage collector must not enqueue an incomplete
        file. It may run in any thread at any moment, also in the middle of a call that holds the uploader's locks.
        """
        with contextlib.suppress(Exception):
            if self._remove():
                self._drop_later()


def _remove_left(path: Path, before: float) -> None:
    """Remove a file left by an earlier launch. If that launch had enqueued it, its content lives on in the spool,
    under its own inode.
    """
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_mtime < before:
            path.unlink()
