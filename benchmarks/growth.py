"""Does anything grow with the number of checkpoints ever saved: memory, start-up, requests, `enqueue`, journal?

One rank saves one tiny checkpoint after another with `num_checkpoints_to_keep=3` to the sink over HTTP. Nothing is
ever deleted remotely, which is the worst case. After 10, 100, 1,000, … checkpoints it closes the uploader, measures,
and opens a new one on the same folder and remote, as a restarted trainer would ("open"). "find" is `restore.find` in
its own process. Requests are counted by the sink and divided by the number of checkpoints since the previous line. A
run counts only if exactly the checkpoints that were saved are committed in the store.

Up to the last 500 before each line, checkpoints are saved as fast as eight in progress allow. For those 500,
`enqueue` is timed while the engine is idle: the previous checkpoint is committed, and what follows a commit (latest,
the spool, local retention) is done. So this measures state that may have grown; `./dev bench enqueue` measures what a
call waits for while the engine works.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _child import MIB, anonymous_bytes
from _compare import BUCKET, Server, parser_of, quantile, report, scratch

AHEAD = 8  # checkpoints in progress at once
REPEATS = 3  # measurements of what takes only milliseconds: opening, finding
KEEP = 3
SAMPLES = 500  # the number of `enqueue` calls timed before each line
PATIENCE_S = 60.0


def milestones(last: int) -> Iterator[int]:
    """Yield 10, 100, … and `last`."""
    yield from itertools.takewhile(lambda count: count < last, (10**power for power in itertools.count(1)))
    yield last


class Run:
    """The trainer of one rank, restarted at every milestone."""

    def __init__(self, folder: Path, server: Server) -> None:
        self._folder, self._server = folder, server
        self._remote = f"s3://{BUCKET}/run"
        self._num_saved = 0
        self._uploader = self._open()

    def _open(self) -> Any:
        from ckpt_async import Uploader

        return Uploader(
            self._folder, self._remote, rank=0, world_size=1, num_checkpoints_to_keep=KEEP, close_grace_s=0
        )

    def save_until(self, count: int) -> list[float]:
        """Save checkpoints up to step `count`; return the seconds that each of the last calls of `enqueue` took."""
        first = self._num_saved + 1
        first_timed = max(first, count - SAMPLES + 1)
        for step in range(first, first_timed):
            self._save(step)
            if step - AHEAD >= first:
                self._uploader.wait(step - AHEAD, timeout_s=PATIENCE_S)
        took = []
        for step in range(first_timed, count + 1):
            self._rest()
            took.append(self._save(step))
        self._rest()
        self._num_saved = count
        return took

    def _save(self, step: int) -> float:
        """Save one checkpoint, and return the seconds that `enqueue` took."""
        path = self._folder / f"step-{step}" / "shard.bin"
        path.parent.mkdir()
        path.write_bytes(b"%d" % step)
        began = time.perf_counter()
        self._uploader.enqueue(path, step=step)
        took_s = time.perf_counter() - began
        self._uploader.seal(step)
        return took_s

    def _rest(self) -> None:
        """Wait until the engine has seen everything and has nothing left to do. `flush` would wake it once more."""
        engine, changed = self._uploader._engine.view(), self._uploader._engine.changed  # noqa: SLF001
        asked = engine.wake()

        def is_at_rest() -> bool:
            return engine.last_seen_wake >= asked and not engine.num_due

        deadline = time.monotonic() + PATIENCE_S
        while not changed.wait(deadline - time.monotonic(), unless=is_at_rest):
            if time.monotonic() >= deadline:
                raise RuntimeError(f"{engine.num_due} actions are still to be done")

    def measure(self, took: list[float], requests: float) -> dict[str, Any]:
        self._uploader.close()
        gc.collect()
        private = self._folder / ".ckpt-async"
        journal = sum(path.stat().st_size for path in private.glob("journal*"))
        opened_s, opened_requests = [], []
        for _ in range(REPEATS):
            self._uploader.close()
            before, began = self._server.stats(), time.perf_counter()
            self._uploader = self._open()
            opened_s.append(time.perf_counter() - began)
            opened_requests.append((self._server.stats() - before).requests)
        return {
            "enqueue p50 ms": quantile(took, 0.5) * 1000,
            "requests/checkpoint": requests,
            "open ms": quantile(opened_s, 0.5) * 1000,
            "open requests": max(opened_requests),
            **self._find(),
            "anon MiB": anonymous_bytes(os.getpid()) / MIB,
            "journal KiB": journal / 1024,
            "files": sum(len(files) for _, _, files in os.walk(self._folder)),
        }

    def _find(self) -> dict[str, Any]:
        before = self._server.stats()
        command = [sys.executable, __file__, "--find", self._remote]
        step, *took = json.loads(subprocess.check_output(command))
        if step != self._num_saved:
            raise RuntimeError(f"found step {step} after {self._num_saved} checkpoints")
        requests = (self._server.stats() - before).requests / len(took)
        return {"find ms": quantile(took, 0.5) * 1000, "find requests": requests}

    def close(self) -> None:
        from ckpt_async.core import keys

        self._uploader.close()
        decisions = len(self._server.sizes(f"run/{keys.DECISIONS}"))
        if decisions != self._num_saved:
            raise RuntimeError(f"{decisions} decisions of {self._num_saved} checkpoints")


def find_main(remote: str) -> None:
    from ckpt_async import restore

    took = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        found = restore.find(remote)
        took.append(time.perf_counter() - began)
    assert found is not None
    print(json.dumps([found.step, *took]))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--checkpoints", type=int, default=10_000, help="100000 takes about half an hour")
    arguments = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    with scratch() as folder, Server("sink", folder) as server:
        run = Run(folder / "run", server)
        num_saved = 0
        for count in milestones(arguments.checkpoints):
            before = server.stats()
            took = run.save_until(count)
            requests = (server.stats() - before).requests / (count - num_saved)
            rows[f"{count:,}"] = run.measure(took, requests)
            num_saved = count
            print(".", end="", file=sys.stderr, flush=True)
        run.close()
    print(file=sys.stderr)
    report(arguments, f"checkpoints ever saved, keep={KEEP}, to the sink", rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--find"]:
        find_main(sys.argv[2])
    else:
        main()
