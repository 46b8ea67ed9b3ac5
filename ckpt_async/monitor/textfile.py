"""Metrics of a command that ends, as a file for node_exporter's textfile collector: there is no process left to
scrape.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, generate_latest

from ckpt_async.monitor.counters import Counters, Key
from ckpt_async.monitor.definitions import COMMAND_DEFINITIONS


class CommandMetrics(Counters):
    """Gauges of what one command did. They contain no series that two commands of a node would both have, because
    the collector rejects those.
    """

    def __init__(self, command: str, target: str) -> None:
        self._labels = command, target.encode(errors="replace").decode()
        self._values: dict[Key, float] = {}
        super().__init__(COMMAND_DEFINITIONS)

    def ended(self, at: float, duration_s: float, exit_code: int) -> None:
        """Note the end of the command. `at` is a Unix time."""
        self._set("ckpt_async_command_completed_timestamp_seconds", at)
        self._set("ckpt_async_command_duration_seconds", duration_s)
        self._set("ckpt_async_command_exit_code", exit_code)

    def did(self, checkpoints: Mapping[str, int], size_bytes: int | None, violations: int | None) -> None:
        """Note the number of checkpoints by result; pass None for what the command does not do."""
        for result, num in checkpoints.items():
            self._set("ckpt_async_command_checkpoints", num, result)
        if size_bytes is not None:
            self._set("ckpt_async_command_bytes", size_bytes)
        if violations is not None:
            self._set("ckpt_async_command_violations", violations)

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._values[name, (*self._labels, *labels)] = value

    def _gauges(self) -> dict[Key, float]:
        return self._values


def write(path: str, registry: CollectorRegistry) -> None:
    """Replace the file atomically: a reader sees either the old or the new content. Raises OSError."""
    temporary = f"{path}.{os.getpid()}.tmp"  # the collector only reads files that end in .prom
    try:
        with open(temporary, "wb") as file:
            os.fchmod(file.fileno(), 0o644)  # the collector runs as another user
            file.write(generate_latest(registry))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
