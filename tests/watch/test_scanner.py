"""What a scan does about candidates that come and go."""

import json
import os
import random
import shutil
import socket
import time
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from ckpt_async import Uploader, restore
from ckpt_async.core.refusal import Refusal
from ckpt_async.formats import Found, Rules, Tree, find
from ckpt_async.restore.destination import PARTIAL_FOLDER
from ckpt_async.watch import plan
from ckpt_async.watch.disk import Disk, sample
from ckpt_async.watch.entries import Entries, Entry
from ckpt_async.watch.scanner import CORRUPT_S
from tests.watch.scanning import Place
from tests.watch.trees import safetensors, torch_zip


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.waker.close()


@pytest.mark.parametrize("rules", [Rules(done="DONE"), Rules(pattern="*")])
def test_what_vanishes_while_it_is_linked_is_not_taken_for_whole_later(place: Place, rules: Rules) -> None:
    """The links that were made before one failed have changed the times by which a rotation is told."""
    scanner = place.scanner(rules)
    here = place.folder / "step-1"
    here.mkdir()
    for name in ("a", "b", "c", "DONE"):
        (here / name).write_text(name)
    scanner.scan()
    (here / "c").unlink()  # a rotation begins
    scanner.take()
    for _ in range(2):
        scanner.scan()
        scanner.take()
        assert not place.entries.all
        assert place.reporter.incomplete == {"step-1": "step-1/c was removed from it"}


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


def test_what_has_no_content_is_left_out(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.folder)
    Path("step-1/deep").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("step-1/debugger")
    os.mkfifo("step-1/deep/pipe")
    os.mkfifo("beside")
    for name in ("model.bin", "DONE"):
        Path("step-1", name).write_text(name)
    scanner = place.scanner(Rules(done="DONE"))
    for _ in range(2):
        scanner.scan()
        scanner.take()
    [entry] = place.entries.all.values()
    assert sorted(entry.shards.values()) == ["DONE", "model.bin"]


def test_a_format_that_is_not_known_is_named_once_for_each_folder(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Else its trainer would run for days, and nothing would be uploaded or said."""
    heard: list[tuple[str, Refusal]] = []
    place.reporter.publish = lambda each: heard.append((each.path, each.cause))

    def write(path: str) -> None:
        (place.folder / path).parent.mkdir(exist_ok=True)
        (place.folder / path).write_text('{"global_step": 5}')

    write("base/model.h5")
    time.sleep(0.02)  # a tick of the kernel's clock
    scanner = place.scanner(Rules(settle_s=0.1))
    scanner.scan_and_take()
    for path in ("mine-1/a.h5", "mine-1/b.h5", "log.txt", "checkpoint-5/model.bin"):
        write(path)
    scanner.scan_and_take()
    assert heard == []
    time.sleep(0.15)
    write("mine-2/a.h5")
    for _ in range(2):
        scanner.scan_and_take()
    assert heard == [("mine-1", Refusal.UNKNOWN)]
    [said] = [each.getMessage() for each in caplog.records if "its format is unknown" in each.getMessage()]
    assert "mine-1/" in said
    assert "--done" in said
    scanner.end()
    assert heard == [("mine-1", Refusal.UNKNOWN), ("mine-2", Refusal.UNKNOWN)]


def test_what_was_taken_once_its_mark_was_whole_is_not_missed_when_it_is_rotated_away(place: Place) -> None:
    """The first scan woke when the marker was made, and saw it empty."""
    scanner = place.scanner(Rules())
    here = place.folder / "checkpoint-10"
    here.mkdir()
    (here / "rng_state.pth").write_bytes(torch_zip(x=1))
    for text in ("", json.dumps({"global_step": 10})):
        (here / "trainer_state.json").write_text(text)
        scanner.scan()
        scanner.take()
    assert [each.path for each in place.entries.open()] == ["checkpoint-10"]
    shutil.rmtree(here)
    scanner.scan()
    scanner.take()
    assert place.told == []


def test_of_thousands_each_is_judged_by_those_of_its_path_or_step(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all of them, a scan would take a second for every thousand, times their number."""
    judge, numbers = plan.judge, list[int]()

    def counting(
        found: Found, tree: Tree, known: Collection[Entry], *, num_nodes: int
    ) -> plan.Verdict | None:
        numbers.append(len(known))
        return judge(found, tree, known, num_nodes=num_nodes)

    monkeypatch.setattr(plan, "judge", counting)
    for step in range(10):
        (place.folder / f"{step}.done").write_text(f"{step}")
    scanner = place.scanner(Rules(pattern="*.done"))
    for _ in range(2):
        scanner.scan_and_take()
        assert len(place.entries.all) == 10
    assert numbers == [0] * 10 + [1] * 10
    place.entries.drop(place.entries.all[3])
    again = Entries(place.folder, place.entries.place, place.entries.remote)
    again.load()
    for entries in (place.entries, again):
        assert [len(entries.of_path(f"{step}.done")) for step in range(10)] == [1, 1, 0, *[1] * 7]


def test_what_is_written_between_the_scan_and_the_judgement_is_not_judged_by_that_scan(place: Place) -> None:
    """Lightning's `last.ckpt` is replaced by that of the next step while it is compared."""
    scanner = place.scanner(Rules())

    def save(name: str, value: int) -> None:
        (place.folder / "new").write_bytes(torch_zip(tensor=bytes([value]) * 400, global_step=value))
        (place.folder / "new").rename(place.folder / name)

    save("epoch=0-step=4.ckpt", 4)
    save("last.ckpt", 4)
    scanner.scan()
    assert [each.step for each in find(scanner.tree)] == [4, 4]  # read before
    save("last.ckpt", 8)
    scanner.take()
    assert (place.told, [each.step for each in place.entries.all.values()]) == ([], [4])
    save("epoch=0-step=8.ckpt", 8)
    scanner.scan()
    scanner.take()
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
    """`pull` into a watched folder brings the marker before large files."""
    state_of(tmp_path / "there/checkpoint-5", 5)
    remote = f"file://{tmp_path}/remote"
    with Uploader(tmp_path / "there", remote) as uploader:
        uploader.enqueue(tmp_path / "there/checkpoint-5", 5, "checkpoint-5")
        uploader.seal(5)
    out, seen = tmp_path / "out", dict[tuple[str, ...], str]()
    out.mkdir()

    def scan(*_: int) -> None:
        for found in find(Disk(out).scan(), Rules(ignores_times=True)):
            seen[found.inner] = found.reason

    newest = restore.find(remote)
    assert newest is not None
    restore.fetch(newest, out / "checkpoint-5", num_concurrent_reads=1, on_progress=scan)
    assert "it is being downloaded" in seen[("trainer_state.json",)]
    age(out)
    scan()
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
    scanner = place.scanner(Rules(ignores_times=True))
    scanner.scan_and_take()
    assert bool(place.entries.all) != is_unfinished
    if is_unfinished:
        named = unfinished if unfinished.suffix or unfinished.name == PARTIAL_FOLDER else unfinished.parent
        reason = place.reporter.incomplete["run/checkpoint-5"]
        assert reason.endswith(f"{named.relative_to(place.folder).as_posix()} exists")


def test_what_settles_while_it_is_fetched_on_is_not_handed_in(place: Place) -> None:
    """Of two processes that fetch, the first to end removes the folder that the other one makes again."""
    scanner = place.scanner(Rules(ignores_times=True))
    state_of(place.folder / "checkpoint-5", 5)
    age(place.folder)
    scanner.scan_and_take()
    assert len(place.entries.all) == 1
    (place.folder / "checkpoint-5" / PARTIAL_FOLDER).mkdir()
    scanner.scan()
    scanner.review()
    assert not place.entries.all


def corrupt(data: bytes) -> bytes:
    at = data.index(b"\1" * 400)
    return data[:at] + b"\2" + data[at + 1 :]


WHOLE = torch_zip(tensor=b"\1" * 400, global_step=10)


def test_a_file_that_contradicts_its_checksums_is_read_once_more_and_then_refused_until_it_changes(
    place: Place,
) -> None:
    """The kernel's clock is coarse: the last of several quick writes may leave a file's time as it was."""
    now_s = [0.0]
    scanner, path = place.scanner(Rules(), clock=lambda: now_s[0]), place.folder / "last.ckpt"
    path.write_bytes(corrupt(WHOLE))
    for now_s[0] in (0.0, CORRUPT_S):
        scanner.scan_and_take()
        (entry,) = place.entries.open()
        assert not scanner.is_whole(entry, lambda: None)
        scanner.scan_and_take()
        assert not place.entries.open()
        assert bool(scanner.num_left) == (now_s[0] == 0)
    assert place.told == [("refused", "last.ckpt")]
    assert "last.ckpt is not intact: archive/data/0" in place.reporter.refused["last.ckpt"]
    path.write_bytes(WHOLE)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 2))
    scanner.scan_and_take()
    (entry,) = place.entries.open()
    assert scanner.is_whole(entry, lambda: None)


def test_plain_files_count_only_if_they_were_not_there_when_the_folder_was_first_watched(
    place: Place,
) -> None:
    """What is there may be anything, such as a model that the training begins with."""
    (place.folder / "model_7.pt").write_bytes(torch_zip(x=1))
    time.sleep(0.02)  # a tick of the kernel's clock
    for _ in range(2):  # the second is a restart
        place.scanner(Rules()).scan_and_take()
        assert not place.entries.all
    (place.folder / "model_8.pt").write_bytes(torch_zip(x=1))
    (place.folder / "model_7.pt").write_bytes(torch_zip(x=2, y=3))
    place.scanner(Rules()).scan_and_take()
    assert sorted(each.path for each in place.entries.open()) == ["model_7.pt", "model_8.pt"]
    assert all(each.is_plain for each in place.entries.open())


def test_what_settles_and_grows_is_one_checkpoint_with_all_of_it(place: Place) -> None:
    scanner = place.scanner(Rules())
    state_of(place.folder / "checkpoint-5", 5)
    scanner.scan_and_take()
    (place.folder / "checkpoint-5/adapter.txt").write_text("late, but in time")
    scanner.scan_and_take()
    (entry,) = place.entries.open()
    assert "adapter.txt" in entry.shards.values()
    shutil.rmtree(place.folder / "checkpoint-5")
    scanner.scan_and_take()
    scanner.review()
    assert place.entries.open() == [entry]
    assert place.entries.is_intact(entry)


@pytest.mark.parametrize("second", ["step_1/optimizer.pt", "step_1/D_1.pth"])
def test_a_part_taken_before_the_other_is_dropped(place: Place, second: str) -> None:
    scanner = place.scanner(Rules())
    scanner.scan_and_take()
    first = place.folder / ("step_1/model.safetensors" if "optimizer" in second else "step_1/G_1.pth")
    first.parent.mkdir()
    if "optimizer" in second:
        first.write_bytes(safetensors(64))
        (place.folder / "step_1/model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "model.safetensors"}})
        )
    else:
        first.write_bytes(torch_zip(x=1))
        first = first.rename(place.folder / first.name)
        second = Path(second).name
    scanner.scan_and_take()
    assert len(place.entries.open()) == 1
    (place.folder / second).write_bytes(torch_zip(x=1))
    scanner.scan_and_take()
    assert place.entries.open() == []
    assert len(place.reporter.refused) == 1


def test_plain_files_that_were_there_are_named(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    (place.folder / "step1.pt").write_bytes(torch_zip(x=1))
    os.utime(place.folder / "step1.pt", (1_700_000_000, 1_700_000_000))
    for _ in range(2):
        place.scanner(Rules()).scan_and_take()
    [said] = [each.getMessage() for each in caplog.records if "step1.pt" in each.getMessage()]
    assert "--once" in said


def test_another_suffix_of_torch_save_is_named(place: Place) -> None:
    scanner = place.scanner(Rules(settle_s=0.0))
    scanner.scan_and_take()
    (place.folder / "checkpoint_1.pth.tar").write_bytes(torch_zip(x=1))
    scanner.scan_and_take()
    assert "--pattern 'checkpoint_*.pth.tar'" in place.reporter.unknown["."]


def test_parts_in_a_numbered_folder_want_a_marker(place: Place) -> None:
    scanner = place.scanner(Rules(settle_s=0.0))
    scanner.scan_and_take()
    (place.folder / "epoch_1").mkdir()
    for name in ("model.pt", "optimizer.pt"):
        (place.folder / "epoch_1" / name).write_bytes(torch_zip(x=1))
    scanner.scan_and_take()
    assert "--done DONE" in place.reporter.unknown["epoch_1"]
    assert "--pattern" not in place.reporter.unknown["epoch_1"]
