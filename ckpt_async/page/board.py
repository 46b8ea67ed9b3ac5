"""The data of the page, computed when somebody looks, and rarely enough to cost training next to nothing."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ckpt_async.errors import CkptAsyncError
from ckpt_async.monitor.report import FolderWatch, Missing, folder_json

logger = logging.getLogger(__name__)

Json = dict[str, Any]

# At most one look per this time, however many people look.
AT_MOST_EVERY_S = 1.0
# The share of one core that looks may take: how long a look lasted decides how long its result is used.
SHARE = 0.02
# How long a request waits for another one's look. A disk that does not answer must not pile up requests.
PATIENCE_S = 5.0


class Board:
    """Serves the process's state.

    `look` returns it; `health` returns a line saying why the process is stuck, or "". May be used from any thread.
    """

    def __init__(
        self,
        look: Callable[[], Json],
        health: Callable[[], str] = str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look, self.health, self._clock = look, health, clock
        self._lock = threading.Lock()
        self._due_at = float("-inf")
        self._body: bytes | None = None
        self._has_failed = False

    def status(self) -> bytes | None:
        """Return the body of `/status.json`.

        A caller that comes during a look waits for it and gets the same body. Returns None if the look failed, which
        is a bug and is logged once. Raises TimeoutError if the wait takes too long.
        """
        if not self._lock.acquire(timeout=PATIENCE_S):
            raise TimeoutError
        try:
            if (started := self._clock()) >= self._due_at:
                self._body = self._told_or_none()
                ended = self._clock()
                self._due_at = max(started + AT_MOST_EVERY_S, ended + (ended - started) / SHARE)
            return self._body
        finally:
            self._lock.release()

    def _told_or_none(self) -> bytes | None:
        try:
            return json.dumps(self._told(), separators=(",", ":")).encode()
        except Exception:
            if not self._has_failed:
                logger.exception("page_failed; the page shows nothing, everything else continues")
            self._has_failed = True
            return None

    def _told(self) -> Json:
        problem = self.health() or None
        return {
            "now": time.time(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "problem": problem,
            **self._look(),
        }


def look_at(watch: FolderWatch, missing: Missing | None = None) -> Json:
    """Return what a folder holds, or an `error` that says why that is unknown now."""
    now = time.time()
    try:
        by_kind = watch.look(missing, now=now) if missing else watch.look(now=now)
    except (CkptAsyncError, OSError) as error:
        logger.debug("page_without_journal folder=%s error=%s", watch.folder, error)
        text = error.without_hint if isinstance(error, CkptAsyncError) else str(error)
        return {"folder": watch.folder, "error": text}
    return folder_json(watch.folder, by_kind, now)
