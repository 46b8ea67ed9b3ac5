"""Generates docs/metrics.md from the definitions: `python -m tests.monitor.metrics_page > docs/metrics.md`."""

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

Set `metrics_port` (0: any free port; N: port N + the rank's number on the node, from `LOCAL_RANK`, `SLURM_LOCALID` or
MPI's variables) and let Prometheus scrape `/metrics` there. `/` is [the live page](page.md).

- A taken port is logged and does not stop training.
- To use your own server, pass it `uploader.metrics.registry`.
- For OpenTelemetry, let a collector scrape the same port (its `prometheus` receiver).
- `run` is the URL of the remote.
- A rank has at most 60 series, including every kind of failure. With a `CheckpointSaver` there are four more, with a
  watcher (`ckpt-async watch`, `run`) eight more.

"""

_AFTERWORD = """
**(N)** metrics are read from the folder's journals, for all ranks of the node:

- Every port of a node exports the same values, so use `max by (run, state)` over a node's ports, not `sum`.
- A sweeper exports them for its folders, including the uploads that killed trainers left.
- They are absent while the journal cannot be read.
- `ckpt_async_checkpoints_retained` may lag by a hundred times the time it takes to replay the journal.

All other metrics are counted by the process itself and start at 0 with it.

## Sweeper

`ckpt-async sweep --interval S --metrics-port P` (0: any free port) serves on `metrics_address`; to use your own server,
pass it `Sweeper.metrics.registry`. `target` is a folder or the URL of a remote; the log has the reason if it fails. (N)
metrics are read from the journals of its folders, with a delay of at most a hundred times the time it takes to read
them.

"""


_COMMANDS = """
## Commands

With `--metrics-file /var/lib/node_exporter/ckpt_async_drain.prom`, `drain`, `verify`, `pull`, `prune` and
`sweep --once` write a file for the textfile collector of node_exporter. They write it atomically when they end, whether
they succeed or fail. `target` is the folder or the remote. Use a separate file for each command and target. A file is
exported until the next run: alert on `time() - ckpt_async_command_completed_timestamp_seconds` and on
`ckpt_async_command_exit_code != 0`.

"""


def describe() -> str:
    """Return the text of `docs/metrics.md`."""
    own = _table(DEFINITIONS) + _AFTERWORD + _table(SWEEPER_DEFINITIONS)
    return _NOTES + own + _COMMANDS + _table(COMMAND_DEFINITIONS)


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
    """Return the sets that are not part of another one."""
    return [each for each in sets if not any({*each} < {*other} for other in sets)]


if __name__ == "__main__":
    print(describe(), end="")
