"""Fixtures for tests of stores over TLS: a certificate authority, and a certificate for this machine."""

import ssl
from collections.abc import Iterator

import pytest
import trustme

from tests.stores.gcs_servers import FakeGcsServer


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="session")
def tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost", "127.0.0.1").configure_cert(context)
    return context


@pytest.fixture(scope="session")
def ca_file(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("authority") / "ca.pem"
    authority.cert_pem.write_to_path(path)
    return str(path)


@pytest.fixture(scope="session")
def fake_gcs() -> Iterator[FakeGcsServer]:
    with FakeGcsServer() as server:
        yield server
