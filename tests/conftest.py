"""Fixtures for the tests of every folder: a way to run coroutines, and real servers."""

import asyncio
import os
import signal
import tempfile
import uuid
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import fsspec.config
import pytest
from hypothesis import HealthCheck, settings

from tests.azurite import AzuriteServer
from tests.file_servers import FileServer
from tests.s3_servers.servers import SERVERS, S3Server, chosen
from tests.stores.gcs_peer import GcsPeer
from tests.sweep.trainers import Trainers

# Hypothesis must find the same examples every day: a pure test that fails by chance helps nobody.
settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("ci")

# The slowest files, slowest first: started last, one of them would leave a core idle.
LONGEST = (
    "stores/test_conformance.py",
    "watch/test_nodes.py",
    "runners/test_runner.py",
    "watch/test_watch.py",
    "faults/test_file_servers.py",
    "torch_side/test_dcp_ranks.py",
    "faults/test_s3.py",
    "faults/test_hostile_network.py",
    "model/test_mutants.py",
    "faults/test_azure.py",
    "simulation/test_simulation.py",
    "integrations/test_transformers.py",
    "test_demo.py",
    "dashboard/test_play.py",
    "torch_side/test_places.py",
    "faults/test_syscalls.py",
    "events/test_events.py",
    "faults/test_ranks.py",
    "integrations/test_lightning.py",
    "trainer/test_uploader.py",
    "faults/test_gcs.py",
    "stores/test_gcs.py",
    "faults/test_kill.py",
    "restore/test_interrupted.py",
    "test_dev.py",
    "cli/test_cli.py",
    "torch_side/test_unshard.py",
    "faults/test_journal_files.py",
    "torch_side/test_dumping.py",
    "restore/test_lease.py",
    "trainer/test_publishing.py",
    "test_readme.py",
    "saver/test_forgotten.py",
    "watch/test_added.py",
    "restore/test_small_files.py",
    "simulation/test_simulated_mutants.py",
    "stores/test_differential.py",
    "watch/test_trainers.py",
    "model/test_protocol_model.py",
    "watch/test_kill_nodes.py",
    "saver/test_ranks.py",
    "torch_side/test_safe_load.py",
    "saver/test_kill.py",
    "page/test_server.py",
    "sweep/test_drain.py",
    "trainer/test_kinds.py",
    "monitor/test_metrics.py",
)
TESTS = Path(__file__).resolve().parent

# Tests that run in parallel would judge the link by each other's transfers (`ckpt_async.transfer.link`).
_link = tempfile.TemporaryDirectory(
    prefix="ckpt-link-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
)
os.environ["XDG_RUNTIME_DIR"] = _link.name

# SeaweedFS, which is written in Go, takes a quarter less CPU on one core.
os.environ["GOMAXPROCS"] = "1"

# Background processes ignore SIGINT, and their children inherit that: tests of Ctrl-C would wait forever.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fault",
        action="append",
        metavar="ID",
        help="run only the tests of this fault of docs/reliability.md",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if wanted := config.getoption("--fault"):

        def is_wanted(item: pytest.Item) -> bool:
            return any({*wanted}.intersection(mark.args) for mark in item.iter_markers("fault"))

        config.hook.pytest_deselected(items=[each for each in items if not is_wanted(each)])
        items[:] = [each for each in items if is_wanted(each)]

    def place(item: pytest.Item) -> int:
        name = item.path.relative_to(TESTS).as_posix()
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=place)


T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]


@pytest.fixture
def run() -> Run[Any]:
    """Run a coroutine in a loop of its own; one that hangs fails after a minute."""

    def run(coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(asyncio.wait_for(coroutine, 60))

    return run


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One S3 server for the whole session: SeaweedFS, unless `./dev stores` runs another. A test that kills a server
    starts one of its own.
    """
    with SERVERS[chosen()](tmp_path_factory.mktemp("s3-server")) as server:
        yield server


@pytest.fixture
def s3_url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix in the session's S3 server that no other test uses. The environment points to the server."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3_server.bucket}/test-{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzuriteServer]:
    """One Azurite for the whole session."""
    with AzuriteServer(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture
def azure_url(azurite: AzuriteServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix in the session's Azurite that no other test uses. The environment points to the server."""
    for name, value in azurite.environment().items():
        monkeypatch.setenv(name, value)
    return f"az://{azurite.container}/test-{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def gcs_peer() -> Iterator[GcsPeer]:
    """One peer for all tests that do not tamper with it; each test has a prefix of its own."""
    with GcsPeer() as peer:
        yield peer


@pytest.fixture
def gcs_url(gcs_peer: GcsPeer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix in the session's Google Cloud Storage peer that no other test uses. The environment points to it."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_peer.url)
    return f"gs://{gcs_peer.bucket}/test-{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def sftp_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FileServer]:
    """One SFTP server for the whole session, as with SeaweedFS."""
    with FileServer("sftp", tmp_path_factory.mktemp("sftp")) as server:
        yield server


@pytest.fixture(scope="session")
def webdav_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FileServer]:
    with FileServer("webdav", tmp_path_factory.mktemp("webdav")) as server:
        yield server


@pytest.fixture
def sftp_url(sftp_server: FileServer, monkeypatch: pytest.MonkeyPatch) -> str:
    return use_file_server(sftp_server, monkeypatch)


@pytest.fixture
def webdav_url(webdav_server: FileServer, monkeypatch: pytest.MonkeyPatch) -> str:
    return use_file_server(webdav_server, monkeypatch)


def use_file_server(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a folder in the server that no other test uses. fsspec's configuration points to the server,
    in this process and in its children.
    """
    for name, options in server.configuration().items():
        monkeypatch.setitem(fsspec.config.conf, name, options)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return f"{server.url}/test-{uuid.uuid4().hex}"


@pytest.fixture
def trainers() -> Iterator[Trainers]:
    """Trainers, none of which outlives the test."""
    made = Trainers()
    yield made
    made.kill()
