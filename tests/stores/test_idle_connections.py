"""Giving up the connections that carry no request."""

from typing import Any
from urllib.parse import urlsplit

import pytest

from ckpt_async.stores import StoreOptions, open_store
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import BytesBody
from tests.restore.relay import Relay


@pytest.mark.parametrize(
    ("server", "url"), [("s3_server", "s3_url"), ("gcs_peer", "gcs_url"), ("azurite", "azure_url")]
)
def test_small_requests_need_new_connections_after_idle_ones_were_dropped(
    run: Any, request: pytest.FixtureRequest, server: str, url: str
) -> None:
    endpoint = urlsplit(request.getfixturevalue(server).url)

    async def body(relay: Relay) -> None:
        options = StoreOptions(endpoint_url=relay.url + endpoint.path)
        store = open_store(request.getfixturevalue(url), options)
        await store.open()
        try:
            record = BytesBody(b"a")
            checksum = checksum_of(record.data, store.capabilities.checksum_algorithm)
            for make_request in (lambda: store.list(""), lambda: store.put("a", record, checksum)):
                await make_request()
                before = relay.num_connections
                store.drop_idle()
                await make_request()
                assert relay.num_connections > before
        finally:
            await store.close()

    with Relay(f"http://{endpoint.netloc}") as relay:
        run(body(relay))
