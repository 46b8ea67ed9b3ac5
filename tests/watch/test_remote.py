"""The watcher's own connection to the store leaves nothing behind, however it ends."""

import threading

import pytest

from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.watch.remote import Remote
from tests.stores.misbehaving import Meddled


class Failing(Meddled):
    """A store that fails at one operation."""

    fails_at = ""

    async def after(self, operation: str, key: str) -> None:
        if operation == self.fails_at:
            raise StoreError(f"no {operation}", reason=FailureReason.OTHER)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Failing:
    store = Failing()
    monkeypatch.setattr("ckpt_async.transfer.patient.open_store", lambda *_, **__: store)
    return store


def connected() -> Remote:
    return Remote("memory://test", None, Settings(), writes=True)


def test_a_store_that_cannot_be_opened_is_closed(store: Failing) -> None:
    num_threads = threading.active_count()
    store.fails_at = "open"
    with pytest.raises(StoreError, match="no open"):
        connected()
    assert store.asked["close", ""] == 1
    assert threading.active_count() == num_threads


def test_a_store_that_cannot_be_closed_leaves_no_thread(store: Failing) -> None:
    num_threads = threading.active_count()
    remote = connected()
    store.fails_at = "close"
    with pytest.raises(StoreError, match="no close"):
        remote.close()
    assert threading.active_count() == num_threads
