"""Where an engine runs: on a thread of the trainer (`thread`), or in a separate process (`process`, `child`).

`host` has the life cycle of an engine, which is the same in both. What an engine does, and every rule, is
elsewhere.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ckpt_async.core.failures import Failing, Failure, Outcomes
from ckpt_async.core.local_state import Local
from ckpt_async.core.model import CheckpointId, RemoteAddress
from ckpt_async.core.observe import Observer
from ckpt_async.core.settings import Settings
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal, RankLock
from ckpt_async.stores import StoreOptions


@dataclass(frozen=True, slots=True)
class Start:
    """The arguments for starting an engine: plain values, so that they can be sent to another process."""

    folder: str
    rank: int
    world_size: int
    address: RemoteAddress
    options: StoreOptions
    settings: Settings
    launch_key: str
    explicit_generation: int | None = None
    member: str = field(default_factory=lambda: uuid.uuid4().hex)  # identifies a rank's place as its own
    kind: str = ""  # of checkpoints; `address` is that of the kind
    wants: str = ""  # which sinks want which events: see `events.telling`
    # Whether an earlier process, which died on the way, may have agreed on the generation.
    is_again: bool = False
    # Set if this engine follows one that died: this launch's generation, on which that engine had agreed.
    generation: int | None = None


class EngineView(Protocol):
    """A trainer's view of its engine, and what it may ask of it. Safe from any thread, without blocking."""

    num_due: int
    last_seen_wake: int

    @property
    def fenced_by(self) -> int | None: ...
    @property
    def absent_ranks(self) -> list[int] | None:
        """The absent ranks that `look_for_members` found, or the first of them if there are many."""

    @property
    def outcomes(self) -> Outcomes: ...
    @property
    def failures(self) -> deque[Failure]: ...
    @property
    def failing(self) -> frozenset[Failing]:
        """The actions that failed and are still due, or some of them if there are many."""

    @property
    def store_error(self) -> str:
        """The error of the last request that failed, in words, although others may have succeeded since; or ""."""

    @property
    def local(self) -> Local:
        """The state as the engine knows it, or newer."""

    def fresh_local(self) -> Local:
        """Return the state with everything that is in the journal by now."""

    def missing_ranks(self, id_: CheckpointId) -> list[int]:
        """Return the ranks whose receipts were missing at the last look, or some of them if there are many."""

    def wake(self) -> int:
        """Have the engine read the journal now. Once `last_seen_wake` has reached the number that this returns,
        `num_due` counts everything that was in the journal before the call.
        """

    def hurry(self, is_hurried: bool) -> None:
        """Say whether someone waits: for the other ranks, or for failed uploads, which are then retried at once."""

    def look_for_members(self) -> None:
        """Have the engine find out which ranks never opened this generation, and whether a newer one has begun."""

    def turn_to_newest(self) -> None:
        """Have the newest sealed checkpoint uploaded next, whatever is being sent."""


class Runner(Protocol):
    """Runs one rank's engine until `end`."""

    death: BaseException | None  # why there is no engine any more, although nobody ended it

    @property
    def engine(self) -> EngineView | None:
        """The engine; None before `start` has returned."""

    def start(self) -> int:
        """Start the engine and return the agreed generation. Blocks until then. If the engine cannot start, it
        raises the reason, and nothing is left running.
        """

    @property
    def is_alive(self) -> bool:
        """Whether there is a working engine, or soon will be again."""

    def expect_end(self) -> None:
        """Report a crash of the engine from now on rather than heal it."""

    def end(self) -> None:
        """Stop the engine, whatever it is doing, and wait until it has released everything. Idempotent."""


MakeRunner = Callable[[Start, Folder, Journal, RankLock, Observer, Callable[[], None]], Runner]
"""Makes a runner of either kind, without starting anything. The last argument is called on every change."""
