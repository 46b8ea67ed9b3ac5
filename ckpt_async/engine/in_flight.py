"""The actions that an engine is carrying out, and those that it must not begin yet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence

from ckpt_async.core import decide, failures
from ckpt_async.core.failures import Troubles

logger = logging.getLogger(__name__)


class InFlight:
    """The actions under way, with their tasks, and the actions that failed.

    Several actions with one task are a series of uploads.
    """

    def __init__(self) -> None:
        self.running: dict[decide.Action, asyncio.Task[None]] = {}
        self._not_before: dict[decide.Action, float] = {}  # when failed actions may be tried again
        # Those of the failed actions that the store or a full disk refuses only for now.
        self._may_heal: set[decide.Action] = set()
        self._troubles = Troubles()

    def begin(self, actions: Sequence[decide.Action], task: asyncio.Task[None]) -> None:
        self.running |= dict.fromkeys(actions, task)

    def end(self, actions: Sequence[decide.Action]) -> None:
        for action in actions:
            del self.running[action]

    def is_in_use(self, action: decide.Action) -> bool:
        """Return whether an action must wait for one that is under way.

        A manifest written after the release would be left behind, and of two moves of the symlink, the older could
        finish last.
        """
        if isinstance(action, decide.MoveLocalLatest):
            return any(isinstance(each, decide.MoveLocalLatest) for each in self.running)
        return isinstance(action, decide.Release) and decide.MakeDurable(action.checkpoint) in self.running

    # --- what failed ---------------------------------------------------------------------------------------

    def hold_back(self, action: decide.Action, error: Exception, now: float, *, is_hurried: bool) -> float:
        """Note that an action failed, and return for how long it is not tried again."""
        pause_s = failures.retry_in_s(error, is_hurried=is_hurried)
        if failures.may_heal(error):
            self._may_heal.add(action)
        self._not_before[action] = now + pause_s
        return pause_s

    def held_until(self, action: decide.Action) -> float:
        """Return when an action may be started again; the distant past if it did not fail or is running."""
        if not self._not_before or action in self.running:
            return float("-inf")
        return self._not_before.get(action, float("-inf"))

    def may_heal(self, action: decide.Action) -> bool:
        return action in self._may_heal

    def retry_all(self) -> None:
        self._not_before.clear()

    def forget_all_but(self, due: Collection[decide.Action]) -> None:
        self._not_before = {action: at for action, at in self._not_before.items() if action in due}
        self._may_heal &= self._not_before.keys()

    def note_trouble(self, action: decide.Action, error: Exception, pause_s: float, now: float) -> None:
        """Log the first failure of its kind; the others are counted."""
        kind = type(error), getattr(error, "reason", None), getattr(error, "errno", None)
        text = f"action={action} retry_in_s={pause_s:.0f} error={str(error) or repr(error)}"
        if self._troubles.is_new(kind, text, now):
            logger.warning("action_failed %s", text)

    def tell_of_troubles(self, now: float, *, is_end: bool = False) -> None:
        for num, for_s, last in self._troubles.due(now, is_end=is_end):
            logger.warning("action_failed num_more=%d for_s=%.0f last: %s", num, for_s, last)
