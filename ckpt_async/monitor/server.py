"""The port on which Prometheus scrapes this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from ckpt_async.core import launch
from ckpt_async.local.journal import after_fork

logger = logging.getLogger(__name__)


class MetricsServer:
    """Answers scrapes on daemon threads of its own, also while the engine's event loop is stuck."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server, self._thread = server, thread
        host, port = server.server_address[:2]
        text = host if isinstance(host, str) else host.decode()
        self.url = f"http://[{text}]:{port}/metrics" if ":" in text else f"http://{text}:{port}/metrics"

        after_fork.add(self)

    def abandon(self) -> None:
        """In a forked child: close our copy of the socket, or it would keep a dead trainer's port."""
        self._server.socket.close()

    def close(self) -> None:
        """Stop answering and free the port. Idempotent; takes up to half a second."""
        after_fork.discard(self)
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(
    registry: CollectorRegistry, port: int, address: str, environment: Mapping[str, str]
) -> MetricsServer | None:
    """Serve `registry` over HTTP: on no port (-1), any free one (0), or `port` + the rank on this node.

    Returns None, and logs one warning, if that port cannot be had: nothing stops for metrics.
    """
    if port < 0:
        return None
    try:
        port += (launch.local_rank(environment) or 0) if port else 0
        started = MetricsServer(*start_http_server(port, address, registry))
    except (OSError, OverflowError, ValueError) as error:  # busy, no such address; beyond 65,535; no number
        logger.warning("metrics_not_served address=%s port=%d error=%s; work continues", address, port, error)
        return None
    logger.info("metrics_served url=%s", started.url)
    return started
