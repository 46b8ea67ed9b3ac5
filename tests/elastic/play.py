"""deploy/torchrun/node.sh on two nodes, disturbed: this is what `./dev elastic` runs.

Two agents of torchrun on loopback, with a folder each. A worker is killed; a node is killed and comes back; a node is
lost with its disk; the rendezvous node is killed. Each time both resume from the newest commit, and the result is
that of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from ckpt_async import restore

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy/torchrun/node.sh"
TRAINER = ROOT / "tests/elastic/train.py"
STEPS = 150
PATIENCE_S = 120.0


class Nodes:
    """Two nodes, which are ended with all their processes at the end of the `with` block."""

    def __init__(self, root: Path) -> None:
        self.root, self.remote = root, f"file://{root}/remote"
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._endpoint = f"127.0.0.1:{free.getsockname()[1]}"

    def start(self, node: int) -> None:
        folder = self.root / f"node{node}"
        trainer = [str(TRAINER), str(folder), self.remote, str(STEPS), str(self.root)]
        command = [str(SCRIPT), str(folder), self._endpoint, "2", "--nproc-per-node=1", *trainer]
        more = {"PLAY_NODE": str(node), "PAUSE_S": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        with (self.root / f"node{node}.out").open("ab") as out:
            self._running[node] = subprocess.Popen(
                command,
                env=os.environ | more | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
            )

    def kill(self, node: int) -> None:
        """Kill a node as if its power failed. Workers have sessions of their own, so all are found by their
        environment.
        """
        while pids := self._processes(node):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._running[node].wait(60)

    def lose(self, node: int) -> None:
        """Kill a node, and delete its disk."""
        self.kill(node)
        shutil.rmtree(self.root / f"node{node}")

    def _processes(self, node: int) -> list[int]:
        marks = {f"PLAY_NODE={node}".encode(), f"PYTHONPATH={ROOT}".encode()}
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                of = (entry / "environ").read_bytes() if entry.name.isdecimal() else b""
                if (
                    marks <= set(of.split(b"\0"))
                    and str(self.root).encode() in (entry / "cmdline").read_bytes()
                ):
                    found.append(int(entry.name))
        return found

    def ended(self) -> bool:
        return all(each.poll() is not None for each in self._running.values())

    def codes(self) -> list[int | None]:
        return [self._running[node].poll() for node in (0, 1)]

    def __enter__(self) -> Self:
        for node in (0, 1):
            self.start(node)
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._running:
            self.kill(node)

    def lines(self) -> list[tuple[str, int, int, int, int]]:
        """Return (START or SAVED, rank, step, node, process) of each line, in order."""
        log = self.root / "log"
        rows = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        return [(row[0], *map(int, row[1:])) for row in rows if len(row) == 5]

    def starts(self) -> list[int]:
        """Return the step after which each launch of rank 0 resumed."""
        return [step for word, rank, step, *_ in self.lines() if word == "START" and rank == 0]

    def saves_again(self, start: int, count: int = 10) -> Callable[[], bool]:
        """Return a condition: both ranks have saved `count` steps since start number `start`."""

        def is_so() -> bool:
            begun = [index for index, line in enumerate(self.lines()) if line[0] == "START"]
            if len(begun) < 2 * start:
                return False
            saved = [rank for word, rank, *_ in self.lines()[begun[2 * start - 2] :] if word == "SAVED"]
            return min(saved.count(0), saved.count(1)) >= count

        return is_so


def until(what: str, is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {PATIENCE_S:.0f} s: {what}")
        time.sleep(0.1)


def disturb(nodes: Nodes, say: Callable[[str], None]) -> None:
    def worker_of_1() -> None:
        pid = next(line[4] for line in reversed(nodes.lines()) if line[3] == 1)
        os.kill(pid, signal.SIGKILL)

    def back(node: int, end: Callable[[int], None]) -> Callable[[], None]:
        def act() -> None:
            end(node)
            nodes.start(node)

        return act

    acts = {
        "a worker is killed": worker_of_1,
        "a node is killed, and comes back": back(1, nodes.kill),
        "a node is lost with its disk": back(1, nodes.lose),
        "the node that all meet at is killed, and comes back": back(0, nodes.kill),
    }
    until("both save", nodes.saves_again(1))
    for start, (name, act) in enumerate(acts.items(), 2):
        before = restore.find(nodes.remote)
        assert before is not None
        act()
        until(f"after this both save again: {name}", nodes.saves_again(start))
        went_on = nodes.starts()[-1]
        assert before.step <= went_on, (name, before.step, nodes.starts())
        say(f"{name}: both go on after step {went_on}; {before.step} was committed before")


def play(say: Callable[[str], None] = print) -> None:
    """Run the play. Raises AssertionError or TimeoutError, with the nodes' output on stderr."""
    with tempfile.TemporaryDirectory(prefix="ckpt-async-elastic-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        try:
            with Nodes(root) as nodes:
                disturb(nodes, say)
                until("both end", nodes.ended)
                assert nodes.codes() == [0, 0]
            found = restore.find(f"file://{root}/remote")
            assert found is not None
            assert found.step == STEPS
            report = restore.fetch(found, root / "result")
            for rank in (0, 1):
                state = b"begin"
                for _ in range(STEPS):
                    state = hashlib.sha256(state + b"%d" % rank).hexdigest().encode()
                assert report.paths[f"rank-{rank}.bin"].read_bytes() == state
            say("completed, and every byte is that of a run that nobody disturbed")
        except BaseException:
            for log in (*sorted(root.glob("*.out")), root / "log"):
                if log.exists():
                    print(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}", file=sys.stderr)
            raise


if __name__ == "__main__":
    play()
