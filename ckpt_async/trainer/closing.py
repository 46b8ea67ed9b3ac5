"""The end of a launch, or of a node: get as much as possible into the store, and report what is left."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckpt_async.core import backlog
from ckpt_async.core.failures import in_vain, not_committed, not_sent, why_in_vain, why_taken
from ckpt_async.core.local_state import Local
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.settings import Settings
from ckpt_async.core.units import named
from ckpt_async.errors import CkptAsyncError, JournalError, UploadFailedError
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
    """Wait at the end of a launch for what was sealed. Returns what is wrong if it was in vain, or not over in time."""
    engine.runner.expect_end()
    if not engine.runner.is_alive:
        return None
    drain(engine, deadline, grace_s=settings.close_grace_s)
    local = engine.view().fresh_local()
    log_what_is_left(local, is_taken=why_taken(local, engine.view().fenced_by) is not None)
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
    steps = in_vain(local)
    if not steps or view.fenced_by is not None:
        error = why_in_vain(local, steps, view.fenced_by, None) if steps else why_taken(local, view.fenced_by)
        return _told(error)
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
    return _told(why_in_vain(view.fresh_local(), steps, view.fenced_by, absent_ranks))


def _told(error: CkptAsyncError | None) -> CkptAsyncError | None:
    if error is not None:
        logger.error("closed_in_vain error=%s", error)
    return error
