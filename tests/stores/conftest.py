"""What all tests of stores have: a time zone that is not UTC; a certificate authority, and a certificate for this
machine.
"""

import ssl
import time
from collections.abc import Iterator

import pytest
import trustme

from tests.stores.gcs_servers import FakeGcsServer


@pytest.fixture(scope="package", autouse=True)
def _far_from_utc() -> Iterator[None]:
    """A time without a zone that is taken for this machine's is hours off, as on most users' machines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "XST-5:45")
        time.tzset()
        yield
    time.tzset()


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
