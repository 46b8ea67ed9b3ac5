"""The Grafana dashboard as code: `python deploy/grafana/dashboard.py` writes ckpt-async.json beside it.

`./dev dashboard` runs every query against a real Prometheus; none may be empty. The metrics: docs/metrics.md.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import (
    ReduceDataOptions,
    StackingConfig,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

FILE = Path(__file__).with_name("ckpt-async.json")
SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
WIDTH = 24  # columns of Grafana's grid

# Every port of a node exports the values of that node's journals, so only one port per node counts:
# docs/metrics.md, (N).
NODE = '"node", "$1", "instance", "(.+?)(?::[0-9]+)?"'
RUN = 'run=~"$run"'


def of_node(metric: str, by: str, matchers: str = RUN) -> str:
    """Return an expression with one value per node, for a metric that all ports of a node export alike."""
    labels = ", ".join(filter(None, (by, "node")))
    selected = f"{metric}{{{matchers}}}" if matchers else metric
    return f"max by ({labels}) (label_replace({selected}, {NODE}))"


def rate(metric: str, matchers: str = RUN) -> str:
    return (
        f"rate({metric}{{{matchers}}}[$__rate_interval])" if matchers else f"rate({metric}[$__rate_interval])"
    )


def mean(histogram: str, by: str, matchers: str = "") -> str:
    """Return the mean of the observations, with no line where there were none."""
    total, count = (f"sum by ({by}) ({rate(f'{histogram}_{part}', matchers)})" for part in ("sum", "count"))
    return f"{total} / ({count} > 0)"


@dataclass(frozen=True, slots=True)
class Query:
    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Graph:
    title: str
    meaning: str
    unit: str
    queries: tuple[Query, ...]
    width: int = 8
    warn: float | None = None  # yellow from this value on
    alarm: float | None = None  # red from this value on
    is_stacked: bool = False


@dataclass(frozen=True, slots=True)
class Number(Graph):
    """The newest value, large, with a name beside it if there are several."""


def mean_time(title: str, meaning: str, histogram: str, by: str) -> Graph:
    """Return a graph with a line for each `by`."""
    return Graph(title, meaning, "s", (Query(mean(histogram, by), f"{{{{{by}}}}}"),))


ROWS: dict[str, tuple[Graph, ...]] = {
    "Is all well?": (
        Number(
            "Firing alerts",
            "Those of deploy/prometheus/alerts.yaml. What to do: docs/operations.md.",
            "none",
            (
                Query(
                    'count by (alertname) (ALERTS{alertname=~"CkptAsync.+", alertstate="firing"})',
                    "{{alertname}}",
                ),
            ),
            alarm=1,
        ),
        Number(
            "Age of the newest commit",
            "What a restart of the run would lose at most, if training saves as often as it should.",
            "s",
            (
                Query(
                    f"time() - max by (run) (ckpt_async_last_committed_timestamp_seconds{{{RUN}}})", "{{run}}"
                ),
            ),
            warn=1800,
            alarm=3600,
        ),
        Number(
            "Lost if the nodes died now",
            "Bytes that are on the nodes' disks only.",
            "bytes",
            (Query(f"sum by (run) ({of_node('ckpt_async_queue_bytes', 'run')})", "{{run}}"),),
        ),
    ),
    "Commits": (
        Graph(
            "Age of the newest commit, and of the newest save",
            "Saws: each one brings its line down. A save comes down and the commit does not: nothing is committed.",
            "s",
            (
                Query(
                    f"time() - max by (run) (ckpt_async_last_committed_timestamp_seconds{{{RUN}}})",
                    "committed {{run}}",
                ),
                Query(
                    f"time() - max by (run) (ckpt_async_last_enqueued_timestamp_seconds{{{RUN}}})",
                    "saved {{run}}",
                ),
            ),
            warn=1800,
            alarm=3600,
        ),
        mean_time(
            "Commit latency",
            "Mean time from a rank's first shard to the commit, over all runs.",
            "ckpt_async_commit_latency_seconds",
            "job",
        ),
        Graph(
            "Commits within a minute, and within ten",
            "Share of the commits, over all runs.",
            "percentunit",
            tuple(
                Query(
                    f'sum(rate(ckpt_async_commit_latency_seconds_bucket{{le="{le}.0"}}[$__rate_interval]))'
                    " / (sum(rate(ckpt_async_commit_latency_seconds_count[$__rate_interval])) > 0)",
                    f"within {le} s",
                )
                for le in (60, 600)
            ),
        ),
        Graph(
            "Steps behind",
            "Steps from the newest commit to the newest save.",
            "none",
            (
                Query(
                    f"max by (run) (ckpt_async_last_enqueued_step{{{RUN}}})"
                    f" - max by (run) (ckpt_async_last_committed_step{{{RUN}}})",
                    "{{run}}",
                ),
            ),
        ),
        Graph(
            "Committed and given up",
            "Checkpoints in the last hour. Every rank counts each: the rank that counted most.",
            "none",
            (
                Query(
                    f"max by (run) (increase(ckpt_async_checkpoints_committed_total{{{RUN}}}[1h]))",
                    "committed {{run}}",
                ),
                Query(
                    f"max by (run) (increase(ckpt_async_checkpoints_aborted_total{{{RUN}}}[1h]))",
                    "given up {{run}}",
                ),
            ),
        ),
        Graph(
            "Superseded trainers",
            "1: a newer launch of the run has taken over, and this trainer hands in nothing new.",
            "none",
            (Query(f"max by (run, instance) (ckpt_async_fenced{{{RUN}}})", "{{run}} {{instance}}"),),
            alarm=1,
        ),
    ),
    "Backlog": (
        Graph(
            "Shards that are not in the store, by state",
            "failed: lost, or not uploaded in time and retried later. retrying: left by an earlier launch.",
            "none",
            (Query(f"sum by (state) ({of_node('ckpt_async_queue_files', 'run, state')})", "{{state}}"),),
            is_stacked=True,
        ),
        Graph(
            "Bytes that are not in the store",
            "Full sizes of these shards.",
            "bytes",
            (Query(f"sum by (run) ({of_node('ckpt_async_queue_bytes', 'run')})", "{{run}}"),),
        ),
        Graph(
            "Oldest of the queue",
            "How long its oldest shard has waited for the store.",
            "s",
            (
                Query(
                    f"time() - min by (run) (ckpt_async_oldest_pending_timestamp_seconds{{{RUN}}})", "{{run}}"
                ),
            ),
            warn=1800,
        ),
        Graph(
            "Checkpoints that wait for other ranks",
            "This node has delivered its part. The log of a waiting rank names those that have not.",
            "none",
            (Query(f"max by (run) (ckpt_async_waiting_checkpoints{{{RUN}}})", "{{run}}"),),
            width=12,
        ),
        Graph(
            "Longest wait for other ranks",
            "Since this node had delivered its part.",
            "s",
            (
                Query(
                    f"time() - min by (run) (ckpt_async_oldest_waiting_timestamp_seconds{{{RUN}}})", "{{run}}"
                ),
            ),
            width=12,
            warn=900,
        ),
    ),
    "Throughput": (
        Graph(
            "Bytes that the store acknowledged",
            "Of shards, over all ranks.",
            "Bps",
            (Query(f"sum by (run) ({rate('ckpt_async_upload_bytes_total')})", "{{run}}"),),
        ),
        Graph(
            "Shards being uploaded",
            "On each node.",
            "none",
            (
                Query(
                    f"sum by (node) (label_replace(ckpt_async_uploads_in_progress, {NODE}))",
                    "{{node}}",
                ),
            ),
            is_stacked=True,
        ),
        Graph(
            "Time of an upload, and of a request",
            "Means over all runs: a shard from its first byte until it is verified, and one attempt of a request.",
            "s",
            (
                Query(mean("ckpt_async_upload_duration_seconds", "job"), "shard {{job}}"),
                Query(mean("ckpt_async_store_request_duration_seconds", "run", RUN), "request {{run}}"),
            ),
        ),
    ),
    "Failures": (
        Graph(
            "Failed attempts, by reason",
            "Requests that failed, whether or not a later attempt succeeded.",
            "reqps",
            (
                Query(f"sum by (reason) ({rate('ckpt_async_upload_attempt_failures_total')})", "{{reason}}"),
                Query(
                    f"sum by (reason) ({rate('ckpt_async_sweep_attempt_failures_total')})",
                    "sweeper: {{reason}}",
                ),
            ),
            is_stacked=True,
        ),
        Graph(
            "Share of requests that fail",
            "Of all attempts. The alert is at 20 % for a quarter of an hour.",
            "percentunit",
            (
                Query(
                    f"sum by (run) ({rate('ckpt_async_upload_attempt_failures_total')}"
                    f" or {rate('ckpt_async_sweep_attempt_failures_total')})"
                    f" / sum by (run) ({rate('ckpt_async_store_request_duration_seconds_count')})",
                    "{{run}}",
                ),
            ),
            warn=0.05,
            alarm=0.2,
        ),
        Graph(
            "Refused by watchers",
            "In the last hour: what ckpt-async watch or run has found and does not upload. given_up ones were begun.",
            "none",
            (
                Query(
                    f"max by (run, reason) (increase(ckpt_async_watch_refused_total{{{RUN}}}[1h]))",
                    "{{reason}} {{run}}",
                ),
            ),
        ),
        Graph(
            "Shards by result",
            "In the last hour. failed ones are retried; source_changed and source_missing ones are lost.",
            "none",
            (
                Query(
                    f"sum by (result) (increase(ckpt_async_uploads_total{{{RUN}}}[1h]))",
                    "{{result}}",
                ),
            ),
        ),
    ),
    "What training feels": (
        Graph(
            "Blocked by uploads",
            "Share of the time that enqueue made the trainer wait: the backlog or the disk was at its limit.",
            "percentunit",
            (Query(f"max by (run) ({rate('ckpt_async_trainer_blocked_seconds_total')})", "{{run}}"),),
            warn=0.01,
            alarm=0.05,
        ),
        Graph(
            "Blocked by saves",
            "Share of the time that a CheckpointSaver held the trainer: the copy of the state, mostly.",
            "percentunit",
            (Query(f"max by (run) ({rate('ckpt_async_save_blocked_seconds_total')})", "{{run}}"),),
            warn=0.05,
        ),
        mean_time(
            "Time inside enqueue",
            "Mean, over all runs.",
            "ckpt_async_enqueue_duration_seconds",
            "job",
        ),
    ),
    "Disk and retention": (
        Graph(
            "Free space",
            "Of the file system of the checkpoints, on each node.",
            "percentunit",
            (
                Query(
                    f"{of_node('ckpt_async_spool_filesystem_free_bytes', '', '')}"
                    f" / {of_node('ckpt_async_spool_filesystem_size_bytes', '', '')}",
                    "{{node}}",
                ),
            ),
        ),
        Graph(
            "Held for the upload",
            "What deleting your own checkpoints would not free now.",
            "bytes",
            (Query(of_node("ckpt_async_spool_pinned_bytes", "", ""), "{{node}}"),),
        ),
        Graph(
            "Kept locally, and removed",
            "Committed checkpoints with files on a node, and those that retention removed in the last hour.",
            "none",
            (
                Query(f"max by (run) (ckpt_async_checkpoints_retained{{{RUN}}})", "kept {{run}}"),
                Query(
                    f"max by (run) (increase(ckpt_async_pruned_checkpoints_total{{{RUN}}}[1h]))",
                    "removed {{run}}",
                ),
            ),
        ),
    ),
    "Sweeper": (
        Graph(
            "Since the last sweep",
            "Until the first is complete: since the sweeper was started.",
            "s",
            (
                Query(
                    "time() - (ckpt_async_sweep_last_completed_timestamp_seconds"
                    " or ckpt_async_sweep_started_timestamp_seconds)",
                    "{{instance}}",
                ),
            ),
            alarm=21600,
        ),
        mean_time(
            "Time of a sweep",
            "Mean, uploads for dead owners included.",
            "ckpt_async_sweep_duration_seconds",
            "instance",
        ),
        Graph(
            "What fails, and since when",
            "A folder or remote in which every sweep fails.",
            "s",
            (
                Query(
                    "time() - ckpt_async_sweep_failing_since_timestamp_seconds",
                    "{{target}} ({{instance}})",
                ),
            ),
            alarm=3600,
        ),
        Graph(
            "Settled by the sweeper",
            "Checkpoints in the last hour: committed for dead engines, given up, pruned.",
            "none",
            (Query("sum by (result) (increase(ckpt_async_sweep_checkpoints_total[1h]))", "{{result}}"),),
        ),
        Graph(
            "Uploaded for dead trainers",
            "Bytes that the store acknowledged.",
            "Bps",
            (
                Query(
                    f"sum by (instance) ({rate('ckpt_async_sweep_adopted_upload_bytes_total', '')})",
                    "{{instance}}",
                ),
            ),
        ),
        Graph(
            "Removed, and damaged",
            "In the last hour: objects that nothing refers to, and damage that --verify found.",
            "none",
            (
                Query("sum by (kind) (increase(ckpt_async_sweep_orphans_removed_total[1h]))", "{{kind}}"),
                Query("sum by (kind) (increase(ckpt_async_verify_failures_total[1h]))", "damaged: {{kind}}"),
            ),
        ),
    ),
}


def thresholds(graph: Graph) -> dashboards.ThresholdsConfig:
    steps = [Threshold(value=None, color="green")]
    steps += [Threshold(value=graph.warn, color="yellow")] if graph.warn is not None else []
    steps += [Threshold(value=graph.alarm, color="red")] if graph.alarm is not None else []
    return dashboards.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def panel(graph: Graph) -> stat.Panel | timeseries.Panel:
    is_number = isinstance(graph, Number)
    made: stat.Panel | timeseries.Panel
    if is_number:
        newest = ReduceDataOptions().calcs(["lastNotNull"])
        made = stat.Panel().graph_mode(BigValueGraphMode.NONE).color_mode(BigValueColorMode.BACKGROUND)
        made = made.text_mode(BigValueTextMode.VALUE_AND_NAME).reduce_options(newest).no_value("none")
    else:
        legend = VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
        tooltip = VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
        made = timeseries.Panel().legend(legend.show_legend(True)).tooltip(tooltip).min(0)
        made = made.fill_opacity(30 if graph.is_stacked else 8).line_width(1)
        if graph.is_stacked:
            made = made.stacking(StackingConfig().mode(StackingMode.NORMAL))
    made = made.title(graph.title).description(graph.meaning).datasource(SOURCE).unit(graph.unit)
    made = made.thresholds(thresholds(graph)).span(graph.width).height(7 if not is_number else 5)
    for index, query in enumerate(graph.queries):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend)
        target = target.datasource(SOURCE).ref_id("ABCDEFGH"[index]).format(PromQueryFormat.TIME_SERIES)
        made = made.with_target(target.instant() if is_number else target.range())
    return made


def build() -> dashboards.Dashboard:
    runs = (
        dashboards.QueryVariable("run")
        .label("Run")
        .datasource(SOURCE)
        .query("label_values(ckpt_async_last_enqueued_timestamp_seconds, run)")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )
    made = (
        dashboards.Dashboard("Checkpoints (ckpt_async)")
        .uid("ckpt-async")
        .description("Uploads of training checkpoints: what is safe, what waits, what fails.")
        .tags(["ckpt_async", "training"])
        .refresh("30s")
        .time("now-6h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboards.DatasourceVariable("source").label("Prometheus").type("prometheus"))
        .with_variable(runs)
    )
    ids = itertools.count(1)
    for title, graphs in ROWS.items():
        made = made.with_row(dashboards.Row(title).id(next(ids)))
        for graph in graphs:
            made = made.with_panel(panel(graph).id(next(ids)))
    return made


def as_json() -> str:
    return JSONEncoder(sort_keys=True, indent=2).encode(build().build()) + "\n"


if __name__ == "__main__":
    FILE.write_text(as_json(), encoding="utf-8")
    sys.stdout.write(f"{FILE}\n")
