"""docs/metrics.md, made from the definitions: `python -m tests.monitor.metrics_page > docs/metrics.md`."""

from collections.abc import Iterable

from ckpt_async.monitor.definitions import DEFINITIONS, SWEEPER_DEFINITIONS, Definition

_NOTES = """\
# Metrics

Made from `ckpt_async/monitor/definitions.py`; do not edit. To make it anew:

    python -m tests.monitor.metrics_page > docs/metrics.md

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


if __name__ == "__main__":
    print(describe(), end="")
