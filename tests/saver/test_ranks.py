"""`CheckpointSaver` on several ranks, each a process: all save at the same steps, whoever decides, and all or none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_async import restore
from ckpt_async import torch as ckpt
from tests.ranks import run_ranks

SCRIPT = Path(__file__).with_name("saver_ranks.py")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, list[int]]]]:
    """Where the scenarios ran, and what each of two ranks saved in which."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(SCRIPT, 2, folder)
    return folder, [json.loads((folder / f"saved-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture
def saved(ran: tuple[Path, list[dict[str, list[int]]]]) -> Callable[[str], list[int]]:
    """At which batches the ranks saved: the same for all of them."""

    def saved(scenario: str) -> list[int]:
        first, *others = (each[scenario] for each in ran[1])
        assert all(each == first for each in others), ran[1]
        return first

    return saved


@pytest.fixture
def newest(ran: tuple[Path, list[dict[str, list[int]]]]) -> Callable[..., restore.Checkpoint]:
    def newest(scenario: str, **options: Any) -> restore.Checkpoint:
        found = restore.find(f"file://{ran[0]}/{scenario}/remote", **options)
        assert found is not None
        return found

    return newest


Saved = Callable[[str], list[int]]
Newest = Callable[..., restore.Checkpoint]


def test_the_first_rank_writes_and_all_commit(saved: Saved, newest: Newest) -> None:
    assert saved("first_rank_writes") == [3, 6]
    checkpoint = newest("first_rank_writes")
    assert list(checkpoint.files) == ["ep0-ba6-rank0.pt"]
    assert checkpoint.metrics == {"loss0": 6.0, "loss1": 6.0}
    assert ckpt.load_remote(checkpoint, "ep0-ba6-rank0.pt")["batch"] == 6


def test_every_rank_may_write_a_file_and_gets_its_own_back(saved: Saved, newest: Newest) -> None:
    assert saved("all_write") == [3]
    assert sorted(newest("all_write").files) == ["ep0-ba3-rank0.pt", "ep0-ba3-rank1.pt"]


def test_a_sharded_checkpoint_is_one_of_torchs(saved: Saved, newest: Newest) -> None:
    assert saved("sharded") == [3, 6]
    checkpoint = newest("sharded")
    assert checkpoint.name == "ep0-ba6"
    state = {"batch": 0, "weight": torch.zeros(100)}
    assert ckpt.load_latest(state, checkpoint.remote) == checkpoint
    assert state["batch"] == 6
    assert torch.equal(state["weight"], torch.full((100,), 6.0))


def test_one_ranks_clock_decides_for_all(saved: Saved, newest: Newest) -> None:
    steps = saved("clock")
    assert len(steps) >= 2
    assert newest("clock").id.step == steps[-1]


def test_what_one_rank_asks_for_all_save(saved: Saved, newest: Newest) -> None:
    (step,) = saved("asked")
    assert newest("asked").id.step == step > 5


def test_a_rank_that_cannot_write_keeps_the_checkpoint_from_being_shown(saved: Saved, newest: Newest) -> None:
    assert saved("one_fails") == [2, 4]
    found = newest("one_fails")
    assert found.id.step == 4
    assert found.files.keys() == {"ep0-ba4-rank0.pt", "ep0-ba4-rank1.pt"}
    assert restore.find(found.remote, step=2) is None


def test_the_other_ranks_learn_which_rank_has_failed(saved: Saved) -> None:
    """And need not wait for it until the end."""
    assert saved("told") == [2]


def test_under_hsdp_the_first_replica_writes_and_all_load(tmp_path: Path) -> None:
    """The writers waited in a collective of all ranks, in which the other ranks, which only seal, took no part."""
    run_ranks(SCRIPT.with_name("hsdp_ranks.py"), 4, tmp_path, timeout_s=90)
    num_writers = {"first_replica": 2, "blocking": 2, "second_replica": 2, "group_of_training": 2, "all": 4}
    for scenario, count in num_writers.items():
        found = restore.find(f"file://{tmp_path}/{scenario}/remote")
        assert found is not None
        assert found.id.step == 4
        parts = {f"__{rank}_0.distcp" for rank in range(count)}
        assert found.files.keys() == {".metadata", *parts}, scenario
    assert (tmp_path / "no_remote/local/ep0-ba4/.metadata").exists()
