"""Finding out what an S3 store enforces, over connections that fail."""

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores import StoreOptions, open_store
from ckpt_async.stores.interface import Capabilities
from ckpt_async.stores.s3.probe import Probe
from tests.restore.relay import Relay
from tests.seaweed import SeaweedServer


async def found_by(url: str, options: StoreOptions | None = None) -> Capabilities:
    store = open_store(url, options)
    await store.open()
    try:
        return store.capabilities
    finally:
        await store.close()


@pytest.mark.parametrize("most", [1, 2])
def test_a_proxy_that_resets_concurrent_requests_is_asked_one_after_the_other(
    run: Any, s3_server: SeaweedServer, s3_url: str, most: int
) -> None:
    with Relay(s3_server.url, most) as relay:
        found = run(found_by(s3_url, StoreOptions(endpoint_url=relay.url)))
        assert relay.num_reset, "the proxy had nothing to refuse"
    assert found == run(found_by(s3_url))


@pytest.mark.parametrize("number", range(7))
def test_no_answer_that_is_lost_changes_what_is_found(run: Any, s3_url: str, number: int) -> None:
    """The store has done what it was asked for."""

    async def body() -> None:
        store: Any = open_store(s3_url)
        await store.open()
        made: list[str] = []

        def losing_one(request: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
            async def ask(*rest: Any, **options: Any) -> Any:
                made.append(request.__name__)
                is_lost = len(made) == number + 1
                try:
                    return await request(*rest, **options)
                finally:
                    if is_lost:
                        raise StoreError("lost", reason=FailureReason.TRANSIENT, operation="open")

            return ask

        for name in ("put", "head", "delete"):
            setattr(store, name, losing_one(getattr(store, name)))
        try:
            found = await Probe(store, store._session, store._sender).capabilities()
        finally:
            await store.close()
        undisturbed = await found_by(s3_url)
        assert found.conditional_put
        assert found.checksum_algorithm == undisturbed.checksum_algorithm
        assert (len(made) > 7) == (number < 6)  # nothing depends on the deletion, which is the last

    run(body())


def test_a_store_that_never_answers_is_not_asked_again(run: Any, s3_url: str) -> None:
    async def body() -> None:
        store: Any = open_store(s3_url)
        await store.open()
        made: list[str] = []

        async def refused(key: str, *_: Any, **__: Any) -> Any:
            made.append(key)
            raise StoreError("refused", reason=FailureReason.TRANSIENT, operation="open")

        store.put = refused
        store.delete = lambda keys: refused(keys[0])
        with pytest.raises(StoreError, match="refused"):
            await Probe(store, store._session, store._sender).capabilities()
        await store.close()
        assert len(made) == 3

    run(body())


def test_a_store_that_is_not_open_has_no_idle_connections(run: Any, s3_url: str) -> None:
    """A request that fails while the store is being closed asks for that."""

    async def body() -> None:
        store: Any = open_store(s3_url)
        store.drop_idle()
        await store.open()
        store.drop_idle()
        await store.close()
        store.drop_idle()

    run(body())
