"""Lets the ranks of a job decide something together, without waiting for each other."""

from __future__ import annotations

import atexit
import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ckpt_async.errors import SettingsError
from ckpt_async.torch.agreement import is_alone

logger = logging.getLogger(__name__)

# How often the ranks exchange their wishes. A tiny collective takes a fraction of a millisecond of a core.
PERIOD_S = 1.0
MAX_GAP_STEPS = 1000
FOREVER = 1 << 62
END_S = 1.0


class Vote:
    """Takes a vote among all ranks, each of which calls `step` once per training step.

    When any rank has wished for something, `step` returns the highest wish, at the same step on all ranks. About once a
    second the wishes are exchanged (one all-reduce of two numbers, over gloo, beside training) and read one step later,
    so no rank waits unless another is more than a step behind. The first rank's clock determines how many steps lie
    between two exchanges. Creating a `Vote` is a collective of all ranks, in the same order.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._group: Any = None if is_alone() or dist.get_world_size() == 1 else own_group()
        # Exchanges that may not be over, each with its ballot.
        self._pending: list[tuple[Any, torch.Tensor]] = []
        if self._group is not None:
            atexit.register(self._end)
        self._clock = clock
        self._wish = 0
        self._work: Any = None
        self._ballot = torch.zeros(2, dtype=torch.int64)
        self._wait_steps = 0
        self._num_steps, self._counted_at = 0, clock()

    @property
    def num_ranks(self) -> int:
        """The number of ranks that vote; 1 if there is nobody to agree with."""
        return 1 if self._group is None else int(dist.get_world_size(self._group))

    def wish(self, what: int) -> None:
        """Ask for `what`, unless an earlier wish that was not answered yet is higher. May be called from any thread."""
        self._wish = max(self._wish, what)

    def withdraw(self, what: int) -> None:
        """Drop this rank's wish if it is no higher than `what`, because that has been done."""
        if self._wish <= what:
            self._wish = 0

    def step(self) -> int:
        """Return the highest wish of all ranks, once; 0 otherwise."""
        if self._group is None:
            answer, self._wish = self._wish, 0
            return answer
        self._num_steps += 1
        if self._work is not None:
            return self._read()
        if self._wait_steps:
            self._wait_steps -= 1
            return 0
        mine, self._wish = self._wish, 0
        self._cast(mine, self._gap() if dist.get_rank() == 0 else 0)
        return 0

    def leave(self) -> None:
        """Record that this rank takes no more steps. Does not wait.

        The others learn it at their next exchange and stop voting.
        """
        if self._group is not None and self._wait_steps != FOREVER:
            self._cast(0, FOREVER)
            self._wait_steps, self._work = FOREVER, None

    def _cast(self, mine: int, gap_steps: int) -> None:
        self._ballot = torch.tensor([mine, gap_steps], dtype=torch.int64)
        self._work = dist.all_reduce(self._ballot, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = [each for each in self._pending if not each[0].is_completed()]
        self._pending.append((self._work, self._ballot))

    def _end(self) -> None:
        """At exit, wait a second for the other ranks; then keep the group from being destroyed. That would wait for
        them, up to the group's timeout, while they may be waiting, in a collective of training's, for this one to end.
        """
        deadline = time.monotonic() + END_S
        while self._pending and time.monotonic() < deadline:
            self._pending = [each for each in self._pending if not each[0].is_completed()]
            time.sleep(0.005)
        if self._pending:
            # Also what torch's thread would let go of: it cannot take the interpreter's lock any more.
            for kept in (self._group, *(part for each in self._pending for part in each)):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def _read(self) -> int:
        work, self._work = self._work, None
        try:
            work.wait()
        except RuntimeError:  # a rank is gone, which training will notice by itself
            logger.exception("vote_failed; from now on, checkpoints are saved only at the schedule's steps")
            self._wait_steps = FOREVER
            return 0
        answer, self._wait_steps = (int(each) for each in self._ballot)
        if self._wait_steps == FOREVER:
            logger.warning(
                "vote_ended; a rank has closed its saver: from now on, checkpoints are saved only at the"
                " schedule's steps"
            )
        return answer

    def _gap(self) -> int:
        """Return how many steps should pass before the next exchange."""
        now = self._clock()
        step_s = (now - self._counted_at) / self._num_steps
        self._num_steps, self._counted_at = 0, now
        return min(MAX_GAP_STEPS, int(PERIOD_S / step_s)) if step_s > 0 else MAX_GAP_STEPS


def own_group(ranks: Sequence[int] | None = None) -> Any:
    """Return a gloo group of these ranks, by default all, whose collectives may run beside those of training.

    None if torch.distributed is not initialized, or this rank is not in the group. A collective of all ranks, which
    pass the same. A single rank needs it, too: the default group of NCCL cannot save what was copied to the CPU.
    """
    if is_alone():
        return None
    group = dist.new_group(ranks, backend="gloo")
    return group if ranks is None or dist.get_rank() in ranks else None


def require_vote(vote: Vote, world_size: int, what: str) -> None:
    """Refuse a decision that one rank makes for all, if the others would not be told."""
    if vote.num_ranks != world_size:
        raise SettingsError(
            f"{what} is decided by one rank for all, and torch.distributed has {vote.num_ranks} of {world_size} ranks",
            hint="initialize torch.distributed before the saver, or use an interval in steps",
        )
