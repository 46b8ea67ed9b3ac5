"""How long does a save of a state block training, and how much does training lose while it is written and uploaded?

Ways to save a state to the local disk; each run is a whole process, and they take turns:

  CheckpointSaver           copied into memory that is reused, written by a thread, and then uploaded
  CheckpointSaver, process  the same, uploaded by a process of its own
  CheckpointSaver, sharded  the same as the first, with torch.distributed.checkpoint's files
  CheckpointSaver, blocking written in `step`, then uploaded
  torch.save                written, and nothing else
  torch, async_save         torch.distributed.checkpoint's: copied, written and fsynced by a thread
  torch, kept stager        the same with a `DefaultStager` that keeps its memory from save to save
  Lightning                 AsyncCheckpointIO: copied, then torch.save on a thread

A torch training loop runs on one thread. "blocked" is how long the call took. "beside" is what training lost
from then until the file was written, "upload" what it lost from then until the commit (ours only: fsync,
upload to a sink, receipts), each compared with the same number of steps when training runs alone. "lost" is
blocked + beside. The first save of a process takes its memory from the kernel; the later ones may reuse it.
"extra MiB" is the peak resident memory of a save above that before the first. With `--device cuda` the state is on
the GPU, and so is training. "step us" is what a
`CheckpointSaver.step` costs when nothing is due.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from _child import MIB, Measured, Work, child_main
from _compare import BUCKET, Clients, Server, add_ratio, key_of, parser_of, report, scratch, spread, turns
from end_to_end import SMALL_CHANGE_BYTES, environments, state_of
from interference import ALONE_S, torch_step

DEVICE = os.environ.get("CKPT_ASYNC_BENCH_DEVICE", "cpu")
NUM_CALLS = 20_000
TIMEOUT_S = 300.0


class Way:
    """One way to save. `written` is set once a save is in its file."""

    def __init__(self, work: Work) -> None:
        self.folder, self.written = Path(work.path), threading.Event()

    def save(self, state: Any, number: int) -> None:
        """Save, as called from the training loop."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait, on another thread, until nothing runs beside training."""

    def call_us(self) -> float | None:
        """Return the microseconds of a call when nothing is due."""
        return None


class Ours(Way):
    def __init__(self, work: Work, **options: Any) -> None:
        super().__init__(work)
        from ckpt_async import CheckpointSaver
        from ckpt_async.stores import StoreOptions

        self.saver = CheckpointSaver(
            self.folder,
            f"s3://{work.bucket}/{work.key}",
            save_interval=lambda timestamp, _: timestamp.batch % 1_000_000 == 0,
            on_saved=lambda _: self.written.set(),
            hooks_at_once=True,
            latest_filename=None,
            num_checkpoints_to_keep=1,
            store_options=StoreOptions(endpoint_url=work.endpoint_url),
            **options,
        )

    def save(self, state: Any, number: int) -> None:
        if not self.saver.step(state, number * 1_000_000):
            raise RuntimeError("nothing was saved")

    def finish(self) -> None:
        self.written.wait(TIMEOUT_S)
        self.saver.wait(TIMEOUT_S)

    def call_us(self) -> float:
        took: list[int] = []
        for batch in range(10_000_000_001, 10_000_000_001 + NUM_CALLS):
            began = time.perf_counter_ns()
            self.saver.step({}, batch)
            took.append(time.perf_counter_ns() - began)
        return statistics.median(took) / 1e3


class Plain(Way):
    def save(self, state: Any, number: int) -> None:
        import torch

        torch.save(state, self.folder / f"{number}.pt")
        self.written.set()


class AsyncSave(Way):
    def __init__(self, work: Work, *, keeps_stager: bool) -> None:
        super().__init__(work)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import async_save

        # Without an accelerator, the two options that need one are off; `stage` blocks in any case.
        options = (False, True, False, False) if DEVICE == "cpu" else (True, False, False, True)
        kept = DefaultStager(StagingOptions(*options)) if keeps_stager else None
        self.options: dict[str, Any] = {"async_stager": kept} if keeps_stager else {}
        self.async_save = async_save

    def save(self, state: Any, number: int) -> None:
        path = self.folder / str(number)
        self.future: Any = self.async_save(state, checkpoint_id=path, **self.options)

    def finish(self) -> None:
        self.future.result(TIMEOUT_S)
        self.written.set()


class Lightning(Way):
    def __init__(self, work: Work) -> None:
        super().__init__(work)
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        written = self.written

        class Telling(TorchCheckpointIO):
            def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
                super().save_checkpoint(*arguments, **options)
                written.set()

        self.plugin = AsyncCheckpointIO(Telling())

    def save(self, state: Any, number: int) -> None:
        self.plugin.save_checkpoint({"state_dict": state}, self.folder / f"{number}.ckpt")

    def finish(self) -> None:
        if not self.written.wait(TIMEOUT_S):
            raise RuntimeError("nothing was written")


WAYS: dict[str, Callable[[Work], Way]] = {
    "CheckpointSaver": Ours,
    "CheckpointSaver, process": lambda work: Ours(work, runner="process", linger_s=0),
    "CheckpointSaver, sharded": lambda work: Ours(work, sharded=True),
    "CheckpointSaver, blocking": lambda work: Ours(work, blocking=True),
    "torch.save": Plain,
    "torch, async_save": lambda work: AsyncSave(work, keeps_stager=False),
    "torch, kept stager": lambda work: AsyncSave(work, keeps_stager=True),
    "Lightning": Lightning,
}


# --- the training ------------------------------------------------------------------------------------------


def train(step: Callable[[], object], is_over: Callable[[float], bool]) -> tuple[float, int]:
    """Train until `is_over(seconds so far)`; return the seconds and the steps."""
    began = now = time.perf_counter()
    num_steps = 0
    while not is_over(now - began):
        step()
        num_steps += 1
        now = time.perf_counter()
    return now - began, num_steps


def resident_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(each.split()[1] for each in lines if each.startswith(f"{name}:"))) * 1024


def one_save(way: Way, state: Any, number: int, step: Callable[[], object]) -> dict[str, float]:
    """Save once, then train until nothing runs in the background, between two windows of training alone."""
    before = train(step, lambda spent_s: spent_s >= ALONE_S)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    way.written.clear()
    began = time.perf_counter()
    way.save(state, number)
    blocked_s = time.perf_counter() - began
    finishing = threading.Thread(target=way.finish)
    finishing.start()
    writing = train(step, lambda _: way.written.is_set() or not finishing.is_alive())
    written_s = time.perf_counter() - began
    uploading = train(step, lambda _: not finishing.is_alive())
    finishing.join()
    if not way.written.is_set():
        raise RuntimeError("nothing was written")
    peak_bytes = resident_bytes("VmHWM")
    after = train(step, lambda spent_s: spent_s >= ALONE_S)
    step_s = (before[0] + after[0]) / (before[1] + after[1])
    beside_s, upload_s = (took_s - num_steps * step_s for took_s, num_steps in (writing, uploading))
    return {
        "blocked": blocked_s,
        "beside": beside_s,
        "lost": blocked_s + beside_s,
        "upload": upload_s,
        "written": written_s,
        "peak": peak_bytes,
    }


def prepare(name: str) -> Callable[[Work], Callable[[], Any]]:
    def prepare(work: Work) -> Callable[[], Any]:
        way, step = WAYS[name](work), torch_step(DEVICE)
        state = {"model": state_of(work, DEVICE)}
        train(step, lambda spent_s: spent_s >= ALONE_S)

        def run() -> dict[str, Any]:
            idle_bytes = resident_bytes("VmRSS")
            saves = []
            for number in range(1, work.concurrency + 1):
                each = one_save(way, state, number, step)
                saves.append(each | {"extra": each.pop("peak") - idle_bytes})
                if name not in OURS:  # retention removes our files
                    for path in way.folder.iterdir():
                        remove(path)
            return {"saves": saves, "call_us": way.call_us()}

        return run

    return prepare


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


OURS = tuple(name for name in WAYS if name.startswith("CheckpointSaver"))


# --- the whole ---------------------------------------------------------------------------------------------


def row_of(saves: Iterable[dict[str, float]], calls_us: list[float], *, is_ours: bool) -> dict[str, Any]:
    saves = list(saves)
    found: dict[str, Any] = {
        f"{name} s": spread(each[name] for each in saves) for name in ("blocked", "beside", "lost")
    }
    found["written s"] = statistics.median(each["written"] for each in saves)
    found["upload s"] = spread(each["upload"] for each in saves) if is_ours else None
    found["extra MiB"] = max(each["extra"] for each in saves) / MIB
    found["step us"] = statistics.median(calls_us) if calls_us else None
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=3, help="in each process, the first one included")
    parser.add_argument("--mib", type=int, default=1024, help="size of the state, in steps of 16")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--device", default="cpu", help="where the state is and training runs: cpu, cuda")
    parser.add_argument("--folder", help="where to save (default: the system's temporary folder)")
    arguments = parser.parse_args()
    found = environments(["Lightning"]) if "Lightning" in arguments.ways else {}
    clients = Clients([name for name in arguments.ways if name != "Lightning" or found], {})
    runs: dict[str, list[Measured]] = {name: [] for name in clients.names}
    os.environ["CKPT_ASYNC_BENCH_DEVICE"] = arguments.device  # for the children
    with scratch(arguments.folder) as folder, Server("sink", folder) as server:
        for number, name in turns(clients.names, arguments.rounds):
            key = key_of(number, name)
            (folder / key).mkdir()
            work = Work(str(folder / key), arguments.mib * MIB, server.url, BUCKET, key, 0, arguments.saves)
            before = server.stats()
            runs[name].append(clients.run(name, __file__, work, found.get(name)))
            sent = (server.stats() - before).bytes_in - (name in OURS) * arguments.saves * arguments.mib * MIB
            if not 0 <= sent < SMALL_CHANGE_BYTES:
                raise RuntimeError(f"{name}: {sent} bytes too many (or too few) arrived")
            server.clear()
            remove(folder / key)
    rows: dict[str, dict[str, Any]] = {}
    for part, chosen in (("first", slice(1)), ("later", slice(1, None))):
        section = {}
        for name, measured in runs.items():
            saves = [save for each in measured for save in each.told["saves"][chosen]]
            calls_us = [each.told["call_us"] for each in measured if part == "later" and name in OURS]
            section[f"{name}, {part}"] = row_of(saves, calls_us, is_ours=name in OURS)
        add_ratio(section, "lost s", f"torch.save, {part}")
        for row in section.values():
            row["lost of torch.save"] = row.pop(f"of torch.save, {part}", None)
        rows |= section
    title = f"saves of {arguments.mib} MiB beside training, {arguments.rounds} rounds of {arguments.saves}"
    report(arguments, title, rows)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    if sys.argv[1:2] == ["--child"]:
        child_main({name: prepare(name) for name in WAYS})
    else:
        main()
