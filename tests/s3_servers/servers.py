"""S3 servers other than SeaweedFS, each on loopback, and their own faults by the names of the tests that show them."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, Protocol, Self

import botocore.config
import botocore.session

from tests.environments import environment
from tests.seaweed import SeaweedServer
from tests.server_process import ServerProcess, is_free

HERE = Path(__file__).resolve().parent
HOST, ACCESS_KEY, SECRET_KEY, BUCKET = "127.0.0.1", "ckpt-demo", "ckpt-demo-secret", "ckpt"
# Above the ports of tests/azurite.py, below Linux's for clients.
_PORTS = range(32_000, 32_700)


class S3Server(Protocol):
    """A running server with one bucket."""

    bucket: str

    @property
    def url(self) -> str: ...

    def environment(self) -> dict[str, str]:
        """The variables that point an S3 client to this server."""
        ...


class _Loopback:
    """What all servers here have in common."""

    bucket = BUCKET
    _port: int

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def create_bucket(self) -> None:
        config = botocore.config.Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"})
        client = botocore.session.get_session().create_client(
            "s3",
            "us-east-1",
            endpoint_url=self.url,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=config,
        )
        client.create_bucket(Bucket=BUCKET)


class _FromPackage(_Loopback, ServerProcess):
    """A server from a Python package, in an environment of its own."""

    def __init__(self, folder: Path | str) -> None:
        super().__init__(folder)
        self._port = free_ports(1)[0]
        self._python = environment("s3-servers", self.name, HERE / f"{self.name}.txt")

    def probe(self) -> str:
        try:
            self.create_bucket()
        except Exception as error:
            return repr(error)
        return "ready"

    def is_ready(self, status: str) -> bool:
        return status == "ready"


class MotoServer(_FromPackage):
    name = "moto"

    def command(self, data: Path) -> tuple[list[str], Mapping[str, str]]:
        program = self._python.with_name("moto_server")
        return [str(program), "-H", HOST, "-p", str(self._port)], os.environ


class LocalstackServer(_FromPackage):
    name = "localstack"

    def command(self, data: Path) -> tuple[list[str], Mapping[str, str]]:
        told = {
            "GATEWAY_LISTEN": f"{HOST}:{self._port}",
            "SERVICES": "s3",
            "LOCALSTACK_VOLUME_DIR": str(data),
            "SKIP_SSL_CERT_DOWNLOAD": "1",
            "DISABLE_EVENTS": "1",
        }
        return [str(self._python), "-m", "localstack.runtime.main"], {**os.environ, **told}


class CephServer(_Loopback):
    """Ceph's RADOS Gateway with a monitor and an object store in memory. Needs root and Debian's packages
    radosgw, ceph-mon, ceph-osd and ceph-common.
    """

    PROGRAMS: ClassVar = ("radosgw", "radosgw-admin", "ceph-mon", "ceph-osd", "ceph", "monmaptool")

    def __init__(self, folder: Path | str) -> None:
        if missing := [name for name in self.PROGRAMS if shutil.which(name) is None]:
            packages = "radosgw ceph-mon ceph-osd ceph-common"
            raise FileNotFoundError(f"no {missing[0]}: apt-get install --no-install-recommends {packages}")
        if os.geteuid() != 0:
            raise PermissionError("Ceph's daemons are started as root")
        self._folder = Path(folder).resolve()
        self._port, self._monitor_port = free_ports(2)
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to all of them. Idempotent."""
        while self._running:
            process = self._running.pop()
            process.kill()
            process.wait()

    def _start(self) -> None:
        fsid, monitor = str(uuid.uuid4()), f"[v1:{HOST}:{self._monitor_port}]"
        for name in ("mon", "osd", "rgw", "log"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        text = (HERE / "ceph.conf").read_text()
        self._config.write_text(
            text.format(folder=self._folder, fsid=fsid, monitor=monitor[:-1] + "/0]", port=self._port)
        )
        keyring, map_ = str(self._folder / "keyring"), str(self._folder / "monmap")
        allow = ("--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *")
        self._run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", *allow[:3])
        self._run("ceph-authtool", keyring, "--gen-key", "-n", "client.admin", *allow)
        self._run("monmaptool", "--create", "--clobber", "--fsid", fsid, "--addv", "a", monitor, map_)
        self._run("ceph-mon", "-i", "a", "--mkfs", "--monmap", map_, "--keyring", keyring)
        self._daemon("ceph-mon", "-i", "a")
        self._run("ceph", "mon", "stat")
        self._run("ceph-osd", "-i", "0", "--mkfs")  # ignores --osd-uuid: the one that it made is taken
        self._run("ceph", "osd", "new", (self._folder / "osd/fsid").read_text().strip(), "0")
        self._run("ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=localhost")
        self._daemon("ceph-osd", "-i", "0")
        self._wait(lambda: "1 up" in self._run("ceph", "osd", "stat"))
        self._daemon("radosgw", "-n", "client.rgw")
        self._wait(lambda: bool(urllib.request.urlopen(self.url, timeout=5).read()))
        keys = (f"--access-key={ACCESS_KEY}", f"--secret={SECRET_KEY}")
        self._run("radosgw-admin", "user", "create", "--uid=ckpt", "--display-name=ckpt", *keys)
        self.create_bucket()

    @property
    def _config(self) -> Path:
        return self._folder / "ceph.conf"

    def _run(self, program: str, *args: str) -> str:
        command = [program, "-c", str(self._config), *args]
        if program in ("ceph-authtool", "monmaptool"):
            del command[1:3]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
        return done.stdout

    def _daemon(self, program: str, *args: str) -> None:
        with (self._folder / f"{program}.log").open("ab") as log:
            command = [program, "-c", str(self._config), *args, "-f"]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._running.append(process)

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        until = time.monotonic() + 180
        while True:
            with contextlib.suppress(OSError):
                if is_ready():
                    return
            if time.monotonic() > until:
                raise RuntimeError(f"Ceph does not serve: see the logs in {self._folder}")
            time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """Return random ports, so that parallel test sessions rarely collide."""
    found = (port for port in random.sample(_PORTS, len(_PORTS)) if is_free(HOST, port))
    return [next(found) for _ in range(count)]


SERVERS: Mapping[str, Callable[[Path], contextlib.AbstractContextManager[S3Server]]] = {
    "seaweedfs": SeaweedServer,
    "ceph": CephServer,
    "localstack": LocalstackServer,
    "moto": MotoServer,
}

_MOTO_COPIES = "a copy has a CRC32 where its CRC64NVME should be, so it cannot be read"
_COPIES = "copies ignore the condition on their source"
# The tests that a server fails by its own fault, and what it does. They must fail: one that passes is struck out.
FAULTS: Mapping[str, Mapping[str, str]] = {
    "seaweedfs": {},
    "ceph": {
        "test_an_object_that_has_changed_or_is_gone_is_not_copied": _COPIES,
        "test_a_part_of_another_object_that_has_changed_is_refused": _COPIES,
        "test_aborting_an_upload": "completing an aborted upload answers 500, not 404",
    },
    "localstack": {
        "test_wrong_checksum_is_refused": "after an overwrite that it has refused, reading the object hangs",
        "test_listing_is_in_key_order": "a listing from the middle leaves out keys beyond ASCII",
    },
    "moto": {
        "test_a_copy_has_the_bytes_and_the_checksum_of_its_source": _MOTO_COPIES,
        "test_a_copy_replaces_what_is_there_and_nothing_else": _MOTO_COPIES,
        "test_a_copy_outlives_its_source": _MOTO_COPIES,
        "test_an_object_that_has_changed_or_is_gone_is_not_copied": _COPIES,
        "test_a_part_of_another_object_that_has_changed_is_refused": _COPIES,
        "test_aborting_an_upload": "a part of an aborted upload answers 500, and completing it succeeds",
        "test_unfinished_uploads_are_listed_below_a_prefix": "unfinished uploads are listed with a fixed date",
    },
}


def chosen() -> str:
    """Return the server that the tests of S3 run against."""
    return os.environ.get("CKPT_TESTS_S3_SERVER", "seaweedfs")
