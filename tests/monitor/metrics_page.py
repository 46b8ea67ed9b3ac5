"""docs/metrics.md, made from the definitions: `python -m tests.monitor.metrics_page > docs/metrics.md`."""

from collections.abc import Iterable

from ckpt_async.monitor.definitions import (
    COMMAND_DEFINITIONS,
    DEFINITIONS,
    SWEEPER_DEFINITIONS,
    Definition,
)

_NOTES = """\
# Metrics

Generated from `ckpt_async/monitor/definitions.py`; do not edit. To regenerate:

    python -m tests.monitor.metrics_page > docs/metrics.md

## Uploader

Set `metrics_port` (0: any free port; N: port N + the rank's number on the node,
from `LOCAL_RANK`, `SLURM_LOCALID` or MPI's variables) and let Prometheus scrape `/metrics` there;
`/` is [a page for people](page.md).
A taken port is logged and does not stop training. To use your own server, give it `uploader.metrics.registry`.
`run` is the URL of the remote. A rank has at most 60 series, with every kind of failure, four more with a
`CheckpointSaver` and eight more with a watcher (`ckpt-async watch`, `run`), which are absent without one.

"""

_AFTERWORD = """
**(N)**: read from the folder's journals, for all ranks of the node. Every port of a node exports the same values, so
use `max by (run, state)` over a node's ports, not `sum`. A sweeper exports them for its folders, including what killed
trainers left. While the journal cannot be read they are absent. `checkpoints_retained` may lag by a hundred times the
time it takes to replay the journal. Everything else is counted by the process itself and starts at 0 with it.

## Sweeper

`ckpt-async sweep --interval S --metrics-port P` (0: any free port) serves on `metrics_address`; to use your own server,
take `Sweeper.metrics.registry`. `target` is a folder or the URL of a remote; the log says why it fails. (N) is read
from the journals of its folders, with a delay of at most a hundred times the time it takes to read them.

"""


_COMMANDS = """
## Commands

`drain`, `verify`, `pull`, `prune` and `sweep --once` write a file for the textfile collector of node_exporter with
`--metrics-file /var/lib/node_exporter/ckpt_async_drain.prom`: at their end, well or not, and as a whole. `target` is
the folder or the remote. Give each command and target a file of its own. What is in a file is exported until the next
run: alert on `time() - ckpt_async_command_completed_timestamp_seconds` and on `ckpt_async_command_exit_code != 0`.

"""


_OTEL = """
## OpenTelemetry

Where `opentelemetry-api` is installed (extra `opentelemetry`) and your process has set up an SDK before it opens the
`Uploader`, all metrics of an uploader go there too, under these names; histograms with the same buckets. Without the
API nothing of it is imported, and without an SDK it does nothing. The sweeper has no part in it.

Traces, on each rank: a span `ckpt_async.checkpoint` from the first shard's `enqueue` to the commit as this rank saw it,
with `ckpt_async.run`, `ckpt_async.rank`, `ckpt_async.step` and `ckpt_async.outcome` (`committed`, or `given_up` with
the reason as the error), and in it a span `ckpt_async.upload` for each shard, or each series of small ones
(`ckpt_async.shards` of them), up to the last 200. They are roots of their own, made when the checkpoint is decided.
What waits for ranks that never come has no span; a shard that failed has none.
"""


def describe() -> str:
    """The text of `docs/metrics.md`."""
    own = _table(DEFINITIONS) + _AFTERWORD + _table(SWEEPER_DEFINITIONS)
    return _NOTES + own + _COMMANDS + _table(COMMAND_DEFINITIONS) + _OTEL


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


if __name__ == "__main__":
    print(describe(), end="")
