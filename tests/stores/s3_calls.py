"""Every call of an S3Store, run against a scripted server."""

import contextlib

import pytest

from ckpt_async.stores import StoreOptions, open_store
from ckpt_async.stores.interface import BytesBody, Capabilities, StoredPart
from tests.stores.bodies import crc, put
from tests.stores.peer import Peer

MIB = 1 << 20


CAPABILITIES = Capabilities(conditional_put=True, multipart=True, checksum_algorithm="crc64nvme")


@pytest.fixture(autouse=True)
def credentials(monkeypatch, tmp_path):
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@contextlib.asynccontextmanager
async def connected(peer: Peer, **options):
    """Yield a store that talks to `peer` without having probed it."""
    async with peer.serve() as url:
        store = open_store("s3://bucket/run", StoreOptions(endpoint_url=url, **options))
        await store._session.open(is_read_only=True)
        store._capabilities = CAPABILITIES
        try:
            yield store
        finally:
            await store.close()


CALLS = {
    "put": lambda store: put(store, "a", b"hello"),
    "get": lambda store: store.get("a", max_size_bytes=9),
    "get_range": lambda store: store.get_range("a", 0, 5, lambda _: None),
    "head": lambda store: store.head("a"),
    "list": lambda store: store.list(""),
    "delete": lambda store: store.delete(["a"]),
    "delete_if": lambda store: store.delete_if("a", '"e"'),
    "copy": lambda store: store.copy("a", '"e"', "b"),
    "copy_part": lambda store: store.copy_part("a", '"e"', "b", "u", 1, 0, 5),
    "create_multipart": lambda store: store.create_multipart("a"),
    "put_part": lambda store: store.put_part("a", "u", 1, BytesBody(b"hello"), crc(b"hello")),
    "list_parts": lambda store: store.list_parts("a", "u"),
    "complete_multipart": lambda store: store.complete_multipart(
        "a", "u", [StoredPart(1, 5, '"e"', None)], crc(b"hello"), 5
    ),
    "abort_multipart": lambda store: store.abort_multipart("a", "u"),
    "list_multiparts": lambda store: store.list_multiparts(""),
}
