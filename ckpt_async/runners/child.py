"""What a runner process does: an engine for each trainer that is connected, and for a while after it died.

SIGINT and SIGHUP are meant for the trainer. So is SIGTERM while there is one, which has then a last flush to make, or
ends us; once it is gone, SIGTERM leaves `TERM_LINGER_S` for what is under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import faulthandler
import itertools
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ckpt_async import politeness
from ckpt_async.core import decide
from ckpt_async.core.model import CheckpointId, Decided, Local
from ckpt_async.core.observe import NullObserver
from ckpt_async.core.settings import Settings
from ckpt_async.engine.loop import Engine
from ckpt_async.errors import FailureReason, RunnerError
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal, RankLock
from ckpt_async.runners import Start, wire
from ckpt_async.runners.host import Backends, Host
from ckpt_async.runners.loop import new_loop
from ckpt_async.runners.wire import Channel

logger = logging.getLogger(__name__)

# How often it is looked whether a restarted trainer wants the lock.
WANTED_POLL_S = 0.05
TERM_LINGER_S = 5.0
# The kernel lets an autogroup's niceness be set ten times a second.
NICENESS_AGAIN_S = 0.15
# A rank that was about to connect when the node's process was started for it.
FIRST_RANK_S = 60.0
# Facts that nobody waits for are sent together.
REPORT_S = 0.25
# What fits into one packet for certain.
MAX_FACTS, MAX_DECIDED, MAX_FAILURES, MAX_FORGOTTEN = 200, 50, 20, 500
MAX_MISSING = 100

_rank: contextvars.ContextVar[_Rank] = contextvars.ContextVar("rank")


def main(descriptor: int, *, is_node: bool) -> None:
    """`descriptor` is the connection to our trainer, or of the socket at which the node's ranks connect."""
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("ckpt_async").addHandler(_Forward())
    logging.getLogger("ckpt_async").propagate = False
    os.set_inheritable(descriptor, False)
    given, process = socket.socket(fileno=descriptor), _Process()
    try:
        loop = new_loop()
    except RunnerError as error:
        sys.exit(str(error))  # the trainer reads what we have written
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(process.serve_node(given) if is_node else process.serve(given))
    logging.shutdown()
    os._exit(0)  # taking the interpreter apart takes longer than all the rest of our end


class _Process:
    def __init__(self) -> None:
        self.is_terminated = False
        self._backends = Backends()
        self._ranks: set[asyncio.Task[None]] = set()
        self._niceness = 0
        self._waited_for: set[_Rank] = set()

    async def serve(self, connected: socket.socket) -> None:
        """For one trainer."""
        self._handle_sigterm()
        await _Rank(Channel(connected), self).run(self._backends)

    async def serve_node(self, listener: socket.socket) -> None:
        """For every trainer of the node that connects, until none is left."""
        self._handle_sigterm()
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        connected, _ = await asyncio.wait_for(loop.sock_accept(listener), FIRST_RANK_S)
        while True:  # the listener is closed by our end
            self._begin(connected)
            accepting = asyncio.ensure_future(loop.sock_accept(listener))
            while not accepting.done() and self._ranks:
                await asyncio.wait({accepting, *self._ranks}, return_when=asyncio.FIRST_COMPLETED)
            if not accepting.done():
                accepting.cancel()
                await asyncio.gather(accepting, return_exceptions=True)
                return
            connected, _ = accepting.result()

    def _begin(self, connected: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(_Rank(Channel(connected), self).run(self._backends))
        self._ranks.add(task)
        task.add_done_callback(self._ranks.discard)

    def _handle_sigterm(self) -> None:
        def note() -> None:
            self.is_terminated = True

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, note)

    def started(self, settings: Settings) -> None:
        """A trainer waited for what comes before; what comes now takes what cores it leaves."""
        self._niceness = max(self._niceness, settings.runner_nice)
        self._set_niceness()

    def wait_for(self, rank: _Rank, is_waited_for: bool) -> None:
        """Whether somebody waits for this rank's work, as in the last seconds before a node goes away."""
        (self._waited_for.add if is_waited_for else self._waited_for.discard)(rank)
        self._set_niceness()

    def _set_niceness(self) -> None:
        if not politeness.set_niceness(self._niceness, is_waited_for=bool(self._waited_for)):
            asyncio.get_running_loop().call_later(NICENESS_AGAIN_S, self._set_niceness)


class _Rank:
    """One trainer: its engine, and the connection for as long as the trainer lives."""

    def __init__(self, channel: Channel, process: _Process) -> None:
        self._channel, self._process = channel, process
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Future[tuple[Start, RankLock]] = self._loop.create_future()
        self._gone, self._changed = asyncio.Event(), asyncio.Event()
        self._host: Host | None = None
        self._work: asyncio.Task[None] | None = None
        self._has_started = False
        self._facts = _Facts(self._report_soon)
        self._before = Local(0)
        self._decided: deque[Decided] = deque()
        self._failures: deque[dict[str, Any]] = deque()
        self._forgotten: deque[tuple[int, int, float | None]] = deque()
        self._told_outcomes: set[CheckpointId] = set()
        self._told_start: tuple[int | None, list[int] | None] = (None, None)
        self._wakes: deque[tuple[int, int]] = deque()  # their number, ours
        self._last_seen_wake = 0
        self._is_hurried = False
        self._reporting: asyncio.TimerHandle | None = None

    async def run(self, backends: Backends) -> None:
        _rank.set(self)
        self._channel.socket.setblocking(False)
        self._loop.add_reader(self._channel.fileno(), self._read)
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait((self._told, gone), return_when=asyncio.FIRST_COMPLETED)
            if self._told.done():
                start, lock = self._told.result()
                self._send("here", os.getpid())
                try:
                    await self._serve(start, lock, backends, gone)
                finally:
                    lock.release()
        finally:
            gone.cancel()
            self._process.wait_for(self, False)
            if self._reporting is not None:
                self._reporting.cancel()
            self._loop.remove_reader(self._channel.fileno())
            self._channel.close()

    async def _serve(
        self, start: Start, lock: RankLock, backends: Backends, gone: asyncio.Future[Any]
    ) -> None:
        try:
            folder = Folder(start.folder)
            journal = Journal(folder, start.rank, may_replace=False)  # the trainer has it open
            try:
                host = self._host = Host(start, folder, journal, self._facts, self._on_change, backends)
                work = self._work = asyncio.ensure_future(
                    host.run(lambda generation: self._started(generation, start.settings))
                )
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done() and self._has_started:
                    await self._linger(start, lock, host, work)
                elif not work.done():
                    work.cancel()
                await work
            finally:
                self._report()
                journal.close()
        except asyncio.CancelledError:  # nobody wants to know any more whether it would have started
            pass
        except Exception as error:
            if self._has_started:
                logger.critical("runner_failed rank=%d", start.rank, exc_info=error)
                self._send("died", repr(error))
            else:
                self._send("refused", wire.error_fields(error))

    def _started(self, generation: int, settings: Settings) -> bool:
        if self._gone.is_set():
            return False
        self._has_started = True
        self._process.started(settings)
        self._send("started", generation)
        return True

    async def _linger(self, start: Start, lock: RankLock, host: Host, work: asyncio.Task[None]) -> None:
        """The trainer died: finish what it left, until its successor asks for the lock or time is up."""
        logger.warning(
            "trainer_died rank=%d; its checkpoints are finished for at most %.0f s",
            start.rank,
            start.settings.linger_s,
        )
        self._process.wait_for(self, True)
        ends_at = self._loop.time() + start.settings.linger_s
        assert host.engine is not None
        host.stop_beating()
        host.engine.hurry(True)
        asked = host.engine.wake()

        def is_working() -> bool:
            engine = host.engine
            assert engine is not None
            return engine.last_seen_wake < asked or engine.num_due > 0

        def waits_for_others_too() -> bool:
            assert host.engine is not None
            return is_working() or decide.waits_for_others(host.engine.local)

        async def wait_while(is_busy: Callable[[], bool], until: float) -> None:
            nonlocal ends_at
            while not work.done() and is_busy() and not (lock.is_wanted() or lock.is_removed()):
                if self._process.is_terminated:
                    ends_at = min(ends_at, self._loop.time() + TERM_LINGER_S)
                left_s = min(until, ends_at) - self._loop.time()
                if left_s <= 0:
                    return
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, WANTED_POLL_S)):
                        await self._changed.wait()

        await wait_while(is_working, ends_at)
        await wait_while(waits_for_others_too, self._loop.time() + start.settings.close_grace_s)
        await wait_while(is_working, ends_at)
        host.stop()

    # --- what the trainer says -----------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            message, descriptors = self._channel.receive_with_descriptors()
        except BlockingIOError:
            return
        if message is None:
            self._loop.remove_reader(self._channel.fileno())
            self._gone.set()
            return
        engine = self._host.engine if self._host is not None else None
        match message:
            case ["start", *_] if not descriptors:  # the kernel had none left for it in this process
                error = RunnerError(
                    "the runner process has no descriptor left", hint="allow more open files (`ulimit -n`)"
                )
                self._send("refused", wire.error_fields(error))
                self._gone.set()
            case ["start", dict(fields), int(level)]:
                logging.getLogger("ckpt_async").setLevel(level)
                start = wire.start_from(fields)
                self._told.set_result(
                    (start, RankLock.inherit(Folder(start.folder), start.rank, descriptors[0]))
                )
            case ["ping"]:
                self._send("here", os.getpid())
            case ["wake", int(number)] if engine is not None:
                self._wakes.append((number, engine.wake()))
            case ["hurry", bool(is_hurried)] if engine is not None:
                self._is_hurried = is_hurried
                self._process.wait_for(self, is_hurried)
                engine.hurry(is_hurried)
            case ["newest_first", bool(is_newest_first)] if engine is not None:
                engine.put_newest_first(is_newest_first)
            case ["look_for_members"] if engine is not None:
                engine.look_for_members()
            case ["expect_end"] if self._host is not None:
                self._process.wait_for(self, True)
                self._host.is_end_expected = True
            case ["stop"]:
                if self._host is not None and self._has_started:
                    self._host.stop()
                elif self._work is not None:
                    self._work.cancel()
                else:
                    self._gone.set()
            case _:
                pass  # a wake-up before there is an engine

    # --- what the trainer is told --------------------------------------------------------------------------

    def log(self, level: int, name: str, text: str) -> bool:
        """Any thread. False if the trainer cannot be told."""
        return self._has_trainer and self._send("log", level, name, text)

    @property
    def _has_trainer(self) -> bool:
        return not self._gone.is_set()

    def _send(self, *message: Any) -> bool:
        try:
            return self._channel.send(*message)
        except OSError:
            return False  # it is gone, as we shall read soon

    def _on_change(self) -> None:
        """The engine has made a round."""
        self._changed.set()
        assert self._host is not None
        engine = self._host.engine
        assert engine is not None
        now, before = engine.local, self._before
        self._before = now
        for id_ in before.checkpoints.keys() - now.checkpoints.keys():
            forgotten = before.checkpoints[id_]
            committed_at = forgotten.decided_at if forgotten.was_committed else None
            self._forgotten.append((id_.generation, id_.step, committed_at))
        self._decided.extend(each for id_, each in engine.outcomes.items() if id_ not in self._told_outcomes)
        self._told_outcomes = set(engine.outcomes)
        while engine.failures:
            self._failures.append(wire.failure_fields(engine.failures.popleft()))
        about_start = engine.fenced_by, engine.absent_ranks
        has_news = self._forgotten or self._decided or self._failures or about_start != self._told_start
        self._told_start = about_start
        if has_news or self._is_hurried:
            self._report()

    def _report_soon(self) -> None:
        if self._reporting is None:
            self._reporting = self._loop.call_later(REPORT_S, self._report)

    def _report(self) -> None:
        """Tell everything that was not told yet, in as many packets as it takes."""
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        assert self._host is not None
        engine = self._host.engine
        queues: tuple[tuple[str, deque[Any], int], ...] = (
            ("observed", self._facts.observed, MAX_FACTS),
            ("decided", self._decided, MAX_DECIDED),
            ("failures", self._failures, MAX_FAILURES),
            ("forgotten", self._forgotten, MAX_FORGOTTEN),
        )
        if engine is None or not self._has_trainer:
            for _, queue, _ in queues:
                queue.clear()
            return
        while self._wakes and self._wakes[0][1] <= engine.last_seen_wake:
            self._last_seen_wake = self._wakes.popleft()[0]
        state = {
            "fenced_by": engine.fenced_by,
            "absent_ranks": engine.absent_ranks and engine.absent_ranks[:MAX_MISSING],
            "num_due": engine.num_due,
            "last_seen_wake": self._last_seen_wake,
            "missing": self._missing(engine) if self._is_hurried else [],
        }
        while True:
            parts = {name: list(itertools.islice(queue, most)) for name, queue, most in queues}
            if not self._send("report", parts | state):
                self._report_soon()
                return
            for name, queue, _ in queues:
                for _ in parts[name]:
                    queue.popleft()
            if not any(queue for _, queue, _ in queues):
                return

    def _missing(self, engine: Engine) -> list[tuple[CheckpointId, list[int]]]:
        waiting = (id_ for id_, each in engine.local.checkpoints.items() if each.decision is None)
        found = (
            (id_, engine.missing_ranks(id_)[:MAX_MISSING]) for id_ in itertools.islice(waiting, MAX_MISSING)
        )
        return [(id_, ranks) for id_, ranks in found if ranks]


class _Facts(NullObserver):
    """What the engine tells its observer, for the trainer's metrics."""

    def __init__(self, on_fact: Callable[[], None]) -> None:
        self.observed: deque[tuple[Any, ...]] = deque()
        self._on_fact = on_fact

    def _note(self, *fact: Any) -> None:
        self.observed.append(fact)
        self._on_fact()

    def uploads_started(self, num_shards: int) -> None:
        self._note("uploads_started", num_shards)

    def uploads_ended(self, num_shards: int) -> None:
        self._note("uploads_ended", num_shards)

    def requests_finished(self, operation: str, durations_s: Sequence[float]) -> None:
        self._note("requests_finished", operation, [round(each, 6) for each in durations_s])

    def attempt_failed(self, reason: FailureReason) -> None:
        self._note("attempt_failed", reason)

    def bytes_uploaded(self, size_bytes: int) -> None:
        self._note("bytes_uploaded", size_bytes)

    def shards_finished(self, result: str, num_shards: int, duration_s: float) -> None:
        self._note("shards_finished", result, num_shards, duration_s)

    def checkpoint_committed(self, step: int, latency_s: float, at: float) -> None:
        self._note("checkpoint_committed", step, latency_s, at)

    def checkpoint_aborted(self) -> None:
        self._note("checkpoint_aborted")

    def checkpoint_pruned(self, location: str) -> None:
        self._note("checkpoint_pruned", location)

    def fenced(self) -> None:
        self._note("fenced")

    def engine_restarted(self) -> None:
        self._note("engine_restarted")


class _Forward(logging.Handler):
    """Records go to the trainer, whose logging is set up as its user wants it; without one, to our own stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        rank = _rank.get(None)
        text = self.format(record)
        if rank is None or not rank.log(record.levelno, record.name, text[: wire.MAX_TEXT]):
            logging.getLogger().handle(record)
