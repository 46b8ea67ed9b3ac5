"""The end of a launch, or of a node: get as much as possible into the store, and report what is left."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckpt_async.core import backlog
from ckpt_async.core.failures import (
    never_committed,
    not_committed,
    not_sent,
    why_generation_taken,
    why_nothing_committed,
)
from ckpt_async.core.local_state import Local
from ckpt_async.core.model import CheckpointId, Outcome
from ckpt_async.core.settings import Settings
from ckpt_async.core.units import few, named
from ckpt_async.errors import (
    BacklogError,
    CheckpointAbortedError,
    CkptAsyncError,
    CommitTimeoutError,
    JournalError,
    UploadFailedError,
)
from ckpt_async.local.folder import Folder
from ckpt_async.monitor.metrics import Metrics
from ckpt_async.runners import EngineView
from ckpt_async.trainer.handle import EngineHandle, deadline_in

logger = logging.getLogger(__name__)

# How long a launch that has committed nothing waits, at its end, for the store to say which ranks opened it.
MEMBERS_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What `flush` has achieved, and what is left for the next process or the sweeper."""

    is_done: bool
    num_committed: int
    num_shards_left: int
    size_bytes_left: int
    steps_left: tuple[int, ...]


def report_of(local: Local, num_committed: int) -> FlushReport:
    left = [each for each in local.checkpoints.values() if each.decision is None]
    shards = [shard for each in left for shard in each.shards.values() if shard.stored is None]
    return FlushReport(
        is_done=not left,
        num_committed=num_committed,
        num_shards_left=len(shards),
        size_bytes_left=sum(each.shard.size_bytes for each in shards),
        steps_left=tuple(sorted({each.id.step for each in left})),
    )


def drain(engine: EngineHandle, deadline: float, *, grace_s: float) -> None:
    """Wait for our own work, then for up to `grace_s` for that of the other ranks."""
    asked = 0

    def is_idle(view: EngineView) -> bool:
        if view.last_seen_wake >= asked:
            return view.num_due == 0
        view.wake()  # an earlier wake-up may have been lost with an engine that died
        return False

    def wait() -> None:
        nonlocal asked
        asked = engine.view().wake()
        engine.wait_until(is_idle, deadline)
        engine.wait_until(
            lambda view: not backlog.waits_for_others(view.local), min(deadline, time.monotonic() + grace_s)
        )
        engine.wait_until(lambda view: view.num_due == 0, deadline)

    engine.retry_failed()
    engine.hurried(wait)


def flush(engine: EngineHandle, timeout_s: float, num_committed: Callable[[], int]) -> FlushReport:
    """See `Uploader.flush`; `num_committed` counts the checkpoints that this launch has committed."""
    before, deadline = num_committed(), deadline_in(timeout_s)

    def work() -> FlushReport:
        drain(engine, deadline, grace_s=timeout_s)
        return report_of(engine.view().fresh_local(), num_committed() - before)

    return engine.flushing(work, deadline)


def finish(
    engine: EngineHandle, deadline: float, settings: Settings, *, is_late_an_error: bool
) -> CkptAsyncError | None:
    """Wait at the end of a launch for what was sealed. Returns what is wrong if nothing was
    committed and never can be, or not in time."""
    engine.runner.expect_end()
    if not engine.runner.is_alive:
        return None
    drain(engine, deadline, grace_s=settings.close_grace_s)
    local = engine.view().fresh_local()
    log_what_is_left(local, is_taken=why_generation_taken(local, engine.view().fenced_by) is not None)
    late: CkptAsyncError | None = None
    if is_late_an_error and time.monotonic() >= deadline:
        view = engine.view()
        late = not_sent(local, settings.upload_timeout_s, view.store_error)
        if late is None and view.num_due:
            late = not_committed(local, settings.upload_timeout_s, view.store_error)
    return why_nothing_will_commit(engine, deadline) or late


def log_what_is_left(local: Local, *, is_taken: bool = False) -> None:
    report = report_of(local, 0)
    left = sorted(id_ for id_, each in local.checkpoints.items() if each.decision is None)
    unsealed = [id_ for id_ in left if local.checkpoints[id_].sealed is None]
    if unsealed:
        logger.warning(
            "closed_without_seal steps=%s: unsealed steps are never committed; call seal(step) after the last"
            " enqueue of a step, on every rank",
            _named(unsealed, local.generation),
        )
    if left != unsealed:
        logger.warning(
            "closed_with_unfinished steps=%s shards_to_upload=%d bytes_to_upload=%d; %s",
            _named(left, local.generation),
            report.num_shards_left,
            report.size_bytes_left,
            "another launch has their generation, so nobody will finish them; the files stay in the folder"
            if is_taken
            else "the next launch, `ckpt-async drain` or the sweeper will finish what was sealed",
        )


def _named(checkpoints: Sequence[CheckpointId], own: int) -> str:
    """Name steps of this launch by their numbers alone: [3@g1, 3, 4]."""
    names = [str(each.step) if each.generation == own else each.short for each in checkpoints]
    return f"[{', '.join(names)}]"


def note_what_is_left(engine: EngineHandle, *, is_cut_short: bool) -> None:
    """Log what is left if `close` was interrupted; the next `close` raises it."""
    if not is_cut_short:
        return
    try:
        local = engine.view().fresh_local()
    except JournalError:  # it is closed: only the very end of `close` was interrupted
        return
    log_what_is_left(local)
    if left := [each.id.step for each in backlog.undecided(local) if each.sealed is not None]:
        engine.cut_short = UploadFailedError(
            f"`close` was interrupted before {named('step', left)} {'was' if len(left) == 1 else 'were'} committed",
            hint="the next launch on this node, `ckpt-async drain` or the sweeper will finish what is left",
        )


def why_nothing_will_commit(engine: EngineHandle, deadline: float) -> CkptAsyncError | None:
    """Return why nothing that this launch has sealed will ever be committed; None if it may be, or if there is no
    time to find out.
    """
    view = engine.view()
    local = view.fresh_local()
    steps = never_committed(local)
    if not steps or view.fenced_by is not None:
        error = (
            why_nothing_committed(local, steps, view.fenced_by, None)
            if steps
            else why_generation_taken(local, view.fenced_by)
        )
        return _logged(error)
    if time.monotonic() >= deadline:
        return None

    def look() -> None:
        engine.view().look_for_members()
        engine.wait_until(
            lambda view: view.absent_ranks is not None, min(deadline, time.monotonic() + MEMBERS_TIMEOUT_S)
        )

    engine.hurried(look)
    view = engine.view()
    absent_ranks = view.absent_ranks
    if absent_ranks is None and time.monotonic() >= deadline:
        absent_ranks = []  # the caller left no time to find out
    return _logged(why_nothing_committed(view.fresh_local(), steps, view.fenced_by, absent_ranks))


def _logged(error: CkptAsyncError | None) -> CkptAsyncError | None:
    if error is not None:
        logger.error("closed_without_commit error=%s", error)
    return error


# --- a commit -----------------------------------------------------------------------------------------------


def wait_for_commit(engine: EngineHandle, id_: CheckpointId, timeout_s: float | None) -> None:
    """See `Uploader.wait`."""
    deadline = None if timeout_s is None else deadline_in(timeout_s)

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

    def wait() -> None:
        while not engine.changed.wait(left_s(), unless=has_come):
            pass

    engine.retry_failed(id_)
    engine.hurried(wait)


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
            "previous_launch_unfinished steps=%s waited_s=%g; some rank was killed before it saved them, or its node"
            " has not started again",
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


# --- room for a new checkpoint ------------------------------------------------------------------------------


# How often the disk and the backlog are checked, in addition to every change.
ROOM_POLL_S = 0.5


def make_room(
    settings: Settings,
    folder: Folder,
    engine: EngineHandle,
    metrics: Metrics,
    check_usable: Callable[[], None],
) -> str:
    """Wait or raise BacklogError until a new checkpoint may begin, or let the engine give up older ones, as the
    settings say. Returns why the new one is to be skipped, "" if it is not.
    """
    if not (settings.max_backlog_checkpoints or settings.max_backlog_bytes or settings.min_free_bytes):
        return ""
    started = told_at = time.monotonic()
    has_warned = False
    try:
        while True:
            local, free_bytes = engine.view().fresh_local(), folder.space()[0]
            num_ranks = folder.num_ranks()
            found = backlog.shortage(settings, local, free_bytes, num_ranks, is_for_new=True)
            if found is None:
                return ""
            if found.reaction == "supersede":
                return backlog.why_skipped(settings, local, found, free_bytes, num_ranks)
            waited_s = time.monotonic() - started
            if found.reaction == "raise" or waited_s >= settings.block_timeout_s:
                raise BacklogError(
                    found.text, hint="save less often, raise the limit, or find out why uploads are slow"
                )
            if not has_warned:
                has_warned = True
                logger.warning("trainer_blocked reason=%s", found.text)
            engine.changed.wait(min(ROOM_POLL_S, settings.block_timeout_s - waited_s))
            now = time.monotonic()
            metrics.trainer_blocked(now - told_at)  # reported now, because blocking may take hours
            told_at = now
            check_usable()
    finally:
        metrics.trainer_blocked(time.monotonic() - told_at)
