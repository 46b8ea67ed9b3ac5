"""Repeated reading of a folder's journals for what is new in them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from ckpt_async.core.local_state import Local, fold
from ckpt_async.core.model import CheckpointId
from ckpt_async.errors import NoJournalError
from ckpt_async.local import journals


class Replay:
    """The state that the journals of one kind of checkpoints describe, for every rank of the folder. For one thread
    at a time.
    """

    def __init__(self, folder: str | os.PathLike[str], kind: str = "") -> None:
        self._folder, self._kind = folder, kind
        self._places: dict[int, journals.Place] = {}
        self.is_there = False
        self.locals: dict[int, Local] = {}  # by rank
        self.progress: dict[
            int, Mapping[tuple[CheckpointId, str], int]
        ] = {}  # bytes sent of unfinished shards

    def look(self) -> None:
        """Fold in new rows. Raises JournalError."""
        found: dict[int, journals.Reading] = {}
        self.is_there = False
        with contextlib.suppress(NoJournalError):  # before the first uploader of the node has opened
            found = journals.read(self._folder, kind=self._kind, after=self._places)
            self.is_there = True
        self.locals = {
            rank: reading.local() if reading.is_whole else fold(reading.rows, self.locals[rank])
            for rank, reading in found.items()
        }
        self._places = {rank: reading.place for rank, reading in found.items()}
        self.progress = {rank: reading.progress for rank, reading in found.items()}
