"""The port that serves an uploader's metrics and page: one for all kinds of checkpoints of a rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from ckpt_async.core.failures import fenced
from ckpt_async.core.model import CheckpointId, Outcome
from ckpt_async.core.settings import Settings
from ckpt_async.errors import JournalError, UploaderClosedError
from ckpt_async.events.run_events import SPEAKER
from ckpt_async.events.showing import happenings
from ckpt_async.local.folder import Folder
from ckpt_async.local.outbox import Posted, Untold
from ckpt_async.monitor.metrics import Metrics
from ckpt_async.monitor.recent import MOST
from ckpt_async.monitor.report import FolderWatch, id_json
from ckpt_async.page.board import Board, look_at
from ckpt_async.page.server import serve
from ckpt_async.trainer.handle import EngineHandle

logger = logging.getLogger(__name__)

# The newest checkpoints that this process saw decided are shown even when no journal has them any more.
MAX_EARLIER = 30


class Exporter:
    """Serves metrics and the page on the port that the settings name, or adds them to those of a companion that
    already serves this port.
    """

    def __init__(
        self,
        metrics: Metrics,
        settings: Settings,
        companions: Iterable[Exporter],
        engine: EngineHandle,
        folder: Folder,
        rank: int,
    ) -> None:
        self.metrics, self.engine, self.kind, self.rank = metrics, engine, folder.kind, rank
        self._place = settings.metrics_port, settings.metrics_address
        self._watch = FolderWatch(folder.path)
        self._others: set[Exporter] = set()
        self._host = next((each for each in companions if each.is_serving(*self._place)), None)
        self._server = None
        if self._host is not None:
            self._host.add(self)
        else:
            board = Board(self._look, self._health)
            self._server = serve(metrics.registry, *self._place, os.environ, board)

    def is_serving(self, port: int, address: str) -> bool:
        return self._server is not None and port > 0 and self._place == (port, address)

    @property
    def url(self) -> str | None:
        """The URL for Prometheus, or None if there is none."""
        if self._host is not None:
            return self._host.url
        return self._server.url if self._server is not None else None

    @property
    def page_url(self) -> str | None:
        """The URL of the page for people, or None if there is none."""
        if self._host is not None:
            return self._host.page_url
        return self._server.page_url if self._server is not None else None

    def add(self, companion: Exporter) -> None:
        """Show the uploader of another kind, too."""
        self.metrics.add(companion.metrics)
        self._others.add(companion)

    def discard(self, companion: Exporter) -> None:
        self.metrics.discard(companion.metrics)
        self._others.discard(companion)

    def close(self) -> None:
        """Free the port; companions that were added are no longer served either. Idempotent."""
        if self._host is not None:
            self._host.discard(self)
        if self._server is not None:
            self._server.close()

    # --- the page: on the server's threads ---------------------------------------------------------------------

    @property
    def _all(self) -> list[Exporter]:
        return sorted((self, *list(self._others)), key=lambda each: each.kind)

    def _health(self) -> str:
        return next(filter(None, (each.problem for each in self._all)), "")

    @property
    def problem(self) -> str:
        """Why this uploader cannot continue, in one line; "" while it can. Problems that heal by themselves, such
        as a store that is away, are no reason to restart training and do not count.
        """
        if self.engine.has_ended:
            return ""
        if (death := self.engine.runner.death) is not None:
            return f"the engine has died: {death!r}"
        if (fenced_by := self._fenced_by) is not None:
            return f"fenced: {fenced(self.engine.generation, fenced_by).without_hint}"
        return ""

    @property
    def _fenced_by(self) -> int | None:
        try:
            return self.engine.view().fenced_by
        except UploaderClosedError:
            return None

    def _look(self) -> dict[str, Any]:
        told = look_at(self._watch, self._missing)
        boxes = {each: each.outbox() for each in self._all}
        events = [
            {**event, "kind": each.kind or None}
            for each, (notices, _) in boxes.items()
            for event in (*each.metrics.recent.told(), *map(asdict, happenings(notices)))
        ]
        return {
            "role": "uploader",
            "folders": [told],
            "remotes": [],
            "engines": [
                {**each.engine_json(), "untold": list(map(asdict, untold))}
                for each, (_, untold) in boxes.items()
            ],
            "events": sorted(events, key=lambda event: float(event["at"]), reverse=True),
        }

    def _missing(self, kind: str, id_: CheckpointId) -> Sequence[int]:
        for each in self._all:
            if each.kind == kind:
                try:
                    return each.engine.view().missing_ranks(id_)
                except UploaderClosedError:
                    return ()
        return ()

    def outbox(self) -> tuple[list[Posted], list[Untold]]:
        """Return the events of this rank; empty unless it is the rank that reports events."""
        if self.rank != SPEAKER:
            return [], []
        try:
            outbox = self.engine.journal.outbox()
            return outbox.newest(MOST), outbox.untold()
        except JournalError as error:  # the folder's own part of the page shows this too
            logger.debug("page_without_events error=%s", error)
            return [], []

    def engine_json(self) -> dict[str, Any]:
        """Return what is known only in this process and is in no journal."""
        failures = self.metrics.total("ckpt_async_upload_attempt_failures_total")
        refused = self.metrics.total("ckpt_async_watch_refused_total")
        return {
            "kind": self.kind or None,
            "rank": self.rank,
            "generation": self.engine.generation,
            "problem": self.problem or None,
            "attempt_failures": {reason: int(count) for reason, count in failures.items()},
            "refused": {reason: int(count) for reason, count in refused.items() if count},
            "restarts": int(self.metrics.total("ckpt_async_engine_restarts_total").get("", 0)),
            "earlier": self._earlier(),
        }

    def _earlier(self) -> list[dict[str, Any]]:
        try:
            outcomes = self.engine.view().outcomes.newest()
        except (UploaderClosedError, RuntimeError):  # RuntimeError: one was added just now
            return []
        at = {each["step"]: each["at"] for each in self.metrics.recent.told() if each["step"] is not None}
        return [
            {
                **id_json(each.checkpoint),
                "name": each.name,
                "state": "aborted" if each.outcome is Outcome.ABORT else "committed",
                "decided_at": at.get(each.checkpoint.step),
                "failure": each.reason or None,
            }
            for each in sorted(outcomes, key=lambda each: each.checkpoint)[-MAX_EARLIER:]
        ]
