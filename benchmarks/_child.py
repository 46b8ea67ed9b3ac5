"""Runs one measured client in a process of its own: both sides of the handshake. Standard library only.

The child prepares everything (imports, connections), reports that it is ready and waits; then it does the
work and reports the result. So wall and CPU time cover the transfer alone, and memory is relative to the idle
process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20
SAMPLE_S = 0.01  # one look at /proc costs some 20 µs

# Gets the client ready. The callable it returns does the work, and may return more to report, as plain data.
Prepare = Callable[["Work"], Callable[[], Any]]


@dataclass(frozen=True, slots=True)
class Work:
    """One file to send. A `part_bytes` or `concurrency` of 0 stands for the client's own default."""

    path: str
    size_bytes: int
    endpoint_url: str
    bucket: str
    key: str
    part_bytes: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What one transfer took. `anonymous_bytes` is the peak above the idle process; `told` is what the work
    returned.
    """

    wall_s: float
    cpu_s: float
    anonymous_bytes: int
    told: Any = None


def cpu_s() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _adopt() -> None:
    """Become the parent of processes that a client starts and detaches, so that their CPU time counts as its own."""
    pr_set_child_subreaper = 36  # linux/prctl.h
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def _reap() -> None:
    """Wait for the processes that end with the work."""
    give_up_at = time.monotonic() + 1.0
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < give_up_at:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(SAMPLE_S)


def child_main(clients: Mapping[str, Prepare]) -> None:
    """Run in the child: `PROGRAM --child NAME WORK`."""
    _adopt()
    name, work = sys.argv[2], Work(**json.loads(sys.argv[3]))
    run = clients[name](work)
    # Start from the state of a program that has run for a while. Otherwise one garbage collection of all that
    # the import of torch has left, 0.25 s, hits whichever client first creates many objects.
    gc.collect()
    print("ready", flush=True)
    sys.stdin.readline()
    wall, cpu = time.perf_counter(), cpu_s()
    told = run()
    wall = time.perf_counter() - wall
    _reap()
    print(json.dumps([wall, cpu_s() - cpu, told]), flush=True)
    sys.stdin.readline()
    os._exit(0)  # a client's exit is not measured, and must not hang


def measure(
    python: str,
    program: Path,
    name: str,
    work: Work,
    environment: Mapping[str, str],
    at_start: Callable[[], object] = lambda: None,
) -> Measured:
    """Measure one client, from the parent. `at_start` is called when the child is ready, and may wait for others.
    Raises RuntimeError if the child does.
    """
    command = [python, str(program), "--child", name, json.dumps(asdict(work))]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        if child.stdout.readline() != "ready\n":
            raise RuntimeError(f"{name} did not get ready")
        idle = anonymous_bytes(child.pid)
        at_start()
        child.stdin.write("\n")
        child.stdin.flush()
        os.set_blocking(child.stdout.fileno(), False)
        most = idle
        while not (line := child.stdout.readline()):
            if child.poll() is not None:
                raise RuntimeError(f"{name} failed")
            most = max(most, anonymous_bytes(child.pid))
            time.sleep(SAMPLE_S)
        wall, cpu, told = json.loads(line)
        child.stdin.write("\n")
        child.stdin.flush()
        child.wait(30)
    return Measured(wall, cpu, most - idle, told)


def measure_command(
    command: list[str],
    idle_command: list[str],
    environment: Mapping[str, str],
    at_start: Callable[[], object] = lambda: None,
) -> Measured:
    """Measure a program that is not Python: the whole process, minus the CPU time of `idle_command`, which
    does nothing.
    """
    idle_cpu = _command(idle_command, environment).cpu_s
    at_start()
    measured = _command(command, environment)
    return Measured(measured.wall_s, measured.cpu_s - idle_cpu, measured.anonymous_bytes)


def _command(command: list[str], environment: Mapping[str, str]) -> Measured:
    started, most = time.perf_counter(), 0
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **environment})
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            break
        most = max(most, anonymous_bytes(child.pid))
        time.sleep(SAMPLE_S)
    wall_s = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{command[0]} exited with {child.returncode}")
    return Measured(wall_s, usage.ru_utime + usage.ru_stime, most)


def anonymous_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("RssAnon")), "RssAnon: 0 kB")
    return int(line.split()[1]) * 1024
