"""Reports what a watcher that was told to end still waits for: soon, and then periodically."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from ckpt_async.core.units import age, named
from ckpt_async.watch.background import Stop

logger = logging.getLogger(__name__)

# An ordinary end takes less time than this, and nothing is reported.
QUIET_S = 2.0
EVERY_S = 60.0


class Ending:
    """The end of one watcher. `timeout_s` is how long it may take."""

    def __init__(self, stopping: Stop, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stopping, self._timeout_s, self._clock = stopping, timeout_s, clock
        self._next_at = float("-inf")

    def tell(self, waits_for: Callable[[], str]) -> None:
        """Log what is awaited, if it is time to.

        `waits_for` returns that, or "" if it is not worth a line.
        """
        if not self._stopping.is_over(min(QUIET_S, self._timeout_s)) or self._clock() < self._next_at:
            return
        if what := waits_for():
            self._next_at = self._clock() + EVERY_S
            left = age(self._stopping.left_s(self._timeout_s))
            logger.warning("watch_ending waiting_for=%r; at most %s longer", what, left)


def others(nodes: Mapping[int, Sequence[int]], ours: int) -> dict[int, list[int]]:
    """Return the steps that each other node has yet to hand in, given the nodes that each step waits for."""
    found: dict[int, list[int]] = {}
    for step, lacking in nodes.items():
        for node in lacking:
            if node != ours:
                found.setdefault(node, []).append(step)
    return found


def parts(missing: Mapping[int, Sequence[int]], steps: Sequence[int], *, is_open: bool) -> str:
    """Describe what is awaited.

    `missing` has, by node, the steps that other nodes have not handed in; `steps` are all that are not decided.
    `is_open`: the store has answered, and the nodes have agreed on a launch of the run.
    """
    left = named("step", sorted(steps))
    if not is_open:
        return f"the store to answer, or another node to start: {left} not handed in yet" if steps else ""
    if not missing:
        return f"{left} to be committed" if steps else ""
    by_steps: dict[tuple[int, ...], list[int]] = {}
    for node, lacking in sorted(missing.items()):
        by_steps.setdefault(tuple(sorted(lacking)), []).append(node)
    each = (
        f"{named('node', nodes)} to hand in {named('step', lacking)}" for lacking, nodes in by_steps.items()
    )
    return ", and ".join(each)
