"""Calls the user's functions when a save is written, committed or failed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckpt_async.core import arguments
from ckpt_async.errors import SettingsError
from ckpt_async.saver.writing import SavedCheckpoint

logger = logging.getLogger(__name__)

Hook = Callable[[SavedCheckpoint], Any]
FailureHook = Callable[[SavedCheckpoint, Exception], Any]


@dataclass(slots=True)
class Hooks:
    """The user's functions, called on the thread that calls `deliver`.

    With `is_at_once` they are called on whichever thread learns of the outcome. An exception in one is logged, because
    neither training nor a checkpoint may depend on it.
    """

    on_saved: Hook | None = None
    on_committed: Hook | None = None
    on_failed: FailureHook | None = None
    is_at_once: bool = False
    _waiting: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = field(default_factory=deque)

    @classmethod
    def of(cls, on_saved: Any, on_committed: Any, on_failed: Any, is_at_once: bool) -> Hooks:
        """Return the hooks. Raises SettingsError for anything that cannot be called."""
        given = {"on_saved": on_saved, "on_committed": on_committed, "on_failed": on_failed}
        for name, each in given.items():
            if each is not None and not callable(each):
                raise SettingsError(f"{name}={arguments.shown(each)} must be a function")
        return cls(on_saved, on_committed, on_failed, is_at_once)

    def saved(self, checkpoint: SavedCheckpoint) -> None:
        self._tell(self.on_saved, checkpoint)

    def committed(self, checkpoint: SavedCheckpoint) -> None:
        self._tell(self.on_committed, checkpoint)

    def failed(self, checkpoint: SavedCheckpoint, error: Exception) -> None:
        self._tell(self.on_failed, checkpoint, error)

    def deliver(self) -> None:
        while self._waiting:
            _call(*self._waiting.popleft())

    def _tell(self, hook: Callable[..., Any] | None, *what: Any) -> None:
        if hook is None:
            return
        if self.is_at_once:
            _call(hook, what)
        else:
            self._waiting.append((hook, what))


def _call(hook: Callable[..., Any], what: tuple[Any, ...]) -> None:
    try:
        hook(*what)
    except Exception:
        logger.exception("hook_failed hook=%r checkpoint=%s", hook, what[0].name)
