"""Delivers what waits in an outbox to its sinks, on threads of its own, so that nobody waits for a receiver."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, TypeVar

from ckpt_async.errors import CkptAsyncError
from ckpt_async.events.event import Event
from ckpt_async.local.outbox import Outbox, Posted

logger = logging.getLogger(__name__)

# How often the outbox is checked for notices that another process has put there.
POLL_S = 1.0
# Longest pause before a retry. An unreachable receiver is tried again after 1 s, 2 s, 4 s … and then once an
# hour; each pause is shortened at random by up to a half.
RETRY_MAX_S = 3600.0
MAX_AGE_S = 72 * 3600.0
# How long a delivery that is cut short may take to end.
STOP_S = 4.0
TIDY_EVERY = 500
# The pause before a failed access to the journal is retried, for example when its disk is full.
JOURNAL_RETRY_S = 1.0

T = TypeVar("T")

_OFFSET_S = time.time() - time.monotonic()


def clock() -> float:
    """Return the time at which attempts are due: that of the wall clock when this process began, and what has passed
    since. Later steps of the wall clock neither hold up a retry nor make an event old.
    """
    return _OFFSET_S + time.monotonic()


@dataclass(frozen=True, slots=True)
class DeliveryCounts:
    """What became of events. Those that are dropped are never delivered; those that wait will be tried again."""

    num_delivered: int = 0
    num_dropped: int = 0
    num_waiting: int = 0  # not for functions, which end with their process: the next one calls its own


NO_EVENTS = DeliveryCounts()


class DeliveryError(Exception):
    """This delivery attempt failed; the message says why and contains nothing secret."""


class Sink(Protocol):
    """A receiver of events."""

    name: str
    num_parallel: int

    @property
    def max_attempts(self) -> int | None:
        """The number of attempts per event; None to retry until the event is too old."""

    def deliver(self, event: Event) -> None:
        """Return once the receiver has accepted the event. Raises DeliveryError. May block."""

    def stop(self) -> None:
        """Cut short the deliveries under way."""


class SinkDelivery:
    """Delivers events to one sink until it is closed.

    What could not be delivered stays in the outbox for the next one. `kinds` are the kinds that the sink wants now;
    others, which an earlier process may have put into the outbox, are dropped. None means all kinds.
    """

    def __init__(self, outbox: Outbox, sink: Sink, kinds: Collection[str] | None = None) -> None:
        self._outbox, self._sink, self._kinds = outbox, sink, kinds
        self._bell, self._lock = threading.Event(), threading.Lock()
        self._busy: set[str] = set()  # by id
        self._ends_at: float | None = None  # set by `close`; what is due only later is left in the outbox
        self._is_closed = False
        self._over = threading.Event()
        self._failing: dict[str, float] = {}  # since when, by id
        self._stuck: set[int] = set()  # threads that wait for the journal
        self._num_taken = 0
        self.num_delivered = self.num_dropped = 0  # so far, without those that nobody wants any more
        self._threads = [
            threading.Thread(target=self._work, name=f"ckpt-async-{sink.name}-{number}", daemon=True)
            for number in range(sink.num_parallel)
        ]
        for thread in self._threads:
            thread.start()

    def notify(self) -> None:
        """Signal that there is something new. May be called from any thread; never blocks."""
        self._bell.set()

    def close(self, grace_s: float) -> None:
        """Deliver what is, or becomes, due within `grace_s`, then cut short what is under way and log what is left.

        Idempotent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        deadline = time.monotonic() + grace_s
        self._ends_at = clock() + grace_s
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
        """Make a `close` that runs in another thread stop waiting. May be called from any thread; never blocks."""
        self._over.set()
        self._bell.set()
        self._sink.stop()

    def _tell_what_is_left(self, num_cut_short: int) -> None:
        with contextlib.suppress(CkptAsyncError):  # the journal may be closed
            if num := self._outbox.num_due([self._sink.name], float("inf")):
                told = f"events_left sink={self._sink.name} num={num} cut_short={min(num, num_cut_short)}"
                logger.warning("%s; the next launch delivers them", told)

    # --- on its own threads --------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while (taken := self._take()) is not None:
                try:
                    self._tidy()
                    self._deliver(taken)
                finally:
                    with self._lock:
                        self._busy.discard(taken.id)
        except CkptAsyncError as error:  # raised by the journal at the end: the next launch delivers it again
            logger.debug("events_unwritten sink=%s error=%s", self._sink.name, error)
        except Exception:
            logger.exception("events_stopped sink=%s; the next launch delivers the rest", self._sink.name)

    def _patiently(self, use: Callable[[], T]) -> T:
        """Read or write the journal, and retry for as long as that fails.

        A disk that is full for a moment must not end the delivery, nor cause an event to be delivered twice because its
        delivery could not be recorded. Raises CkptAsyncError once the delivery is over.
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
        """Log once for all threads that the journal cannot be used, and once that it can be used again."""
        me = {threading.get_ident()}
        with self._lock:
            before = self._stuck
            self._stuck = after = before | me if error else before - me
        if after and not before:
            logger.error("events_held_up sink=%s error=%s; retrying until it works", self._sink.name, error)
        elif before and not after:
            logger.warning("events_go_on sink=%s", self._sink.name)

    def _take(self) -> Posted | None:
        """Return the next notice that is due, or None at the end."""
        while not self._over.is_set():
            self._bell.clear()  # clear before looking, so that what is added after the look rings again
            due, next_at = self._patiently(self._look)
            if due is not None:
                return due
            ends_at = self._ends_at
            if ends_at is not None and next_at >= ends_at:
                return None
            self._bell.wait(min(POLL_S, max(0.0, next_at - clock())))
        return None

    def _look(self) -> tuple[Posted | None, float]:
        """Claim a notice that is due and return it, with the time at which the next unclaimed one is due.

        The time is the earliest among the notices that no other thread has claimed.
        """
        with self._lock:
            waiting = self._outbox.waiting(self._sink.name)
            free = [each for each in waiting if each.id not in self._busy]
            now = clock()
            # No pause is longer than RETRY_MAX_S: what an earlier process has put off for longer had another time.
            due = next((each for each in free if not now < each.next_at <= now + RETRY_MAX_S), None)
            if due is not None:
                self._busy.add(due.id)
                if len(free) > 1:
                    self._bell.set()
            return due, min((each.next_at for each in free), default=float("inf"))

    def _tidy(self) -> None:
        with self._lock:
            self._num_taken += 1
            is_due = self._num_taken % TIDY_EVERY == 1
        if is_due and (num := self._patiently(lambda: self._outbox.tidy(self._sink.name))):
            self._count(num_dropped=num)
            self._failing.clear()  # those that are gone were the oldest
            logger.error(
                "events_dropped sink=%s num=%d: too many were waiting to be delivered", self._sink.name, num
            )

    def _deliver(self, waiting: Posted) -> None:
        try:
            event = Event.from_json(waiting.body)
        except ValueError:
            logger.exception("event_unreadable sink=%s", self._sink.name)
            self._patiently(lambda: self._outbox.dropped(waiting))
            return self._count(num_dropped=1)
        told = f"sink={self._sink.name} kind={event.kind} id={event.id}"
        if self._kinds is not None and event.kind not in self._kinds:
            logger.info("event_not_wanted %s", told)
            return self._patiently(lambda: self._outbox.dropped(waiting))
        try:
            self._sink.deliver(event)
        except DeliveryError as error:
            if not self._over.is_set():  # otherwise we have cut it short ourselves
                self._failed(waiting, told, str(error))
            return None
        except Exception as error:
            logger.exception("event_sink_failed %s", told)
            return self._failed(waiting, told, repr(error))
        self._patiently(lambda: self._outbox.delivered(waiting))
        self._failing.pop(waiting.id, None)
        logger.info("event_delivered %s", told)
        return self._count(num_delivered=1)

    def _count(self, *, num_delivered: int = 0, num_dropped: int = 0) -> None:
        with self._lock:
            self.num_delivered += num_delivered
            self.num_dropped += num_dropped

    def _failed(self, waiting: Posted, told: str, why: str) -> None:
        num_attempts, now = waiting.num_attempts + 1, clock()
        # Only of what an earlier process has tried already, the age is that by the wall clock.
        since = self._failing.setdefault(waiting.id, waiting.made_at if waiting.num_attempts else now)
        is_last = self._sink.max_attempts is not None and num_attempts >= self._sink.max_attempts
        if is_last or now - since > MAX_AGE_S:
            self._patiently(lambda: self._outbox.dropped(waiting))
            self._failing.pop(waiting.id, None)
            logger.error("event_dropped %s attempts=%d error=%s", told, num_attempts, why)
            return self._count(num_dropped=1)
        pause_s = min(RETRY_MAX_S, 2.0 ** min(waiting.num_attempts, 20)) * random.uniform(0.5, 1.0)
        self._patiently(lambda: self._outbox.failed(waiting, now + pause_s))
        log = logger.warning if num_attempts in (1, 5) or num_attempts % 25 == 0 else logger.info
        log("event_not_delivered %s attempts=%d retry_in_s=%.1f error=%s", told, num_attempts, pause_s, why)
        return None


class Delivery:
    """The delivery to each sink. `wants` names the kinds of events that a sink wants now, if not all."""

    def __init__(
        self,
        outbox: Outbox,
        sinks: Iterable[Sink],
        wants: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> None:
        self._sinks = [SinkDelivery(outbox, sink, wants.get(sink.name)) for sink in sinks]

    def notify(self) -> None:
        for each in self._sinks:
            each.notify()

    @property
    def done(self) -> DeliveryCounts:
        """What became of events so far; those that wait are not counted."""
        delivered = sum(each.num_delivered for each in self._sinks)
        return DeliveryCounts(delivered, sum(each.num_dropped for each in self._sinks))

    def close(self, grace_s: float) -> None:
        """Close all at once; see `SinkDelivery.close`. Blocks for at most `grace_s` and a few seconds more."""
        closing = [
            threading.Thread(target=each.close, args=(grace_s,), name="ckpt-async-closing", daemon=True)
            for each in self._sinks
        ]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def cut_short(self) -> None:
        """See `SinkDelivery.cut_short`."""
        for each in self._sinks:
            each.cut_short()


async def close_on_thread(delivery: Delivery, grace_s: float) -> None:
    """Close the delivery on a thread, beside an event loop.

    If this is cancelled, for example by Ctrl-C, it cuts short what is under way but still waits for the end, because
    the journal beneath is closed next.
    """
    closing = asyncio.ensure_future(asyncio.to_thread(delivery.close, grace_s))
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        delivery.cut_short()
        await closing
        raise
