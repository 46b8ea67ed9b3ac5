"""Servers that mean harm: bodies without end, and redirects that would take credentials elsewhere."""

import contextlib
import socket
import ssl

import pytest
import trustme

from ckpt_async.errors import StoreError
from ckpt_async.stores import StoreOptions, open_store
from tests.stores.http_server import Server, request_of
from tests.stores.peer import Peer, answer
from tests.stores.s3_calls import CALLS, credentials

__all__ = ["credentials"]

MIB = 1 << 20
# The old code would read for ever; this much shows it.
MOST_SENT_BYTES = 256 * MIB
LISTING = b"<ListBucketResult><Prefix>run/</Prefix><IsTruncated>false</IsTruncated></ListBucketResult>"


@contextlib.contextmanager
def endless(status: bytes):
    """Serve a body without end, and yield the URL and how much of it was sent."""
    sent_bytes = [0]

    def talk(near: socket.socket) -> None:
        if request_of(near).startswith(b"HEAD"):
            near.sendall(b"HTTP/1.1 200 X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return
        head = b'HTTP/1.1 %b X\r\nETag: "a"\r\nx-ms-request-id: 1\r\nDate: Sat, 21 Nov 2026 04:00:00 GMT\r\n'
        near.sendall(head % status + b"Transfer-Encoding: chunked\r\n\r\n")
        while sent_bytes[0] < MOST_SENT_BYTES:
            near.sendall(b"10000\r\n" + bytes(65536) + b"\r\n")
            sent_bytes[0] += 65536

    with Server(talk) as server:
        yield f"http://127.0.0.1:{server.port}", sent_bytes


@pytest.mark.fault("F140")
@pytest.mark.parametrize("status", [b"200", b"404"])
@pytest.mark.parametrize("operation", ["list", "get"])
@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run", "az://container/run", "http"])
def test_a_body_without_end_is_an_error(run, url, operation, status):
    """Of a server's errors, listings and records only as much is read as can be right."""
    if url == "http" and operation == "list":
        pytest.skip("nothing can be listed there")
    with endless(status) as (endpoint, sent_bytes):

        async def body():
            env = {"AZURE_STORAGE_SAS_TOKEN": "sig=x"}
            if url == "http":
                store = open_store(f"{endpoint}/run")
            else:
                endpoint_url = f"{endpoint}/account" if url.startswith("az:") else endpoint
                store = open_store(url, StoreOptions(endpoint_url=endpoint_url), env=env)
            await store.open(is_read_only=True)
            calls = {
                "list": lambda: store.list(""),
                "get": lambda: store.get("a", max_size_bytes=1000),
            }
            try:
                with pytest.raises(StoreError):
                    await calls[operation]()
            finally:
                await store.close()

        run(body())
    assert sent_bytes[0] < 64 * MIB


@pytest.mark.fault("F141")
@pytest.mark.parametrize("status", [301, 302, 307, 308])
@pytest.mark.parametrize("call", CALLS)
def test_no_redirect_takes_a_session_token_to_another_host(run, monkeypatch, call, status):
    """Whoever gets it can use it for as long as it is valid, once the keys are known too."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "TOKEN")

    async def body():
        second = Peer(lambda _: answer(404))
        async with second.serve() as there:
            headers = {"Location": f"{there}/there", "x-amz-bucket-region": "eu-west-1"}
            first = Peer(lambda _: answer(status, headers=headers))
            async with first.serve() as here:
                store = open_store("s3://bucket/run", StoreOptions(endpoint_url=here))
                await store.open(is_read_only=True)
                try:
                    with pytest.raises(StoreError):
                        await CALLS[call](store)
                finally:
                    await store.close()
        assert first.requests
        assert not second.requests

    run(body())


@pytest.mark.fault("F141")
def test_a_bucket_of_another_region_is_asked_at_that_regions_own_host(run, monkeypatch, tmp_path):
    """As AWS answers: the SDK derives the host from the region, and signs for it. The Location counts for nothing."""
    authority, seen = trustme.CA(), []
    hosts = ["bucket.s3.amazonaws.com", "bucket.s3.eu-west-1.amazonaws.com"]
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(*hosts, "elsewhere.example").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    redirect = {"Location": "https://elsewhere.example/", "x-amz-bucket-region": "eu-west-1"}

    def tunnel(near: socket.socket) -> None:
        host = request_of(near).split()[1].decode()
        near.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
        with context.wrap_socket(near, server_side=True) as encrypted:
            while True:
                seen.append((host, request_of(encrypted).decode()))
                is_there = host.startswith(hosts[1])
                encrypted.sendall(
                    answer(200, body=LISTING) if is_there else answer(307, "TemporaryRedirect", redirect)
                )

    with Server(tunnel) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))

        async def body():
            store = open_store("s3://bucket/run")
            await store.open(is_read_only=True)
            try:
                assert not (await store.list("")).objects
            finally:
                await store.close()

        run(body())
    assert [host for host, _ in seen] == [f"{host}:443" for host in hosts]
    for region, (_, head) in zip(("us-east-1", "eu-west-1"), seen, strict=True):
        assert f"/{region}/s3/aws4_request" in head
