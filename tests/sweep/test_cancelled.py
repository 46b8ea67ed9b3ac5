"""A drain or sweep that is cancelled while a thread takes a lock or opens a file: nothing stays held or open."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId, Enqueued, Opened, RemoteAddress, Sealed, Shard
from ckpt_async.core.settings import Settings
from ckpt_async.engine import on_disk, recovery
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal, RankLock
from ckpt_async.local.outbox import OwnOutbox
from ckpt_async.sweep import drain as drains
from ckpt_async.sweep import reporting


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
        self._is_over = False

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            self._wait()
            try:
                return function(*args, **more)
            finally:
                self._is_over = True

        return call

    def after(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            result = function(*args, **more)
            self._wait()
            self._is_over = True
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
            assert self._is_over

        asyncio.run(main())


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held._may_go.set()


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A folder of a trainer that was killed when it had sealed two checkpoints, the first of which is to be removed
    once the second is committed.
    """
    folder = Folder(tmp_path / "left")
    remote = RemoteAddress(f"file://{tmp_path}/run")
    journal = Journal(folder, 0)
    journal.append([Opened(1, 1, remote, (("num_checkpoints_to_keep", 1),))])
    for step in (1, 2):
        id_, name = CheckpointId(1, step), f"step-{step}"
        (folder.path / f"{step}.pt").write_text(name)
        [(identity, is_linked)] = folder.link([(f"{step}.pt", "a.pt")], keys.spool_checkpoint(id_, 0))
        shard = Shard("a.pt", f"{step}.pt", identity, is_linked)
        journal.append([Enqueued(id_, name, shard), Sealed(id_, name, 1)])
    journal.close()
    return folder.path


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


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (recovery, "rebuild"),
        (on_disk, "fsync_shards"),
        (on_disk, "_write_manifest"),
        (Journal, "sync"),
        (on_disk, "_point_symlink"),
        (Folder, "remove_spool"),
        (Folder, "remove_source"),
        (on_disk, "_drop"),
    ],
)
def test_what_an_engine_does_to_the_disk_has_ended_when_its_drain_is_cancelled(
    left: Path, held: Held, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """A manifest came after the next owner of the rank had forgotten the checkpoint."""
    monkeypatch.setattr(owner, name, held.before(getattr(owner, name)))
    held.cancel(drain(left))
    assert open_files(left) == set()


def test_a_sweep_that_is_cancelled_while_it_opens_its_queue_of_events_leaves_it_free(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sweep() -> None:
        settings = Settings(event_webhook="http://127.0.0.1:9/hook")
        async with reporting.remote_events(settings, tmp_path / "events"):
            pass

    with monkeypatch.context() as patch:
        patch.setattr(reporting, "OwnOutbox", held.before(OwnOutbox))
        held.cancel(sweep())
    OwnOutbox(tmp_path / "events").close()
