"""The queue of uploads: which one is next, and which small ones are sent with it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from ckpt_async.core import decide, order
from ckpt_async.core.backlog import unsent_bytes
from ckpt_async.core.model import CheckpointId
from ckpt_async.engine.book import Book
from ckpt_async.engine.state import State
from ckpt_async.transfer.upload import SERIES_BYTES, SMALL_BYTES

# Up to this many waiting uploads get a connection each, if there are enough. With more, no small one is sent alone,
# because two cost as much as one.
FEW = 8


class UploadQueue:
    """Uploads that are due and wait for a place, in the order of `core/order.py`."""

    def __init__(self, state: State, book: Book) -> None:
        self._state, self._book = state, book
        self._waiting: deque[decide.Upload] = deque()
        self._alone: set[decide.Upload] = set()  # those that could not be sent in a series
        self._places: dict[CheckpointId, int] = {}

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
        running = self._book.running
        ahead = {(each.checkpoint, each.shard) for each in running if isinstance(each, decide.SendAhead)}
        waiting = [
            each
            for each in ready
            # If a shard is still being sent ahead, its parts would be sent twice.
            if each not in running and (not ahead or (each.checkpoint, each.shard) not in ahead)
        ]
        turn, owed = self._state.remote.turn, decide.owed(self._state.local, self._state.policy)
        ordered = {id_: number for number, id_ in enumerate(order.in_order(turn, owed))}
        self._places = self._shared_places(ordered)
        # A stable order: what is not sealed comes last, oldest first.
        self._waiting = deque(sorted(waiting, key=lambda each: ordered.get(each.checkpoint, len(ordered))))

    def _shared_places(self, ordered: Iterable[CheckpointId]) -> dict[CheckpointId, int]:
        """Give checkpoints places by their order. Small ones share a place: one alone would not fill the link."""
        places: dict[CheckpointId, int] = {}
        place = size_bytes = 0
        for id_ in ordered:
            places[id_] = place
            size_bytes += unsent_bytes(self._state.checkpoint(id_))
            if size_bytes > SERIES_BYTES:
                place, size_bytes = place + 1, 0
        return places

    def _running(self) -> list[tuple[decide.Upload, asyncio.Task[None]]]:
        return [(each, task) for each, task in self._book.running.items() if isinstance(each, decide.Upload)]

    @property
    def next_checkpoint(self) -> CheckpointId:
        return self._waiting[0].checkpoint

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
        """Return the next upload, with the following ones that are sent in one series with it.

        They are of the same checkpoint and small. A series is no longer than one place's share of the queue, so that
        the last uploads do not wait behind each other while other places are free.
        """
        store = self._state.store
        share = max(-(-len(self._waiting) // store.concurrency), 2 if len(self._waiting) > FEW else 1)
        most = min(share, store.series_length)
        series = [self._waiting.popleft()]
        size_bytes = self._small_bytes(series[0])
        while self._waiting and len(series) < most:
            size_bytes += self._small_bytes(self._waiting[0])
            if size_bytes > SERIES_BYTES or self._waiting[0].checkpoint != series[0].checkpoint:
                break
            series.append(self._waiting.popleft())
        return tuple(series)

    def _small_bytes(self, upload: decide.Upload) -> int:
        """Return the size of a small shard that is sent from its beginning; for others, more than a series may have."""
        state = self._state
        local = state.checkpoint(upload.checkpoint).shards[upload.shard]
        size_bytes = local.shard.identity.size_bytes
        is_begun = local.multipart is not None or (upload.checkpoint, upload.shard) in state.sent_ahead
        is_inherited = upload.checkpoint.generation < state.local.generation
        if size_bytes > SMALL_BYTES or is_begun or is_inherited or upload in self._alone:
            return SERIES_BYTES + 1
        return size_bytes

    def send_alone(self, uploads: Iterable[decide.Upload]) -> None:
        """Send these alone from now on: they could not be sent in a series."""
        self._alone.update(uploads)

    def put_back(self, series: Sequence[decide.Upload]) -> None:
        """Put what must be sent alone back to the front of the queue.

        So in an outage a few uploads wait, instead of every series running into it.
        """
        self._waiting.extendleft(each for each in reversed(series) if each in self._alone)
