"""Runs a watcher beside a command.

Signals and the exit status of the command pass through, and what it saved is finished.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from ckpt_async.watch.background import Stop
from ckpt_async.watch.reporter import Report
from ckpt_async.watch.wake import Waker
from ckpt_async.watch.watcher import Watcher

logger = logging.getLogger(__name__)

# Signals that are passed on to the command. It gets the last three from its terminal as well, if it has one.
PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
BY_TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
ENDING = (signal.SIGTERM, *BY_TERMINAL)
# A watcher that cannot work (wrong credentials, no store) is started again after this time while the command runs. Each
# one links what is complete before it fails.
RESTART_S = 5.0
# How long work under way may take when a signal comes after the command's end, unless told otherwise.
GRACE_S = 10.0
# The signal that ended the command may have been sent to us too, by a terminal or by Slurm; within this time
# it counts as the same one.
SAME_SIGNAL_S = 1.0


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    new_watcher: Callable[[Waker], Watcher],
    grace_s: float = GRACE_S,
) -> tuple[int, Report | None, BaseException | None]:
    """Run a command to its end with a watcher beside it, then finish what the command saved.

    Returns the command's exit status as a shell would (128 + the signal that ended it), the watcher's report, and the
    error if the watcher failed in the end. A signal after the command's end leaves `grace_s` to finish; after a
    second one the error is KeyboardInterrupt.

    Raises OSError if the command cannot be started.
    """
    ended, waker = Stop(), Waker()  # one for all watchers, since it has descriptors
    watcher = new_watcher(waker)

    def shorten() -> None:
        """Shorten the end: a signal came after the command's end."""
        if not ended.is_over(SAME_SIGNAL_S):
            return
        if ended.is_shortened:
            raise KeyboardInterrupt("stopped by a second signal before everything was finished")
        ended.shorten(grace_s)
        waker.wake()

    with contextlib.closing(waker), _passing_on(shorten) as (children, early):
        # Descriptors that we opened are closed on exec; those that we were given (`<(…)`, a pipe) are the
        # command's.
        child = subprocess.Popen(command, env=dict(environment), close_fds=False)
        children.append(child)
        for number in early:  # these came before there was a command
            os.kill(child.pid, number)

        def wait_for_child() -> None:
            child.wait()
            ended.set()
            waker.wake()

        waiting = threading.Thread(target=wait_for_child, name="ckpt-async-child", daemon=True)
        waiting.start()
        while True:
            was_ended = ended.is_set()
            report: Report | None = None
            error: BaseException | None = None
            try:
                report = watcher.run(ended)
                break
            except KeyboardInterrupt as stopped:
                error = stopped
                break
            except Exception as problem:  # noqa: BLE001  the command must not end for it
                error = problem
                logger.warning("watching_failed error=%s trying_again=%s", problem, not was_ended)
            if was_ended:
                break
            ended.wait(RESTART_S)
            watcher = new_watcher(waker)
        waiting.join()
    return _status(child.returncode), report, error


def _status(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


class _Terminal:
    """The terminal that this process was started from, if there is one."""

    def __init__(self) -> None:
        self._descriptor = -1
        with contextlib.suppress(OSError):
            self._descriptor = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
        self._was_in_front = False
        self._is_in_front()

    def sent_to_all(self, number: int) -> bool:
        """Return whether a signal went to the whole foreground process group, so that the command has it already."""
        if number not in BY_TERMINAL:
            return False
        if number == signal.SIGHUP and os.getsid(0) == os.getpid():
            return False  # a closing terminal tells only the session leader
        return self._is_in_front()

    def _is_in_front(self) -> bool:
        was_in_front, self._was_in_front = self._was_in_front, False
        if self._descriptor < 0:
            return False
        try:
            self._was_in_front = os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:  # it was just closed
            return was_in_front
        return self._was_in_front

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


@contextlib.contextmanager
def _passing_on(shorten: Callable[[], None]) -> Iterator[tuple[list[subprocess.Popen[bytes]], list[int]]]:
    """Forward our signals to the command until the block ends, except those that the caller ignores.

    The command ignores those (nohup, a background job) as well. After the command has ended, a signal that would end
    a process calls `shorten`. Signals that come before there is a command are collected in the second list.
    """
    children: list[subprocess.Popen[bytes]] = []
    early: list[int] = []
    terminal = _Terminal()

    def handle(number: int, _: FrameType | None) -> None:
        if children and all(child.returncode is not None for child in children):
            if number in ENDING:
                shorten()
            return
        if not children:
            early.append(number)
        elif terminal.sent_to_all(number):
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                if child.returncode is None:
                    os.kill(child.pid, number)

    taken = [each for each in (*PASSED_ON, *BY_TERMINAL) if signal.getsignal(each) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in taken}
    try:
        yield children, early
    finally:
        for number, old in before.items():
            signal.signal(number, old)
        terminal.close()
