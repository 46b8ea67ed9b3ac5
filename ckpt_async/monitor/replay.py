"""Repeated reading of a folder's journals for what is new in them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from ckpt_async.core.local_state import Local, fold
from ckpt_async.core.model import CheckpointId
from ckpt_async.errors import NoJournalError
from ckpt_async.local import journals

# The share of one core that is spent on replaying whole journals: for a checkpoint of 10,000 shards a replay
# takes a third of a second of the trainer's GIL. New rows are folded in at every look regardless.
REPLAY_SHARE = 0.01


class Replay:
    """The state that the journals of one kind of checkpoints describe, for every rank of the folder. For one thread
    at a time.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        kind: str = "",
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._folder, self._kind, self._clock = folder, kind, clock
        self._due_at = float("-inf")
        self._places: dict[int, journals.Place] = {}
        self.is_there = False
        self.locals: dict[int, Local] = {}  # by rank
        self.progress: dict[int, dict[tuple[CheckpointId, str], int]] = {}  # bytes sent of unfinished shards

    def look(self) -> None:
        """Fold in new rows. From time to time, start again from the beginning, because rows also disappear
        (`Journal.forget`) without notice. Only rows of decided checkpoints disappear, so the queue is never wrong.
        Raises JournalError.
        """
        started = self._clock()
        is_due = started >= self._due_at
        found: dict[int, journals.Reading] = {}
        self.is_there = False
        with contextlib.suppress(NoJournalError):  # before the first uploader of the node has opened
            places = {} if is_due else self._places
            found = journals.read(self._folder, kind=self._kind, after=places)
            self.is_there = True
        self.locals = {
            rank: reading.local() if reading.is_whole else fold(reading.rows, self.locals[rank])
            for rank, reading in found.items()
        }
        self._places = {rank: reading.place for rank, reading in found.items()}
        self.progress = {rank: reading.progress for rank, reading in found.items()}
        if is_due:
            ended = self._clock()
            self._due_at = ended + (ended - started) / REPLAY_SHARE
