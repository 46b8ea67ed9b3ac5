"""An engine that is told to stop waits for what it has under way, and ends."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from ckpt_async.core import decide
from ckpt_async.core.observe import Observer
from ckpt_async.core.settings import Settings
from ckpt_async.engine.loop import Engine
from ckpt_async.engine.state import State
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal
from ckpt_async.transfer.patient import PatientStore
from tests.stores.memory import MemoryBucket, MemoryStore


@pytest.mark.timeout(60)  # what this finds keeps the loop from ever running a timeout
def test_an_engine_stops_whose_last_action_has_just_ended(tmp_path: Path) -> None:
    """From Python 3.12 on, `close` never returned then, with one core busy: the engine waited for an action that it was
    still to note as ended, and never let the event loop do that.
    """

    async def nothing() -> None:
        pass

    async def main(journal: Journal) -> None:
        settings = Settings()
        store = PatientStore(MemoryStore(MemoryBucket()), settings)
        state = State(
            rank=0,
            folder=Folder(tmp_path),
            journal=journal,
            store=store,
            settings=settings,
            observer=Observer(),
            clock=lambda: 1.0,
        )
        engine = Engine(state)
        action = decide.LookForMembers()
        engine._start((action,), nothing())
        task = engine._in_flight.running[action]
        await asyncio.sleep(0)
        assert task.done()
        assert engine._in_flight.running  # `_finished` is due in the loop's next round
        await engine._cancel_all()
        assert not engine._in_flight.running

    with contextlib.closing(Journal(Folder(tmp_path), 0)) as journal:
        asyncio.run(main(journal))
