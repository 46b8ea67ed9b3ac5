"""What an engine's work came to: decisions, failures, when it tries again, and what is raised in the trainer. Pure."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

from ckpt_async.core import backlog, errnos, keys
from ckpt_async.core.local_state import Local
from ckpt_async.core.model import CheckpointId, Decided, Outcome
from ckpt_async.core.units import in_units, named
from ckpt_async.errors import CkptAsyncError, FencedError, StoreError, UploadFailedError

# How many failures are named in one message.
MAX_TOLD = 3
_GIVEN_UP = "this checkpoint cannot be completed any more; later checkpoints are not affected"
_TRIED_AGAIN = (
    "everything that can still be uploaded is in the spool; it is retried now, at the next launch, and by"
    " `ckpt-async drain`"
)

# An action that failed for good (its own retries are over and the trainer was told) is tried again after this time: an
# outage longer than any timeout must heal without a restart.
RETRY_ACTION_S = 30.0
# The same while someone is waiting, if the store may recover or the disk may get space.
RETRY_HURRIED_S = 1.0
# The shortest time between two lines about one kind of trouble.
AGAIN_S = 60.0

Failing = tuple[CheckpointId, str]  # an action, by its name, that failed and is still due


@dataclass(frozen=True, slots=True)
class Failure:
    """A final failure in the work on a checkpoint: of a shard, or of an action, whose name is given.

    `is_given_up`: the checkpoint will never be committed.
    """

    error: CkptAsyncError
    checkpoint: CheckpointId
    shard: str = ""
    action: str = ""
    is_given_up: bool = False


def has_healed(failure: Failure, local: Local, failing: Collection[Failing]) -> bool:
    """Return whether a later attempt has succeeded, or none is needed any more. `failing` are the actions that failed
    and are still due.
    """
    if failure.is_given_up:
        return False
    checkpoint = local.checkpoints.get(failure.checkpoint)
    if checkpoint is None:
        return True
    if failure.action:
        return (failure.checkpoint, failure.action) not in failing
    if checkpoint.decision is not None:
        return True
    shard = checkpoint.shards.get(failure.shard)
    return shard is not None and shard.stored is not None


def to_raise(
    failures: Iterable[Failure], local: Local, failing: Collection[Failing], told: Collection[CheckpointId]
) -> UploadFailedError | None:
    """Return one error for all failures, or None.

    Leaves out those that have healed and those of checkpoints whose outcome the trainer was already `told`.
    """
    found = [
        each for each in failures if not has_healed(each, local, failing) and each.checkpoint not in told
    ]
    texts = list(dict.fromkeys(str(each.error) for each in found))
    if not texts:
        return None
    hints = {_GIVEN_UP if each.is_given_up else _TRIED_AGAIN: None for each in found}
    more = f"; and {len(texts) - MAX_TOLD} more" if texts[MAX_TOLD:] else ""
    error = UploadFailedError("; ".join(texts[:MAX_TOLD]) + more, hint="; ".join(hints))
    error.__cause__ = found[0].error
    return error


def last_store_error(error: str) -> str:
    """Return what to append to a message that time ran out: the store, or this node's disk, may be why."""
    return f"; the last error was: {error}" if error else ""


def not_sent(local: Local, within_s: float, store_error: str) -> UploadFailedError | None:
    """Return what to raise if sealed shards of this rank did not reach the store within `within_s`, else None."""
    left = [each for each in backlog.backlog(local) if each.sealed is not None]
    if not left:
        return None
    size_bytes = sum(map(backlog.unsent_bytes, left))
    return UploadFailedError(
        f"{named('step', [each.id.step for each in left])} of this rank did not reach the store within"
        f" {within_s:g} s (upload_timeout_s): {in_units(size_bytes)} left to upload{last_store_error(store_error)}",
        hint="it is in the spool; the next launch on this node, `ckpt-async drain` or the sweeper will upload"
        " it",
    )


def not_committed(local: Local, within_s: float, store_error: str) -> UploadFailedError | None:
    """Return what to raise if this rank, which still has something to do, delivered what is not committed within
    `within_s`, else None: the store has refused the decision, or a request before it.
    """
    left = [each.id.step for each in backlog.undecided(local) if each.has_receipt]
    if not left:
        return None
    return UploadFailedError(
        f"{named('step', left)} of this rank reached the store, but {'was' if len(left) == 1 else 'were'} not"
        f" committed within {within_s:g} s (upload_timeout_s){last_store_error(store_error)}",
        hint="the next launch, `ckpt-async drain` or the sweeper will commit it; check the permissions below"
        " `.ckpt-async/decisions/`",
    )


def never_committed(local: Local) -> list[int]:
    """Return the steps that this launch has sealed and that nobody has decided.

    Empty if this launch has committed any checkpoint.
    """
    if local.newest_committed is not None and local.newest_committed.generation == local.generation:
        return []
    left = (each for each in backlog.undecided(local) if each.sealed is not None)
    return [each.id.step for each in left if each.id.generation == local.generation]


def fenced(generation: int, by: int) -> FencedError:
    """Return what to raise in a trainer of this generation.

    It is fenced `by` a newer one, or by another launch that has taken the number of its own.
    """
    if by <= generation:
        return FencedError(
            f"another launch has taken generation {generation} of this run, which is this trainer's: the remote was"
            " wiped or put back to an older state",
            hint="stop this process; its files stay in its folder. Use another remote or run for one of them",
        )
    return FencedError(
        f"generation {by} of this run has started; this trainer is generation {generation}",
        hint="stop this process; what all ranks have sealed will still be finished. If you did not start the run"
        " again, other ranks of this launch have moved to that generation, because they saw no heartbeat of its"
        " first rank: restart all ranks",
    )


def why_generation_taken(local: Local, fenced_by: int | None) -> FencedError | None:
    """Return what to raise at the end of a launch whose generation another one has taken: what it has sealed since will
    never be committed. None if that is not so.
    """
    left = (each.id for each in backlog.undecided(local) if each.sealed is not None)
    steps = [id_.step for id_ in left if id_.generation == local.generation]
    if fenced_by is None or fenced_by > local.generation or not steps:
        return None
    error = fenced(local.generation, fenced_by)
    return FencedError(f"{named('step', steps)} will not be committed: {error.without_hint}", hint=error.hint)


def why_nothing_committed(
    local: Local, steps: Sequence[int], fenced_by: int | None, absent_ranks: Sequence[int] | None
) -> CkptAsyncError | None:
    """Return what to raise at the end of a launch that sealed `steps` but committed nothing and may never do so.

    It never will if a newer launch has begun, or if some ranks never opened its generation (`absent_ranks`; None: the
    store has not said which). Returns None if the other ranks may just be late.
    """
    nothing = (
        f"nothing of generation {local.generation} was committed, although this rank sealed"
        f" {named('step', steps)}"
    )
    if fenced_by is not None:
        error = fenced(local.generation, fenced_by)
        return FencedError(f"{nothing}: {error.without_hint}", hint=error.hint)
    if absent_ranks is None:
        return UploadFailedError(
            f"{nothing}, and the store did not answer in time which ranks opened it",
            hint="the log says why; the next launch on this node, `ckpt-async drain` or the sweeper will commit what"
            " all ranks have sealed",
        )
    if absent_ranks:
        return UploadFailedError(
            f"{nothing}: {named('rank', absent_ranks)} never opened it",
            hint="find out why they did not open it, or whether they used another remote, launch key or world"
            " size; then restart all ranks",
        )
    return None


# --- trying again ------------------------------------------------------------------------------------------


def may_heal(error: Exception) -> bool:
    """Return whether the store or a full disk refuses only for now."""
    return error.reason.is_retryable if isinstance(error, StoreError) else errnos.is_full(error)


def retry_in_s(error: Exception, *, is_hurried: bool) -> float:
    """Return for how long an action that failed is not tried again."""
    return min(RETRY_ACTION_S, RETRY_HURRIED_S) if is_hurried and may_heal(error) else RETRY_ACTION_S


@dataclass(slots=True)
class _Trouble:
    told_at: float
    num_untold: int = 0
    last: str = ""


class Troubles:
    """Which kinds of trouble were logged, and how many troubles of each kind were only counted.

    They come by the hundred, for example when a disk is full: the log gets the first one, then how many more.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, _Trouble] = {}

    def is_new(self, kind: Hashable, text: str, now: float) -> bool:
        """Return whether to log this trouble now; if not, it is counted."""
        known = self._known.get(kind)
        if known is None:
            self._known[kind] = _Trouble(now)
            return True
        known.num_untold, known.last = known.num_untold + 1, text
        return False

    def due(self, now: float, *, is_end: bool = False) -> list[tuple[int, float, str]]:
        """Return what was counted and is due to be logged.

        For each kind: how many more there were, within how many seconds, and the text of the last one. A kind that did
        not recur within AGAIN_S is forgotten, so that its next trouble is new.
        """
        found = []
        for kind, each in list(self._known.items()):
            for_s = now - each.told_at
            if for_s < AGAIN_S and not is_end:
                continue
            if each.num_untold:
                found.append((each.num_untold, for_s, each.last))
                self._known[kind] = _Trouble(now)
            else:
                del self._known[kind]
        return found


# --- what became of checkpoints, for whoever asks after they have left the journal --------------------------


# Of so many checkpoints, the newest, all that their decisions say is kept.
MAX_OUTCOMES = 1000
_FORGOTTEN = "the log of that time says why"


class Outcomes:
    """The decisions that an engine has learned. Of the older ones only the outcome is kept, as a number each.

    One thread may add, and any thread may ask.
    """

    def __init__(self) -> None:
        self._newest: dict[CheckpointId, Decided] = {}
        self._committed: set[int] = set()
        self._aborted: set[int] = set()

    def add(self, decided: Decided) -> None:
        self._newest[decided.checkpoint] = decided
        while len(self._newest) > MAX_OUTCOMES:
            id_, oldest = next(iter(self._newest.items()))
            # First, so that it is known at any moment.
            (self._aborted if oldest.outcome is Outcome.ABORT else self._committed).add(_number(id_))
            del self._newest[id_]

    def of(self, id_: CheckpointId) -> Decided | None:
        """Return the decision on a checkpoint, of an older one without its name and reason; None if it is not known."""
        if (decided := self._newest.get(id_)) is not None:
            return decided
        if (number := _number(id_)) in self._committed:
            return Decided(id_, Outcome.COMMIT, "")
        return Decided(id_, Outcome.ABORT, "", _FORGOTTEN) if number in self._aborted else None

    def newest(self) -> list[Decided]:
        """Return the newest decisions, in the order in which they were learned."""
        return list(self._newest.values())

    def __len__(self) -> int:
        return len(self._newest)


def _number(id_: CheckpointId) -> int:
    return id_.generation * (keys.MAX_STEP + 1) + id_.step
