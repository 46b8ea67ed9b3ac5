"""Finding out what an S3 store enforces, over connections that fail."""

from typing import Any

import pytest

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores import StoreOptions, open_store
from ckpt_async.stores.interface import Capabilities
from ckpt_async.stores.s3.probe import S3Probe


async def found_by(url: str, options: StoreOptions | None = None) -> Capabilities:
    store = open_store(url, options)
    await store.open()
    try:
        return store.capabilities
    finally:
        await store.close()


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
            await S3Probe(store, store._session, store._sender, 30.0).capabilities()
        await store.close()
        assert len(made) == 3

    run(body())
