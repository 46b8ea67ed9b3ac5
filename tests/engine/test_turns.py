"""Where uploads fall behind, what a rank begins never gets in the way of what all ranks send next."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_async.core import order
from ckpt_async.core.decide import NameTarget, Upload
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.observe import Observer
from ckpt_async.core.order import ASKING_S, BEGINNING_S, Turn
from ckpt_async.core.settings import Settings
from ckpt_async.engine.in_flight import InFlight, UploadQueue
from ckpt_async.engine.state import State
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal
from ckpt_async.transfer.patient import PatientStore
from tests.stores.memory import MemoryBucket, MemoryStore

FIRST, SECOND = CheckpointId(1, 1), CheckpointId(1, 2)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[UploadQueue]:
    settings = Settings()
    with contextlib.closing(Journal(Folder(tmp_path), 0)) as journal:

        async def build() -> UploadQueue:
            state = State(
                rank=0,
                folder=Folder(tmp_path),
                journal=journal,
                store=PatientStore(MemoryStore(MemoryBucket()), settings),
                settings=settings,
                observer=Observer(),
                clock=lambda: 1.0,
            )
            return UploadQueue(state, InFlight())

        yield asyncio.run(build())


def test_nothing_is_begun_while_a_rank_asks_for_the_target(
    queue: UploadQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(queue._state, "now", lambda: now)
    ready = [Upload(FIRST, "a")]
    queue.refill(ready, {*ready, NameTarget()})
    assert not queue.may_begin()
    now += ASKING_S  # a store that does not say is no reason to send nothing
    queue.refill(ready, {*ready, NameTarget()})
    assert queue.may_begin()


def test_nothing_is_begun_while_a_more_urgent_checkpoint_is_completed(
    queue: UploadQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last bytes are sent, and the store assembles it: what begins now would share the link with the next."""
    now = 100.0
    monkeypatch.setattr(queue._state, "now", lambda: now)
    monkeypatch.setattr(queue, "_small_bytes", lambda _: 1 << 30)
    moving = {SECOND}
    monkeypatch.setattr(queue._state.store, "is_moving", lambda id_: id_ in moving)
    ready = [Upload(SECOND, "a"), Upload(FIRST, "a")]
    queue.refill(ready, set(ready))
    queue._places = {SECOND: 0, FIRST: 1}
    assert [each.checkpoint for each in queue.next_series()] == [SECOND]
    now += 60
    assert not queue.may_begin()
    moving.clear()
    now += BEGINNING_S / 2
    assert not queue.may_begin()
    now += BEGINNING_S
    assert queue.may_begin(), "what the store refuses holds up no other"


def test_an_unsealed_checkpoint_does_not_share_the_link_with_the_only_sealed_one(queue: UploadQueue) -> None:
    queue._places = {FIRST: 0}
    assert queue.place_of(SECOND) > queue.place_of(FIRST)
    queue._places = {}
    assert queue.place_of(SECOND) == 0


def test_a_rank_that_waits_for_the_others_rests_at_first() -> None:
    turn = Turn(target=SECOND, upload_s=7.0, free_at=100.0)
    assert order.is_resting(turn, 106.0, is_open=True)
    assert not order.is_resting(turn, 108.0, is_open=True)
    assert not order.is_resting(turn, 106.0, is_open=False), "it asks for the next target"
    assert not order.is_resting(replace(turn, sending=FIRST), 106.0, is_open=True)


def test_a_look_while_waiting_does_not_put_off_the_next_question() -> None:
    """Otherwise what is sent until then shares the link with the target that another rank has just named."""
    turn = Turn(target=FIRST, upload_s=7.0, free_at=100.0)
    looked = order.with_target(turn, FIRST, 106.0, may_have_named=False)
    owed = [FIRST, SECOND, CheckpointId(1, 3)]
    assert not order.is_asking_due(looked, owed, 106.1, is_open=True)
    assert order.is_asking_due(looked, owed, 106.1, is_open=False)
