"""Whose clock the ages of objects are told by: the store's, as it was when a listing began."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckpt_async.stores import StoreOptions, open_store
from ckpt_async.stores.interface import Store
from tests.stores import s3_peer
from tests.stores.azure_peer import AzurePeer
from tests.stores.bodies import put
from tests.stores.gcs_peer import GcsPeer

AHEAD_S, PAGE_S = -3e5, 3600.0
SetClock = Callable[[float], None]


@contextlib.contextmanager
def azure(_: pytest.MonkeyPatch) -> Iterator[tuple[Store, SetClock]]:
    with AzurePeer(page_size=1) as peer:
        store = open_store("az://ckpt/run", env=peer.environment())
        yield store, lambda ahead_s: setattr(peer.account, "ahead_s", ahead_s)


@contextlib.contextmanager
def gcs(_: pytest.MonkeyPatch) -> Iterator[tuple[Store, SetClock]]:
    def one_object(request: Any, serve: Callable[[], Any]) -> Any:
        if "maxResults" in request.query:
            request.query["maxResults"] = "1"
        return serve()

    with GcsPeer() as peer:
        peer.meddle = one_object
        store = open_store("gs://ckpt/run", StoreOptions(endpoint_url=peer.url))
        yield store, lambda ahead_s: setattr(peer, "ahead_s", ahead_s)


@contextlib.contextmanager
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, SetClock]]:
    monkeypatch.setattr(s3_peer, "PAGE", 1)
    with s3_peer.S3Peer() as peer:
        for name, value in peer.environment().items():
            monkeypatch.setenv(name, value)
        yield open_store("s3://ckpt/run"), lambda ahead_s: setattr(peer, "ahead_s", ahead_s)


@pytest.mark.fault("F10")
@pytest.mark.parametrize("service", [azure, gcs, s3])
def test_a_listing_has_the_time_at_which_the_store_began_it(
    run: Any, monkeypatch: pytest.MonkeyPatch, service: Any
) -> None:
    """Measured against a later page's time, or this machine's, an object would seem old enough to be swept."""

    async def body(store: Store, set_clock: SetClock) -> None:
        set_clock(AHEAD_S)
        await store.open()
        pages: list[int] = []

        def turn_a_page(found: Any) -> bool:
            pages.append(len(found))
            set_clock(AHEAD_S + PAGE_S * len(pages))
            return False

        try:
            for key in "abc":
                await put(store, key, b"1")
            listing = await store.list("", enough=turn_a_page)
        finally:
            await store.close()
        assert (pages, len(listing.objects)) == ([1, 2], 3)
        assert abs(listing.server_time - (time.time() + AHEAD_S)) < PAGE_S / 2

    with service(monkeypatch) as (store, set_clock):
        run(body(store, set_clock))
