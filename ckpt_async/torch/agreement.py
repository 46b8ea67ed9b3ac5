"""What the ranks of a job do together when they resume: agree on a value, or let one rank act for all.

Uses `torch.distributed` with any backend that can move objects (gloo; NCCL with its device set); without it, there is
one rank. Objects between ranks are pickled, because the ranks of one job trust each other. Every rank must call these
functions; each call is one collective and waits no longer than the process group's timeout.
"""

from __future__ import annotations

import os
import pickle
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ckpt_async.core import launch
from ckpt_async.errors import (
    CheckpointGoneError,
    DamagedCheckpointError,
    RankFailedError,
    RanksDisagreeError,
    SettingsError,
)

T = TypeVar("T")


def is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized())


def own_rank() -> int:
    """Return torch.distributed's rank, or else the launcher's; 0 if there is neither."""
    if not is_alone():
        return dist.get_rank()
    try:
        return launch.rank_and_world_size(os.environ, None, None)[0]
    except SettingsError:
        return 0


def rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size: those given, else the launcher's, else torch.distributed's (as with `mp.spawn`).

    Raises SettingsError, as `launch.rank_and_world_size` does.
    """
    if rank is None and world_size is None and not os.environ.get("RANK") and not is_alone():
        return dist.get_rank(), dist.get_world_size()
    return launch.rank_and_world_size(os.environ, rank, world_size)


def agree(value: object, *, what: str, group: dist.ProcessGroup | None = None) -> None:
    """Return if all ranks have an equal `value`; otherwise raise RanksDisagreeError on all of them.

    The error names who has what; of a mapping, it names the first key whose values differ. Use it for values that print
    well, such as a step or a checkpoint's id: they are compared by their `repr`.
    """
    if is_alone():
        return
    # Each rank's text is sent with its global rank: a position in a subgroup tells the reader nothing.
    told: list[Any] = [None] * dist.get_world_size(group)
    parts = value if isinstance(value, Mapping) else {"": value}
    own = {str(name): repr(each) for name, each in parts.items()}
    dist.all_gather_object(told, (dist.get_rank(), own), group=group)
    for name in {name: None for _, texts in told for name in texts}:
        ranks: dict[str, list[int]] = {}
        for rank, texts in told:
            ranks.setdefault(texts.get(name, "nothing"), []).append(rank)
        if len(ranks) == 1:
            continue
        commonest_first = sorted(ranks.items(), key=lambda each: (-len(each[1]), each[1]))
        who = "; ".join(f"{text[:200]} on {spell(those)}" for text, those in commonest_first)
        raise RanksDisagreeError(f"ranks disagree about {what}: {f'{name}: ' if name else ''}{who}")


def spell(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 0-2, 5`, which stays readable with 10,000 ranks."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return f"rank{'s' * (len(ranks) > 1)} " + ", ".join("-".join(map(str, run)) for run in runs)


def told_by_all(value: T, *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's value, in the order of the ranks. A collective."""
    if is_alone():
        return [value]
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, value, group=group)
    return told


def run_on_one(fn: Callable[[], T], *, rank: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """Call `fn` on the global `rank` only, and return its result on every rank.

    If it raises, or its result cannot be sent, every rank raises RankFailedError, so that nobody waits forever. The
    message and a note with the traceback are those of the rank that failed; the cause is the exception itself wherever
    that can be sent. KeyboardInterrupt and SystemExit are raised unchanged on the rank where they occurred.
    """
    if is_alone():
        return fn()
    if dist.get_rank() != rank:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=rank, group=group)
        received, told = pickle.loads(box[0])  # noqa: S301  from a rank of our own job
        if told is not None:
            raise told.as_error()
        return cast(T, received)
    raised: BaseException | None = None
    try:
        result = fn()
        sent = _pickled(result)
    except BaseException as error:  # noqa: BLE001  an interrupted rank must tell the others, too, or they hang
        raised = error
        failure = _Failure(rank, error)
        sent = pickle.dumps((None, failure))
    dist.broadcast_object_list([sent], src=rank, group=group)
    if raised is None:
        return result
    if not isinstance(raised, Exception):
        raise raised
    raise failure.as_error() from raised


def _pickled(result: object) -> bytes:
    try:
        sent = pickle.dumps((result, None))
        pickle.loads(sent)  # noqa: S301  else what only this rank can read would fail on the others
    except Exception as error:
        raise TypeError(f"its result, of type {type(result).__name__}, cannot be pickled: {error}") from error
    return sent


def on_all_ranks(work: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Call `work` on every rank and return each rank's own result. A collective.

    If it raises on any rank, all ranks raise: DamagedCheckpointError if a checkpoint could not be used on one of them,
    so that all may try another; otherwise their own error, or RankFailedError, which names the ranks that failed and
    why.
    """
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  raised below, on every rank
        failure = error
    own = None if failure is None else (0 if is_alone() else dist.get_rank(), sendable(failure))
    told = [each for each in told_by_all(own, group=group) if each is not None]
    if not told:
        return result
    for rank, each in told:
        if isinstance(each, DamagedCheckpointError | CheckpointGoneError):
            raise DamagedCheckpointError(f"rank {rank}: {each}") from (failure or each)
    if failure is not None:
        raise failure
    who = "; ".join(f"rank {rank} failed: {type(each).__name__}: {each}" for rank, each in told[:5])
    more = f"; and {len(told) - 5} more ranks" if told[5:] else ""
    raise RankFailedError(f"{who}{more}") from told[0][1]


def launch_id(group: dist.ProcessGroup | None = None) -> str | None:
    """Return a text that all ranks of this launch share and no other launch has: `Uploader(…, launch_id=launch_id())`.

    It is a random text that the first rank sends to the others in one collective, so every rank of the group must call
    it. None if torch.distributed is not initialized: then the launcher's values apply, as without this.
    """
    if is_alone():
        return None
    first = 0 if group is None else dist.get_global_rank(group, 0)
    return run_on_one(lambda: uuid.uuid4().hex, rank=first, group=group)


class _Failure:
    """An exception in a form that can be sent: its text always, and the exception itself if it can be pickled."""

    def __init__(self, rank: int, error: BaseException) -> None:
        self.rank = rank
        self.text = f"{type(error).__name__}: {error}"
        self.traceback = "".join(traceback.format_exception(error))
        self.cause: BaseException | None = None
        try:
            self.cause = pickle.loads(pickle.dumps(error))  # noqa: S301  our own
        except Exception:  # noqa: BLE001  then its text has to suffice
            return

    def as_error(self) -> RankFailedError:
        error = RankFailedError(f"rank {self.rank} failed: {self.text}")
        error.add_note(self.traceback)
        error.__cause__ = self.cause
        return error


def sendable(error: Exception) -> Exception:
    """Return the error itself or, if it cannot be sent, an error with its text: the other ranks wait for one."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  our own
    except Exception:  # noqa: BLE001
        return RankFailedError(f"{type(error).__name__}: {error}")
    return error
