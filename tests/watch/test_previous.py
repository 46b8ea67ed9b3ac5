"""What previous launches have left undecided, if there are other nodes now."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import restore
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.formats import Identity
from ckpt_async.watch import plan
from ckpt_async.watch.announcement import Announcement, Version
from ckpt_async.watch.entries import Entry, State
from ckpt_async.watch.reporter import HELD_UP_S, Reporter
from tests.dcp_metadata import metadata_of
from tests.watch.conftest import Watching, hashes

pytestmark = pytest.mark.timeout(90)

RANKS = ("__0_0.distcp", "__1_0.distcp")
ID = CheckpointId(1, 20)


# --- judged -------------------------------------------------------------------------------------------------


def entry(format_: str = "dcp", *names: str, **more: Any) -> Entry:
    files = {f"step-20/{each}": Identity(number, 1, number) for number, each in enumerate(names, start=1)}
    shards = {path: path.removeprefix("step-20/") for path in files}
    return Entry(1, format_, "step-20", 20, "step-20", files, shards, **({"num_nodes": 2} | more))


def test_what_must_be_decided_first_is_named() -> None:
    new = replace(entry("dcp", *RANKS), number=3)
    first = replace(new, number=1, state=State.HANDED, generation=1)
    second = replace(first, number=2, step=30)
    assert plan.predecessors(new, [first, second, new], 2, num_nodes=1) == [first, second]
    assert plan.predecessors(replace(new, step=25), [first, second, new], 2, num_nodes=1) == [second]
    assert plan.predecessors(replace(new, step=25), [first, second, new], 2, num_nodes=2) == [first, second]


def test_what_holds_up_all_that_follows_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    reporter = Reporter(clock=lambda: now[0])
    for now[0] in (0.0, HELD_UP_S - 1, HELD_UP_S, HELD_UP_S + 1):
        assert not caplog.messages or now[0] >= HELD_UP_S
        reporter.note_held_up(entry(), "node 1 to hand in step 10")
    (told,) = caplog.messages
    assert told.startswith(
        "held_up: step-20 (step 20) and later saves are not handed in yet: they wait for node 1"
    )


# --- from two nodes to one, and to three ---------------------------------------------------------------------


class Nodes:
    """Nodes with a folder each, and watchers that are told how many there are."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.remote = folder, f"file://{folder}/remote"
        self._all: list[Watching] = []

    def out(self, node: int) -> Path:
        return self.folder / f"node-{node}/out"

    def watch(self, node: int, of: int, *more: str, place: int | None = None) -> Watching:
        out = self.out(node if place is None else place)
        out.mkdir(parents=True, exist_ok=True)
        args = ("watch", out, self.remote, "--node", f"{node}/{of}", "--json", "-v", *more)
        self._all.append(Watching(*args, "--settle-s", "0.2", "--interval", "0.5"))
        return self._all[-1]

    def save(self, step: int, *owners: int) -> dict[str, str]:
        """A checkpoint with a rank on each of these nodes, the marker on the first of them."""
        names = [f"__{rank}_0.distcp" for rank in range(len(owners))]
        saved: dict[str, str] = {}
        for name, node in reversed([*zip([".metadata", *names], [owners[0], *owners], strict=True)]):
            here = self.out(node) / f"step-{step}"
            here.mkdir(parents=True, exist_ok=True)
            data = metadata_of(dict.fromkeys(names, 400)) if name == ".metadata" else os.urandom(400)
            (here / f"{name}.tmp").write_bytes(data)
            (here / f"{name}.tmp").rename(here / name)
            saved[name] = hashes(here)[name]
        return saved

    def committed(self, step: int) -> dict[str, str] | None:
        found = restore.find(self.remote, step=step)
        if found is None:
            return None
        restore.fetch(found, self.folder / f"fetched-{step}", overwrite=True)
        return hashes(self.folder / f"fetched-{step}")

    def until_delivered(self, step: int, rank: int) -> None:
        place = Path(self.remote.removeprefix("file://")) / keys.receipt_key(CheckpointId(1, step), rank)
        while not place.exists():
            pass

    def newest(self) -> int:
        found = restore.find(self.remote)
        assert found is not None
        return found.step

    def end(self) -> None:
        for each in self._all:
            each.kill()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.end()


def test_a_node_that_is_alone_now_gives_up_what_it_lacks_and_commits_what_follows(nodes: Nodes) -> None:
    first = nodes.watch(0, 2)
    nodes.save(20, 0, 1)
    nodes.save(25, 0, 0)  # the other node has nothing of it
    for step in (20, 25):
        nodes.until_delivered(step, 0)
    first.kill()
    alone = nodes.watch(0, 1)
    assert "names files that are not here: __1_0.distcp" in alone.until("refused", 20)["reason"]
    alone.until("committed", 25)
    shutil.rmtree(nodes.out(0) / "step-20")
    saved = {step: nodes.save(step, 0) for step in (20, 30)}
    alone.until("committed", 30)
    assert {step: nodes.committed(step) for step in saved} == saved
    assert (nodes.newest(), alone.end()) == (30, 0)


def test_a_node_without_the_marks_that_is_alone_now_does_not_wait_for_the_one_that_had_them(
    nodes: Nodes,
) -> None:
    second = nodes.watch(1, 2)
    second.until_logged("generation=1")
    saved = nodes.save(20, 0, 1)
    marker_ns = (nodes.out(0) / "step-20/.metadata").stat().st_mtime_ns
    here = dict.fromkeys((RANKS[0], ".metadata"), Version(400, 1, 1))
    told = Announcement(ID, 0, "dcp", "step-20", "step-20", here, tuple(saved), marker_ns)
    key = Path(nodes.remote.removeprefix("file://")) / keys.announcement_key(ID)
    key.parent.mkdir(parents=True, exist_ok=True)
    key.write_bytes(told.encode())
    nodes.until_delivered(20, 1)
    second.kill()
    alone = nodes.watch(0, 1, place=1)
    assert "no node announces it any more" in alone.until("refused", 20)["reason"]
    shutil.rmtree(nodes.out(1) / "step-20")
    saved = nodes.save(20, 1)
    alone.until("committed", 20)
    assert (nodes.committed(20), alone.end()) == (saved, 0), "the refusal was made up for"


def test_what_two_nodes_had_sealed_three_nodes_commit(nodes: Nodes) -> None:
    first = nodes.watch(0, 2)
    saved = nodes.save(20, 0, 1)
    nodes.until_delivered(20, 0)
    first.kill()
    three = [nodes.watch(node, 3) for node in range(3)]
    three[0].until("committed", 20)
    assert nodes.committed(20) == saved
    saved = nodes.save(30, 0, 1, 2)
    three[0].until("committed", 30)
    assert nodes.committed(30) == saved
