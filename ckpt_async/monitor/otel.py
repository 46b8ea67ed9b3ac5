"""Traces and metrics through OpenTelemetry's API, if that is installed (`opentelemetry-api`). Without it, none of
it is imported; without an SDK, its API does nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_async.core.observe import Observer
from ckpt_async.monitor.counters import Counters, Key
from ckpt_async.monitor.definitions import DEFINITIONS, Definition

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

SCOPE = "ckpt_async"
# Limit per checkpoint: one of 10,000 small shards has hundreds of uploads, each of many shards.
MAX_UPLOADS = 200
MAX_OPEN = 100
# One collection reads each instrument separately, but the journal is read once for all of them.
SAME_COLLECTION_S = 0.5


def tracing(run: str, rank: int) -> Observer | None:
    """Return an observer that makes spans of what the engine reports; None if the API is not installed."""
    try:
        import opentelemetry.trace  # noqa: F401
    except ImportError:
        return None
    return Spans(run, rank)


def export(metrics: Counters) -> Callable[[], None]:
    """Export the series of `metrics` through the SDK as well, under the same names. Returns a function that ends
    this.
    """
    try:
        import opentelemetry.metrics  # noqa: F401
    except ImportError:
        return lambda: None
    global _instruments  # noqa: PLW0603
    with _lock:
        if _instruments is None:
            try:
                _instruments = Instruments()
            except TypeError as error:  # an older API than this module expects
                logger.warning("opentelemetry_too_old error=%s; exporting no metrics to it", error)
                return lambda: None
        instruments = _instruments
    instruments.add(metrics)
    return lambda: instruments.discard(metrics)


# --- traces ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Upload:
    started_at: float
    ended_at: float
    num_shards: int


class Spans(Observer):
    """Traces, one per checkpoint, made when it ends, with the times that applied.

    Each trace has a span `ckpt_async.checkpoint`, from the `enqueue` of the first shard to the commit as this rank
    saw it (or until the checkpoint was given up), which contains a `ckpt_async.upload` for each shard, or series of
    small ones.
    """

    def __init__(self, run: str, rank: int) -> None:
        from opentelemetry import trace

        self._tracer = trace.get_tracer(SCOPE)
        self._attributes: dict[str, str | int] = {"ckpt_async.run": run, "ckpt_async.rank": rank}
        self._uploads: dict[int, deque[_Upload]] = {}

    def shards_finished(
        self, result: str, num_shards: int, duration_s: float, step: int | None = None, at: float = 0.0
    ) -> None:
        if result != "ok" or step is None:
            return
        uploads = self._uploads.setdefault(step, deque(maxlen=MAX_UPLOADS))
        uploads.append(_Upload(at - duration_s, at, num_shards))
        while len(self._uploads) > MAX_OPEN:
            self._uploads.pop(next(iter(self._uploads)))

    def checkpoint_committed(self, step: int, latency_s: float, at: float) -> None:
        span = self._checkpoint(step, at - latency_s)
        span.set_attribute("ckpt_async.outcome", "committed")
        self._end(span, step, at)

    def checkpoint_aborted(self, step: int, reason: str) -> None:
        from opentelemetry.trace import StatusCode

        now = time.time()
        span = self._checkpoint(step, now)
        span.set_attribute("ckpt_async.outcome", "given_up")
        span.set_status(StatusCode.ERROR, reason)
        self._end(span, step, now)

    def _checkpoint(self, step: int, started_at: float) -> Span:
        from opentelemetry.context import Context

        attributes = self._attributes | {"ckpt_async.step": step}
        # The begin of a checkpoint and the duration of an upload come from two clocks; make sure that no
        # upload begins before its checkpoint.
        started_at = min([started_at, *(each.started_at for each in self._uploads.get(step, ()))])
        # A trace of its own: the checkpoint begins and ends independently of whatever span is current here.
        return self._tracer.start_span(
            "ckpt_async.checkpoint", Context(), attributes=attributes, start_time=_ns(started_at)
        )

    def _end(self, span: Span, step: int, at: float) -> None:
        from opentelemetry import trace

        uploads = self._uploads.pop(step, ())
        if span.is_recording():
            within = trace.set_span_in_context(span)
            for each in uploads:
                upload = self._tracer.start_span(
                    "ckpt_async.upload",
                    within,
                    attributes={"ckpt_async.shards": each.num_shards},
                    start_time=_ns(each.started_at),
                )
                upload.end(_ns(each.ended_at))
        span.end(_ns(at))


def _ns(at: float) -> int:
    return int(at * 1e9)


# --- metrics -----------------------------------------------------------------------------------------------


class Instruments:
    """One instrument per definition, for all uploaders of the process together."""

    def __init__(self) -> None:
        from opentelemetry import metrics

        self._all = Counters(DEFINITIONS)
        self._lock = threading.Lock()
        self._values: dict[Key, float] = {}
        self._read_at = float("-inf")
        self._histograms: dict[str, Any] = {}
        self._labels = {each.name: tuple(each.labels) for each in DEFINITIONS}
        meter = metrics.get_meter(SCOPE)
        for each in DEFINITIONS:
            if each.kind == "histogram":
                self._histograms[each.name] = meter.create_histogram(
                    each.name, "s", each.meaning, explicit_bucket_boundaries_advisory=each.bounds_s
                )
            else:
                make = (
                    meter.create_observable_counter
                    if each.kind == "counter"
                    else meter.create_observable_gauge
                )
                make(each.name, [self._callback(each)], _unit(each.name), each.meaning)

    def add(self, metrics: Counters) -> None:
        self._all.add(metrics)
        metrics.on_observe = self._record

    def discard(self, metrics: Counters) -> None:
        self._all.discard(metrics)
        metrics.on_observe = None

    def _record(self, name: str, values_s: Iterable[float], labels: tuple[str, ...]) -> None:
        attributes = dict(zip(self._labels[name], labels, strict=True))
        for value_s in values_s:
            self._histograms[name].record(max(0.0, value_s), attributes)

    def _callback(self, definition: Definition) -> Callable[[CallbackOptions], Iterable[Observation]]:
        from opentelemetry.metrics import Observation

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for (name, labels), value in self._now().items():
                if name == definition.name:
                    yield Observation(value, dict(zip(definition.labels, labels, strict=True)))

        return observe

    def _now(self) -> dict[Key, float]:
        with self._lock:
            now = time.monotonic()
            if now - self._read_at > SAME_COLLECTION_S:
                self._values, _ = self._all.together()
                self._read_at = time.monotonic()
            return self._values


_instruments: Instruments | None = None
_lock = threading.Lock()


def _unit(name: str) -> str:
    stem = name.removesuffix("_total")
    return "s" if stem.endswith("_seconds") else "By" if stem.endswith("_bytes") else "1"
