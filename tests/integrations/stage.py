"""Trainers as real processes, forked from one that has imported the framework once. They report with `tell`.

with Stage("tests.integrations.lightning_plays", scratch) as stage:
    trainer = stage.start("train", folder=…)
    assert trainer.hear()["step"] == 3
    trainer.kill()
"""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from ckpt_async import restore

PATIENCE_S = 120.0
NUM_STEPS = 6
DRAIN_TIMEOUT_S = 60.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}


def committed(remote: str, step: int) -> restore.Checkpoint:
    checkpoint = restore.find(remote, step=step)
    assert checkpoint is not None, f"step {step} is not committed"
    return checkpoint


class Trainer:
    """One trainer process of a stage."""

    def __init__(self, number: int, log: Path, stop: Callable[[int], None]) -> None:
        self.number, self._log, self._stop = number, log, stop
        self.said: queue.Queue[dict[str, Any]] = queue.Queue()

    def hear(self) -> Any:
        """Return what the trainer tells next, or what its play returned."""
        try:
            said = self.said.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise AssertionError(f"the trainer says nothing:\n{self._log.read_text()}") from None
        assert "told" in said, f"{said.get('failed', 'it was killed')}\n{self._log.read_text()}"
        return said["told"]

    def kill(self) -> None:
        """Kill the trainer with SIGKILL, and wait until it is gone."""
        self._stop(self.number)
        while "ended" not in self.said.get(timeout=PATIENCE_S):
            pass

    def log(self) -> str:
        return self._log.read_text()


class Stage:
    def __init__(self, plays: str, scratch: Path) -> None:
        self._scratch = scratch
        self._trainers: list[Trainer] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integrations.stage", plays],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def start(self, play: str, *, environment: Mapping[str, str] | None = None, **arguments: Any) -> Trainer:
        number = len(self._trainers)
        trainer = Trainer(number, self._scratch / f"trainer-{number}.log", self._kill)
        self._trainers.append(trainer)
        self._ask(
            number=number,
            play=play,
            arguments=arguments,
            environment={**os.environ, **ENVIRONMENT, **(environment or {})},
            log=str(trainer._log),
        )
        return trainer

    def start_ranks(
        self, play: str, world_size: int, *, environment: Mapping[str, str] | None = None, **arguments: Any
    ) -> list[Trainer]:
        """Start all ranks of one launch, as a launcher does that does not say which start it is."""
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = server.getsockname()[1]
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(world_size),
            "NODE_RANK": "0",
            **(environment or {}),
        }
        return [
            self.start(
                play,
                environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                world_size=world_size,
                **arguments,
            )
            for rank in range(world_size)
        ]

    def _ask(self, **request: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def _kill(self, number: int) -> None:
        self._ask(number=number, play=None)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                said = json.loads(line)
                self._trainers[said["number"]].said.put(said)
        for trainer in self._trainers:
            trainer.said.put({"failed": "the stage has ended", "ended": True})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # the process then kills all remaining trainers
        assert self._process.wait(PATIENCE_S) == 0
        self._listening.join()


# --- in the stage's process ------------------------------------------------------------------------------------

_number = -1
_say_lock = threading.Lock()


def _say(**what: Any) -> None:
    with _say_lock:
        # A single write per line, so that lines do not mix.
        os.write(_OUT, (json.dumps(what) + "\n").encode())


def tell(what: Any) -> None:
    """Send a value from a play to the test, where `hear` returns it."""
    _say(number=_number, told=what)


def _become(request: dict[str, Any], plays: Any) -> None:
    global _number
    _number = request["number"]
    code = 1
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(request["environment"])
        tell(getattr(plays, request["play"])(**request["arguments"]))
        code = 0
    except BaseException:
        _say(number=_number, failed=traceback.format_exc())
    finally:
        sys.stderr.flush()
        os._exit(code)


def _serve(plays: Any) -> None:
    pids: dict[int, int] = {}

    def wait_for(number: int, pid: int) -> None:
        os.waitpid(pid, 0)
        del pids[number]
        _say(number=number, ended=True)

    for line in sys.stdin:
        request = json.loads(line)
        number = request["number"]
        if request["play"] is None:
            with contextlib.suppress(KeyError, ProcessLookupError):  # it may just have ended by itself
                os.kill(pids[number], signal.SIGKILL)
            continue
        with _say_lock:  # so that no other thread holds the lock in the forked child
            pid = os.fork()
        if pid == 0:
            os.close(0)
            _become(request, plays)
        pids[number] = pid
        threading.Thread(target=wait_for, args=(number, pid), daemon=True).start()
    for pid in list(pids.values()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    # So that plays import this module and not a second copy.
    sys.modules["tests.integrations.stage"] = sys.modules[__name__]
    _OUT = os.dup(1)
    os.dup2(2, 1)
    _serve(import_module(sys.argv[1]))
