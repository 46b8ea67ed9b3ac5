"""Names, paths, keys and records made to do harm: nothing outside is touched, and no record brings a reader down."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.settings import Settings
from ckpt_async.sweep.sweeper import Sweeper
from tests.core.hostile import BOMBS
from tests.faults.oracle import verified
from tests.faults.processes import ROOT
from tests.faults.trainer import write_shards

LIMIT_MIB = 256
Json = dict[str, Any]


def watched(what: str, folder: Path) -> Json:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.faults.hostile", what, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report: Json = json.loads(done.stdout.splitlines()[-1])
    return report


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def committed(folder: Path, remote: Path, *steps: int) -> None:
    with Uploader(folder, f"file://{remote}", rank=0, world_size=1) as uploader:
        for step in steps:
            uploader.enqueue(write_shards(folder, uploader.generation, step, 0, 2), step)
            uploader.seal(step)
            uploader.wait(step, timeout_s=60)


@pytest.mark.fault("F25", "F27")
def test_no_name_path_or_key_escapes_the_folder_or_prefix(tmp_path: Path) -> None:
    """Faults F25 and F27: CPython's audit events report every call that takes a path, and none may be
    outside the folder and the run.
    """
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "canary").write_bytes(b"canary")
    committed(tmp_path / "other", tmp_path / "inside" / "run-2", 1)
    before = tree(outside) | tree(tmp_path / "inside" / "run-2")
    report = watched("names", tmp_path)
    print(report["counts"], "calls", report["num_calls"])
    assert report["outside"] == []
    assert report["num_calls"] > 2000
    counts = report["counts"]
    for what in ("enqueue joined", "enqueue name", "seal name"):
        assert counts[f"{what} refused"] > 100
        assert counts[f"{what} taken"] > 0
    assert counts["put refused"] > 100
    assert tree(outside) | tree(tmp_path / "inside" / "run-2") == before
    assert (outside / "canary").stat().st_nlink == 1, "something was linked that is not ours"


@pytest.mark.fault("F26")
@pytest.mark.parametrize("is_s3", [False, True], ids=["file", "s3"])
def test_nothing_is_deleted_by_prefix(tmp_path: Path, request: pytest.FixtureRequest, is_s3: bool) -> None:
    """Fault F26: `step-1` is a prefix of `step-10`, and one run's name is a prefix of another's;
    retention may take only its own.
    """
    root = request.getfixturevalue("s3_url") if is_s3 else f"file://{tmp_path}/store"
    for run, steps in (("run", (1, 10, 11, 100)), ("run-2", (1, 10))):
        with Uploader(tmp_path / run, f"{root}/{run}", rank=0, world_size=1) as uploader:
            for step in steps:
                uploader.enqueue(write_shards(tmp_path / run, 1, step, 0, 2), step)
                uploader.seal(step)
                uploader.wait(step, timeout_s=60)
    report = asyncio.run(Sweeper([], [f"{root}/run"], settings=Settings(remote_retention="last=3")).sweep())
    assert report.is_clean
    left = verified(f"{root}/run")
    assert (left.findings, left.num_committed, left.num_shards_read) == ([], 3, 6)
    other = verified(f"{root}/run-2")
    assert (other.findings, other.num_committed, other.num_shards_read) == ([], 2, 4)


@pytest.mark.fault("F25")
def test_forged_receipts_cannot_delete_another_checkpoints_shards(tmp_path: Path) -> None:
    """The sweeper deletes what receipts list, so it must refuse a receipt that lists paths
    or another checkpoint's objects.
    """
    remote, neighbour = tmp_path / "store" / "run", tmp_path / "store" / "run-2"
    committed(tmp_path / "a", remote, 1, 2)
    committed(tmp_path / "b", neighbour, 1)
    path = remote / keys.receipt_key(CheckpointId(1, 1), 0)
    receipt = json.loads(path.read_text())
    (remote / "ckpt" / "link.g1").symlink_to(neighbour / "ckpt" / "step-1.g1")
    before = tree(neighbour)
    for key in (
        "../run-2/ckpt/step-1.g1/rank-0-0.pt",
        f"{neighbour}/ckpt/step-1.g1/rank-0-0.pt",
        "ckpt/link.g1/rank-0-0.pt",
        "ckpt/step-2.g1/rank-0-0.pt",
        ".ckpt-async/latest.json",
    ):
        receipt["shards"][0]["key"] = key
        path.write_text(json.dumps(receipt))
        report = asyncio.run(
            Sweeper([], [f"file://{remote}"], settings=Settings(remote_retention="last=1")).sweep()
        )
        assert not report.is_clean
        assert tree(neighbour) == before
        assert verified(f"file://{remote}").num_committed == 1
        assert (remote / "ckpt/step-2.g1/rank-0-0.pt").exists()


@pytest.mark.fault("F28")
def test_a_bomb_in_any_record_is_rejected_within_little_memory(tmp_path: Path) -> None:
    """Fault F28: nested, huge, endless and wrong records, in every place where a sweeper and `verify` read one."""
    template = tmp_path / "template"
    committed(tmp_path / "folder", template, 1, 2)
    places = {
        "receipt": keys.receipt_key(CheckpointId(1, 1), 0),
        "decision": keys.decision_key(CheckpointId(1, 1)),
        "latest": keys.LATEST,
        "boundary": keys.BOUNDARY,
    }
    bombs, remotes = tmp_path / "bombs", tmp_path / "remotes"
    bombs.mkdir()
    for number, bomb in enumerate(BOMBS.values()):
        (bombs / str(number)).write_bytes(bomb)
        for place, key in places.items():
            remote = remotes / f"{place}-{number}"
            shutil.copytree(template, remote)
            (remote / key).unlink(missing_ok=True)
            os.link(bombs / str(number), remote / key)
    report = watched("bombs", remotes)
    slowest = max(report["took_s"], key=report["took_s"].get)
    print(
        f"bombs={len(report['took_s'])} slowest={slowest} {report['took_s'][slowest]:.3f} s"
        f" max_rss={report['max_rss_kib'] >> 10} MiB (of that, imports {report['before_kib'] >> 10} MiB)"
    )
    assert report["unrefused"] == []
    assert report["max_rss_kib"] < LIMIT_MIB << 10
    assert report["took_s"][slowest] < 2.0
