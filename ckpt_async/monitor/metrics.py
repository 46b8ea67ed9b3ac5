"""Prometheus: what the observer's facts and the node's journal look like as metrics, and the port they are
served on. The one module that knows prometheus_client; nothing here may stop or slow a trainer.

Facts are plain numbers behind one lock. What the folder holds is asked of the journal at each scrape, for all
ranks of the node, so a scrape also tells of ranks whose process is gone.

Not used, on purpose: the global registry (the trainer may export its own metrics), the library's own counters
(each adds a `_created` series, and switching those off is process-wide), `PROMETHEUS_MULTIPROC_DIR`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import logging
import platform
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ckpt_async.core.model import CheckpointId, Local, fold
from ckpt_async.core.observe import NullObserver, Observer
from ckpt_async.errors import CkptAsyncError, FailureReason, NoJournalError
from ckpt_async.local import journals
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import after_fork
from ckpt_async.monitor import holdings
from ckpt_async.monitor.holdings import QUEUE_STATES, Holdings

logger = logging.getLogger(__name__)

# Of one core, spent on replaying the whole journal: a checkpoint of 10,000 shards takes a third of a second of
# the trainer's GIL. Rows that were added since are folded in at every scrape all the same.
REPLAY_SHARE = 0.01

# --- the metrics -------------------------------------------------------------------------------------------

RESULTS = ("ok", "failed", "source_changed", "source_missing", "superseded")
REASONS = tuple(reason.value for reason in FailureReason)
LOCATIONS = ("local",)
SWEEPS = ("ok", "failed")
SWEEP_SCOPES = ("folder", "remote", "action")
ENDS = ("committed", "aborted", "pruned")
ORPHANS = ("partial_checkpoint", "multipart", "lease", "member", "probe", "damage", "decision")
VERIFY_KINDS = ("missing", "size", "checksum", "record")


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric. `labels` holds the closed set of values of each label; an empty set stands for values of which a
    process has few: its own run, the remotes and folders of a sweeper. Never a label: rank, step, key, message.
    """

    name: str
    kind: str  # "counter" | "gauge" | "histogram"
    meaning: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bounds_s: tuple[float, ...] = ()  # of a histogram's buckets, without +Inf: each is one more series
    is_sparse: bool = False  # a counter whose children appear when they first count: those at 0 would be many


_RUN: Mapping[str, tuple[str, ...]] = {"run": ()}

_OF_A_FOLDER = (
    Definition(
        "ckpt_async_last_committed_step",
        "gauge",
        "Step of the newest committed checkpoint the node knows of. (N)",
        _RUN,
    ),
    Definition(
        "ckpt_async_last_committed_timestamp_seconds",
        "gauge",
        "Unix time at which the node learnt of that commit. (N)",
        _RUN,
    ),
    Definition(
        "ckpt_async_last_enqueued_step",
        "gauge",
        "Step of the newest checkpoint a shard was enqueued for, or that was sealed. (N)",
        _RUN,
    ),
    Definition(
        "ckpt_async_last_enqueued_timestamp_seconds", "gauge", "Unix time of the last such call. (N)", _RUN
    ),
    Definition(
        "ckpt_async_oldest_pending_timestamp_seconds",
        "gauge",
        "Unix time at which the oldest shard of the queue was enqueued; absent while the queue is empty. (N)",
        _RUN,
    ),
    Definition(
        "ckpt_async_queue_files",
        "gauge",
        "Shards of undecided checkpoints that are not in the store yet. `failed`: lost, or not sent within"
        " `upload_timeout_s` and tried again later; `uploading`: a multipart upload was begun or some bytes are"
        " acknowledged; `retrying`: left by an earlier start of the run and not begun again; `queued`: the rest. (N)",
        {**_RUN, "state": QUEUE_STATES},
    ),
    Definition("ckpt_async_queue_bytes", "gauge", "Sizes of the same shards, each whole. (N)", _RUN),
    Definition(
        "ckpt_async_waiting_checkpoints",
        "gauge",
        "Undecided checkpoints of which a rank of this node has delivered its part: others have not, or nobody"
        " commits. The log of a rank that waits names those that are missing. (N)",
        _RUN,
    ),
    Definition(
        "ckpt_async_oldest_waiting_timestamp_seconds",
        "gauge",
        "Unix time at which a rank of this node had delivered its part of the one that has waited the longest; absent"
        " while there is none. (N)",
        _RUN,
    ),
)

DEFINITIONS = (
    Definition(
        "ckpt_async_build_info",
        "gauge",
        "Always 1; the labels tell the version.",
        {"version": (), "python_version": ()},
    ),
    Definition(
        "ckpt_async_files_enqueued_total", "counter", "Shards the trainer handed over to this process.", _RUN
    ),
    Definition(
        "ckpt_async_uploads_total",
        "counter",
        "Shards that reached an end: `failed` ones for now, they are tried again; `source_changed` and"
        " `source_missing` ones are lost, `superseded` ones given up by policy, and their checkpoint is aborted.",
        {**_RUN, "result": RESULTS},
    ),
    Definition(
        "ckpt_async_upload_attempt_failures_total",
        "counter",
        "Attempts of store requests that failed, whether or not a later attempt healed it; absent until the first"
        " of a reason.",
        {**_RUN, "reason": REASONS},
        is_sparse=True,
    ),
    Definition("ckpt_async_uploads_in_progress", "gauge", "Shards this process is uploading now."),
    Definition(
        "ckpt_async_trainer_blocked_seconds_total",
        "counter",
        "Time the trainer was held up in `enqueue` because uploads fell behind or the disk ran low; grows while it is.",
        _RUN,
    ),
    Definition(
        "ckpt_async_upload_bytes_total", "counter", "Bytes of shards the store has acknowledged.", _RUN
    ),
    Definition(
        "ckpt_async_checkpoints_committed_total",
        "counter",
        "Checkpoints this process saw committed: whole in the store, of all ranks. Every rank counts each.",
        _RUN,
    ),
    Definition(
        "ckpt_async_checkpoints_aborted_total",
        "counter",
        "Checkpoints this process saw given up. Every rank counts each.",
        _RUN,
    ),
    Definition(
        "ckpt_async_pruned_checkpoints_total",
        "counter",
        "Checkpoints retention removed.",
        {**_RUN, "location": LOCATIONS},
    ),
    Definition(
        "ckpt_async_fenced",
        "gauge",
        "1 once a newer start of the run has superseded this trainer, else 0.",
        _RUN,
    ),
    Definition(
        "ckpt_async_engine_restarts_total",
        "counter",
        "Times the engine died of a bug and was started again.",
    ),
    *_OF_A_FOLDER,
    Definition(
        "ckpt_async_checkpoints_retained",
        "gauge",
        "Committed checkpoints whose local files the uploader looks after: only the newest if it is to keep"
        " all. (N)",
        {**_RUN, "location": ("local",)},
    ),
    Definition(
        "ckpt_async_spool_pinned_bytes",
        "gauge",
        "Sizes of the files the spool has a hard link to, each file once: what deleting your own checkpoints"
        " would not free now. An upper bound of what only the spool keeps alive: whether your own file is still"
        " there is not looked up. (N)",
    ),
    Definition(
        "ckpt_async_spool_filesystem_free_bytes",
        "gauge",
        "Free space on the folder's file system for an unprivileged user. (N)",
    ),
    Definition("ckpt_async_spool_filesystem_size_bytes", "gauge", "Size of that file system. (N)"),
    Definition(
        "ckpt_async_enqueue_duration_seconds",
        "histogram",
        "Time the trainer spent inside `enqueue`.",
        bounds_s=(0.001, 0.01, 0.1),
    ),
    Definition(
        "ckpt_async_upload_duration_seconds",
        "histogram",
        "Time from a shard's first byte to its verification, retries included; of results `ok` only.",
        bounds_s=(10, 100),
    ),
    Definition(
        "ckpt_async_commit_latency_seconds",
        "histogram",
        "Time from the first shard enqueued by this rank to the commit.",
        bounds_s=(60, 600),
    ),
    Definition(
        "ckpt_async_store_request_duration_seconds",
        "histogram",
        "Time of one attempt of a store request, failed ones included. Its count is what failures are a share of.",
        _RUN,
        bounds_s=(1, 10),
    ),
)

SWEEPER_DEFINITIONS = (
    DEFINITIONS[0],
    *_OF_A_FOLDER,
    Definition(
        "ckpt_async_sweep_last_completed_timestamp_seconds",
        "gauge",
        "Unix time at which the last sweep had gone through all folders and remotes, whatever became of single ones;"
        " absent before the first.",
    ),
    Definition(
        "ckpt_async_sweep_started_timestamp_seconds",
        "gauge",
        "Unix time at which this sweeper was started: what to compare with until a sweep is completed.",
    ),
    Definition(
        "ckpt_async_sweep_failing_since_timestamp_seconds",
        "gauge",
        "Unix time of the first sweep since when this folder or remote, or an action there, has failed in every one;"
        " absent for those that are well.",
        {"target": ()},
    ),
    Definition(
        "ckpt_async_sweeps_total",
        "counter",
        "Sweeps; `failed`: some folder, remote or action of it did.",
        {"result": SWEEPS},
    ),
    Definition(
        "ckpt_async_sweep_failures_total",
        "counter",
        "What failed in them: a whole folder or remote (its store does not answer, say), or one action.",
        {"scope": SWEEP_SCOPES},
    ),
    Definition(
        "ckpt_async_sweep_duration_seconds",
        "histogram",
        "Time of one sweep, uploads for dead owners included.",
        bounds_s=(1, 60, 3600),
    ),
    Definition(
        "ckpt_async_sweep_adopted_uploads_total",
        "counter",
        "Shards brought into the store for owners that are dead.",
    ),
    Definition(
        "ckpt_async_sweep_adopted_upload_bytes_total",
        "counter",
        "Bytes the store acknowledged of such shards.",
    ),
    Definition(
        "ckpt_async_sweep_checkpoints_total",
        "counter",
        "Checkpoints this sweeper ended: committed for dead engines, given up, or pruned by retention.",
        {"result": ENDS},
    ),
    Definition(
        "ckpt_async_sweep_orphans_removed_total",
        "counter",
        "Objects that nothing referred to any more and that it removed: of checkpoints given up or lost, stale"
        " multipart uploads, expired leases of readers, records of former starts, left-overs of probes, marks of"
        " damaged checkpoints that are gone, old decisions.",
        {"kind": ORPHANS},
    ),
    Definition(
        "ckpt_async_verify_failures_total",
        "counter",
        "What verifying after a sweep (`--verify`) found to be damaged: shards that are missing, of another size or of"
        " other content, and records that are missing, unreadable or contradict each other. Counted at every sweep.",
        {"kind": VERIFY_KINDS},
    ),
    Definition(
        "ckpt_async_sweep_attempt_failures_total",
        "counter",
        "Attempts of its store requests that failed, whether or not a later attempt healed it; absent until the first"
        " of a reason.",
        {**_RUN, "reason": REASONS},
        is_sparse=True,
    ),
    DEFINITIONS[-1],
)

_NOTES = """\
# Metrics

Made by `ckpt_async/monitor/metrics.py`; do not edit. To make it anew:

    python -c "from ckpt_async.monitor import metrics; print(metrics.describe(), end='')" > docs/metrics.md

## Of an uploader

Set `metrics_port` (0: any free port; N: port N + the rank's number on the node,
from `LOCAL_RANK`, `SLURM_LOCALID` or MPI's variables) and let Prometheus scrape `/metrics` there.
A port that is busy is logged and does not stop training. With a server of your own, hand it
`uploader.metrics.registry`. `run` is the URL of the remote. A rank has at most 60 series, with every failure there is.

"""

_AFTERWORD = """
**(N)**: read from the journal of the folder, for all ranks of the node: every port of a node says the same, so
take `max by (run, state)` over a node's ports and not `sum`. A sweeper says the same of its folders, also of what
killed trainers left. While the journal cannot be read they are absent;
`checkpoints_retained` may be late by a hundred times what replaying the journal takes. Everything else is
counted by the process itself and starts at 0 with it.

## Of a sweeper

`ckpt-async sweep --interval S --metrics-port P` (0: any free port) on `metrics_address`; with a server of your own,
`Sweeper.metrics.registry`. `target` is a folder or the URL of a remote; why it fails, the log says. What is (N) is read
from the journals of its folders, with a delay of at most a hundred times what reading them takes.

"""


def describe() -> str:
    """The text of `docs/metrics.md`."""
    return _NOTES + _table(DEFINITIONS) + _AFTERWORD + _table(SWEEPER_DEFINITIONS)


def _table(definitions: Iterable[Definition]) -> str:
    lines = ["| name | type | labels | meaning |", "|---|---|---|---|"]
    values: dict[str, dict[tuple[str, ...], None]] = {}
    for each in definitions:
        labels = ", ".join(f"`{label}`" for label in each.labels) or "none"
        lines.append(f"| `{each.name}` | {each.kind} | {labels} | {each.meaning} |")
        for label, allowed in each.labels.items():
            values.setdefault(label, {})[allowed] = None
    closed = [
        f"- `{label}`: " + ", or ".join(", ".join(f"`{value}`" for value in each) for each in _widest(sets))
        for label, sets in values.items()
        if any(sets)
    ]
    return "\n".join([*lines, "", "Labels and their values:", "", *closed, ""])


def _widest(sets: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Without those that are part of another."""
    return [each for each in sets if not any({*each} < {*other} for other in sets)]


# --- counting ----------------------------------------------------------------------------------------------

_Key = tuple[str, tuple[str, ...]]  # name of a metric, values of its labels


class _Counters:
    """Plain numbers behind one lock, and a collector of its own `registry`.

    From any thread; raises nothing: a label value that is not one of the definition's is dropped.
    """

    def __init__(self, definitions: tuple[Definition, ...], **fixed: str) -> None:
        self._definitions = {each.name: each for each in definitions}
        self._lock = threading.Lock()
        self._counts: dict[_Key, float] = {}
        self._histograms: dict[_Key, _Histogram] = {}
        self._begin(**fixed)
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def _begin(self, **fixed: str) -> None:
        """Make every child with these labels: one that appears with its first failure would hide that failure from
        `increase()`. Those that need another label, and sparse ones, come later.
        """
        with self._lock:
            for each in self._definitions.values():
                values = [allowed or fixed.get(label) for label, allowed in each.labels.items()]
                if each.is_sparse or None in values:
                    continue
                for labels in itertools.product(
                    *((one,) if isinstance(one, str) else one or () for one in values)
                ):
                    if each.kind == "counter":
                        self._counts.setdefault((each.name, labels), 0)
                    elif each.kind == "histogram":
                        self._histograms.setdefault((each.name, labels), _Histogram(each.bounds_s))

    def _add(self, name: str, *labels: str, amount: float = 1) -> None:
        key = (name, labels)
        with self._lock:
            if key in self._counts or self._is_sparse(name, labels):
                self._counts[key] = self._counts.get(key, 0) + amount

    def _is_sparse(self, name: str, labels: tuple[str, ...]) -> bool:
        definition = self._definitions[name]
        return definition.is_sparse and all(
            not allowed or label in allowed
            for label, allowed in zip(labels, definition.labels.values(), strict=True)
        )

    def _observe(self, name: str, *values_s: float, labels: tuple[str, ...] = ()) -> None:
        with self._lock:
            histogram = self._histograms.get((name, labels))
            if histogram is not None:
                for value_s in values_s:
                    histogram.observe(value_s)

    def describe(self) -> Iterator[Metric]:
        """What the registry asks once, so that a scrape can be restricted by name."""
        return (_family(each) for each in self._definitions.values())

    def collect(self) -> Iterator[Metric]:
        """One scrape. What cannot be read now is left out, and the rest is told."""
        families = {each.name: _family(each) for each in self._definitions.values()}
        with self._lock:
            values = dict(self._counts)
            buckets = {key: (each.cumulative(), each.sum_s) for key, each in self._histograms.items()}
        for (name, labels), value in sorted((values | self._gauges()).items()):
            family = families[name]
            assert not isinstance(family, HistogramMetricFamily)
            family.add_metric(labels, value)
        for (name, labels), (counts, sum_s) in sorted(buckets.items(), key=lambda each: each[0]):
            family = families[name]
            assert isinstance(family, HistogramMetricFamily)
            family.add_metric(labels, counts, sum_s)
        yield from families.values()

    def _gauges(self) -> dict[_Key, float]:
        """What is looked up at each scrape."""
        return {("ckpt_async_build_info", (_version(), platform.python_version())): 1}


def _holdings(run: str, held: Holdings) -> dict[_Key, float]:
    """The gauges of what a node holds of one run."""
    gauges: dict[_Key, float] = {
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


class Metrics(_Counters):
    """An `Observer` that counts what an uploader does.

    Its methods take one lock for a few additions. A scrape runs on the scraper's thread and never holds that lock
    while it reads the journal.
    """

    def __init__(
        self,
        run: str,
        folder: Folder,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._run = _printable(run)
        super().__init__(DEFINITIONS, run=self._run)
        self._folder, self._clock = folder, clock
        self._is_fenced = False
        self._num_uploads = 0
        self._replay_lock = threading.Lock()
        self._replay_due_at = float("-inf")
        self._locals: dict[int, Local] = {}
        self._places: dict[int, journals.Place] = {}
        self._newest_enqueued: tuple[CheckpointId, float] | None = None

    @property
    def num_committed(self) -> int:
        """Checkpoints this process has seen committed."""
        return int(self._counts["ckpt_async_checkpoints_committed_total", (self._run,)])

    # --- Observer ------------------------------------------------------------------------------------------

    def shards_enqueued(self, num_shards: int, duration_s: float) -> None:
        self._add("ckpt_async_files_enqueued_total", self._run, amount=num_shards)
        self._observe("ckpt_async_enqueue_duration_seconds", duration_s)

    def trainer_blocked(self, duration_s: float) -> None:
        self._add("ckpt_async_trainer_blocked_seconds_total", self._run, amount=duration_s)

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

    def bytes_uploaded(self, size_bytes: int) -> None:
        self._add("ckpt_async_upload_bytes_total", self._run, amount=size_bytes)

    def shards_finished(self, result: str, num_shards: int, duration_s: float) -> None:
        self._add("ckpt_async_uploads_total", self._run, result, amount=num_shards)
        if result == "ok":
            self._observe("ckpt_async_upload_duration_seconds", *itertools.repeat(duration_s, num_shards))

    def checkpoint_committed(self, step: int, latency_s: float, at: float) -> None:  # noqa: ARG002  in the journal
        self._add("ckpt_async_checkpoints_committed_total", self._run)
        self._observe("ckpt_async_commit_latency_seconds", latency_s)

    def checkpoint_aborted(self) -> None:
        self._add("ckpt_async_checkpoints_aborted_total", self._run)

    def checkpoint_pruned(self, location: str) -> None:
        self._add("ckpt_async_pruned_checkpoints_total", self._run, location)

    def fenced(self) -> None:
        self._is_fenced = True

    def engine_restarted(self) -> None:
        self._add("ckpt_async_engine_restarts_total")

    # --- collector -----------------------------------------------------------------------------------------

    def _gauges(self) -> dict[_Key, float]:
        run = (self._run,)
        gauges = super()._gauges() | {
            ("ckpt_async_fenced", run): int(self._is_fenced),
            ("ckpt_async_uploads_in_progress", ()): self._num_uploads,
        }
        with contextlib.suppress(OSError):
            free_bytes, size_bytes = self._folder.space()
            gauges["ckpt_async_spool_filesystem_free_bytes", ()] = free_bytes
            gauges["ckpt_async_spool_filesystem_size_bytes", ()] = size_bytes
        try:
            with self._replay_lock:
                view = self._view()
        except CkptAsyncError as error:  # damaged, locked, or of another version
            logger.debug("scrape_without_journal error=%s", error)
            return gauges
        gauges["ckpt_async_checkpoints_retained", (self._run, "local")] = len(view.retained)
        gauges["ckpt_async_spool_pinned_bytes", ()] = sum(view.linked.values())
        return gauges | _holdings(self._run, view)

    def _view(self) -> Holdings:
        """What the journals say now. Raises JournalError."""
        progress = self._replay()
        view = Holdings(enqueued=self._newest_enqueued)
        for rank, local in self._locals.items():
            view.add(local, {key for key, sent_bytes in progress[rank].items() if sent_bytes})
        # The rows of the newest one may be gone with its files (`num_checkpoints_to_keep=0`).
        self._newest_enqueued = view.enqueued
        return view

    def _replay(self) -> dict[int, dict[tuple[CheckpointId, str], int]]:
        """Fold in what was appended, and return the progress; now and then begin again, because rows also vanish
        (`Journal.forget`) and nothing tells of it. Only decided checkpoints vanish, so the queue is never wrong.
        """
        started = self._clock()
        is_due = started >= self._replay_due_at
        found: dict[int, journals.Reading] = {}
        with contextlib.suppress(NoJournalError):  # before the first of the node has opened
            found = journals.read(self._folder.path, after={} if is_due else self._places)
        self._locals = {
            rank: reading.local() if reading.is_whole else fold(reading.rows, self._locals[rank])
            for rank, reading in found.items()
        }
        self._places = {rank: reading.place for rank, reading in found.items()}
        if is_due:
            ended = self._clock()
            self._replay_due_at = ended + (ended - started) / REPLAY_SHARE
        return {rank: reading.progress for rank, reading in found.items()}


class SweeperMetrics(_Counters):
    """Counts what a sweeper does; `of` a remote it is the `Observer` of the requests made there.

    `folders` are those it looks after now: what their journals say is told at each scrape.
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
        self._held: dict[_Key, float] = {}

    def of(self, url: str) -> Observer:
        """Who counts the requests for this remote."""
        run = _printable(url.rstrip("/"))
        self._begin(run=run)
        return _RequestsOf(self, run)

    def request_finished(self, run: str, durations_s: Sequence[float]) -> None:
        """Attempts ended, well or not."""
        self._observe("ckpt_async_store_request_duration_seconds", *durations_s, labels=(run,))

    def attempt_failed(self, run: str, reason: FailureReason) -> None:
        """One of them failed."""
        self._add("ckpt_async_sweep_attempt_failures_total", run, reason.value)

    def swept(self, duration_s: float, *, is_clean: bool, failing: Iterable[str] | None) -> None:
        """A sweep ended, well or not; `failing` are the folders and remotes that failed, None if it broke off."""
        self._observe("ckpt_async_sweep_duration_seconds", duration_s)
        self._add("ckpt_async_sweeps_total", "ok" if is_clean else "failed")
        if failing is not None:
            now = self._completed_at = self._clock()
            self._failing_since = {
                each: self._failing_since.get(each, now) for each in map(_printable, failing)
            }

    def failed(self, scope: str) -> None:
        """A folder, a remote or an action of a sweep failed."""
        self._add("ckpt_async_sweep_failures_total", scope)

    def adopted(self, num_shards: int, size_bytes: int) -> None:
        """Shards of a dead owner were brought into the store."""
        self._add("ckpt_async_sweep_adopted_uploads_total", amount=num_shards)
        self._add("ckpt_async_sweep_adopted_upload_bytes_total", amount=size_bytes)

    def ended(self, result: str, num_checkpoints: int = 1) -> None:
        """Checkpoints were committed, aborted or pruned."""
        self._add("ckpt_async_sweep_checkpoints_total", result, amount=num_checkpoints)

    def removed(self, kind: str, num_objects: int) -> None:
        """Orphans were removed."""
        self._add("ckpt_async_sweep_orphans_removed_total", kind, amount=num_objects)

    def damaged(self, kind: str) -> None:
        """Verifying found a violation."""
        self._add("ckpt_async_verify_failures_total", kind)

    def _gauges(self) -> dict[_Key, float]:
        gauges = super()._gauges() | {("ckpt_async_sweep_started_timestamp_seconds", ()): self._started_at}
        if self._completed_at is not None:
            gauges["ckpt_async_sweep_last_completed_timestamp_seconds", ()] = self._completed_at
        for target, since in self._failing_since.items():
            gauges["ckpt_async_sweep_failing_since_timestamp_seconds", (target,)] = since
        with self._read_lock:
            if (started := self._timer()) >= self._read_due_at:
                self._held = self._read()
                self._read_due_at = (ended := self._timer()) + (ended - started) / REPLAY_SHARE
            return gauges | self._held

    def _read(self) -> dict[_Key, float]:
        """What the folders hold of each run, which may have several of them, one for each rank, say."""
        runs: dict[str, Holdings] = {}
        for folder in self._folders():
            try:
                holdings.add_folder(runs, folder)
            except (
                CkptAsyncError,
                OSError,
            ) as error:  # no trainer has run there, or the sweep tells what is wrong
                logger.debug("scrape_without_journal folder=%s error=%s", folder, error)
        gauges: dict[_Key, float] = {}
        for url, held in runs.items():
            gauges |= _holdings(_printable(url), held)
        return gauges


class _RequestsOf(NullObserver):
    """Counts the requests that a sweeper makes for one remote."""

    def __init__(self, metrics: SweeperMetrics, run: str) -> None:
        self._metrics, self._run = metrics, run

    def requests_finished(self, operation: str, durations_s: Sequence[float]) -> None:  # noqa: ARG002
        self._metrics.request_finished(self._run, durations_s)

    def attempt_failed(self, reason: FailureReason) -> None:
        self._metrics.attempt_failed(self._run, reason)


def _printable(text: str) -> str:
    """A lone surrogate would break every scrape."""
    return text.encode(errors="replace").decode()


class _Histogram:
    """Counts by bucket; not thread-safe by itself."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, value_s: float) -> None:
        value_s = max(0.0, value_s)  # a clock that was set back; NaN becomes 0 too
        self._counts[bisect_left(self._bounds_s, value_s)] += 1
        self.sum_s += value_s

    def cumulative(self) -> list[tuple[str, float]]:
        """(bound, observations up to it), the last for +Inf."""
        names = [*(str(float(bound)) for bound in self._bounds_s), "+Inf"]
        return list(zip(names, itertools.accumulate(self._counts), strict=True))


def _family(definition: Definition) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
    name, labels = definition.name, list(definition.labels)
    help_ = definition.meaning.removesuffix(" (N)").replace("`", "")
    if definition.kind == "histogram":
        return HistogramMetricFamily(name, help_, labels=labels)
    if definition.kind == "counter":
        return CounterMetricFamily(name, help_, labels=labels)
    return GaugeMetricFamily(name, help_, labels=labels)


@functools.cache  # it reads files
def _version() -> str:
    try:
        return importlib.metadata.version("ckpt-async")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that was not installed
        return "unknown"


# --- serving -----------------------------------------------------------------------------------------------


class MetricsServer:
    """Answers scrapes on daemon threads of its own, also while the engine's event loop is stuck."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server, self._thread = server, thread
        host, port = server.server_address[:2]
        text = host if isinstance(host, str) else host.decode()
        self.url = f"http://[{text}]:{port}/metrics" if ":" in text else f"http://{text}:{port}/metrics"

        after_fork.add(self)

    def abandon(self) -> None:
        """In a forked child: close our copy of the socket, or it would keep a dead trainer's port."""
        self._server.socket.close()

    def close(self) -> None:
        """Stop answering and free the port. Idempotent; takes up to half a second."""
        after_fork.discard(self)
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()
        self._thread.join()


# What the launchers call a process's number on its node. Slurm's last: torchrun and mpirun may run below it, and then
# all their processes have the one that it gave to them.
LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def _local_rank(environment: Mapping[str, str]) -> int:
    return max(0, int(next(filter(None, map(environment.get, LOCAL_RANKS)), 0)))  # -1: not distributed


def serve(
    metrics: Metrics | SweeperMetrics, port: int, address: str, environment: Mapping[str, str]
) -> MetricsServer | None:
    """Serve `metrics` over HTTP: on no port (-1), any free one (0), or `port` + the rank on this node.

    Returns None, and logs one warning, if that port cannot be had: nothing stops for metrics.
    """
    if port < 0:
        return None
    try:
        port += _local_rank(environment) if port else 0
        started = MetricsServer(*start_http_server(port, address, metrics.registry))
    except (OSError, OverflowError, ValueError) as error:  # busy, no such address; beyond 65,535; no number
        logger.warning(
            "metrics_not_served address=%s port=%d error=%s; the work goes on", address, port, error
        )
        return None
    logger.info("metrics_served url=%s", started.url)
    return started
