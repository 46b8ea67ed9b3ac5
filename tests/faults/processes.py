"""Trainers as processes of their own, for tests that kill them: start, read their output, kill, reap."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
# The marks of a test's long version.
SOAK = (
    pytest.mark.soak,
    pytest.mark.skipif("CKPT_ASYNC_SOAK_MINUTES" not in os.environ, reason="./dev soak"),
)


class Nursery:
    """Starts processes (see `trainer.py` and `plays.py` for the plays) and reaps them. Usable from any thread.

    `preload` is a library to load into the processes. With `shim.c`, `kill_at=n` ends a process before its n-th call
    that changes a file (0: never), and the process says `calls` and their number when its play is over.
    """

    def __init__(self, logs: Path, preload: Path | None = None) -> None:
        self._logs, self._lock, self._num_started = logs, threading.Lock(), 0
        self._children: list[Trainer] = []
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.zygote", str(theirs.fileno())],
                cwd=ROOT,
                env=os.environ | ({"LD_PRELOAD": str(preload)} if preload else {}),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )

    def start(
        self,
        play: str,
        environment: dict[str, str] | None = None,
        *,
        kill_at: int | None = None,
        **arguments: Any,
    ) -> "Trainer":
        with self._lock:
            self._num_started += 1
            log = self._logs / f"trainer-{self._num_started}.log"
        their_in, our_out = os.pipe()
        our_in, their_out = os.pipe()
        their_log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        # fixtures may have changed these since the zygote was started
        store = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "AZURE_"))}
        request = {
            "do": "start",
            "play": play,
            "environment": store | (environment or {}),
            "arguments": arguments,
        } | ({} if kill_at is None else {"kill_at": kill_at})
        try:
            pid = self._ask(request, [their_in, their_out, their_log])
        finally:
            for descriptor in (their_in, their_out, their_log):
                os.close(descriptor)
        child = Trainer(self, pid, our_in, our_out, log)
        self._children.append(child)
        return child

    def reap(self, pid: int) -> int:
        return self._ask({"do": "reap", "pid": pid})

    def _ask(self, request: dict[str, Any], descriptors: list[int] | None = None) -> int:
        with self._lock:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors or [])
            answer = self._control.recv(1 << 10)
        assert answer, "the zygote has died"
        number: int = json.loads(answer)
        return number

    def __enter__(self) -> Self:
        return self

    def kill_all(self) -> None:
        for child in self._children:
            child.kill()
        self._children.clear()

    def __exit__(self, *_: object) -> None:
        self.kill_all()
        self._control.close()
        self._process.wait(PATIENCE_S)


class Trainer:
    """One started process. `said` holds the lines read from it so far."""

    def __init__(self, nursery: Nursery, pid: int, our_in: int, our_out: int, log: Path) -> None:
        self._nursery, self.pid, self._in, self._out, self.log = nursery, pid, our_in, our_out, log
        self.said: list[str] = []
        self._rest = b""
        self._is_at_end = False
        self.exit_code: int | None = None

    def tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._out, f"{line}\n".encode())

    def listen(self, for_s: float) -> bool:
        """Read its output for this long or until it ends; return whether it may still say something."""
        deadline = time.monotonic() + for_s
        while not self._is_at_end and (left_s := deadline - time.monotonic()) > 0:
            if select.select([self._in], [], [], left_s)[0]:
                self._read()
        return not self._is_at_end

    def _read(self) -> None:
        data = os.read(self._in, 1 << 16)
        self._is_at_end = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.said += [line.decode() for line in lines]

    def expect(self, start: str, timeout_s: float = PATIENCE_S) -> str:
        """Read until a line starts with `start`, and return that line."""
        deadline, seen = time.monotonic() + timeout_s, 0
        while True:
            for line in self.said[seen:]:
                if line.startswith(start):
                    return line
            seen = len(self.said)
            left_s = deadline - time.monotonic()
            if self._is_at_end or left_s <= 0:
                raise AssertionError(
                    f"no {start!r} in {self.said[-5:]}; log:\n{self.log.read_text()[-3000:]}"
                )
            if select.select([self._in], [], [], left_s)[0]:
                self._read()

    def kill(self) -> None:
        """Kill and reap the process. Afterwards `said` holds everything that it said before. Idempotent."""
        if self.exit_code is None:
            os.kill(self.pid, signal.SIGKILL)
            self._end()

    def finish(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait until the process ends by itself, and return its exit code."""
        assert not self.listen(timeout_s), f"still running; log:\n{self.log.read_text()[-3000:]}"
        if self.exit_code is None:
            self._end()
        assert self.exit_code is not None
        return self.exit_code

    def _end(self) -> None:
        self.exit_code = self._nursery.reap(self.pid)
        while not self._is_at_end and select.select([self._in], [], [], 0)[0]:
            self._read()
        os.close(self._in)
        os.close(self._out)
