"""Deliberate mistakes in the protocol, each as a context in which it is made."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from ckpt_async.core import agreement, decide, keys, records, retention, waiting
from ckpt_async.core.boundary import Boundary
from ckpt_async.core.local_state import Local, LocalCheckpoint
from ckpt_async.core.model import Latest, MadeDurable, Outcome
from ckpt_async.engine import committing, on_disk
from ckpt_async.engine.state import State
from ckpt_async.errors import PreconditionFailedError
from ckpt_async.protocol import cas, copies, deciding, steps, sweep_plan
from ckpt_async.restore import discovery
from ckpt_async.sweep import remote as remote_sweep
from tests.model.machines import Collecting, Finding, Protocol, Publishing, PublishingSteady, Reading, Steady
from tests.model.mutation import changed

Mutant = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def patched(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def commits_what_has_no_shards() -> contextlib.AbstractContextManager[None]:
    """An empty checkpoint would be the newest one, and retention would remove the last one with data."""
    real = agreement.obstacle

    def obstacle(*arguments: Any) -> str | None:
        found = real(*arguments)
        return None if found == "no rank enqueued a shard" else found

    return patched((agreement, "obstacle", obstacle))


def commits_without_what_is_expected() -> contextlib.AbstractContextManager[None]:
    """R5: a file that the writer's mark names is on a node that was not looked at."""
    return patched((agreement, "_lacking", lambda *_: None))


def commits_without_all_receipts() -> contextlib.AbstractContextManager[None]:
    """R1: the first rank commits whatever is there."""

    async def read_receipts(store: Any, checkpoint: Any, world_size: int) -> dict[int, bytes]:
        read = [await cas.read(store, keys.receipt_key(checkpoint, rank)) for rank in range(world_size)]
        found = [each[0] for each in read if each is not None]
        return {rank: found[rank % len(found)] for rank in range(world_size) if found}

    def decode_receipt(data: bytes, id_: Any, _: int) -> Any:
        rank = int(data.split(b'"rank":')[1].split(b",")[0])
        return real(data, id_, rank)

    real = records.decode_receipt
    return patched(
        (decide, "is_complete", lambda *_: True),
        (agreement, "obstacle", lambda *_: None),
        (deciding, "read_receipts", read_receipts),
        (deciding, "_gone", _nothing_is_gone),
        (deciding.records, "decode_receipt", decode_receipt),
    )


async def _nothing_is_gone(*_: Any) -> list[str]:
    return []


def commits_what_the_store_has_lost() -> contextlib.AbstractContextManager[None]:
    """R1: what was verified is not compared with what is there."""
    return patched((deciding, "_gone", _nothing_is_gone))


def releases_what_the_store_has_lost() -> contextlib.AbstractContextManager[None]:
    """R7: the links of what was given up are removed, though they may be all that is left of it."""
    return patched((Local, "to_rescue", ()))


def commits_before_uploads() -> contextlib.AbstractContextManager[None]:
    """R1: the receipt is written when the checkpoint is sealed, not when its shards are verified."""
    is_verified = property(lambda checkpoint: checkpoint.sealed is not None)
    return patched((LocalCheckpoint, "is_verified", is_verified))


def mixes_generations() -> contextlib.AbstractContextManager[None]:
    """R5: receipts are stored by step alone, and the newest one counts."""

    def receipts_prefix(checkpoint: Any) -> str:
        return f"{keys.RECEIPTS}{1:06d}-{checkpoint.step:012d}/"

    async def create_once(store: Any, key: str, data: bytes) -> bytes:
        if key.startswith(keys.RECEIPTS):
            await store.put(key, data)
            return data
        return await real_create(store, key, data)

    async def receipts_of(state: State, id_: Any) -> waiting.Receipts:
        listing = await state.store.list(keys.receipts_prefix(id_))
        return waiting.Receipts(tuple(int(each.key[-10:-5]) for each in listing.objects))

    def decode_receipt(data: bytes, expected: Any, rank: int) -> Any:
        generation = int(data.split(b'"generation":')[1].split(b",")[0])
        return real_decode(data, replace(expected, generation=generation), rank)

    real_create, real_decode = cas.create_once, records.decode_receipt
    return patched(
        (keys, "receipts_prefix", receipts_prefix),
        (cas, "create_once", create_once),
        (committing, "receipts_of", receipts_of),
        (agreement, "obstacle", lambda *_: None),
        (deciding, "records", _with(records, decode_receipt=decode_receipt)),
    )


def removes_before_commit() -> contextlib.AbstractContextManager[None]:
    """R7: local files are removed when they are uploaded, not when the checkpoint is committed."""

    def decide_(local: Any, remote: Any, policy: Any, now: float) -> list[Any]:
        early = [
            decide.Remove(id_, "")
            for id_, each in local.checkpoints.items()
            if each.decision is None and each.has_receipt
        ]
        return early or real(local, remote, policy, now)

    real = decide.decide
    return patched((decide, "decide", decide_))


def releases_before_decision() -> contextlib.AbstractContextManager[None]:
    """R7: the links are removed when the files are uploaded."""

    def decide_(local: Any, remote: Any, policy: Any, now: float) -> list[Any]:
        early = [
            decide.Release(id_)
            for id_, each in local.checkpoints.items()
            if each.decision is None and each.is_verified and not each.is_released
        ]
        return early + real(local, remote, policy, now)

    real = decide.decide
    return patched((decide, "decide", decide_))


def retention_counts_uncommitted() -> contextlib.AbstractContextManager[None]:
    """R8: the newest N checkpoints are kept, committed or not."""

    def after(local: Any, remote: Any, policy: Any) -> Any:
        def keep_(self: Any, _: Any) -> Any:
            return keep(self, [decide.candidate(each) for _, each in sorted(local.checkpoints.items())])

        with mock.patch.object(retention.KeepLocal, "keep", keep_):
            yield from list(real(local, remote, policy))

    real, keep = decide._after_decision, retention.KeepLocal.keep
    return patched((decide, "_after_decision", after))


def removes_before_the_link_moves() -> contextlib.AbstractContextManager[None]:
    """R2, locally: a checkpoint is removed while the symlink still points to it."""

    def after(local: Any, remote: Any, policy: Any) -> Any:
        actions = list(real(local, remote, policy))
        if moves := [each for each in actions if isinstance(each, decide.MoveLocalLatest)]:
            moved = real(local, replace(remote, local_latest=moves[0].checkpoint), policy)
            actions = [each for each in moved if isinstance(each, decide.Remove)] or actions
        return actions

    real = decide._after_decision
    return patched((decide, "_after_decision", after))


def skips_fsync() -> contextlib.AbstractContextManager[None]:
    """I4: `MadeDurable` is journaled although nothing was fsynced."""

    async def make_durable(state: State, action: Any) -> None:
        checkpoint = state.checkpoint(action.checkpoint)
        state.record(MadeDurable(checkpoint.id, tuple(checkpoint.shards), checkpoint.sealed is not None))

    return patched((on_disk, "make_durable", make_durable))


def skips_fsync_of_folders() -> contextlib.AbstractContextManager[None]:
    """I4: the files are on disk, but their names are not."""

    def fsync_shards(state: State, checkpoint: Any, shards: Any) -> list[Any]:
        for each in shards:
            on_disk.fsync_path(state.path(checkpoint, each))
        return []

    return patched((on_disk, "fsync_shards", fsync_shards))


def skips_read_back() -> contextlib.AbstractContextManager[None]:
    """R13: a 412 is taken for another process's abort, although it is the answer to a retry of our own PUT, whose
    first reply was lost.
    """

    async def create_once(store: Any, key: str, data: bytes) -> bytes:
        try:
            await store.put(key, data, cas.Create())
        except PreconditionFailedError:
            wanted = records.decode_decision(data, keys.parse_decision_key(key))
            another = replace(wanted, outcome=Outcome.ABORT, decided_by="another", nonce="another")
            return records.encode_decision(another)
        return data

    return patched((deciding, "create_once", create_once))


def abort_does_not_compete() -> contextlib.AbstractContextManager[None]:
    """R4: decisions are written unconditionally, so a straggler commits what was given up."""

    async def create_once(store: Any, key: str, data: bytes) -> bytes:
        await store.put(key, data)
        return data

    return patched((deciding, "create_once", create_once))


def sweeps_without_abort() -> contextlib.AbstractContextManager[None]:
    """R4: what looks abandoned is deleted without being given up first."""

    async def perform(self: Any, action: Any) -> None:
        if isinstance(action, sweep_plan.GiveUp):
            listing = await self.store.list(keys.DATA)
            doomed = [
                each.key
                for each in listing.objects
                if (keys.parse_data_key(each.key) or (None,))[0] == action.checkpoint
            ]
            if doomed:
                await self.store.delete(doomed)
            return
        await real(self, action)

    real = remote_sweep.RemoteSweep.perform
    return patched((remote_sweep.RemoteSweep, "perform", perform))


def prunes_what_is_read() -> contextlib.AbstractContextManager[None]:
    """R2: leases are ignored."""

    async def readers(*_: Any) -> list[str]:
        return []

    return patched((steps, "readers", readers), (sweep_plan, "_live_leases", lambda *_: ()))


def prunes_shards_first() -> contextlib.AbstractContextManager[None]:
    """R2: shards are deleted before the decision says `pruning`."""

    async def begin_prune(store: Any, checkpoint: Any) -> bool:
        listing = await store.list(keys.DATA)
        doomed = [
            each.key
            for each in listing.objects
            if (keys.parse_data_key(each.key) or (None,))[0] == checkpoint
        ]
        await store.delete(doomed)
        return await real(store, checkpoint)

    real = steps.begin_prune
    return patched((steps, "begin_prune", begin_prune))


def prunes_past_latest() -> contextlib.AbstractContextManager[None]:
    """R2: a checkpoint is pruned while latest still names it."""

    def retain(view: Any, valid: Any, policy: Any) -> Any:
        yield from real(_ahead(view), valid, policy)
        yield from publish(view, valid)

    def _ahead(view: Any) -> Any:
        newest = max(view.decisions, default=None)
        if newest is None or view.latest is None:
            return view
        return replace(view, latest=replace(view.latest, checkpoint=replace(newest, step=10**6)))

    real, publish = sweep_plan._retain, sweep_plan._publish
    return patched((sweep_plan, "_retain", retain), (sweep_plan, "_publish", lambda *_: ()))


def waits_for_the_oldest() -> contextlib.AbstractContextManager[None]:
    """R9: a checkpoint that never completes blocks all later ones."""

    def decide_(local: Any, remote: Any, policy: Any, now: float) -> list[Any]:
        undecided = sorted(id_ for id_, each in local.checkpoints.items() if each.decision is None)
        actions = real(local, remote, policy, now)
        return [
            each for each in actions if not isinstance(each, decide.Commit) or each.checkpoint == undecided[0]
        ]

    real = decide.decide
    return patched((decide, "decide", decide_))


def never_looks_again() -> contextlib.AbstractContextManager[None]:
    """I8: a rank that was not last never learns of the decision, and does not help if the last rank has died."""
    return patched((waiting, "next_poll", lambda *_, **__: float("inf")))


def _with(module: Any, **changes: Any) -> Any:
    """Return a module with some functions replaced, for one importer only."""
    from types import SimpleNamespace

    return SimpleNamespace(**{**vars(module), **changes})


def moves_latest_before_commit() -> contextlib.AbstractContextManager[None]:
    """R1: latest is moved before the commit."""

    async def commit(state: State, action: Any) -> None:
        name = state.checkpoint(action.checkpoint).name
        await steps.move_latest(state.store, action.checkpoint, name)
        await real(state, action)

    real = committing.commit
    return patched((committing, "commit", commit))


def moves_latest_back() -> contextlib.AbstractContextManager[None]:
    """R6: a blind write instead of a compare-and-swap."""

    async def move_latest(store: Any, checkpoint: Any, name: str) -> Latest:
        latest = Latest(checkpoint, name, keys.data_prefix(name, checkpoint.generation), 1, "nonce")
        await store.put(keys.LATEST, records.encode_latest(latest))
        return latest

    return patched((steps, "move_latest", move_latest))


def compares_latest_by_step() -> contextlib.AbstractContextManager[None]:
    """R6: a run that was reset to an older step never becomes latest again."""
    return patched(
        (decide, "is_ahead", lambda id_, latest: latest is None or id_.step > latest.checkpoint.step)
    )


# `MUTANTS` has each mutant with the machine that finds it within seconds, and the invariant that it must
# violate: another one would mean a broken mutant.


def leaves_copies_when_pruning() -> contextlib.AbstractContextManager[None]:
    """R2: a copy stays when its checkpoint is pruned."""

    async def retract(*_: Any) -> None: ...

    return patched((copies, "retract", retract))


def the_last_to_come_has_the_key() -> contextlib.AbstractContextManager[None]:
    """R6, for claims: an older checkpoint's copy replaces a newer one's."""

    async def claim(store: Any, checkpoint: Any, shard: Any) -> Any:
        await store.delete([keys.claim_key(shard.publish_as)])
        return await real(store, checkpoint, shard)

    real = copies._claim
    return patched((copies, "_claim", claim))


def lists_only_once() -> contextlib.AbstractContextManager[None]:
    """R3: what was listed has been pruned by the time it is read, because something newer was committed."""
    old = " and is_newest and not (latest is not None and latest.checkpoint > at)"
    return changed(discovery._search, old, "")


def takes_an_early_listing_for_all_there_is() -> contextlib.AbstractContextManager[None]:
    """R3: the first commit comes between the listing and `latest`, which a fresh start contradicts."""
    return changed(discovery._search, " and latest == before", "")


def collects_by_position() -> contextlib.AbstractContextManager[None]:
    """R4: below a collected checkpoint of the newest generation, one that is not decided yet becomes void."""

    def moved(self: Boundary, upto: Any, kept: Any, pruned: Any, aborted: Any, nonce: str) -> Boundary:
        return real(self, max({upto, *pruned, *aborted}), (), pruned, aborted, nonce)

    real = Boundary.moved
    return patched((Boundary, "moved", moved))


def deletes_before_the_boundary_moves() -> contextlib.AbstractContextManager[None]:
    """R4: a straggler decides again what was collected, and reads an old boundary."""

    async def collect(store: Any, action: Any) -> None:
        await store.delete(list(action.object_keys))
        await real(store, action)

    real = steps.collect
    return patched((steps, "collect", collect))


MUTANTS = [
    (lists_only_once, Finding, "R3"),
    (takes_an_early_listing_for_all_there_is, Finding, "R3"),
    (collects_by_position, Collecting, "R4|I1"),
    (deletes_before_the_boundary_moves, Collecting, "R4"),
    (commits_what_has_no_shards, Protocol, "I1"),
    (commits_without_what_is_expected, Protocol, "I1"),
    (commits_without_all_receipts, Protocol, "I1"),
    (commits_what_the_store_has_lost, Protocol, "I1"),
    (releases_what_the_store_has_lost, Protocol, "I3"),
    (commits_before_uploads, Protocol, "I1|I4|I6"),
    (mixes_generations, Protocol, "R5|R4|I6|I1|R3"),
    (moves_latest_before_commit, Protocol, "I2"),
    (moves_latest_back, Steady, "I2"),
    (compares_latest_by_step, Protocol, "R6|I8|I2"),
    (removes_before_commit, Protocol, "I3"),
    (releases_before_decision, Protocol, "I3"),
    (retention_counts_uncommitted, Steady, "I5|R2"),
    (removes_before_the_link_moves, Steady, "R2"),
    (skips_fsync, Protocol, "I4|I3|I8|R2"),
    (skips_fsync_of_folders, Protocol, "I4|I3|I8|R2"),
    (skips_read_back, Protocol, "R13"),
    (abort_does_not_compete, Protocol, "R4"),
    (sweeps_without_abort, Protocol, "R4|I1"),
    (prunes_what_is_read, Reading, "R3"),
    (prunes_shards_first, Protocol, "I1"),
    (prunes_past_latest, Steady, "I2"),
    (waits_for_the_oldest, Protocol, "I8"),
    (never_looks_again, Protocol, "I8"),
    (leaves_copies_when_pruning, PublishingSteady, "R2"),
    (the_last_to_come_has_the_key, Publishing, "I8"),
]
