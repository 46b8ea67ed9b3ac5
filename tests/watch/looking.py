"""A folder that is looked at, without a store."""

from pathlib import Path

from ckpt_async.watch.entries import Entries
from ckpt_async.watch.formats import Rules
from ckpt_async.watch.holds import Holds
from ckpt_async.watch.lookout import Lookout
from ckpt_async.watch.options import Options
from ckpt_async.watch.room import Room
from ckpt_async.watch.telling import Teller
from ckpt_async.watch.wake import Waker


class Place:
    """One folder, and what is told of it."""

    def __init__(self, base: Path) -> None:
        self.folder = base / "out"
        self.folder.mkdir()
        self.entries, self.holds = (
            Entries(self.folder, base / "state", "memory://"),
            Holds(self.folder, base / "held"),
        )
        self.room = self.entries.room = Room(self.folder, base / "state")
        self.entries.load()
        self.holds.load()
        self.told: list[tuple[str, str]] = []
        self.teller, self.waker = Teller(lambda each: self.told.append((each.event, each.path))), Waker()
        self._base = base

    def lookout(self, rules: Rules, num_nodes: int = 1) -> Lookout:
        state, lock = self._base / "state", self._base / "lock"
        options = Options(self.folder, "memory://", state, lock, rules=rules, num_nodes=num_nodes)
        return Lookout(options, self.entries, self.holds, self.teller, self.waker, self.room)
