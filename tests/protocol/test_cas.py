"""Conditional writes to a store whose refusals cannot be believed."""

import asyncio
import sys

import pytest

from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, PreconditionFailedError, StoreError
from ckpt_async.protocol import cas
from ckpt_async.transfer.patient import PatientStore
from tests.stores.misbehaving import Faulty

KEY = keys.decision_key(CheckpointId(1, 1))


def created(store: Faulty) -> bytes:
    return asyncio.run(cas.create_once(PatientStore(store, Settings()), KEY, b"ours"))


def test_a_refusal_of_what_is_not_there_is_tried_again() -> None:
    store = Faulty()
    store.times, store.error = cas.MAX_REFUSALS - 1, PreconditionFailedError()
    assert created(store) == b"ours"
    assert store.bucket.objects[KEY].data == b"ours"


def test_a_store_that_goes_on_refusing_what_is_not_there_is_not_asked_without_pauses() -> None:
    """Three ranks made 2,600 requests in 16 s. An error is retried with pauses, and told."""
    store = Faulty()
    store.times, store.error = sys.maxsize, PreconditionFailedError()
    with pytest.raises(StoreError, match="refuses to create it") as caught:
        created(store)
    assert caught.value.reason is FailureReason.TRANSIENT
    assert store.asked["put", KEY] == cas.MAX_REFUSALS
