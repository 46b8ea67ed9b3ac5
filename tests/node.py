"""The journals of several ranks of one folder, for tests that look at all of them."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from ckpt_async.core.model import Event
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal


class Node:
    """The journals of a node's ranks. Each is opened when it is first written."""

    def __init__(self, folder: Folder, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder, clock
        self._journals: dict[int, Journal] = {}

    def __getitem__(self, rank: int) -> Journal:
        if rank not in self._journals:
            self._journals[rank] = Journal(self._folder, rank, clock=self._clock)
        return self._journals[rank]

    def append(self, rank: int, events: Iterable[Event]) -> None:
        self[rank].append(events)

    def note_progress(self, rank: int, sent: Any) -> None:
        self[rank].note_progress(sent)

    def close(self) -> None:
        for each in self._journals.values():
            each.close()
