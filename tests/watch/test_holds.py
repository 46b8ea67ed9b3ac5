"""Candidates that their trainer deletes or writes anew before anybody knows that they are checkpoints."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from ckpt_async.watch.disk import Disk
from ckpt_async.watch.formats import Found, find
from ckpt_async.watch.holds import MAX_HELD, Hold, Holds
from ckpt_async.watch.plan import is_held
from ckpt_async.watch.room import Room
from ckpt_async.watch.tree import Tree
from ckpt_async.watch.wake import News


class Place:
    """A node without the mark: DCP's files come and go, and each look is held."""

    def __init__(self, folder: Path) -> None:
        self.out, self.state = folder / "out", folder / "held"
        self.out.mkdir()
        self.holds = self.start()

    def start(self) -> Holds:
        self.holds = Holds(self.out, self.state)
        self.holds.load()
        return self.holds

    def write(self, name: str, content: str, step: int = 10) -> Path:
        path = self.out / f"step-{step}/{name}.distcp"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        return path

    def look(self) -> Tree:
        tree = Disk(self.out).look()
        for each in find(tree):
            self.holds.see(each, tree)
        return tree

    def content(self, hold: Hold) -> dict[str, str]:
        """Of what it was seen to have; {} if that cannot be trusted."""
        tree = self.holds.tree(hold, Disk(self.out).look())
        return {path: tree.text(path) for path in tree.files} if tree else {}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


A, B = "step-10/a.distcp", "step-10/b.distcp"


def test_what_has_grown_is_one_version_and_stays_when_it_is_rotated_away(place: Place) -> None:
    place.write("a", "1")
    place.look()
    place.write("a", "11")
    place.write("b", "2")
    place.look()
    shutil.rmtree(place.out / "step-10")
    (hold,) = place.holds.gone(place.look())
    assert place.content(hold) == {A: "11", B: "2"}
    (hold,) = place.start().gone(place.look())
    assert place.content(hold) == {A: "11", B: "2"}, "also after the watcher was killed"


def test_a_rotation_that_has_begun_takes_nothing_from_what_was_seen(place: Place) -> None:
    place.write("a", "1")
    place.write("b", "2")
    seen_ns = place.look().now_ns
    (place.out / A).unlink()
    (hold,) = place.holds.gone(place.look())
    assert (place.content(hold), hold.seen_ns) == ({A: "1", B: "2"}, seen_ns)


def test_what_is_rotated_away_was_whole_until_its_first_file_was_removed(place: Place) -> None:
    """Another node's mark of a later time is not of these files."""
    paths = place.write("a", "1"), place.write("b", "2")
    place.holds.miss(place.look(), News())
    (hold,) = place.holds.all.values()
    first, second = (place.holds.folder(hold) / each for each in (A, B))
    paths[0].unlink()
    clock = place.out.parent / "clock"
    while not clock.exists() or clock.stat().st_ctime_ns <= first.stat().st_ctime_ns:
        clock.touch()
    paths[1].unlink()
    place.holds.miss(Disk(place.out).look(), News(folders=frozenset({"", "step-10"})))
    assert place.holds.all[hold.number].seen_ns == first.stat().st_ctime_ns < second.stat().st_ctime_ns


def test_a_name_that_is_used_again_is_another_version_with_none_of_the_earlier_files(place: Place) -> None:
    place.write("a", "1")
    place.write("b", "2")
    place.look()
    (place.out / A).unlink()
    place.write("a", "3")
    (place.out / B).unlink()
    tree = place.look()
    first, second = place.holds.of_path("step-10")
    assert place.holds.gone(tree) == [first]
    assert [place.content(each) for each in (first, second)] == [{A: "1", B: "2"}, {A: "3"}]


def test_links_that_a_kill_left_without_their_record_are_nothing(place: Place) -> None:
    """Between the links of one look, of a new version; and between those of a later look and its record."""
    place.write("a", "1")
    place.look()
    (hold,) = place.holds.all.values()
    place.write("b", "2")
    os.link(place.out / B, place.holds.folder(hold) / B)
    other = place.state / "00000002/step-20"
    other.mkdir(parents=True)
    os.link(place.out / A, other / "a.distcp")
    (place.state / "00000002.new").write_text("{")
    shutil.rmtree(place.out / "step-10")
    assert place.start().all == {1: hold}
    assert (place.content(hold), other.exists()) == ({A: "1"}, False)


def test_what_is_written_to_after_it_was_seen_is_not_trusted(place: Place) -> None:
    with place.write("a", "1").open("a") as file:
        place.look()
        (place.out / A).unlink()
        file.write("1")
    (hold,) = place.holds.all.values()
    assert place.content(hold) == {}


def test_only_the_newest_are_held(place: Place) -> None:
    for step in range(MAX_HELD + 3):
        os.utime(place.write("a", str(step), step), ns=(step, step * 10**9))
        place.look()
        shutil.rmtree(place.out / f"step-{step}")
    assert [each.path for each in place.holds.all.values()] == [f"step-{n}" for n in range(3, MAX_HELD + 3)]
    assert len(list(place.state.iterdir())) == 2 * MAX_HELD
    place.holds.room = Room(place.out, place.state, 1 << 60)  # as if the disk were full
    place.write("a", "x", 1000)
    place.look()
    assert [each.path for each in place.holds.all.values()] == [f"step-{MAX_HELD + 2}", "step-1000"]


def test_those_that_are_not_among_the_newest_are_not_linked_again_at_each_look(place: Place) -> None:
    for step in range(MAX_HELD + 3):
        os.utime(place.write("a", str(step), step), ns=(step, step * 10**9))
    place.look()
    paths = {each.path for each in place.holds.all.values()}
    assert paths == {f"step-{n}" for n in range(3, MAX_HELD + 3)}
    dropped: list[Hold] = []
    place.holds.dropping = dropped.append
    place.look()
    assert (dropped, {each.path for each in place.holds.all.values()}) == ([], paths)


def test_on_another_disk_nothing_is_held(place: Place) -> None:
    place.state = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        place.start()
        place.write("a", "1")
        place.look()
        assert (place.holds.is_possible, place.holds.all) == (False, {})
    finally:
        shutil.rmtree(place.state)


def test_a_mark_beside_the_checkpoint_is_held_as_it_was(place: Place) -> None:
    """DeepSpeed's `latest` is written anew for the next one."""
    place.write("a", "1")
    (place.out / "latest").write_text("step-10")
    found = Found("deepspeed", "step-10", 10, "step-10", (A,), "latest", is_waiting=True)
    place.holds.see(found, Disk(place.out).look())
    (place.out / "latest").write_text("step-20")
    (hold,) = place.holds.all.values()
    assert place.content(hold) == {A: "1", "latest": "step-10"}
    unmarked = Found("deepspeed", "step-10", 10, "step-10", (A,))
    place.holds.see(unmarked, Disk(place.out).look())
    assert place.holds.all == {1: hold}, "what another mark says changes nothing"


def test_what_is_staged_is_held_no_more(place: Place) -> None:
    place.write("a", "1")
    tree = place.look()
    place.holds.drop_version("step-10", {A: tree.files[A]._replace(inode=0)})
    assert place.holds.all, "another version"
    place.holds.drop_version("step-10", {A: tree.files[A], B: tree.files[A]})
    assert (place.holds.all, list(place.state.iterdir())) == ({}, [])


def test_only_what_can_still_become_one_is_held() -> None:
    waiting = Found("transformers", "c", 1, "c", ("c/x",), "c/trainer_state.json", is_waiting=True)
    unmarked = Found("dcp", "c", 1, "c", ("c/x",), reason="it has no .metadata")
    quiet = Found("quiet", "c", 1, "c", ("c/x",), is_waiting=True)
    assert [is_held(each, 1) for each in (waiting, unmarked, quiet)] == [True, False, False]
    assert [is_held(each, 2) for each in (waiting, unmarked)] == [True, True]


def test_what_is_not_ours_among_the_links_is_left_alone(place: Place) -> None:
    """A tool that copies the state leaves a folder of its own there."""
    foreign = place.state / "lost+found"
    foreign.mkdir()
    place.start()
    assert foreign.is_dir()
