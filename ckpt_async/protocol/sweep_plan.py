"""What a sweep does to one run's remote: listings in, actions with their reasons out. Pure.

Ages are differences between times of the store's own clock, which come with the listings; the local clock decides
nothing. Every action is safe to repeat, to cut short, and to run beside another sweeper, a trainer and readers: what
must not happen twice or out of order is decided by compare-and-swap on the decision object.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_async.core import keys, retention
from ckpt_async.core.boundary import NOTHING_COLLECTED, Boundary
from ckpt_async.core.decide import is_ahead
from ckpt_async.core.model import CheckpointId, Decision, Latest, Lease, Outcome
from ckpt_async.core.retention import Candidate, RetentionPolicy
from ckpt_async.stores.interface import MultipartInfo, ObjectInfo

# A reader stops at two thirds of its lease. The sweeper waits this much longer than the lease, for clocks that drift
# and replies that are slow on their way to the reader (restic keeps a similar margin).
LEASE_MARGIN_S = 60.0
# The longest time that a lease can last, whatever its object says.
MAX_LEASE_S = 24 * 3600.0
# The age at which probe objects are removed: no probe takes this long, so theirs was killed.
PROBE_AGE_S = 3600.0
# For so long, what a rank said that it still has to send keeps that from being given up: three times as long as the
# pause between two of its messages.
OWED_VALID_S = 1800.0
# Final decisions are collected in batches of at least this many, so that the boundary rarely moves.
COLLECT_AT_LEAST = 100


@dataclass(frozen=True, slots=True)
class Ages:
    """How long to wait before assuming that work on a checkpoint will not continue.

    Measured by the store's clock, from when its newest object was written.
    """

    superseded_s: float = 24 * 3600.0  # for a checkpoint of a generation that is no longer the newest
    newest_s: float = 7 * 24 * 3600.0  # for one of the newest generation, whose trainer may only be paused
    help_s: float = 60.0  # for one with all receipts that nobody has committed: its engines are dead


@dataclass(frozen=True, slots=True)
class View:
    """What was found in the store, all of it from complete listings (rule R8)."""

    server_time: float
    newest_generation: int
    world_sizes: Mapping[int, int]  # by generation
    decisions: Mapping[CheckpointId, Decision]
    decided_at: Mapping[CheckpointId, float]  # Last-Modified
    receipts: Mapping[CheckpointId, Mapping[int, ObjectInfo]]
    data: Mapping[CheckpointId, tuple[ObjectInfo, ...]]
    names: Mapping[CheckpointId, str]  # from the data keys
    multiparts: tuple[MultipartInfo, ...] = ()
    leases: Mapping[str, tuple[Lease, float]] = field(default_factory=dict)  # by key: lease, Last-Modified
    members: Mapping[str, int] = field(default_factory=dict)  # key to generation
    owed: Mapping[CheckpointId, int] = field(
        default_factory=dict
    )  # to a rank of a live launch that sends it later
    probes: tuple[ObjectInfo, ...] = ()
    damaged: frozenset[CheckpointId] = frozenset()  # those marked by a reader that could not read them
    latest: Latest | None = None
    boundary: Boundary = NOTHING_COLLECTED
    unreadable: frozenset[CheckpointId] = frozenset()  # those whose decision or generation cannot be read
    is_boundary_readable: bool = True


@dataclass(frozen=True, slots=True)
class Stored:
    """What is stored of each checkpoint: its receipts by rank, its data objects, and the name in their keys."""

    receipts: dict[CheckpointId, dict[int, ObjectInfo]] = field(default_factory=dict)
    data: dict[CheckpointId, tuple[ObjectInfo, ...]] = field(default_factory=dict)
    names: dict[CheckpointId, str] = field(default_factory=dict)


def stored(receipts: Iterable[ObjectInfo], data: Iterable[ObjectInfo]) -> Stored:
    """Group two listings by checkpoint. Objects that are not ours are left out."""
    found = Stored()
    for each in receipts:
        if of_rank := keys.parse_receipt_key(each.key):
            found.receipts.setdefault(of_rank[0], {})[of_rank[1]] = each
    shards: dict[CheckpointId, list[ObjectInfo]] = {}
    for each in data:
        if named := keys.parse_data_key(each.key):
            shards.setdefault(named[0], []).append(each)
            found.names[named[0]] = named[1]
    found.data.update((id_, tuple(each)) for id_, each in shards.items())
    return found


# --- actions: each says what it is about, and why -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Settle:
    """All receipts are there: commit in place of engines that died, or abort if the receipts contradict each other."""

    checkpoint: CheckpointId
    world_size: int
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Create the decision `abort`, which competes with a straggler's commit."""

    checkpoint: CheckpointId
    name: str
    world_size: int
    reason: str


@dataclass(frozen=True, slots=True)
class MoveLatest:
    """Move `latest` forward."""

    checkpoint: CheckpointId
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class BeginPrune:
    """Swap `commit` for `pruning`, unless the checkpoint was pinned in the meantime."""

    checkpoint: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class FinishPrune:
    """Delete what the receipts list, then the receipts, then swap `pruning` for `pruned`."""

    checkpoint: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class AbortMultipart:
    """Drop the parts of an upload that nobody will complete; repeated until the store says that there are none."""

    key: str
    upload_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete objects that nothing refers to any more, by their explicit keys."""

    object_keys: tuple[str, ...]
    kind: str  # partial_checkpoint | lease | member | probe | damage: a metric label
    reason: str


@dataclass(frozen=True, slots=True)
class CollectDecisions:
    """Move the boundary, and only then delete the final decisions that it voids.

    `pruned` and `aborted` are of the newest generation; of superseded ones goes what is up to `upto` and not `kept`.
    """

    upto: CheckpointId
    kept: frozenset[CheckpointId]
    object_keys: tuple[str, ...]
    reason: str
    pruned: frozenset[CheckpointId] = frozenset()
    aborted: frozenset[CheckpointId] = frozenset()


@dataclass(frozen=True, slots=True)
class Wait:
    """Something is due later. Included so that a dry run explains why the checkpoint is still there."""

    checkpoint: CheckpointId
    reason: str
    is_refusal: bool = False  # the policy cannot be what was meant, so it prunes nothing


Planned = (
    Settle
    | GiveUp
    | MoveLatest
    | BeginPrune
    | FinishPrune
    | AbortMultipart
    | Delete
    | CollectDecisions
    | Wait
)


@dataclass(frozen=True, slots=True)
class Stock:
    """A checkpoint that is committed or being pruned: whether it would still be there after the sweep, and why."""

    checkpoint: CheckpointId
    name: str
    size_bytes: int
    stays: bool
    reason: str


# --- the rules ---------------------------------------------------------------------------------------------


def plan(view: View, policy: RetentionPolicy, ages: Ages) -> list[Planned]:
    """Return everything that a sweep should do now, in an order in which it may be done."""
    planned: list[Planned] = []
    valid = _valid(view)
    planned += _settle(view, valid, ages)
    planned += _publish(view, valid)
    planned += _retain(view, valid, policy)
    planned += _clean(view, valid, ages)
    planned += _collect(view, valid, ages)
    return planned


def stock(view: View, policy: RetentionPolicy, planned: Iterable[Planned]) -> list[Stock]:
    """Return what would become of the checkpoints that are committed or being pruned if `planned` was done, oldest
    first.
    """
    valid = _valid(view)
    going = {each.checkpoint: each.reason for each in planned if isinstance(each, BeginPrune | FinishPrune)}
    reasons = {each.checkpoint: each.reason for each in planned if isinstance(each, Wait)}
    reasons |= _kept(view, valid, policy) | going
    return [
        Stock(id_, each.name, each.size_bytes, id_ not in going, reasons[id_])
        for id_, each in sorted(valid.items())
        if each.outcome in (Outcome.COMMIT, Outcome.PRUNING)
    ]


def _valid(view: View) -> dict[CheckpointId, Decision]:
    return {
        id_: each
        for id_, each in view.decisions.items()
        if not view.boundary.voids(id_) and not _is_unknown(id_, view)
    }


def _is_unknown(checkpoint: CheckpointId, view: View) -> bool:
    """Return whether an unreadable record may say what became of the checkpoint, in which case it is left alone."""
    if not view.is_boundary_readable:
        return True
    return checkpoint in view.unreadable and not view.boundary.voids(checkpoint)


def _settle(view: View, valid: Mapping[CheckpointId, Decision], ages: Ages) -> Iterable[Planned]:
    """Plan for undecided checkpoints: settle those that are complete, give up those that cannot become complete."""
    for id_ in sorted({*view.receipts, *view.data} - valid.keys()):
        if view.boundary.voids(id_):
            continue  # it was given up and collected; `_clean` removes what is left of it
        if _is_unknown(id_, view):
            yield Wait(id_, "one of its records, or the boundary, is unreadable")
            continue
        receipts = view.receipts.get(id_, {})
        world_size = view.world_sizes.get(id_.generation)
        newest_at = max(
            [each.last_modified or view.server_time for each in (*receipts.values(), *view.data.get(id_, ()))]
        )
        age_s = view.server_time - newest_at
        name = view.names.get(id_) or f"step-{id_.step}"
        if world_size is not None and set(range(world_size)) <= receipts.keys():
            if age_s >= ages.help_s:
                yield Settle(id_, world_size, f"all {world_size} receipts have been there for {age_s:.0f} s")
            continue
        is_superseded = id_.generation < view.newest_generation
        limit_s = ages.superseded_s if is_superseded else ages.newest_s
        whose = "a superseded generation" if is_superseded else "the newest generation"
        have = f"{len(receipts)} of {world_size or '?'} receipts, of {whose}"
        if id_ in view.owed:
            yield Wait(id_, f"{have}; rank {view.owed[id_]} is behind and still has its part to send")
        elif age_s >= limit_s:
            yield GiveUp(id_, name, world_size or 1, f"{have}, nothing new has arrived for {age_s:.0f} s")
        else:
            yield Wait(
                id_, f"{have}, nothing new has arrived for {age_s:.0f} s; given up after {limit_s:.0f} s"
            )


def _publish(view: View, valid: Mapping[CheckpointId, Decision]) -> Iterable[Planned]:
    newest = max((id_ for id_, each in valid.items() if each.outcome is Outcome.COMMIT), default=None)
    if newest is not None and is_ahead(newest, view.latest):
        yield MoveLatest(newest, valid[newest].name, "the newest commit is ahead of latest")


def _retain(view: View, valid: Mapping[CheckpointId, Decision], policy: RetentionPolicy) -> Iterable[Planned]:
    """Plan the pruning, in delete order (R2).

    Only what latest is ahead of is pruned, only after `pruning`, and only when no reader is left. A checkpoint that is
    marked as damaged, or of which the store lacks something, does not count: what the policy would keep without it
    stays too.
    """
    candidates = _candidates(view, valid)
    kept = _kept(view, valid, policy)
    why_nothing = _why_nothing(policy, candidates)
    beyond = "; ".join(["beyond retention", *map(str, retention.unmeasured(policy, candidates))])
    for id_ in sorted({each.id for each in candidates} - kept.keys()):
        if why_nothing:
            yield Wait(id_, why_nothing, is_refusal=True)
        elif view.latest is None or view.latest.checkpoint <= id_:
            yield Wait(id_, f"{beyond}, but latest does not point to a newer checkpoint yet")
        else:
            yield BeginPrune(id_, beyond)
    for id_, each in sorted(valid.items()):
        if each.outcome is Outcome.PRUNING:
            readers = sorted(lease.reader for lease in _live_leases(view, id_))
            if readers:
                yield Wait(id_, f"being pruned, but read by {', '.join(readers)}")
            else:
                yield FinishPrune(id_, "being pruned, and no reader is left")


def _why_nothing(policy: RetentionPolicy, candidates: Sequence[Candidate]) -> str:
    """Return why the policy must not prune anything here, "" if it may."""
    if retention.would_keep_nothing(policy, candidates):
        return "the policy matches no checkpoint, so nothing is pruned: is it the policy that you meant?"
    nowhere = [each for each in retention.unmeasured(policy, candidates) if each.is_all]
    if not nowhere:
        return ""
    return (
        f"the policy keeps the best by a metric, but {', '.join(map(str, nowhere))}, so nothing is pruned:"
        " correct the metric's name, or remove best= from the policy"
    )


def _candidates(view: View, valid: Mapping[CheckpointId, Decision]) -> list[Candidate]:
    return [_candidate(id_, each, view) for id_, each in valid.items() if each.outcome is Outcome.COMMIT]


def _kept(view: View, valid: Mapping[CheckpointId, Decision], policy: RetentionPolicy) -> retention.Kept:
    candidates = _candidates(view, valid)
    sound = [
        each
        for each in candidates
        if each.id not in view.damaged and _is_all_there(each.id, valid[each.id], view)
    ]
    return retention.apply(policy, candidates) | retention.apply(policy, sound)


def _is_all_there(id_: CheckpointId, decision: Decision, view: View) -> bool:
    found = view.data.get(id_, ())
    return (
        len(found) >= decision.num_shards
        and sum(each.size_bytes for each in found) >= decision.size_bytes
        and len(view.receipts.get(id_, {})) >= len(decision.receipts)
    )


def _candidate(id_: CheckpointId, decision: Decision, view: View) -> Candidate:
    committed_at = view.decided_at.get(id_, 0.0)
    return Candidate(id_, decision.name, committed_at, dict(decision.metrics), decision.is_pinned)


def _live_leases(view: View, id_: CheckpointId) -> Iterable[Lease]:
    for lease, modified_at in view.leases.values():
        if lease.checkpoint == id_ and view.server_time < expires_at(lease, modified_at):
            yield lease


def expires_at(lease: Lease, modified_at: float) -> float:
    """Return when, by the store's clock, a sweeper may assume that the reader is dead."""
    return modified_at + min(max(lease.ttl_s, 0.0), MAX_LEASE_S) + LEASE_MARGIN_S


def _clean(view: View, valid: Mapping[CheckpointId, Decision], ages: Ages) -> Iterable[Planned]:
    """Plan the removal of what nothing refers to.

    That is objects of checkpoints that were given up or pruned, abandoned uploads, expired leases, marks of checkpoints
    that are gone, and what killed probes and superseded generations left.
    """
    final = {id_ for id_, each in valid.items() if each.outcome in (Outcome.ABORT, Outcome.PRUNED)}
    final |= {id_ for id_ in {*view.data, *view.receipts} if view.boundary.voids(id_)}
    for id_ in sorted(final):
        # Shards before receipts: a receipt without its shards misleads nobody once the decision is final.
        left = [each.key for each in (*view.data.get(id_, ()), *view.receipts.get(id_, {}).values())]
        if left:
            outcome = valid[id_].outcome.value if id_ in valid else "collected"
            yield Delete(tuple(left), "partial_checkpoint", f"{id_} is already decided: {outcome}")
    for upload in view.multiparts:
        parsed = keys.parse_data_key(upload.key)
        age_s = view.server_time - upload.initiated_at
        if parsed is None or _is_unknown(parsed[0], view):
            continue  # not ours, or unknown what became of its checkpoint
        id_, _ = parsed
        is_decided = id_ in valid or view.boundary.voids(id_)
        limit_s = ages.superseded_s if id_.generation < view.newest_generation else ages.newest_s
        if is_decided:
            yield AbortMultipart(
                upload.key,
                upload.upload_id,
                f"{id_} is already decided, so the upload will never be completed",
            )
        elif age_s >= limit_s:
            yield AbortMultipart(upload.key, upload.upload_id, f"started {age_s:.0f} s ago")
    for key, (lease, modified_at) in sorted(view.leases.items()):
        if view.server_time >= expires_at(lease, modified_at):
            yield Delete((key,), "lease", f"the lease of {lease.reader} has expired")
    gone = {id_ for id_ in view.damaged if id_ in final or view.boundary.voids(id_)}
    if gone:
        marks = tuple(keys.damage_key(id_) for id_ in sorted(gone))
        yield Delete(marks, "damage", "damage marks of checkpoints that are gone")
    past = tuple(
        sorted(key for key, generation in view.members.items() if generation < view.newest_generation)
    )
    if past:
        # Safe: a launch joins the newest generation or a newer one, whose objects stay.
        yield Delete(past, "member", "members of superseded generations")
    stale = [
        each.key for each in view.probes if view.server_time - (each.last_modified or 0.0) >= PROBE_AGE_S
    ]
    if stale:
        yield Delete(tuple(stale), "probe", "left by a probe that was killed")


def _collect(view: View, valid: Mapping[CheckpointId, Decision], ages: Ages) -> Iterable[Planned]:
    """Plan the collection of old final decisions (R4).

    It makes the cost of a listing depend on what is kept, not on all that ever was. Only decisions of checkpoints that
    have no objects left are collected, and only if they are so old that an undecided straggler of a superseded
    generation would be given up too. The newest decision stays.
    """
    newest = max(valid, default=None)
    finished = {
        id_: each.outcome
        for id_, each in valid.items()
        if each.outcome in (Outcome.ABORT, Outcome.PRUNED)
        and id_ != newest
        and not view.data.get(id_)
        and not view.receipts.get(id_)
        and view.server_time - view.decided_at.get(id_, view.server_time) >= ages.superseded_s
    }
    resurrected = {id_ for id_ in view.decisions if view.boundary.voids(id_)}
    if len(finished) < COLLECT_AT_LEAST and not resurrected:
        return
    collected = {*finished, *view.boundary.pruned, *view.boundary.aborted}
    superseded = {id_ for id_ in collected if id_.generation < view.newest_generation}
    upto = max({view.boundary.upto, *superseded})
    known = {*valid, *view.data, *view.receipts, *view.unreadable} - finished.keys()
    in_newest = {id_: each for id_, each in finished.items() if id_ not in superseded}
    yield CollectDecisions(
        upto,
        frozenset(id_ for id_ in known if id_ <= upto and not view.boundary.voids(id_)),
        tuple(keys.decision_key(id_) for id_ in sorted(finished.keys() | resurrected)),
        f"{len(finished) + len(resurrected)} old final decisions",
        frozenset(id_ for id_, each in in_newest.items() if each is Outcome.PRUNED),
        frozenset(id_ for id_, each in in_newest.items() if each is Outcome.ABORT),
    )
