"""Fixtures for all plays: a real S3 server, a unique prefix on it, and no process that outlives the play."""

import uuid
from collections.abc import Iterator

import pytest

from tests.compat.play import Job
from tests.seaweed import SeaweedServer


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    with SeaweedServer(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def s3_url(s3_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix that no other play uses; the environment points to the server, here and in the processes started."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3_server.bucket}/play-{uuid.uuid4().hex}"


@pytest.fixture
def job(tmp_path_factory: pytest.TempPathFactory, s3_url: str) -> Iterator[Job]:
    """A job whose processes do not outlive the play."""
    job = Job(tmp_path_factory.mktemp("job"), s3_url)
    yield job
    job.kill()
