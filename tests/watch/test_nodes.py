"""Nodes with a folder of their own each: `dcp.save` of two gloo ranks, and a watcher for each node."""

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckpt_async import restore
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.torch import load_latest
from ckpt_async.watch.announcement import Announcement, Version
from ckpt_async.watch.disk import identity_of
from ckpt_async.watch.entries import Entries, Entry
from tests.ranks import run_ranks
from tests.seaweed import SeaweedServer
from tests.watch.conftest import Watching, hashes

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks have written, a folder for each node."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(Path(__file__).with_name("dcp_ranks.py"), 2, folder)
    return folder


THEIRS, OURS = "__1_0.distcp", ("__0_0.distcp", ".metadata")  # the marker last


class Nodes:
    """Two of them, with folders of their own, and a watcher on each."""

    def __init__(self, folder: Path, saved: Path) -> None:
        self.folder, self._saved = folder, saved
        self.remote = f"file://{folder}/remote"
        self.environment: dict[str, str] = {}
        self.watching: dict[int, Watching] = {}
        self._all: list[Watching] = []
        for node in range(2):
            (folder / f"node-{node}/out").mkdir(parents=True)

    def watch(self, node: int, *more: str) -> Watching:
        args = ("watch", self.folder / f"node-{node}/out", self.remote, "--node", f"{node}/2", "--json")
        self._all.append(Watching(*args, "--settle-s", "0.2", "--interval", "0.5", *more, **self.environment))
        self.watching[node] = self._all[-1]
        return self._all[-1]

    def save(self, step: int, names: tuple[str, ...] = (THEIRS, *OURS)) -> None:
        """As the ranks did, the marker last, at the time it is now."""
        for name in names:
            node = int(name[2] == "1")
            here = self.folder / f"node-{node}/out/step-{step}"
            here.mkdir(exist_ok=True)
            shutil.copyfile(self._saved / f"node-{node}/step-{step}/{name}", here / f"{name}.tmp")
            (here / f"{name}.tmp").replace(here / name)

    def put(self, key: str, data: bytes) -> None:
        """In the store, as a node would."""
        path = Path(self.remote.removeprefix("file://")) / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def was_announced_earlier(self, step: int) -> None:
        """Node 1 has taken its part of what node 0 had announced, and both were killed."""
        place = self.folder / "node-1/.out.ckpt-async/run"
        entries = Entries(self.folder / "node-1/out", place, self.remote)
        entries.load()
        entries.bind()
        name, path = f"step-{step}", f"step-{step}/__1_0.distcp"
        files = {path: identity_of((entries.source / path).lstat())}
        marker_ns = (self.folder / f"node-0/out/{name}/.metadata").stat().st_mtime_ns
        entry = Entry(1, "dcp", name, step, name, files, {path: "__1_0.distcp"}, is_followed=True)
        entries.stage(replace(entry, announced_ns=marker_ns, staged_ns=time.time_ns()), entries.source)

    def written(self, step: int) -> dict[str, str]:
        found: dict[str, str] = {}
        for node in range(2):
            found |= hashes(self.folder / f"node-{node}/out/step-{step}")
        return found

    def fetched(self, step: int) -> dict[str, str]:
        found = restore.find(self.remote, step=step)
        assert found is not None
        destination = self.folder / f"fetched-{step}"
        restore.fetch(found, destination, overwrite=True)
        return hashes(destination)

    def end(self) -> None:
        for each in self._all:
            each.kill()


@pytest.fixture
def nodes(tmp_path: Path, saved: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path, saved)
    yield made
    made.end()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_each_node_sends_what_it_has_and_the_commit_needs_all_that_the_mark_names(nodes: Nodes) -> None:
    first, second = nodes.watch(0), nodes.watch(1)
    for step in (10, 20):
        nodes.save(step)
        first.until("committed", step)
        second.until("committed", step)
        assert len(nodes.written(step)) == 3, "the test would show nothing"
        assert nodes.fetched(step) == nodes.written(step)
    state = {"w": torch.zeros(64, 8), "step": 0}
    load_latest(state, nodes.remote)
    assert (state["step"], bool((state["w"] == 20).all())) == (20, True)
    first.process.terminate()
    assert (second.end(), first.process.wait(60)) == (0, 0)


def test_a_bad_name_and_what_cannot_be_read_stop_no_other_checkpoint(nodes: Nodes) -> None:
    first, second = nodes.watch(0), nodes.watch(1)
    (nodes.folder / "node-0/out/step-10").mkdir()
    (nodes.folder / "node-0/out/step-10/notes (1).md").write_text("of somebody")
    nodes.save(10)
    assert "'notes (1).md' has a character" in first.until("refused", 10)["reason"]
    nodes.put(keys.announcement_key(CheckpointId(1, 15)), b"of another version")
    nodes.save(20)
    first.until("committed", 20)
    second.until("committed", 20)
    assert nodes.fetched(20) == nodes.written(20)
    assert restore.find(nodes.remote, step=10) is None


def test_a_file_that_no_node_has_is_named_and_nothing_is_committed(nodes: Nodes) -> None:
    nodes.save(10)
    (nodes.folder / "node-1/out/step-10/__1_0.distcp").unlink()
    first = nodes.watch(0)
    nodes.watch(1)
    told = first.until("refused", 10)
    assert "rank 0 expects __1_0.distcp, which no rank has" in told["reason"]
    assert restore.find(nodes.remote) is None


def test_a_file_that_the_mark_names_is_added_on_no_node(nodes: Nodes) -> None:
    """It is of a save to the same place that has begun since."""
    nodes.save(10, (*OURS, THEIRS))
    late = nodes.folder / "node-1/out/step-10" / THEIRS
    late_ns = late.stat().st_mtime_ns + 1_500_000_000
    os.utime(late, ns=(late_ns, late_ns))
    first = nodes.watch(0, "--settle-s", "3")
    nodes.watch(1, "--settle-s", "3")
    assert "newer than the marker: it was saved again" in first.until("refused", 10)["reason"]
    assert restore.find(nodes.remote) is None


def test_a_file_that_an_earlier_save_has_left_on_the_node_with_the_mark_is_not_mixed_in(nodes: Nodes) -> None:
    """Ranks have moved between the nodes: each has its new file, and an older one of the other's name."""
    stale = nodes.folder / "node-0/out/step-10" / THEIRS
    stale.parent.mkdir()
    stale.write_bytes(bytes(1 << 16))
    os.utime(stale, (0, 0))
    first, second = nodes.watch(0), nodes.watch(1)
    nodes.save(10)
    told = first.until("refused", 10)
    assert "ranks 0 and 1 both wrote" in told["reason"]
    assert THEIRS in told["reason"]
    assert restore.find(nodes.remote) is None
    (nodes.folder / "node-1/out/step-20").mkdir()
    stale = (
        nodes.folder / "node-1/out/step-20" / OURS[0]
    )  # of the node without the marker it is just not sent
    stale.write_bytes(bytes(1 << 16))
    os.utime(stale, (0, 0))
    nodes.save(20)
    second.until("committed", 20)
    assert nodes.fetched(20) == nodes.written(20) | hashes(nodes.folder / "node-0/out/step-20")


@pytest.mark.parametrize("rule", ["--done", "--pattern"])
def test_what_cannot_name_the_files_of_other_nodes_is_refused_at_once(nodes: Nodes, rule: str) -> None:
    first = nodes.watch(0, rule, "DONE")
    assert first.process.wait(60) == 2
    assert "does not name the files of the others" in first.errors()


@pytest.mark.fault("F1a")
def test_a_node_whose_watcher_was_killed_comes_back_and_nothing_is_lost(nodes: Nodes) -> None:
    first, second = nodes.watch(0), nodes.watch(1)
    nodes.save(10)
    second.until("committed", 10)
    second.kill()
    nodes.save(20)
    nodes.save(30)
    nodes.watch(1)
    first.until("committed", 30)
    assert {step: nodes.fetched(step) for step in (10, 20, 30)} == {
        step: nodes.written(step) for step in (10, 20, 30)
    }
    found = restore.find(nodes.remote)
    assert found is not None
    assert found.step == 30


@pytest.mark.fault("F1a")
def test_what_a_node_has_rotated_away_while_the_store_was_away_is_given_up_and_the_rest_is_sent(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SeaweedServer(tmp_path / "seaweed") as server:
        nodes.environment = server.environment()
        for name, value in nodes.environment.items():
            monkeypatch.setenv(name, value)
        nodes.remote = f"s3://{server.bucket}/run"
        watching = [nodes.watch(node, "-v", "--drain-timeout", "1") for node in range(2)]
        for each in watching:
            each.until_logged("watching folder")
        server.kill()
        nodes.save(10)
        nodes.save(20)
        watching[0].until_logged("complete path=step-20")
        shutil.rmtree(nodes.folder / "node-1/out/step-10")
        assert [each.end() for each in watching] == [6, 6]
        server.start()
        for node in range(2):
            nodes.watch(node)
        assert THEIRS in nodes.watching[0].until("refused", 10)["reason"]
        nodes.watching[0].until("committed", 20)
        assert nodes.fetched(20) == nodes.written(20)
        assert restore.find(nodes.remote, step=10) is None


def test_a_node_that_is_dead_for_good_takes_with_it_only_what_it_alone_had(nodes: Nodes) -> None:
    first, second = nodes.watch(0), nodes.watch(1)
    nodes.save(10)
    first.until("committed", 10)
    second.kill()
    nodes.save(20)
    shutil.rmtree(nodes.folder / "node-1")
    (nodes.folder / "node-1/out").mkdir(parents=True)
    replacement = nodes.watch(1)
    told = first.until("refused", 20)
    assert "__1_0.distcp, which no rank has" in told["reason"]
    nodes.save(30)
    first.until("committed", 30)
    assert (nodes.fetched(30), restore.find(nodes.remote, step=20)) == (nodes.written(30), None)
    first.process.terminate()
    assert (replacement.end(), first.process.wait(60)) == (1, 1), "one was given up"


def test_the_end_says_which_node_it_waits_for(nodes: Nodes) -> None:
    first = nodes.watch(0, "-v", "--drain-timeout", "6")
    nodes.save(10)
    first.until_logged("announced path=step-10")
    first.process.terminate()
    first.until_logged("watch_ending: waiting for node 1 to hand in step 10, at most ")
    assert first.process.wait(60) == 6


def test_two_watchers_that_say_they_are_the_same_node_are_told_so(nodes: Nodes, tmp_path: Path) -> None:
    """An old pod that is not gone: each launch ends the other's."""
    nodes.watch(0)
    copied = Nodes(tmp_path / "copied", tmp_path)
    copied.remote = nodes.remote
    try:
        copied.watch(0).until_logged("another watcher also use --node 0/2, or a different number of nodes?")
    finally:
        copied.end()


def test_what_was_handed_in_in_an_earlier_start_is_there_when_it_is_announced_again(nodes: Nodes) -> None:
    """Its trainer has rotated it away meanwhile, and the node with the marker comes back first."""
    nodes.save(10)
    second = nodes.watch(1, "-v")
    second.until_logged("generation=1")
    mark = (nodes.folder / "node-0/out/step-10/.metadata").stat().st_mtime_ns
    told = Announcement(
        CheckpointId(1, 10),
        0,
        "dcp",
        "step-10",
        "step-10",
        dict.fromkeys(OURS, Version(1, mark, 1)),
        (*OURS, THEIRS),
        mark,
    )
    nodes.put(keys.announcement_key(told.checkpoint), told.encode())
    while not (Path(nodes.remote.removeprefix("file://")) / keys.receipt_key(told.checkpoint, 1)).exists():
        pass
    second.kill()
    saved = nodes.written(10)
    shutil.rmtree(nodes.folder / "node-1/out/step-10")
    nodes.watch(1, "-v").until_logged("generation=2")
    nodes.watch(0).until("committed", 10)
    assert nodes.fetched(10) == saved


def test_what_no_node_announces_any_more_holds_up_no_end_and_is_let_go_when_a_later_one_is_announced(
    nodes: Nodes,
) -> None:
    nodes.save(10)
    nodes.was_announced_earlier(10)
    (nodes.folder / "node-0/out/step-10").rename(nodes.folder / "node-0/gone")
    second = nodes.watch(1, "-v")
    second.until_logged("generation=1")
    nodes.put(keys.ended_key(1, 0), b"{}\n")
    second.process.terminate()
    assert second.until("ended")["unfinished"] == ["step-10"]
    assert second.process.wait(60) == 6

    second, first = nodes.watch(1), nodes.watch(0)
    nodes.save(20)
    assert "no node announces it any more" in second.until("refused", 10)["reason"]
    first.until("committed", 20)
    assert nodes.fetched(20) == nodes.written(20)
    first.process.terminate()
    assert (second.end(), first.process.wait(60)) == (1, 0)
