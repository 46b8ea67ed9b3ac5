"""The counts of an uploader and of a sweeper, and the content of the node's journals, as metrics. Nothing here may
stop or slow a trainer.

Facts are plain numbers behind one lock. The state of the folder is read from the journals at each scrape, for all
ranks of the node, so a scrape also covers ranks whose process is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from ckpt_async.core.model import without_slash
from ckpt_async.core.observe import Observer
from ckpt_async.core.refusal import Refusal
from ckpt_async.core.units import age, counted
from ckpt_async.errors import CkptAsyncError, FailureReason, NoJournalError
from ckpt_async.local.folder import Folder
from ckpt_async.local.journals import Follower
from ckpt_async.monitor import holdings
from ckpt_async.monitor.counters import Counters, Key
from ckpt_async.monitor.definitions import DEFINITIONS, SAVES, SWEEPER_DEFINITIONS
from ckpt_async.monitor.holdings import Holdings
from ckpt_async.monitor.recent import Recent

logger = logging.getLogger(__name__)

# The share of one core that a sweeper spends on reading whole journals: for a checkpoint of 10,000 shards that takes
# a third of a second of the GIL.
READING_SHARE = 0.01
# Shorter blocking is not an event.
BLOCKED_S = 0.1


class Metrics(Counters, Observer):
    """Counts what an uploader does.

    Its methods take one lock for a few additions. A scrape runs on the scraper's thread and never holds that lock
    while it reads the journal.
    """

    def __init__(self, run: str, folder: Folder) -> None:
        self._run = _printable(run)
        super().__init__(DEFINITIONS, run=self._run)
        self._folder = folder
        self.recent = Recent()
        self._is_fenced = False
        self._num_uploads = 0
        self._follower_lock = threading.Lock()
        self._follower = Follower(folder.path, folder.kind)
        self._save_interval_s: float | None = None

    @property
    def num_committed(self) -> int:
        """Number of checkpoints that this process has seen committed."""
        return int(self._counts["ckpt_async_checkpoints_committed_total", (self._run,)])

    def total(self, name: str) -> dict[str, float]:
        """Return the current values of a counter, by its last label."""
        with self._lock:
            found = [(labels, value) for (each, labels), value in self._counts.items() if each == name]
        return {labels[-1] if labels else "": value for labels, value in found}

    # --- of the trainer's calls ----------------------------------------------------------------------------

    def shards_enqueued(self, num_shards: int, duration_s: float) -> None:
        """Note that the trainer spent this long in one call of `enqueue`."""
        self._add("ckpt_async_files_enqueued_total", self._run, amount=num_shards)
        self._observe("ckpt_async_enqueue_duration_seconds", duration_s)

    def trainer_blocked(self, duration_s: float) -> None:
        """Note that the trainer was blocked in `enqueue` because of the backlog or the disk."""
        if duration_s >= BLOCKED_S:
            self.recent.add(
                "warn", "blocked", "training is blocked: uploads are behind, or the disk is almost full"
            )
        self._add("ckpt_async_trainer_blocked_seconds_total", self._run, amount=duration_s)

    # --- Observer ------------------------------------------------------------------------------------------

    def uploads_started(self, num_shards: int) -> None:
        with self._lock:
            self._num_uploads += num_shards

    def uploads_ended(self, num_shards: int) -> None:
        with self._lock:
            self._num_uploads -= num_shards

    def requests_finished(self, operation: str, durations_s: Sequence[float]) -> None:  # noqa: ARG002  too many series
        self._observe("ckpt_async_store_request_duration_seconds", *durations_s, labels=(self._run,))

    def attempt_failed(self, reason: FailureReason) -> None:
        self._add("ckpt_async_upload_attempt_failures_total", self._run, reason.value)
        self.recent.add(
            "warn", f"attempt {reason.value}", f"an attempt failed ({reason.value}); it will be retried"
        )

    def bytes_uploaded(self, size_bytes: int) -> None:
        self._add("ckpt_async_upload_bytes_total", self._run, amount=size_bytes)

    def shards_finished(self, result: str, num_shards: int, duration_s: float) -> None:
        self._add("ckpt_async_uploads_total", self._run, result, amount=num_shards)
        if result == "ok":
            self._observe("ckpt_async_upload_duration_seconds", *itertools.repeat(duration_s, num_shards))
        else:
            what = {"failed": "not uploaded in time; will be retried", "superseded": "dropped by policy"}
            told = what.get(result, f"lost: {result.replace('_', ' ')}")
            level = "warn" if result in what else "bad"
            self.recent.add(level, f"shards {result}", f"{counted(num_shards, 'shard')} {told}")

    def checkpoint_committed(self, step: int, latency_s: float) -> None:
        self._add("ckpt_async_checkpoints_committed_total", self._run)
        self._observe("ckpt_async_commit_latency_seconds", latency_s)
        text = f"committed, {age(latency_s)} after its first shard was enqueued"
        self.recent.add("good", "committed", text, step=step)

    def checkpoint_aborted(self, step: int, reason: str) -> None:
        self._add("ckpt_async_checkpoints_aborted_total", self._run)
        self.recent.add("bad", "aborted", f"given up: {reason}", step=step)

    def checkpoint_pruned(self, location: str) -> None:
        self._add("ckpt_async_pruned_checkpoints_total", self._run, location)

    def copies_finished(self, result: str, num_files: int) -> None:
        self._add("ckpt_async_copies_total", self._run, result, amount=num_files)

    def fenced(self) -> None:
        self._is_fenced = True
        self.recent.add("bad", "fenced", "a newer launch of the run has superseded this one")

    def engine_restarted(self) -> None:
        self._add("ckpt_async_engine_restarts_total")
        self.recent.add(
            "bad", "restarted", "the engine crashed and was restarted; see the log for the reason"
        )

    # --- of a saver ----------------------------------------------------------------------------------------

    def saver_opened(self) -> None:
        """Announce a saver: its metrics are exported from now on, starting at 0."""
        for result in SAVES:
            self._add("ckpt_async_saves_total", self._run, result, amount=0)
        self.save_blocked(0)

    def save_finished(self, result: str) -> None:
        """Note that this rank has written a checkpoint and handed it over (ok), or could not (failed)."""
        self._add("ckpt_async_saves_total", self._run, result)
        if result != "ok":
            self.recent.add("bad", "save", "a save failed on this rank; see the log for the reason")

    def save_blocked(self, duration_s: float) -> None:
        """Note that the trainer was blocked by a save."""
        self._add("ckpt_async_save_blocked_seconds_total", self._run, amount=duration_s)

    def save_interval_chosen(self, interval_s: float) -> None:
        """Note the interval of saves from now on."""
        self._save_interval_s = interval_s

    # --- of a watcher --------------------------------------------------------------------------------------

    def watcher_opened(self) -> None:
        """Announce a watcher: the counts of what it refuses are exported from now on, starting at 0."""
        for refusal in Refusal:
            self.watch_refused(refusal, 0)

    def watch_refused(self, refusal: Refusal, count: int = 1) -> None:
        """Note that the watcher refused something that it had found."""
        self._add("ckpt_async_watch_refused_total", self._run, refusal.value, amount=count)

    # --- collector -----------------------------------------------------------------------------------------

    def _gauges(self) -> dict[Key, float]:
        run = (self._run,)
        gauges = super()._gauges() | {
            ("ckpt_async_fenced", run): int(self._is_fenced),
            ("ckpt_async_uploads_in_progress", ()): self._num_uploads,
        }
        if self._save_interval_s is not None:
            gauges["ckpt_async_save_interval_seconds", run] = self._save_interval_s
        with contextlib.suppress(OSError):
            free_bytes, size_bytes = self._folder.space()
            gauges["ckpt_async_spool_filesystem_free_bytes", ()] = free_bytes
            gauges["ckpt_async_spool_filesystem_size_bytes", ()] = size_bytes
        try:
            with self._follower_lock:
                view = self._view()
        except CkptAsyncError as error:  # the journal is damaged, locked, or of another version
            logger.debug("scrape_without_journal error=%s", error)
            return gauges
        gauges["ckpt_async_checkpoints_retained", (self._run, "local")] = len(view.retained)
        gauges["ckpt_async_spool_pinned_bytes", ()] = sum(view.linked.values())
        return gauges | _holdings(self._run, view)

    def _view(self) -> Holdings:
        """Return what the journals say now. Raises JournalError."""
        view = Holdings()
        with contextlib.suppress(NoJournalError):  # before the first uploader of the node has opened
            for each in self._follower.look():
                view.add(each)
        return view


class SweeperMetrics(Counters):
    """Counts what a sweeper does; `of` returns the `Observer` for requests to one remote.

    `folders` returns the folders that the sweeper currently looks after: the content of their journals is exported
    at each scrape.
    """

    def __init__(
        self,
        folders: Callable[[], Iterable[str]] = tuple,
        *,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(SWEEPER_DEFINITIONS)
        self._clock, self._timer, self._folders = clock, timer, folders
        self._started_at = clock()
        self._completed_at: float | None = None
        self._failing_since: dict[str, float] = {}
        self._read_lock = threading.Lock()
        self._read_due_at = float("-inf")
        self._held: dict[Key, float] = {}

    def of(self, url: str) -> Observer:
        """Return the observer that counts the requests for this remote."""
        run = _printable(without_slash(url))
        self._begin(run=run)
        return _RequestsOf(self, run)

    def request_finished(self, run: str, durations_s: Sequence[float]) -> None:
        """Note attempts that ended, successfully or not."""
        self._observe("ckpt_async_store_request_duration_seconds", *durations_s, labels=(run,))

    def attempt_failed(self, run: str, reason: FailureReason) -> None:
        """Note that an attempt failed."""
        self._add("ckpt_async_sweep_attempt_failures_total", run, reason.value)

    def swept(self, duration_s: float, *, is_clean: bool, failing: Iterable[str] | None) -> None:
        """Note that a sweep ended, successfully or not. `failing` are the folders and remotes that failed, None if
        the sweep was interrupted.
        """
        self._observe("ckpt_async_sweep_duration_seconds", duration_s)
        self._add("ckpt_async_sweeps_total", "ok" if is_clean else "failed")
        if failing is not None:
            now = self._completed_at = self._clock()
            self._failing_since = {
                each: self._failing_since.get(each, now) for each in map(_printable, failing)
            }

    def failed(self, scope: str) -> None:
        """Note that a folder, a remote or an action of a sweep failed."""
        self._add("ckpt_async_sweep_failures_total", scope)

    def adopted(self, num_shards: int, size_bytes: int) -> None:
        """Note that shards of a dead owner were brought into the store."""
        self._add("ckpt_async_sweep_adopted_uploads_total", amount=num_shards)
        self._add("ckpt_async_sweep_adopted_upload_bytes_total", amount=size_bytes)

    def ended(self, result: str, num_checkpoints: int = 1) -> None:
        """Note that checkpoints were committed, aborted or pruned."""
        self._add("ckpt_async_sweep_checkpoints_total", result, amount=num_checkpoints)

    def removed(self, kind: str, num_objects: int) -> None:
        """Note that orphans were removed."""
        self._add("ckpt_async_sweep_orphans_removed_total", kind, amount=num_objects)

    def damaged(self, kind: str) -> None:
        """Note that verification found a violation."""
        self._add("ckpt_async_verify_failures_total", kind)

    def _gauges(self) -> dict[Key, float]:
        gauges = super()._gauges() | {("ckpt_async_sweep_started_timestamp_seconds", ()): self._started_at}
        if self._completed_at is not None:
            gauges["ckpt_async_sweep_last_completed_timestamp_seconds", ()] = self._completed_at
        for target, since in self._failing_since.items():
            gauges["ckpt_async_sweep_failing_since_timestamp_seconds", (target,)] = since
        with self._read_lock:
            if (started := self._timer()) >= self._read_due_at:
                self._held = self._read()
                self._read_due_at = (ended := self._timer()) + (ended - started) / READING_SHARE
            return gauges | self._held

    def _read(self) -> dict[Key, float]:
        """Return what the folders hold of each run. A run may have several folders, for example one per rank."""
        runs: dict[str, Holdings] = {}
        for folder in self._folders():
            try:
                holdings.add_folder(runs, folder)
            except (CkptAsyncError, OSError) as error:
                # No trainer has run there, or the sweep reports what is wrong.
                logger.debug("scrape_without_journal folder=%s error=%s", folder, error)
        gauges: dict[Key, float] = {}
        for url, held in runs.items():
            gauges |= _holdings(_printable(url), held)
        return gauges


class _RequestsOf(Observer):
    """Counts the requests that a sweeper makes for one remote."""

    def __init__(self, metrics: SweeperMetrics, run: str) -> None:
        self._metrics, self._run = metrics, run

    def requests_finished(self, operation: str, durations_s: Sequence[float]) -> None:  # noqa: ARG002
        self._metrics.request_finished(self._run, durations_s)

    def attempt_failed(self, reason: FailureReason) -> None:
        self._metrics.attempt_failed(self._run, reason)


def _printable(text: str) -> str:
    """Replace lone surrogates, which would break every scrape."""
    return text.encode(errors="replace").decode()


def _holdings(run: str, held: Holdings) -> dict[Key, float]:
    """Return the gauges of what a node holds of one run."""
    gauges: dict[Key, float] = {
        ("ckpt_async_queue_bytes", (run,)): held.size_bytes,
        ("ckpt_async_waiting_checkpoints", (run,)): len(held.waiting),
    }
    for state, num_files in held.num_files.items():
        gauges["ckpt_async_queue_files", (run, state)] = num_files
    for name, at in (("pending", held.oldest_pending_at), ("waiting", held.oldest_waiting_at)):
        if at is not None:
            gauges[f"ckpt_async_oldest_{name}_timestamp_seconds", (run,)] = at
    for name, newest in (("committed", held.committed), ("enqueued", held.enqueued)):
        if newest is not None:
            gauges[f"ckpt_async_last_{name}_step", (run,)] = newest[0].step
            gauges[f"ckpt_async_last_{name}_timestamp_seconds", (run,)] = newest[1]
    return gauges
