"""Where an engine runs: on a thread of the trainer (`thread`), or in a separate process (`process`, `child`).

`host` has the life of an engine, the same in both. What an engine does, and every rule, lives elsewhere.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ckpt_async.core.failures import Failure
from ckpt_async.core.local_state import Local
from ckpt_async.core.model import CheckpointId, Decided, RemoteAddress
from ckpt_async.core.observe import Observer
from ckpt_async.core.settings import Settings
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal, RankLock
from ckpt_async.stores import StoreOptions


@dataclass(frozen=True, slots=True)
class Start:
    """What an engine is started with: plain values, so that they can go to another process."""

    folder: str
    rank: int
    world_size: int
    address: RemoteAddress
    options: StoreOptions
    settings: Settings
    launch_key: str
    explicit_generation: int | None = None
    member: str = field(
        default_factory=lambda: uuid.uuid4().hex
    )  # by which a rank's place is known as its own
    kind: str = ""  # of the checkpoints; `address` is that of the kind
    wants: str = ""  # which sinks want which events: see `events.telling`
    is_again: bool = False  # whether a process that died on the way may have agreed on the generation
    # Set when it follows an engine that died: this start's generation, which was agreed by that one.
    generation: int | None = None


class EngineView(Protocol):
    """What a trainer sees of its engine, and may ask of it. From any thread, without blocking."""

    num_due: int
    last_seen_wake: int

    @property
    def fenced_by(self) -> int | None: ...
    @property
    def absent_ranks(self) -> list[int] | None:
        """As `look_for_members` found them, or the first of many."""

    @property
    def outcomes(self) -> dict[CheckpointId, Decided]: ...
    @property
    def failures(self) -> deque[Failure]: ...
    @property
    def local(self) -> Local:
        """The state as the engine knows it, or newer."""

    def fresh_local(self) -> Local:
        """The state with everything that is in the journal by now."""

    def missing_ranks(self, id_: CheckpointId) -> list[int]:
        """Ranks whose receipts were not there at the last look, or some of them if there are many."""

    def wake(self) -> int:
        """Have the engine look at the journal now. Once `last_seen_wake` has reached the number that this returns,
        `num_due` counts what was in the journal before the call.
        """

    def hurry(self, is_hurried: bool) -> None:
        """Whether someone waits, for the other ranks or for what failed, which is tried again at once."""

    def look_for_members(self) -> None:
        """Have the engine find out who never opened this generation, and whether a newer one has begun."""

    def put_newest_first(self, is_newest_first: bool = True) -> None:
        """Whether the newest sealed checkpoint goes before all others."""


class Runner(Protocol):
    """Runs one rank's engine until `end`."""

    death: BaseException | None  # why there is no engine any more, although nobody asked for its end

    @property
    def engine(self) -> EngineView | None:
        """None before `start` has returned."""

    def start(self) -> int:
        """Start the engine and return the generation that was agreed. Blocks until then, and raises what keeps it
        from starting; then nothing runs any more.
        """

    @property
    def is_alive(self) -> bool:
        """Whether there is, or soon will be again, an engine that works."""

    def expect_end(self) -> None:
        """From now on a crash of the engine is told rather than healed."""

    def end(self) -> None:
        """Stop the engine, whatever it is doing, and wait until it has let go of everything. Idempotent."""


class MakeRunner(Protocol):
    """How either of them is made; nothing is started yet."""

    def __call__(
        self,
        start: Start,
        folder: Folder,
        journal: Journal,
        lock: RankLock,
        observer: Observer,
        on_change: Callable[[], None],
    ) -> Runner: ...


def runner_of(name: str) -> MakeRunner:
    """The runner that the setting `runner` names, imported when it is asked for."""
    if name == "process":
        from ckpt_async.runners.process import ProcessRunner

        return ProcessRunner
    from ckpt_async.runners.thread import ThreadRunner

    return ThreadRunner
