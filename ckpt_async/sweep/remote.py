"""A sweep of one remote: looks at all of it, has `sweep_plan` plan, and carries out the plan.

Two sweeps at once are safe; if one is killed at any point, the next one finishes its work.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar, assert_never

from ckpt_async.core import keys, records
from ckpt_async.core.boundary import NOTHING_COLLECTED
from ckpt_async.core.model import CheckpointId, Decision, Lease, Outcome
from ckpt_async.core.retention import RetentionPolicy
from ckpt_async.errors import CkptAsyncError, FailureReason, InvalidRecordError, StoreError
from ckpt_async.protocol import deciding, steps, sweep_plan
from ckpt_async.protocol.cas import read_record
from ckpt_async.protocol.overview import Overview, overview
from ckpt_async.protocol.verify import Finding
from ckpt_async.stores.interface import Listing, MultipartInfo
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.together import all_or_none

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Passes over one remote in one sweep: give up → delete → collect, and prune → delete, need one pass after the other.
MAX_PASSES = 5
# AWS: parts in flight may survive an abort, so "it might be necessary to abort a given multipart upload multiple times"
# (S3 API reference, AbortMultipartUpload).
MAX_ABORTS = 5


@dataclass(frozen=True, slots=True)
class Done:
    """One action of a sweep and its result; `error` is empty if it worked (or was only planned).

    `outcome` is the outcome that this sweep gave to a checkpoint; None if the action is of another sort, or if
    something has changed in the meantime and there was nothing to do.
    """

    action: sweep_plan.Planned
    error: str = ""
    outcome: Outcome | None = None


@dataclass(slots=True)
class RemoteReport:
    """What a sweep did to one remote, or would do."""

    url: str
    done: list[Done] = field(default_factory=list)
    error: str = ""
    # Unreadable records and, if the sweep also verifies, everything that `verify` finds.
    violations: list[Finding] = field(default_factory=list)
    # Of a dry run: which checkpoints would stay and which would go.
    stock: list[sweep_plan.Stock] = field(default_factory=list)
    overview: Overview | None = None  # what was there, at the last look

    @property
    def has_failed(self) -> bool:
        return bool(self.error) or any(each.error for each in self.done)

    @property
    def is_clean(self) -> bool:
        return not self.has_failed and not self.violations


@dataclass(slots=True)
class RemoteSweep:
    """One sweep of one remote.

    `known` holds decisions that were read before, with their ETags, by key. `unreadable` says what is wrong with
    records that could not be read.
    """

    store: PatientStore
    policy: RetentionPolicy
    ages: sweep_plan.Ages
    clock: Callable[[], float]
    known: steps.KnownDecisions = field(default_factory=dict)
    unreadable: dict[str, Finding] = field(default_factory=dict)
    on_done: Callable[[Done], Awaitable[None]] | None = None  # called after each action that succeeded

    async def run(self, *, is_dry_run: bool) -> RemoteReport:
        """Sweep once, in as many passes as it takes, at most MAX_PASSES.

        An action that fails is reported and does not stop the others. Nor does an unreadable record: it is reported as
        a violation, and what it describes is left alone.
        """
        report = RemoteReport(self.store.url)
        for _ in range(1 if is_dry_run else MAX_PASSES):
            view = await self.observe()
            planned = sweep_plan.plan(view, self.policy, self.ages)
            if is_dry_run:
                report.done += [Done(action) for action in planned]
                report.stock = sweep_plan.stock(view, self.policy, planned)
                break
            active = [action for action in planned if not isinstance(action, sweep_plan.Wait)]
            tried = {each.action for each in report.done}
            fresh = [action for action in active if action not in tried]
            for action in fresh:
                report.done.append(await self._attempt(action))
            if not fresh:
                report.done += [Done(action) for action in planned if isinstance(action, sweep_plan.Wait)]
                break
        waits = [each.action for each in report.done if isinstance(each.action, sweep_plan.Wait)]
        for reason in sorted({each.reason for each in waits if each.is_refusal}):
            logger.warning("nothing_pruned %s: %s", self.store.url, reason)
        report.violations = list(self.unreadable.values())
        report.overview = overview(self.store.url, view, [each.key for each in report.violations])
        return report

    async def _attempt(self, action: sweep_plan.Planned) -> Done:
        try:
            outcome = await self.perform(action)
        except CkptAsyncError as error:
            logger.warning("sweep_action_failed action=%s error=%s", action, error)
            return Done(action, str(error))
        logger.info("swept action=%s", action)
        done = Done(action, outcome=outcome)
        if self.on_done is not None:
            await self.on_done(done)
        return done

    # --- look ----------------------------------------------------------------------------------------------

    async def observe(self) -> sweep_plan.View:
        """List everything of the run. Each listing is complete or this raises (rule R8)."""
        prefixes = (
            keys.GENERATIONS,
            keys.DECISIONS,
            keys.RECEIPTS,
            keys.DATA,
            keys.LEASES,
            keys.MEMBERS,
            keys.PROBES,
            keys.DAMAGED,
        )
        found = await all_or_none(self.store.list(prefix) for prefix in prefixes)
        generations, decisions, receipts, data, leases, members, probes, damages = found
        latest = await steps.read_latest(self.store)
        boundary = await self._readable("R4", steps.read_boundary(self.store)) or NOTHING_COLLECTED
        numbers = [keys.parse_generation_key(each.key) for each in generations.objects]
        there = sweep_plan.stored(receipts.objects, data.objects)
        decoded = await self._read_decisions(decisions)
        undecided = {*there.receipts, *there.data} - decoded.keys()
        world_sizes = await self._world_sizes(
            {id_.generation for id_ in undecided} & {number for number in numbers if number}
        )
        server_time = max(each.server_time for each in found)
        member_keys = {each.key: _generation_of(each.key) for each in members.objects}
        return sweep_plan.View(
            server_time=server_time,
            newest_generation=max((number for number in numbers if number), default=0),
            world_sizes=world_sizes,
            decisions=decoded,
            decided_at={
                id_: each.last_modified or 0.0
                for each in decisions.objects
                if (id_ := keys.parse_decision_key(each.key)) is not None
            },
            receipts=there.receipts,
            data=there.data,
            names=there.names,
            multiparts=await self._multiparts(),
            leases=await self._read_leases(leases),
            members={key: number for key, number in member_keys.items() if number is not None},
            owed=await self._read_owed(members, server_time) if undecided else {},
            probes=probes.objects,
            damaged=frozenset(filter(None, (keys.parse_damage_key(each.key) for each in damages.objects))),
            latest=latest,
            boundary=boundary,
            unreadable=frozenset(
                id_
                for id_ in {*undecided, *filter(None, map(keys.parse_decision_key, self.unreadable))}
                if {keys.decision_key(id_), keys.generation_key(id_.generation)} & self.unreadable.keys()
            ),
            is_boundary_readable=keys.BOUNDARY not in self.unreadable,
        )

    async def _read_owed(self, members: Listing, server_time: float) -> dict[CheckpointId, int]:
        """Return what ranks still have to send, as far as they have said so lately."""
        lately = server_time - sweep_plan.OWED_VALID_S
        told = [each.key for each in members.objects if (each.last_modified or 0.0) >= lately]
        ranks = {key: parsed[1] for key in told if (parsed := keys.parse_owed_key(key)) is not None}
        reading = (self._readable("R4", read_record(self.store, key, records.decode_owed)) for key in ranks)
        found = zip(ranks.values(), await all_or_none(reading), strict=True)
        return {id_: rank for rank, there in found if there is not None for id_ in there[0]}

    async def _readable(self, rule: str, reading: Awaitable[T]) -> T | None:
        """Return what is read, or None if it is unreadable, which is noted."""
        try:
            return await reading
        except InvalidRecordError as error:
            self._note(rule, error)
            return None

    def _note(self, rule: str, error: InvalidRecordError) -> None:
        if error.key not in self.unreadable:
            logger.warning("record_unreadable error=%s; leaving alone what it describes", error)
        self.unreadable[error.key] = Finding(rule, error.key, error.detail)

    async def _multiparts(self) -> tuple[MultipartInfo, ...]:
        if not self.store.capabilities.multipart:
            return ()
        return tuple(await self.store.list_multiparts(keys.DATA))

    async def _read_decisions(self, listing: Listing) -> dict[CheckpointId, Decision]:
        for error in await steps.read_decisions(self.store, listing, self.known):
            self._note("R4", error)
        return {decision.checkpoint: decision for _, decision in self.known.values()}

    async def _read_leases(self, listing: Listing) -> dict[str, tuple[Lease, float]]:
        leases: dict[str, tuple[Lease, float]] = {}
        for each in listing.objects:
            checkpoint = keys.parse_lease_key(each.key)
            if checkpoint is None:
                continue
            reading = read_record(self.store, each.key, records.decode_lease)
            there = await self._readable("R2", reading)
            if there is not None:
                lease = there[0]
            elif each.key in self.unreadable:
                lease = steps.unreadable_lease(checkpoint, each.key)
            else:
                continue  # gone by now
            leases[each.key] = (lease, each.last_modified or listing.server_time)
        return leases

    async def _world_sizes(self, generations: set[int]) -> dict[int, int]:
        sizes: dict[int, int] = {}
        for number in sorted(generations):
            reading = read_record(
                self.store,
                keys.generation_key(number),
                lambda data, number=number: records.decode_generation(data, number),  # type: ignore[misc]
            )
            there = await self._readable("R5", reading)
            if there is not None:
                sizes[number] = there[0].world_size
        return sizes

    # --- act -----------------------------------------------------------------------------------------------

    async def perform(self, action: sweep_plan.Planned) -> Outcome | None:
        """Carry out one action, and return the outcome that it gave to a checkpoint, if any.

        Safe whatever another sweeper, trainer or reader has done in the meantime.
        """
        store = self.store
        match action:
            case sweep_plan.Settle():
                settled = await deciding.settle(
                    store, action.checkpoint, world_size=action.world_size, by="sweeper", now=self.clock()
                )
                return settled[0].outcome if settled and settled[1] else None
            case sweep_plan.GiveUp():
                wanted = steps.new_decision(
                    action.checkpoint,
                    Outcome.ABORT,
                    name=action.name,
                    world_size=action.world_size,
                    by="sweeper",
                    now=self.clock(),
                    reason=action.reason,
                )
                _, is_ours = await deciding.decide_once(store, wanted)
                return Outcome.ABORT if is_ours else None
            case sweep_plan.MoveLatest():
                await steps.move_latest(store, action.checkpoint, action.name)
            case sweep_plan.BeginPrune():
                has_begun = await steps.begin_prune(store, action.checkpoint)
                return Outcome.PRUNING if has_begun else None
            case sweep_plan.FinishPrune():
                has_ended = await steps.finish_prune(store, action.checkpoint)
                return Outcome.PRUNED if has_ended else None
            case sweep_plan.AbortMultipart():
                await self._abort_multipart(action.key, action.upload_id)
            case sweep_plan.Delete():
                await store.delete(action.object_keys)
            case sweep_plan.CollectDecisions():
                await steps.collect(store, action)
            case sweep_plan.Wait():
                pass
            case _:
                assert_never(action)
        return None

    async def _abort_multipart(self, key: str, upload_id: str) -> None:
        for _ in range(MAX_ABORTS):
            await self.store.abort_multipart(key, upload_id)
            listed = await self.store.list_multiparts(key)
            if all(each.upload_id != upload_id for each in listed):
                return
        raise StoreError(
            f"still there after {MAX_ABORTS} aborts, because parts were still arriving; the next sweep will"
            " continue",
            reason=FailureReason.TRANSIENT,
            operation="abort_multipart",
            key=key,
        )


async def open_run(store: PatientStore, *, is_read_only: bool, timeout_s: float) -> bool | None:
    """Open the store of a run.

    Returns False if there is no run, None if there is not even a bucket or folder for one. In both cases nothing is
    created there, not even a folder or a probe. In a folder without any space, what is reserved there is released.
    """
    looking = store.answering_within(max(1.0, timeout_s))
    try:
        await store.open(timeout_s, is_read_only=True)
    except StoreError as error:
        if error.reason is FailureReason.NOT_FOUND:
            return None
        raise
    if (
        not (await looking.list(keys.GENERATIONS)).objects
        and not (await looking.list(keys.DECISIONS)).objects
    ):
        return False
    if not is_read_only:
        await store.close()
        try:
            await store.open(timeout_s)
        except StoreError as error:
            if error.reason is not FailureReason.DISK:
                raise
            await store.open(timeout_s, is_read_only=True)
            await looking.delete([keys.RESERVE])
            await store.open(timeout_s)
    return True


def _generation_of(key: str) -> int | None:
    """Return the generation to which a key below `members/` belongs.

    The key is that of a member, a heartbeat, or a message that watchers left for each other.
    """
    if (announced := keys.parse_announcement_key(key)) is not None:
        return announced.generation
    member = keys.parse_member_key(key) or keys.parse_owed_key(key) or keys.parse_ended_key(key)
    return member[0] if member is not None else keys.parse_beat_key(key)
