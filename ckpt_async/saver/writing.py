"""Writes one checkpoint at a time beside training, on a thread, from a snapshot in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ckpt_async.saver.timestamp import Timestamp


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
        self._last: Future[None] | None = None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until nothing is being written, at most `timeout_s`. Return whether that was reached.

        Never raises what a job raised.
        """
        if self._last is None:
            return True
        done = threading.Event()
        self._last.add_done_callback(lambda _: done.set())
        return done.wait(timeout_s)

    def start(self, job: Callable[[], Any]) -> Future[None]:
        """Run `job` on a thread. The previous job must have ended."""
        ending: Future[None] = Future()
        ending.set_running_or_notify_cancel()

        def work() -> None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001  the future carries it
                ending.set_exception(error)
            else:
                ending.set_result(None)

        before, self._last = self._last, ending
        try:
            threading.Thread(target=work, name="ckpt-async-save").start()
        except Exception:  # no memory, or too many threads: there is nothing to wait for
            self._last = before
            raise
        return ending

    def follow(self, ending: Future[Any]) -> None:
        """Treat `ending`, a write that someone else carries out, as the running job."""
        self._last = ending
