"""Runs in a folder and in S3, child processes, injected faults, and a relay that counts bytes."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import _nursery, nursery, proxy, seed  # noqa: F401  fixtures
from tests.restore.relay import Relay
from tests.restore.runs import Run
from tests.seaweed import SeaweedServer


@pytest.fixture
def run_(tmp_path: Path) -> Run:
    """A run in a folder."""
    return Run(f"file://{tmp_path / 'remote'}")


@pytest.fixture(params=["file", "s3"])
def any_run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """A run in a folder, and the same in S3."""
    if request.param == "file":
        return Run(f"file://{tmp_path / 'remote'}")
    return Run(request.getfixturevalue("s3_url"))


@pytest.fixture
def relay(s3_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relay]:
    """A relay in front of the session's server; this test's environment points to the relay instead of the server."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    with Relay(s3_server.url) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", relay.url)
        yield relay


@pytest.fixture
def counted_run(s3_server: SeaweedServer, relay: Relay) -> Run:
    """A run in S3 behind the relay."""
    return Run(f"s3://{s3_server.bucket}/test-{uuid.uuid4().hex}")
