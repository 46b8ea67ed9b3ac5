"""Real file servers on this machine: SFTP by asyncssh, WebDAV by wsgidav, both from PyPI.

Can be run as programs: `python -m tests.file_servers sftp|webdav FOLDER`; the port is the first line of stdout.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

USER, PASSWORD = "ckpt", "ckpt-demo-secret"
ROOT = Path(__file__).resolve().parents[1]


class FileServer:
    """One server of `folder` in a process of its own, on a free port of the loopback address. Also a context manager.
    The contents of the folder survive `kill` and `start`, which listens on the same port again.
    """

    def __init__(self, kind: str, folder: Path | str) -> None:
        self._kind, self.folder = kind, Path(folder)
        self._port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        """The URL of a folder on the server that does not exist yet."""
        return f"sftp://127.0.0.1:{self._port}/runs" if self._kind == "sftp" else "webdav:///runs"

    def environment(self) -> dict[str, str]:
        """The variables that fsspec needs in other processes: it reads them when it is imported."""
        if self._kind == "sftp":
            return {"FSSPEC_SFTP_USERNAME": USER, "FSSPEC_SFTP_PASSWORD": PASSWORD}
        return {"FSSPEC_WEBDAV_BASE_URL": f"http://127.0.0.1:{self._port}/"}

    def configuration(self) -> dict[str, dict[str, object]]:
        """The same settings in the form of `fsspec.config.conf`, for this process."""
        found: dict[str, dict[str, object]] = {}
        for name, value in self.environment().items():
            _, scheme, option = name.lower().split("_", 2)
            found.setdefault(scheme, {})[option] = value
        return found

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests.file_servers", self._kind, str(self.folder), str(self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self._kind} server has not started: exit code {self._process.wait()}")
        self._port = int(line)

    def kill(self) -> None:
        """Kill the server with SIGKILL: whatever it was about to do is lost."""
        self._signal(signal.SIGKILL)

    def pause(self, *, is_paused: bool) -> None:
        """Keep the server from answering, while every connection stays open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP if is_paused else signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def serve_sftp(folder: str, port: int) -> None:
    import asyncssh

    class Login(asyncssh.SSHServer):
        def password_auth_supported(self) -> bool:
            return True

        def validate_password(self, username: str, password: str) -> bool:
            return (username, password) == (USER, PASSWORD)

    async def serve() -> None:
        server = await asyncssh.listen(
            "127.0.0.1",
            port,
            server_factory=Login,
            server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
            sftp_factory=lambda channel: asyncssh.SFTPServer(channel, chroot=folder.encode()),
        )
        print(server.get_port(), flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


def serve_webdav(folder: str, port: int) -> None:
    from cheroot import wsgi
    from wsgidav.wsgidav_app import WsgiDAVApp

    app = WsgiDAVApp(
        {
            "provider_mapping": {"/": folder},
            "simple_dc": {"user_mapping": {"*": True}},
            "logging": {"enable": False},
            "verbose": 0,
        }
    )
    server = wsgi.Server(("127.0.0.1", port), app, numthreads=16)
    server.prepare()
    print(server.bind_addr[1], flush=True)
    server.serve()


if __name__ == "__main__":
    _, kind, served, *rest = sys.argv
    {"sftp": serve_sftp, "webdav": serve_webdav}[kind](served, int(rest[0]) if rest else 0)
