"""Ranks that resume together use the nearest copies, read each byte from the store once, and all see each failure."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_async import Uploader
from ckpt_async.torch.resume import Needs, fetch_together, first_fetches

SIZE = 300_000
NUM_RANKS = 4
NAMES = [f"rank-{rank}.pt" for rank in range(NUM_RANKS)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What four ranks did in all scenarios, played in a single start, because starting torch is slow."""
    base = tmp_path_factory.mktemp("resume")
    remote, rng = f"file://{base}/remote", random.Random(3)
    with Uploader(base / "truth", remote, rank=0, world_size=1, latest_filename="") as uploader:
        for step in (1, 2):
            folder = base / "truth" / f"step-{step}"
            folder.mkdir()
            for name in NAMES:
                (folder / name).write_bytes(rng.randbytes(SIZE))
            uploader.enqueue(folder, step=step)
            uploader.seal(step)
        uploader.wait(2, timeout_s=60)
    for name in ("intact", "wiped-node", "own-file"):
        shutil.copytree(base / "truth" / "step-2", base / name / "node-0" / "step-2")
    shutil.copytree(base / "truth" / "step-2", base / "intact" / "node-1" / "step-2")
    # Damaged, but of the right size.
    (base / "wiped-node" / "node-0" / "step-2" / "rank-3.pt").write_bytes(bytes(SIZE))
    names = ["fresh", "intact", "wiped-node", "own-file", "unwritable", "all-wiped", "damaged", "emptied"]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(NUM_RANKS),
        "OMP_NUM_THREADS": "1",
    }
    ranks = subprocess.Popen(
        [sys.executable, "-m", "tests.torch_side.resume_ranks", remote, str(base), *names],
        env=environment,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    try:
        assert ranks.wait(150) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):  # normally all have ended
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
    return {
        name: [json.loads((base / f"{name}-{rank}.json").read_text()) for rank in range(NUM_RANKS)]
        for name in names
    }


def total(results: list[dict[str, Any]], kind: str) -> int:
    return sum(each["bytes_from"].get(kind, 0) for each in results)


def test_nothing_to_resume_from_is_a_fresh_start_for_all(results: Any) -> None:
    assert results["fresh"] == [{"none": True}] * NUM_RANKS


def test_a_remote_that_lost_everything_is_no_fresh_start_for_any_rank(results: Any) -> None:
    """The first node's journal knows of committed checkpoints, so training must not start
    over when a bucket was emptied.
    """
    for each in results["emptied"]:
        assert (each["error"], each["cause"]) == ("RankFailedError", "StoreError")
        assert "this node's journal knows" in each["message"]


def test_without_a_process_group_there_is_one_rank(tmp_path: Path) -> None:
    """The same script must also run on a single device."""
    remote = f"file://{tmp_path}/remote"
    with Uploader(tmp_path / "saved", remote, rank=0, world_size=1) as uploader:
        (tmp_path / "saved/a.pt").write_bytes(b"a" * 100)
        uploader.enqueue(tmp_path / "saved/a.pt", step=1)
        uploader.seal(1)
    found = fetch_together(remote, lambda checkpoint: tmp_path / "back" / checkpoint.name)
    assert found is not None
    assert found[0].step == 1
    assert (tmp_path / "back/step-1/a.pt").read_bytes() == b"a" * 100
    assert fetch_together(f"{remote}-nothing", tmp_path / "back") is None


def test_local_files_are_used_locally(results: Any) -> None:
    for each in results["intact"]:
        assert (each["step"], each["is_whole"], each["files"]) == (2, True, NAMES)
        assert each["bytes_from"] == {"there": 4 * SIZE}


def test_a_wiped_node_fetches_from_the_other_node(results: Any) -> None:
    """The node's one damaged file is found by its checksum. One node or both fetch that file from the store, because
    the wiped node may already find the other node's mended copy.
    """
    for each in results["wiped-node"]:
        assert (each["step"], each["is_whole"], each["files"]) == (2, True, NAMES)
    mended, refilled = results["wiped-node"][:2], results["wiped-node"][2:]
    assert total(mended, "peer") + total(mended, "remote") == SIZE
    assert total(refilled, "peer") + total(refilled, "remote") == 4 * SIZE
    assert total(results["wiped-node"], "remote") in (SIZE, 2 * SIZE)


def test_each_rank_may_request_its_own_files(results: Any) -> None:
    for rank, each in enumerate(results["own-file"]):
        assert each["files"] == [f"rank-{rank}.pt"]
        assert each["is_whole"]
    assert total(results["own-file"], "remote") == 0
    assert total(results["own-file"][2:], "peer") == 2 * SIZE


def test_files_nobody_has_are_read_from_the_store_once(results: Any) -> None:
    """Of two nodes that need the same files, each reads half from the store and gets the other half from its peer."""
    for each in results["all-wiped"]:
        assert (each["step"], each["is_whole"], each["files"]) == (2, True, NAMES)
    assert total(results["all-wiped"], "remote") == 4 * SIZE
    assert total(results["all-wiped"], "peer") == 4 * SIZE


def test_all_ranks_fall_back_to_the_same_older_checkpoint(results: Any) -> None:
    for each in results["damaged"]:
        assert "error" not in each, each
        assert (each["step"], each["is_whole"], each["files"]) == (1, True, NAMES)
        assert len(each["passed_over"]) == 1


def test_a_failure_on_one_rank_is_raised_on_all(results: Any) -> None:
    for rank, each in enumerate(results["unwritable"]):
        if rank // 2 == 1:  # the ranks of that node
            assert each["error"] == "DestinationError"
        else:
            assert each["error"] == "RankFailedError"
            assert "rank 2 failed: DestinationError" in each["message"]


NODES = st.sampled_from(["a", "b", "c"])
FILES = st.frozensets(st.sampled_from("uvwxyz"))


@given(st.lists(st.builds(Needs, NODES, FILES, FILES), min_size=1), st.data())
def test_first_fetches_reads_from_the_store_once_what_nobody_has(
    needs: list[Needs], data: st.DataObject
) -> None:
    sizes = {name: data.draw(st.integers(0, 100), label=name) for name in "uvwxyz"}
    chosen = first_fetches(needs, sizes)
    fetched = [name for names in chosen.values() for name in names]
    has = frozenset().union(*(need.has for need in needs))
    wanted = frozenset().union(*(need.wanted for need in needs))
    assert sorted(fetched) == sorted(wanted - has)
    for node, names in chosen.items():
        assert names <= frozenset().union(*(need.wanted for need in needs if need.node == node))
    assert first_fetches(list(reversed(needs)), sizes) == chosen
