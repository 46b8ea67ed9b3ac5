"""Many small files, fetched in a few series of requests: a file is locked when its turn comes, and published while the
next one is on its way.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from ckpt_async.errors import CkptAsyncError
from ckpt_async.niceness import enter_bulk_thread
from ckpt_async.restore.checkpoint import RemoteFile
from ckpt_async.restore.destination import Destination, PartialFile, locked_now
from ckpt_async.restore.session import HeldLease, affordable
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import SmallGet
from ckpt_async.threads import result_of
from ckpt_async.transfer.patient import PatientStore
from ckpt_async.transfer.together import all_or_none, both

logger = logging.getLogger(__name__)

# How often files are noted while others are still to come: each time wakes the event loop.
NOTE_S = 0.5
# If it usually takes this long to sync a file, others are received meanwhile. Handing each to a thread takes 0.1 ms.
SLOW_S = 0.0005
# Many files are synced at once, because the disk can combine that. Each of them is open, as are those that wait.
MAX_THREADS, MAX_OPEN = 32, 96


class SmallFiles:
    """The small files of one fetch. `note` is called on the event loop for every file that is there. `alone` fetches a
    file that could not be fetched in a series, because another process is fetching it, or something is wrong: it is
    patient, and raises what is wrong.
    """

    def __init__(
        self,
        files: Iterable[RemoteFile],
        destination: Destination,
        lease: HeldLease,
        note: Callable[[RemoteFile], None],
        alone: Callable[[RemoteFile], Coroutine[Any, Any, None]],
    ) -> None:
        self._left = deque(files)
        self._most_bytes = max((file.size_bytes for file in self._left), default=0)
        self._destination, self._lease = destination, lease
        self._note, self._alone = note, alone
        self._published: deque[RemoteFile] = deque()  # and not noted yet
        self._publishing = _Publishing()

    async def bring_all(self, bulk: PatientStore, num_at_once: int) -> None:
        """Fetch all files, in at most this many series at once."""
        are_there = asyncio.Event()

        async def bring() -> None:
            await all_or_none(self._bring(bulk) for _ in range(min(len(self._left), num_at_once)))
            are_there.set()

        async def note() -> None:
            while not are_there.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(are_there.wait(), NOTE_S)
                while self._published:
                    self._note(self._published.popleft())

        await both(bring(), note())

    async def _bring(self, bulk: PatientStore) -> None:
        """Fetch files until none is left. After a series that failed, none begins here until its files are there: in
        an outage, a few files are asked for patiently, instead of all of them in vain.
        """
        while self._left:
            async with bulk.turn() as store:
                # Perhaps none is left when its turn has come.
                again = await self._bring_some(store) if self._left else []
            await all_or_none(self._alone(file) for file in again)

    async def _bring_some(self, store: PatientStore) -> list[RemoteFile]:
        """Fetch some files in one series. Return those that must be fetched alone: one, if nothing could be asked."""
        series = _Series(
            self._left,
            store.longest_series,
            self._destination,
            self._lease,
            self._publishing,
            self._published.append,
        )
        try:
            with contextlib.suppress(CkptAsyncError, OSError):
                await store.get_many(
                    series.gets(),
                    series.got,
                    num_requests=series.num_requests,
                    most_bytes=self._most_bytes,
                )
        finally:
            series.close()
            await result_of(asyncio.wrap_future(series.over), lambda: True)
        if not series.taken and self._left:
            return [self._left.popleft()]
        return [file for file in series.taken if file.name not in series.done]


class _Series:
    """Files that are requested one after the other. What is not `done` in the end was refused, or arrived wrong, or
    could not be written: fetched by itself, it shows what is the matter.
    """

    def __init__(
        self,
        left: deque[RemoteFile],
        num_requests: int,
        destination: Destination,
        lease: HeldLease,
        publishing: _Publishing,
        published: Callable[[RemoteFile], None],
    ) -> None:
        self.num_requests = num_requests
        self.taken: list[RemoteFile] = []
        self.done: set[str] = set()
        self.over: concurrent.futures.Future[None] = concurrent.futures.Future()  # nothing is being published
        self._left, self._destination, self._lease = left, destination, lease
        self._publishing, self._published = publishing, published
        self._current: tuple[RemoteFile, PartialFile]
        self._held = contextlib.ExitStack()  # the lock of the current file
        self._lock = threading.Lock()
        self._num_open = 1  # files being published, and one for the series itself
        self._error: Exception | None = None  # neither ours nor the disk's; raised by `over`

    def gets(self) -> Iterator[SmallGet]:
        """Yield the requests. Each file is locked until it has arrived and is published."""
        while len(self.taken) < self.num_requests:
            try:
                file = self._left.popleft()
            except IndexError:
                return
            self.taken.append(file)
            with contextlib.suppress(CkptAsyncError, OSError), self._held:
                if (partial := self._locked(file)) is not None:
                    self._current = file, partial
                    yield SmallGet(file.key, file.size_bytes)

    def got(self, _: SmallGet, data: memoryview) -> None:
        file, partial = self._current
        if file.checksum != checksum_of(data, partial.algorithm):
            logger.warning("checksum_differs file=%s from=remote; fetching it again", file.name)
            return
        partial.write(data, 0)
        with self._lock:
            self._num_open += 1
        held = self._held.pop_all()
        self._publishing.put(lambda: self._publish(file, partial, held))

    def close(self) -> None:
        """Request nothing more, and make `over` done when everything is published."""
        self._held.close()  # a traceback may keep the generator alive
        self._ended()

    def _ended(self) -> None:
        with self._lock:
            self._num_open -= 1
            is_over = not self._num_open
        if is_over and self._error is not None:
            self.over.set_exception(self._error)
        elif is_over:
            self.over.set_result(None)

    def _locked(self, file: RemoteFile) -> PartialFile | None:
        """Lock a file, unless another process is fetching it or has fetched it by now."""
        assert file.checksum is not None
        self._lease.check()
        self._destination.make_parent(file)
        path = self._destination.partial_path(file)
        partial = self._held.enter_context(locked_now(path, file.size_bytes, file.checksum.algorithm))
        return partial if partial is not None and self._destination.begin(partial, file) else None

    def _publish(self, file: RemoteFile, partial: PartialFile, held: contextlib.ExitStack) -> None:
        try:
            with contextlib.suppress(CkptAsyncError, OSError), held:
                self._destination.publish(partial, file)
                self.done.add(file.name)
                self._published(file)
        except Exception as error:  # noqa: BLE001  handed on: the thread publishes files of other series too
            self._error = error
        finally:
            self._ended()


class _Publishing:
    """Syncs files and moves them to their places: on a slow disk in threads, as many as it keeps waiting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_threads = self._num_open = 0  # open: waiting, or in a thread's hands
        self._most_open = affordable(MAX_OPEN)
        self._usual_s = 0.0

    def put(self, publish: Callable[[], None]) -> None:
        """Have `publish` called, which must not raise: in a thread if it takes long, but here if too many files are
        open for that.
        """
        with self._lock:
            num_waiting = len(self._waiting)
            is_here = self._usual_s < SLOW_S or self._num_open >= self._most_open
            if not is_here:
                self._waiting.append(publish)
                self._num_open += 1
            is_more = not is_here and num_waiting >= self._num_threads < MAX_THREADS
            self._num_threads += is_more
        if is_here:
            self._timed(publish)
        elif is_more:
            thread = threading.Thread(target=self._run, name="ckpt-async-publish")
            try:
                thread.start()
            except RuntimeError:  # there is no room for another thread
                self._publish_all()

    def _run(self) -> None:
        enter_bulk_thread()
        self._publish_all()

    def _publish_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_threads -= 1
                    return
                publish = self._waiting.popleft()
            self._timed(publish)
            with self._lock:
                self._num_open -= 1

    def _timed(self, publish: Callable[[], None]) -> None:
        began_s = time.monotonic()
        publish()
        self._usual_s += (time.monotonic() - began_s - self._usual_s) / 8
