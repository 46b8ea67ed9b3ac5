"""Checkpoints that other tools wrote, recognised by the markers they leave when a save is complete. Read-only.

`formats` says what they are: a bucket's listing is a tree like a folder, without times. A marker is a promise that
copied, pruned or badly synchronised checkpoints break, so what it says is checked. One that breaks its promise is
damaged; one without a marker was not finished, and is passed over. None of these tools keeps checksums, so what is read
can be compared by size only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections.abc import AsyncIterator, Collection, Iterable, Mapping

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.naming import MAX_POINTER_BYTES, check_component, check_relative
from ckpt_async.core.units import few
from ckpt_async.errors import (
    FailureReason,
    InvalidNameError,
    NoUsableCheckpointError,
    ObjectNotFoundError,
    StoreError,
    UnsafePickleError,
)
from ckpt_async.formats import (
    FORMATS,
    PLAIN_FORMATS,
    Found,
    Identity,
    Rules,
    Tree,
    are_same,
    check,
    recognise,
)
from ckpt_async.formats.dcp_files import MAX_METADATA_BYTES, METADATA, is_metadata, named_files
from ckpt_async.formats.ranks import ranks_reading
from ckpt_async.formats.table import ASKED_FILES, ASKED_FOLDERS, ASKED_OF_RANK, ASKED_POINTERS, ASKED_STEPS
from ckpt_async.protocol.cas import read
from ckpt_async.restore.checkpoint import (
    Checkpoint,
    Rejected,
    RemoteFile,
    why_passed_over,
)
from ckpt_async.restore.session import Session
from ckpt_async.stores.interface import ObjectInfo, Sink
from ckpt_async.threads import in_thread
from ckpt_async.transfer.together import all_or_none

logger = logging.getLogger(__name__)

MAX_DEPTH = 32  # of folders: each costs memory with its whole path, and no tool nests as deep
_UNSHARDED = "-unsharded"


async def find_foreign(
    opened: Session,
    step: int | None,
    passing_over: Collection[CheckpointId],
    world_size: int | None = None,
) -> tuple[Checkpoint | None, list[Rejected]]:
    """Return the newest complete checkpoint of another tool (or that of one step) or None, and the checkpoints that
    were rejected: those that are or may be complete but cannot be used. What our own trainers are uploading never
    counts, whatever markers it contains.

    Raises NoUsableCheckpointError if several are complete at that step, and nothing tells which is meant.
    """
    if opened.store.capabilities.lists:
        listed = (await opened.store.list("")).objects
        objects = {each.key: each for each in listed if not _is_own(each.key)}
    else:
        objects = await objects_by_name(opened, step)
    tree = _tree_of(opened, objects)
    # What has no marker but its name may be anything in a bucket: weights to begin with, a data set.
    rules = Rules(tuple({*FORMATS} - PLAIN_FORMATS), ranks=world_size or 0, is_store=True)
    found: list[Found] = []
    rejected: list[Rejected] = []
    for each in newest_first(await in_thread(recognise, tree, rules)):
        if each.step != (found[0].step if found else each.step if step is None else step):
            continue
        id_, judged = CheckpointId(0, each.step), each
        if not each.is_begun:
            if reason := why_passed_over(passing_over, id_):
                rejected.append(Rejected(id_, each.name, reason))
                continue
            judged = await in_thread(check, tree, each, rules)
        if judged.is_begun:
            logger.warning("checkpoint_incomplete path=%s reason=%s", each.path, judged.reason)
        elif reason := _why_unusable(opened, judged):
            rejected.append(Rejected(id_, judged.name, reason))
            if judged.is_refused:
                break  # it may be what is asked for, so an older one would be a choice
        else:
            found.append(judged)
    if not found:
        return None, rejected
    others = [each for each in found[1:] if not await in_thread(_is_alike, tree, found[0], each)]
    if others:
        raise NoUsableCheckpointError(
            f"{opened.remote} has {1 + len(others)} checkpoints of step {found[0].step}, and nothing tells which is"
            f" meant: {few([each.path or each.name for each in (found[0], *others)])}",
            hint="give the URL of one of them",
        )
    files = _files(objects, found[0])
    checkpoint = Checkpoint(
        remote=opened.remote,
        id=CheckpointId(0, found[0].step),
        name=found[0].name,
        world_size=1 + max((rank for file in files.values() for rank in file.ranks), default=0),
        files=files,
        rejected=tuple(rejected),
        format=found[0].format,
        store_options=opened.options,
    )
    return checkpoint, rejected


def newest_first(found: Collection[Found]) -> list[Found]:
    """Sort by step; of OLMo's two forms of a step, the sharded one, which can be resumed from, comes first."""
    return sorted(
        found, key=lambda each: (each.step, not each.path.endswith(_UNSHARDED), each.path), reverse=True
    )


def _is_alike(tree: Tree, found: Found, other: Found) -> bool:
    """Return whether another checkpoint of the same step is a copy, or OLMo's other form of it."""
    return other.path == f"{found.path}{_UNSHARDED}" or are_same(tree, found, other)


def _why_unusable(opened: Session, found: Found) -> str:
    """Return why it is damaged, or nothing tells that it is complete; "" if it can be used."""
    try:
        if found.path:  # else its name is the user's own word
            check_component(found.name, "folder")
        for name in found.inner:  # they become local paths
            check_relative(name, "file")
    except InvalidNameError as error:
        return str(error)
    parts = [each.removesuffix(METADATA) for each in found.files if is_metadata(each)]
    if found.is_refused and parts:
        return f"{found.reason}. To read one part, give its URL: {few([f'{opened.remote}/{each}' for each in parts])}"
    if found.missing:
        return f"it has no {few(found.missing)} (or only a link, which is not followed)"
    return found.reason


def _is_own(key: str) -> bool:
    if (of_kind := keys.parse_kind_key(key)) is not None:
        key = of_kind[1]
    return key.startswith(f"{keys.PRIVATE}/") or keys.parse_data_key(key) is not None


def _tree_of(opened: Session, objects: Mapping[str, ObjectInfo]) -> Tree:
    """Return the listing as a tree. Its `read` blocks, and is for other threads than that of the loop."""
    loop = asyncio.get_running_loop()
    there = {key: each for key, each in objects.items() if key.count("/") <= MAX_DEPTH and key[-1:] != "/"}

    def read_part(path: str, offset: int, size_bytes: int) -> bytes:
        whole_bytes = there[path].size_bytes
        start = offset if offset >= 0 else max(0, whole_bytes + offset)
        size_bytes = min(size_bytes, whole_bytes - start)
        if size_bytes <= 0:
            return b""
        return asyncio.run_coroutine_threadsafe(_content(opened, path, start, size_bytes), loop).result()

    files = {key: Identity(zlib.crc32(each.etag.encode()), each.size_bytes, 0) for key, each in there.items()}
    return Tree(files, read_part, keys.path_in(opened.remote).rpartition("/")[2])


def _files(objects: Mapping[str, ObjectInfo], found: Found) -> dict[str, RemoteFile]:
    ranks = ranks_reading(found)
    names = zip(found.inner, found.files, strict=True)
    return {
        name: RemoteFile(name, path, objects[path].size_bytes, None, ranks.get(name, (0,)))
        for name, path in names
    }


async def _content(opened: Session, key: str, start: int, size_bytes: int) -> bytes:
    data = bytearray()

    @contextlib.asynccontextmanager
    async def receive() -> AsyncIterator[Sink]:
        data.clear()
        yield data.extend

    await opened.bulk.get_range(key, start, size_bytes, receive)
    return bytes(data)


_AT_ONCE = 16


async def objects_by_name(opened: Session, step: int | None) -> dict[str, ObjectInfo]:
    """Return the objects at the remote under any name that can be guessed. The remote is taken as the folder of one
    checkpoint, or of a run with this step. The names are those of OLMo's and OLMo-core's files, those that a
    `.metadata` of DCP lists, and the target of Composer's pointer.

    Raises StoreError if none exists, because nobody can tell then whether the place is empty.
    """
    roots = [""] if step is None else [each.format(step=step) for each in ASKED_STEPS]
    found: dict[str, ObjectInfo] = {}
    for root in roots:
        found |= await _heads(opened, [f"{root}{name}" for name in ASKED_FILES])
        for folder in ASKED_FOLDERS:
            found |= await _named_by_dcp(opened, f"{root}{folder}")
        found |= await _of_ranks(opened, root)
    found |= await _pointed(opened)
    if not found:
        raise StoreError(
            f"{opened.remote} cannot be listed, and has no objects under the well-known names of checkpoints",
            reason=FailureReason.OTHER,
            operation="find",
            hint="give the URL of one checkpoint's folder, or that of a run together with step=",
        )
    return found


async def _named_by_dcp(opened: Session, folder: str) -> dict[str, ObjectInfo]:
    mark = f"{folder}{METADATA}"
    there = await _heads(opened, [mark])
    if mark not in there or there[mark].size_bytes > MAX_METADATA_BYTES:
        return there
    data, _ = await opened.store.get(mark, max_size_bytes=MAX_METADATA_BYTES)
    try:
        names = await in_thread(named_files, data)
    except UnsafePickleError:
        return there  # the later check of the `.metadata` reports what is wrong
    return there | await _heads(opened, [f"{folder}{name}" for name in names])


async def _of_ranks(opened: Session, root: str) -> dict[str, ObjectInfo]:
    """Return the files of ranks, counted upwards until one is missing."""
    found: dict[str, ObjectInfo] = {}
    ranks = range(1)  # most checkpoints have none
    while True:
        names = [root + ASKED_OF_RANK.format(rank=rank) for rank in ranks]
        there = await _heads(opened, names)
        found |= there
        if len(there) < len(names):
            return found
        ranks = range(ranks.stop, ranks.stop + _AT_ONCE)


async def _pointed(opened: Session) -> dict[str, ObjectInfo]:
    found: dict[str, ObjectInfo] = {}
    root = keys.path_in(opened.remote)
    for pointer in (await _heads(opened, ASKED_POINTERS)).values():
        there = await read(opened.store, pointer.key, max_size_bytes=MAX_POINTER_BYTES)
        target = there[0].decode("utf-8", "replace").strip() if there else ""
        targets = await _heads(opened, {target.removeprefix(f"{root}/"), target} - {""})
        if targets:
            found |= {pointer.key: pointer} | targets
    return found


async def _heads(opened: Session, keys: Iterable[str]) -> dict[str, ObjectInfo]:
    there = await all_or_none(_head(opened, key) for key in keys)
    return {each.key: each for each in there if each is not None}


async def _head(opened: Session, key: str) -> ObjectInfo | None:
    """Return None if the object does not exist. Buckets that may not be listed answer 403 for a missing object, and
    some servers answer every request with a page.
    """
    try:
        return await opened.store.head(key)
    except ObjectNotFoundError:
        return None
    except StoreError as error:
        if error.reason in (FailureReason.AUTH, FailureReason.OTHER):
            return None
        raise
