"""A saver in a forked child, a dataloader worker for example: calls raise at once, and do no harm to the parent's."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_async.torch as ckpt
from ckpt_async.errors import UploaderClosedError
from ckpt_async.saver import CheckpointSaver

# Python 3.12 warns of exactly this.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

PATIENCE_S = 15.0
RAISE = ("step", "save_now", "wait", "flush", "load_latest", "find")


def state(batch: int) -> dict[str, Any]:
    return {"weight": torch.full((10,), float(batch)), "batch": batch}


def use(saver: CheckpointSaver, tell: Callable[[str], object]) -> None:
    """What a child may try, while the parent's thread writes a checkpoint."""
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: saver.step(state(2), 2),
        "save_now": saver.save_now,
        "wait": saver.wait,
        "flush": lambda: saver.flush(60),
        "load_latest": saver.load_latest,
        "find": saver.find,
    }
    for name, call in calls.items():
        try:
            call()
        except UploaderClosedError as error:
            tell(f"{name} {'this is its fork' in str(error)}")
    os.kill(os.getpid(), signal.SIGUSR1)
    saver.close()
    with saver:
        pass
    with contextlib.suppress(ValueError), saver:
        raise ValueError
    tell("closed")


def start(how: str, work: Callable[[Callable[[str], object]], None]) -> tuple[int, int]:
    """Run `work` in a forked child. Return its pid, and where its lines can be read."""
    reading, writing = os.pipe()

    def child() -> None:
        try:
            work(lambda line: os.write(writing, f"{line}\n".encode()))
        finally:
            os._exit(0)

    if how == "os.fork":
        pid = os.fork()
        if pid == 0:
            child()
    else:
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        assert process.pid is not None
        pid = process.pid
    os.close(writing)
    return pid, reading


def lines(reading: int) -> list[str]:
    """What the child has told until it ended, or had no time left."""
    told, deadline = b"", time.monotonic() + PATIENCE_S
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (data := os.read(reading, 1000)):
            break
        told += data
    os.close(reading)
    return told.decode().splitlines()


@pytest.mark.fault("F23")
@pytest.mark.parametrize("has_remote", [True, False])
@pytest.mark.parametrize("how", ["os.fork", "multiprocessing"])
def test_a_saver_in_a_forked_child_raises_at_once_and_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, has_remote: bool
) -> None:
    """`wait` and `close` waited for ever for a thread that only the parent has."""
    may_write, dump = threading.Event(), ckpt.dump

    def dump_later(*arguments: Any, **options: Any) -> None:
        may_write.wait()
        dump(*arguments, **options)

    monkeypatch.setattr(ckpt, "dump", dump_later)
    remote = f"file://{tmp_path}/remote" if has_remote else None
    options: dict[str, Any] = {"save_interval": "1ba", "save_on_exception": True}
    with CheckpointSaver(tmp_path / "local", remote, save_signals=[signal.SIGUSR1], **options) as saver:
        saver.step(state(1), 1)
        pid, reading = start(how, lambda tell: use(saver, tell))
        told = lines(reading)
        os.kill(pid, signal.SIGKILL)
        may_write.set()
        assert told == [*(f"{name} True" for name in RAISE), "closed"]
        saver.step(state(2), 2)
    with contextlib.suppress(ChildProcessError):  # `multiprocessing` may have seen its end
        os.waitpid(pid, 0)
    with CheckpointSaver(tmp_path / "local", remote, save_interval=None) as again:
        assert again.load_latest()["batch"] == 2
