"""How long a store may take to open: each request has its own deadline. In virtual time."""

import asyncio
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_async.core.model import Checksum
from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores import open_store
from ckpt_async.stores.azure.probe import AzureProbe
from ckpt_async.stores.gcs.probe import GcsProbe
from ckpt_async.stores.interface import Body, Condition, ObjectInfo
from ckpt_async.stores.s3.errors import S3Location
from ckpt_async.stores.s3.probe import S3Probe
from ckpt_async.transfer.patient import PatientStore
from tests.stores.memory import MemoryStore
from tests.virtual_time import run

ANSWERS_AFTER_S = 8
REQUEST_TIMEOUT_S = 20


class Slow(MemoryStore):
    """A store that takes long for each answer, and is opened with a probe of a real one."""

    def __init__(self, probed: Callable[["Slow", float], Any], num_answers: float) -> None:
        super().__init__()
        self._probed, self._num_left = probed, num_answers

    async def open(self, *, is_read_only: bool = False, request_timeout_s: float = 0) -> None:
        await self._probed(self, request_timeout_s)

    async def answer(self) -> None:
        self._num_left -= 1
        await asyncio.sleep(ANSWERS_AFTER_S if self._num_left >= 0 else 86400)

    async def put(
        self, key: str, body: Body, checksum: Checksum, *, condition: Condition = None
    ) -> ObjectInfo:
        await self.answer()
        return await super().put(key, body, checksum, condition=condition)

    async def head(self, key: str) -> ObjectInfo:
        await self.answer()
        return await super().head(key)

    async def delete(self, keys: Any) -> None:
        await self.answer()
        await super().delete(keys)


def by_s3(store: Slow, timeout_s: float) -> Any:
    session = SimpleNamespace(location=S3Location("bucket", "", None), keeps_versions=False)
    return S3Probe(store, session, SimpleNamespace(templates={}), timeout_s).capabilities()  # type: ignore[arg-type]


def by_gcs(store: Slow, timeout_s: float) -> Any:
    return GcsProbe(store, timeout_s, "", "1").find_out()


def by_azure(store: Slow, timeout_s: float) -> Any:
    async def put_wrong(*_: Any) -> None:
        await store.answer()
        raise StoreError("wrong checksum", reason=FailureReason.CHECKSUM)

    location = SimpleNamespace(account=SimpleNamespace(endpoint_url="https://a.blob.core.windows.net"))
    session = SimpleNamespace(location=location, put=put_wrong)
    return AzureProbe(store, session, SimpleNamespace(), timeout_s).is_conditional()  # type: ignore[arg-type]


async def opened_after_s(probed: Callable[[Slow, float], Any], num_answers: float) -> float:
    store = Slow(probed, num_answers)
    await PatientStore(store, Settings(request_timeout_s=REQUEST_TIMEOUT_S)).open()
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("probed", [by_s3, by_gcs, by_azure])
def test_a_slow_store_that_answers_is_opened(probed: Callable[[Slow, float], Any]) -> None:
    assert run(opened_after_s(probed, 100)) > REQUEST_TIMEOUT_S, "nothing was slow"


@pytest.mark.parametrize("probed", [by_s3, by_gcs, by_azure])
@pytest.mark.parametrize("num_answers", [0, 2])
def test_a_store_that_falls_silent_is_reported(
    probed: Callable[[Slow, float], Any], num_answers: int
) -> None:
    async def failed_after_s() -> float:
        with pytest.raises(StoreError, match=f"no answer within {REQUEST_TIMEOUT_S} s") as raised:
            await opened_after_s(probed, num_answers)
        assert raised.value.reason is FailureReason.TIMEOUT
        return asyncio.get_running_loop().time()

    longest_s = num_answers * ANSWERS_AFTER_S + 2 * REQUEST_TIMEOUT_S  # the objects are deleted again, too
    assert REQUEST_TIMEOUT_S <= run(failed_after_s()) <= longest_s


def test_a_web_server_that_never_answers_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = open_store(f"http://127.0.0.1:{silent.getsockname()[1]}/run")
        with pytest.raises(StoreError) as raised:
            asyncio.run(store.open(is_read_only=True, request_timeout_s=0.3))
    assert raised.value.reason is FailureReason.TIMEOUT
