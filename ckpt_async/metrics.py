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

from ckpt_async.decide import queue_state
from ckpt_async.errors import CkptAsyncError, FailureReason
from ckpt_async.files import Folder
from ckpt_async.journal import Journal, after_fork
from ckpt_async.model import CheckpointId, Local, LocalShard, fold
from ckpt_async.observe import NullObserver

logger = logging.getLogger(__name__)

# Of one core, spent on replaying the whole journal: a checkpoint of 10,000 shards takes a third of a second of
# the trainer's GIL. Rows that were added since are folded in at every scrape all the same.
REPLAY_SHARE = 0.01

# --- the metrics -------------------------------------------------------------------------------------------

RESULTS = ("ok", "failed", "source_changed", "source_missing", "superseded")
REASONS = tuple(reason.value for reason in FailureReason)
STATES = ("queued", "uploading", "retrying", "failed")
LOCATIONS = ("local", "remote")
SWEEPS = ("ok", "failed")
SWEEP_SCOPES = ("folder", "remote", "action")
ENDS = ("committed", "aborted", "pruned")
ORPHANS = ("partial_checkpoint", "multipart", "lease", "member", "probe", "damage", "decision")
VERIFY_KINDS = ("missing", "size", "checksum", "record")
OPERATIONS = (
    *("put", "get", "head", "list", "delete"),
    *("create_multipart", "upload_part", "list_parts", "complete", "list_multiparts", "abort_multipart"),
)


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric. `labels` holds the closed set of values of each label; an empty set stands for a value that
    is fixed for the life of the process. Never a label: rank, step, path, key, message.
    """

    name: str
    kind: str  # "counter" | "gauge" | "histogram"
    meaning: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bounds_s: tuple[float, ...] = ()  # of a histogram's buckets, without +Inf


_RUN: Mapping[str, tuple[str, ...]] = {"run": ()}

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
        "Attempts of store requests that failed, whether or not a later attempt healed it.",
        {**_RUN, "reason": REASONS},
    ),
    Definition("ckpt_async_uploads_in_progress", "gauge", "Shards this process is uploading now."),
    Definition("ckpt_async_upload_workers", "gauge", "Shards it may upload at once."),
    Definition(
        "ckpt_async_trainer_blocked_seconds_total",
        "counter",
        "Time the trainer was held up in `enqueue` because uploads fell behind or the disk ran low.",
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
        {**_RUN, "state": STATES},
    ),
    Definition(
        "ckpt_async_queue_bytes",
        "gauge",
        "Sizes of the same shards, each whole. (N)",
        {**_RUN, "state": STATES},
    ),
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
        bounds_s=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1),
    ),
    Definition(
        "ckpt_async_upload_duration_seconds",
        "histogram",
        "Time from a shard's first byte to its verification, retries included; of results `ok` only.",
        bounds_s=(0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600),
    ),
    Definition(
        "ckpt_async_commit_latency_seconds",
        "histogram",
        "Time from the first shard enqueued by this rank to the commit.",
        bounds_s=(1, 5, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200),
    ),
    Definition(
        "ckpt_async_store_request_duration_seconds",
        "histogram",
        "Time of one attempt of a store request, failed ones included.",
        {"operation": OPERATIONS},
        # Few: every further bound is one more series for each operation.
        bounds_s=(0.01, 0.05, 0.2, 1, 5, 20, 60),
    ),
)

_OF_REQUESTS = tuple(each for each in DEFINITIONS if each.labels.keys() == {"operation"})

SWEEPER_DEFINITIONS = (
    DEFINITIONS[0],
    Definition(
        "ckpt_async_sweep_last_success_timestamp_seconds",
        "gauge",
        "Unix time at which the last sweep ended in which everything worked; absent before the first.",
    ),
    Definition(
        "ckpt_async_sweep_started_timestamp_seconds",
        "gauge",
        "Unix time at which this sweeper was started: what to compare with until there is a success.",
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
        bounds_s=(0.1, 1, 5, 30, 60, 300, 1800, 3600),
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
        "Attempts of its store requests that failed, whether or not a later attempt healed it.",
        {"reason": REASONS},
    ),
    *_OF_REQUESTS,
)

_NOTES = """\
# Metrics

Made by `ckpt_async/metrics.py`; do not edit. To make it anew:

    python -c "from ckpt_async import metrics; print(metrics.describe(), end='')" > docs/metrics.md

## Of an uploader

Set `metrics_port` (0: any free port; N: port N + the rank's number on the node,
from `LOCAL_RANK`, `SLURM_LOCALID` or MPI's variables) and let Prometheus scrape `/metrics` there.
A port that is busy is logged and does not stop training. With a server of your own, hand it
`uploader.metrics.registry`. `run` is the last part of the remote URL.

"""

_AFTERWORD = """
**(N)**: read from the journal of the folder, for all ranks of the node: every port of a node says the same, so
take `max by (run, state)` over a node's ports and not `sum`. While the journal cannot be read they are absent;
`checkpoints_retained` may be late by a hundred times what replaying the journal takes. Everything else is
counted by the process itself and starts at 0 with it.

## Of a sweeper

`ckpt-async sweep --interval S --metrics-port P` (0: any free port) on `metrics_address`; with a server of your own,
`Sweeper.metrics.registry`. One series for all folders and remotes of the process: which of them it is, the log says.

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

    def __init__(self, definitions: tuple[Definition, ...], run: str = "") -> None:
        self._definitions, self._run = definitions, run
        self._lock = threading.Lock()
        self._counts: dict[_Key, float] = {}
        self._histograms: dict[_Key, _Histogram] = {}
        for each in definitions:
            for labels in self._children(each):
                if each.kind == "counter":
                    self._counts[each.name, labels] = 0
                elif each.kind == "histogram":
                    self._histograms[each.name, labels] = _Histogram(each.bounds_s)
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def _children(self, definition: Definition) -> Iterator[tuple[str, ...]]:
        """Every combination of label values: a child that appears with its first failure would hide that
        failure from `increase()`.
        """
        fixed = {"run": self._run, "version": _version(), "python_version": platform.python_version()}
        return itertools.product(*(values or (fixed[label],) for label, values in definition.labels.items()))

    def _add(self, name: str, *labels: str, amount: float = 1) -> None:
        with self._lock:
            if (name, labels) in self._counts:
                self._counts[name, labels] += amount

    def _observe(self, name: str, *values_s: float, labels: tuple[str, ...] = ()) -> None:
        with self._lock:
            histogram = self._histograms.get((name, labels))
            if histogram is not None:
                for value_s in values_s:
                    histogram.observe(value_s)

    def describe(self) -> Iterator[Metric]:
        """What the registry asks once, so that a scrape can be restricted by name."""
        return (_family(each) for each in self._definitions)

    def collect(self) -> Iterator[Metric]:
        """One scrape. What cannot be read now is left out, and the rest is told."""
        with self._lock:
            counts = dict(self._counts)
            buckets = {key: (each.cumulative(), each.sum_s) for key, each in self._histograms.items()}
        gauges = self._gauges()
        for each in self._definitions:
            family = _family(each)
            for labels in self._children(each):
                key = (each.name, labels)
                if isinstance(family, HistogramMetricFamily):
                    family.add_metric(labels, *buckets[key])
                elif isinstance(family, CounterMetricFamily):
                    family.add_metric(labels, counts[key])
                elif key in gauges:
                    family.add_metric(labels, gauges[key])
            yield family

    def _gauges(self) -> dict[_Key, float]:
        """What is looked up at each scrape."""
        return {("ckpt_async_build_info", (_version(), platform.python_version())): 1}


class Metrics(_Counters):
    """An `Observer` that counts what an uploader does.

    Its methods take one lock for a few additions. A scrape runs on the scraper's thread and never holds that lock
    while it reads the journal.
    """

    def __init__(
        self,
        run: str,
        folder: Folder,
        journal: Journal,
        *,
        num_upload_workers: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        # A lone surrogate would break every scrape.
        super().__init__(DEFINITIONS, run.encode(errors="replace").decode())
        self._folder, self._journal, self._clock = folder, journal, clock
        self._is_fenced = False
        self._num_uploads, self._num_upload_workers = 0, num_upload_workers
        self._replay_lock = threading.Lock()
        self._replay_due_at = float("-inf")
        self._locals: dict[int, Local] = {}
        self._sequence = 0
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

    def requests_finished(self, operation: str, durations_s: Sequence[float]) -> None:
        self._observe("ckpt_async_store_request_duration_seconds", *durations_s, labels=(operation,))

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
            ("ckpt_async_upload_workers", ()): self._num_upload_workers,
        }
        with contextlib.suppress(OSError):
            free_bytes, size_bytes = self._folder.space()
            gauges["ckpt_async_spool_filesystem_free_bytes", ()] = free_bytes
            gauges["ckpt_async_spool_filesystem_size_bytes", ()] = size_bytes
        try:
            with self._replay_lock:
                view = self._view()
        except CkptAsyncError as error:  # closed, locked, or of another version
            logger.debug("scrape_without_journal error=%s", error)
            return gauges
        for state in STATES:
            gauges["ckpt_async_queue_files", (self._run, state)] = view.num_files[state]
            gauges["ckpt_async_queue_bytes", (self._run, state)] = view.size_bytes[state]
        gauges["ckpt_async_checkpoints_retained", (self._run, "local")] = len(view.retained)
        gauges["ckpt_async_spool_pinned_bytes", ()] = sum(view.linked.values())
        if view.oldest_pending_at is not None:
            gauges["ckpt_async_oldest_pending_timestamp_seconds", run] = view.oldest_pending_at
        for newest, name in ((view.committed, "last_committed"), (view.enqueued, "last_enqueued")):
            if newest is not None:
                gauges[f"ckpt_async_{name}_step", run] = newest[0].step
                gauges[f"ckpt_async_{name}_timestamp_seconds", run] = newest[1]
        return gauges

    def _view(self) -> _View:
        """What the journal says now. Raises JournalError."""
        self._replay()
        view = _View(enqueued=self._newest_enqueued)
        for rank, local in self._locals.items():
            begun = {key for key, sent_bytes in self._journal.progress(rank).items() if sent_bytes}
            view.add(local, begun)
        # The rows of the newest one may be gone with its files (`num_checkpoints_to_keep=0`).
        self._newest_enqueued = view.enqueued
        return view

    def _replay(self) -> None:
        """Fold in what was appended; now and then begin again, because rows also vanish (`Journal.forget`)
        and nothing tells of it. Only decided checkpoints vanish, so the queue is never wrong.
        """
        started = self._clock()
        is_due = started >= self._replay_due_at
        rows = self._journal.rows(after=0 if is_due else self._sequence)
        locals_ = {} if is_due else dict(self._locals)
        for rank in {row.rank for row in rows}:
            locals_[rank] = fold(rows, locals_.get(rank, Local(rank)))
        self._locals = locals_
        if rows:
            self._sequence = rows[-1].sequence
        if is_due:
            ended = self._clock()
            self._replay_due_at = ended + (ended - started) / REPLAY_SHARE


class SweeperMetrics(_Counters, NullObserver):
    """Counts what a sweeper does; an `Observer` of the requests it makes for a remote."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__(SWEEPER_DEFINITIONS)
        self._clock = clock
        self._started_at = clock()
        self._succeeded_at: float | None = None

    def requests_finished(self, operation: str, durations_s: Sequence[float]) -> None:
        self._observe("ckpt_async_store_request_duration_seconds", *durations_s, labels=(operation,))

    def attempt_failed(self, reason: FailureReason) -> None:
        self._add("ckpt_async_sweep_attempt_failures_total", reason.value)

    def swept(self, duration_s: float, *, is_clean: bool) -> None:
        """A sweep ended, well or not."""
        self._observe("ckpt_async_sweep_duration_seconds", duration_s)
        self._add("ckpt_async_sweeps_total", "ok" if is_clean else "failed")
        if is_clean:
            self._succeeded_at = self._clock()

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
        if self._succeeded_at is not None:
            gauges["ckpt_async_sweep_last_success_timestamp_seconds", ()] = self._succeeded_at
        return gauges


@dataclass(slots=True)
class _View:
    """What the journal says of all ranks of the node together."""

    enqueued: tuple[CheckpointId, float] | None = None
    committed: tuple[CheckpointId, float] | None = None
    oldest_pending_at: float | None = None
    num_files: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATES, 0))
    size_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATES, 0))
    retained: set[CheckpointId] = field(default_factory=set)
    linked: dict[tuple[int, int], int] = field(default_factory=dict)  # (device, inode): size

    def add(self, local: Local, begun: set[tuple[CheckpointId, str]]) -> None:
        """Add one rank; `begun` are the shards of which some bytes were sent."""
        if local.newest_committed is not None:
            self.committed = _newest(self.committed, (local.newest_committed, local.newest_committed_at))
        if local.newest_enqueued is not None:
            self.enqueued = _newest(self.enqueued, (local.newest_enqueued, local.newest_enqueued_at))
        for id_, checkpoint in local.checkpoints.items():
            if checkpoint.was_committed:
                self.retained.add(id_)
            for name, each in checkpoint.shards.items():
                if each.shard.is_linked and not checkpoint.is_released:
                    identity = each.shard.identity
                    self.linked[identity.device, identity.inode] = identity.size_bytes
                if each.stored is None and checkpoint.decision is None:
                    self._add_pending(
                        each, is_begun=(id_, name) in begun, is_inherited=id_.generation < local.generation
                    )

    def _add_pending(self, each: LocalShard, *, is_begun: bool, is_inherited: bool) -> None:
        state = queue_state(each, is_begun=is_begun, is_inherited=is_inherited)
        self.num_files[state] += 1
        self.size_bytes[state] += each.shard.size_bytes
        if self.oldest_pending_at is None or each.enqueued_at < self.oldest_pending_at:
            self.oldest_pending_at = each.enqueued_at


def _newest(
    one: tuple[CheckpointId, float] | None, other: tuple[CheckpointId, float]
) -> tuple[CheckpointId, float]:
    return other if one is None else max(one, other)


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
