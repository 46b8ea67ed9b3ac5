"""`sweep`, `prune`, `pin`, `unpin` and `verify` as a shell sees them: exit codes, JSON, and what they leave alone."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ckpt_async import Sweeper, Uploader, cli
from ckpt_async.cli.output import Exit
from ckpt_async.cli.sweep import ACTIONS
from ckpt_async.core import keys, records
from ckpt_async.core.model import CheckpointId, Outcome
from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.protocol import sweep_plan
from ckpt_async.protocol.steps import new_decision
from ckpt_async.transfer.patient import connect
from tests.sweep.trainers import Trainers

Json = dict[str, Any]
Call = Callable[..., tuple[int, Json]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return tmp_path / "store" / "run"


@pytest.fixture
def remote(stored: Path) -> str:
    return f"file://{stored}"


def train(folder: Path, remote: str, *steps: int) -> None:
    with Uploader(folder, remote, rank=0, world_size=1) as uploader:
        for step in steps:
            path = folder / f"step-{step}" / "model.bin"
            path.parent.mkdir(parents=True)
            path.write_bytes(f"{step}".encode() * 1000)
            uploader.enqueue(path.parent, step, name=f"ep1-ba{step}")
            uploader.seal(step, metrics={"loss": 1 / step})


def tree(root: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() for each in root.rglob("*") if each.is_file()}


def steps(call: Call, remote: str) -> list[int]:
    return [each["step"] for each in call("ls", remote)[1]["checkpoints"]]


# --- sweep -------------------------------------------------------------------------------------------------


def test_sweep_finishes_a_folder_and_prunes_its_remote(
    trainers: Trainers, call: Call, folder: Path, remote: str
) -> None:
    """This is what a cron job runs; the JSON says what was done and why."""
    trainers.die(folder, remote, 1, 2, 3)
    code, told = call("sweep", folder, "--once", "--keep", "last=2")
    assert (code, told["is_dry_run"], told["is_clean"]) == (0, False, True)
    assert told["folders"] == [
        {
            "folder": str(folder),
            "error": None,
            "unfinished_ranks": [],
            "uploaded_bytes": 9000,
            "committed": 3,
            "left": 0,
        }
    ]
    (swept,) = told["remotes"]
    assert (swept["remote"], swept["error"]) == (remote, None)
    assert [(each["action"], each["error"]) for each in swept["actions"]] == [
        ("begin_prune", None),
        ("finish_prune", None),
    ]
    assert all(each["what"] and each["reason"] for each in swept["actions"])
    assert steps(call, remote) == [2, 3]


def test_the_policy_of_a_kind_is_its_own(call: Call, folder: Path, remote: str) -> None:
    for kind in (None, "weights", "ema"):
        with Uploader(folder, remote, rank=0, world_size=1, kind=kind) as uploader:
            for step in (1, 2):
                path = folder / f"{kind}-{step}.bin"
                path.write_bytes(b"x")
                uploader.enqueue(path, step)
                uploader.seal(step)

    def left() -> dict[str | None, list[int]]:
        found: dict[str | None, list[int]] = {}
        for each in call("ls", remote)[1]["checkpoints"]:
            found.setdefault(each["kind"], []).append(each["step"])
        return found

    assert call("prune", remote, "--kind", "ema", "--keep", "last=1", "--yes")[0] == 0
    assert left() == {None: [1, 2], "weights": [1, 2], "ema": [2]}
    assert call("sweep", "--remote", remote, "--keep", "weights:last=1")[0] == 0
    assert left() == {None: [1, 2], "weights": [2], "ema": [2]}


def test_folders_only_prunes_nothing(
    trainers: Trainers, call: Call, folder: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer's permissions do not suffice for more."""
    monkeypatch.setenv("CKPT_ASYNC_REMOTE_RETENTION", "last=1")
    trainers.die(folder, remote, 1, 2)
    code, told = call("sweep", folder, "--folders-only")
    assert (code, told["folders"][0]["committed"], told["remotes"]) == (0, 2, [])
    assert steps(call, remote) == [1, 2]
    assert call("sweep", folder, "--folders-only", "--keep", "last=1")[0] == 2


def test_the_endpoint_given_to_a_sweep_is_used(
    call: Call, folder: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(folder, s3_url, 1, 2)
    endpoint = next(name for name in os.environ if name.startswith("AWS_ENDPOINT_URL"))
    arguments = ["sweep", "--remote", s3_url, "--keep", "last=1", "--endpoint-url", os.environ[endpoint]]
    monkeypatch.delenv(endpoint)
    code, told = call(*arguments)
    assert (code, told["remotes"][0]["error"]) == (0, None)


def test_a_sweep_tells_a_reader_what_failed_what_is_in_use_and_what_is_damaged(
    trainers: Trainers,
    folder: Path,
    remote: str,
    stored: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def told(*arguments: object, code: int) -> str:
        assert cli.main(["sweep", *map(str, arguments)]) == code
        return capsys.readouterr().out

    with Uploader(folder, remote, rank=0, world_size=1):
        assert (
            f"{folder}: 0 committed, 0 left, 0 bytes uploaded; ranks [0] are in use by a live owner"
            in told(folder, "--folders-only", code=0)
        )
    train(tmp_path / "other", remote, 2)
    file = tmp_path / "sweep.prom"
    lose_a_shard(stored)
    out = told("--remote", remote, "--verify", "--metrics-file", file, code=1)
    assert f"{remote}: missing: ckpt/ep1-ba2.g2/model.bin" in out
    assert "ckpt_async_command_violations" in file.read_text()
    dead = tmp_path / "dead"
    trainers.die(dead, f"{remote}-2", 1)
    shutil.rmtree(f"{stored}-2")
    train(tmp_path / "newer", f"{remote}-2", 1)  # after the remote was wiped
    assert f"{dead}: rank 0 failed (" in told(dead, "--folders-only", code=1)


def test_sweep_dry_run_touches_nothing(
    trainers: Trainers,
    call: Call,
    folder: Path,
    remote: str,
    stored: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(folder, remote, 1, 2)
    trainers.die(folder.with_name("other"), f"{remote}-other", 7)
    before = tree(stored)
    arguments = ["sweep", folder, folder.with_name("other"), "--dry-run", "--keep", "last=1"]
    code, told = call(*arguments)
    assert (code, told["is_dry_run"]) == (0, True)
    assert [each["unfinished_ranks"] for each in told["folders"]] == [[], [0]]
    assert [each["action"] for each in told["remotes"][0]["actions"]] == ["begin_prune"]
    assert tree(stored) == before
    assert cli.main(list(map(str, arguments))) == 0
    out = capsys.readouterr().out
    assert "would begin to prune generation 1 step 1: beyond retention" in out
    assert "would finish what ranks [0] left" in out


def test_sweep_without_targets_is_a_usage_error_and_an_unreachable_remote_fails(
    call: Call, tmp_path: Path, remote: str
) -> None:
    """A unit file with a missing variable must not look healthy forever."""
    code, told = call("sweep")
    assert (code, told["error"]["kind"]) == (2, "SettingsError")
    code, told = call("sweep", "--remote", remote, "--keep", "last=0")
    assert (code, told["error"]["kind"]) == (2, "SettingsError")
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    code, told = call("sweep", "--remote", f"file://{blocked}/run")
    assert (code, told["is_clean"]) == (1, False)
    assert told["remotes"][0]["error"]


@contextlib.contextmanager
def sweeping(*arguments: object, log: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run a sweeper in its own process and stop it with SIGTERM, which it must not treat as a failure."""
    with open(log or os.devnull, "w", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "ckpt_async", "sweep", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def told_by(process: subprocess.Popen[str]) -> Json:
    assert process.stdout is not None
    told: Json = json.loads(process.stdout.readline())
    return told


def scraped(log: Path) -> dict[str, float]:
    """Return what Prometheus would see at the address given in the log."""
    (url,) = re.findall(r"metrics_served url=(\S+)", log.read_text(encoding="utf-8"))
    with urllib.request.urlopen(url, timeout=30) as reply:
        families = text_string_to_metric_families(reply.read().decode())
        return {
            " ".join([each.name.removeprefix("ckpt_async_"), *each.labels.values()]): each.value
            for family in families
            for each in family.samples
        }


def test_sweep_serves_metrics_and_continues_while_the_store_is_unavailable(
    trainers: Trainers, folder: Path, remote: str, stored: Path, tmp_path: Path
) -> None:
    """An outage is logged, counted and temporary: the next sweep does what this one could not."""
    trainers.die(folder, remote, 1, 2, 3)
    away, log = stored.with_name("away"), tmp_path / "log"
    options = ["--interval", "0.05", "--metrics-port", "0", "--keep", "last=1", "--json", "--verify", "-v"]
    with sweeping(folder, "--remote", remote, *options, log=log) as sweeper:
        first = told_by(sweeper)
        assert (first["is_clean"], first["folders"][0]["committed"]) == (True, 3)
        samples = scraped(log)
        assert (
            samples["sweep_last_completed_timestamp_seconds"]
            >= samples["sweep_started_timestamp_seconds"]
            > 0
        )
        assert samples["sweep_adopted_uploads_total"] == 3
        assert samples["sweep_adopted_upload_bytes_total"] == 9000
        assert samples["sweep_checkpoints_total committed"] == 3
        assert samples["sweep_checkpoints_total pruned"] == 2
        assert samples["sweep_failures_total remote"] == 0
        stored.rename(away)
        stored.write_text("where the folder was")
        while told_by(sweeper)["is_clean"]:
            pass
        samples = scraped(log)
        assert samples["sweeps_total failed"] >= 1
        assert samples["sweep_failures_total remote"] >= 1
        stored.unlink()
        away.rename(stored)
        while not told_by(sweeper)["is_clean"]:
            pass
        shard = next((stored / "ckpt").rglob("*.bin"))
        shard.unlink()
        while not (violations := told_by(sweeper)["remotes"][0].get("violations")):
            pass
        lost = str(shard.relative_to(stored))
        assert [(each["kind"], each["key"]) for each in violations] == [("missing", lost)]
        assert scraped(log)["verify_failures_total missing"] >= 1


def test_a_taken_metrics_port_does_not_stop_a_sweep(folder: Path, remote: str) -> None:
    train(folder, remote, 1)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        options = ["--metrics-port", busy.getsockname()[1], "--interval", "0.05", "--json"]
        with sweeping(folder, *options) as sweeper:
            assert told_by(sweeper)["is_clean"]


def test_a_bug_in_one_sweep_is_reported_and_the_next_sweep_runs(
    folder: Path, remote: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that died of such a bug would hit it again at every launch, and clean up nothing else."""
    train(folder, remote, 1)
    sweep, num_sweeps = Sweeper.sweep, 0

    async def meddled(self: Sweeper, **more: Any) -> Any:
        nonlocal num_sweeps
        num_sweeps += 1
        if num_sweeps == 1:
            raise ZeroDivisionError
        os.kill(os.getpid(), signal.SIGTERM)
        return await sweep(self, **more)

    monkeypatch.setattr(Sweeper, "sweep", meddled)
    assert cli.main(["sweep", str(folder), "--interval", "0.01", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out.splitlines()[0])["error"] == "ZeroDivisionError()"
    assert "sweep_failed" in told.err
    assert num_sweeps == 2
    num_sweeps = 0
    assert cli.main(["sweep", str(folder), "--once"]) == Exit.ERROR


def test_sweep_finds_folders_by_pattern(
    trainers: Trainers, call: Call, folder: Path, remote: str, tmp_path: Path
) -> None:
    """One unit file serves all runs of a node; folders that no trainer has used are skipped."""
    trainers.die(folder / "a", f"{remote}-a", 1)
    trainers.die(folder / "[b]", f"{remote}-b", 1)
    (folder / "lost+found").mkdir()
    code, told = call("sweep", folder / "*")
    assert code == 0
    assert [(each["folder"], each["committed"]) for each in told["folders"]] == [
        (str(folder / "[b]"), 1),
        (str(folder / "a"), 1),
    ]
    assert [each["remote"] for each in told["remotes"]] == [f"{remote}-b", f"{remote}-a"]
    assert len(call("sweep", folder / "[b]")[1]["folders"]) == 1
    assert call("sweep", tmp_path / "nothing*")[1]["folders"] == []


def test_an_unreadable_journal_does_not_stop_other_folders(
    trainers: Trainers, call: Call, folder: Path, remote: str
) -> None:
    trainers.die(folder / "a", f"{remote}-a", 1)
    trainers.die(folder / "b", f"{remote}-b", 1)
    for left in (folder / "a/.ckpt-async").glob("journal-*"):
        left.unlink()
    (folder / "a/.ckpt-async" / keys.journal_name(0)).write_bytes(b"no journal" * 1000)
    for each in (folder / "a/.ckpt-async/spool").rglob("*.json"):
        each.unlink()
    code, told = call("sweep", folder / "a", folder / "b")
    assert (code, told["is_clean"]) == (1, False)
    assert told["folders"][0]["error"]
    assert told["folders"][1]["committed"] == 1
    assert call("ls", f"{remote}-b")[1]["checkpoints"][0]["step"] == 1


def test_sigterm_ends_a_repeating_sweep(folder: Path, remote: str) -> None:
    """systemd stops a sweeper with SIGTERM: it exits between sweeps, within the interval, with exit code 0."""
    train(folder, remote, 1, 2)
    with sweeping(folder, "--keep", "last=1", "--interval", "0.05", "--json") as sweeper:
        told = [told_by(sweeper) for _ in range(3)]
    done = [[each["action"] for each in sweep["remotes"][0]["actions"]] for sweep in told]
    assert done == [["begin_prune", "finish_prune"], [], []]


def test_sigterm_during_a_sweep_ends_it_and_frees_the_folder(
    trainers: Trainers, call: Call, folder: Path, remote: str
) -> None:
    """Even a sweep that takes hours must not wait for SIGKILL, because the next one continues its work."""
    trainers.die(folder, remote, 1)
    code = (
        "import sys\nfrom ckpt_async import cli\nfrom ckpt_async.engine.loop import Engine\n"
        "upload = Engine._upload\n"
        "async def loudly(self, action):\n    print('uploading', flush=True)\n    await upload(self, action)\n"
        "Engine._upload = loudly\nsys.exit(cli.main(sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "sweep", str(folder), "--interval", "3600"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CKPT_ASYNC_MAX_BYTES_PER_S": "10"},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "uploading\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0
    assert call("sweep", folder)[1]["folders"][0]["committed"] == 1


# --- prune, pin, unpin -------------------------------------------------------------------------------------


@pytest.mark.fault("O3")
def test_prune_is_a_dry_run_without_yes(
    call: Call, folder: Path, remote: str, stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(folder, remote, 1, 2, 3)
    before = tree(stored)
    assert cli.main(["prune", remote, "--keep", "last=1"]) == 0
    said = capsys.readouterr().out
    assert "nothing was changed; pass --yes to prune" in said
    assert f"{remote}: keep generation 1 step 3 (ep1-ba3, 1000 B): one of the newest 1" in said
    assert f"{remote}: 1 checkpoint (1000 B) stays, 2 checkpoints (2.0 KiB) would go" in said
    code, told = call("prune", remote, "--keep", "last=1", "--dry-run")
    assert (code, told["is_dry_run"]) == (0, True)
    assert [each["action"] for each in told["remotes"][0]["actions"]] == ["begin_prune"] * 2
    assert tree(stored) == before
    stays = {
        each["step"]: (each["stays"], each["reason"], each["size_bytes"])
        for each in told["remotes"][0]["checkpoints"]
    }
    gone = (False, "beyond retention", 1000)
    assert stays == {1: gone, 2: gone, 3: (True, "one of the newest 1", 1000)}
    code, told = call("prune", remote, "--keep", "last=1", "--yes")
    assert (code, told["is_dry_run"], steps(call, remote)) == (0, False, [3])
    assert [each.name for each in (stored / "ckpt").iterdir()] == ["ep1-ba3.g1"]
    assert call("verify", remote, "--read-data", 100)[0] == 0


@pytest.mark.parametrize("keep", [None, "", "all", "last=3,all", "last=0", "last=1,", "0", "none"])
def test_prune_rejects_policies_that_keep_all_or_could_mean_delete_all(
    call: Call, folder: Path, remote: str, stored: Path, keep: str | None
) -> None:
    train(folder, remote, 1, 2)
    before = tree(stored)
    policy = [] if keep is None else ["--keep", keep]
    code, told = call("prune", remote, *policy, "--yes")
    assert (code, told["error"]["kind"]) == (2, "SettingsError")
    assert tree(stored) == before


def test_prune_takes_its_policy_from_the_environment(
    call: Call, folder: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy is the setting `remote_retention`, the same one that the sweeper on the node uses."""
    train(folder, remote, 1, 2, 3)
    monkeypatch.setenv("CKPT_ASYNC_REMOTE_RETENTION", "last=1,best=1:loss:max")
    assert call("prune", remote, "--yes")[0] == 0
    assert steps(call, remote) == [1, 3]


@pytest.mark.fault("O3")
@pytest.mark.parametrize("keep", ["best=1:los", "named=nobody", "every-steps=1000"])
def test_a_policy_that_matches_nothing_prunes_nothing(
    call: Call, folder: Path, remote: str, keep: str
) -> None:
    """A typo in the metric's name would otherwise delete all but the newest checkpoint."""
    train(folder, remote, 1, 2, 3)
    code, told = call("prune", remote, "--keep", keep, "--yes")
    assert (code, steps(call, remote)) == (0, [1, 2, 3])
    actions = told["remotes"][0]["actions"]
    assert {each["action"] for each in actions} == {"wait"}
    _, dry = call("prune", remote, "--keep", keep)
    assert [each["stays"] for each in dry["remotes"][0]["checkpoints"]] == [True] * 3
    assert all("matches no checkpoint" in each["reason"] for each in actions)
    assert call("prune", remote, "--keep", f"{keep},last=1", "--yes")[0] == 0
    # The best may have been saved without the metric.
    assert steps(call, remote) == ([1, 2, 3] if keep.startswith("best=") else [3])


def test_a_pin_holds_until_it_is_removed(
    call: Call, folder: Path, remote: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint is selected by step or by name, whichever the user knows."""
    train(folder, remote, 1, 2, 3, 4)
    assert call("pin", remote, "1") == (0, {"generation": 1, "step": 1, "is_pinned": True})
    assert call("pin", remote, "ep1-ba2") == (0, {"generation": 1, "step": 2, "is_pinned": True})
    assert cli.main(["pin", remote, "2"]) == 0, "again changes nothing"
    assert capsys.readouterr().out == "step 2 (ep1-ba2) is pinned\n"
    call("prune", remote, "--keep", "last=1", "--yes")
    assert steps(call, remote) == [1, 2, 4]
    assert call("unpin", remote, "ep1-ba1") == (0, {"generation": 1, "step": 1, "is_pinned": False})
    call("prune", remote, "--keep", "last=1", "--yes")
    assert steps(call, remote) == [2, 4]
    assert call("verify", remote)[0] == 0
    for gone in ("1", "ep1-ba3", "nobody"):
        code, told = call("pin", remote, gone)
        assert (code, told["error"]["kind"]) == (3, "ObjectNotFoundError")


@pytest.mark.fault("O2")
def test_a_step_of_one_generation_can_be_selected(call: Call, stored: Path, tmp_path: Path) -> None:
    """Restarted runs save the same steps again, and without `@g` an older one could not be selected on its own."""
    remote = f"file://{stored}"
    for number in (1, 2):
        train(tmp_path / f"start-{number}", remote, 100)
    assert call("pin", remote, "100")[1]["generation"] == 2
    assert call("pin", remote, "100@g1") == (0, {"generation": 1, "step": 100, "is_pinned": True})
    assert call("pin", remote, "100@g3")[0] == call("verify", remote, "--step", "100@g3")[0] == Exit.NOT_FOUND
    assert call("verify", remote, "--step", 100)[1]["committed"] == 2
    assert call("verify", remote, "--step", "100@g1")[1]["committed"] == 1
    for wanted, generation in (("100", 2), ("100@g1", 1), ("100@g2", 2)):
        code, told = call("pull", remote, tmp_path / wanted, "--step", wanted)
        assert (code, told["generation"], told["step"]) == (0, generation, 100)
        assert (
            call("pull", remote, tmp_path / "dry", "--step", wanted, "--dry-run")[1]["generation"]
            == generation
        )
    code, told = call("pull", remote, tmp_path / "none", "--step", "100@g3")
    assert (code, "no complete checkpoint of step 100@g3" in told["error"]["message"]) == (
        Exit.NOT_FOUND,
        True,
    )


def test_a_set_of_one_file_per_rank_is_pulled_by_its_world_size(call: Call, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    for rank in range(2):
        (tmp_path / f"theirs/ep1-ba42-rank{rank}.tar").write_text(str(rank))
    remote = f"file://{tmp_path}/theirs"
    code, told = call("pull", remote, tmp_path / "there")
    assert (code, "pass world_size" in told["error"]["message"]) == (Exit.INCOMPLETE, True)
    for options in (["--dry-run"], []):
        code, told = call("pull", remote, tmp_path / "there", "--world-size", 2, "--rank", 1, *options)
        assert (code, told["step"], told["ranks"]) == (0, 42, 2)
    assert (tmp_path / "there/ep1-ba42-rank1.tar").read_text() == "1"


# --- verify ------------------------------------------------------------------------------------------------


def test_verify_reports_a_sound_run(
    call: Call, folder: Path, remote: str, stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(folder, remote, 1, 2)
    before = tree(stored)
    code, told = call("verify", remote)
    assert code == 0
    assert told == {
        "committed": 2,
        "shards": 2,
        "shards_read": 0,
        "size_bytes": 2000,
        "violations": [],
        "unread": [],
        "leftovers": [],
        "marked": [],
        "not_looked_at": [],
    }
    assert call("verify", remote, "--step", 2, "--read-data", 100)[1]["shards_read"] == 1
    drawn = [call("verify", remote, "--read-data", 50, "--seed", seed)[1]["shards_read"] for seed in (0, 1)]
    assert drawn == [0, 1]
    assert call("verify", remote, "--step", 7)[0] == Exit.NOT_FOUND
    assert cli.main(["verify", remote]) == 0
    assert (
        "2 committed checkpoints, 2 shards (by the store's checksums): nothing is wrong"
        in capsys.readouterr().out
    )
    assert tree(stored) == before


def flip_a_byte(stored: Path) -> str:
    path = stored / "ckpt/ep1-ba2.g1/model.bin"
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)
    return "I6"


def cut_a_shard(stored: Path) -> str:
    path = stored / "ckpt/ep1-ba2.g1/model.bin"
    path.write_bytes(path.read_bytes()[:-1])
    return "I1"


def lose_a_shard(stored: Path) -> str:
    (path,) = stored.glob("ckpt/ep1-ba2.g*/model.bin")
    path.unlink()
    return "I1"


def lose_a_receipt(stored: Path) -> str:
    (stored / keys.receipt_key(CheckpointId(1, 2), 0)).unlink()
    return "I1"


def swap_a_receipt(stored: Path) -> str:
    """Store a well-formed receipt whose content differs from what was decided on."""
    key = keys.receipt_key(CheckpointId(1, 2), 0)
    receipt = records.decode_receipt((stored / key).read_bytes(), CheckpointId(1, 2), 0)
    (stored / key).unlink()
    store_object(stored, key, records.encode_receipt(type(receipt)(**_fields(receipt) | {"metrics": ()})))
    return "I1"


def forge_a_decision(stored: Path) -> str:
    """Store a commit for a checkpoint that no rank ever reported as done."""
    id_ = CheckpointId(1, 9)
    real = records.decode_decision(
        (stored / keys.decision_key(CheckpointId(1, 2))).read_bytes(), CheckpointId(1, 2)
    )
    decision = new_decision(id_, Outcome.COMMIT, name="ep1-ba9", world_size=1, by="a forger", now=0.0)
    forged = type(decision)(**_fields(decision) | {"receipts": real.receipts, "num_shards": 1})
    store_object(stored, keys.decision_key(id_), records.encode_decision(forged))
    return "I1"


def garble_a_decision(stored: Path) -> str:
    (stored / keys.decision_key(CheckpointId(1, 1))).write_bytes(b"{}")
    return "R4"


def garble_latest(stored: Path) -> str:
    (stored / keys.LATEST).write_bytes(b"ckpt/ep1-ba2")
    return "I2"


def _fields(record: Any) -> Json:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def store_object(stored: Path, key: str, data: bytes) -> None:
    async def main() -> None:
        store = connect(f"file://{stored}", None, Settings())
        await store.open()
        await store.put(key, data)
        await store.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_byte,
        cut_a_shard,
        lose_a_shard,
        lose_a_receipt,
        swap_a_receipt,
        forge_a_decision,
        garble_a_decision,
        garble_latest,
    ],
)
def test_verify_finds_damage(
    call: Call, folder: Path, remote: str, stored: Path, damage: Callable[[Path], str]
) -> None:
    """The user gets exit code 4, the broken rule, and the object at fault."""
    train(folder, remote, 1, 2)
    assert call("verify", remote, "--read-data", 100)[0] == 0
    rule = damage(stored)
    code, told = call("verify", remote, "--read-data", 100)
    assert code == Exit.INCOMPLETE
    assert rule in {each["rule"] for each in told["violations"]}
    assert all(each["key"] and each["message"] for each in told["violations"])


def test_what_a_store_does_not_let_verify_look_at_is_named(
    call: Call, folder: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(folder, s3_url, 1)

    async def refuse(*_: object) -> None:
        raise StoreError("403 AccessDenied", reason=FailureReason.AUTH)

    monkeypatch.setattr("ckpt_async.stores.s3.client.S3Store.list_multiparts", refuse)
    code, told = call("verify", s3_url)
    assert (code, len(told["not_looked_at"])) == (0, 1)
    assert cli.main(["verify", s3_url]) == 0
    assert f"not checked: {told['not_looked_at'][0]}" in capsys.readouterr().out


def test_verify_only_reads(call: Call, folder: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train(folder, s3_url, 1)

    async def refuse(*_: object, **__: object) -> None:
        raise StoreError("AccessDenied", reason=FailureReason.AUTH)

    for name in ("put", "delete", "create_multipart"):
        monkeypatch.setattr(f"ckpt_async.stores.s3.client.S3Store.{name}", refuse)
    code, told = call("verify", s3_url, "--read-data", 100)
    assert (code, told["shards_read"]) == (0, 1)


def test_a_remote_without_a_run_exits_with_not_found(call: Call, tmp_path: Path) -> None:
    """A typo in the prefix must not look like an intact but empty run, and looking must not create it."""
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        code, told = call("verify", f"file://{tmp_path}/{name}")
        assert (code, told["error"]["exit_code"]) == (3, 3), told
    assert [each.name for each in tmp_path.rglob("*")] == ["empty"]
    for command in ("pin", "unpin"):
        assert call(command, f"file://{tmp_path}/missing", "1")[0] == 3
    assert call("prune", f"file://{tmp_path}/missing", "--keep", "last=1", "--yes")[0] == 3
    code, told = call("sweep", "--remote", f"file://{tmp_path}/missing")
    assert (code, "holds no run" in told["remotes"][0]["error"]) == (1, True)
    assert [each.name for each in tmp_path.rglob("*")] == ["empty"], "nothing is made at a place mistyped"


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "file:///x", "--read-data", "101"),
        ("verify", "file:///x", "--read-data", "nan"),
        ("sweep", "x", "--interval", "0"),
        ("pull", "file:///x", "x", "--concurrency", "0"),
        ("pull", "file:///x", "x", "--world-size", "0"),
    ],
)
def test_a_number_out_of_range_is_rejected_with_the_option_name(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """101% would verify the same as 100%, and an interval of 0 would query the store without a pause."""
    assert cli.main(arguments) == 2
    assert f"argument {arguments[-2]}" in capsys.readouterr().err


def test_sweep_reports_a_missing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder may appear later, so this is no error; but a typo must not look like a finished folder."""
    assert cli.main(["sweep", str(tmp_path / "nope")]) == 0
    assert "nope: no trainer has run here yet\n" in capsys.readouterr().out
    (tmp_path / ".nope.ckpt-async/.ckpt-async").mkdir(parents=True)
    assert cli.main(["sweep", str(tmp_path / "nope")]) == 0
    beside = str(tmp_path / ".nope.ckpt-async")
    assert (
        f"it is being watched: sweep the watcher's state folder instead, {beside!r}"
        in capsys.readouterr().out
    )
    assert cli.main(["sweep", str(tmp_path / "*/nope")]) == 0
    assert "no folder matches yet" in capsys.readouterr().out


def test_every_action_of_a_sweep_has_a_name_in_json() -> None:
    """The names of classes are ours to change; the names in JSON are not."""
    assert {*ACTIONS} == {*get_args(sweep_plan.Planned)}
