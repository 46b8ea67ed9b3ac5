"""A drain or sweep that is cancelled while a thread takes a lock or opens a file: nothing stays held or open."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader
from ckpt_async.core.settings import Settings
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import RankLock
from ckpt_async.local.outbox import OwnOutbox
from ckpt_async.sweep import drain as drains
from ckpt_async.sweep import telling


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with nothing left to upload."""
    folder = tmp_path / "folder"
    with Uploader(folder, f"file://{tmp_path}/run", rank=0, world_size=1, launch_id="a") as uploader:
        shard = folder / "a.pt"
        shard.write_text("a")
        uploader.enqueue(shard, step=1)
        uploader.seal(1)
    return folder


class Held:
    """Holds a call up, in its thread, until the work that awaits it was cancelled and has had time to end."""

    def __init__(self) -> None:
        self._reached, self._may_go = threading.Event(), threading.Event()

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            self._wait()
            return function(*args, **more)

        return call

    def after(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            result = function(*args, **more)
            self._wait()
            return result

        return call

    def _wait(self) -> None:
        self._reached.set()
        assert self._may_go.wait(30)

    def cancel(self, work: Coroutine[Any, Any, object]) -> None:
        """Run `work`, and cancel it within the call. What the call returns must find its way without it."""

        async def main() -> None:
            working = asyncio.ensure_future(work)
            assert await asyncio.to_thread(self._reached.wait, 30)
            working.cancel()
            await asyncio.sleep(0.05)
            self._may_go.set()
            with pytest.raises(asyncio.CancelledError):
                await working

        asyncio.run(main())


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held._may_go.set()


def open_files(folder: Path) -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue
    return {each for each in found if each.startswith(str(folder))}


def drain(folder: Path, **more: Any) -> Coroutine[Any, Any, object]:
    return drains.drain(folder, timeout_s=10, grace_s=0, **more)


def test_a_drain_that_is_cancelled_while_it_takes_a_lock_gives_it_back(
    folder: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RankLock, "acquire", held.before(RankLock.acquire))
        held.cancel(drain(folder))
    lock = RankLock(Folder(folder), 0)
    lock.acquire()
    lock.release()
    assert open_files(folder) == set()


def test_a_drain_that_is_cancelled_while_it_opens_a_journal_closes_it(
    folder: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(drains, "Journal", held.before(drains.Journal))
        held.cancel(drain(folder))
    assert open_files(folder) == set()


def test_a_drain_that_is_cancelled_while_it_starts_to_tell_of_events_ends_what_it_started(
    folder: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(drains, "RunEvents", held.after(drains.RunEvents))
        held.cancel(drain(folder, on_event=lambda _: None))
    assert set(threading.enumerate()) <= before
    assert open_files(folder) == set()


def test_a_sweep_that_is_cancelled_while_it_opens_its_queue_of_events_leaves_it_free(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sweep() -> None:
        settings = Settings(event_webhook="http://127.0.0.1:9/hook")
        async with telling.remote_events(settings, tmp_path / "events"):
            pass

    with monkeypatch.context() as patch:
        patch.setattr(telling, "OwnOutbox", held.before(OwnOutbox))
        held.cancel(sweep())
    OwnOutbox(tmp_path / "events").close()
