"""What one rank does next: a pure function from what is known to the actions that are due.

THEORY OF OPERATION

A checkpoint is one rank's part of a save. Its state is what the journal says about it (`local_state.fold`):

    open -> sealed -> verified -> has a receipt -> decided -> released -> removed or kept -> forgotten

  open       the trainer enqueues shards. Each is made durable and uploaded at once, sealed or not.
  sealed     the trainer will add nothing. Only now can the checkpoint be committed.
  verified   the store has confirmed size and checksum of each shard of this rank.
  receipt    this rank's promise to the others, created once.
  decided    one object in the store says commit or abort, for good (R4).
  released   the spool's links are gone; then local retention decides about the user's files.

Events come from the trainer (enqueue, seal, give_up), from the disk (lost, changed), from the store (verified, decided)
and from time. All of them become rows of the journal or fields of `Remote`, and `decide` is asked again.

Who may act:

  Each rank    uploads its own shards, writes its own receipt, and aborts a checkpoint of which its part can never come.
  Any rank     commits, once it sees the receipts of all. Ranks take turns, so that mostly one tries; if it died, the
               next one does. The store's create-once picks one winner, and the others read what it decided.
  Rank 0       alone decides where the store has no create-once (`Policy.may_decide`), and names the target where
               uploads fall behind (`core/order.py`).
  A launch     yields to a newer one (`LookForSuccessor`, R11): it then opens nothing new, and finishes what it has. If
               another launch has its own number, it writes nothing at all any more.
  `drain` and the sweeper run the same engine for a rank that is dead (`Policy.is_adopted`): what was not sealed then
               never will be, and is aborted.

After a crash, at any point, the journal is replayed, `Remote` is empty, and `decide` returns what is still due. Every
action can be done twice: uploads find their finished parts, receipts and decisions are created once, the rest is
idempotent. What an earlier launch may have left in the store is looked up before anything is sent (`may_be_decided`).

Rules that need only a part of this stand beside: which upload is next, and what may share the link, in `order.py`, when
to list and whose turn it is in `waiting.py`, what the receipts decide in `agreement.py`, what is kept in
`retention.py`, whether the disk or the link keeps up in `backlog.py`, when what failed is tried again in `failures.py`,
what is done with what earlier launches left in `recovery.py`. One needs answers of the store in the middle, and stands
where they come: who owns a generation (`protocol/generation.py`).

`decide` knows no clock, no I/O, no retries, no concurrency. It returns an action for as long as that is due; the engine
starts what is not under way yet. `docs/design.md` lists the rules R1-R14.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt_async.core import order, retention
from ckpt_async.core.local_state import Local, LocalCheckpoint
from ckpt_async.core.model import CheckpointId, Latest, Outcome
from ckpt_async.core.retention import Candidate, KeepLocal, RetentionPolicy
from ckpt_async.core.waiting import (
    LISTINGS_PER_S,
    POLLS_PER_S,
    Polls,
    Receipts,
    Watch,
    is_complete,
    turn_s,
)

# --- what is known of the store ----------------------------------------------------------------------------


# A superseded trainer finds out within this time while it has something open, and at each commit. All ranks of a launch
# together look for a successor at most this often per second.
SUCCESSOR_POLL_S, SUCCESSOR_LOOKS_PER_S = 10.0, 100
# A rank that has had something to send for so long says so, as often: a sweeper must not give it up as abandoned.
REPORT_OWED_S = 600.0


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why there is no room for another checkpoint, and what the user wants to happen then."""

    text: str
    reaction: str  # block | supersede | raise
    is_of_disk: bool


@dataclass(frozen=True, slots=True)
class Uploads:
    """What this rank sends next, and what is given up for it."""

    turn: order.Turn = field(default_factory=order.Turn)
    report_owed_at: float | None = None  # None: this rank has nothing to send
    shortage: Shortage | None = None  # older checkpoints are to be given up
    # Of these, other ranks had delivered their parts when this one was to give them up.
    delivered_by_others: frozenset[CheckpointId] = frozenset()


@dataclass(frozen=True, slots=True)
class Commits:
    """The checkpoints that wait for other ranks or for a decision."""

    watches: Mapping[CheckpointId, Watch] = field(default_factory=dict)
    polls: Polls = field(default_factory=Polls)
    to_read: frozenset[CheckpointId] = frozenset()  # what a poll has shown, or may have shown, to be decided

    def watching(self, id_: CheckpointId, watch: Watch) -> Commits:
        return replace(self, watches={**self.watches, id_: watch})

    def without(self, id_: CheckpointId) -> Commits:
        watches = {each: watch for each, watch in self.watches.items() if each != id_}
        return replace(self, watches=watches, to_read=self.to_read - {id_})


@dataclass(frozen=True, slots=True)
class Fence:
    """What is known of other launches, and when to look for them again (R11)."""

    by: int | None = None  # a newer launch; or our own generation, if another launch has taken that
    look_at: float = 0.0
    is_idle: bool = True  # nothing of this launch is open
    must_look_first: bool = False  # because the last look was long ago when something was opened
    are_members_asked_for: bool = False
    absent_ranks: list[int] | None = None  # those that never opened this generation, if they were asked for
    # By which a listing tells the record of our generation from one that was written later; "": none is there.
    record_mark: str | None = None

    def is_taken(self, generation: int) -> bool:
        """Return whether another launch has our generation: nothing may be written any more."""
        return self.by is not None and self.by <= generation

    def fenced(self, by: int, generation: int) -> Fence:
        """Return what is known once a look has found `by`. Another one beside it may have found out before."""
        is_known = self.is_taken(generation) or (self.by is not None and by > generation)
        return self if is_known else replace(self, by=by)

    def looked(self, local: Local, now: float) -> Fence:
        """Schedule the next look: there was one just now."""
        pause_s = max(SUCCESSOR_POLL_S, _pause_s(local, SUCCESSOR_LOOKS_PER_S))
        return replace(self, look_at=now + pause_s)


@dataclass(frozen=True, slots=True)
class Published:
    """Where this engine has pointed readers."""

    latest: Latest | None = None  # as last read; it may be older than the truth, but never newer
    to_publish: CheckpointId | None = None  # committed; this engine must move latest to it
    local_latest: CheckpointId | None = None  # what this engine pointed the local symlink at
    pointed_at: CheckpointId | None = None  # the newest for which Composer's pointer was moved or need not be

    def publishing(self, id_: CheckpointId) -> Published:
        return replace(self, to_publish=max(filter(None, (self.to_publish, id_))))


@dataclass(frozen=True, slots=True)
class Remote:
    """What the engine has seen of the store. Kept in memory only: after a crash, the engine looks again."""

    uploads: Uploads = field(default_factory=Uploads)
    commits: Commits = field(default_factory=Commits)
    fence: Fence = field(default_factory=Fence)
    published: Published = field(default_factory=Published)


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that rules depend on."""

    local_retention: KeepLocal = field(default_factory=KeepLocal)
    may_supersede: bool = False  # the user lets checkpoints be dropped that newer ones have made useless
    remote_retention: RetentionPolicy = field(default_factory=retention.KeepAll)
    has_local_latest: bool = True
    has_pointer: bool = False  # whether Composer's pointer is to be written
    may_send_ahead: bool = False  # the store accepts a shard in parts
    may_decide: bool = True  # False: the store has no conditional PUT, and another rank decides
    decides_alone: bool = False  # the store has no conditional PUT, and this rank decides
    # The trainer is dead: what it has not sealed will never be sealed, and there is nobody left to fence.
    is_adopted: bool = False


# --- actions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OfCheckpoint:
    """What most actions have: the checkpoint that they are for."""

    checkpoint: CheckpointId


class MakeDurable(OfCheckpoint):
    """Fsync shards, folders, manifest and journal: from then on they survive power loss."""


@dataclass(frozen=True, slots=True)
class SendAhead(OfCheckpoint):
    """Send the finished parts of a shard that is still being written."""

    shard: str


@dataclass(frozen=True, slots=True)
class Upload(OfCheckpoint):
    """Send one shard and have the store verify it."""

    shard: str

    def __hash__(self) -> int:
        # A string caches its hash, and ten thousand uploads are looked up again and again. In a backlog, many
        # checkpoints have a shard of the same name, so the step is mixed in.
        return hash(self.shard) ^ self.checkpoint.step


class StoreReceipt(OfCheckpoint):
    """Write this rank's receipt to the store: all its shards are verified."""


class ListReceipts(OfCheckpoint):
    """Find out which ranks are done."""


@dataclass(frozen=True, slots=True)
class Poll(OfCheckpoint):
    """Find out which of all checkpoints that wait are decided."""

    checkpoint: CheckpointId = field(compare=False)  # the oldest of them
    waiting: tuple[CheckpointId, ...] = field(compare=False)  # all of them, oldest first


class ReadDecision(OfCheckpoint):
    """Read the decision of a checkpoint that seems to have one."""


@dataclass(frozen=True, slots=True)
class LookForSuccessor:
    """List the generations newer than our own: a newer launch fences this one (R11)."""

    is_first: bool = False  # nothing is written before


@dataclass(frozen=True, slots=True)
class LookForMembers:
    """Find out whether this launch can commit at all: look for a successor, and list who has opened our generation."""


@dataclass(frozen=True, slots=True)
class NameTarget:
    """Name the newest checkpoint that this rank has sealed as the one that all ranks send next, or read which one
    another rank has named.
    """


@dataclass(frozen=True, slots=True)
class ReportOwed:
    """Tell sweepers which checkpoints this rank still has to send, because it has long been behind."""


class GiveUpForNewer(OfCheckpoint):
    """Give up a checkpoint of which no rank has delivered its part, because newer ones need the room."""


class Commit(OfCheckpoint):
    """Read all receipts, check them against each other, and create the decision `commit`."""


@dataclass(frozen=True, slots=True)
class Abort(OfCheckpoint):
    """Create the decision `abort`: this rank can never deliver its shards."""

    reason: str


class MoveLatest(OfCheckpoint):
    """Move `latest.json` forward to this committed checkpoint."""


class MoveLocalLatest(OfCheckpoint):
    """Point the local symlink at this committed checkpoint."""


class Copy(OfCheckpoint):
    """Have the store copy this rank's shards of a committed checkpoint to the exact keys that the user chose."""


class MovePointer(OfCheckpoint):
    """Point Composer's text pointer at this committed checkpoint, all of whose copies are made."""


class Release(OfCheckpoint):
    """Remove a decided checkpoint's links from the spool. The user's own files stay."""


@dataclass(frozen=True, slots=True)
class Remove(OfCheckpoint):
    """Delete this rank's own files of a committed checkpoint that retention no longer keeps."""

    reason: str


class Keep(OfCheckpoint):
    """Move a committed checkpoint to `kept/`, because all are kept locally; a later launch may keep fewer."""


class Forget(OfCheckpoint):
    """Drop the checkpoint from journal and spool: this rank has nothing left to do for it."""


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Nothing is due before this time, unless something changes."""

    time: float


Action = (
    MakeDurable
    | SendAhead
    | Upload
    | StoreReceipt
    | ListReceipts
    | Poll
    | ReadDecision
    | LookForSuccessor
    | LookForMembers
    | NameTarget
    | GiveUpForNewer
    | ReportOwed
    | Commit
    | Abort
    | MoveLatest
    | MoveLocalLatest
    | Copy
    | MovePointer
    | Release
    | Remove
    | Keep
    | Forget
    | WaitUntil
)


_WRITES = (SendAhead, Upload, StoreReceipt, NameTarget, GiveUpForNewer, ReportOwed, Commit, Abort)


# --- the rules ---------------------------------------------------------------------------------------------


def decide(local: Local, remote: Remote, policy: Policy, now: float) -> list[Action]:
    """Return everything that is due now for one rank, oldest checkpoint first."""
    if remote.fence.is_taken(local.generation):
        return []
    actions: list[Action] = []
    waiting: list[CheckpointId] = []
    for id_, checkpoint in sorted(local.checkpoints.items()):
        if checkpoint.decision is not None:
            continue
        if not awaits_decision(checkpoint, local, remote, policy):
            actions += _towards_decision(checkpoint, local, remote, policy)
        elif id_ in remote.commits.to_read:
            actions.append(ReadDecision(id_))
        else:
            waiting.append(id_)
    if waiting:
        actions += _while_waiting(waiting, local, remote.commits, now)
    actions += _after_decision(local, remote.published, policy)
    if _is_target_due(local, remote.uploads.turn, policy, now):
        actions.append(NameTarget())
    if (at := remote.uploads.report_owed_at) is not None and now >= at:
        actions.append(ReportOwed())
    if (victim := _to_give_up(local, remote.uploads, policy)) is not None:
        actions.append(GiveUpForNewer(victim))
    if has_open(local, policy):
        at, is_first = remote.fence.look_at, remote.fence.must_look_first
        if is_first:
            actions = [each for each in actions if not isinstance(each, _WRITES)]
        actions.append(LookForSuccessor(is_first) if is_first or now >= at else WaitUntil(at))
    if remote.fence.are_members_asked_for:
        actions.append(LookForMembers())
    return actions


def has_open(local: Local, policy: Policy) -> bool:
    """Return whether any checkpoint of this launch (of any launch, if it has ended) is undecided."""
    undecided = (id_ for id_, each in local.checkpoints.items() if each.decision is None)
    return any(policy.is_adopted or id_.generation == local.generation for id_ in undecided)


def _pause_s(local: Local, per_s: float) -> float:
    """Return how long each rank pauses so that all ranks of the launch together do something `per_s` times a second."""
    return (local.opened.world_size if local.opened else 1) / per_s


def noticed_idleness(local: Local, fence: Fence, policy: Policy, now: float) -> Fence:
    """Note whether something is open. After an idle time, in which another launch may have taken the remote, what is
    opened waits for a look at it.
    """
    if (is_idle := not has_open(local, policy)) == fence.is_idle:
        return fence
    return replace(fence, is_idle=is_idle, must_look_first=not is_idle and now >= fence.look_at)


def owed(local: Local, policy: Policy) -> list[CheckpointId]:
    """Return the sealed checkpoints of which this rank has something to send, oldest first."""
    return sorted(
        id_
        for id_, each in local.checkpoints.items()
        if each.sealed is not None
        and each.decision is None
        and not each.is_verified
        and why_undeliverable(each, local.generation, is_adopted=policy.is_adopted) is None
    )


def noticed_turn(local: Local, uploads: Uploads, policy: Policy, now: float) -> Uploads:
    """Note which checkpoint this rank has turned to, and since when it has something to send."""
    is_open, to_send = order.is_open(local, uploads.turn.target), owed(local, policy)
    turn = order.turned(uploads.turn, to_send, now, is_open=is_open, is_alone=_has_no_others(local, policy))
    report_owed_at = uploads.report_owed_at
    if not to_send or policy.is_adopted:
        report_owed_at = None
    elif report_owed_at is None:
        report_owed_at = now + REPORT_OWED_S
    is_same = (turn, report_owed_at) == (uploads.turn, uploads.report_owed_at)
    return uploads if is_same else replace(uploads, turn=turn, report_owed_at=report_owed_at)


def _has_no_others(local: Local, policy: Policy) -> bool:
    """Return whether there is no other rank to agree with: the launch is over, or has only this one."""
    return policy.is_adopted or local.opened is None or local.opened.world_size == 1


def owed_of_launch(local: Local, policy: Policy) -> list[CheckpointId]:
    """Return the sealed checkpoints of this launch of which this rank has something to send, oldest first."""
    return [id_ for id_ in owed(local, policy) if id_.generation == local.generation]


def supersedable(
    local: Local, uploads: Uploads, policy: Policy, *, is_disk_short: bool
) -> list[CheckpointId]:
    """Return the checkpoints that may be given up for newer ones, oldest first.

    They are older than what all ranks send now, no receipt of them is known, and unless the disk is short, remote
    retention would not keep them if all that waits was committed. Checkpoints that were or will be aborted do not count
    towards retention.
    """
    turned_to = max(filter(None, (uploads.turn.target, uploads.turn.sending)), default=None)
    kept: Collection[CheckpointId] = ()
    if not is_disk_short:
        candidates = [
            candidate(each)
            for each in local.checkpoints.values()
            if each.sealed is not None
            and (is_loadable(each) if each.decision else why_undeliverable(each, local.generation) is None)
        ]
        kept = retention.apply(policy.remote_retention, candidates)

    def may_go(id_: CheckpointId) -> bool:
        is_older = turned_to is not None and id_ < turned_to and id_ != uploads.turn.sending
        return is_older and id_ not in kept and id_ not in uploads.delivered_by_others

    return [id_ for id_ in owed(local, policy) if may_go(id_)]


def is_freeing(local: Local) -> bool:
    """Return whether something was given up for newer checkpoints and is not forgotten yet."""
    return any(each.superseded and not each.was_committed for each in local.checkpoints.values())


def _to_give_up(local: Local, uploads: Uploads, policy: Policy) -> CheckpointId | None:
    """Return the checkpoint to give up because there is no room, or None. One at a time: what was given up has yet to
    free its space.
    """
    if uploads.shortage is None or is_freeing(local) or not policy.may_decide:
        return None
    victims = supersedable(local, uploads, policy, is_disk_short=uploads.shortage.is_of_disk)
    return next(iter(victims), None)


def _is_target_due(local: Local, turn: order.Turn, policy: Policy, now: float) -> bool:
    if _has_no_others(local, policy):
        return False
    is_open = order.is_open(local, turn.target)
    return order.is_asking_due(turn, owed_of_launch(local, policy), now, is_open=is_open)


def awaits_decision(checkpoint: LocalCheckpoint, local: Local, remote: Remote, policy: Policy) -> bool:
    """Return whether this rank can only wait until others have decided an undecided checkpoint, or may have before."""
    if why_undeliverable(checkpoint, local.generation, is_adopted=policy.is_adopted) is not None:
        # Others will decide it. Without looking for that, our links would stay for ever.
        return not policy.may_decide
    must_poll = not remote.commits.polls.has_polled and may_be_decided(
        checkpoint.id, local.generation, policy
    )
    if must_poll or checkpoint.id in remote.commits.to_read:
        return True
    receipts = _known_receipts(checkpoint, local, remote)
    return receipts is not None and not _may_commit(checkpoint, receipts, local.rank, policy)


def _towards_decision(
    checkpoint: LocalCheckpoint, local: Local, remote: Remote, policy: Policy
) -> Iterable[Action]:
    """Yield what this rank does towards the decision, in write order (R1): shards → receipt → decision.

    Never waits for another checkpoint.
    """
    undeliverable = why_undeliverable(checkpoint, local.generation, is_adopted=policy.is_adopted)
    if undeliverable is not None:
        # The other ranks must not wait for a shard that cannot come: abort competes with commit (R4).
        yield Abort(checkpoint.id, undeliverable)
        return
    if is_volatile(checkpoint):
        yield MakeDurable(checkpoint.id)
    for name in checkpoint.growing:
        if policy.may_send_ahead:
            yield SendAhead(checkpoint.id, name)
    for name, each in checkpoint.shards.items():
        if each.stored is None:
            yield Upload(checkpoint.id, name)
    if not checkpoint.is_verified:
        return
    if not checkpoint.has_receipt:
        yield StoreReceipt(checkpoint.id)
    elif _known_receipts(checkpoint, local, remote) is None:
        yield ListReceipts(checkpoint.id)
    else:
        yield Commit(checkpoint.id)


def _while_waiting(
    waiting: Sequence[CheckpointId], local: Local, commits: Commits, now: float
) -> Iterable[Action]:
    """Yield one poll for all checkpoints that wait. After it, list the receipts of one that is still undecided: those
    who were to commit it may have died. The next poll is followed by those of another one.
    """
    polls = commits.polls
    poll_at = max(polls.next_at, polls.last_at + _pause_s(local, POLLS_PER_S))
    yield Poll(waiting[0], tuple(waiting)) if now >= poll_at else WaitUntil(poll_at)
    if polls.last_at > polls.last_listing_at + _pause_s(local, LISTINGS_PER_S):
        listable = {id_: commits.watches[id_].list_at for id_ in waiting if id_ in commits.watches}
        first = min(listable, key=lambda id_: listable[id_], default=None)
        if first is not None and now >= listable[first]:
            yield ListReceipts(first)


def _after_decision(local: Local, published: Published, policy: Policy) -> Iterable[Action]:
    """Yield what is due after a decision, and never before it (R1, R7).

    The order is latest → copies → pointer, and local symlink → release → local retention.
    """
    decided = {id_: each for id_, each in sorted(local.checkpoints.items()) if each.decision is not None}
    committed = [candidate(each) for each in decided.values() if each.was_committed and not each.is_removed]
    kept = policy.local_retention.keep(committed)
    loadable = [id_ for id_, each in decided.items() if is_loadable(each)]
    newest = max(loadable, default=None)
    publish = published.to_publish
    if publish is not None and is_ahead(publish, published.latest):
        if publish in decided:  # on a full disk, the commit may not be recorded yet
            yield MoveLatest(publish)
    else:
        publish = None
    yield from (Copy(id_) for id_, each in decided.items() if each.to_copy)
    pointer = _to_point_at(loadable, decided, published) if policy.has_pointer else None
    if pointer is not None:
        yield MovePointer(pointer)
    linkable = [id_ for id_ in loadable if policy.local_retention.count != 0 or id_ in kept]
    # If all were pruned remotely, those kept locally are still complete, and the symlink must not point at one that
    # is about to be removed (R2).
    linked = max(linkable or kept, default=None) if policy.has_local_latest else None
    is_linked = linked is None or published.local_latest == linked
    if linked is not None and not is_linked:
        yield MoveLocalLatest(linked)
    is_all_kept, to_rescue = policy.local_retention.is_all, local.to_rescue
    for id_, checkpoint in decided.items():
        if not checkpoint.is_released:
            if id_ not in to_rescue:
                yield Release(id_)
        elif (reason := _why_superseded(checkpoint, policy)) and not is_all_kept:
            yield Remove(id_, reason)
        elif not checkpoint.was_committed:
            # The user's own files stay where they are. What this launch has not sealed yet is remembered as given up:
            # its trainer may enqueue more of it.
            if checkpoint.sealed is not None or policy.is_adopted or id_.generation < local.generation:
                yield Forget(id_)
        elif checkpoint.is_removed:
            if not checkpoint.to_copy and id_ not in (publish, pointer):
                yield Forget(id_)
        elif is_all_kept and id_ in kept:
            if not checkpoint.to_copy and id_ not in (newest, publish, pointer):
                yield Keep(id_)
        elif id_ not in kept and id_ not in (publish, linked, pointer) and is_linked:  # R2: symlink first
            yield Remove(id_, f"beyond {policy.local_retention}")


def _to_point_at(
    loadable: Iterable[CheckpointId], decided: Mapping[CheckpointId, LocalCheckpoint], published: Published
) -> CheckpointId | None:
    """Return the newest checkpoint whose copies are all made, if it is ahead of where the pointer was moved."""
    newest = max((id_ for id_ in loadable if not decided[id_].to_copy), default=None)
    if newest is None or (published.pointed_at is not None and newest <= published.pointed_at):
        return None
    return newest


def _why_superseded(checkpoint: LocalCheckpoint, policy: Policy) -> str:
    """Return why the checkpoint was given up for newer ones; empty if it was not.

    It was given up by this rank, or by another one with the same policy.
    """
    if checkpoint.decision is None or checkpoint.was_committed:
        return ""
    is_by_others = policy.may_supersede and checkpoint.decision.is_superseded
    return checkpoint.superseded or (checkpoint.decision.reason if is_by_others else "")


# --- the rules, one by one ---------------------------------------------------------------------------------


def why_undeliverable(
    checkpoint: LocalCheckpoint, generation: int, *, is_adopted: bool = False
) -> str | None:
    """Return why this rank can never deliver the checkpoint, or None.

    Checkpoints that an earlier generation had sealed are still finished (R11); those it had not sealed never will be.
    """
    if checkpoint.loss is not None:
        return checkpoint.loss.message
    if checkpoint.superseded:
        return checkpoint.superseded
    if checkpoint.sealed is None and (is_adopted or checkpoint.id.generation < generation):
        return f"the trainer stopped before it sealed {checkpoint.id}"
    return None


def may_be_decided(id_: CheckpointId, generation: int, policy: Policy) -> bool:
    """Return whether a decision may be there before this engine has looked.

    Other ranks or the sweeper may have made it in the meantime.
    """
    return policy.is_adopted or id_.generation < generation


def is_still_to_come(local: Local, id_: CheckpointId) -> bool:
    """Return whether a checkpoint belongs to an earlier launch and has a step that this launch has not passed yet."""
    passed = (each.step for each in local.checkpoints if each.generation == local.generation)
    return id_.generation < local.generation and id_.step >= max(passed, default=-1)


def is_volatile(checkpoint: LocalCheckpoint) -> bool:
    """Return whether power loss could still destroy a part of the checkpoint."""
    if checkpoint.sealed is not None and not checkpoint.is_seal_durable:
        return True
    return any(not each.is_durable for each in checkpoint.shards.values())


def is_loadable(checkpoint: LocalCheckpoint) -> bool:
    """Return whether the checkpoint is committed and, according to the decision as last read, not pruned."""
    return checkpoint.decision is not None and checkpoint.decision.outcome is Outcome.COMMIT


def is_alone(checkpoint: LocalCheckpoint) -> bool:
    """Return whether no other rank has a part of the checkpoint."""
    return checkpoint.sealed is not None and checkpoint.sealed.world_size == 1


def _known_receipts(checkpoint: LocalCheckpoint, local: Local, remote: Remote) -> Receipts | None:
    """Return the receipts as last listed, after this rank had written its own; None if they were not."""
    if not checkpoint.is_verified or not checkpoint.has_receipt:
        return None
    if watch := remote.commits.watches.get(checkpoint.id):
        return watch.receipts
    return Receipts((local.rank,)) if is_alone(checkpoint) else None  # there are no others to look for


def _may_commit(checkpoint: LocalCheckpoint, receipts: Receipts, rank: int, policy: Policy) -> bool:
    return is_complete(checkpoint, receipts) and is_our_turn(receipts, rank, policy)


def is_our_turn(receipts: Receipts, rank: int, policy: Policy) -> bool:
    """Return whether this rank commits, now that all receipts are there."""
    if policy.decides_alone:
        return True
    return policy.may_decide and receipts.newest_age_s >= turn_s(receipts, rank)


def is_ahead(checkpoint: CheckpointId, latest: Latest | None) -> bool:
    """Return whether `latest` may move to `checkpoint` (R6)."""
    return latest is None or checkpoint > latest.checkpoint


def candidate(checkpoint: LocalCheckpoint) -> Candidate:
    """Return the checkpoint as local policies see it.

    Its time is that of the save, and its metrics are those that this rank gave at `seal`.
    """
    metrics = dict(checkpoint.sealed.metrics) if checkpoint.sealed else {}
    return Candidate(checkpoint.id, checkpoint.name, checkpoint.sealed_at, metrics)
