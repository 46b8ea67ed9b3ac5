"""What a watcher refuses is told to those who do not read its output: events, metrics, the live page."""

import contextlib
import errno
import json
import os
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader
from ckpt_async.core import keys
from ckpt_async.core.refusal import Refusal, Refused
from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, NoSpaceError, StoreError
from ckpt_async.events.event import refused
from ckpt_async.formats import Rules
from ckpt_async.local.folder import Folder
from ckpt_async.local.outbox import OwnOutbox
from ckpt_async.monitor.metrics import Metrics
from ckpt_async.watch.background import Stop
from ckpt_async.watch.entries import Entries, Entry, State
from ckpt_async.watch.options import Options
from ckpt_async.watch.refusal_events import RefusalEvents
from ckpt_async.watch.remote import Remote
from ckpt_async.watch.reporter import UNREADABLE_S, Event, Reporter
from ckpt_async.watch.watcher import Watcher
from tests.events.receiver import free_port, receiving, wait_until
from tests.watch.conftest import Place, counts, save
from tests.watch.trees import torch_zip

pytestmark = pytest.mark.timeout(90)


def test_each_refusal_is_an_event_once_also_over_restarts(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(Root may list all, so that answer of the system is made up.)"""
    save(place, 10)
    for step, name in ((20, "my model.bin"), (30, "link")):
        save(place, step)
        path = place.out / f"checkpoint-{step}" / name
        path.symlink_to(place.here) if name == "link" else path.write_bytes(b"x")
        os.utime(path.parent / "trainer_state.json")  # the marker is the last
    (place.out / "closed").mkdir()
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if str(path) == str(place.out / "closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with receiving() as receiver:
        for _ in range(2):
            code, told = place.once("--webhook", receiver.url, "--webhook-on", "refused")
            assert (code, set(told["refused"])) == (1, {"checkpoint-20", "checkpoint-30", "closed"})
        bodies = sorted(receiver.bodies, key=lambda each: str(each["details"]["path"]))
    assert [(each["details"]["path"], each["step"], each["details"]["cause"]) for each in bodies] == [
        ("checkpoint-20", 20, "unsupported"),
        ("checkpoint-30", 30, "unsupported"),
        ("closed", None, "unreadable"),
    ]
    assert {(each["kind"], each["run"], each["generation"]) for each in bodies} == {
        ("refused", place.remote, 0)
    }
    assert "'my model.bin' has a character" in bodies[0]["details"]["reason"]
    assert len({each["id"] for each in bodies}) == 3


def test_what_is_refused_for_now_and_committed_later_is_no_error(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(A disk that is full only once, so the answer of the system is made up.)"""
    saved = save(place, 10)
    link, failures = os.link, [OSError(errno.ENOSPC, "No space left on device")]

    def refusing(source: Any, target: Any, **more: Any) -> None:
        if "staged" in str(target) and failures:
            raise failures.pop()
        link(source, target, **more)

    monkeypatch.setattr(os, "link", refusing)
    told = list[Event]()
    folder, state = place.out, place.state
    options = Options(
        folder, place.remote, state, place.here / "lock", rules=Rules(settle_s=0), interval_s=0.1
    )
    stopping = Stop()

    def tell(each: Event) -> None:
        told.append(each)
        if each.event == "committed":
            stopping.set()

    report = Watcher(options, tell).run(stopping)
    assert [(each.event, each.step) for each in told] == [("refused", 10), ("committed", 10)]
    assert (report.refused, place.committed(10)) == ({}, saved)


def test_a_full_disk_and_a_store_that_goes_away_while_a_trainer_goes_back_end_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(Both only for a moment, so the answers of the system and of the store are made up.)"""
    saved = {step: save(place, step) for step in (20, 10)}  # the second is newer: another launch of the run
    full = [OSError(errno.ENOSPC, "No space left on device")]
    away = [StoreError("no answer", reason=FailureReason.TRANSIENT)]
    put, open_, num_opened = Entries.put, Remote.__init__, [0]

    def putting(entries: Entries, entry: Entry) -> None:
        if entry.state is State.HANDED and full:
            raise full.pop()
        put(entries, entry)

    def opening(remote: Remote, *args: Any, **more: Any) -> None:
        num_opened[0] += 1
        if num_opened[0] == 2:
            raise away.pop()
        open_(remote, *args, **more)

    monkeypatch.setattr(Entries, "put", putting)
    monkeypatch.setattr(Remote, "__init__", opening)
    folder, rules = place.out, Rules(settle_s=0)
    options = Options(
        folder, place.remote, place.state, place.here / "lock", rules=rules, interval_s=0.1, is_once=True
    )
    report = Watcher(options).run(Stop())
    assert (full, away, num_opened[0]) == ([], [], 3)
    assert (report.num_committed, report.refused) == (2, {})
    assert all(place.committed(step) == was for step, was in saved.items())


def test_what_is_written_in_place_while_it_is_handed_in_is_never_committed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(By a trainer that saves to the same place again; when, is made up.)"""
    save(place, 10)
    enqueue = Uploader.enqueue

    def meanwhile(uploader: Uploader, *args: Any, **more: Any) -> None:
        with (place.out / "checkpoint-10/model.safetensors").open("r+b") as file:
            file.write(b"another")
        enqueue(uploader, *args, **more)

    monkeypatch.setattr(Uploader, "enqueue", meanwhile)
    code, ended = place.once()
    assert (code, list(ended["refused"]), place.committed(10)) == (1, ["checkpoint-10"], None)
    assert "written in place while" in ended["refused"]["checkpoint-10"]


def test_while_the_store_is_away_a_refusal_is_told_all_the_same(place: Place) -> None:
    place.remote = "s3://bucket/run"
    save(place, 10)
    (place.out / "checkpoint-10/link").symlink_to(place.here)
    with receiving() as receiver:
        away = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}
        watching = place.watch(*("--endpoint-url", "http://127.0.0.1:9", "--webhook", receiver.url), **away)
        [body] = receiver.wait_for(1)
        watching.kill()
    assert (body["kind"], body["details"]["path"]) == ("refused", "checkpoint-10")


def test_refusals_are_counted_from_0_over_all_starts_of_the_run_and_are_on_the_page(place: Place) -> None:
    port = free_port()
    watching = place.watch("--metrics-port", str(port))
    (place.out / "last.ckpt").write_bytes(torch_zip(global_step=10))
    watching.until("committed", 10)
    assert counts(port, place.remote) == {each.value: 0.0 for each in Refusal}, (
        "so that increase() sees the first"
    )
    (place.out / "last.ckpt").write_bytes(torch_zip(global_step=20, tensor=None))
    watching.until("refused")
    assert counts(port, place.remote)["changed"] == 1
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status.json", timeout=10) as reply:
        page = json.load(reply)
    assert [each["refused"] for each in page["engines"]] == [{"changed": 1}]
    [text] = [each["text"] for each in page["events"] if each["what"].startswith("refused")]
    assert text.startswith("last.ckpt is refused: last.ckpt was written in place")
    save(place, 30)
    watching.until("committed", 30)
    (place.out / "checkpoint-30").rename(place.here / "aside")
    save(place, 20)  # the trainer has gone back: a new launch of the run, and another uploader
    watching.until("committed", 20)
    wait_until(lambda: counts(port, place.remote).get("changed") == 1)
    assert watching.end() == 1


def size_bytes_of(folder: Path) -> int:
    found = 0
    for each in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found += each.stat().st_size
    return found


def test_what_was_handed_in_and_given_up_is_told_by_the_run_itself(place: Place) -> None:
    """Once for all nodes, though each of them counts it."""
    with receiving() as receiver:
        watching = place.watch("--max-bytes-per-s", "5e6", "-v", "--webhook", receiver.url)
        save(place, 10, size_bytes=20_000_000)
        watching.until_logged("complete path=checkpoint-10")
        wait_until(lambda: size_bytes_of(Path(place.remote.removeprefix("file://"))) > 4_000_000)
        with (place.out / "checkpoint-10/model.safetensors").open("r+b") as file:
            file.seek(10_000_000)
            file.write(b"other bytes")
        watching.until("refused", 10)
        save(place, 20)
        watching.until("committed", 20)
        assert watching.end() == 1
    assert sorted(receiver.kinds()) == [("committed", 20), ("given_up", 10)]


def test_what_the_store_has_lost_is_an_event(place: Place) -> None:
    """Also if its trainer has deleted it since."""
    for step in (1, 2, 3):
        save(place, step)
    assert place.once()[1]["committed"] == 3
    shutil.rmtree(place.out / "checkpoint-1")
    remote = Path(place.remote.removeprefix("file://"))
    for step in (1, 2):
        for what in (f"{keys.RECEIPTS}*{step}/*", f"{keys.DECISIONS}*{step}.json", f"ckpt/*-{step}.g1/*"):
            for each in remote.glob(what):
                each.unlink()
    with receiving() as receiver:
        for _ in range(2):
            assert place.once("--webhook", receiver.url, "--webhook-on", "refused")[0] == 1
    told = [(each["details"]["path"], each["details"]["cause"]) for each in receiver.bodies]
    assert sorted(told) == [("checkpoint-1", "outdated"), ("checkpoint-2", "outdated")]


def test_what_is_refused_while_the_disk_is_full_is_told_when_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving() as receiver:
        settings = Settings(event_webhook=receiver.url)
        refusals = RefusalEvents("s3://b/r", 0, tmp_path, settings)

        def refusing(*_: object) -> None:
            raise NoSpaceError("no space left")

        with monkeypatch.context() as full:
            full.setattr(OwnOutbox, "put", refusing)
            refusals.add(Refused("a", Refusal.NO_SPACE, "it can be neither linked nor copied", 1))
        refusals.close()
    assert [each["details"]["cause"] for each in receiver.bodies] == ["no_space"]


def test_what_cannot_be_read_for_a_moment_is_no_refusal() -> None:
    """Once it lasts, it is, and at the end nothing is waited for."""
    now, heard = [0.0], list[Refused]()
    reporter = Reporter(clock=lambda: now[0])
    reporter.publish = heard.append
    reporter.note_unreadable({"a": "Stale file handle"})
    reporter.note_unreadable({})
    now[0] += UNREADABLE_S
    reporter.note_unreadable({"a": "Stale file handle", "b": "Permission denied"})
    assert not heard
    now[0] += UNREADABLE_S
    for _ in range(2):
        reporter.note_unreadable({"b": "Permission denied"})
    assert [each.path for each in heard] == ["b"]
    reporter.note_unreadable({"b": "Permission denied", "c": "Permission denied"}, is_last=True)
    assert [each.path for each in heard] == ["b", "c"]


def test_refusals_are_shown_in_each_launch(tmp_path: Path) -> None:
    """A new launch of the run has metrics and a page of its own."""
    reporter = Reporter()
    reporter.record(Refused("a", Refusal.CHANGED, "why", 1))
    for _ in range(2):
        metrics = Metrics("file:///run", Folder(tmp_path))
        reporter.count_in(metrics)
        assert metrics.total("ckpt_async_watch_refused_total")["changed"] == 1
        assert [each["text"] for each in metrics.recent.told()] == ["a is refused: why"]
        reporter.count_in(None)


def test_a_refusal_is_told_by_each_node_that_has_it_and_again_for_another_version(tmp_path: Path) -> None:
    def id_of(path: str = "a", step: int | None = 1, node: int = 0, version: int = 0) -> str:
        what = Refused(path, Refusal.CHANGED, "why", step, "", version)
        return refused("s3://b/r", what, 1.0, node=node).id

    assert id_of() == id_of()
    assert len({id_of(), id_of("b"), id_of(step=2), id_of(step=None), id_of(node=1), id_of(version=1)}) == 6
