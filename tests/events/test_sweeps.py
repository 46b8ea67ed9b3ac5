"""Events of the sweeper and of `prune`: what they did to a remote themselves, and damage that they found."""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from ckpt_async import Event, Sweeper, Uploader, restore
from ckpt_async.cli import main
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.settings import Settings
from ckpt_async.errors import SettingsError
from ckpt_async.events.delivery import SinkDelivery
from ckpt_async.sweep.drain import drain
from tests.ctrl_c import interrupted
from tests.events.receiver import Receiver, free_port, receiving
from tests.events.saves import QUICK, save
from tests.sweep.trainers import Trainers

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def remote(tmp_path: Path) -> str:
    """A run with checkpoints 1, 2 and 3."""
    with Uploader(tmp_path / "folder", f"file://{tmp_path}/run", **QUICK) as uploader:
        for step in (1, 2, 3):
            save(uploader, step)
            uploader.wait(step)
    return f"file://{tmp_path}/run"


def hook(receiver: Receiver, tmp_path: Path) -> list[str]:
    return ["--webhook", receiver.url, "--events-dir", str(tmp_path / "events")]


def test_what_prune_removed_is_told_also_by_the_next_one_if_the_receiver_was_away(
    tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    away = ["--webhook", f"http://127.0.0.1:{port}/hook", "--events-dir", str(tmp_path / "events")]
    monkeypatch.setenv("CKPT_ASYNC_EVENT_GRACE_S", "0.2")
    assert main(["prune", remote, "--keep", "last=2", "--yes", *away]) == 0
    monkeypatch.setenv("CKPT_ASYNC_EVENT_GRACE_S", "10")
    with receiving(port=port) as receiver:
        assert main(["sweep", "--remote", remote, "--keep", "last=1", *hook(receiver, tmp_path)]) == 0
        assert sorted(receiver.kinds()) == [("pruned", 1), ("pruned", 2)]
        assert {each["details"]["location"] for each in receiver.bodies} == {"remote"}
        assert main(["sweep", "--remote", remote, "--keep", "last=1", *hook(receiver, tmp_path)]) == 0
    assert len(receiver.bodies) == 2


@pytest.mark.parametrize("what", ["drain", "drain of events alone", "sweep"])
def test_ctrl_c_while_a_receiver_is_waited_for_ends_it_at_once(
    tmp_path: Path,
    remote: str,
    trainers: Trainers,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The next sweep delivers what is not delivered, and the journal is closed after those who use it."""
    closes, closing = SinkDelivery.close, threading.Event()

    def close(courier: SinkDelivery, grace_s: float) -> None:
        closing.set()
        closes(courier, grace_s)

    folder, is_bare = tmp_path / "dead", what == "drain of events alone"
    monkeypatch.setattr(SinkDelivery, "close", close)
    trainers.die(folder, f"file://{tmp_path}/dead-run", 1, event_webhook="http://127.0.0.1:9/hook")
    if is_bare:
        assert main(["drain", str(folder)]) == 1
        closing.clear()

    async def interrupted(settings: Settings) -> None:
        sweeper = Sweeper((), [remote], settings=settings, events_folder=tmp_path / "events")
        work = (
            sweeper.sweep() if what == "sweep" else drain(folder, timeout_s=60, grace_s=0, settings=settings)
        )
        task = asyncio.ensure_future(work)
        assert await asyncio.to_thread(closing.wait, 30)
        began_s = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began_s < 20

    with receiving() as receiver:
        receiver.says = ["hang"] * 10
        asyncio.run(
            interrupted(
                Settings(
                    event_webhook=receiver.url, event_grace_s=60, remote_retention="last=1", close_grace_s=0
                )
            )
        )
    assert "closed" not in caplog.text
    assert "events_held_up" not in caplog.text
    assert "events_left sink=webhook" in caplog.text
    assert not [each for each in threading.enumerate() if each.name.startswith("ckpt-async-webhook")]


def test_a_sweepers_function_is_told_of_remotes_and_of_folders_that_it_finishes(
    tmp_path: Path, remote: str, trainers: Trainers
) -> None:
    """It is called once per event, however often the sweeper sweeps."""
    told: list[tuple[str, str, int | None]] = []

    def on_event(event: Event) -> None:
        told.append((event.run.rpartition("/")[2], event.kind, event.step))

    trainers.die(tmp_path / "dead", f"file://{tmp_path}/dead-run", 1)
    sweeper = Sweeper(
        [tmp_path / "dead"],
        [remote],
        settings=Settings(remote_retention="last=2", event_grace_s=30),
        events_folder=tmp_path / "events",
        on_event=on_event,
    )
    for _ in range(2):
        assert asyncio.run(sweeper.sweep()).is_clean
    assert sorted(told) == [("dead-run", "committed", 1), ("run", "pruned", 1)]
    with pytest.raises(SettingsError, match="on_event=7 is not callable"):
        Sweeper([], [remote], on_event=7)  # type: ignore[arg-type]


def test_a_dry_run_tells_nothing(tmp_path: Path, remote: str) -> None:
    with receiving() as receiver:
        assert main(["prune", remote, "--keep", "last=1", *hook(receiver, tmp_path)]) == 0
    assert receiver.raw == []


def test_damage_is_told_once_whether_a_reader_marked_it_or_verify_found_it(
    tmp_path: Path, remote: str
) -> None:
    run = Path(remote.removeprefix("file://"))
    for step in (2, 3):
        [shard] = (run / keys.data_prefix(f"step-{step}", 1)).iterdir()
        os.unlink(shard)
        if step == 3:
            found = restore.find(remote)  # marks it as damaged
            assert found is not None
            assert found.rejected
            assert (run / keys.damage_key(CheckpointId(1, 3))).exists()
    with receiving() as receiver:
        for _ in range(2):
            assert main(["sweep", "--remote", remote, "--verify", *hook(receiver, tmp_path)]) == 1
    told = {(each["kind"], each["step"]) for each in receiver.bodies}
    assert told == {("damaged", 2), ("damaged", 3)}
    assert len(receiver.bodies) == len({each["id"] for each in receiver.bodies})
    assert all(each["details"]["key"] and each["details"]["reason"] for each in receiver.bodies)


def test_a_second_sweeper_with_the_same_queue_still_sweeps_and_says_that_it_does_not_tell(
    tmp_path: Path, remote: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from ckpt_async.local.outbox import OwnOutbox

    first = OwnOutbox(tmp_path / "events")
    try:
        with receiving() as receiver:
            assert main(["prune", remote, "--keep", "last=1", "--yes", *hook(receiver, tmp_path)]) == 0
    finally:
        first.close()
    assert receiver.raw == []
    assert "events_not_reported" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["pread", "ftruncate"])
def test_a_queue_that_could_not_be_opened_is_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    from ckpt_async.errors import JournalError
    from ckpt_async.local.outbox import OwnOutbox

    with monkeypatch.context() as broken:
        broken.setattr(os, what, lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "disk")))
        with pytest.raises(JournalError):
            OwnOutbox(tmp_path / "events")
    outbox = OwnOutbox(tmp_path / "events")
    for _ in range(2):
        outbox.close()


@pytest.mark.parametrize("begin", [0, 100], ids=["no log", "no record"])
def test_a_damaged_queue_is_moved_aside_and_events_are_told_again(
    tmp_path: Path, remote: str, capsys: pytest.CaptureFixture[str], begin: int
) -> None:
    """No event of any later sweep was told, and the hint was to restart the trainer."""
    from ckpt_async.core.observe import Notice
    from ckpt_async.local.outbox import OwnOutbox

    place = tmp_path / "events"
    with contextlib.closing(OwnOutbox(place)) as outbox:
        outbox.put([Notice("a", "hook", "{}")], 1.0)
    path = place / "events.log"
    damaged = (
        path.read_bytes()[:begin].ljust(4096, b"U") + b"\n" + path.read_bytes().splitlines(keepends=True)[-1]
    )
    path.write_bytes(damaged)
    with receiving() as receiver:
        assert main(["prune", remote, "--keep", "last=1", "--yes", *hook(receiver, tmp_path)]) == 0
        assert sorted(receiver.kinds()) == [("pruned", 1), ("pruned", 2)]
    [aside] = place.glob("events.log.damaged-*")
    assert aside.read_bytes() == damaged
    told = capsys.readouterr().err
    assert "events_damaged" in told
    assert f"moved_to={aside}" in told
    assert "trainer" not in told


def test_an_interrupted_call_leaves_the_queue_free(tmp_path: Path) -> None:
    """A suspended generator held its lock for as long as somebody held the traceback."""
    from ckpt_async.core.observe import Notice
    from ckpt_async.local.outbox import OwnOutbox

    with contextlib.closing(OwnOutbox(tmp_path / "events")) as outbox:
        found = set()
        for at in range(1, 1000):
            error = interrupted(partial(outbox.put, [Notice(str(at), "hook", "{}")], 1.0), at)
            found.add(outbox._lock.locked())
            if error is None:
                break
            del error
        assert found == {False}
        assert outbox.num_due(["hook"], 1e12) > 0


HALF = """
import os, signal, sys
from ckpt_async import Uploader
from ckpt_async.engine import committing
from ckpt_async.protocol import deciding
from tests.events.saves import QUICK, save
from tests.sweep.trainers import Trainers

async def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

deciding.settle = die  # its receipt is in the store
uploader = Uploader(sys.argv[1] + "/half", "file://" + sys.argv[1] + "/half-run", **QUICK)
save(uploader, 1)
uploader.wait(1)
"""


def test_a_commit_in_the_place_of_a_lost_node_is_told(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", HALF, str(tmp_path)], cwd=ROOT, capture_output=True, timeout=60
    )
    assert ran.returncode == -signal.SIGKILL
    long_ago = time.time() - 3600
    for path in (tmp_path / "half-run").rglob("*"):
        os.utime(path, (long_ago, long_ago))
    with receiving() as receiver:
        assert main(["sweep", "--remote", f"file://{tmp_path}/half-run", *hook(receiver, tmp_path)]) == 0
        assert receiver.kinds() == [("committed", 1)]
        told = receiver.bodies[0]["id"]
        # The node was not lost after all: its rank 0 learns of the outcome, and reports the same.
        with Uploader(tmp_path / "half", f"file://{tmp_path}/half-run", **QUICK, event_webhook=receiver.url):
            receiver.wait_for(2)
    assert receiver.bodies[1]["id"] == told
