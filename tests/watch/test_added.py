"""What a trainer adds to a checkpoint after its mark is sent with it, or named."""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_async.core.refusal import Refusal, Refused
from ckpt_async.watch import added
from ckpt_async.watch.added import LEFT_OUT_S, LeftOut
from ckpt_async.watch.entries import Entry, State
from ckpt_async.watch.formats import Found, Known, Rules, find
from ckpt_async.watch.formats.checks import UNCOUNTED_S
from ckpt_async.watch.formats.found import GROWING_S, Version
from ckpt_async.watch.tree import Identity, Tree
from tests.dcp_metadata import metadata_of
from tests.events.receiver import free_port, receiving
from tests.watch.conftest import BEING_UPLOADED_S, Place, counts, hashes, save
from tests.watch.looking import Place as Looking
from tests.watch.trees import SECOND, tree_of

pytestmark = pytest.mark.timeout(90)

FILES = {"step-1/a": Identity(1, 1, 1), "step-1/DONE": Identity(2, 1, 2)}
NONE = Known()
MORE = FILES | {"step-1/log": Identity(3, 1, 3)}


def entry(number: int, files: dict[str, Identity], **more: Any) -> Entry:
    shards = {path: path.removeprefix("step-1/") for path in files}
    return Entry(number, "done", "step-1", 1, "step-1", files, shards, "step-1/DONE", **more)


@pytest.fixture
def looking(tmp_path: Path) -> Iterator[Looking]:
    place = Looking(tmp_path)
    yield place
    place.waker.close()


# --- until it is handed in -----------------------------------------------------------------------------------


def test_what_is_added_while_it_settles_is_committed_with_it(place: Place) -> None:
    watching = place.watch("--settle-s", "2", "-v")
    save(place, 10)
    watching.until_logged("complete path=checkpoint-10")
    (place.out / "checkpoint-10/adapter_model.bin").write_bytes(b"x" * 99)
    (place.out / "checkpoint-10/tokenizer").mkdir()
    (place.out / "checkpoint-10/tokenizer/vocab.json").write_text("{}")
    watching.until("committed", 10)
    assert place.committed(10) == hashes(place.out / "checkpoint-10")
    watching.process.terminate()
    ended = watching.until("ended")
    assert (ended["committed"], ended["refused"], ended["incomplete"], ended["exit_code"]) == (1, {}, {}, 0)


RULES = {"done": Rules(done="DONE"), "pattern": Rules(pattern="step-*"), "transformers": Rules()}


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"global_step": 1}))


def rename(path: Path) -> None:
    write(path.with_suffix(".tmp"))
    os.utime(path.with_suffix(".tmp"), ns=(1, (path.parent / "DONE").stat().st_mtime_ns + 1))
    path.with_suffix(".tmp").rename(path)


@pytest.mark.parametrize("make", [write, rename])
@pytest.mark.parametrize("rules", RULES)
def test_what_has_grown_is_staged_anew_and_its_settle_time_begins_again(
    looking: Looking, rules: str, make: Callable[[Path], None]
) -> None:
    lookout = looking.lookout(RULES[rules])
    here = looking.folder / ("checkpoint-1" if rules == "transformers" else "step-1")
    for name in ("model.bin", "trainer_state.json", "DONE"):
        write(here / name)
    os.utime(here / "trainer_state.json")

    def look() -> list[list[str]]:
        lookout.look()
        lookout.review()
        lookout.take()
        return [sorted(each.shards.values()) for _, each in sorted(looking.entries.all.items())]

    first = ["DONE", "model.bin", "trainer_state.json"]
    assert look() == [first]
    make(here / "config.json")
    assert look() == [first, sorted([*first, "config.json"])]
    make(here / "more" / "vocab.json") if make is write else make(here / "vocab.json")
    grown = sorted([*first, "config.json", "more/vocab.json" if make is write else "vocab.json"])
    assert look() == [first, grown], "the first is kept, what is between goes"
    small, large = sorted(looking.entries.all.values(), key=lambda each: each.number)
    assert (large.staged_ns > small.staged_ns, looking.teller.incomplete) == (True, {})
    shutil.rmtree(here)  # rotated away
    assert look() == [first, grown]
    assert looking.entries.is_intact(large)


def test_of_what_has_grown_nothing_is_copied_twice(looking: Looking, monkeypatch: pytest.MonkeyPatch) -> None:
    link, copied = os.link, list[str]()

    def on_another_disk(source: Path, target: Path, **more: Any) -> None:
        if looking.folder in Path(source).parents:
            copied.append(Path(source).name)
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        link(source, target, **more)

    monkeypatch.setattr(os, "link", on_another_disk)
    lookout = looking.lookout(Rules(done="DONE"))
    for names in (["model.bin", "DONE"], ["late"]):
        for name in names:
            write(looking.folder / "step-1" / name)
        lookout.look()
        lookout.take()
    assert [len(each.shards) for each in looking.entries.all.values()] == [2, 3]
    assert sorted(copied) == ["DONE", "model.bin"]
    assert [each.is_copied for each in looking.entries.all.values()] == [True, True]


def test_what_is_written_anew_has_not_grown(looking: Looking) -> None:
    """A save to the same place, which renames its files: the first of them has a new name."""
    lookout = looking.lookout(Rules(done="DONE"))
    names = ["model.bin", "DONE"]
    for name in (*names, "shard-2.bin"):
        write(looking.folder / "step-1" / name)
        if name != "model.bin":
            lookout.look()
            lookout.take()
    assert len(looking.entries.all) == 2
    write(looking.folder / "new")
    (looking.folder / "new").rename(looking.folder / "step-1/model.bin")
    lookout.look()
    lookout.review()
    [left] = looking.entries.all.values()
    assert (sorted(left.shards.values()), looking.entries.is_intact(left)) == (sorted(names), True)


def test_what_is_made_right_after_the_mark_is_added_once_nothing_changes_any_more() -> None:
    """Seen for the first time with it."""
    written = {"step-1/a": b"1", "step-1/DONE": b"1", "step-1/b": b"1", "step-1/c": b"1"}
    tree = tree_of(written)
    born = {path: was.mtime_ns - SECOND // 2 for path, was in tree.files.items()}

    def reason(
        *, now_s: float = UNCOUNTED_S, settle_s: float = 0.5, known: Known = NONE, **born_s: float
    ) -> str:
        at = born | {f"step-1/{name}": born[f"step-1/{name}"] + int(s * SECOND) for name, s in born_s.items()}
        tree = tree_of(written, now_s=now_s, born_ns=at)
        (found,) = find(tree, Rules(done="DONE", settle_s=settle_s), known)
        return found.reason

    assert not reason()
    assert "b was added after its marker, and it changed within the last 30 s" in reason(now_s=29)
    assert "b is newer than its marker" in reason(settle_s=0.4), "too late"
    assert "b is newer than its marker" in reason(b=-1), "it was there before: it is being written anew"
    assert not reason(c=-1), "while b was written"
    without = {path: was for path, was in tree.files.items() if path[-1] not in "bc"}
    handed = Known(handed={"step-1": [without]})
    assert "b is newer than its marker" in reason(known=handed), "it is not sent twice"
    other = Known(handed={"step-1": [without | {"step-1/DONE": Identity(9, 9, 9)}]})
    assert not reason(known=other)


def test_what_was_there_before_is_written_anew_whatever_its_inode() -> None:
    """A save to the same place that begins soon after the mark: by renames, each of its files is a new one."""
    written = dict.fromkeys(["step-1/a", "step-1/DONE", "step-1/b"], b"1")
    tree = tree_of(written, now_s=UNCOUNTED_S)
    born = {path: was.mtime_ns - SECOND // 2 for path, was in tree.files.items()}

    def reason(*earlier: dict[str, Identity], marked_ns: int) -> str:
        now = tree_of(written, now_s=UNCOUNTED_S, born_ns=born)
        versions = [Version(each, marked_ns) for each in earlier]
        (found,) = find(now, Rules(done="DONE"), Known(versions={"step-1": versions}))
        return found.reason

    before = {path: Identity(9, 1, was.mtime_ns - 100 * SECOND) for path, was in tree.files.items()}
    last_ns = max(was.mtime_ns for was in before.values())
    assert not reason(marked_ns=0)
    assert "b is newer than its marker" in reason(before, marked_ns=last_ns)
    assert not reason(before, marked_ns=last_ns - 1), "it was added to the earlier one, too"
    same = {path: was for path, was in tree.files.items() if path != "step-1/b"}
    assert not reason(same, marked_ns=last_ns)
    (hidden,) = find(tree_of(written, born_ns=born), Rules(done="DONE"), Known(growing={"step-1": [{}]}))
    assert not hidden.reason
    for versions, is_taken in (([], True), ([Version(before, last_ns)], False)):
        now = tree_of(written, now_s=1, born_ns=born)
        assert (added.marked(now, "step-1", [], Rules(done="DONE"), versions) is not None) is is_taken


@pytest.mark.parametrize("format_", ["dcp", "transformers"])
def test_what_the_mark_names_is_never_added(format_: str) -> None:
    """A save to the same place that began within --settle-s of the mark, and was cut short: all seemed to be there."""
    metadata = metadata_of({"__0_0.distcp": 400})
    here, mark = {
        "dcp": ("step-1", {"step-1/.metadata": metadata}),
        "transformers": (
            "checkpoint-1/optimizer_0",
            {
                "checkpoint-1/optimizer_0/.metadata": metadata,
                "checkpoint-1/trainer_state.json": b'{"global_step": 1}',
            },
        ),
    }[format_]
    for late, is_complete in ((f"{here}/__0_0.distcp", False), (f"{here}/note.txt", True)):
        rest = {f"{here}/__0_0.distcp": bytes(400)} if is_complete else {}
        written = {**rest, **mark, late: bytes(400)}
        born_ns = {late: tree_of(written).files[late].mtime_ns}
        tree = tree_of(written, now_s=UNCOUNTED_S + 1, born_ns=born_ns)
        (found,) = find(tree)
        assert (found.format, not found.reason) == (format_, is_complete)
        assert is_complete or f"{late} is newer than its marker" in found.reason
        is_marked = added.marked(tree, found.path, [late], Rules(), []) is not None
        assert is_marked is is_complete, "after its trainer has removed it"


def test_what_was_added_to_an_earlier_save_to_the_same_place_is_not_of_this_one() -> None:
    """This save's is still to come. It may be written in place: that it was there before is known."""
    written = dict.fromkeys(["step-1/b", "step-1/a", "step-1/DONE"], b"1")
    now = tree_of(written, now_s=UNCOUNTED_S)
    marked_ns = now.files["step-1/b"].mtime_ns - 1
    earlier = {path: Identity(9, 1, marked_ns) for path in written} | {"step-1/b": now.files["step-1/b"]}

    def seen(tree: Tree, *versions: Version) -> Found:
        (found,) = find(tree, Rules(done="DONE"), Known(versions={"step-1": versions}))
        return found

    whole = seen(now)
    assert (sorted(whole.files), whole.left_over) == (sorted(written), ())
    without = seen(now, Version(earlier, marked_ns))
    assert (sorted(without.files), without.left_over) == (["step-1/DONE", "step-1/a"], ("step-1/b",))
    assert not seen(now, Version(earlier, marked_ns + 1)).left_over, "it had it when it was marked"
    same = now.files | {"step-1/b": now.files["step-1/b"]}
    assert not seen(now, Version(same, marked_ns)).left_over, "nothing else is another save"
    again = tree_of(dict.fromkeys(["step-1/a", "step-1/DONE", "step-1/b"], b"1"), now_s=UNCOUNTED_S)
    assert "b is newer than its marker" in seen(again).reason
    settle = Rules(done="DONE", settle_s=2)
    (found,) = find(again, settle, Known(versions={"step-1": [Version(earlier, marked_ns)]}))
    assert not found.reason


def test_a_rank_s_file_that_is_as_it_was_with_another_mark_is_not_of_this_save() -> None:
    """Each rank copies its own files into the place, with their times: the mark may come before the others'."""
    files = {"last/__0_0.distcp": b"of 0", "last/__1_0.distcp": b"of 1"}
    written = files | {"last/.metadata": metadata_of({"__0_0.distcp": 4, "__1_0.distcp": 4})}
    now = tree_of(written, now_s=UNCOUNTED_S)

    def reason(**was: Identity) -> str:
        earlier = dict(now.files) | {f"last/{name}": each for name, each in was.items()}
        for marked_ns in (now.files["last/.metadata"].mtime_ns, 1):
            (found,) = find(now, Rules(), Known(versions={"last": [Version(earlier, marked_ns)]}))
        return found.reason

    other = Identity(9, 1, 1)
    marked = {".metadata": other, "__0_0.distcp": other}
    assert reason(**marked) == "last/__1_0.distcp belongs to a different save to the same place than the rest"
    assert reason(**marked, **{"__1_0.distcp": other}) == ""
    assert reason() == "", "it is this one"


def test_what_was_written_to_before_it_was_handed_in_is_remembered(looking: Looking) -> None:
    """The next save to the same place is compared with it: a late rank's file is of one of them."""
    lookout, here = looking.lookout(Rules(ranks=2)), looking.folder / "checkpoint-1"
    here.mkdir()
    first = ("model.bin", "rng_state_0.pth", "trainer_state.json")

    def look(*names: str) -> list[Entry]:
        for name in names:
            (here / name).write_text(json.dumps({"global_step": 1, "at": time.time_ns()}))
        lookout.look()
        lookout.review()
        lookout.take()
        return list(looking.entries.all.values())

    assert len(look(*first, "rng_state_1.pth")) == 1
    assert look(*first) == [], "rank 1 has not begun"
    assert "belongs to a different save" in looking.teller.incomplete["checkpoint-1"].reason
    assert len(look("rng_state_1.pth")) == 1


def test_what_came_too_late_for_one_save_is_no_part_of_the_next(looking: Looking) -> None:
    lookout, here = looking.lookout(Rules(done="DONE", settle_s=0)), looking.folder / "step-1"
    here.mkdir()

    def look(*names: str, state: State | None = None) -> list[str]:
        for name in names:
            (here / "new").write_text(str(time.time_ns()))
            (here / "new").rename(here / name)
        lookout.look()
        lookout.take()
        newest = max(looking.entries.all.values(), key=lambda each: each.number)
        if state is not None:
            looking.entries.settle(newest, state)
        return sorted(newest.shards.values())

    assert look("model.bin", "DONE", state=State.COMMITTED) == ["DONE", "model.bin"]
    assert look("late.bin") == ["DONE", "model.bin"]
    assert look("model.bin", "DONE", state=State.COMMITTED) == ["DONE", "model.bin"]
    assert len(looking.entries.all) == 2
    assert lookout._past
    shutil.rmtree(here)
    look()
    assert not lookout._past, "a run has many"


def test_what_was_added_before_a_later_one_was_complete_need_not_be_quiet() -> None:
    """Waiting, it would be handed in after that, and after a kill be passed over as older."""

    def reason(*later: str) -> str:
        written = dict.fromkeys(["step-1/a", "step-1/DONE", "step-1/b", *later], b"1")
        tree = tree_of(written)
        born = {path: was.mtime_ns - SECOND // 2 for path, was in tree.files.items()}
        [found, *_] = find(tree_of(written, born_ns=born), Rules(done="DONE", settle_s=2))
        assert found.path == "step-1"
        return found.reason

    assert not reason("step-2/a", "step-2/DONE")
    for others in ([], ["step-2/a"], ["step-2/DONE", "step-1/c"]):
        assert "was added after its marker, and it changed within the last 30 s" in reason(*others)


# --- for ever ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age_s", "larger", "files", "is_held_back"),
    [
        (1, [], FILES, False),
        (1, [], {}, False),  # removed
        (
            1,
            [],
            {"step-1/DONE": FILES["step-1/DONE"], "step-1/log": MORE["step-1/log"]},
            False,
        ),  # begun to be
        (1, [], MORE, True),
        (GROWING_S - 1, [], MORE, True),
        (GROWING_S, [], MORE, False),
        (5, [(State.STAGED, 1)], MORE, True),
        (5, [(State.STAGED, 5)], {}, True),
        (GROWING_S, [(State.STAGED, GROWING_S - 0.5)], MORE, False),  # what it has grown to does not settle
        (GROWING_S, [(State.STAGED, 5)], MORE, True),
        (GROWING_S, [(State.HANDED, 5)], MORE, True),
        (5, [(State.REFUSED, 5)], MORE, False),
        (5, [(State.REFUSED, 5), (State.STAGED, 6)], MORE, False),
        (5, [(State.COMMITTED, 5)], {}, True),  # and both were rotated away
        (5, [(State.REFUSED, 5), (State.COMMITTED, 6)], MORE, True),
    ],
)
def test_how_long_it_is_held_back_for_what_is_added(
    age_s: float, larger: list[tuple[State, float]], files: dict[str, Identity], is_held_back: bool
) -> None:
    small = entry(1, FILES)
    known = [small]
    for number, (state, at_s) in enumerate(larger, start=2):
        known.append(entry(number, MORE, state=state, staged_ns=int(at_s * SECOND)))
    now_ns = int(age_s * SECOND)
    assert added.is_held_back(small, known, files, now_ns, Rules()) is is_held_back
    fetched = replace(small, generation=1)
    assert not added.is_held_back(fetched, known, files, now_ns, Rules()), "it was handed in before"
    raised = Rules(settle_s=30)
    assert added.is_held_back(small, known[:1], MORE, int(299 * SECOND), raised)


def test_other_nodes_are_not_kept_waiting_for_what_is_added() -> None:
    """They may rotate away their parts meanwhile."""
    small, rules = entry(1, FILES), Rules(settle_s=3, num_nodes=2)
    for age_s, is_held_back in ((5, True), (6, False)):
        assert added.is_held_back(small, [small], MORE, age_s * SECOND, rules) is is_held_back
    large = entry(2, MORE, staged_ns=2 * SECOND)
    assert added.is_held_back(small, [small, large], MORE, 6 * SECOND, rules), "it has settled"


def test_what_may_still_be_added_to_was_not_handed_in() -> None:
    small, large = entry(1, FILES), entry(2, MORE)
    assert added.known_of([small, large]).growing == {"step-1": [FILES, MORE]}
    assert not added.known_of([replace(small, is_followed=True)]).growing
    assert not added.known_of([small, replace(large, state=State.REFUSED)]).growing
    known = added.known_of([replace(small, state=State.COMMITTED)])
    assert (known.growing, known.handed) == ({}, {"step-1": [FILES]})


def test_a_file_that_is_added_and_then_written_for_ever_does_not_take_the_rest_with_it(place: Place) -> None:
    """It is sent as it was, and named: a link would be written to while it is uploaded."""
    watching = place.watch("--settle-s", "1", "--max-bytes-per-s", "5e6", "-v")
    save(place, 10, size_bytes=20_000_000)
    watching.until_logged("complete path=checkpoint-10")
    log = place.out / "checkpoint-10/train.log"
    log.write_text("1")
    saved = hashes(log.parent)
    watching.until_logged("complete path=checkpoint-10")
    save(place, 20)
    time.sleep(BEING_UPLOADED_S)
    with log.open("a") as file:
        file.write("2")
    watching.until("committed", 10)
    assert place.committed(10) == saved
    watching.process.terminate()
    ended = watching.until("ended")
    assert (ended["exit_code"], ended["incomplete"]) == (1, {})
    assert "train.log was rewritten after the checkpoint was handed in" in ended["refused"]["checkpoint-10"]


def test_what_was_added_and_changes_before_it_has_settled_is_staged_anew(looking: Looking) -> None:
    lookout = looking.lookout(Rules(done="DONE"))
    for name in ("model.bin", "DONE"):
        write(looking.folder / "step-1" / name)
    for text in ("", "1", "12"):
        lookout.look()
        lookout.review()
        lookout.take()
        (looking.folder / "step-1/log").write_text(text)
    lookout.look()
    lookout.review()
    lookout.take()
    assert [(each.number, len(each.shards)) for each in looking.entries.all.values()] == [(1, 2), (2, 3)]
    assert (looking.entries.staged(looking.entries.all[2]) / "log").read_text() == "12"


# --- removed before it was quiet -----------------------------------------------------------------------------


@pytest.mark.parametrize("written", [(), ("log",), ("log", "model.bin")])
def test_what_is_first_seen_with_what_was_added_and_is_removed_is_sent_as_its_mark_stood_for_it(
    looking: Looking, written: tuple[str, ...]
) -> None:
    lookout = looking.lookout(Rules(done="DONE"))
    refused = list[Refused]()
    looking.teller.on_refused = refused.append
    here = looking.folder / "step-1"
    for name in ("model.bin", "DONE", "adapter", "log"):
        write(here / name)
    for path in (here / "adapter", here / "log"):
        os.utime(path, ns=(1, (here / "DONE").stat().st_mtime_ns + 1))
    lookout.look()
    lookout.take()
    (hold,) = looking.holds.all.values()
    for name in written:
        with (here / name).open("a") as file:
            file.write("more")
        os.utime(here / name)
    if written:  # a rotation that has begun with nothing of it
        lookout._take_held(hold)
        assert (refused, list(looking.holds.all)) == ([], [hold.number])
    shutil.rmtree(here)
    for _ in range(2):
        lookout.look()
        lookout.review()
        lookout.take()
    assert not looking.holds.all
    staged = [sorted(each.shards.values()) for each in looking.entries.all.values()]
    if "model.bin" in written:
        assert (staged, [each.cause for each in refused]) == ([], [Refusal.INCOMPLETE])
        assert "was still being written when its trainer removed it" in looking.teller.refused["step-1"]
    elif written:
        assert staged == [["DONE", "adapter", "model.bin"]]
        assert [each.cause for each in refused] == [Refusal.CHANGED]
        assert looking.teller.refused["step-1"].startswith("step-1/log was still being written when")
    else:
        assert (staged, refused) == ([["DONE", "adapter", "log", "model.bin"]], [])


# --- too late ------------------------------------------------------------------------------------------------


def test_what_comes_after_it_was_handed_in_is_named(place: Place) -> None:
    port = free_port()
    with receiving() as receiver:
        watching = place.watch(
            "--metrics-port", str(port), "--webhook", receiver.url, "--webhook-on", "refused"
        )
        saved = save(place, 10)
        watching.until("committed", 10)
        (place.out / "checkpoint-10/adapter_model.bin").write_bytes(b"x")
        reason = watching.until("changed", 10)["reason"]
        assert counts(port, place.remote)["changed"] == 1
        watching.process.terminate()
        ended = watching.until("ended")
        [body] = receiver.bodies
    assert (watching.process.wait(), place.committed(10)) == (1, saved)
    assert reason.startswith("checkpoint-10/adapter_model.bin appeared after the checkpoint was handed in")
    assert "raise --settle-s" in reason
    assert (ended["refused"], ended["incomplete"]) == ({"checkpoint-10": reason}, {})
    assert (body["step"], body["details"]["cause"], body["details"]["reason"]) == (10, "changed", reason)
    code, again = place.once()
    assert (code, again["refused"]) == (1, {"checkpoint-10": reason}), "it is still not in the store"
    (place.out / "checkpoint-10/adapter_model.bin").unlink()
    assert place.once()[0] == 0


class Late:
    """One checkpoint that was handed in."""

    def __init__(self) -> None:
        self.now_s, self.told = 0.0, list[str]()
        self.left_out = LeftOut(lambda _, reason: self.told.append(reason), clock=lambda: self.now_s)

    def see(self, files: dict[str, Identity], *, has_grown: bool) -> int:
        handed = entry(1, FILES, state=State.HANDED)
        self.left_out.see({1: (handed, files)} if has_grown else {}, Tree(files, lambda *_: b""))
        return len(self.told)


def test_what_is_too_late_is_told_when_it_stays_or_goes_with_its_checkpoint() -> None:
    late = Late()
    assert late.see(MORE, has_grown=True) == 0
    assert late.see(FILES, has_grown=False) == 0, "it was there for a moment"
    late.now_s = LEFT_OUT_S
    assert late.see(MORE, has_grown=True) == 0
    assert late.see({**MORE, "step-1/a": Identity(9, 1, 9)}, has_grown=False) == 0, "a save to the same place"
    assert late.see(MORE, has_grown=True) == 0
    assert late.see({}, has_grown=False) == 1, "both were rotated away"
    assert late.see(MORE, has_grown=True) == 1
    late.now_s += LEFT_OUT_S
    assert late.see(MORE, has_grown=True) == 2
    late = Late()
    late.see(MORE, has_grown=True)
    late.left_out.end()
    assert [each.split()[0] for each in late.told] == ["step-1/log"]


@pytest.mark.parametrize("rules", [Rules(), Rules(done="DONE")])
def test_what_comes_too_late_on_a_node_without_the_mark_is_named(looking: Looking, rules: Rules) -> None:
    lookout = looking.lookout(rules, num_nodes=2)
    refused = list[Refused]()
    looking.teller.on_refused = refused.append
    write(looking.folder / "step-1/__1_0.distcp")
    lookout.look()
    files = {"step-1/__1_0.distcp": lookout.tree.files["step-1/__1_0.distcp"]}
    looking.entries.put(entry(1, files, state=State.COMMITTED, is_followed=True))
    for name in ("optimizer.tmp", "optimizer.bin"):
        assert not refused
        write(looking.folder / "step-1" / name)
        lookout.look()
        lookout.take()
        lookout.end()
    assert [(each.path, each.cause, each.version) for each in refused] == [("step-1", Refusal.CHANGED, 1)]
    assert looking.teller.refused["step-1"].startswith("step-1/optimizer.bin appeared after")
    looking.teller.settled("committed", entry(2, files))
    assert not looking.teller.refused, "a later version has it"


NEXT = {
    "dcp": ("__1_0.distcp", "optimizer.bin"),
    "transformers": ("rng_state_1.pth", "adapter.bin"),
    "deepspeed": ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "layer_00-model_00-model_states.pt"),
}


@pytest.mark.parametrize("format_", NEXT)
def test_on_a_node_without_the_mark_a_rank_that_it_had_not_is_of_the_next_save(format_: str) -> None:
    """Ranks have moved between nodes. Any other file is named: its rank may be late, or a callback has added it."""
    sent = replace(entry(1, {"step-1/a": FILES["step-1/a"]}, is_followed=True), format=format_)
    rank, other = (f"step-1/{name}" for name in NEXT[format_])
    late = dict.fromkeys((rank, other), Identity(9, 1, 9))
    assert added.without_next_save(sent, {**sent.files, **late}).keys() == {*sent.files, other}
    for unsure in (replace(sent, is_followed=False), replace(sent, format="olmo")):
        assert added.without_next_save(unsure, late) == late
    again = replace(sent, files=late)
    assert added.without_next_save(again, late) == late, "it was handed in"


def test_a_rank_that_moves_to_a_node_without_the_mark_is_not_called_late(looking: Looking) -> None:
    lookout = looking.lookout(Rules(), num_nodes=2)
    write(looking.folder / "step-1/__2_0.distcp")
    lookout.look()
    sent = replace(entry(1, dict(lookout.tree.files), state=State.COMMITTED, is_followed=True), format="dcp")
    looking.entries.put(sent)
    write(looking.folder / "step-1/__1_0.distcp")
    lookout.look_and_take()
    lookout.end()
    assert (looking.told, looking.teller.refused) == ([], {})
