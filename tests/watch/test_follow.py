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
from ckpt_async.formats import Rules
from ckpt_async.watch import nodes as of_nodes
from ckpt_async.watch.announcement import Announcement, Version
from ckpt_async.watch.disk import Disk, identity_of
from ckpt_async.watch.entries import Entries, Entry, State
from ckpt_async.watch.nodes import Nodes
from ckpt_async.watch.options import Options
from ckpt_async.watch.remote import Remote
from tests.watch.trees import SECOND


class Store:
    """The other node has announced `step-1` there, and which files it names; and this one's uploader."""

    generation = 2

    def __init__(self, *named: str, completed_ns: int = 0, format_: str = "dcp") -> None:
        self._named, self._completed_ns, self._format = named, completed_ns, format_

    def announced(self, generation: int, known: set[int]) -> Iterator[tuple[CheckpointId, Announcement]]:
        if not known:
            id_, here = CheckpointId(generation, 1), {"mark": Version(1, self._completed_ns, 1)}
            named = ("mark", *self._named)
            yield id_, Announcement(id_, 0, self._format, "step-1", "step-1", here, named, self._completed_ns)

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
    entries = Entries(out, tmp_path / "state", "memory://")
    entries.load()
    options = Options(
        out, "memory://", tmp_path / "state", tmp_path / "lock", node=1, num_nodes=2, rules=Rules(settle_s=0)
    )
    store = Store("model.pt", "optim/state.bin")
    handed, given_up = list[Entry](), list[str]()

    def scan(*, is_late: bool = False) -> None:
        monkeypatch.setattr(of_nodes, "WHOLE_S", 0.0 if is_late else 60.0)
        nodes.follow(Disk(out).scan(), handed.append, lambda _, reason: given_up.append(reason))

    for is_healed in (True, False):
        nodes = Nodes(options, entries, cast(Uploader, store), cast(Remote, store))
        nodes.listen()
        is_closed[0] = True
        scan()
        assert (handed, given_up, nodes.has_heard) == ([], [], True)
        is_closed[0] = not is_healed
        scan(is_late=True)
        assert not nodes.has_heard
        if is_healed:
            (entry,) = handed
            assert sorted(entry.shards.values()) == ["model.pt", "optim/state.bin"]
            entries.drop(entries.all[entry.number])
            handed.clear()
    assert given_up == [f"on node 1, {closed or '.'} cannot be read: Too many open files"]
    assert not handed


DONE_AT_S = 100


def follow(
    tmp_path: Path, names: list[str], *, sent_s: int = 0, written_s: int = 0, **of: Any
) -> str | list[str]:
    """What node 1 sends of `step-1`, which names these files, or why it gives it up."""
    out = tmp_path / "out"
    for name in names:
        (out / "step-1").mkdir(parents=True, exist_ok=True)
        (out / "step-1" / name).write_bytes(b"x")
        os.utime(out / "step-1" / name, ns=(1, 1 + written_s * SECOND))
    entries = Entries(out, tmp_path / "state", "memory://")
    entries.load()
    if sent_s:
        files = {f"step-1/{name}": identity_of((out / "step-1" / name).lstat()) for name in names}
        sent = Entry(1, "transformers", "step-1", 1, "step-1", files, {each: each[7:] for each in files})
        sent = replace(
            sent, is_followed=True, announced_ns=sent_s * SECOND, generation=1, state=State.COMMITTED
        )
        entries.put(sent)
    rules = Rules(settle_s=0, num_nodes=2)
    options = Options(
        out, "memory://", tmp_path / "state", tmp_path / "lock", node=1, num_nodes=2, rules=rules
    )
    store = Store(*of.pop("named", names), completed_ns=DONE_AT_S * SECOND, **of)
    nodes = Nodes(options, entries, cast(Uploader, store), cast(Remote, store))
    nodes.listen()
    told = list[str | list[str]]()
    nodes.follow(
        *(Disk(out).scan(), lambda entry: told.append(sorted(entry.shards.values()))),
        lambda _, reason: told.append(reason),
    )
    (answer,) = told
    return answer


def test_a_node_sends_what_the_mark_names_and_nothing_else(tmp_path: Path) -> None:
    assert follow(tmp_path, ["a", "b"], named=["a", "c"]) == ["a"]


@pytest.mark.parametrize(("sent_s", "is_stale"), [(DONE_AT_S - 50, True), (DONE_AT_S, False)])
def test_what_was_sent_with_an_earlier_save_to_the_same_place_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent_s: int, is_stale: bool
) -> None:
    """Its rank has not written it anew yet, and two saves would be mixed; or it is the same save, announced again."""
    monkeypatch.setattr(of_nodes, "WHOLE_S", 0.0)
    told = follow(tmp_path, ["rng_state_1.pth"], sent_s=sent_s, format_="transformers")
    assert told == (
        "step-1/rng_state_1.pth belongs to a previous save on node 1" if is_stale else ["rng_state_1.pth"]
    )


@pytest.mark.parametrize(
    ("format_", "written_s", "is_late"),
    [
        ("transformers", DONE_AT_S + 59, False),
        ("transformers", DONE_AT_S + 61, True),
        ("dcp", DONE_AT_S + 2, True),
    ],
)
def test_what_a_rank_writes_long_after_the_mark_is_of_another_save(
    tmp_path: Path, format_: str, written_s: int, is_late: bool
) -> None:
    told = follow(tmp_path, ["rng_state_1.pth"], written_s=written_s, format_=format_)
    assert "newer than the marker: it was saved again" in told if is_late else told == ["rng_state_1.pth"]


def test_a_link_on_a_node_without_the_mark_is_named(tmp_path: Path) -> None:
    """What it points to would not be in the checkpoint."""
    (tmp_path / "out/step-1").mkdir(parents=True)
    (tmp_path / "out/step-1/model.bin").symlink_to("/etc/hostname")
    told = follow(tmp_path, ["b"], named=["b", "model.bin"])
    assert told == "step-1/model.bin on node 1 is a symbolic link, which is not followed"


def test_two_checkpoints_of_one_step_on_two_nodes_are_not_taken_for_one(tmp_path: Path) -> None:
    entries = Entries(tmp_path / "out", tmp_path / "state", "memory://")
    options = Options(tmp_path / "out", "memory://", tmp_path, tmp_path / "lock", node=1, num_nodes=2)
    here = {"__0_0.distcp": Version(1, 1, 1)}
    theirs = Announcement(CheckpointId(2, 1), 0, "dcp", "actor/step-1", "step-1", here, ())
    store = SimpleNamespace(generation=2, announce=lambda _: theirs)
    nodes = Nodes(options, entries, cast(Uploader, store), cast(Remote, store))
    ours = Entry(1, "dcp", "critic/step-1", 1, "step-1", {}, {})
    with pytest.raises(InvalidRecordError, match=r"node 0 has actor/step-1 \(dcp\) as step 1"):
        nodes.announce(ours)
    assert nodes.announce(replace(ours, path="actor/step-1")).is_followed
