"""Verification of one run's remote: checks the protocol's invariants from the store alone.

A finding is either a violation (data is lost, damaged or forged, and somebody must look) or a leftover (nothing refers
to it, and the sweeper removes it). Used by `ckpt-async verify`, and as the oracle of the fault tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckpt_async.core import keys, records
from ckpt_async.core.agreement import obstacle
from ckpt_async.core.boundary import NOTHING_COLLECTED
from ckpt_async.core.model import CheckpointId, Decision, Outcome, Receipt, StoredShard
from ckpt_async.core.readings import MAX_READINGS, is_proven
from ckpt_async.errors import FailureReason, InvalidRecordError, ObjectNotFoundError, StoreError
from ckpt_async.protocol import steps
from ckpt_async.protocol.cas import read_record
from ckpt_async.stores.interface import MultipartInfo
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.together import all_or_none
from ckpt_async.transfer.upload import read_back

UNREAD = "unread"

_SHARDS_AT_ONCE = 16
# If more shards than this cannot be read, the store is at fault, or the way to it.
_MAX_UNREAD = 16

Connect = Callable[[], contextlib.AbstractAsyncContextManager[PatientStore]]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it must be. `rule` is the invariant's number in docs/design.md.

    `kind` is a metric label: missing | size | checksum (what is wrong with a shard), record (a record is missing,
    unreadable or contradicts another), leftover, unread (nobody knows: the shard could not be read, or only
    differently each time).
    """

    rule: str
    key: str
    message: str
    kind: str = "record"

    @property
    def is_leftover(self) -> bool:
        return self.kind == "leftover"

    def __str__(self) -> str:
        return f"{self.rule} {self.key}: {self.message}"


@dataclass(frozen=True, slots=True)
class Mark:
    """A reader's mark on a committed checkpoint, which makes other readers skip it.

    `is_sound`: this verification read every byte, and all are as committed.
    """

    checkpoint: CheckpointId
    reason: str
    is_sound: bool


@dataclass(slots=True)
class Verification:
    """What was looked at, and what was found."""

    num_committed: int = 0
    num_shards: int = 0
    size_bytes: int = 0
    num_shards_read: int = 0
    findings: list[Finding] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    not_looked_at: list[str] = field(default_factory=list)  # for lack of permission; text for people

    @property
    def violations(self) -> list[Finding]:
        return [each for each in self.findings if not each.is_leftover and each.kind != UNREAD]

    @property
    def unread(self) -> list[Finding]:
        return [each for each in self.findings if each.kind == UNREAD]


async def verify(
    store: PatientStore,
    *,
    step: int | None = None,
    generation: int | None = None,
    read_percent: float = 0.0,
    seed: int = 0,
    connect: Connect | None = None,
) -> Verification:
    """Check every committed checkpoint, or only those of one step or generation.

    Receipts are compared with the decision, and shards with the receipts, by the store's own sizes and checksums;
    `read_percent` of the shards are also read in full. A shard is damaged if the store says the same wrong thing twice,
    the second time to a store that `connect` opens. A checkpoint that is pruned during the verification is not
    reported. Read-only; safe beside trainers and sweepers.
    """
    async with contextlib.AsyncExitStack() as opened:
        stores = _Stores(store, connect, opened)
        return await _verify(stores, step=step, generation=generation, read_percent=read_percent, seed=seed)


async def _verify(
    stores: _Stores, *, step: int | None, generation: int | None, read_percent: float, seed: int
) -> Verification:
    store, result = stores.first, Verification()
    rng = random.Random(seed)
    decisions = await _read_decisions(store, result)
    boundary = NOTHING_COLLECTED
    try:
        boundary = await steps.read_boundary(store)
    except InvalidRecordError as error:
        result.findings.append(_unreadable("R4", error))
    for id_ in [id_ for id_ in decisions if boundary.voids(id_)]:
        del decisions[id_]
        result.findings.append(
            Finding("R4", keys.decision_key(id_), "an earlier one was collected: void", "leftover")
        )
    chosen = [
        each
        for id_, each in decisions.items()
        if step in (None, id_.step) and generation in (None, id_.generation)
    ]
    referenced, complete = set[str](), set[CheckpointId]()
    marks = await steps.read_damages(store)
    for decision in chosen:
        if decision.outcome is Outcome.COMMIT:
            before = result.num_shards - result.num_shards_read
            findings, shards, is_complete = await _check_committed(
                stores, decision, read_percent, rng, result
            )
            referenced |= {shard.key for shard in shards}
            if is_complete:
                complete.add(decision.checkpoint)
            if findings and not await _is_still_committed(store, decision.checkpoint):
                continue
            result.findings += findings
            result.num_committed += 1
            if (reason := marks.get(decision.checkpoint)) is not None:
                is_all_read = result.num_shards - result.num_shards_read == before
                result.marks.append(Mark(decision.checkpoint, reason, is_all_read and not findings))
    if step is None and generation is None:
        result.findings += await _check_others(store, {*decisions})
        await _check_latest(store, decisions, result)
        await _check_strays(store, decisions, referenced, complete, result)
    return result


async def _read_decisions(store: PatientStore, result: Verification) -> dict[CheckpointId, Decision]:
    listing = await store.list(keys.DECISIONS)
    others = [each.key for each in listing.objects if keys.parse_decision_key(each.key) is None]
    result.findings += [Finding("R4", key, "not the key of a decision") for key in others]
    known: steps.KnownDecisions = {}
    result.findings += [
        _unreadable("R4", error) for error in await steps.read_decisions(store, listing, known)
    ]
    return {decision.checkpoint: decision for _, decision in known.values()}


async def _check_committed(
    stores: _Stores, decision: Decision, read_percent: float, rng: random.Random, result: Verification
) -> tuple[list[Finding], list[StoredShard], bool]:
    """Check I1: every receipt is there and is the one that was decided on; every shard is there and complete.

    Returns also the shards, and whether they are all, because every receipt could be read.
    """
    id_, key = decision.checkpoint, keys.decision_key(decision.checkpoint)
    found = await all_or_none(_receipt(stores.first, decision, rank) for rank in range(decision.world_size))
    receipts = [each for each in found if isinstance(each, Receipt)]
    findings = [each for each in found if isinstance(each, Finding)]
    if not findings:
        reason = obstacle(id_, receipts)
        shards = [shard for receipt in receipts for shard in receipt.shards]
        if reason is not None:
            findings.append(Finding("R5", key, reason))
        if (decision.num_shards, decision.size_bytes) != (
            len(shards),
            sum(each.size_bytes for each in shards),
        ):
            findings.append(Finding("I1", key, "its counts differ from those of its receipts"))
    shards = list({shard.key: shard for receipt in receipts for shard in receipt.shards}.values())
    to_read = [rng.random() * 100 < read_percent for _ in shards]
    at_once = asyncio.Semaphore(_SHARDS_AT_ONCE)
    checked = await all_or_none(
        _judge_shard(stores, shard, must_read, at_once)
        for shard, must_read in zip(shards, to_read, strict=True)
    )
    findings += [each.finding for each in checked if each.finding is not None]
    result.num_shards += len(shards)
    result.num_shards_read += sum(each.is_read for each in checked)
    result.size_bytes += sum(shard.size_bytes for shard in shards)
    return findings, shards, len(receipts) == decision.world_size


async def _receipt(store: PatientStore, decision: Decision, rank: int) -> Receipt | Finding:
    try:
        return await steps.bound_receipt(store, decision, rank)
    except InvalidRecordError as error:
        return _unreadable("I1", error)


@dataclass(frozen=True, slots=True)
class _Checked:
    """What is wrong with a shard, if anything, and whether all of its bytes were read."""

    finding: Finding | None = None
    is_read: bool = False


async def _judge_shard(
    stores: _Stores, shard: StoredShard, must_read: bool, at_once: asyncio.Semaphore
) -> _Checked:
    """Check a shard until it is right, or wrong beyond doubt."""
    wrong: list[Finding] = []
    while len(wrong) < MAX_READINGS:
        try:
            checked = await _check_shard(await stores.get(len(wrong)), shard, must_read, at_once)
        except StoreError as error:
            return _Checked(stores.unread(shard, error))
        if checked.finding is None:
            return checked
        wrong.append(checked.finding)
        if is_proven(wrong):
            return checked
    message = "was read differently each time: it is corrupted on its way here"
    return _Checked(Finding("I6", shard.key, message, UNREAD))


class _Stores:
    """The same store several times, over connections that share nothing. Those after the first are opened when they are
    needed.
    """

    def __init__(
        self, first: PatientStore, connect: Connect | None, opened: contextlib.AsyncExitStack
    ) -> None:
        self.first = first
        self._all, self._connect, self._opened = [first], connect, opened
        self._lock = asyncio.Lock()
        self._num_unread = 0

    async def get(self, number: int) -> PatientStore:
        if self._connect is None:
            return self.first
        async with self._lock:
            while len(self._all) <= number:
                self._all.append(await self._opened.enter_async_context(self._connect()))
        return self._all[number]

    def unread(self, shard: StoredShard, error: StoreError) -> Finding:
        """Return a finding if the error may concern this shard alone, else raise it."""
        self._num_unread += 1
        if error.reason is FailureReason.AUTH or self._num_unread > _MAX_UNREAD:
            raise error
        return Finding("I1", shard.key, f"could not be read: {error}", UNREAD)


async def _check_shard(
    store: PatientStore, shard: StoredShard, must_read: bool, at_once: asyncio.Semaphore
) -> _Checked:
    is_read = False
    try:
        # A directory store reads the whole file before it answers.
        async with at_once:
            info = await store.by_itself("head", shard.size_bytes, lambda once: once.head(shard.key))
        if info.size_bytes == shard.size_bytes and (must_read or info.checksum is None):
            info = await read_back(store, shard.key, shard.size_bytes, shard.checksum.algorithm)
            is_read = True
    except ObjectNotFoundError:
        return _Checked(Finding("I1", shard.key, "the shard is missing", "missing"))
    if info.size_bytes != shard.size_bytes:
        message = f"has {info.size_bytes} bytes, but its receipt says {shard.size_bytes}"
        return _Checked(Finding("I1", shard.key, message, "size"), is_read)
    if info.checksum != shard.checksum:
        have = info.checksum.value if info.checksum else "no checksum"
        message = f"has {have}, but its receipt says {shard.checksum.value}: damaged"
        return _Checked(Finding("I6", shard.key, message, "checksum"), is_read)
    return _Checked(is_read=is_read)


async def _is_still_committed(store: PatientStore, checkpoint: CheckpointId) -> bool:
    try:
        decision = await steps.read_decision(store, checkpoint)
    except InvalidRecordError:
        return True
    return decision is not None and decision.outcome is Outcome.COMMIT


async def _check_latest(
    store: PatientStore, decisions: dict[CheckpointId, Decision], result: Verification
) -> None:
    """Check I2: latest names a committed checkpoint. It may be behind the newest, because it is only a hint."""
    try:
        there = await read_record(store, keys.LATEST, records.decode_latest)
    except InvalidRecordError as error:
        result.findings.append(_unreadable("I2", error))
        return
    if there is None:
        return
    latest, _ = there
    decision = decisions.get(latest.checkpoint)
    if decision is None:
        try:
            decision = await steps.read_decision(store, latest.checkpoint)  # perhaps committed since
        except InvalidRecordError:
            return  # that decision is a finding of its own
    if decision is None or decision.outcome is not Outcome.COMMIT:
        outcome = decision.outcome.value if decision else "no decision"
        result.findings.append(
            Finding("I2", keys.LATEST, f"names {latest.checkpoint}, which is not committed ({outcome})")
        )
    elif decision.name != latest.name:
        message = f"calls {latest.checkpoint} {latest.name!r}, but its decision calls it {decision.name!r}"
        result.findings.append(Finding("I2", keys.LATEST, message))


async def find_unreadable(store: PatientStore) -> list[Finding]:
    """Return a finding for every unreadable record of the run, except receipts of decided checkpoints.

    (`verify` compares the receipts of committed ones.) Costs one GET for each record that is not a receipt, and for
    each receipt of an undecided checkpoint. Read-only.
    """
    result = Verification()
    decisions = await _read_decisions(store, result)
    for rule, key, decode in (
        ("R4", keys.BOUNDARY, records.decode_boundary),
        ("I2", keys.LATEST, records.decode_latest),
    ):
        result.findings += await _check_record(store, rule, key, decode)
    return result.findings + await _check_others(store, {*decisions})


async def _check_others(store: PatientStore, decided: set[CheckpointId]) -> list[Finding]:
    """Check generations, members, heartbeats, leases, damage marks, and receipts of undecided checkpoints."""
    prefixes = (keys.GENERATIONS, keys.MEMBERS, keys.LEASES, keys.DAMAGED, keys.RECEIPTS)
    listings = [await store.list(prefix) for prefix in prefixes]
    wanted = [
        found
        for listing in listings
        for each in listing.objects
        if (found := _decoder_of(each.key, decided)) is not None
    ]
    checked = await all_or_none(_check_record(store, *each) for each in wanted)
    return [finding for found in checked for finding in found]


def _decoder_of(key: str, decided: set[CheckpointId]) -> tuple[str, str, Callable[[bytes], object]] | None:
    """Return rule, key and decoder for a record.

    None if the key is not a record's, or if the record is checked elsewhere.
    """
    if (number := keys.parse_generation_key(key)) is not None:
        return "R5", key, lambda data: records.decode_generation(data, number)
    if keys.parse_member_key(key) is not None:
        return "R5", key, records.decode_member
    if (beaten := keys.parse_beat_key(key)) is not None:
        return "R5", key, lambda data: records.decode_beat(data, beaten)
    if keys.parse_lease_key(key) is not None:
        return "R2", key, records.decode_lease
    if (marked := keys.parse_damage_key(key)) is not None:
        return "R8", key, lambda data: records.decode_damage(data, marked)
    if (receipt := keys.parse_receipt_key(key)) is not None and receipt[0] not in decided:
        return "R1", key, lambda data: records.decode_receipt(data, *receipt)
    return None


async def _check_record(
    store: PatientStore, rule: str, key: str, decode: Callable[[bytes], object]
) -> list[Finding]:
    is_receipt = key.startswith(keys.RECEIPTS)
    limit = records.MAX_RECEIPT_SIZE_BYTES if is_receipt else records.MAX_RECORD_SIZE_BYTES
    try:
        await read_record(store, key, decode, max_size_bytes=limit)
    except InvalidRecordError as error:
        return [_unreadable(rule, error)]
    return []


def _unreadable(rule: str, error: InvalidRecordError) -> Finding:
    return Finding(rule, error.key, error.detail)


async def _check_strays(
    store: PatientStore,
    decisions: dict[CheckpointId, Decision],
    referenced: set[str],
    complete: set[CheckpointId],
    result: Verification,
) -> None:
    """Check I7: find objects that nothing refers to. Objects of undecided checkpoints are in flight, not strays.

    `complete`: the committed checkpoints whose receipts could all be read. Of the others, nobody knows the shards.
    """
    data = await store.list(keys.DATA)
    receipts = await store.list(keys.RECEIPTS)
    final = {Outcome.ABORT, Outcome.PRUNED}
    for each in data.objects:
        parsed = keys.parse_data_key(each.key)
        decision = decisions.get(parsed[0]) if parsed else None
        if parsed is None:
            result.findings.append(_stray(each.key, "not the key of a shard"))
        elif decision is not None and decision.outcome in final:
            result.findings.append(_stray(each.key, f"its checkpoint is decided: {decision.outcome.value}"))
        elif parsed[0] in complete and each.key not in referenced:
            result.findings.append(_stray(each.key, "its checkpoint is committed, but no receipt lists it"))
    for each in receipts.objects:
        of = keys.parse_receipt_key(each.key)
        decision = decisions.get(of[0]) if of else None
        if decision is not None and decision.outcome in final:
            result.findings.append(_stray(each.key, f"its checkpoint is decided: {decision.outcome.value}"))
    if store.capabilities.multipart:
        for upload in await _unfinished_uploads(store, result):
            parsed = keys.parse_data_key(upload.key)
            if parsed and parsed[0] in decisions:
                result.findings.append(
                    _stray(upload.key, "an unfinished multipart upload of a decided checkpoint")
                )


async def _unfinished_uploads(store: PatientStore, result: Verification) -> Sequence[MultipartInfo]:
    """List unfinished uploads. If the credentials do not allow it, `result` says so, and only leftovers are missed."""
    try:
        return await store.list_multiparts(keys.DATA)
    except StoreError as error:
        if error.reason is not FailureReason.AUTH:
            raise
        result.not_looked_at.append(f"unfinished uploads: {error}")
        return ()


def _stray(key: str, message: str) -> Finding:
    return Finding("I7", key, message, "leftover")
