"""What a look does about candidates that come and go."""

import json
import os
import random
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_async import Uploader, restore
from ckpt_async.core.refusal import Refusal
from ckpt_async.restore.destination import PARTIAL_FOLDER
from ckpt_async.watch import plan
from ckpt_async.watch.disk import Disk, sample
from ckpt_async.watch.entries import Entries, Entry
from ckpt_async.watch.formats import Found, Rules, find
from ckpt_async.watch.holds import MAX_HELD
from ckpt_async.watch.lookout import STALE_S
from ckpt_async.watch.telling import Incomplete
from ckpt_async.watch.tree import Tree
from tests.watch.looking import Place
from tests.watch.trees import torch_zip


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.waker.close()


RULES = {
    "its marker step-1/DONE was written": Rules(done="DONE"),
    "it was renamed into place": Rules(pattern="*"),
}


@pytest.mark.parametrize("after", RULES)
def test_what_vanishes_while_it_is_linked_is_not_taken_for_whole_later(place: Place, after: str) -> None:
    """The links that were made before one failed have changed the times by which a rotation is told."""
    lookout = place.lookout(RULES[after])
    here = place.folder / "step-1"
    here.mkdir()
    for name in ("a", "b", "c", "DONE"):
        (here / name).write_text(name)
    lookout.look()
    (here / "c").unlink()  # a rotation begins
    lookout.take()
    for _ in range(2):
        lookout.look()
        lookout.take()
        assert not place.entries.all
        assert place.teller.incomplete == {
            "step-1": Incomplete(f"step-1/c was removed from it after {after}")
        }


def test_what_waits_and_is_dropped_because_too_many_are_held_is_refused_by_name(place: Place) -> None:
    lookout = place.lookout(Rules())
    for step in range(1, MAX_HELD + 3):
        here = place.folder / f"checkpoint-{step}"
        here.mkdir()
        for name in ("rng_state_0.pth", "rng_state_1.pth"):
            (here / name).write_bytes(b"x" * step)
        (here / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        lookout.look()
        lookout.take()
        shutil.rmtree(here)
    assert list(place.teller.refused) == ["checkpoint-1", "checkpoint-2"]
    assert place.told == [("refused", "checkpoint-1"), ("refused", "checkpoint-2")]


def rewritten(here: Path) -> None:
    shutil.rmtree(here)
    here.mkdir()
    (here / "__1_0.distcp").write_text("2")


MEANWHILE: dict[str, tuple[Callable[[Path], object], bool]] = {
    "nothing else": (lambda here: None, True),
    "another file came": (lambda here: (here / "__1_1.distcp").write_text("2"), False),
    "it was written anew": (rewritten, False),
    "it was moved": (lambda here: here.rename(here.with_name("old")), False),
}


@pytest.mark.parametrize("what", MEANWHILE)
def test_what_was_removed_since_the_last_look_was_there_until_then_if_nothing_came_to_its_place(
    place: Place, what: str
) -> None:
    """What a node without the mark rotates away before it has looked again."""
    lookout, here = place.lookout(Rules(), num_nodes=2), place.folder / "step-1"
    here.mkdir()
    (here / "__1_0.distcp").write_text("1")
    for _ in range(2):  # from the first look on it is followed
        lookout.look()
        lookout.take()
    (hold,) = place.holds.all.values()
    do, is_known = MEANWHILE[what]
    do(here)
    mark = place.folder.parent / "mark"
    mark.touch()  # on another node
    while mark.stat().st_mtime_ns <= hold.seen_ns:  # files' times come in ticks of 10 ms
        mark.touch()
    for each in place.folder.iterdir():
        shutil.rmtree(each)
    lookout.look()
    lookout.take()
    until_ns = place.holds.all[hold.number].seen_ns
    assert (until_ns >= mark.stat().st_mtime_ns) == is_known
    assert is_known or until_ns == hold.seen_ns
    lookout.look()
    lookout.take()
    assert place.holds.all[hold.number].seen_ns == until_ns
    place.holds.load()
    assert place.holds.all[hold.number].seen_ns == until_ns, "also after a kill"


def test_a_sample_of_a_small_file_is_all_of_it_read_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for size_bytes in (0, 1, 4096, 16 * 4096):
        path.write_bytes(data := random.Random(size_bytes).randbytes(size_bytes))
        assert sample(path) == zlib.crc32(data)
    path.write_bytes(large := random.Random(1).randbytes(1 << 20))
    was = sample(path)
    assert was != zlib.crc32(large), "a few blocks"
    for at in (0, len(large) - 1):
        path.write_bytes(large[:at] + bytes([large[at] ^ 1]) + large[at + 1 :])
        assert sample(path) != was
    assert sample(tmp_path / "nowhere") is None


def test_what_has_no_content_is_left_out_and_named(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.folder)
    Path("step-1/deep").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("step-1/debugger")
    os.mkfifo("step-1/deep/pipe")
    os.mkfifo("beside")
    for name in ("model.bin", "DONE"):
        Path("step-1", name).write_text(name)
    lookout = place.lookout(Rules(done="DONE"))
    for _ in range(2):
        lookout.look()
        lookout.take()
    [entry] = place.entries.all.values()
    assert sorted(entry.shards.values()) == ["DONE", "model.bin"]
    assert [each.getMessage() for each in caplog.records] == [
        "special_left_out: step-1/debugger is a socket, which has no content: it is left out of step-1",
        "special_left_out: step-1/deep/pipe is a FIFO, which has no content: it is left out of step-1",
    ]


def test_a_format_that_is_not_known_is_named_once_for_each_folder(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Else its trainer would run for days, and nothing would be uploaded or said."""
    heard: list[tuple[str, Refusal]] = []
    place.teller.on_refused = lambda each: heard.append((each.path, each.cause))
    lookout, now_s = place.lookout(Rules()), [float(int(time.time()))]

    def look() -> None:
        lookout.look()
        lookout.tree = replace(lookout.tree, now_ns=int(now_s[0] * 1e9), _sorted=[], _all_folders=[])
        lookout.take()

    def write(path: str) -> None:
        (place.folder / path).parent.mkdir(exist_ok=True)
        (place.folder / path).write_text('{"global_step": 5}')
        os.utime(place.folder / path, (now_s[0], now_s[0]))

    write("base/model.safetensors")
    look()
    now_s[0] += 1
    for path in (
        "mine-1/a.h5",
        "mine-1/b.h5",
        "log.txt",
        "checkpoint-5/model.bin",
        "checkpoint-5/trainer_state.json",
    ):
        write(path)
    now_s[0] += STALE_S - 1
    write("mine-2/a.h5")
    look()
    assert heard == []
    now_s[0] += 2
    for _ in range(2):
        look()
    assert heard == [("mine-1", Refusal.UNKNOWN)]
    assert [each.getMessage() for each in caplog.records if "unknown format" in each.getMessage()] == [
        "unknown_format: mine-1/a.h5 has an unknown format, and is not uploaded: see --done, --pattern and --quiet-s"
    ]
    lookout.end()
    assert heard == [("mine-1", Refusal.UNKNOWN), ("mine-2", Refusal.UNKNOWN)]


def test_what_was_taken_once_its_mark_was_whole_is_not_missed_when_it_is_rotated_away(place: Place) -> None:
    """The first look woke when the mark was made, and saw it empty."""
    lookout = place.lookout(Rules(ranks=1))
    here = place.folder / "checkpoint-10"
    here.mkdir()
    (here / "rng_state.pth").write_bytes(b"x")
    for text in ("", json.dumps({"global_step": 10})):
        (here / "trainer_state.json").write_text(text)
        lookout.look()
        lookout.take()
    assert [each.path for each in place.entries.open()] == ["checkpoint-10"]
    shutil.rmtree(here)
    lookout.look()
    lookout.take()
    assert place.told == []


def test_one_of_several_nodes_remembers_what_it_cannot_hold(place: Place) -> None:
    """Another node may announce it when it is gone."""
    lookout, here = place.lookout(Rules(done="DONE", num_nodes=2), num_nodes=2), place.folder / "step-1"
    here.mkdir()
    (here / "shard-1.bin").write_text("1")
    for _ in range(2):
        lookout.look()
        lookout.take()
        shutil.rmtree(here, ignore_errors=True)
    assert place.holds.seen.gone("step-1", lookout.tree, 0) == ["step-1/shard-1.bin"]
    assert not place.holds.all


def test_of_thousands_each_is_judged_by_those_of_its_path_or_step(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all of them, a look would take a second for every thousand, times their number."""
    judge, numbers = plan.judge, list[int]()

    def counting(
        found: Found, tree: Tree, known: Collection[Entry], *, num_nodes: int
    ) -> plan.Verdict | None:
        numbers.append(len(known))
        return judge(found, tree, known, num_nodes=num_nodes)

    monkeypatch.setattr(plan, "judge", counting)
    for step in range(10):
        (place.folder / f"{step}.done").write_text(f"{step}")
    lookout = place.lookout(Rules(pattern="*.done"))
    for _ in range(2):
        lookout.look_and_take()
        assert len(place.entries.all) == 10
    assert numbers == [0] * 10 + [1] * 10
    place.entries.drop(place.entries.all[3])
    again = Entries(place.folder, place.entries.place, place.entries.remote)
    again.load()
    for entries in (place.entries, again):
        assert [len(entries.of_path(f"{step}.done")) for step in range(10)] == [1, 1, 0, *[1] * 7]


def test_what_is_saved_again_to_the_same_place_before_it_was_quiet_does_not_come_after_that(
    place: Place,
) -> None:
    """Its links would be handed in last, and pass for the newest."""
    lookout = place.lookout(Rules())
    here = place.folder / "checkpoint-1"
    here.mkdir()
    names = ("model.bin", "rng_state_0.pth", "rng_state_1.pth", "trainer_state.json")

    def save(value: str, age_s: float) -> None:
        for name in names:
            (place.folder / "new").write_text(f'{{"global_step": 1, "value": "{value}"}}')
            os.utime(place.folder / "new", (time.time() - age_s,) * 2)
            (place.folder / "new").rename(here / name)
        lookout.look()
        lookout.take()

    save("1", 0)  # how many ranks there are is a guess, so it has to be quiet
    assert (place.entries.all, len(place.holds.all)) == ({}, 1)
    lookout = place.lookout(Rules(ranks=2))
    save("2", 0)
    assert [each.path for each in place.entries.all.values()] == ["checkpoint-1"]
    assert place.holds.all == {}
    assert place.told == [("refused", "checkpoint-1")]


def test_what_is_written_between_the_look_and_the_judgement_is_not_judged_by_that_look(place: Place) -> None:
    """Lightning's `last.ckpt` is replaced by that of the next step while it is compared."""
    lookout = place.lookout(Rules())

    def save(name: str, value: int) -> None:
        (place.folder / "new").write_bytes(torch_zip(tensor=bytes([value]) * 400, global_step=value))
        (place.folder / "new").rename(place.folder / name)

    save("epoch=0-step=4.ckpt", 4)
    save("last.ckpt", 4)
    lookout.look()
    assert [each.step for each in find(lookout.tree)] == [4, 4]  # read before
    save("last.ckpt", 8)
    lookout.take()
    assert (place.told, [each.step for each in place.entries.all.values()]) == ([], [4])
    save("epoch=0-step=8.ckpt", 8)
    lookout.look()
    lookout.take()
    assert (place.told, sorted(each.step for each in place.entries.all.values())) == ([], [4, 8])


def state_of(here: Path, step: int) -> None:
    """The mark, and a file whose name comes later."""
    here.mkdir(parents=True)
    (here / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (here / "z.bin").write_bytes(b"z")


def age(folder: Path) -> None:
    """Nobody has written to it for a minute."""
    for each in (folder, *folder.rglob("*")):
        os.utime(each, (time.time() - 60, time.time() - 60))


def test_what_is_being_fetched_is_complete_only_at_the_end(tmp_path: Path) -> None:
    """`pull` into a watched folder brings the mark before large files."""
    state_of(tmp_path / "there/checkpoint-5", 5)
    remote = f"file://{tmp_path}/remote"
    with Uploader(tmp_path / "there", remote) as uploader:
        uploader.enqueue(tmp_path / "there/checkpoint-5", 5, "checkpoint-5")
        uploader.seal(5)
    out, seen = tmp_path / "out", dict[tuple[str, ...], str]()
    out.mkdir()

    def look(*_: int) -> None:
        for found in find(Disk(out).look(), Rules(ignores_times=True)):
            seen[found.inner] = found.reason

    newest = restore.find(remote)
    assert newest is not None
    restore.fetch(newest, out / "checkpoint-5", num_concurrent_reads=1, on_progress=look)
    assert "it is being downloaded" in seen[("trainer_state.json",)]
    age(out)
    look()
    assert seen[("trainer_state.json", "z.bin")] == ""


UNFINISHED = {
    "pull": ("", PARTIAL_FOLDER + "/0", True),
    "pull, before its first file": ("", PARTIAL_FOLDER, True),
    "pull into the folder above": ("../", PARTIAL_FOLDER + "/0", True),
    "hf download": ("", ".cache/huggingface/download/x.incomplete", True),
    "hf download of the folder above": ("../", ".cache/huggingface/download/checkpoint-5/x.incomplete", True),
    "hf download of another one": ("../", ".cache/huggingface/download/checkpoint-6/x.incomplete", False),
    "hf download that has ended": ("", ".cache/huggingface/download/x.metadata", False),
    "pull into the watched folder": ("../../", PARTIAL_FOLDER + "/0", False),
}


@pytest.mark.parametrize("what", UNFINISHED)
def test_what_a_downloader_has_not_finished_is_named_and_not_taken(place: Place, what: str) -> None:
    where, path, is_unfinished = UNFINISHED[what]
    here = place.folder / "run/checkpoint-5"
    state_of(here, 5)
    unfinished = Path(os.path.normpath(here / where / path))
    if path == PARTIAL_FOLDER:
        unfinished.mkdir()
    else:
        unfinished.parent.mkdir(parents=True)
        unfinished.write_text("half")
    age(place.folder)
    lookout = place.lookout(Rules(ignores_times=True))
    lookout.look_and_take()
    assert bool(place.entries.all) != is_unfinished
    if is_unfinished:
        named = unfinished if unfinished.suffix or unfinished.name == PARTIAL_FOLDER else unfinished.parent
        reason = place.teller.incomplete["run/checkpoint-5"].reason
        assert reason.endswith(f"{named.relative_to(place.folder).as_posix()} exists")


def test_what_settles_while_it_is_fetched_on_is_not_handed_in(place: Place) -> None:
    """Of two processes that fetch, the first to end removes the folder that the other one makes again."""
    lookout = place.lookout(Rules(ignores_times=True))
    state_of(place.folder / "checkpoint-5", 5)
    age(place.folder)
    lookout.look_and_take()
    assert len(place.entries.all) == 1
    (place.folder / "checkpoint-5" / PARTIAL_FOLDER).mkdir()
    lookout.look()
    lookout.review()
    assert not place.entries.all
