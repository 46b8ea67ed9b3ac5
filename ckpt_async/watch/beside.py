"""A watcher beside a command: what the command is told and returns passes through, and what it saved is finished."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from ckpt_async.watch.watcher import Report, Watcher

logger = logging.getLogger(__name__)

# Passed on to the command. A terminal sends SIGINT and SIGQUIT to both of us.
PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
BY_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
# A watcher that cannot work (wrong credentials, no store) is started again for as long as the command runs.
AGAIN_S = 10.0


def run_beside(
    command: Sequence[str], environment: Mapping[str, str], new_watcher: Callable[[], Watcher]
) -> tuple[int, Report | None, Exception | None]:
    """Run a command to its end and watch meanwhile; then finish what it saved. Returns the command's exit status as a
    shell would (128 + the signal that ended it), what the watcher did, and why it could not, if it failed at last.

    Raises OSError if the command cannot be started.
    """
    ended, watchers = threading.Event(), [new_watcher()]
    with _passing_on() as children:
        child = subprocess.Popen(command, env=dict(environment))
        children.append(child)

        def wait_for_child() -> None:
            child.wait()
            ended.set()
            for watcher in watchers:
                watcher.waker.wake()

        waiting = threading.Thread(target=wait_for_child, name="ckpt-async-child", daemon=True)
        waiting.start()
        while True:
            was_ended = ended.is_set()
            try:
                report: Report | None = watchers[-1].run(ended)
                error = None
            except Exception as problem:  # noqa: BLE001  the command must not end for it
                report, error = None, problem
                logger.warning("watching_failed error=%s; trying again: %s", problem, not was_ended)
            if error is None or was_ended:
                break
            ended.wait(AGAIN_S)
            watchers.append(new_watcher())
        waiting.join()
    return _status(child.returncode), report, error


def _status(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


@contextlib.contextmanager
def _passing_on() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Send to the command what is sent to us, until the block ends."""
    children: list[subprocess.Popen[bytes]] = []

    def handle(number: int, _: FrameType | None) -> None:
        if number in BY_TERMINAL and sys.stdin is not None and sys.stdin.isatty():
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                if child.returncode is None:
                    os.kill(child.pid, number)

    before = {number: signal.signal(number, handle) for number in (*PASSED_ON, *BY_TERMINAL)}
    try:
        yield children
    finally:
        for number, old in before.items():
            signal.signal(number, old)
