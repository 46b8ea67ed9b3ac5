"""The definitions of all metrics: name, kind, labels and meaning. Nothing is counted here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt_async.core.refusal import Refusal
from ckpt_async.errors import FailureReason
from ckpt_async.monitor.holdings import QUEUE_STATES

RESULTS = ("ok", "failed", "source_changed", "source_missing", "superseded")
REASONS = tuple(reason.value for reason in FailureReason)
LOCATIONS = ("local",)
SAVES = ("ok", "failed")
COPIES = ("ok", "failed")
REFUSALS = tuple(refusal.value for refusal in Refusal)
SWEEPS = ("ok", "failed")
SWEEP_SCOPES = ("folder", "remote", "action")
ENDS = ("committed", "aborted", "pruned")
ORPHANS = ("partial_checkpoint", "multipart", "lease", "member", "probe", "damage", "decision")
COMMANDS = ("drain", "sweep", "prune", "verify", "pull")
COMMAND_RESULTS = ("committed", "aborted", "pruned", "waiting", "left", "checked", "fetched")
VERIFY_KINDS = ("missing", "size", "checksum", "record")


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric. `labels` maps each label to the closed set of its values. An empty set stands for values of which
    a process has few: its own run, or the remotes and folders of a sweeper. Never use as a label: rank, step, key,
    message.
    """

    name: str
    kind: str  # "counter" | "gauge" | "histogram"
    meaning: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bounds_s: tuple[float, ...] = ()  # of a histogram's buckets, without +Inf: each one is one more series
    is_of_node: bool = False  # a gauge with the same value for all uploaders of a node
    # A counter whose children appear when they first count, because too many would stay at 0.
    is_sparse: bool = False


_RUN: Mapping[str, tuple[str, ...]] = {"run": ()}


def _gauge(
    name: str, meaning: str, labels: Mapping[str, tuple[str, ...]] = _RUN, *, is_of_node: bool = False
) -> Definition:
    return Definition(name, "gauge", meaning, labels, is_of_node=is_of_node)


def _counter(
    name: str, meaning: str, labels: Mapping[str, tuple[str, ...]] = _RUN, *, is_sparse: bool = False
) -> Definition:
    return Definition(name, "counter", meaning, labels, is_sparse=is_sparse)


def _histogram(
    name: str, meaning: str, labels: Mapping[str, tuple[str, ...]] = _RUN, *, bounds_s: tuple[float, ...]
) -> Definition:
    return Definition(name, "histogram", meaning, labels, bounds_s=bounds_s)


_OF_A_FOLDER = (
    _gauge(
        "ckpt_async_last_committed_step", "Step of the newest committed checkpoint the node knows of. (N)"
    ),
    _gauge(
        "ckpt_async_last_committed_timestamp_seconds",
        "Unix time at which the node learned of that commit. (N)",
    ),
    _gauge(
        "ckpt_async_last_enqueued_step",
        "Step of the newest checkpoint a shard was enqueued for, or that was sealed. (N)",
    ),
    _gauge("ckpt_async_last_enqueued_timestamp_seconds", "Unix time of the last such call. (N)"),
    _gauge(
        "ckpt_async_oldest_pending_timestamp_seconds",
        "Unix time at which the oldest shard of the queue was enqueued; absent while the queue is empty. (N)",
    ),
    _gauge(
        "ckpt_async_queue_files",
        "Shards of undecided checkpoints that are not in the store yet. `failed`: lost, or not uploaded within"
        " `upload_timeout_s` and retried later; `uploading`: a multipart upload was started or some bytes are"
        " acknowledged; `retrying`: left by an earlier launch and not restarted yet; `queued`: the rest. (N)",
        labels={**_RUN, "state": QUEUE_STATES},
    ),
    _gauge("ckpt_async_queue_bytes", "Full sizes of the same shards. (N)"),
    _gauge(
        "ckpt_async_waiting_checkpoints",
        "Undecided checkpoints of which a rank of this node has delivered its part, but other ranks have not,"
        " or nothing commits them. The log of a waiting rank names the missing ranks. (N)",
    ),
    _gauge(
        "ckpt_async_oldest_waiting_timestamp_seconds",
        "Unix time at which a rank of this node had delivered its part of the checkpoint that has waited longest;"
        " absent while there is none. (N)",
    ),
)

DEFINITIONS = (
    _gauge(
        "ckpt_async_build_info",
        "Always 1; the labels hold the version.",
        labels={"version": (), "python_version": ()},
        is_of_node=True,
    ),
    _counter("ckpt_async_files_enqueued_total", "Shards the trainer handed over to this process."),
    _counter(
        "ckpt_async_uploads_total",
        "Shards by result: `failed` ones will be retried; `source_changed` and `source_missing` ones are lost,"
        " `superseded` ones were dropped by policy, and their checkpoint is aborted.",
        labels={**_RUN, "result": RESULTS},
    ),
    _counter(
        "ckpt_async_upload_attempt_failures_total",
        "Attempts of store requests that failed, whether or not a later attempt succeeded; absent until the"
        " first of a reason.",
        labels={**_RUN, "reason": REASONS},
        is_sparse=True,
    ),
    _gauge("ckpt_async_uploads_in_progress", "Shards this process is uploading now.", labels={}),
    _counter(
        "ckpt_async_trainer_blocked_seconds_total",
        "Time that the trainer was blocked in `enqueue` because uploads fell behind or the disk was almost"
        " full; grows while it is blocked.",
    ),
    _counter("ckpt_async_upload_bytes_total", "Bytes of shards the store has acknowledged."),
    _counter(
        "ckpt_async_checkpoints_committed_total",
        "Checkpoints this process saw committed: complete in the store, with all ranks. Every rank counts each.",
    ),
    _counter(
        "ckpt_async_checkpoints_aborted_total",
        "Checkpoints this process saw aborted. Every rank counts each.",
    ),
    _counter(
        "ckpt_async_pruned_checkpoints_total",
        "Checkpoints removed by retention.",
        labels={**_RUN, "location": LOCATIONS},
    ),
    _counter(
        "ckpt_async_copies_total",
        "Files that the store copied to exact keys (`publish_as`); `failed` ones will be retried, and their"
        " checkpoint is committed anyway. Absent until the first.",
        labels={**_RUN, "result": COPIES},
        is_sparse=True,
    ),
    _gauge("ckpt_async_fenced", "1 once a newer launch of the run has superseded this trainer, else 0."),
    _counter("ckpt_async_engine_restarts_total", "Times the engine crashed and was restarted.", labels={}),
    _counter(
        "ckpt_async_saves_total",
        "Saves of a `CheckpointSaver` on this rank: `ok` if written to the local disk and handed over, else"
        " `failed`; a failed checkpoint never becomes visible. Commits are counted by"
        " `checkpoints_committed_total`.",
        labels={**_RUN, "result": SAVES},
        is_sparse=True,
    ),
    _counter(
        "ckpt_async_save_blocked_seconds_total",
        "Time that a `CheckpointSaver` blocked the trainer for saving: until the previous save was written,"
        " and the state was made and copied (with `blocking=True`: also written).",
        is_sparse=True,
    ),
    _gauge(
        "ckpt_async_save_interval_seconds",
        "Interval between saves that `Auto` chose; absent without it, and on all ranks but the first.",
    ),
    _counter(
        "ckpt_async_watch_refused_total",
        "Checkpoints and files that a watcher (`watch`, `run`) has refused: they are not in the store, unless"
        " they were committed later after all. Each node counts its own; `given_up` ones are counted by all"
        " nodes. Absent where no watcher runs.",
        labels={**_RUN, "reason": REFUSALS},
        is_sparse=True,
    ),
    *_OF_A_FOLDER,
    _gauge(
        "ckpt_async_checkpoints_retained",
        "Committed checkpoints whose local files the uploader manages: only the newest if it is set to keep"
        " all. (N)",
        labels={**_RUN, "location": ("local",)},
    ),
    _gauge(
        "ckpt_async_spool_pinned_bytes",
        "Sizes of the files that the spool hard-links, each file once: the space that deleting your own checkpoints"
        " would not free now. An upper bound for what only the spool keeps alive, because it does not check whether"
        " your own file still exists. (N)",
        labels={},
    ),
    _gauge(
        "ckpt_async_spool_filesystem_free_bytes",
        "Free space on the folder's file system for an unprivileged user. (N)",
        labels={},
        is_of_node=True,
    ),
    _gauge(
        "ckpt_async_spool_filesystem_size_bytes", "Size of that file system. (N)", labels={}, is_of_node=True
    ),
    _histogram(
        "ckpt_async_enqueue_duration_seconds",
        "Time the trainer spent inside `enqueue`.",
        labels={},
        bounds_s=(0.001, 0.01, 0.1),
    ),
    _histogram(
        "ckpt_async_upload_duration_seconds",
        "Time from a shard's first byte to its verification, retries included; of results `ok` only.",
        labels={},
        bounds_s=(10, 100),
    ),
    _histogram(
        "ckpt_async_commit_latency_seconds",
        "Time from the first shard enqueued by this rank to the commit.",
        labels={},
        bounds_s=(60, 600),
    ),
    _histogram(
        "ckpt_async_store_request_duration_seconds",
        "Time of one attempt of a store request, failed ones included. Divide failures by its count for their share.",
        bounds_s=(1, 10),
    ),
)

SWEEPER_DEFINITIONS = (
    DEFINITIONS[0],
    *_OF_A_FOLDER,
    _gauge(
        "ckpt_async_sweep_last_completed_timestamp_seconds",
        "Unix time at which the last sweep had gone through all folders and remotes, also if some of them failed;"
        " absent before the first.",
        labels={},
    ),
    _gauge(
        "ckpt_async_sweep_started_timestamp_seconds",
        "Unix time at which this sweeper was started: the reference until the first sweep is complete.",
        labels={},
    ),
    _gauge(
        "ckpt_async_sweep_failing_since_timestamp_seconds",
        "Unix time of the first of the consecutive sweeps in which this folder or remote, or an action there,"
        " failed; absent for those that do not fail.",
        labels={"target": ()},
    ),
    _counter(
        "ckpt_async_sweeps_total",
        "Sweeps; `failed`: some folder, remote or action failed.",
        labels={"result": SWEEPS},
    ),
    _counter(
        "ckpt_async_sweep_failures_total",
        "Failures in sweeps: of a whole folder or remote (an unresponsive store, for example), or of one action.",
        labels={"scope": SWEEP_SCOPES},
    ),
    _histogram(
        "ckpt_async_sweep_duration_seconds",
        "Time of one sweep, uploads for dead owners included.",
        labels={},
        bounds_s=(1, 60, 3600),
    ),
    _counter("ckpt_async_sweep_adopted_uploads_total", "Shards uploaded for dead owners.", labels={}),
    _counter(
        "ckpt_async_sweep_adopted_upload_bytes_total",
        "Bytes the store acknowledged of such shards.",
        labels={},
    ),
    _counter(
        "ckpt_async_sweep_checkpoints_total",
        "Checkpoints this sweeper settled: committed for dead engines, aborted, or pruned by retention.",
        labels={"result": ENDS},
    ),
    _counter(
        "ckpt_async_sweep_orphans_removed_total",
        "Orphaned objects that the sweeper removed: of aborted or lost checkpoints, stale multipart uploads, expired"
        " leases of readers, records of former starts, leftovers of probes, damage marks of checkpoints that are gone,"
        " old decisions.",
        labels={"kind": ORPHANS},
    ),
    _counter(
        "ckpt_async_verify_failures_total",
        "Damage found by `--verify` after a sweep: shards that are missing or have another size or content, and records"
        " that are missing, unreadable or contradictory. Counted at every sweep.",
        labels={"kind": VERIFY_KINDS},
    ),
    _counter(
        "ckpt_async_sweep_attempt_failures_total",
        "Attempts of its store requests that failed, whether or not a later attempt succeeded; absent until"
        " the first of a reason.",
        labels={**_RUN, "reason": REASONS},
        is_sparse=True,
    ),
    DEFINITIONS[-1],
)

_COMMAND: Mapping[str, tuple[str, ...]] = {"command": COMMANDS, "target": ()}

# Metrics of commands that end; each file in a node's collector has different values of `command` and
# `target`.
COMMAND_DEFINITIONS = (
    _gauge(
        "ckpt_async_command_completed_timestamp_seconds",
        "Unix time at which the command ended, successfully or not.",
        labels=_COMMAND,
    ),
    _gauge("ckpt_async_command_duration_seconds", "Duration of the command.", labels=_COMMAND),
    _gauge("ckpt_async_command_exit_code", "Exit code of the command: 0 if all is well.", labels=_COMMAND),
    _gauge(
        "ckpt_async_command_checkpoints",
        "Checkpoints by outcome: `waiting` ones wait for other ranks, `left` ones are not uploaded, `checked`"
        " ones were verified. Absent for outcomes that the command does not have, or if it failed before it"
        " could tell.",
        labels={**_COMMAND, "result": COMMAND_RESULTS},
    ),
    _gauge(
        "ckpt_async_command_bytes",
        "Bytes that `drain` and `sweep` uploaded, `pull` fetched or `verify` checked.",
        labels=_COMMAND,
    ),
    _gauge("ckpt_async_command_violations", "Damage that `verify` or `sweep` found.", labels=_COMMAND),
)
