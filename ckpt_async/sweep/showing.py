"""What a sweeper's page shows: the folders as they are now, and the remotes as the last sweep found them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from ckpt_async.core.model import Outcome
from ckpt_async.errors import CkptAsyncError
from ckpt_async.monitor.recent import Recent
from ckpt_async.monitor.report import FolderWatch
from ckpt_async.page.board import look_at
from ckpt_async.protocol.overview import Overview, overview_json
from ckpt_async.sweep.drain import DrainReport
from ckpt_async.sweep.remote import RemoteReport

_TOLD = {
    Outcome.COMMIT: ("good", "committed", "committed on behalf of engines that died"),
    Outcome.ABORT: ("bad", "aborted", "given up"),
    Outcome.PRUNED: ("note", "pruned", "pruned"),
}


class Showing:
    """The content of a sweeper's page.

    The sweeper reports what it did, and the page asks for the state, from different threads.
    """

    def __init__(self, folders: Callable[[], Iterable[str]]) -> None:
        self.recent = Recent()
        self._folders = folders
        self._watches: dict[str, FolderWatch] = {}
        # By URL: the newest overview, and the error since then.
        self._remotes: dict[str, tuple[Overview | None, str]] = {}
        self._sweep: dict[str, Any] | None = None

    # --- the sweeper -------------------------------------------------------------------------------------------

    def folder_swept(self, folder: str, drained: DrainReport | None, error: str) -> None:
        """Note what a sweep did in a folder."""
        if error:
            self.recent.add("bad", f"folder {folder}", f"{folder}: {error}")
        for rank in drained.ranks if drained else ():
            for done in rank.committed:
                text = "finished for a trainer that is gone, and committed"
                self.recent.add("good", "committed", text, step=done.checkpoint.step)
            for done in rank.aborted:
                self.recent.add("bad", "aborted", f"given up: {done.reason}", step=done.checkpoint.step)

    def remote_swept(self, report: RemoteReport) -> None:
        """Note what a sweep did to a remote."""
        known = self._remotes.get(report.url, (None, ""))[0]
        self._remotes[report.url] = report.overview or known, report.error
        if report.error:
            self.recent.add("warn", f"remote {report.url}", f"{report.url}: {report.error}")
        for done in report.done:
            step = getattr(getattr(done.action, "checkpoint", None), "step", None)
            if done.error:
                self.recent.add("warn", "action", f"{report.url}: {done.error}", step=step)
            elif done.outcome in _TOLD:
                level, what, text = _TOLD[done.outcome]
                self.recent.add(level, what, f"{text}: {done.action.reason} ({report.url})", step=step)
        for finding in report.violations:
            self.recent.add("bad", f"damage {finding.key}", f"{report.url}: {finding}")

    def swept(self, *, is_clean: bool, failing: list[str]) -> None:
        """Note that a sweep is complete."""
        self._sweep = {"completed_at": time.time(), "is_clean": is_clean, "failing": failing}

    # --- the page ----------------------------------------------------------------------------------------------

    def look(self) -> dict[str, Any]:
        """Return the state as `/status.json` shows it."""
        try:
            folders = list(self._folders())
        except (CkptAsyncError, OSError):
            folders = list(self._watches)
        self._watches = {each: self._watches.get(each) or FolderWatch(each) for each in folders}
        return {
            "role": "sweeper",
            "sweep": self._sweep,
            "folders": [look_at(each) for each in self._watches.values()],
            "remotes": [
                {**(overview_json(found) if found else _nothing(url)), "error": error or None}
                for url, (found, error) in sorted(self._remotes.items())
            ],
            "engines": [],
            "events": [{**each, "kind": None} for each in self.recent.told()],
        }


def _nothing(url: str) -> dict[str, Any]:
    return {"remote": url, "seen_at": None, "last_committed": None, "checkpoints": []}
