"""A real OpenSSH server on this machine, run by the user who runs the tests: Debian's `openssh-server`, or any on the
PATH.

Standard library only. It needs no root privileges, listens on the loopback address, and accepts one key, which is
made for it.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

_SEPARATED = Path("/run/sshd")  # where sshd, if run by root, confines clients that have not logged in yet


def find_sshd() -> str | None:
    """Return the path of sshd, which is not on most users' PATH."""
    return shutil.which("sshd", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


class OpensshServer:
    """Serves SFTP from `folder/served`. A context manager; `kill` and `start` keep the port."""

    def __init__(self, sshd: str, folder: Path) -> None:
        self._sshd, self.folder = sshd, folder
        self.served = folder / "served"
        self._key, self._host_key = folder / "key", folder / "host_key"
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]

    @property
    def url(self) -> str:
        return f"sftp://127.0.0.1:{self._port}{self.served}"

    def environment(self) -> dict[str, str]:
        return {"FSSPEC_SFTP_USERNAME": getpass.getuser(), "FSSPEC_SFTP_KEY_FILENAME": str(self._key)}

    def configuration(self) -> dict[str, dict[str, object]]:
        """The same settings in the form of `fsspec.config.conf`, for this process."""
        return {"sftp": {"username": getpass.getuser(), "key_filename": str(self._key)}}

    def __enter__(self) -> Self:
        self.served.mkdir(parents=True)
        for key in (self._key, self._host_key):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        lines = {
            "ListenAddress": f"127.0.0.1:{self._port}",
            "HostKey": self._host_key,
            "AuthorizedKeysFile": self._key.with_suffix(".pub"),
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "UsePAM": "no",
            "StrictModes": "no",
            "PidFile": "none",
            "MaxStartups": "100",
            "Subsystem": "sftp internal-sftp",
        }
        text = "".join(f"{name} {value}\n" for name, value in lines.items())
        (self.folder / "sshd_config").write_text(text)
        if os.geteuid() == 0:
            _SEPARATED.mkdir(mode=0o755, exist_ok=True)
        self.start()
        return self

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._sshd, "-D", "-e", "-f", str(self.folder / "sshd_config")],
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 20
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"sshd has not started:\n{(self.folder / 'log').read_text()}")
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill the server and the process of every connection. The server's process group only has those that have
        not logged in yet, and the parents of the others.
        """
        if self._process is not None:
            for child in self._descendants(self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
            self._process = None

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _descendants(self, pid: int) -> list[int]:
        found: list[int] = []
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended by itself
            for task in Path(f"/proc/{pid}/task").iterdir():
                for child in map(int, (task / "children").read_text().split()):
                    found += [*self._descendants(child), child]
        return found

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=1) as connected:
                return connected.recv(4) == b"SSH-"
        except OSError:
            return False
