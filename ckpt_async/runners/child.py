"""The main program of a runner process: an engine for each connected trainer, which goes on for a while after that
trainer's death.

SIGINT and SIGHUP are meant for the trainer, so they are ignored. SIGTERM is also left to the trainer while there is
one: it may have a last flush to make, or it ends us. Once the trainer is gone, SIGTERM leaves `TERM_LINGER_S` for
work in progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from ckpt_async import niceness
from ckpt_async.core import backlog, json_log
from ckpt_async.core.settings import Settings
from ckpt_async.engine.loop import Engine
from ckpt_async.errors import RunnerError
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal, RankLock
from ckpt_async.runners import Start, wire
from ckpt_async.runners.host import Backends, Host
from ckpt_async.runners.loop import new_loop
from ckpt_async.runners.reports import Reports
from ckpt_async.runners.wire import Channel, Wants

logger = logging.getLogger(__name__)

# How often to check whether a restarted trainer wants the lock.
WANTED_POLL_S = 0.05
TERM_LINGER_S = 5.0
# The kernel accepts a new niceness for an autogroup ten times a second.
NICENESS_AGAIN_S = 0.15
# Time for the rank for which the node's process was started to connect.
FIRST_RANK_S = 60.0

_rank: contextvars.ContextVar[_Rank] = contextvars.ContextVar("rank")


def main(descriptor: int, *, is_node: bool) -> None:
    """Run the process. `descriptor` is the connection to our trainer, or the socket on which the node's ranks
    connect.
    """
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
        sys.exit(str(error))  # the trainer reads our output
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(process.serve_node(given) if is_node else process.serve(given))
    logging.shutdown()
    os._exit(0)  # finalizing the interpreter would take longer than everything else here


class _Process:
    def __init__(self) -> None:
        self.is_terminated = False
        self._backends = Backends()
        self._ranks: set[asyncio.Task[None]] = set()
        self._niceness = 0
        self._waited_for: set[_Rank] = set()

    async def serve(self, connected: socket.socket) -> None:
        """Serve one trainer, and the kinds of checkpoints that join."""
        self._handle_sigterm()
        self.begin(connected)
        while self._ranks:
            await asyncio.wait({*self._ranks})

    async def serve_node(self, listener: socket.socket) -> None:
        """Serve every trainer of the node that connects, until none is left."""
        self._handle_sigterm()
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        connected, _ = await asyncio.wait_for(loop.sock_accept(listener), FIRST_RANK_S)
        while True:  # the end of the process closes the listener
            self.begin(connected)
            accepting = asyncio.ensure_future(loop.sock_accept(listener))
            while not accepting.done() and self._ranks:
                await asyncio.wait({accepting, *self._ranks}, return_when=asyncio.FIRST_COMPLETED)
            if not accepting.done():
                accepting.cancel()
                await asyncio.gather(accepting, return_exceptions=True)
                return
            connected, _ = accepting.result()

    def begin(self, connected: socket.socket) -> None:
        """Serve the trainer at the other end of this connection, too."""
        task = asyncio.get_running_loop().create_task(_Rank(Channel(connected), self).run(self._backends))
        self._ranks.add(task)
        task.add_done_callback(self._ranks.discard)

    def _handle_sigterm(self) -> None:
        def note() -> None:
            self.is_terminated = True

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, note)

    def started(self, settings: Settings) -> None:
        """Note that an engine has started: its trainer no longer waits for it, so from now on this process uses the
        cores that training leaves idle.
        """
        self._niceness = max(self._niceness, settings.runner_nice)
        self._set_niceness()

    def wait_for(self, rank: _Rank, is_waited_for: bool) -> None:
        """Note whether somebody waits for this rank's work, as in the last seconds before a node goes away."""
        if is_waited_for:
            self._waited_for.add(rank)
        else:
            self._waited_for.discard(rank)
        self._set_niceness()

    def _set_niceness(self) -> None:
        if not niceness.set_niceness(self._niceness, is_waited_for=bool(self._waited_for)):
            asyncio.get_running_loop().call_later(NICENESS_AGAIN_S, self._set_niceness)


class _Rank:
    """One trainer: its engine, and the connection, which lasts as long as the trainer lives."""

    def __init__(self, channel: Channel, process: _Process) -> None:
        self._channel, self._process = channel, process
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Future[tuple[dict[str, Any], int]] = self._loop.create_future()
        self._gone, self._changed = asyncio.Event(), asyncio.Event()
        self._host: Host | None = None
        self._work: asyncio.Task[None] | None = None
        self._has_started = False
        self._wants = Wants()
        self._reports = Reports(self._tell, self._engine, self._loop)

    async def run(self, backends: Backends) -> None:
        _rank.set(self)
        self._channel.socket.setblocking(False)
        self._loop.add_reader(self._channel.fileno(), self._read)
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait((self._told, gone), return_when=asyncio.FIRST_COMPLETED)
            if self._told.done():
                self._send("here", os.getpid(), wire.VERSION)
                await self._begin(*self._told.result(), backends, gone)
        finally:
            gone.cancel()
            self._process.wait_for(self, False)
            self._reports.close()
            self._loop.remove_reader(self._channel.fileno())
            self._channel.close()

    async def _begin(
        self, fields: dict[str, Any], descriptor: int, backends: Backends, gone: asyncio.Future[Any]
    ) -> None:
        """Serve the trainer that sent these `fields` of its `Start`, and the descriptor of its rank's lock."""
        try:
            start = wire.start_from(fields)
            folder = Folder(start.folder, kind=start.kind)
            lock = RankLock.inherit(folder, start.rank, descriptor)
        except Exception as error:  # noqa: BLE001  the trainer is told
            os.close(descriptor)
            self._send("refused", wire.error_fields(error))
            return
        try:
            await self._serve(start, folder, lock, backends, gone)
        finally:
            lock.release()

    async def _serve(
        self, start: Start, folder: Folder, lock: RankLock, backends: Backends, gone: asyncio.Future[Any]
    ) -> None:
        try:
            journal = Journal(folder, start.rank, may_replace=False)  # the trainer has it open
            try:
                host = self._host = Host(
                    start, folder, journal, self._reports.facts, self._on_change, backends
                )
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
                self._reports.send()
                journal.close()
        except asyncio.CancelledError:  # nobody is interested any more in whether it would have started
            pass
        except Exception as error:
            if self._has_started:
                logger.critical("runner_failed rank=%d", start.rank, exc_info=error)
                self._send("died", wire.shortened(repr(error)))
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
        """Finish what a dead trainer left, until its successor asks for the lock or time is up."""
        logger.warning(
            "trainer_died rank=%d; finishing its checkpoints for at most %.0f s",
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
            return is_working() or backlog.waits_for_others(host.engine.local)

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
        if not (lock.is_wanted() or self._process.is_terminated):
            host.reports_for_s = start.settings.event_grace_s
        host.stop()

    # --- what the trainer says -----------------------------------------------------------------------------

    def _read(self) -> None:
        """Read all that is there: a round of the engine after each message would take too long."""
        with contextlib.suppress(BlockingIOError):
            while True:
                message, descriptors = self._channel.receive_with_descriptors()
                if message is None:
                    self._loop.remove_reader(self._channel.fileno())
                    self._gone.set()
                    return
                self._heed(message, descriptors)

    def _heed(self, message: list[Any], descriptors: list[int]) -> None:
        match message:
            case ["start", *_] if not descriptors:  # the kernel had no descriptor left for it in this process
                error = RunnerError(
                    "the runner process has run out of file descriptors",
                    hint="raise the open file limit (`ulimit -n`)",
                )
                self._send("refused", wire.error_fields(error))
                self._gone.set()
            case ["start", dict(fields), int(level)]:
                logging.getLogger("ckpt_async").setLevel(level)
                self._told.set_result((fields, descriptors[0]))
            case ["join"] if descriptors:
                os.set_inheritable(descriptors[0], False)
                self._process.begin(socket.socket(fileno=descriptors[0]))
            case ["ping"]:
                self._send("here", os.getpid(), wire.VERSION)
            case ["want", list(wants)] if (engine := self._engine()) is not None:
                self._serve_wants(engine, Wants(*wants))
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
                pass

    def _serve_wants(self, engine: Engine, wants: Wants) -> None:
        before, self._wants = self._wants, wants
        if wants.num_hurries != before.num_hurries:
            engine.hurry(True)  # which may be over by now
        if (wants.is_hurried, wants.num_hurries) != (before.is_hurried, before.num_hurries):
            engine.hurry(wants.is_hurried)
            self._reports.is_hurried = wants.is_hurried
            self._process.wait_for(self, wants.is_hurried)
        if wants.num_turns_to_newest != before.num_turns_to_newest:
            engine.turn_to_newest()
        if wants.num_looks != before.num_looks:
            engine.look_for_members()
        self._reports.note_wake(wants.wake, engine.wake())

    # --- what the trainer is told --------------------------------------------------------------------------

    def log(self, record: logging.LogRecord, text: str) -> bool:
        """Send a log record to the trainer. Safe from any thread. Returns False if the trainer cannot be reached."""
        fields = json_log.event_and_fields(record)
        if len(json.dumps(fields, default=str)) > wire.MAX_TEXT_BYTES:
            fields = None
        return self._has_trainer and self._send(
            "log", record.levelno, record.name, wire.shortened(text), fields
        )

    @property
    def _has_trainer(self) -> bool:
        return not self._gone.is_set()

    def _engine(self) -> Engine | None:
        return self._host.engine if self._host is not None else None

    def _tell(self, report: dict[str, Any]) -> bool:
        """Send a report. Returns whether it was sent, or there is no trainer left to send it to."""
        return not self._has_trainer or self._send("report", report)

    def _on_change(self) -> None:
        """Handle the end of a round of the engine."""
        self._changed.set()
        assert self._host is not None
        assert self._host.engine is not None
        self._reports.note_round(self._host.engine)

    def _send(self, *message: Any) -> bool:
        try:
            return self._channel.send(*message)
        except OSError:
            return False  # the trainer is gone, which `_read` will soon notice


class _Forward(logging.Handler):
    """Sends log records to the trainer, whose logging is configured as its user wants; without a trainer, to our
    own stderr.
    """

    def emit(self, record: logging.LogRecord) -> None:
        rank = _rank.get(None)
        text = self.format(record)
        if rank is None or not rank.log(record, text):
            logging.getLogger().handle(record)
