"""Wait until a checkpoint is committed, with all ranks."""

from __future__ import annotations

import logging
import time

from ckpt_async.core import backlog
from ckpt_async.core.model import CheckpointId, Outcome
from ckpt_async.core.units import few
from ckpt_async.errors import CheckpointAbortedError, CommitTimeoutError, UploadFailedError
from ckpt_async.runners import EngineView
from ckpt_async.trainer.handle import EngineHandle, deadline_in

logger = logging.getLogger(__name__)


def wait_for_commit(engine: EngineHandle, id_: CheckpointId, timeout_s: float | None) -> None:
    """See `Uploader.wait`."""
    deadline = None if timeout_s is None else deadline_in(timeout_s)
    engine.retry_failed(id_)
    engine.hurried(lambda: _wait(engine, id_, timeout_s, deadline))


def _wait(engine: EngineHandle, id_: CheckpointId, timeout_s: float | None, deadline: float | None) -> None:
    def left_s() -> float | None:
        return None if deadline is None else deadline - time.monotonic()

    def has_come() -> bool:
        engine.check_alive()
        view = engine.view()
        if is_committed(engine, id_):
            return True
        left = left_s()
        is_over = left is not None and left <= 0
        _raise_shard_failure(view, id_, is_final=deadline is None or is_over)
        if is_over:
            raise CommitTimeoutError(_describe_unfinished(view, id_, timeout_s))
        if view.missing_ranks(id_):  # the missing ranks may be in the newer launch
            engine.check_not_fenced()
        return False

    while not engine.changed.wait(left_s(), unless=has_come):
        pass


def wait_for_predecessor(engine: EngineHandle, generation: int, timeout_s: float) -> bool:
    """See `Uploader.wait_for_predecessor`."""

    def left(view: EngineView) -> list[int]:
        return [each.step for each in backlog.left_by_predecessors(view.fresh_local(), generation)]

    deadline = deadline_in(timeout_s)
    if steps := left(engine.view()):
        logger.info("waits_for_predecessor steps=%s timeout_s=%g", few(steps), timeout_s)
        engine.hurried(lambda: engine.wait_until(lambda view: not left(view), deadline))
        steps = left(engine.view())
    if steps:
        logger.warning(
            "predecessor_is_not_over steps=%s waited_s=%g; some rank was killed before it saved them, or its node has"
            " not started again",
            *(few(steps), timeout_s),
        )
    return not steps


def is_committed(engine: EngineHandle, id_: CheckpointId) -> bool:
    """See `Uploader.is_committed`."""
    view = engine.view()
    checkpoint = view.local.checkpoints.get(id_)
    decision = view.outcomes.of(id_) or (checkpoint.decision if checkpoint else None)
    if decision is not None and decision.outcome is Outcome.ABORT:
        engine.told.add(id_)
        raise CheckpointAbortedError(f"{id_} was given up: {decision.reason}")
    return decision is not None


def _raise_shard_failure(view: EngineView, id_: CheckpointId, *, is_final: bool) -> None:
    """Raise the failure of a shard, unless a retry may still heal it and there is time left."""
    checkpoint = view.local.checkpoints.get(id_)
    if checkpoint is None or checkpoint.loss is not None:  # a loss becomes an abort
        return
    for each in checkpoint.shards.values():
        if each.failure is not None and (is_final or not each.failure.reason.is_retryable):
            raise UploadFailedError(f"{id_}, shard {each.shard.name!r}: {each.failure.message}")


def _describe_unfinished(view: EngineView, id_: CheckpointId, timeout_s: float | None) -> str:
    checkpoint = view.local.checkpoints.get(id_)
    message = f"{id_} was not committed within {timeout_s} s"
    if checkpoint is not None and not checkpoint.is_verified:
        done = sum(each.stored is not None for each in checkpoint.shards.values())
        return f"{message}: {done} of {len(checkpoint.shards)} shards of this rank are uploaded"
    missing = view.missing_ranks(id_)
    return f"{message}: nothing has arrived from rank {few(missing)} yet" if missing else message
