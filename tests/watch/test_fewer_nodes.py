"""Saves on fewer ranks, all of them on the first of two nodes: the other one has files of the earlier save."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from ckpt_async import Uploader, restore
from ckpt_async.core.model import CheckpointId
from ckpt_async.watch import nodes
from ckpt_async.watch.announcement import Announcement, Version
from ckpt_async.watch.entries import Entry, State
from ckpt_async.watch.formats import Rules
from ckpt_async.watch.options import Options
from ckpt_async.watch.remote import Remote
from ckpt_async.watch.tree import Identity
from tests.dcp_metadata import metadata_of
from tests.watch.conftest import Watching, hashes
from tests.watch.looking import Place
from tests.watch.trees import SECOND, torch_zip

pytestmark = pytest.mark.timeout(150)

PLACE = {"dcp": "step-5", "deepspeed": "global_step5", "transformers": "checkpoint-5"}


def rank_files(format_: str, num_ranks: int) -> list[str]:
    pattern = {
        "dcp": "__{}_0.distcp",
        "deepspeed": "zero_pp_rank_{}_mp_rank_00_optim_states.pt",
        "transformers": "rng_state_{}.pth",
    }[format_]
    is_one = format_ == "transformers" and num_ranks == 1
    return ["rng_state.pth"] if is_one else [pattern.format(rank) for rank in range(num_ranks)]


def save(folder: Path, format_: str, num_ranks: int, num_first: int) -> None:
    """Ranks from `num_first` on are on the second node. The mark comes last."""
    names = rank_files(format_, num_ranks)
    first = folder / "node-0" / PLACE[format_]
    for number, name in reversed([*enumerate(names)]):
        here = first if number < num_first else folder / "node-1" / PLACE[format_]
        here.mkdir(parents=True, exist_ok=True)
        data = os.urandom(400) if format_ == "dcp" else torch_zip(x=os.urandom(9))
        (here / name).write_bytes(data)
    if format_ == "dcp":
        (first / "new").write_bytes(metadata_of(dict.fromkeys(names, 400)))
        (first / "new").replace(first / ".metadata")
    elif format_ == "deepspeed":
        model = torch_zip(dp_world_size=num_ranks, mp_world_size=1)
        (first / "mp_rank_00_model_states.pt").write_bytes(model)
        (first.parent / "latest").write_text(PLACE[format_])
    else:
        (first / "training_args.bin").write_bytes(torch_zip(num_processes=num_ranks))
        (first / "trainer_state.json").write_text(json.dumps({"global_step": 5}))


@pytest.mark.parametrize("fewer", [2, 1])
@pytest.mark.parametrize("format_", PLACE)
def test_what_the_ranks_of_an_earlier_save_have_left_on_the_other_node_is_no_part_of_it(
    tmp_path: Path, format_: str, fewer: int
) -> None:
    """The first of the ranks that the new save does not have is on the node with the mark."""
    remote = f"file://{tmp_path}/remote"
    for node in range(2):
        (tmp_path / f"node-{node}").mkdir()
    fast = ("--settle-s", "0.2", "--interval", "0.5", "--json")
    watching = [
        Watching("watch", tmp_path / f"node-{node}", remote, "--node", f"{node}/2", *fast)
        for node in range(2)
    ]
    try:
        save(tmp_path, format_, 4, 3)
        for each in watching:
            each.until("committed", 5)
        save(tmp_path, format_, fewer, 4)
        for each in watching:
            each.until("committed", 5)
        found = restore.find(remote, step=5)
        assert found is not None
        restore.fetch(found, tmp_path / "fetched")
        here = hashes(tmp_path / "node-0" / PLACE[format_])
        gone = {*rank_files(format_, 4)} - {*rank_files(format_, fewer)}
        assert gone & here.keys(), "the test would show less"
        assert hashes(tmp_path / "fetched") == {name: sha for name, sha in here.items() if name not in gone}
        watching[0].process.terminate()
        assert (watching[1].end(), watching[0].process.wait(60)) == (0, 0)
        left = rank_files(format_, 4)[3]
        assert f"{PLACE[format_]}/{left}: written by ranks of an earlier save" in watching[1].errors()
    finally:
        for each in watching:
            each.kill()


class Told:
    """A remote in which another node has announced a checkpoint."""

    def __init__(self, announcement: Announcement) -> None:
        self._announced = [(announcement.checkpoint, announcement)]
        self.generation = 2

    def newest_generation(self, _: int) -> int:
        return 2

    def announced(self, *_: object) -> list[tuple[CheckpointId, Announcement]]:
        return self._announced

    def check_takes(self, _: int) -> None:
        """Also the uploader."""


def followed(base: Path, format_: str, left: str, *, theirs: str, theirs_s: int) -> list[str]:
    """What is sent of a file that was sent with an earlier mark, or why nothing is. The other node announces `theirs`,
    written `theirs_s` after the file, and a mark that came after 50 s; the earlier mark came after 20 s.
    """
    place = Place(base)
    path = f"step-5/{left}"
    (place.folder / path).parent.mkdir(parents=True)
    (place.folder / path).write_bytes(torch_zip(x=1))
    rules = Rules(settle_s=0, num_nodes=2)
    lookout = place.lookout(rules, num_nodes=2)
    lookout.look()
    files: dict[str, Identity] = {path: lookout.tree.files[path]}
    at_ns = files[path].mtime_ns
    sent = Entry(1, format_, "step-5", 5, "step-5", files, {path: left}, is_followed=True, generation=1)
    place.entries.put(replace(sent, told_ns=at_ns + 20 * SECOND, state=State.COMMITTED))
    is_named = format_ in ("done", "megatron")
    here = {"DONE": None, theirs: Version(1, at_ns + theirs_s * SECOND, None) if is_named else None}
    told = Announcement(
        CheckpointId(2, 5), 0, format_, "step-5", "step-5", here, tuple(here), at_ns + 50 * SECOND
    )
    options = Options(
        place.folder, "memory://", base / "state", base / "lock", rules=rules, num_nodes=2, node=1
    )
    remote = Told(told)
    ours = nodes.Nodes(options, place.entries, place.holds, cast(Uploader, remote), cast(Remote, remote))
    said: list[str] = []
    ours.listen()
    ours.follow(
        lookout.tree,
        lambda entry: said.extend(entry.shards.values()),
        lambda _, reason: said.append(reason),
    )
    place.waker.close()
    return said


@pytest.mark.parametrize(
    ("format_", "left", "theirs"),
    [
        ("done", "shard2.pt", "shard0.pt"),
        ("megatron", "mp_rank_02/model_optim_rng.pt", "mp_rank_00/model_optim_rng.pt"),
    ],
)
def test_where_nobody_knows_the_ranks_a_file_of_an_earlier_save_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: str, left: str, theirs: str
) -> None:
    monkeypatch.setattr(nodes, "WHOLE_S", 0.0)
    said = followed(tmp_path, format_, left, theirs=theirs, theirs_s=40)
    assert said == [f"step-5/{left} belongs to an earlier save on node 1"]


@pytest.mark.parametrize(("left", "theirs_s"), [("config.pt", 40), ("shard2.pt", 15)])
def test_what_may_not_have_been_written_again_is_sent(tmp_path: Path, left: str, theirs_s: int) -> None:
    """A configuration, or everything if only the mark was written again."""
    assert followed(tmp_path, "done", left, theirs="shard0.pt", theirs_s=theirs_s) == [left]
