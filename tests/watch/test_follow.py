"""What a node sends of a checkpoint that another has announced, where its own disk does not answer."""

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt_async import Uploader
from ckpt_async.core.model import CheckpointId
from ckpt_async.errors import InvalidRecordError
from ckpt_async.watch import nodes as of_nodes
from ckpt_async.watch import seen
from ckpt_async.watch.announcement import Announcement
from ckpt_async.watch.disk import Disk, identity_of
from ckpt_async.watch.entries import Entries, Entry, State
from ckpt_async.watch.formats import Rules
from ckpt_async.watch.holds import Holds
from ckpt_async.watch.nodes import Nodes
from ckpt_async.watch.options import Options
from ckpt_async.watch.remote import Remote
from ckpt_async.watch.tree import Identity, Tree
from tests.watch.trees import SECOND


class Store:
    """The other node has announced `step-1` there, whose mark names no files; and this one's uploader."""

    generation = 2

    def __init__(
        self, marked_ns: int = 0, format_: str = "done", name: str = "step-1", mark: str = "DONE"
    ) -> None:
        self._marked_ns, self._format, self._name, self._mark = marked_ns, format_, name, mark

    def announced(
        self, generation: int, after: int, known: set[int]
    ) -> Iterator[tuple[CheckpointId, Announcement]]:
        path, here = self._name if self._name == self._mark else "step-1", {self._mark: None}
        if not known:
            id_ = CheckpointId(generation, 1)
            yield id_, Announcement(id_, 0, self._format, path, self._name, here, (), self._marked_ns)

    def newest_generation(self, generation: int) -> int:
        return generation

    def check_takes(self, step: int) -> None:
        pass


@pytest.mark.parametrize("closed", ["step-1/optim", "step-1", ""])
def test_what_a_node_cannot_look_at_is_waited_for_and_never_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    """(Root may list all, so the answer of the system is made up.)"""
    out = tmp_path / "out"
    for name in ("model.pt", "optim/state.bin"):
        (out / "step-1" / name).parent.mkdir(parents=True, exist_ok=True)
        (out / "step-1" / name).write_bytes(b"x")
    scandir, is_closed = os.scandir, [True]

    def refusing(path: Any) -> Any:
        if is_closed[0] and Path(path) == out / closed:
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    entries, holds = Entries(out, tmp_path / "state", "memory://"), Holds(out, tmp_path / "held")
    entries.load()
    holds.load()
    options = Options(
        out, "memory://", tmp_path / "state", tmp_path / "lock", node=1, num_nodes=2, rules=Rules(settle_s=0)
    )
    store = Store()
    handed, given_up = list[Entry](), list[str]()

    def look(*, is_late: bool = False) -> None:
        monkeypatch.setattr(of_nodes, "WHOLE_S", 0.0 if is_late else 60.0)
        nodes.follow(Disk(out).look(), handed.append, lambda _, reason: given_up.append(reason))

    for is_healed in (True, False):
        nodes = Nodes(options, entries, holds, cast(Uploader, store), cast(Remote, store))
        nodes.listen()
        is_closed[0] = True
        look()
        assert (handed, given_up, nodes.has_heard) == ([], [], True)
        is_closed[0] = not is_healed
        look(is_late=True)
        assert not nodes.has_heard
        if is_healed:
            (entry,) = handed
            assert sorted(entry.shards.values()) == ["model.pt", "optim/state.bin"]
            entries.drop(entries.all[entry.number])
            handed.clear()
    assert given_up == [f"on node 1, {closed or '.'} cannot be read: Too many open files"]
    assert not handed


@pytest.mark.parametrize("is_added", [True, False])
def test_what_is_added_on_a_node_without_the_mark_is_sent_when_it_has_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_added: bool
) -> None:
    """What was there before the mark is written anew."""
    out = tmp_path / "out"
    (out / "step-1").mkdir(parents=True)
    model, adapter = out / "step-1/model.pt", out / "step-1/adapter.bin"
    for path in (model, adapter):
        path.write_bytes(b"x")
    marked_ns = model.stat().st_mtime_ns + (0 if is_added else SECOND)
    entries, holds = Entries(out, tmp_path / "state", "memory://"), Holds(out, tmp_path / "held")
    entries.load()
    holds.load()
    options = Options(
        *(out, "memory://", tmp_path / "state", tmp_path / "lock"),
        rules=Rules(settle_s=3),
        node=1,
        num_nodes=2,
    )
    store, now_s = Store(marked_ns), [0.0]
    monkeypatch.setattr(of_nodes, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    nodes = Nodes(options, entries, holds, cast(Uploader, store), cast(Remote, store))
    nodes.listen()
    now_s[0] = 3.0
    told = list[str]()
    for written_s in (2, 10):  # after the mark, so by 1 to 2 s, and 9 to 10 s, from now
        os.utime(adapter, ns=(marked_ns, marked_ns + written_s * SECOND))
        assert not (told and is_added)
        nodes.follow(
            *(Disk(out).look(), lambda entry: told.extend(sorted(entry.shards.values()))),
            lambda _, reason: told.append(reason),
        )
    if is_added:
        assert told == ["adapter.bin", "model.pt"]
    else:
        assert "adapter.bin on node 1 is 2 s newer than the marker: it was saved again" in told[0]


DONE_AT_S = 100
NOTHING = "node 1 holds no part of it: it was removed there before it was seen, or only other nodes write checkpoints"


def follow(
    tmp_path: Path,
    left: list[str],
    seen_s: dict[str, int],
    changed_s: int,
    *,
    has_times: bool = True,
    sent_s: int = 0,
    **of: str,
) -> str | list[str]:
    """What node 1 sends of `step-1`, or why it gives it up."""
    out = tmp_path / "out"
    for name in left:
        (out / "step-1" / name).parent.mkdir(parents=True, exist_ok=True)
        (out / "step-1" / name).write_bytes(b"x")
        os.utime(out / "step-1" / name, ns=(1, 1))
    for folder, _, _ in os.walk(out, topdown=False):
        os.utime(folder, ns=(changed_s * SECOND, changed_s * SECOND))
    entries, holds = Entries(out, tmp_path / "state", "memory://"), Holds(out, tmp_path / "held")
    entries.load()
    holds.load()
    if sent_s:
        files = {f"step-1/{name}": identity_of((out / "step-1" / name).lstat()) for name in left}
        sent = Entry(1, "transformers", "step-1", 1, "step-1", files, {each: each[7:] for each in files})
        sent = replace(sent, is_followed=True, told_ns=sent_s * SECOND, generation=1, state=State.COMMITTED)
        entries.put(sent)
    for name, at_s in seen_s.items():
        holds.seen.see(Tree({f"step-1/{name}": Identity(1, 1, 1)}, lambda *_: b"", now_ns=at_s * SECOND))
    rules = Rules(done="DONE", settle_s=0, num_nodes=2, ignores_times=not has_times)
    options = Options(
        out, "memory://", tmp_path / "state", tmp_path / "lock", node=1, num_nodes=2, rules=rules
    )
    store = Store(DONE_AT_S * SECOND if has_times else 0, **of)
    nodes = Nodes(options, entries, holds, cast(Uploader, store), cast(Remote, store))
    nodes.listen()
    told = list[str | list[str]]()
    nodes.follow(
        *(Disk(out).look(), lambda entry: told.append(sorted(entry.shards.values()))),
        lambda _, reason: told.append(reason),
    )
    (answer,) = told
    return answer


@pytest.mark.parametrize(
    ("seen_s", "left", "changed_s", "answer"),
    [
        ({}, [], 0, NOTHING),
        (
            {"a": 99, "b": 99},
            [],
            0,
            "step-1/a was removed on node 1 before that node learned of the checkpoint",
        ),
        (
            {"a": 102, "b": 102},
            ["b"],
            0,
            "step-1/a was removed on node 1 before that node learned of the checkpoint",
        ),
        ({"a": 99, "b": 102}, ["b"], 101, ["b"]),  # of an earlier save, or a name that was given first
        ({}, ["b"], 103, "something was removed from step-1 on node 1 after its marker was written"),
        ({}, ["b", "c/d"], 101, ["b", "c/d"]),
        ({"a.tmp": 102}, [], 0, NOTHING),
        ({"a.tmp": 102, "b": 102}, ["b"], 0, ["b"]),
    ],
)
@pytest.mark.parametrize("has_times", [True, False])
def test_what_a_node_had_and_has_no_more_is_given_up_where_no_mark_misses_it(
    tmp_path: Path,
    seen_s: dict[str, int],
    left: list[str],
    changed_s: int,
    answer: str | list[str],
    has_times: bool,
) -> None:
    """Half of it would be committed."""
    told = follow(tmp_path, left, seen_s, changed_s, has_times=has_times)
    expected = answer if has_times or not left else left
    assert told == expected if isinstance(expected, list) else str(told).startswith(expected)


@pytest.mark.parametrize(
    ("format_", "name", "mark", "may_have_nothing"),
    [
        ("quiet", "step-1", "model.pt", False),
        ("pattern", "step-1.pt", "step-1.pt", True),  # one file
        ("orbax", "1", "mark", False),
        ("megatron", "iter_0000001", "mark", False),
        ("megatron", "iter_0000001", "core/.metadata", True),  # which names all
        ("olmo", "step1", "mark", False),
        ("olmo", "step1-unsharded", "mark", True),
        ("transformers", "checkpoint-1", "mark", True),  # what is wanting of other ranks is counted
        ("dcp", "step-1", "mark", True),  # the mark misses it
    ],
)
def test_a_node_without_anything_gives_up_what_all_nodes_write(
    tmp_path: Path, format_: str, name: str, mark: str, may_have_nothing: bool
) -> None:
    told = follow(tmp_path, [], {}, 0, format_=format_, name=name, mark=mark)
    assert told == [] if may_have_nothing else str(told).startswith(NOTHING)


@pytest.mark.parametrize(
    ("sent_s", "name", "is_stale"),
    [
        (DONE_AT_S - 50, "rng_state_1.pth", True),  # its rank has not written it anew yet
        (DONE_AT_S - 50, "config.json", False),
        (DONE_AT_S, "rng_state_1.pth", False),  # it is the same save, announced once more
    ],
)
def test_what_a_late_rank_has_not_written_anew_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent_s: int, name: str, is_stale: bool
) -> None:
    """Two saves to the same place would be mixed."""
    monkeypatch.setattr(of_nodes, "WHOLE_S", 0.0)
    told = follow(tmp_path, [name], {}, 0, sent_s=sent_s, format_="transformers")
    assert told == (f"step-1/{name} belongs to an earlier save on node 1" if is_stale else [name])


@pytest.mark.parametrize(("written_s", "is_late"), [(DONE_AT_S + 59, False), (DONE_AT_S + 61, True)])
def test_what_a_rank_writes_long_after_the_mark_is_of_another_save(
    tmp_path: Path, written_s: int, is_late: bool
) -> None:
    there = tmp_path / "out/step-1/rng_state_1.pth"
    there.parent.mkdir(parents=True)
    there.write_bytes(b"x")
    os.utime(there, ns=(1, written_s * SECOND))
    told = follow(tmp_path, [], {}, written_s, format_="transformers")
    assert "newer than the marker: it was saved again" in told if is_late else told == [there.name]


def test_a_link_on_a_node_without_the_mark_is_named(tmp_path: Path) -> None:
    """What it points to would not be in the checkpoint."""
    (tmp_path / "out/step-1").mkdir(parents=True)
    (tmp_path / "out/step-1/model.bin").symlink_to("/etc/hostname")
    told = follow(tmp_path, ["b"], {}, 0)
    assert told == "step-1/model.bin on node 1 is a symbolic link, which is not followed"


def test_two_checkpoints_of_one_step_on_two_nodes_are_not_taken_for_one(tmp_path: Path) -> None:
    entries, holds = Entries(tmp_path / "out", tmp_path / "state", "memory://"), Holds(tmp_path, tmp_path)
    options = Options(tmp_path / "out", "memory://", tmp_path, tmp_path / "lock", node=1, num_nodes=2)
    theirs = Announcement(CheckpointId(2, 1), 0, "dcp", "actor/step-1", "step-1", {"__0_0.distcp": None}, ())
    store = SimpleNamespace(generation=2, announce=lambda _: theirs)
    nodes = Nodes(options, entries, holds, cast(Uploader, store), cast(Remote, store))
    ours = Entry(1, "dcp", "critic/step-1", 1, "step-1", {}, {})
    with pytest.raises(InvalidRecordError, match=r"node 0 has actor/step-1 \(dcp\) as step 1"):
        nodes.announce(ours)
    assert nodes.announce(replace(ours, path="actor/step-1")).is_followed


class Asked(Store):
    """Announces these steps, one after the other, and notes after which it was asked for more."""

    def __init__(self, steps: list[int]) -> None:
        super().__init__()
        self._steps, self.after = steps, list[int]()

    def announced(
        self, generation: int, after: int, known: set[int]
    ) -> Iterator[tuple[CheckpointId, Announcement]]:
        self.after.append(after)
        if self._steps:
            id_ = CheckpointId(generation, step := self._steps.pop(0))
            yield id_, Announcement(id_, 0, "done", f"step-{step}", f"step-{step}", {"DONE": None}, ())


@pytest.mark.parametrize(
    ("num_higher", "waited_s", "is_heard"), [(1, 0, True), (15, 0, True), (16, 0, False), (16, 600, True)]
)
def test_a_lower_step_that_is_complete_later_is_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_higher: int, waited_s: float, is_heard: bool
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(of_nodes, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    entries, holds = Entries(tmp_path / "out", tmp_path / "state", "memory://"), Holds(tmp_path, tmp_path)
    options = Options(tmp_path / "out", "memory://", tmp_path, tmp_path / "lock", node=1, num_nodes=2)
    store = Asked([*range(20, 20 + num_higher)])
    nodes = Nodes(options, entries, holds, cast(Uploader, store), cast(Remote, store))
    for _ in range(num_higher):
        nodes.listen()
        now_s[0] += 1
    now_s[0] += waited_s
    nodes.listen()
    assert (store.after[-1] < 10) == is_heard


def test_what_was_seen_is_remembered_as_long_as_it_is_there_and_then_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seen, "MAX_GONE", 2)
    all_seen = seen.Seen()
    for now in range(10):
        files = {"a/there": Identity(1, 1, 1), f"a/{now}": Identity(2, 1, 1)}
        tree = Tree(files, lambda *_: b"", now_ns=now)
        all_seen.see(tree)
    gone = all_seen.gone("a", tree, 0)
    assert {"a/7", "a/8"} <= {*gone}
    assert len(gone) <= 5
    assert "a/there" in all_seen.gone("a", Tree({}, lambda *_: b""), 9)
    assert not all_seen.gone("a", tree, 9)
