"""Counters behind one lock, and the collector through which Prometheus reads them.

Deliberately not used: the global registry (the trainer may export its own metrics), the library's own counters
(each adds a `_created` series, and turning those off affects the whole process), and `PROMETHEUS_MULTIPROC_DIR`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import platform
import threading
from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ckpt_async.monitor.definitions import Definition

Key = tuple[str, tuple[str, ...]]  # name of a metric, values of its labels
Buckets = tuple[list[tuple[str, float]], float]  # (bound, observations up to it), and their sum


class Counters:
    """Plain numbers behind one lock, and a collector with its own `registry`.

    Safe from any thread; raises nothing: a label value that is not in the definition is dropped.
    """

    def __init__(self, definitions: tuple[Definition, ...], **fixed: str) -> None:
        self._definitions = {each.name: each for each in definitions}
        self._lock = threading.Lock()
        self._counts: dict[Key, float] = {}
        self._histograms: dict[Key, _Histogram] = {}
        self._others: set[Counters] = set()
        self._begin(**fixed)
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def _begin(self, **fixed: str) -> None:
        """Create every child with these labels: one that appeared only with its first failure would hide that
        failure from `increase()`. Children that need another label, and sparse ones, are created later.
        """
        with self._lock:
            for each in self._definitions.values():
                values = [allowed or fixed.get(label) for label, allowed in each.labels.items()]
                if each.is_sparse or None in values:
                    continue
                for labels in itertools.product(
                    *((one,) if isinstance(one, str) else one or () for one in values)
                ):
                    if each.kind == "counter":
                        self._counts.setdefault((each.name, labels), 0)
                    elif each.kind == "histogram":
                        self._histograms.setdefault((each.name, labels), _Histogram(each.bounds_s))

    def _add(self, name: str, *labels: str, amount: float = 1) -> None:
        key = (name, labels)
        with self._lock:
            if key in self._counts or self._is_sparse(name, labels):
                self._counts[key] = self._counts.get(key, 0) + amount

    def _is_sparse(self, name: str, labels: tuple[str, ...]) -> bool:
        definition = self._definitions[name]
        return definition.is_sparse and all(
            not allowed or label in allowed
            for label, allowed in zip(labels, definition.labels.values(), strict=True)
        )

    def _observe(self, name: str, *values_s: float, labels: tuple[str, ...] = ()) -> None:
        with self._lock:
            histogram = self._histograms.get((name, labels))
            if histogram is not None:
                for value_s in values_s:
                    histogram.observe(value_s)

    def describe(self) -> Iterator[Metric]:
        """Yield the metrics without values, which the registry asks for once, so that a scrape can be restricted by
        name.
        """
        return (_family(each) for each in self._definitions.values())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for one scrape. Values that cannot be read now are left out."""
        families = {each.name: _family(each) for each in self._definitions.values()}
        values, buckets = self.numbers()
        for other in list(self._others):
            self._merge(values, buckets, *other.numbers())
        for (name, labels), value in sorted(values.items()):
            family = families[name]
            assert not isinstance(family, HistogramMetricFamily)
            family.add_metric(labels, value)
        for (name, labels), (counts, sum_s) in sorted(buckets.items(), key=lambda each: each[0]):
            family = families[name]
            assert isinstance(family, HistogramMetricFamily)
            family.add_metric(labels, counts, sum_s)
        yield from families.values()

    def add(self, other: Counters) -> None:
        """Include another instance with the same definitions. Where both have a series, the sum is shown, except
        for gauges that are the same for the whole node.
        """
        self._others.add(other)

    def discard(self, other: Counters) -> None:
        self._others.discard(other)

    def numbers(self) -> tuple[dict[Key, float], dict[Key, Buckets]]:
        """Return the current numbers by series: values, and histograms."""
        with self._lock:
            values = dict(self._counts)
            buckets = {key: (each.cumulative(), each.sum_s) for key, each in self._histograms.items()}
        return values | self._gauges(), buckets

    def _merge(
        self,
        values: dict[Key, float],
        buckets: dict[Key, Buckets],
        other_values: dict[Key, float],
        other_buckets: dict[Key, Buckets],
    ) -> None:
        for key, value in other_values.items():
            is_added = key in values and not self._definitions[key[0]].is_of_node
            values[key] = values[key] + value if is_added else value
        for key, (counts, sum_s) in other_buckets.items():
            own, own_s = buckets.get(key, ([(name, 0.0) for name, _ in counts], 0.0))
            added = [(name, one + two) for (name, one), (_, two) in zip(own, counts, strict=True)]
            buckets[key] = added, own_s + sum_s

    def _gauges(self) -> dict[Key, float]:
        """Return the values that are determined anew at each scrape."""
        return {("ckpt_async_build_info", (_version(), platform.python_version())): 1}


class _Histogram:
    """Counts per bucket; not thread-safe by itself."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, value_s: float) -> None:
        value_s = max(0.0, value_s)  # the clock may have been set back; NaN becomes 0 too
        self._counts[bisect_left(self._bounds_s, value_s)] += 1
        self.sum_s += value_s

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (bound, observations up to it), the last one for +Inf."""
        names = [*(str(float(bound)) for bound in self._bounds_s), "+Inf"]
        return list(zip(names, itertools.accumulate(self._counts), strict=True))


def _family(definition: Definition) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
    name, labels = definition.name, list(definition.labels)
    help_ = definition.meaning.removesuffix(" (N)").replace("`", "")
    if definition.kind == "histogram":
        return HistogramMetricFamily(name, help_, labels=labels)
    if definition.kind == "counter":
        return CounterMetricFamily(name, help_, labels=labels)
    return GaugeMetricFamily(name, help_, labels=labels)


@functools.cache  # cached because it reads files
def _version() -> str:
    try:
        return importlib.metadata.version("ckpt-async")
    except importlib.metadata.PackageNotFoundError:  # running from a source tree that is not installed
        return "unknown"
