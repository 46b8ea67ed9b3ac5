"""Writes one checkpoint at a time beside training, on a thread, from a snapshot in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ckpt_async import threads
from ckpt_async.saver.timestamp import Timestamp
from ckpt_async.threads import Latch


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """One save: its place in the run, its name, and this rank's files on the local disk."""

    timestamp: Timestamp
    name: str
    paths: tuple[Path, ...]
    is_ephemeral: bool = False

    @property
    def step(self) -> int:
        return self.timestamp.step

    def state_dict(self) -> dict[str, Any]:
        return {
            "timestamp": self.timestamp.state_dict(),
            "name": self.name,
            "paths": [str(each) for each in self.paths],
            "is_ephemeral": self.is_ephemeral,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        paths = tuple(Path(each) for each in state["paths"])
        return cls(
            Timestamp.from_state_dict(state["timestamp"]), state["name"], paths, bool(state["is_ephemeral"])
        )


class Writer:
    """Runs one job at a time on a thread of its own; a `Future` tells how each ended.

    It does not use a thread pool: at exit Python would wait for the pool's threads before anyone could tell it not to.
    """

    def __init__(self) -> None:
        self.last: Future[Any] | None = None  # cancelled if Ctrl-C came before its job had begun
        self._over = Latch()
        self._over.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until nothing is being written, at most `timeout_s`. Return whether that was reached.

        Never raises what a job raised.
        """
        return self._over.wait(timeout_s)

    def start(self, job: Callable[[], Any], ended: Callable[[Future[Any]], None]) -> None:
        """Run `job` on a thread, and then `ended`. The previous job must have ended.

        Whatever this raises, Ctrl-C included, the job runs only if `last` is a new future that is not cancelled.
        """
        ending: Future[None] = Future()

        def work() -> None:
            if not ending.set_running_or_notify_cancel():
                return
            try:
                job()
            except BaseException as error:  # noqa: BLE001  the future carries it
                ending.set_exception(error)
            else:
                ending.set_result(None)

        try:
            self.follow(ending, ended)
            threads.start(work, "ckpt-async-save")
        except BaseException:
            # No memory, too many threads, or Ctrl-C: the job is not to run, unless its thread was faster.
            ending.cancel()
            raise

    def follow(self, ending: Future[Any], ended: Callable[[Future[Any]], None]) -> None:
        """Treat `ending`, a write that someone else carries out, as the running job."""
        over = Latch()
        ending.add_done_callback(ended)
        ending.add_done_callback(lambda _: over.set())
        self.last, self._over = ending, over
