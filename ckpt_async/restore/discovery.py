"""Find the newest complete checkpoint: decisions are the truth, latest is a hint (rule R3)."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, Unpack, cast

from ckpt_async import threads
from ckpt_async.core import arguments, keys, naming
from ckpt_async.core.agreement import obstacle
from ckpt_async.core.boundary import NOTHING_COLLECTED, NOWHERE
from ckpt_async.core.local_state import Local
from ckpt_async.core.model import CheckpointId, Decision, Latest, Outcome, Receipt, without_slash
from ckpt_async.core.units import counted
from ckpt_async.errors import (
    CkptAsyncError,
    FailureReason,
    InvalidRecordError,
    NoJournalError,
    NoUsableCheckpointError,
    ObjectNotFoundError,
    SettingsError,
    StoreError,
    UnknownVersionError,
)
from ckpt_async.local import journals
from ckpt_async.protocol import steps
from ckpt_async.protocol.cas import if_readable
from ckpt_async.protocol.runs import check_known
from ckpt_async.restore.checkpoint import Checkpoint, Rejected, checkpoint_of, why_passed_over
from ckpt_async.restore.foreign import find_foreign
from ckpt_async.restore.objects import look, own_place
from ckpt_async.restore.options import FindOptions, check
from ckpt_async.restore.session import Session, mark_damaged, session, unreliable
from ckpt_async.stores import StoreOptions
from ckpt_async.stores.interface import Listing, ObjectInfo
from ckpt_async.sweep.drain import drain
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.together import all_or_none, both

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How many shards that a listing lacks are looked for at once.
MOST_UNLISTED = 256
# How many generations of a run are probed for a step, one by one, where decisions cannot be listed.
MOST_GENERATIONS = 20


def find(remote: str, **options: Unpack[FindOptions]) -> Checkpoint | None:
    """Find the newest complete checkpoint of a run, by `(generation, step)`; None if there is none, which means a
    fresh start. The options are those of `FindOptions`. `remote` may be the address of a text pointer (`….symlink`, as
    of Composer): then it is the checkpoint that this names.

    A committed checkpoint is marked as damaged and skipped if its receipts are not those that were decided on, or
    if a shard is missing or has another size; it then appears in `rejected` of the result. Checksums are compared
    when the bytes are read.

    In a run of several ranks, call it on one of them and broadcast the result, which is a plain value.

    If ckpt_async has committed nothing at this place, complete checkpoints of other tools are recognised by their
    markers (docs/restore.md lists them). A set of one file per rank (`ep1-ba42-rank0.pt`, `-rank1.pt`, …) has no
    marker: it is complete if it has exactly one file of every rank. The number of ranks is taken from its name
    (`ep1-ba42-ws8-rank0`, `ep1-ba42-rank0-of-8`), else from `world_size`; if neither gives it, the set is rejected.

    Where nothing can be listed (a web server), `find` finds only the checkpoint that `latest` names, or one `step`,
    or a checkpoint of OLMo, OLMo-core, DCP or Composer whose folder is `remote`; if it finds nothing, it raises
    StoreError.

    None is returned only if nothing contradicts it. It is not returned if `latest.json` or the journal in `folder`
    knows of a commit, if the store shows no generation of a run that was opened in `folder`, or if no Uploader was
    ever opened for this kind though other kinds of the run were saved. (With `step` or `generation`, None only
    means that there is no such checkpoint.)

    Blocks. Raises NoUsableCheckpointError if there are checkpoints and all of them are damaged, or if several of
    other tools have the newest step and nothing tells which is meant, UnknownKindError if there are only other kinds,
    StoreError if the store cannot be reached, or shows nothing of a run that was there, FileNotFoundError if there is
    no such pointer.
    """
    check("find", options, FindOptions)
    if remote.endswith(naming.POINTER_SUFFIX):
        return _pointed_at(remote, options)
    kind = naming.check_kind(options.get("kind"))
    folder, store_options = options.get("folder"), options.get("store_options")
    step, generation, world_size = options.get("step"), options.get("generation"), options.get("world_size")
    run, remote = remote, keys.kind_remote(remote, kind)
    step = None if step is None else arguments.whole(step, "step", 0, keys.MAX_STEP)
    if generation is not None:
        generation = arguments.whole(generation, "generation", 0, keys.MAX_GENERATION)
    if world_size is not None:
        world_size = arguments.whole(world_size, "world_size", 1, keys.MAX_RANK + 1)
    drain_timeout_s = arguments.seconds(options.get("drain_timeout_s", 0.0), "drain_timeout_s")

    async def work() -> Checkpoint | None:
        if folder is not None and drain_timeout_s > 0:
            await _finish_predecessor(folder, drain_timeout_s, store_options)
        known = await asyncio.to_thread(known_in, folder, remote)
        try:
            async with session(remote, store_options) as opened:
                found = await _find(
                    opened, step, generation, options.get("passing_over", ()), world_size, known
                )
        except StoreError as error:
            if not _is_nowhere(error):
                raise
            refuse_traces(remote, known, None, has_generations=False)
            await _check_kind(run, kind, store_options)
            logger.warning(
                "remote_missing %s error=%s; treating the run as one without checkpoints", remote, error
            )
            return None
        if found is None:
            await _check_kind(run, kind, store_options)
        return found

    return threads.run(work())


def _is_nowhere(error: StoreError) -> bool:
    return error.operation == "open" and error.reason is FailureReason.NOT_FOUND


async def _check_kind(run: str, kind: str, store_options: StoreOptions | None) -> None:
    """Raise UnknownKindError if other kinds of the run were saved, but this one was never begun."""
    try:
        async with session(run, store_options) as opened:
            if opened.store.capabilities.lists:
                await check_known(opened.store, kind)
    except StoreError as error:
        if not _is_nowhere(error):
            raise


def drain_predecessor(
    folder: str | os.PathLike[str], timeout_s: float, store_options: StoreOptions | None = None
) -> None:
    """Finish what a dead trainer left in its folder on this node, as far as possible within `timeout_s`. Blocks.
    Never raises for what it could not finish: it is logged, and an older checkpoint is better than none.
    """
    threads.run(_finish_predecessor(folder, timeout_s, store_options))


async def _finish_predecessor(
    folder: str | os.PathLike[str], timeout_s: float, store_options: StoreOptions | None
) -> None:
    """Finish what a dead trainer left, best effort: an older checkpoint is better than none."""
    try:
        grace_s = min(timeout_s, 10.0)
        report = await drain(folder, timeout_s=timeout_s, grace_s=grace_s, store_options=store_options)
    except NoJournalError:
        return  # nothing was ever saved here
    except CkptAsyncError as error:
        logger.warning("predecessor_not_finished folder=%s error=%s", folder, error)
        return
    for rank in report.ranks:
        if rank.error:
            logger.warning(
                "predecessor_not_finished folder=%s rank=%d error=%s", folder, rank.rank, rank.error
            )
        for fate in (*rank.committed, *rank.waiting, *rank.left):
            what = "committed" if fate in rank.committed else "not committed yet"
            logger.info(
                "predecessor %s rank=%d kind=%s %s %s",
                fate.checkpoint,
                rank.rank,
                rank.kind,
                what,
                fate.reason,
            )


def _pointed_at(pointer: str, options: FindOptions) -> Checkpoint | None:
    """Find the checkpoint that a text pointer leads to: one of ours by its own id, or what is in the folder."""
    if given := [name for name in ("kind", "step", "generation") if options.get(name) is not None]:
        raise SettingsError(f"{pointer} names the checkpoint", hint=f"leave out {', '.join(given)}")
    looked = look(pointer, options.get("store_options"))
    if looked.url == pointer:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), pointer)
    if (own := own_place(looked.url)) is not None:
        run, id_, _ = own
        choice = options.copy()
        choice["step"], choice["generation"] = id_.step, id_.generation
        return find(run, **choice)
    return looked.checkpoint or find(looked.url, **options)


async def _find(
    opened: Session,
    step: int | None,
    generation: int | None,
    passing_over: Collection[CheckpointId],
    world_size: int | None,
    known: Known,
) -> Checkpoint | None:
    # An unreadable boundary voids nothing here. Credentials that may not read at all fail at once.
    boundary = if_readable(sure(opened, lambda looking: steps.read_boundary(looking.store)))
    marks, _ = await both(_damaged(opened), boundary)
    found, rejected, latest = await _search(opened, marks, passing_over, step, generation)
    if found is not None:
        return checkpoint_of(*found, opened.remote, opened.options, rejected)
    if not rejected and generation is None:  # other tools' checkpoints have no generation
        foreign, rejected = await find_foreign(opened, step, passing_over, world_size)
        if foreign is not None:
            return foreign
    if rejected:
        raise NoUsableCheckpointError(
            f"none of the checkpoints in {opened.remote} can be used ({len(rejected)} tried): "
            + "; ".join(str(each) for each in rejected[:5])
            + (f"; and {len(rejected) - 5} more" if rejected[5:] else ""),
            hint=f"see `ckpt-async verify {opened.remote}`",
        )
    if step is None and generation is None:
        await check_fresh(opened, opened.remote, known, latest)
    return None


async def _search(
    opened: Session,
    marks: Mapping[CheckpointId, str],
    passing_over: Collection[CheckpointId],
    step: int | None,
    generation: int | None,
) -> tuple[tuple[Decision, list[Receipt]] | None, list[Rejected], Latest | None]:
    """Return the newest checkpoint that can be used, what is newer and cannot, and what `latest` says, unless a step or
    generation is asked for.

    The run goes on meanwhile: what was listed may have been pruned when it is read, because something newer was
    committed. Then everything is listed again, so that the result is never older than what was the newest when this
    began. Each round has a checkpoint that those before had not, or a newer `latest`.
    """
    found: tuple[Decision, list[Receipt]] | None = None
    rejected: list[Rejected] = []
    latest, at = None, NOWHERE
    tried = set[CheckpointId]()
    while True:
        before = latest
        ids, latest = await _look_around(opened, step, generation)
        news = sorted((id_ for id_ in ids - tried if id_ > at), reverse=True)
        if not news and latest == before:
            break
        is_newest = True
        for id_ in news:
            tried.add(id_)
            reason = why_passed_over(passing_over, id_) or marks.get(id_)
            if reason is not None and step is None:
                rejected.append(Rejected(id_, "", reason))
                continue
            try:
                looked = await sure(opened, partial(_look, id_))
            except InvalidRecordError as error:
                # `sure` has looked again, from the decision on, so the checkpoint has not been pruned since.
                rejected.append(Rejected(id_, "", str(error)))
                if not isinstance(error, UnknownVersionError):
                    await mark_damaged(opened, id_, str(error))
                if step is not None:  # that very step was asked for, not one that an older generation saved
                    return None, rejected, latest
                continue
            if looked is not None:
                found, at = looked, id_
                break
            is_newest = False
        if found is not None and is_newest and not (latest is not None and latest.checkpoint > at):
            break
    return found, [each for each in rejected if each.id > at], latest


async def _look_around(
    opened: Session, step: int | None, generation: int | None
) -> tuple[set[CheckpointId], Latest | None]:
    """Return what may be what is asked for, and `latest` if that is the newest of all.

    Where nothing can be listed, that is the one that latest names; or, if another step is asked for, that step in
    `generation`, or in that of latest and the ones before it, where it may not exist.
    """
    listing, latest = await both(_decisions(opened), steps.read_latest(opened.store))
    if isinstance(listing, Listing):
        found = {keys.parse_decision_key(each.key) for each in listing.objects}
        ids = {each for each in found if each is not None}
    elif listing.reason is FailureReason.AUTH and latest is not None:
        logger.warning("listing_refused error=%s; considering only the checkpoint that latest names", listing)
        newest = latest.checkpoint.generation if generation is None else generation
        oldest = max(0, newest - MOST_GENERATIONS) if generation is None else newest - 1
        probed = () if step is None else (CheckpointId(each, step) for each in range(newest, oldest, -1))
        ids = {latest.checkpoint} if step in (None, latest.checkpoint.step) else {*probed}
    elif opened.store.capabilities.lists:
        raise listing
    else:
        ids = set()  # it may be another tool's
    wanted = {each for each in ids if step in (None, each.step) and generation in (None, each.generation)}
    return wanted, latest if step is None and generation is None else None


async def _decisions(opened: Session) -> Listing | StoreError:
    try:
        return await opened.store.list(keys.DECISIONS)
    except StoreError as error:
        return error


async def _damaged(opened: Session) -> dict[CheckpointId, str]:
    """Return what other readers have found damaged, to be reported by `find`. Unreadable marks are ignored: they
    are only a hint.
    """
    try:
        return await steps.read_damages(opened.store)
    except StoreError as error:
        if error.reason is FailureReason.AUTH:
            return {}  # listing is not permitted: then no mark can save us an attempt
        raise


async def _look(id_: CheckpointId, opened: Session) -> tuple[Decision, list[Receipt]] | None:
    """Return the decision and receipts of a committed checkpoint, or None if it is not committed; raise
    InvalidRecordError if it cannot be read as it was decided.
    """
    decision = await steps.read_settled(opened.store, id_, only_reads=True)
    if decision is None or decision.outcome is not Outcome.COMMIT:
        return None
    return decision, await _check(opened, decision)


async def _check(opened: Session, decision: Decision) -> list[Receipt]:
    """Return the receipts of a committed checkpoint; raise InvalidRecordError if it cannot be read as it was
    decided.
    """
    ranks = all_or_none(_receipt(opened, decision, rank) for rank in range(decision.world_size))
    read, sizes = await both(ranks, _sizes(opened, decision))
    receipts = _whole(read)
    if reason := obstacle(decision.checkpoint, receipts):
        raise InvalidRecordError(f"{decision.checkpoint}: {reason}")
    wanted = {shard.key: shard.size_bytes for receipt in receipts for shard in receipt.shards}
    unlisted = [key for key in wanted if key not in sizes]
    for first in range(0, len(unlisted), MOST_UNLISTED):  # ends with the first that is gone
        some = unlisted[first : first + MOST_UNLISTED]
        for info in _whole(await all_or_none(_head(opened, key) for key in some)):
            sizes[info.key] = info.size_bytes
    for key, size_bytes in wanted.items():
        if sizes[key] != size_bytes:
            raise InvalidRecordError(
                f"{decision.checkpoint}: {key} has {sizes[key]} bytes, but its receipt says {size_bytes}"
            )
    return receipts


async def _sizes(opened: Session, decision: Decision) -> dict[str, int]:
    """Return the sizes of the shards by key, from one listing instead of a request for every shard."""
    prefix = keys.data_prefix(decision.name, decision.checkpoint.generation)
    try:
        listing = await opened.store.list(prefix)
    except StoreError as error:
        if error.reason is FailureReason.AUTH:
            return {}
        raise
    return {each.key: each.size_bytes for each in listing.objects}


async def _receipt(opened: Session, decision: Decision, rank: int) -> Receipt | InvalidRecordError:
    try:
        return await steps.bound_receipt(opened.store, decision, rank)
    except InvalidRecordError as error:
        return error


async def _head(opened: Session, key: str) -> ObjectInfo | InvalidRecordError:
    try:
        return await opened.store.head(key)
    except ObjectNotFoundError:
        return InvalidRecordError(f"{key} is missing")


def _whole(found: Iterable[T | InvalidRecordError]) -> list[T]:
    """Return what was found, or raise the first error: always the same one, in whichever order the answers came."""
    whole: list[T] = []
    for each in found:
        if isinstance(each, InvalidRecordError):
            raise each
        whole.append(each)
    return whole


class _Noting:
    """A store that remembers the hash of each record that it has returned."""

    def __init__(self, store: PatientStore) -> None:
        self._store = store
        self.brought: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        data, info = await self._store.get(key, max_size_bytes=max_size_bytes)
        self.brought[key] = hashlib.sha256(data).hexdigest()
        return data, info


async def sure(opened: Session, look: Callable[[Session], Awaitable[T]]) -> T:
    """Return what `look` makes of the store's records. If it cannot read one, look again over other connections.

    Of records that it reads concurrently, `look` must read all before it raises for the first bad one, so that two
    looks can be compared.

    Raises InvalidRecordError if it fails twice for the same reason over the same bytes; UnreliableReadError if no
    two looks agree.
    """
    try:
        return await look(opened)
    except InvalidRecordError as error:
        logger.info("record_is_read_again error=%s", error)
    failures: list[tuple[str, dict[str, str]]] = []
    for _ in range(2):
        async with session(opened.remote, opened.options) as afresh:
            store = _Noting(afresh.store)
            try:
                return await look(replace(afresh, store=cast(PatientStore, store)))
            except InvalidRecordError as error:
                failures.append((str(error), store.brought))
                last = error
    if failures[0] == failures[1]:
        raise last
    raise unreliable(f"records in {opened.remote} are unreadable, differently at each read ({last})")


_HINT = (
    "is this the right place, is it mounted, and does the store list everything it has? If you emptied the"
    " run on purpose, start it again under another URL and in another folder"
)


@dataclass(frozen=True, slots=True)
class Known:
    """What a node's journals know of a run."""

    committed: CheckpointId | None = None
    generation: int = 0


def known_of(locals_: Iterable[Local], remote: str) -> Known:
    """Return what the journals of the ranks that wrote to `remote` know. Pure."""
    there = without_slash(remote)
    ours = [each for each in locals_ if each.remote is not None and each.remote.url == there]
    committed = [each.newest_committed for each in ours if each.newest_committed is not None]
    return Known(max(committed, default=None), max((each.generation for each in ours), default=0))


def known_in(folder: str | os.PathLike[str] | None, remote: str) -> Known:
    """Return what the journals in `folder` know of the run at `remote`. Blocks."""
    if folder is None:
        return Known()
    try:
        found = journals.states(folder)
    except NoJournalError:
        return Known()
    return known_of([each.local for states in found.values() for each in states], remote)


async def check_fresh(opened: Session, remote: str, known: Known, latest: Latest | None) -> None:
    """Raise StoreError if the run has left traces although no checkpoint of it was found. `latest` is what it said
    before all was listed. Logs whether anything was ever here: the URL may be mistyped.
    """
    store = opened.store
    await steps.refuse_unfinished_copy(store)
    if latest is not None:
        boundary = await if_readable(steps.read_boundary(store)) or NOTHING_COLLECTED
        latest = None if boundary.voids(latest.checkpoint) else latest
    if not store.capabilities.lists:
        refuse_traces(remote, known, latest, has_generations=True)
        return
    numbers = {keys.parse_generation_key(each.key) for each in (await store.list(keys.GENERATIONS)).objects}
    refuse_traces(remote, known, latest, has_generations=bool(numbers))
    earlier = numbers - {None, known.generation}
    logger.warning(
        "no_checkpoint url=%s; %s",
        remote,
        f"{counted(len(earlier), 'other generation')} began here, and nothing was committed"
        if earlier
        else "nothing was ever saved here, so this is a new run, or not the right URL",
    )


def refuse_traces(remote: str, known: Known, latest: Latest | None, *, has_generations: bool) -> None:
    """Raise StoreError if anything says that this run has checkpoints, which nobody sees now. Pure."""
    if latest is not None:
        mark = f"{keys.LATEST} says that {latest.checkpoint} is committed"
    elif known.committed is not None:
        mark = f"this node's journal knows that {known.committed} was committed"
    elif known.generation and not has_generations:
        mark = f"this node's journal knows generation {known.generation} of it"
    else:
        return
    raise StoreError(
        f"{remote} shows no checkpoint, but {mark}: this is not a fresh start",
        reason=FailureReason.OTHER,
        operation="find",
        hint=_HINT,
    )
