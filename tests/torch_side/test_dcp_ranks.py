"""torch.distributed.checkpoint on real ranks: FSDP2 and DDP on gloo, a process per rank, SIGKILL, a real S3 server."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpt_async import restore
from ckpt_async.core.local_state import LocalCheckpoint
from ckpt_async.core.model import CheckpointId
from ckpt_async.local import journals
from tests.restore.runs import Run, shard_key
from tests.seaweed import SeaweedServer
from tests.torch_side.dcp_ranks import Crew, digests_of

CrewOf = Callable[[int], Crew]


@pytest.fixture(scope="module")
def crew_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrewOf]:
    """Crews by number of ranks, each shared by several tests that use it one after the other."""
    scratch = tmp_path_factory.mktemp("crews")
    crews: dict[int, Crew] = {}

    def crew_of(world_size: int) -> Crew:
        if world_size not in crews:
            crews[world_size] = Crew(world_size, scratch)
        return crews[world_size]

    yield crew_of
    for crew in crews.values():
        crew.kill()


def begin(
    crew: Crew, tmp_path: Path, remote: str, environment: dict[str, str] | None = None, **settings: Any
) -> Path:
    """Start the training job; return its folder."""
    folder = tmp_path / "folder"
    start = os.urandom(4).hex()
    crew.tell(
        "open", folder=str(folder), remote=remote, start=start, environment=environment or {}, **settings
    )
    return folder


def enqueued(folder: Path, rank: int, step: int) -> LocalCheckpoint | None:
    """Return what a rank's journal records about a step."""
    found = journals.read(folder).get(rank)
    return found.local().checkpoints.get(CheckpointId(1, step)) if found is not None else None


def is_sealed(folder: Path, rank: int, step: int) -> bool:
    found = enqueued(folder, rank, step)
    return found is not None and found.sealed is not None


def check_loads(crew: Crew, remote: str, step: int, digests: dict[str, str], **options: Any) -> None:
    """Check that all ranks have exactly this state after loading, and that they had another one before."""
    crew.tell("train", seed=99)
    assert crew.tell("digests")[0].keys() == digests.keys()
    for answer in crew.tell("load", remote=remote, **options):
        assert answer == (step, digests)


def test_saved_on_four_ranks_killed_and_loaded_on_two_and_three(
    tmp_path: Path, s3_server: SeaweedServer, s3_url: str, crew_of: CrewOf
) -> None:
    environment = s3_server.environment()
    with Crew(4, tmp_path) as crew:
        crew.tell("train", seed=1)
        begin(crew, tmp_path, s3_url, environment)
        crew.tell("save", step=1)
        saved = crew.tell("digests")[0]
        crew.tell("begin_save", step=2, mode="thread")  # later training steps must not change what is saved
        crew.tell("end_save")
        assert crew.tell("digests")[0] != saved
        crew.tell("wait", step=2)
        crew.kill()
    shutil.rmtree(tmp_path / "folder")

    for world_size in (2, 3):
        check_loads(crew_of(world_size), s3_url, 2, saved, environment=environment)

    checkpoint = restore.find(s3_url)
    assert checkpoint is not None
    restore.fetch(checkpoint, tmp_path / "fetched")
    dcp_to_torch_save(tmp_path / "fetched", tmp_path / "whole.pt")  # plain torch can read it
    assert digests_of(torch.load(tmp_path / "whole.pt", weights_only=True)) == saved

    crew = crew_of(3)
    crew.tell("train", seed=99)
    for digests in crew.tell("load_on_one", path=str(tmp_path / "whole.pt")):
        assert all(digests[key] == value for key, value in saved.items() if key.startswith("/model/"))
    for _, trace in crew.ask("load_on_one", path=str(tmp_path / "none.pt")):
        assert "RankFailedError: rank 0 failed: FileNotFoundError" in trace


def test_saved_with_ddp_and_loaded_with_fsdp_on_other_ranks(
    tmp_path: Path, run_: Run, crew_of: CrewOf
) -> None:
    crew = crew_of(2)
    crew.tell("train", seed=2, kind="ddp")
    begin(crew, tmp_path, run_.url)
    crew.tell("save_with_writer", step=1)
    crew.tell("wait", step=1)
    saved = crew.tell("digests")[0]
    crew.tell("close")
    check_loads(crew_of(3), run_.url, 1, saved)


def test_saved_by_a_process_beside_the_trainer(tmp_path: Path, run_: Run) -> None:
    with Crew(2, tmp_path) as crew:
        crew.tell("train", seed=3)
        folder = begin(crew, tmp_path, run_.url)
        saved = crew.tell("digests")[0]
        crew.tell("begin_save", step=1, mode="process")
        crew.tell("end_save")
        crew.tell("wait", step=1)
        check_loads(crew, run_.url, 1, saved)

        crew.tell("begin_save", step=2, mode="process", failing_rank=1)
        for _, trace in crew.ask("end_save"):
            assert "the disk of this rank is broken" in trace
        assert [enqueued(folder, rank, 2) for rank in range(2)] == [None, None]

        # torch's own async_save with a writer, which reaches the trainer's uploader from where it runs.
        for step, mode in ((3, "process"), (4, "thread")):
            crew.tell("step")
            saved = crew.tell("digests")[0]
            crew.tell("begin_save_with_writer", step=step, mode=mode)
            crew.tell("end_save")
            crew.tell("wait", step=step)
            check_loads(crew, run_.url, step, saved)
        found = restore.find(run_.url, step=3)
        assert found is not None
        assert found.metrics == {"loss": 0.5}
        crew.tell("begin_save_with_writer", step=3, mode="process")
        for _, trace in crew.ask("end_save"):
            assert "SealedError: step 3 was sealed" in trace


@pytest.mark.parametrize("mode", ["now", "thread"])
def test_a_save_that_fails_on_one_rank_raises_on_all_and_leaves_nothing(
    tmp_path: Path, run_: Run, crew_of: CrewOf, mode: str
) -> None:
    crew = crew_of(2)
    crew.tell("train", seed=4)
    folder = begin(crew, tmp_path, run_.url)
    if mode == "now":
        answers = crew.ask("save", step=1, failing_rank=1)
    else:
        crew.tell("begin_save", step=1, mode=mode, failing_rank=1)
        answers = crew.ask("end_save")
    for _, trace in answers:
        assert "CheckpointException" in trace
        assert "RANK 1" in trace
        assert "the disk of this rank is broken" in trace
    assert [enqueued(folder, rank, 1) for rank in range(2)] == [None, None]
    assert not (folder / "step-1").exists()

    saved = crew.tell("digests")[0]
    crew.tell("save", step=1)  # the step number is still free
    crew.tell("wait", step=1)
    crew.tell("close")
    check_loads(crew, run_.url, 1, saved)


def test_a_step_rejected_on_one_rank_is_rejected_on_all_before_writing(
    tmp_path: Path, run_: Run, crew_of: CrewOf
) -> None:
    crew = crew_of(2)
    crew.tell("train", seed=7)
    folder = begin(crew, tmp_path, run_.url, close_grace_s=0.0)
    crew.tell("seal_on", rank=1, step=1)
    for what, options in (("save", {}), ("begin_save", {"mode": "thread"}), ("save_with_writer", {})):
        for _, trace in crew.ask(what, step=1, **options):
            assert "SealedError: step 1 was sealed" in trace
        assert not list(folder.glob("step-1/*"))
    crew.tell("save", step=2)
    crew.tell("wait", step=2)
    crew.tell("close")


def test_a_save_by_torch_itself_that_fails_on_one_rank_is_never_committed(
    tmp_path: Path, run_: Run, crew_of: CrewOf
) -> None:
    crew = crew_of(2)
    crew.tell("train", seed=5)
    # Closing must not wait for a checkpoint that is never committed.
    folder = begin(crew, tmp_path, run_.url, close_grace_s=0.0)
    for failing_rank in range(2):
        for _, trace in crew.ask("save_with_writer", step=1 + failing_rank, failing_rank=failing_rank):
            assert f"RANK {failing_rank}" in trace
            assert "the disk of this rank is broken" in trace
    assert is_sealed(folder, rank=1, step=1)
    assert not any(is_sealed(folder, rank, step) for rank, step in ((0, 1), (0, 2), (1, 2)))
    crew.tell("save_with_writer", step=3)
    crew.tell("wait", step=3)
    crew.tell("close")
    found = restore.find(run_.url)
    assert found is not None
    assert (found.step, found.rejected) == (3, ())
    assert run_.keys(".ckpt-async/decisions/") == [".ckpt-async/decisions/000001-000000000003.json"]


@pytest.fixture
def two_saved(tmp_path: Path, run_: Run, crew_of: CrewOf) -> tuple[dict[str, str], dict[str, str]]:
    """Steps 1 and 2 saved by two ranks; returns the digests of both states."""
    crew = crew_of(2)
    crew.tell("train", seed=6)
    begin(crew, tmp_path, run_.url)
    found = []
    for step in (1, 2):
        crew.tell("step")
        found.append(crew.tell("digests")[0])
        crew.tell("save", step=step)
        crew.tell("wait", step=step)
    crew.tell("close")
    return found[0], found[1]


def delete(run: Run, key: str) -> None:
    run.delete(key)


def flip_in_the_middle(run: Run, key: str) -> None:
    run.flip(key, at=len(run.get(key)) // 2)


@pytest.mark.parametrize("name", [".metadata", "__1_0.distcp"])
@pytest.mark.parametrize("damage", [delete, flip_in_the_middle])
def test_all_ranks_fall_back_together_when_the_newest_is_damaged(
    run_: Run, crew_of: CrewOf, two_saved: tuple[dict[str, str], dict[str, str]], name: str, damage: Any
) -> None:
    check_loads(crew_of(2), run_.url, 2, two_saved[1])
    damage(run_, shard_key(2, name))
    check_loads(crew_of(2), run_.url, 1, two_saved[0])


def test_all_ranks_learn_that_there_is_no_checkpoint_or_none_usable(
    tmp_path: Path, run_: Run, crew_of: CrewOf, two_saved: object
) -> None:
    crew = crew_of(2)
    assert crew.tell("load", remote=f"file://{tmp_path / 'nothing'}") == [None, None]
    for step in (1, 2):
        flip_in_the_middle(run_, shard_key(step, "__0_0.distcp"))
    for _, trace in crew.ask("load", remote=run_.url):
        assert "NoUsableCheckpointError" in trace
    # Asked for by step, so no other checkpoint will do.
    for _, trace in crew.ask("load", remote=run_.url, step=1):
        assert "CheckpointException" in trace
        assert "CRC-32" in trace


@pytest.fixture
def by_replicas(tmp_path: Path, run_: Run, crew_of: CrewOf) -> tuple[Crew, list[dict[str, str]]]:
    """Four ranks (two replicas of two shards) after saving steps 1 and 2, and the digests of both states."""
    crew = crew_of(4)
    crew.tell("train", seed=8, kind="hsdp")
    begin(crew, tmp_path, run_.url)
    found = []
    for step in (1, 2):
        crew.tell("step")
        found.append(crew.tell("digests")[0])
        crew.tell("save", step=step)
        crew.tell("wait", step=step)
    crew.tell("close")
    crew.tell("train", seed=9, kind="hsdp")
    return crew, found


def test_one_replica_reads_and_all_get_the_state(
    run_: Run, by_replicas: tuple[Crew, list[dict[str, str]]]
) -> None:
    crew, saved = by_replicas
    read = crew.tell("load_by_replicas", remote=run_.url)
    checkpoint = restore.find(run_.url)
    assert checkpoint is not None
    assert read[2:] == [0, 0]
    assert read[0] > 0
    assert read[1] > 0
    needed = checkpoint.size_bytes - checkpoint.files[".metadata"].size_bytes
    assert needed <= sum(read) < 1.3 * needed  # both shards read the values that are not tensors
    crew.tell("train", seed=9, kind="hsdp")
    for answer in crew.tell("load", remote=run_.url, by_replicas=True):
        assert answer == (2, saved[1])
    for _, trace in crew.ask("load_by_replicas", remote=run_.url, is_wrong=True):
        assert re.search(r"ranks disagree about what to load.* on ranks 0, 2; .* on ranks 1, 3", trace)


def test_no_replica_is_left_waiting(run_: Run, by_replicas: tuple[Crew, list[dict[str, str]]]) -> None:
    crew, saved = by_replicas
    for failing_rank in (0, 3):  # one rank that reads, and one that receives
        for _, trace in crew.ask("load", remote=run_.url, by_replicas=True, failing_rank=failing_rank):
            assert f"RANK {failing_rank}" in trace
            assert "the memory of this rank is broken" in trace
    flip_in_the_middle(run_, shard_key(2, "__1_0.distcp"))
    for answer in crew.tell("load", remote=run_.url, by_replicas=True):
        assert answer == (1, saved[0])
