"""A test server in a process of its own: started until it answers, and killed. Standard library only."""

from __future__ import annotations

import http.client
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self


def is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        # A port in TIME_WAIT counts as free, because the server can bind it too.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


class ServerProcess(ABC):
    """A server that runs in `folder` and logs there. Also a context manager."""

    name: str

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self, data: Path) -> tuple[Sequence[str], Mapping[str, str]]:
        """Return the command that serves the folder `data`, and its environment."""

    @abstractmethod
    def probe(self) -> str:
        """Ask whether the server is ready, and return its answer. Raises OSError or HTTPException."""

    @abstractmethod
    def is_ready(self, status: str) -> bool:
        """Return whether this answer of `probe` means that the server is ready."""

    @property
    def pid(self) -> int | None:
        """The ID of the server's process while it runs."""
        return self._process.pid if self._process is not None else None

    @property
    def log(self) -> Path:
        """The path of the file with the server's output."""
        return self._folder / f"{self.name}.log"

    def start(self, timeout_s: float = 60.0) -> None:
        """Start the server, also again after `kill`, and return once it serves. Raises RuntimeError with the end of
        its log.
        """
        if self._process is not None:
            raise RuntimeError("the server is running already")
        data = self._folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        command, environment = self.command(data)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait_until_ready(timeout_s)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Send SIGKILL, as in a crash. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()  # nobody needs what it has, and SeaweedFS takes 2 to 10 s to stop

    def _wait_until_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            assert self._process is not None
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self._process.returncode}:\n{self._log_tail()}")
            try:
                status = self.probe()
            except (OSError, http.client.HTTPException) as error:
                status = repr(error)
            if self.is_ready(status):
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} does not serve ({status}):\n{self._log_tail()}")
            time.sleep(0.1)

    def _log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]
