"""`--metrics-file`: writes what a command did to a file for node_exporter's textfile collector."""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckpt_async.cli.output import Exit, code_of
from ckpt_async.cli.parsing import as_path

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Tally:
    """What a command did, for the metrics. Each command fills in what it knows."""

    checkpoints: dict[str, int] = field(default_factory=dict)  # how many, by fate
    size_bytes: int | None = None
    violations: int | None = None
    code: int = Exit.ERROR


def add_metrics_file(parser: argparse.ArgumentParser, target: str) -> None:
    """Add `--metrics-file`. `target` names the argument whose value becomes the label `target`."""
    parser.add_argument(
        "--metrics-file",
        metavar="FILE",
        type=as_path,
        help="at the end, write metrics to FILE, for node_exporter's textfile collector (its name must end in"
        " .prom)",
    )
    parser.set_defaults(metrics_target=target)


def tally_of(options: argparse.Namespace) -> Tally:
    """Return the tally in which the command notes what it did."""
    if not hasattr(options, "tally"):
        options.tally = Tally()
    tally: Tally = options.tally
    return tally


@contextlib.contextmanager
def measuring(options: argparse.Namespace) -> Iterator[Tally]:
    """Write the metrics file, if one is asked for, at the end of the block, however it ends.

    If the file cannot be written, that is only a warning, since the command has done its work.
    """
    tally = tally_of(options)
    started = time.monotonic()
    try:
        yield tally
    except KeyboardInterrupt:
        tally.code = Exit.INTERRUPTED
        raise
    except Exception as error:
        tally.code = code_of(error)
        raise
    finally:
        if getattr(options, "metrics_file", None):
            _write(options, tally, time.monotonic() - started)


def _write(options: argparse.Namespace, tally: Tally, duration_s: float) -> None:
    from ckpt_async.monitor.textfile import CommandMetrics, write

    target = getattr(options, options.metrics_target)
    metrics = CommandMetrics(options.command, target if isinstance(target, str) else " ".join(target))
    metrics.ended(time.time(), duration_s, int(tally.code))
    metrics.did(tally.checkpoints, tally.size_bytes, tally.violations)
    try:
        write(options.metrics_file, metrics.registry)
    except OSError as error:
        logger.warning("metrics_not_written path=%s error=%s", options.metrics_file, error)
