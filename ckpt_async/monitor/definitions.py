"""Every metric there is: its name, kind, labels and meaning. Nothing is counted here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt_async.errors import FailureReason
from ckpt_async.monitor.holdings import QUEUE_STATES

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
