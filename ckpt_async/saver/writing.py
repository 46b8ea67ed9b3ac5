"""Saving beside training: one checkpoint at a time, from a snapshot in memory, on a thread."""

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
    """One save: when in the run it was taken, its name, and this rank's files on the local disk."""

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
    """Does one job at a time. `Future`s tell how each ended; not those of a pool, which Python waits for at exit before
    anybody could say that nothing is to be waited for.
    """

    def __init__(self) -> None:
        self._last: Future[None] | None = None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until nothing is being written. Returns whether that is so. Never raises what a job raised."""
        if self._last is None:
            return True
        done = threading.Event()
        self._last.add_done_callback(lambda _: done.set())
        return done.wait(timeout_s)

    def start(self, job: Callable[[], Any]) -> Future[None]:
        """Run `job` on a thread. The one before must have ended."""
        ending: Future[None] = Future()
        ending.set_running_or_notify_cancel()

        def work() -> None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001  the future carries it
                ending.set_exception(error)
            else:
                ending.set_result(None)

        self._last = ending
        threading.Thread(target=work, name="ckpt-async-save").start()
        return ending

    def follow(self, ending: Future[Any]) -> None:
        """Take what somebody else writes for the job that is running."""
        self._last = ending
