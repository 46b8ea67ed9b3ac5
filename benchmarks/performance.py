"""Generates docs/performance.md: runs the benchmarks, saves their JSON, and creates tables and the chart from it.

`./dev bench performance --run` runs every benchmark with the arguments below and saves one file for each to
`--from`, which takes an hour on two cores; give names to select some of them. Without `--run` it uses the
saved results. A benchmark without saved results keeps its previous table; text outside the markers is left
unchanged.

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
class Part:
    """One run of a benchmark and its table."""

    name: str
    command: str
    title: str
    counted: str  # the check that keeps the result honest
    quick: str | None = None  # arguments to add for a rough answer; None: takes too long for that


SINK = "bytes counted by a sink that reads all of them before it answers"
LINK = "bytes counted by a sink that models the link"
GRID = "network --clients ours obstore s5cmd boto3+crt"
SOME = "'5 of 100 MiB/s, 50 ms' '20 of 400 MiB/s, 30 ms' '60 of 400 MiB/s, 30 ms'"
TLS_GRID = f"network --server tls --clients ours obstore s5cmd boto3+crt --links {SOME} ceiling"
LARGE = (
    "network --mib 8192 --clients ours obstore boto3+crt s3torchconnector --links '20 of 400 MiB/s, 30 ms'"
)
QUICK = "--rounds 1"
FEW = "--mib 256 --clients ours obstore boto3+crt"
PARTS = [
    Part(
        "network-up",
        f"{GRID} --way up",
        "Up a link that behaves like S3",
        LINK,
        "--mib 256 --clients ours obstore boto3+crt",
    ),
    Part(
        "network-down",
        f"{GRID} --way down",
        "Down such a link",
        LINK,
        "--mib 256 --clients ours obstore boto3+crt",
    ),
    Part(
        "network-engines",
        "network --clients ours obstore 'obstore, unsigned' --mib 128 --engines 8",
        "Eight processes on one link",
        LINK,
    ),
    Part("network-tls-up", f"{TLS_GRID} --way up", "Up such a link over TLS", LINK),
    Part("network-tls-down", f"{TLS_GRID} --way down", "Down such a link over TLS", LINK),
    Part("network-large", LARGE, "8 GiB up such a link", LINK),
    Part("upload", "upload", "Upload of 1 GiB, plain HTTP", SINK, QUICK),
    Part("upload-tls", "upload --server tls", "Upload of 1 GiB, TLS", SINK, QUICK),
    Part(
        "upload-seaweed",
        "upload --server seaweed",
        "Upload of 1 GiB to SeaweedFS",
        "size asked of the server",
    ),
    Part(
        "download",
        "download",
        "Download of 1 GiB to a file",
        "size of the file, and bytes that left the sink",
        QUICK,
    ),
    Part("download-tls", "download --server tls", "Download of 1 GiB, TLS", "the same", QUICK),
    Part("resume", "resume", "Resume", SINK, QUICK),
    Part("end_to_end", "end_to_end", "End to end: blocked, and until durable", SINK, f"{QUICK} --mib 256"),
    Part("save", "save --rounds 3 --saves 2", "What a save costs training", SINK),
    Part("overlap", "overlap", "Sent while it is written", SINK),
    Part(
        "interference",
        "interference",
        "What training loses per GiB uploaded",
        SINK,
        f"{QUICK} --windows 2 --loops python --clients 'ours, thread' 'ours, process' obstore",
    ),
    Part(
        "interference-tls",
        "interference --server tls --loops python --clients 'ours, thread' 'ours, process' obstore",
        "What training loses per GiB uploaded over TLS",
        SINK,
    ),
    Part("enqueue", "enqueue", "`enqueue`, while shards are written beside it", SINK, "--total 160"),
    Part("enqueue-quiet", "enqueue --quiet", "`enqueue`, nothing written beside it", SINK),
    Part(
        "small_shards", "small_shards", "2,000 shards of 64 KiB", "one PUT for each by the sink's log", QUICK
    ),
    Part(
        "small_shards-10000", "small_shards --shards 10000 --rounds 3", "10,000 shards of 64 KiB", "the same"
    ),
    Part(
        "small_files",
        "small_files",
        "2,000 files of 64 KiB come back",
        "one GET for each by the sink's log, every byte compared",
        QUICK,
    ),
    Part("commit", "commit", "From the last seal to the commit", "requests by the sink's log", QUICK),
    Part("memory", "memory", "Memory of an upload", SINK, QUICK),
    Part("growth", "growth", "10 to 10,000 checkpoints", "decisions counted in the store"),
    Part(
        "scale_model",
        "scale_model",
        "10,000 ranks, on paper and simulated",
        "requests by the simulated store",
    ),
]


# --- running -----------------------------------------------------------------------------------------------


def run(part: Part, folder: Path) -> bool:
    name, *arguments = shlex.split(part.command)
    command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), *arguments, "--json"]
    print(f"./dev bench {part.command}", file=sys.stderr, flush=True)
    began = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    took_s = time.monotonic() - began
    if done.returncode:
        print(f"benchmarks: {part.name} failed after {took_s:.0f} s; the others go on", file=sys.stderr)
        return False
    (folder / f"{part.name}.json").write_text(json.dumps({"seconds": took_s, **json.loads(done.stdout)}))
    return True


# --- the page ----------------------------------------------------------------------------------------------


def table(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a Markdown table; a spread is shown by its median and range. Columns that hold more than a
    number appear only in the JSON.
    """
    columns = [name for name, value in next(iter(rows.values())).items() if not is_nested(value)]
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'--:|' * len(columns)}"]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(cell(row.get(column)) for column in columns)} |")
    return lines


def is_nested(value: Any) -> bool:
    return isinstance(value, Mapping) and "median" not in value


def section(part: Part, saved: Mapping[str, Any]) -> list[str]:
    load = saved["machine"]["load_1_min"]
    lines = [
        f"`./dev bench {part.command}`; {part.counted}; {saved['seconds']:.0f} s, load {load:.1f} at its end.",
        "",
    ]
    lines += table(saved["rows"])
    if saved.get("simulated"):
        lines += ["", "One checkpoint, simulated with the real engines:", "", *table(saved["simulated"])]
    return lines


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
    for part in PARTS:
        if part.name in saved:
            page = replaced(page, part.name, section(part, saved[part.name]))
    PAGE.write_text(page, encoding="utf-8")
    if all(name in saved for name, _, _ in PANELS):  # otherwise the chart that is there shows more
        CHART.write_text(chart(saved), encoding="utf-8")


def write_quick(parts: Iterable[Part], saved: Mapping[str, Mapping[str, Any]], page: Path) -> None:
    lines = ["# Performance of this machine", ""]
    lines += machine_lines(each["machine"] for each in saved.values())
    for part in parts:
        if part.name in saved:
            lines += ["", f"## {part.title}", "", *section(part, saved[part.name])]
    page.write_text("\n".join([*lines, ""]), encoding="utf-8")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(each.name for each in PARTS)}"
    )
    parser.add_argument("--run", action="store_true", help="run them first")
    parser.add_argument("--from", dest="folder", type=Path, default=SAVED, help="where the results are")
    parser.add_argument("--quick", action="store_true", help="a rough answer for this machine in ten minutes")
    arguments: argparse.Namespace = parser.parse_args()
    unknown = set(arguments.names) - {each.name for each in PARTS}
    if unknown:
        parser.error(f"no such result: {', '.join(sorted(unknown))}")
    wanted = [each for each in PARTS if not arguments.names or each.name in arguments.names]
    if arguments.quick:
        arguments.run, arguments.folder = True, arguments.folder / "quick"
        wanted = [
            replace(each, command=f"{each.command} {each.quick}") for each in wanted if each.quick is not None
        ]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.run:
        use_memory_once()
    failed = [each.name for each in wanted if arguments.run and not run(each, arguments.folder)]
    saved = {}
    for part in PARTS:
        path = arguments.folder / f"{part.name}.json"
        if path.exists():
            saved[part.name] = json.loads(path.read_text(encoding="utf-8"))
    if not saved:
        sys.exit(f"benchmarks: no results in {arguments.folder}: --run makes them")
    if arguments.quick:
        page = arguments.folder / "performance.md"
        write_quick(wanted, saved, page)
        print(page.read_text(encoding="utf-8") if not arguments.json else json.dumps(saved))
    else:
        write(saved)
        made = f"{PAGE.relative_to(ROOT)}: {', '.join(saved)}"
        print(json.dumps(saved) if arguments.json else made)
    if failed:
        sys.exit(f"benchmarks: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
