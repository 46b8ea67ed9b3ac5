"""Find files where nothing can be listed, by asking for the names that tools give them."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_async.core import keys
from ckpt_async.core.naming import MAX_POINTER_BYTES
from ckpt_async.errors import (
    FailureReason,
    ObjectNotFoundError,
    StoreError,
    UnsafePickleError,
)
from ckpt_async.formats.dcp_files import MAX_METADATA_BYTES, METADATA, named_files
from ckpt_async.formats.table import ASKED_FILES, ASKED_FOLDERS, ASKED_OF_RANK, ASKED_POINTERS, ASKED_STEPS
from ckpt_async.protocol.cas import read
from ckpt_async.restore.session import Session
from ckpt_async.stores.interface import ObjectInfo
from ckpt_async.threads import in_thread
from ckpt_async.transfer.together import all_or_none

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
