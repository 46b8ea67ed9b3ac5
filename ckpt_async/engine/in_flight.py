"""The actions that an engine is carrying out, those that it must not begin yet, and the queue of uploads."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence

from ckpt_async.core import decide, failures, order
from ckpt_async.core.backlog import unsent_bytes
from ckpt_async.core.failures import Troubles
from ckpt_async.core.model import CheckpointId
from ckpt_async.engine.state import State
from ckpt_async.transfer.upload import SERIES_BYTES, SMALL_BYTES

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

    def log_troubles(self, now: float, *, is_end: bool = False) -> None:
        for num, for_s, last in self._troubles.due(now, is_end=is_end):
            logger.warning("action_failed num_more=%d for_s=%.0f last: %s", num, for_s, last)


# --- the queue of uploads -----------------------------------------------------------------------------------


class UploadQueue:
    """Uploads that are due and wait for a place, in the order of `core/order.py`."""

    def __init__(self, state: State, in_flight: InFlight) -> None:
        self._state, self._in_flight = state, in_flight
        self._waiting: deque[decide.Upload] = deque()
        self._alone: set[decide.Upload] = set()  # those that could not be sent in a series
        self._places: dict[CheckpointId, int] = {}
        self._num_uploading: Counter[CheckpointId] = Counter()  # series under way
        # When the last of a checkpoint's series began, or its bytes were last seen moving.
        self._moved_at: dict[CheckpointId, float] = {}
        self._asks_since: float | None = None  # when it became due to ask for the target
        self._is_resting = False

    def __len__(self) -> int:
        return len(self._waiting)

    def clear(self) -> None:
        self._waiting.clear()

    def refill(self, ready: Iterable[decide.Upload], due: Collection[decide.Action]) -> None:
        """Replace the queue by the uploads that may start.

        Uploads that are under way but no longer `due` are stopped: their checkpoint was given up, and their bytes would
        only have to be deleted again.
        """
        self._alone = {each for each in self._alone if each in due}
        for action, task in self._running():
            if action not in due:
                task.cancel()
        running = self._in_flight.running
        ahead = {(each.checkpoint, each.shard) for each in running if isinstance(each, decide.SendAhead)}
        waiting = [
            each
            for each in ready
            # If a shard is still being sent ahead, its parts would be sent twice.
            if each not in running and (not ahead or (each.checkpoint, each.shard) not in ahead)
        ]
        now, local, turn = self._state.now(), self._state.local, self._state.uploads.turn
        owed = decide.owed(local, self._state.policy)
        self._is_resting = order.is_resting(turn, now, is_open=order.is_open(local, turn.target))
        is_asking = decide.NameTarget() in due and now >= self._in_flight.held_until(decide.NameTarget())
        self._asks_since = (self._asks_since or now) if is_asking else None
        ordered = {id_: number for number, id_ in enumerate(order.in_order(turn, owed))}
        unsent = ((id_, unsent_bytes(local.checkpoints[id_])) for id_ in ordered)
        self._places = order.places(unsent, SERIES_BYTES)
        # A stable order: what is not sealed comes last, oldest first.
        self._waiting = deque(sorted(waiting, key=lambda each: ordered.get(each.checkpoint, len(ordered))))

    def _running(self) -> list[tuple[decide.Upload, asyncio.Task[None]]]:
        return [
            (each, task) for each, task in self._in_flight.running.items() if isinstance(each, decide.Upload)
        ]

    def may_begin(self, *, after: CheckpointId | None = None) -> bool:
        """Return whether the next upload may begin now. `after`: only if it is of this checkpoint, too."""
        if not self._waiting or after not in (None, self._waiting[0].checkpoint):
            return False
        store, now, own = self._state.store, self._state.now(), self.place_of(self._waiting[0].checkpoint)
        self._moved_at |= {each: now for each in self._num_uploading if store.is_moving(each)}
        places = {each: self.place_of(each) for each in self._num_uploading}
        moving = (place for each, place in places.items() if now - self._moved_at[each] < order.BEGINNING_S)
        asks_for_s = None if self._asks_since is None else now - self._asks_since
        num_beside = sum(num for each, num in self._num_uploading.items() if places[each] == own)
        return num_beside < store.concurrency and order.may_begin(
            own, moving, is_resting=self._is_resting, asks_for_s=asks_for_s
        )

    def place_of(self, checkpoint: CheckpointId) -> int:
        """Return the checkpoint's place in the order of uploads; those with the same place share the link.

        What is not sealed comes last.
        """
        return self._places.get(checkpoint, len(self._places))

    def stop_all_but(self, checkpoint: CheckpointId | None) -> None:
        """Stop the uploads of all others, whose finished parts are kept: the link is needed for this one."""
        self.clear()  # otherwise others could still start before the next round
        for action, task in self._running():
            if action.checkpoint != checkpoint:
                task.cancel()

    # --- series --------------------------------------------------------------------------------------------

    def next_series(self) -> tuple[decide.Upload, ...]:
        """Return the next upload, with the following ones that are sent in one series with it; `ended` when it is.

        They are of the same checkpoint and small.
        """
        store = self._state.store
        most = order.series_length(len(self._waiting), store.concurrency, store.series_length)
        series = [self._waiting.popleft()]
        size_bytes = self._small_bytes(series[0])
        while self._waiting and len(series) < most:
            size_bytes += self._small_bytes(self._waiting[0])
            if size_bytes > SERIES_BYTES or self._waiting[0].checkpoint != series[0].checkpoint:
                break
            series.append(self._waiting.popleft())
        self._num_uploading[series[0].checkpoint] += 1
        self._moved_at[series[0].checkpoint] = self._state.now()
        return tuple(series)

    def ended(self, series: Sequence[decide.Upload]) -> None:
        self._num_uploading[series[0].checkpoint] -= 1
        self._num_uploading += Counter()  # drops those that are done
        self._moved_at = {id_: self._moved_at[id_] for id_ in self._num_uploading}
        if len(series) > 1:
            self._put_back(series)

    def _small_bytes(self, upload: decide.Upload) -> int:
        """Return the size of a small shard that is sent from its beginning; for others, more than a series may have."""
        state = self._state
        local = state.checkpoint(upload.checkpoint).shards[upload.shard]
        size_bytes = local.shard.identity.size_bytes
        is_begun = local.multipart is not None or (upload.checkpoint, upload.shard) in state.progress.ahead
        is_inherited = upload.checkpoint.generation < state.local.generation
        if size_bytes > SMALL_BYTES or is_begun or is_inherited or upload in self._alone:
            return SERIES_BYTES + 1
        return size_bytes

    def send_alone(self, uploads: Iterable[decide.Upload]) -> None:
        """Send these alone from now on: they could not be sent in a series."""
        self._alone.update(uploads)

    def _put_back(self, series: Sequence[decide.Upload]) -> None:
        """Put what must be sent alone back to the front of the queue.

        So in an outage a few uploads wait, instead of every series running into it.
        """
        self._waiting.extendleft(each for each in reversed(series) if each in self._alone)
