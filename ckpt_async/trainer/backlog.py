"""Admission of new checkpoints: `on_backlog` and `on_disk_low`, for when uploads fall behind."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ckpt_async.core import backlog
from ckpt_async.core.settings import Settings
from ckpt_async.errors import BacklogError
from ckpt_async.local.folder import Folder
from ckpt_async.monitor.metrics import Metrics
from ckpt_async.trainer.handle import EngineHandle

logger = logging.getLogger(__name__)

# How often the disk and the backlog are checked, in addition to every change.
POLL_S = 0.5


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
            engine.changed.wait(min(POLL_S, settings.block_timeout_s - waited_s))
            now = time.monotonic()
            metrics.trainer_blocked(now - told_at)  # reported now, because blocking may take hours
            told_at = now
            check_usable()
    finally:
        metrics.trainer_blocked(time.monotonic() - told_at)
