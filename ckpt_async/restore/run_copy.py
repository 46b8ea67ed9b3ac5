"""Copies a run to another place, perhaps in another kind of store: the decisions that show its checkpoints come last.

Nothing is shown there before all of it is there: readers see no checkpoint until its decision exists, and those are
written when every shard and receipt has been stored and verified. `copy.json` marks the copy as unfinished, so that one
that was interrupted goes on, and nothing else is ever mixed with it.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ckpt_async import threads
from ckpt_async.core import keys, records
from ckpt_async.core.model import CheckpointId, Decision, Outcome
from ckpt_async.core.settings import Settings
from ckpt_async.errors import (
    CheckpointConflictError,
    CheckpointGoneError,
    DamagedCheckpointError,
    InTheWayError,
    InvalidRecordError,
    ObjectNotFoundError,
)
from ckpt_async.local.folder import identity_of
from ckpt_async.protocol import steps
from ckpt_async.protocol.cas import create_once
from ckpt_async.protocol.runs import kinds_below
from ckpt_async.restore.checkpoint import Checkpoint, RemoteFile, checkpoint_of
from ckpt_async.restore.fetching import fetch
from ckpt_async.restore.session import PATIENCE_S, Session, session
from ckpt_async.stores import StoreOptions
from ckpt_async.threads import in_thread
from ckpt_async.transfer.patient import PatientStore, connect
from ckpt_async.transfer.source import Source
from ckpt_async.transfer.together import all_or_none, both
from ckpt_async.transfer.upload import upload

logger = logging.getLogger(__name__)

# What is on this node's disk at a time: twice this, or two files if they are larger.
BATCH_BYTES, BATCH_FILES = 1 << 30, 64


@dataclass(slots=True)
class CopyReport:
    """What `copy` has done. `skipped` are damaged or pruned checkpoints of the source, with the reasons."""

    copied: list[CheckpointId] = field(default_factory=list)
    skipped: dict[CheckpointId, str] = field(default_factory=dict)
    size_bytes: int = 0


def copy(
    source: str,
    destination: str,
    *,
    steps: Collection[int] | None = None,
    place: str | os.PathLike[str] | None = None,
    store_options: StoreOptions | None = None,
    destination_options: StoreOptions | None = None,
    on_copied: Callable[[Checkpoint], None] = lambda _: None,
) -> CopyReport:
    """Copy the committed checkpoints of a run, with all its kinds, or only those of these `steps`.

    The bytes pass through this node: a few files at a time are fetched below `place` (default: the temporary folder),
    verified by their checksums, and uploaded. The copy has the same names, generations, metrics and pins; a launch that
    goes on in it gets a newer generation. Copies under exact keys (`publish`) and events are not copied.

    `destination` must be empty, or hold an unfinished copy of `source`, which goes on where it stopped. On return all
    of it is committed there. Beside a running trainer, what it commits later is not copied.

    Blocks. `on_copied` is called for each checkpoint that is stored, which readers see only in the end. Raises
    DestinationError if something else is in `destination`, ObjectNotFoundError if `source` has no such checkpoint,
    NoSpaceError if `place` is too small for two files, StoreError if a store cannot be reached.
    """
    options = destination_options or store_options

    async def work() -> CopyReport:
        report = CopyReport()
        decisions = await _committed_of(source, store_options, steps)
        async with _opened(destination, options) as to:
            began = await _begin(to, source)
            whole = {}
            for kind, committed in decisions.items():
                async with _opened(keys.kind_remote(destination, kind), options) as there:
                    one = _Copy(
                        keys.kind_remote(source, kind), store_options, there, place, on_copied, report
                    )
                    whole[kind] = await one.checkpoints(committed, may_be_there=began)
            for kind, those in whole.items():
                async with _opened(keys.kind_remote(destination, kind), options) as there:
                    await _show(there, those)
            await to.delete([keys.COPY])
        return report

    return threads.run(work())


@contextlib.asynccontextmanager
async def _opened(remote: str, options: StoreOptions | None) -> AsyncIterator[PatientStore]:
    store = connect(remote, options, Settings())
    try:
        await store.open(PATIENCE_S)
        yield store
    finally:
        await store.close()


async def _begin(store: PatientStore, source: str) -> bool:
    """Mark a place as an unfinished copy of this source. Return whether an earlier call has done so."""
    there = await steps.unfinished_copy(store)
    if there is None:
        listing = await store.list("")
        if others := [
            each.key for each in listing.objects if not each.key.startswith((keys.PROBES, keys.TEMPORARY))
        ]:
            raise InTheWayError(
                f"{store.url} is not empty: it has {others[0]}",
                hint="copy to a prefix below which there is nothing",
            )
        ours = records.encode_copy(source, uuid.uuid4().hex)
        made = await create_once(store, keys.COPY, ours)
        if made == ours:
            return False
        there = records.decode_copy(made)
    if there != source:
        raise InTheWayError(
            f"{store.url} holds an unfinished copy of {there}, not of {source}",
            hint="copy to another place, or delete that copy first",
        )
    return True


@dataclass(frozen=True, slots=True)
class _Copy:
    """The copy of one run, or of one kind of it, into an open store."""

    source: str
    options: StoreOptions | None
    to: PatientStore
    place: str | os.PathLike[str] | None
    on_copied: Callable[[Checkpoint], None]
    report: CopyReport

    async def checkpoints(self, decisions: Sequence[Decision], *, may_be_there: bool) -> list[Decision]:
        """Copy shards and receipts, oldest checkpoint first. Return the decisions on those that are whole there."""
        whole = []
        async with session(self.source, self.options) as opened:
            for decision in decisions:
                try:
                    await self._one(opened, decision, may_be_there=may_be_there)
                except (DamagedCheckpointError, CheckpointGoneError, InvalidRecordError) as error:
                    self.report.skipped[decision.checkpoint] = str(error)
                else:
                    whole.append(decision)
        return whole

    async def _one(self, opened: Session, decision: Decision, *, may_be_there: bool) -> None:
        ranks = range(decision.world_size)
        receipts = await all_or_none(steps.bound_receipt(opened.store, decision, rank) for rank in ranks)
        checkpoint = checkpoint_of(decision, receipts, self.source, self.options, ())
        files = list(checkpoint.files.values())
        if may_be_there:
            are_there = await all_or_none(self._is_there(each) for each in files)
            files = [each for each, is_there in zip(files, are_there, strict=True) if not is_there]
        with tempfile.TemporaryDirectory(prefix="ckpt-async-copy-", dir=self.place) as folder:
            await self._files(checkpoint, list(batches(files)), folder)
        for rank in ranks:  # their bytes, because the decision has their checksums
            key = keys.receipt_key(decision.checkpoint, rank)
            data, _ = await opened.store.get(key, max_size_bytes=records.MAX_RECEIPT_SIZE_BYTES)
            await create_once(self.to, key, data)
        self.report.copied.append(decision.checkpoint)
        self.report.size_bytes += checkpoint.size_bytes
        self.on_copied(checkpoint)

    async def _is_there(self, file: RemoteFile) -> bool:
        try:
            info = await self.to.head(file.key)
        except ObjectNotFoundError:
            return False
        return (info.size_bytes, info.checksum) == (file.size_bytes, file.checksum)

    async def _files(self, checkpoint: Checkpoint, todo: Sequence[Sequence[RemoteFile]], folder: str) -> None:
        """Copy one batch after the other, and fetch the next one while one is uploaded."""

        async def fetched(number: int) -> Mapping[str, Path]:
            if number == len(todo):
                return {}
            names = [glob.escape(each.name) for each in todo[number]]
            report = await in_thread(partial(fetch, checkpoint, f"{folder}/{number}", files=names))
            return report.paths

        paths = await fetched(0)
        for number, batch in enumerate(todo):
            paths, _ = await both(fetched(number + 1), self._send(batch, paths))
            shutil.rmtree(f"{folder}/{number}")

    async def _send(self, batch: Sequence[RemoteFile], paths: Mapping[str, Path]) -> None:
        await all_or_none(self._upload(each, paths[each.name]) for each in batch)

    async def _upload(self, file: RemoteFile, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        source = Source(descriptor, identity_of(os.fstat(descriptor)), str(path))
        try:
            await upload(
                self.to,
                source,
                file.key,
                smallest_part_bytes=Settings().part_size_bytes,
                resume=None,
                opened=lambda _: None,
                sent=lambda _: None,
            )
        finally:
            source.close()


def batches(files: Iterable[RemoteFile]) -> Iterator[list[RemoteFile]]:
    """Cut files into batches of at most BATCH_BYTES and BATCH_FILES; a larger file is one of its own. Pure."""
    batch: list[RemoteFile] = []
    for file in files:
        if batch and (
            len(batch) == BATCH_FILES
            or sum(each.size_bytes for each in batch) + file.size_bytes > BATCH_BYTES
        ):
            yield batch
            batch = []
        batch.append(file)
    if batch:
        yield batch


async def _committed_of(
    source: str, options: StoreOptions | None, wanted: Collection[int] | None
) -> dict[str, list[Decision]]:
    """Return what is to be copied, by kind, oldest first. Raises ObjectNotFoundError if that is nothing."""
    async with session(source, options) as opened:
        kinds = ["", *await kinds_below(opened.store)]
    found = {}
    for kind in kinds:
        async with session(keys.kind_remote(source, kind), options) as opened:
            decisions, unreadable = await steps.all_decisions(opened.store)
            boundary = await steps.read_boundary(opened.store)
        for error in unreadable:
            logger.warning("record_unreadable error=%s; its checkpoint is not copied", error)
        found[kind] = [
            each
            for each in decisions
            if each.outcome is Outcome.COMMIT
            and not boundary.voids(each.checkpoint)
            and (wanted is None or each.checkpoint.step in wanted)
        ]
    if not any(found.values()):
        what = "" if wanted is None else f" of step {', '.join(map(str, sorted(wanted)))}"
        raise ObjectNotFoundError(f"{source} has no committed checkpoint{what}", key=keys.DECISIONS)
    return found


async def _show(to: PatientStore, whole: Sequence[Decision]) -> None:
    """Make checkpoints visible, the newest first: nobody may take an older one for the newest."""
    for decision in reversed(whole):
        id_ = decision.checkpoint
        made = await create_once(to, keys.decision_key(id_), records.encode_decision(decision))
        if (outcome := records.decode_decision(made, id_).outcome) is not Outcome.COMMIT:
            raise CheckpointConflictError(
                f"{to.url}: {id_} is {outcome.value}: somebody else has decided while it was copied",
                hint="keep sweepers away until the copy has ended; delete it, and copy again",
            )
        if decision is whole[-1]:
            await steps.move_latest(to, id_, decision.name)
