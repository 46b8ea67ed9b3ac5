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
from collections.abc import AsyncIterator, Collection, Mapping

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.naming import check_component, check_relative
from ckpt_async.core.units import few
from ckpt_async.errors import InvalidNameError, NoUsableCheckpointError
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
from ckpt_async.formats.dcp_files import METADATA, is_metadata
from ckpt_async.formats.ranks import ranks_reading
from ckpt_async.restore.checkpoint import (
    Checkpoint,
    Rejected,
    RemoteFile,
    why_passed_over,
)
from ckpt_async.restore.session import Session
from ckpt_async.restore.unlisted import objects_by_name
from ckpt_async.stores.interface import ObjectInfo, Sink
from ckpt_async.threads import in_thread

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
