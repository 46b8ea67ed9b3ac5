"""Training comes first: what links and copies leave of the disk."""

import errno
import os
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_async.core.refusal import Refusal
from ckpt_async.formats import Rules
from ckpt_async.watch import plan
from ckpt_async.watch.entries import State
from ckpt_async.watch.watcher import Watcher
from tests.faults.small_disk import on_small_disk
from tests.watch import conftest
from tests.watch.conftest import save
from tests.watch.scanning import Place

MIB = 1 << 20
BLOCK = 4096


class Disk:
    """As large and as full as it is said to be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free_bytes, self.total_bytes = 100 * MIB, 100 * MIB
        monkeypatch.setattr(os, "statvfs", self._facts)

    def _facts(self, _: object) -> os.statvfs_result:
        # What is free for root is not free for a trainer.
        blocks = (self.total_bytes // BLOCK, self.total_bytes // BLOCK, self.free_bytes // BLOCK)
        return os.statvfs_result((BLOCK, BLOCK, *blocks, 0, 0, 0, 0, 255))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.waker.close()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def written(here: Path, *, size_bytes: int = MIB) -> None:
    here.mkdir()
    (here / "model.bin").write_bytes(bytes(size_bytes))
    (here / "DONE").touch()


def scans(place: Place, rules: Rules | None = None, num: int = 1) -> None:
    scanner = place.scanner(rules or Rules(done="DONE"))
    for _ in range(num):
        scanner.scan()
        scanner.take()


@pytest.mark.parametrize(
    ("free_mib", "lost"),
    [(2, []), (1.5, [1]), (1, [1]), (0.9, [1, 2]), (0, [1, 2]), (-1, [1, 2, 3])],
)
def test_what_only_links_keep_on_a_full_disk_goes_oldest_first(
    place: Place, disk: Disk, free_mib: float, lost: list[int]
) -> None:
    """Free is to be room for two saves of 1 MiB; `-1`: a user who wants 3 MiB."""
    for step in (1, 2, 3, 4, 5):
        written(place.folder / f"step-{step}")
        scans(place)
    for step in (1, 2, 3):
        shutil.rmtree(place.folder / f"step-{step}")
    if free_mib < 0:
        place.room.min_free_bytes = 3 * MIB
    disk.free_bytes = int(max(0, free_mib) * MIB)
    scanner = place.scanner(Rules(done="DONE"))
    scanner.scan()
    scanner.take()
    disk.free_bytes = 100 * MIB
    scanner.scan()
    scanner.take()
    assert place.told == [("refused", f"step-{step}") for step in lost]
    entries = place.entries.all.values()
    assert [each.step for each in entries if each.refusal is Refusal.NO_SPACE] == lost
    assert {each.step for each in entries if place.entries.is_intact(each)} == {1, 2, 3, 4, 5} - {*lost}


def test_what_the_trainer_has_still_costs_nothing_and_stays(place: Place, disk: Disk) -> None:
    disk.free_bytes = 0
    for step in (1, 2, 3):
        written(place.folder / f"step-{step}")
        scans(place)
    assert (place.told, len(place.entries.open())) == ([], 3)


def test_what_the_user_wants_to_be_left_free_is_not_less_while_the_next_checkpoint_is_written(
    place: Place, disk: Disk
) -> None:
    """It may be for something else than checkpoints."""
    written(place.folder / "step-1")
    scans(place)
    (place.folder / "step-2").mkdir()
    (place.folder / "step-2/model.bin").write_bytes(bytes(MIB * 3 // 4))
    scans(place)
    place.room.min_free_bytes, disk.free_bytes = 3 * MIB, 2 * MIB
    assert place.room.lacking_bytes() == MIB


def test_room_for_two_saves_is_kept_free_of_any_disk(place: Place, disk: Disk) -> None:
    """As by a trainer's own uploader."""
    disk.total_bytes, disk.free_bytes = 10_000 * MIB, 2 * MIB
    written(place.folder / "step-1")
    scans(place)
    assert not place.room.lacking_bytes()
    disk.free_bytes -= BLOCK
    assert place.room.lacking_bytes() == BLOCK
    disk.total_bytes = disk.free_bytes = 0  # some network file systems do not say
    assert not place.room.lacking_bytes()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was copied, of files that may not be linked."""
    copied, copyfile = list[str](), shutil.copyfile

    def link(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    def copy(source: Path, target: Path, **more: Any) -> None:
        copied.append(source.name)
        copyfile(source, target, **more)

    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(shutil, "copyfile", copy)
    return copied


def test_a_copy_that_would_fill_the_disk_is_not_begun(place: Place, disk: Disk, copied: list[str]) -> None:
    written(place.folder / "step-1")
    disk.free_bytes = 3 * MIB - BLOCK
    scans(place, num=3)
    assert (copied, place.told) == ([], [("refused", "step-1")])
    assert "a copy of 1.0 MiB would leave less than 2.0 MiB" in place.reporter.refused["step-1"]
    disk.free_bytes = 3 * MIB
    scans(place)
    assert sorted(copied) == ["DONE", "model.bin"]
    assert [each.is_copied for each in place.entries.open()] == [True]
    disk.free_bytes = MIB
    scans(place, num=3)
    assert (place.entries.all, len(copied)) == ({}, 2), "what it is of is there still, so it is no loss"


def test_what_is_removed_while_it_waits_to_be_copied_is_told(
    place: Place, disk: Disk, copied: list[str]
) -> None:
    scanner, free_mib = place.scanner(Rules(done="DONE")), [3, 2.9, 3, 2.9]
    for step, disk.free_bytes in enumerate((int(each * MIB) for each in free_mib), start=1):
        written(place.folder / f"step-{step}")
        scanner.scan()
        scanner.take()
        if step == 2:
            shutil.rmtree(place.folder / "step-2")
    assert [each.step for each in place.entries.open()] == [1, 3]
    shutil.rmtree(place.folder / "step-4")
    scanner.scan()
    scanner.take()
    assert place.told == [("incomplete", "step-2"), ("incomplete", "step-4")]


def test_where_space_is_scarce_one_at_a_time_is_handed_in_and_else_few_large_ones_or_many_small_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in the uploader's hands keeps its space for as long as the store is away. Of thousands, each round takes
    a look at all of them.
    """
    hand_in, num_handed = Watcher._hand_in, list[int]()

    def counting(self: Watcher, entry: Any) -> None:
        hand_in(self, entry)
        num_handed.append(sum(each.state is State.HANDED for each in self.entries.open()))

    monkeypatch.setattr(Watcher, "_hand_in", counting)
    for min_free_bytes, small_bytes, at_once in ((10**15, 1 << 30, 1), (1, 0, 4), (1, 1 << 30, 5)):
        (here := tmp_path / f"{at_once}").mkdir()
        monkeypatch.setattr(plan, "SMALL_BYTES", small_bytes)
        place = conftest.Place(here)
        for step in (10, 20, 30, 40, 50):
            save(place, step)
        assert place.once("--min-free-bytes", str(min_free_bytes))[0] == 0
        assert (max(num_handed), place.newest()) == (at_once, 50)


TRAINER = """
    import json, os, shutil, sys, time
    for step in range(1, 13):
        here = f"{sys.argv[1]}/checkpoint-{step}"
        os.mkdir(here)
        with open(f"{here}/model.bin", "wb") as file:
            file.write(os.urandom(5_000_000))
        with open(f"{here}/trainer_state.json", "w") as file:
            json.dump({"global_step": step}, file)
        shutil.rmtree(f"{sys.argv[1]}/checkpoint-{step - 2}", ignore_errors=True)
        time.sleep(0.7)
"""


@pytest.mark.fault("F5")
@pytest.mark.timeout(90)
def test_a_trainer_on_a_small_disk_does_not_notice_that_the_store_is_away(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAINER))
    done = on_small_disk(
        tmp_path,
        """
        import subprocess
        (disk / "out").mkdir()
        run = [sys.executable, "-m", "ckpt_async", "run", "s3://bucket/run", "--folder", disk / "out"]
        run += ["--endpoint-url", "http://127.0.0.1:1", "--region", "us-east-1", "--drain-timeout", "0"]
        trainer = [sys.executable, tmp / "train.py", disk / "out"]
        keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
        sys.exit(subprocess.run([*run, "--", *trainer], env=os.environ | keys).returncode)
        """,
        size="40m",
    )
    assert "Traceback" not in done.stderr, "of the trainer"
    refused = [line for line in done.stderr.splitlines() if "REFUSED" in line]
    assert [line.split(":")[0] for line in refused] == [f"checkpoint-{n + 1}" for n in range(len(refused))]
    assert 4 <= len(refused) <= 10
    assert done.returncode == 1, "what was lost is said"
