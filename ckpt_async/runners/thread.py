"""The engine on a thread of the trainer's process."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from ckpt_async.core.observe import Observer
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal, RankLock
from ckpt_async.runners import EngineView, Start
from ckpt_async.runners.host import Backends, Host
from ckpt_async.runners.loop import new_loop

logger = logging.getLogger(__name__)


class ThreadRunner:
    """A `Runner` on a background thread with an event loop of its own."""

    def __init__(
        self,
        start: Start,
        folder: Folder,
        journal: Journal,
        lock: RankLock,  # noqa: ARG002  this process holds it
        observer: Observer,
        on_change: Callable[[], None],
    ) -> None:
        self.death: BaseException | None = None
        self._on_change = on_change
        self._host = Host(start, folder, journal, observer, on_change, Backends())
        self._started: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, name=f"ckpt-async-rank-{start.rank}", daemon=True)

    @property
    def engine(self) -> EngineView | None:
        return self._host.engine

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> int:
        self._thread.start()
        try:
            return self._started.result()
        except BaseException:
            self._started.cancel()  # interrupted while waiting: the thread ends when it finds out
            self._thread.join()
            raise

    def expect_end(self) -> None:
        self._host.is_end_expected = True

    def end(self) -> None:
        self._host.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(self._host.run(self._has_started))
        except BaseException as error:  # noqa: BLE001  handed to the trainer, at start or at its next call
            if not self._started.done():
                self._started.set_exception(error)
            else:
                logger.critical("uploader_died error=%r", error)
                self.death = error
        finally:
            self._on_change()

    def _has_started(self, generation: int) -> bool:
        if not self._started.set_running_or_notify_cancel():
            return False
        self._started.set_result(generation)
        return True
