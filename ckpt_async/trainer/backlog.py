"""Admission of new checkpoints: `on_backlog` and `on_disk_low`, for when uploads fall behind."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ckpt_async.core import backlog, retention
from ckpt_async.core.local_state import Local
from ckpt_async.core.model import Superseded
from ckpt_async.core.observe import Observer
from ckpt_async.core.settings import Settings
from ckpt_async.errors import BacklogError
from ckpt_async.local.folder import Folder
from ckpt_async.trainer.handle import EngineHandle

logger = logging.getLogger(__name__)

# How often the disk and the backlog are checked, in addition to every change.
POLL_S = 0.5


def make_room(
    settings: Settings,
    folder: Folder,
    engine: EngineHandle,
    observer: Observer,
    check_usable: Callable[[], None],
) -> None:
    """Wait, raise BacklogError or give up older checkpoints until a new one may begin, as the settings say."""
    if not (settings.max_backlog_checkpoints or settings.max_backlog_bytes or settings.min_free_bytes):
        return
    started = told_at = time.monotonic()
    has_warned = False
    try:
        while (obstacle := _obstacle(settings, engine.view().fresh_local(), folder.space()[0])) is not None:
            what, reaction = obstacle
            if reaction == "supersede" and _supersede(settings, engine, what):
                continue
            waited_s = time.monotonic() - started
            if reaction == "raise" or waited_s >= settings.block_timeout_s:
                raise BacklogError(
                    what, hint="save less often, raise the limit, or find out why uploads are slow"
                )
            if not has_warned:
                has_warned = True
                logger.warning("trainer_blocked reason=%s", what)
            engine.changed.wait(min(POLL_S, settings.block_timeout_s - waited_s))
            now = time.monotonic()
            observer.trainer_blocked(now - told_at)  # reported now, because blocking may take hours
            told_at = now
            check_usable()
    finally:
        observer.trainer_blocked(time.monotonic() - told_at)


def _obstacle(settings: Settings, local: Local, free_bytes: int) -> tuple[str, str] | None:
    """Return why no new checkpoint should begin now, and how the policy reacts to it; None if one may begin."""
    if free_bytes < settings.min_free_bytes:
        reaction = settings.on_disk_low
        if reaction == "supersede" and any(each.superseded for each in local.checkpoints.values()):
            reaction = "block"  # what was given up still takes up space; freeing that may suffice
        return f"{free_bytes} bytes are free, min_free_bytes={settings.min_free_bytes}", reaction
    waiting = backlog.backlog(local)
    if 0 < settings.max_backlog_checkpoints <= len(waiting):
        limit = settings.max_backlog_checkpoints
        return f"{len(waiting)} checkpoints are waiting, max_backlog_checkpoints={limit}", settings.on_backlog
    waiting_bytes = sum(backlog.unsent_bytes(each) for each in waiting)
    if 0 < settings.max_backlog_bytes <= waiting_bytes:
        limit = settings.max_backlog_bytes
        return f"{waiting_bytes} bytes are waiting, max_backlog_bytes={limit}", settings.on_backlog
    return None


def _supersede(settings: Settings, engine: EngineHandle, what: str) -> bool:
    """Give up the oldest checkpoint of the backlog that retention would not keep; return False if there is none."""
    policy = retention.parse(settings.remote_retention)
    victims = backlog.supersedable(engine.view().fresh_local(), policy)
    if not victims:
        return False
    logger.warning("checkpoint_superseded %s reason=%s", victims[0], what)
    engine.record(Superseded(victims[0], f"superseded by newer checkpoints: {what}"))
    return True
