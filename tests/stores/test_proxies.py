"""Every store behind an HTTP proxy: TLS through a tunnel, all else as requests that it forwards."""

import contextlib
import socket
import socketserver
import ssl
import threading
import uuid
from base64 import b64encode

import pytest
import trustme

from ckpt_async.errors import StoreError
from ckpt_async.stores import StoreOptions, open_store
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import BytesBody, SmallGet, SmallPut
from tests.faults.proxy import FaultProxy
from tests.stores.azure_peer import AzurePeer
from tests.stores.bodies import ReusingBody, put

MIB = 1 << 20
AUTHORITY = b"Basic " + b64encode(b"me:secret word")


class ForwardProxy(socketserver.ThreadingTCPServer):
    """Forwards what comes from those it knows, one request per connection, and keeps the first line of each."""

    daemon_threads = allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Forwarding)
        self.lines: list[str] = []
        self.url = f"http://me:secret%20word@127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class _Forwarding(socketserver.StreamRequestHandler):
    def handle(self):
        with contextlib.suppress(ConnectionError):
            self._forward()

    def _forward(self):
        first, *lines = iter(self.rfile.readline, b"\r\n")
        self.server.lines.append(first.decode())
        told = dict(line.rstrip().split(b": ", 1) for line in lines)
        if {name.lower(): value for name, value in told.items()}.get(b"proxy-authorization") != AUTHORITY:
            self.wfile.write(b"HTTP/1.1 407 Who are you\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return
        method, target, version = first.split()
        if method == b"CONNECT":
            host, _, port = target.rpartition(b":")
            head = b""
        else:
            origin, _, path = target.removeprefix(b"http://").partition(b"/")
            host, _, port = origin.rpartition(b":")
            kept = [each for each in lines if not each.lower().startswith((b"proxy-", b"connection:"))]
            head = b"%s /%s %s\r\n" % (method, path, version) + b"".join(kept) + b"Connection: close\r\n\r\n"
        with socket.create_connection((host.decode(), int(port))) as there:
            if head:
                there.sendall(head)
            else:
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            threading.Thread(target=self._pump, args=(self.rfile, there), daemon=True).start()
            while data := there.recv(1 << 16):
                if head:  # of the answer
                    data, head = data.replace(b"\r\n", b"\r\nConnection: close\r\n", 1), b""
                self.wfile.write(data)

    @staticmethod
    def _pump(source, there):
        with contextlib.suppress(OSError, ValueError):
            while data := source.read1(1 << 16):
                there.sendall(data)
            there.shutdown(socket.SHUT_WR)


@pytest.fixture
def proxy(monkeypatch):
    with ForwardProxy() as running:
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, running.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield running


@pytest.fixture(params=["s3", "s3 over TLS", "gs", "az"])
def store(request, proxy, tmp_path, monkeypatch):
    with contextlib.ExitStack() as running:
        match request.param:
            case "s3":
                yield open_store(f"{request.getfixturevalue('s3_url')}/run")
            case "s3 over TLS":
                authority, tls = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                authority.issue_cert("127.0.0.1").configure_cert(tls)
                authority.cert_pem.write_to_path(tmp_path / "ca.pem")
                monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
                url, server = request.getfixturevalue("s3_url"), request.getfixturevalue("s3_server")
                there = running.enter_context(FaultProxy(server.url, tls=tls))
                yield open_store(f"{url}/run", StoreOptions(endpoint_url=there.url))
            case "gs":
                peer = request.getfixturevalue("gcs_peer")
                yield open_store(
                    f"gs://{peer.bucket}/{uuid.uuid4().hex}", StoreOptions(endpoint_url=peer.url)
                )
            case "az":
                peer = running.enter_context(AzurePeer())
                yield open_store("az://ckpt/run", env=peer.environment())


def test_all_requests_go_through_the_proxy(store, proxy, run):
    data = bytes(range(256)) * (6 * MIB // 256)

    async def body():
        await store.open()
        try:
            algorithm = store.capabilities.checksum_algorithm
            await put(store, "a", b"hello")
            whole = checksum_of(data, algorithm)
            upload_id = await store.create_multipart("b")
            part = await store.put_part("b", upload_id, 1, ReusingBody(data, 1 << 16), whole)
            await store.complete_multipart("b", upload_id, [part], whole, len(data))
            await store.put_many([SmallPut("c", b"x", checksum_of(b"x", algorithm))], lambda _: None)
            received, small = bytearray(), {}
            await store.get_range("b", 1, len(data) - 1, received.extend)
            await store.get_many([SmallGet("c", 1)], lambda get, got: small.update({get.key: bytes(got)}))
            assert (received, small) == (data[1:], {"c": b"x"})
            assert (await store.get("a", max_size_bytes=5))[0] == b"hello"
            assert [each.key for each in (await store.list("")).objects] == ["a", "b", "c"]
            await store.delete(["a", "b", "c"])
        finally:
            await store.close()

    run(body())
    methods = [line.split()[0] for line in proxy.lines]
    if any(line.startswith("CONNECT") for line in proxy.lines):
        assert set(methods) == {"CONNECT"}
    else:
        assert {"GET", "PUT"} <= set(methods)
        assert all(line.split()[1].startswith("http://127.0.0.1:") for line in proxy.lines)


def test_a_proxy_that_does_not_know_us_is_named_without_the_password(s3_url, proxy, run, monkeypatch):
    """The first bytes that a trainer sends may be the first that the proxy refuses."""

    async def body() -> str:
        store = open_store(f"{s3_url}/run", StoreOptions(endpoint_url="https://store.example"))
        try:
            await store.open(is_read_only=True)
            monkeypatch.setenv("https_proxy", proxy.url.replace("secret", "hidden"))
            with pytest.raises(StoreError) as raised:
                await store.get_range("a", 0, 1, lambda _: None)
        finally:
            await store.close()
        return str(raised.value)

    told = run(body())
    assert "the proxy 127.0.0.1 answered 407" in told
    assert "hidden" not in told


def test_a_body_is_what_the_store_compares_behind_a_proxy(store, run):
    """A wrong checksum is refused there, too."""

    async def body():
        await store.open()
        try:
            wrong = checksum_of(b"other", store.capabilities.checksum_algorithm)
            with pytest.raises(StoreError):
                await store.put("a", BytesBody(b"hello"), wrong)
        finally:
            await store.close()

    run(body())
