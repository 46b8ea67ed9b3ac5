"""Processes to kill, a server to break, and the seed that reproduces a test's random choices."""

import os
import random
from collections.abc import Iterator

import pytest

from tests.faults.processes import Nursery
from tests.faults.proxy import FaultProxy
from tests.seaweed import SeaweedServer


@pytest.fixture(scope="session")
def _nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("trainers")) as nursery:
        yield nursery


@pytest.fixture
def nursery(_nursery: Nursery) -> Iterator[Nursery]:
    """A place to start processes; all that a test has started are killed after it."""
    yield _nursery
    _nursery.kill_all()


@pytest.fixture
def seed() -> int:
    """The seed for everything random in a test, printed when the test fails. CKPT_ASYNC_SEED sets it."""
    number = int(os.environ.get("CKPT_ASYNC_SEED", random.SystemRandom().randrange(10**9)))
    print(f"CKPT_ASYNC_SEED={number}")
    return number


@pytest.fixture
def proxy(
    s3_server: SeaweedServer, s3_url: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> Iterator[FaultProxy]:
    """A proxy in front of the session's server; this test's environment points to the proxy instead of the server."""
    secret_key = s3_server.environment()["AWS_SECRET_ACCESS_KEY"]
    with FaultProxy(s3_server.url, seed, secret_key=secret_key) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        yield proxy
