"""`target.json`: the checkpoint that all ranks send next, where uploads fall behind (see `core/order.py`)."""

from __future__ import annotations

import logging
import uuid

from ckpt_async.core import keys, records
from ckpt_async.core.model import CheckpointId, Target
from ckpt_async.errors import InvalidRecordError
from ckpt_async.protocol.cas import advance, read
from ckpt_async.transfer.patient import PatientStore

logger = logging.getLogger(__name__)


async def name_target(
    store: PatientStore, newest: CheckpointId, known: CheckpointId | None
) -> CheckpointId | None:
    """Name `newest` as the target, unless another rank has named one after `known`. Returns what is named then; None if
    it is of another launch.
    """
    nonce = uuid.uuid4().hex

    def change(there: bytes | None) -> bytes | None:
        target = _target(there)
        if target is not None and (target.checkpoint >= newest or _is_news(target, newest, known)):
            return None
        return records.encode_target(Target(newest, target.number + 1 if target else 1, nonce))

    return _of_launch(_target(await advance(store, keys.TARGET, change)), newest)


async def read_target(store: PatientStore, newest: CheckpointId) -> CheckpointId | None:
    """Return the target; None if there is none of this launch, that of `newest`."""
    try:
        there = await read(store, keys.TARGET)
    except InvalidRecordError:
        return None
    return _of_launch(_target(there[0] if there else None), newest)


def _is_news(target: Target, newest: CheckpointId, known: CheckpointId | None) -> bool:
    return target.checkpoint.generation == newest.generation and (known is None or target.checkpoint > known)


def _of_launch(target: Target | None, newest: CheckpointId) -> CheckpointId | None:
    is_ours = target is not None and target.checkpoint.generation == newest.generation
    return target.checkpoint if target is not None and is_ours else None


def _target(data: bytes | None) -> Target | None:
    """Return the target; None if there is none, or if it is unreadable: it is only a hint, and is replaced."""
    if data is None:
        return None
    try:
        return records.decode_target(data)
    except InvalidRecordError as error:
        logger.warning("target_unreadable error=%s; treated as missing", error)
        return None
