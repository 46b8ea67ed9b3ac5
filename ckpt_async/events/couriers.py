"""Bring what waits in an outbox to its sinks, on threads of their own: nobody ever waits for a receiver."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Protocol, TypeVar

from ckpt_async.errors import CkptAsyncError
from ckpt_async.events.event import Event
from ckpt_async.local.outbox import Outbox, Waiting

logger = logging.getLogger(__name__)

# What another process has put into the same box is found by looking.
POLL_S = 1.0
# A receiver that is away is asked again after 1 s, 2 s, 4 s … and then once an hour, less up to a half.
RETRY_MAX_S = 3600.0
MAX_AGE_S = 72 * 3600.0
# For what is cut short to end, once its time is over.
STOP_S = 4.0
TIDY_EVERY = 500
# A journal that cannot be written, as its disk is full say, is tried again.
JOURNAL_RETRY_S = 1.0

T = TypeVar("T")


class DeliveryError(Exception):
    """This attempt failed; the message says why, without anything secret."""


class Sink(Protocol):
    """Somebody who wants to hear of events."""

    name: str
    num_parallel: int

    @property
    def max_attempts(self) -> int | None:
        """None: until the event is too old."""

    def deliver(self, event: Event) -> None:
        """Returns once the receiver has taken it. Raises DeliveryError. May block."""

    def stop(self) -> None:
        """Cut short what is being delivered now."""


class Courier:
    """Delivers to one sink until it is closed. What could not be delivered stays in the box, for the next one. `kinds`:
    what the sink wants now, of what an earlier process may have put there; None for everything.
    """

    def __init__(self, outbox: Outbox, sink: Sink, kinds: Collection[str] | None = None) -> None:
        self._outbox, self._sink, self._kinds = outbox, sink, kinds
        self._bell, self._lock = threading.Event(), threading.Lock()
        self._busy: set[int] = set()
        self._ends_at: float | None = None  # once it is closing: what is not due by then is left
        self._is_closed = False
        self._over = threading.Event()
        self._stuck: set[int] = set()  # threads that wait for the journal
        self._num_taken = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"ckpt-async-{sink.name}-{number}", daemon=True)
            for number in range(sink.num_parallel)
        ]
        for thread in self._threads:
            thread.start()

    def notify(self) -> None:
        """There is something new. Any thread; never blocks."""
        self._bell.set()

    def close(self, grace_s: float) -> None:
        """Deliver what is, or becomes, due within `grace_s`, then cut short what is under way, and say in one line what
        is left. Idempotent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        deadline = time.monotonic() + grace_s
        self._ends_at = time.time() + grace_s
        self._bell.set()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._over.set()
        with self._lock:
            num_cut_short = len(self._busy)
        self._sink.stop()
        deadline = time.monotonic() + STOP_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._tell_what_is_left(num_cut_short)

    def cut_short(self) -> None:
        """A `close` that another thread is in waits no longer. Any thread; never blocks."""
        self._over.set()
        self._bell.set()
        self._sink.stop()

    def _tell_what_is_left(self, num_cut_short: int) -> None:
        with contextlib.suppress(CkptAsyncError):  # the journal is gone
            if num := self._outbox.num_due([self._sink.name], float("inf")):
                told = f"events_left sink={self._sink.name} num={num} cut_short={min(num, num_cut_short)}"
                logger.warning("%s; the next start tells them", told)

    # --- on its threads ------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while (taken := self._take()) is not None:
                try:
                    self._tidy()
                    self._deliver(taken)
                finally:
                    with self._lock:
                        self._busy.discard(taken.sequence)
        except CkptAsyncError as error:  # of the journal, at the end: the next start tells it again
            logger.debug("events_unwritten sink=%s error=%s", self._sink.name, error)
        except Exception:
            logger.exception("events_stopped sink=%s; the next start delivers what waits", self._sink.name)

    def _patiently(self, use: Callable[[], T]) -> T:
        """Read or write the journal, again and again if it cannot be: a disk that is full for a moment must neither end
        the courier, nor have that delivered again which it only could not note. Raises CkptAsyncError once it is over.
        """
        while True:
            try:
                done = use()
            except CkptAsyncError as error:
                if self._over.is_set():
                    raise
                self._mark_stuck(error)
                self._over.wait(JOURNAL_RETRY_S)
            else:
                self._mark_stuck(None)
                return done

    def _mark_stuck(self, error: CkptAsyncError | None) -> None:
        """Said once for all threads."""
        me = {threading.get_ident()}
        with self._lock:
            before = self._stuck
            self._stuck = after = before | me if error else before - me
        if after and not before:
            logger.error(
                "events_held_up sink=%s error=%s; tried again until it works", self._sink.name, error
            )
        elif before and not after:
            logger.warning("events_go_on sink=%s", self._sink.name)

    def _take(self) -> Waiting | None:
        """The next one that is due; None at the end."""
        while not self._over.is_set():
            self._bell.clear()  # first: what is put after we have looked rings again
            due, next_at = self._patiently(self._look)
            if due is not None:
                return due
            ends_at = self._ends_at
            if ends_at is not None and next_at >= ends_at:
                return None
            self._bell.wait(min(POLL_S, max(0.0, next_at - time.time())))
        return None

    def _look(self) -> tuple[Waiting | None, float]:
        """One that is due, from now on ours; and when the first of those is due that no other thread has."""
        with self._lock:
            waiting = self._outbox.waiting(self._sink.name)
            free = [each for each in waiting if each.sequence not in self._busy]
            now = time.time()
            due = next((each for each in free if each.next_at <= now), None)
            if due is not None:
                self._busy.add(due.sequence)
                if len(free) > 1:
                    self._bell.set()
            return due, min((each.next_at for each in free), default=float("inf"))

    def _tidy(self) -> None:
        with self._lock:
            self._num_taken += 1
            is_due = self._num_taken % TIDY_EVERY == 1
        if is_due and (num := self._patiently(lambda: self._outbox.tidy(self._sink.name))):
            logger.error("events_dropped sink=%s num=%d: too many wait to be delivered", self._sink.name, num)

    def _deliver(self, waiting: Waiting) -> None:
        try:
            event = Event.from_json(waiting.body)
        except ValueError:
            logger.exception("event_unreadable sink=%s", self._sink.name)
            return self._patiently(lambda: self._outbox.dropped(waiting.sequence))
        told = f"sink={self._sink.name} kind={event.kind} id={event.id}"
        if self._kinds is not None and event.kind not in self._kinds:
            logger.info("event_not_wanted %s", told)
            return self._patiently(lambda: self._outbox.dropped(waiting.sequence))
        try:
            self._sink.deliver(event)
        except DeliveryError as error:
            if not self._over.is_set():  # else we have cut it short ourselves
                self._failed(waiting, told, str(error))
            return None
        except Exception as error:
            logger.exception("event_sink_failed %s", told)
            return self._failed(waiting, told, repr(error))
        self._patiently(lambda: self._outbox.delivered(waiting.sequence))
        logger.info("event_delivered %s", told)
        return None

    def _failed(self, waiting: Waiting, told: str, why: str) -> None:
        num_attempts, now = waiting.num_attempts + 1, time.time()
        is_last = self._sink.max_attempts is not None and num_attempts >= self._sink.max_attempts
        if is_last or now - waiting.made_at > MAX_AGE_S:
            self._patiently(lambda: self._outbox.dropped(waiting.sequence))
            logger.error("event_dropped %s attempts=%d error=%s", told, num_attempts, why)
            return
        pause_s = min(RETRY_MAX_S, 2.0 ** min(waiting.num_attempts, 20)) * random.uniform(0.5, 1.0)
        self._patiently(lambda: self._outbox.failed(waiting.sequence, now + pause_s))
        log = logger.warning if num_attempts in (1, 5) or num_attempts % 25 == 0 else logger.info
        log("event_not_delivered %s attempts=%d retry_in_s=%.1f error=%s", told, num_attempts, pause_s, why)


class Couriers:
    """One for each sink. `wants`: the kinds of events that it wants now, if not all."""

    def __init__(
        self,
        outbox: Outbox,
        sinks: Iterable[Sink],
        wants: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> None:
        self._couriers = [Courier(outbox, sink, wants.get(sink.name)) for sink in sinks]

    def notify(self) -> None:
        for each in self._couriers:
            each.notify()

    def close(self, grace_s: float) -> None:
        """All at once; see `Courier.close`. Blocks for at most `grace_s` and a few seconds more."""
        closing = [
            threading.Thread(target=each.close, args=(grace_s,), name="ckpt-async-closing", daemon=True)
            for each in self._couriers
        ]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def cut_short(self) -> None:
        """See `Courier.cut_short`."""
        for each in self._couriers:
            each.cut_short()


class Closable(Protocol):
    """Couriers, or who has them."""

    def close(self, grace_s: float) -> None: ...

    def cut_short(self) -> None: ...


async def close_on_thread(couriers: Closable, grace_s: float) -> None:
    """Beside an event loop. If it is cancelled, by Ctrl-C say, it cuts short what is under way and ends all the same:
    the journal beneath is closed next.
    """
    closing = asyncio.ensure_future(asyncio.to_thread(couriers.close, grace_s))
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        couriers.cut_short()
        await closing
        raise
