"""The trainer's side of a runner process: start it, follow what it does, restart it when it dies.

The process is started by executing a new Python, never by forking the trainer, and knows nothing of the trainer's
`__main__`. It is not a child of the trainer (its parent ends at once), so there is nothing to reap, and the
trainer's own SIGCHLD handling never sees it. It runs in its own session, so signals to the trainer's terminal or
process group do not reach it. The only ties between the two are one socket and the rank's lock, which both hold.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_async import private
from ckpt_async.core import json_log
from ckpt_async.core.observe import Observer
from ckpt_async.errors import CkptAsyncError, RunnerError, SettingsError
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal, RankLock
from ckpt_async.runners import EngineView, Start, wire
from ckpt_async.runners.reports import EngineProxy
from ckpt_async.runners.wire import Channel, NodeSocket
from ckpt_async.threads import Latch, outcome

logger = logging.getLogger(__name__)

# Python has to start and import its modules, perhaps from a cold network disk.
SPAWN_TIMEOUT_S = 120.0
# The pause between a death and the next start. It doubles as long as no process lasts for LASTS_S: one that
# has ended so soon will probably do so again.
RESTART_S, RESTART_MAX_S, LASTS_S = 0.2, 30.0, 10.0
# After `stop`, the process only cancels and closes. One that also serves other ranks is pinged, to see
# whether it still works. One that has not answered the ping at the beginning of `close` has had a part of both times.
STOP_TIMEOUT_S = 5.0
PING_TIMEOUT_S = 2.0
# How often to start a process that dies before it works: an out-of-memory kill may strike again.
MAX_STARTS = 3
# How often to connect to a node's process that turns out to be ending.
MAX_NODE_CONNECTS = 5
CONNECT_PAUSE_S = 0.02
LOG_TAIL_BYTES = 2000

# Use -P and the trainer's own path, so that neither the working directory nor a script's folder can shadow a
# module of ours that the trainer finds elsewhere.
_BOOTSTRAP = """\
import os, sys
if os.fork():
    os._exit(0)
sys.path[:] = sys.argv[3:]
from ckpt_async.runners.child import main
main(int(sys.argv[1]), is_node=sys.argv[2] == "node")
"""


# The runners that have a process, which other kinds of their rank join: one process runs the engines of all kinds,
# within common limits. A process is started only under the lock, so that others find it.
_with_process: list[ProcessRunner] = []
_lock = threading.Lock()


def _forget_parents() -> None:
    global _lock  # noqa: PLW0603  a thread that is not here any more may hold it
    _lock = threading.Lock()
    _with_process.clear()


os.register_at_fork(after_in_child=_forget_parents)


class RunnerDiedError(RunnerError):
    """The process was killed before it had started, and may get further next time."""


class ProcessRunner:
    """A `Runner` whose engine is in another process: that of its rank, for all kinds of checkpoints, or one that
    the ranks of the node share.
    """

    def __init__(
        self,
        start: Start,
        folder: Folder,
        journal: Journal,
        lock: RankLock,
        observer: Observer,
        on_change: Callable[[], None],
    ) -> None:
        self.death: BaseException | None = None
        self.place = start.folder, start.rank
        self._start, self._folder, self._lock, self._observer = start, folder, lock, observer
        self._on_change = on_change
        self._view = EngineProxy(journal, observer, on_change)
        # The trainer's calls look here, and not whether `_started` is done: Ctrl-C within that keeps its lock for ever.
        self.engine: EngineView | None = None
        self._started: Future[int] = Future()
        self._is_ended = Latch()
        self._channel: Channel | None = None
        self.group: int | None = None  # process group of a process that serves no other rank
        self.log_path = self._own_log_path()
        self._pidfd: int | None = None  # of a process that the node's ranks share
        self._pinged_at, self._pong = 0.0, Latch()
        self._pong.set()  # nothing was asked
        self._pidfd_lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, name=f"ckpt-async-rank-{start.rank}-runner", daemon=True
        )

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> int:
        self._thread.start()
        try:
            return outcome(self._started)
        except BaseException:
            self.end()
            raise

    def expect_end(self) -> None:
        self._tell("expect_end")
        self._ping()

    def join(self) -> Channel | None:
        """Return another connection to the process, for another kind; None if it is gone, or about to go."""
        channel = None if self._is_ended.is_set() else self._channel
        if channel is None:
            return None
        ours, theirs = Channel.pair()
        try:
            if channel.send("join", descriptors=(theirs.fileno(),)):
                return ours
        except OSError:
            pass
        finally:
            theirs.close()
        ours.close()
        return None

    def end(self) -> None:
        self._is_ended.set()
        self._tell("stop")
        self._thread.join(max(0.0, STOP_TIMEOUT_S - self._silent_s()))
        if self._thread.is_alive():
            logger.error("runner_stuck rank=%d; killing it; the journal keeps what is left", self._start.rank)
            self._end_by_force()
            self._thread.join()
        self._view.end()

    def _end_by_force(self) -> None:
        """Kill a process that does not end, because it holds locks that would keep out the next launch. A process
        that other ranks share is spared if it answers.
        """
        # Only if no other rank uses it. It still has our socket open, so the process group exists.
        self._kill()
        answers = self._pidfd is None or self._answers()
        with self._pidfd_lock:  # otherwise it might end in the meantime
            if self._pidfd is not None and not answers:
                logger.error(
                    "runner_hangs: killing the node's runner process; the other ranks will restart it"
                )
                with contextlib.suppress(OSError):  # it has already ended
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        if self.group is None and self._channel is not None:
            self._channel.shut()

    def _ping(self) -> None:
        self._pinged_at, self._pong = time.monotonic(), Latch()
        self._tell("ping")

    def _silent_s(self) -> float:
        """Return for how long the process has not answered a ping; 0 if it has."""
        return 0.0 if self._pong.is_set() else time.monotonic() - self._pinged_at

    def _answers(self) -> bool:
        """Return whether the node's process still answers."""
        if self._pong.is_set():
            self._ping()
            return self._pong.wait(PING_TIMEOUT_S)
        return self._pong.wait(max(0.0, STOP_TIMEOUT_S + PING_TIMEOUT_S - self._silent_s()))

    def _tell(self, *message: Any) -> None:
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.send(*message)

    # --- the thread that follows it ----------------------------------------------------------------------------

    def _run(self) -> None:
        start, pause_s, num_starts = self._start, RESTART_S / 2, 0
        try:
            while True:
                num_starts += 1
                began = time.monotonic()
                try:
                    self._follow(start)
                except (CkptAsyncError, OSError) as error:
                    may_start = isinstance(error, RunnerDiedError) and num_starts < MAX_STARTS
                    if not (self._started.done() or may_start):
                        if isinstance(error, CkptAsyncError):
                            raise
                        raise RunnerError(f"the runner process cannot be started: {error}") from error
                    logger.error("runner_failed rank=%d error=%s", start.rank, error)  # noqa: TRY400  no bug of ours
                if self._is_ended.is_set() or self.death is not None:
                    return
                has_lasted = time.monotonic() - began >= LASTS_S
                pause_s = RESTART_S if has_lasted else min(RESTART_MAX_S, pause_s * 2)
                logger.warning(
                    "runner_died rank=%d; restarting in %.1f s; see %s", start.rank, pause_s, self.log_path
                )
                self._observer.engine_restarted()
                if self._is_ended.wait(pause_s):
                    return
                generation = self._started.result() if self._started.done() else None
                start = replace(start, generation=generation, is_again=True)
        except BaseException as error:  # noqa: BLE001  handed to the trainer, at start or at its next call
            if not self._started.done():
                self._started.set_exception(error)
            else:
                logger.critical("uploader_died error=%r", error)
                self.death = error
        finally:
            self._on_change()

    def _follow(self, start: Start) -> None:
        """Have the process run the engine, and process its messages until it ends."""
        channel = self._connect(start)
        try:
            if self._is_ended.is_set():
                return
            has_worked, refusal = False, None
            while (message := channel.receive()) is not None:
                match message:
                    case ["started", int(generation)]:
                        has_worked = True
                        self._view.attach(channel)
                        self.engine = self._view
                        if not self._started.done():
                            self._started.set_result(generation)
                    case ["refused", dict(fields)]:
                        refusal = wire.error_from(fields)  # raised once the process has released the lock
                    case ["here", *_]:
                        self._pong.set()
                    case ["report", dict(report)]:
                        self._view.take(report)
                    case ["log", int(level), str(name), str(text), fields]:
                        logging.getLogger(name).log(level, "%s", text, extra={json_log.FIELDS: fields})
                    case ["died", str(text)]:
                        self.death = CkptAsyncError(text)
                        logger.critical("uploader_died error=%s", text)
                    case _:
                        pass
            if refusal is not None:
                raise refusal
            if not has_worked and not self._is_ended.is_set():
                raise RunnerDiedError(f"the runner process ended before it had started: {self._log_tail()}")
        finally:
            self._view.detach()
            self._leave()
            channel.close()
            with self._pidfd_lock:
                if self._pidfd is not None:
                    os.close(self._pidfd)
                self._pidfd = None

    # --- starting it -------------------------------------------------------------------------------------------

    def _connect(self, start: Start) -> Channel:
        """Return a connection to a process that has responded and has been told what to do.

        Raises RunnerError, SettingsError.
        """
        for _ in range(MAX_NODE_CONNECTS):
            channel, may_be_ending = self._connect_or_start()
            channel.socket.settimeout(SPAWN_TIMEOUT_S)
            try:
                level = logging.getLogger("ckpt_async").getEffectiveLevel()
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    channel.send("start", start, level, descriptors=(self._lock.descriptor,))
                    if (message := channel.receive()) is not None:
                        channel.socket.settimeout(None)
                        self._check_version(message)
                        self._note_shared(message)
                        return channel
            except TimeoutError:
                self._leave()
                self._kill()
                raise RunnerError(
                    f"the runner process has not responded for {SPAWN_TIMEOUT_S:.0f} s: {self._log_tail()}"
                ) from None
            except BaseException:
                self._leave()
                channel.close()
                raise
            self._leave()
            channel.close()
            if not may_be_ending:
                break
        what, tail = "the runner process ended before it was ready", self._log_tail()
        # The process was killed: when Python ends by itself, it says why.
        if not tail:
            raise RunnerDiedError(f"{what} without any output")
        raise RunnerError(f"{what}: {tail}")

    def _check_version(self, message: list[Any]) -> None:
        match message:
            case ["here", int(pid), *version] if version != [wire.VERSION]:
                raise RunnerError(
                    f"runner process {pid} is of another version of ckpt_async than this trainer",
                    hint="end the trainers of this node, and that process, before you start this version",
                )
            case _:
                pass

    def _note_shared(self, message: list[Any]) -> None:
        match message:
            case ["here", int(pid), *_] if self._start.settings.node_shared:
                # The process has just died, or the kernel is too old; then it cannot be killed from here.
                with contextlib.suppress(OSError):
                    self._pidfd = os.pidfd_open(pid)
            case _:
                pass

    def _connect_or_start(self) -> tuple[Channel, bool]:
        """Return a connection to the node's process, to that of the rank's other kinds, or to a new one; and
        whether that process may have been ending already.
        """
        if self._start.settings.node_shared:
            self._channel = self._connect_to_node()
            return self._channel, True
        with _lock:
            for other in (each for each in _with_process if each.place == self.place):
                if (channel := other.join()) is not None:
                    self.group, self.log_path = other.group, other.log_path
                    break
            else:
                self.log_path = self._own_log_path()
                channel, other = self._spawn_own(), None
            self._channel = channel
            _with_process.append(self)
        return channel, other is not None

    def _leave(self) -> None:
        """Stop letting other runners join."""
        with _lock, contextlib.suppress(ValueError):
            _with_process.remove(self)

    def _spawn_own(self) -> Channel:
        ours, theirs = Channel.pair()
        try:
            self.group = self._spawn("own", theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def _connect_to_node(self) -> Channel:
        """Connect to the node's process. If there is none, the rank that gets its lock starts it."""
        node_socket = NodeSocket(self._folder.common)
        path, deadline = self._folder.common / "node.lock", time.monotonic() + SPAWN_TIMEOUT_S
        channel: Channel | None = None

        def is_over() -> bool:
            nonlocal channel
            channel = node_socket.connect()
            return channel is not None or self._is_ended.is_set()

        lock = private.open_lock(path)
        try:
            while (left_s := deadline - time.monotonic()) > 0 and not is_over():
                # Others hold it while the process is being started, or is just ending.
                if private.lock(lock, path, timeout_s=left_s, poll_s=CONNECT_PAUSE_S, is_over=is_over):
                    with node_socket.listen() as listener:
                        self._spawn("node", listener.fileno(), lock)  # which holds the lock from now on
                    ended, lock = lock, private.open_lock(path)
                    os.close(ended)
                elif channel is not None:
                    break
            if channel is not None:
                return channel
            raise RunnerError(
                "the node's runner process can neither be reached nor started", hint=self._log_tail()
            )
        finally:
            os.close(lock)
            node_socket.close()

    def _spawn(self, kind: str, *descriptors: int) -> int:
        """Start the process with these descriptors open, and return its process group once it runs."""
        if not sys.executable:
            raise SettingsError(
                "sys.executable is empty: no process can be started", hint="use runner='thread'"
            )
        command = [sys.executable, "-P", "-c", _BOOTSTRAP, str(descriptors[0]), kind, *sys.path]
        try:
            with self.log_path.open("wb") as log:
                # Not the trainer's own: readers of those would wait until the last writer is gone.
                process = subprocess.Popen(
                    command,
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            if process.wait(SPAWN_TIMEOUT_S):
                raise RunnerError(f"{sys.executable} exited with {process.returncode}: {self._log_tail()}")
        except OSError as error:
            raise RunnerError(f"the runner process cannot be started: {error}") from error
        except subprocess.TimeoutExpired:
            # It may have ended just now, or be unable to end.
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(STOP_TIMEOUT_S)
            raise RunnerError(
                f"{sys.executable} has not started within {SPAWN_TIMEOUT_S:.0f} s: {self._log_tail()}"
            ) from None
        return process.pid

    def _kill(self) -> None:
        if self.group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.group, signal.SIGKILL)

    def _own_log_path(self) -> Path:
        if self._start.settings.node_shared:
            return self._folder.common / "node.log"
        return self._folder.private / f"rank-{self._start.rank:05d}.log"

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return self.log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return ""
