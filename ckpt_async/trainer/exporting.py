"""The port on which an uploader's metrics are found: one for all kinds of checkpoints of a rank."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ckpt_async.core.settings import Settings
from ckpt_async.monitor.metrics import Metrics
from ckpt_async.monitor.server import serve


class Exporter:
    """Serves metrics on the port that the settings name, or adds them to those of a companion that has this port."""

    def __init__(self, metrics: Metrics, settings: Settings, companions: Iterable[Exporter]) -> None:
        self.metrics = metrics
        self._place = settings.metrics_port, settings.metrics_address
        self._host = next((each for each in companions if each.is_serving(*self._place)), None)
        self._server = None
        if self._host is not None:
            self._host.metrics.add(metrics)
        else:
            self._server = serve(metrics.registry, *self._place, os.environ)

    def is_serving(self, port: int, address: str) -> bool:
        return self._server is not None and port > 0 and self._place == (port, address)

    @property
    def url(self) -> str | None:
        """Where Prometheus finds them, or None if nowhere."""
        if self._host is not None:
            return self._host.url
        return self._server.url if self._server is not None else None

    def close(self) -> None:
        """Free the port; companions that were added are not found any more either. Idempotent."""
        if self._host is not None:
            self._host.metrics.discard(self.metrics)
        if self._server is not None:
            self._server.close()
