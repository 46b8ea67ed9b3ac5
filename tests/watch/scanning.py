"""A folder that is scanned, without a store."""

import time
from collections.abc import Callable
from pathlib import Path

from ckpt_async.formats import Rules
from ckpt_async.watch.entries import Entries
from ckpt_async.watch.options import Options
from ckpt_async.watch.reporter import Reporter
from ckpt_async.watch.room import Room
from ckpt_async.watch.scanner import FolderScanner
from ckpt_async.watch.wake import Waker


class Place:
    """One folder, and what is told of it."""

    def __init__(self, base: Path) -> None:
        self.folder = base / "out"
        self.folder.mkdir()
        self.entries = Entries(self.folder, base / "state", "memory://")
        self.room = self.entries.room = Room(base / "state")
        self.entries.load()
        self.told: list[tuple[str, str]] = []
        self.reporter, self.waker = Reporter(lambda each: self.told.append((each.event, each.path))), Waker()
        self._base = base

    def scanner(
        self, rules: Rules, num_nodes: int = 1, *, clock: Callable[[], float] = time.monotonic
    ) -> FolderScanner:
        state, lock = self._base / "state", self._base / "lock"
        options = Options(self.folder, "memory://", state, lock, rules=rules, num_nodes=num_nodes)
        return FolderScanner(options, self.entries, self.reporter, self.waker, self.room, clock=clock)
