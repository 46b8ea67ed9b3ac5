"""Which certificates are trusted: none of another host, and those of a file that is replaced, or that Python 3.13 would
refuse.
"""

import contextlib
import ssl
from functools import partial

import pytest
import trustme

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores import StoreOptions, open_store
from ckpt_async.stores.http.downloads import Downloads
from ckpt_async.stores.http.messages import Response
from ckpt_async.stores.http.offload import Offload
from ckpt_async.stores.http.small_uploads import SmallRequest, SmallUploads
from ckpt_async.stores.http.uploads import Uploads
from ckpt_async.stores.interface import BytesBody
from tests.stores.bodies import put
from tests.stores.lax_authority import LaxAuthority
from tests.stores.peer import Peer, answer
from tests.stores.s3_calls import credentials as given_credentials  # noqa: F401  a fixture


async def get(downloads: Downloads, url: str) -> Response:
    return await downloads.get_range(url, 0, 5, lambda _: None, lambda _: None)


async def put_body(uploads: Uploads, url: str) -> Response:
    return await uploads.put(url, {"Content-Length": "4"}, BytesBody(b"body"))


async def put_many(uploads: SmallUploads, url: str) -> Response:
    puts = iter([SmallRequest("key", b"PUT / HTTP/1.1\r\nContent-Length: 4\r\n\r\n", b"body")])
    answers: list[Response] = []
    await uploads.put_many(url, puts, lambda _, response: answers.append(response))
    return answers[0]


WAYS = {
    "Downloads": (Downloads, get),
    "Uploads": (Uploads, put_body),
    "SmallUploads": (SmallUploads, put_many),
}


@contextlib.asynccontextmanager
async def server_called(name: str, authority: trustme.CA):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(name).configure_cert(context)
    peer = Peer(lambda _: answer(200, headers={"ETag": "e"}, body=b"hello"), tls=context)
    async with peer.serve() as url:
        yield peer, url


@pytest.mark.fault("F73")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "is_right"), [("127.0.0.1", True), ("other.example", False)])
def test_a_wrong_host_certificate_is_rejected_by_our_connections(
    run, authority, ca_file, way, name, is_right
):
    kind, request = WAYS[way]

    async def body():
        async with server_called(name, authority) as (peer, url):
            connections = kind(max_connections=1, connect_timeout_s=5, read_timeout_s=5, ca_file=ca_file)
            with contextlib.closing(connections):
                if is_right:
                    assert (await request(connections, url)).status == 200
                else:
                    with pytest.raises(ssl.SSLCertVerificationError):
                        await request(connections, url)
            assert len(peer.requests) == is_right

    run(body())


@pytest.mark.fault("F73")
def test_a_wrong_host_certificate_is_rejected_by_the_store(run, authority, ca_file, monkeypatch):
    monkeypatch.setenv("AWS_CA_BUNDLE", ca_file)

    async def body():
        async with server_called("other.example", authority) as (peer, url):
            store = open_store("s3://bucket/run", StoreOptions(endpoint_url=url))
            await store.open(is_read_only=True)
            for request in (
                put(store, "a", b"1"),
                store.get("a", max_size_bytes=9),
                store.get_range("a", 0, 5, lambda _: None),
                store.list(""),
            ):
                with pytest.raises(StoreError, match="certificate") as raised:
                    await request
                assert raised.value.reason is FailureReason.TRANSIENT
            await store.close()
            assert not peer.requests

    run(body())


@pytest.mark.fault("F89")
def test_a_bundle_that_is_replaced_is_read_again(run, authority, tmp_path, monkeypatch):
    """After a rotation of certificates, all clients of a store must carry on without a restart."""
    bundle, other = tmp_path / "ca.pem", trustme.CA()
    other.cert_pem.write_to_path(str(bundle))
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))

    async def body():
        async with server_called("127.0.0.1", authority) as (peer, url):
            store = open_store("s3://bucket/run", StoreOptions(endpoint_url=url))
            await store.open(is_read_only=True)
            requests = (
                lambda: store.get("a", max_size_bytes=9),
                lambda: put(store, "a", b"1"),
                lambda: put(store, "a", b"1"),
            )
            for request in requests:
                with pytest.raises(StoreError, match="certificate"):
                    await request()
            authority.cert_pem.write_to_path(str(bundle), append=True)
            for request in requests:
                await request()
            for _ in range(5):
                await store.get("a", max_size_bytes=9)
            assert len(store._session.client._endpoint.http_session._sessions) == 1
            await store.close()
            assert len(peer.requests) == 8

    run(body())


@pytest.mark.fault("F89")
@pytest.mark.parametrize("kind", ["gs", "az"])
def test_a_replaced_bundle_is_read_again_by_small_requests(run, authority, tmp_path, monkeypatch, kind):
    """Small requests are made by an HTTP client that is kept between requests."""
    bundle, other = tmp_path / "ca.pem", trustme.CA()
    other.cert_pem.write_to_path(str(bundle))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(bundle))
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sig=x")

    async def body():
        async with server_called("127.0.0.1", authority) as (peer, url):
            if kind == "gs":
                session = open_store("gs://bucket/run", StoreOptions(endpoint_url=url))._session
                session.is_tls = False  # looking for credentials would use the network
                await session.open(is_read_only=True)
                asking = partial(session.request, "get", "a", "GET", f"{url}/a")
            else:
                session = open_store("az://bucket/run", StoreOptions(endpoint_url=f"{url}/account"))._session
                await session.open(is_read_only=True)
                asking = partial(session.call, "HEAD", "head", "a")
            with pytest.raises(StoreError, match="certificate"):
                await asking()
            assert not peer.requests
            authority.cert_pem.write_to_path(str(bundle), append=True)
            with contextlib.suppress(StoreError):  # its answer does not matter
                await asking()
            assert len(peer.requests) == 1
            await session.close()

    run(body())


@pytest.fixture
def lax(tmp_path) -> tuple[ssl.SSLContext, str]:
    authority = LaxAuthority()
    return authority.context(tmp_path), authority.write_to(tmp_path)


@pytest.mark.parametrize("way", [*WAYS, "Offload"])
def test_an_authority_without_key_usage_is_trusted_by_our_connections(run, lax, way):
    """As Python 3.12 and earlier, and the AWS SDK with any Python, do."""
    kind, request = WAYS.get(way, (Downloads, get))
    context, ca_file = lax

    async def body():
        offload = Offload(1) if way == "Offload" else Offload(0)
        if way == "Offload":
            offload.start()
        more = {"offload": offload} if kind is Downloads else {}
        peer = Peer(lambda _: answer(200, headers={"ETag": "e"}, body=b"hello"), tls=context)
        async with peer.serve() as url:
            connections = kind(
                max_connections=1, connect_timeout_s=5, read_timeout_s=5, ca_file=ca_file, **more
            )
            with contextlib.closing(connections):
                assert (await request(connections, url)).status == 200
                assert offload.is_running is (way == "Offload")

    run(body())


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "https"])
def test_an_authority_without_key_usage_is_trusted_by_the_stores(run, lax, monkeypatch, scheme):
    context, ca_file = lax
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.setenv(name, ca_file)
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sig=x")

    async def body():
        peer = Peer(lambda _: answer(200, headers={"ETag": "e"}, body=b"hello"), tls=context)
        async with peer.serve() as url:
            if scheme == "gs":
                session = open_store("gs://bucket/run", StoreOptions(endpoint_url=url))._session
                session.is_tls = False  # looking for credentials would use the network
                await session.open(is_read_only=True)
                await session.request("get", "a", "GET", f"{url}/a")
                await session.close()
            else:
                endpoint = {"s3": url, "az": f"{url}/account"}.get(scheme)
                address = f"{url}/run" if scheme == "https" else f"{scheme}://bucket/run"
                store = open_store(address, StoreOptions(endpoint_url=endpoint))
                await store.open(is_read_only=True)
                with contextlib.suppress(StoreError):  # its answer does not matter
                    await store.get("a", max_size_bytes=9)
                await store.close()
            assert peer.requests

    run(body())
