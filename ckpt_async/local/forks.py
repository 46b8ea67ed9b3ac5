"""What a forked child must let go of."""

from __future__ import annotations

import os
from typing import ClassVar, Protocol


class Abandoned(Protocol):
    """A handle of the parent that a forked child must let go of."""

    def abandon(self) -> None: ...


class _AfterFork:
    """Handles that a forked child must let go of. One `register_at_fork` for the life of the process."""

    _is_registered: ClassVar[bool] = False

    def __init__(self) -> None:
        self._handles: set[Abandoned] = set()

    def add(self, handle: Abandoned) -> None:
        if not _AfterFork._is_registered:
            os.register_at_fork(after_in_child=self._abandon_all)
            _AfterFork._is_registered = True
        self._handles.add(handle)

    def discard(self, handle: Abandoned) -> None:
        self._handles.discard(handle)

    def _abandon_all(self) -> None:
        for handle in self._handles:
            handle.abandon()
        self._handles.clear()


after_fork = _AfterFork()
