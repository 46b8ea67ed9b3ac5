"""`ls -l`, `ls` of a prefix, `du` and `--generation` as a shell sees them."""

import asyncio
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.session import get_session

from ckpt_async import Uploader, cli
from ckpt_async.cli import ls
from ckpt_async.core import keys, records
from ckpt_async.core.model import CheckpointId, Damage
from ckpt_async.stores.s3 import session
from ckpt_async.transfer.patient import PatientStore
from tests.restore.runs import Run

Json = dict[str, Any]
Call = Callable[..., tuple[int, Json]]


@pytest.fixture
def remote(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/team/run"


@pytest.fixture
def text(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def text(*arguments: object) -> tuple[int, str]:
        code = cli.main([*map(str, arguments)])
        return code, capsys.readouterr().out

    return text


def save(folder: Path, remote: str, step: int, files: dict[str, bytes], **more: Any) -> None:
    """Save one checkpoint with these files, committed by its own start."""
    with Uploader(folder, remote, rank=0, world_size=1, **more) as uploader:
        for name, data in files.items():
            path = folder / f"step-{step}-{more.get('generation', 0)}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            uploader.enqueue(path, step)
        uploader.seal(step)
        uploader.wait(step, timeout_s=60)


# --- ls ----------------------------------------------------------------------------------------------------


def test_a_long_search_for_runs_is_no_store_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searching for runs takes long when `ls` is given a huge folder."""
    said: list[str] = []
    is_told = threading.Event()
    search = ls.runs_below

    def say(text: str, event: str, **_: str) -> None:
        said.append(text)
        if event == "still_looking":
            is_told.set()

    async def slowly(store: PatientStore) -> list[str]:
        said.clear()
        assert await asyncio.to_thread(is_told.wait, 30)
        return await search(store)

    monkeypatch.setattr(ls, "runs_below", slowly)
    monkeypatch.setattr("ckpt_async.cli.output.say", say)
    monkeypatch.setattr("ckpt_async.cli.output.SILENCE_S", 0.05)
    assert cli.main(["ls", f"file://{tmp_path}"]) == 3
    assert said[:-1] == [f"ckpt-async: still searching for runs below file://{tmp_path}"]


def test_ls_long_shows_every_file_with_its_checksum(
    tmp_path: Path, remote: str, call: Call, text: Any
) -> None:
    save(tmp_path / "f", remote, 1, {"a.bin": b"a" * 10, "b.bin": b"b" * 2048})
    save(tmp_path / "f", remote, 2, {"a.bin": b"a" * 10})
    code, told = call("ls", "-l", remote)
    assert code == 0
    assert [[file["name"] for file in each["files"]] for each in told["checkpoints"]] == [
        ["a.bin", "b.bin"],
        ["a.bin"],
    ]
    first, second = (each["files"][0] for each in told["checkpoints"])
    assert (first["size_bytes"], first["ranks"], first["checksum"]) == (10, [0], second["checksum"])
    assert first["checksum"]["value"]
    assert first["key"] == "ckpt/step-1.g1/a.bin"
    _, shown = text("ls", "--long", remote, "1")
    assert [line.split()[0] for line in shown.splitlines()] == ["STEP", "1", "1"]
    assert "2.0 KiB" in shown
    assert "ckpt/step-1.g1/b.bin" in shown
    assert "files" not in call("ls", remote)[1]["checkpoints"][0]


def test_ls_long_gives_the_keys_of_a_kind_below_the_run(
    tmp_path: Path, remote: str, call: Call, text: Any
) -> None:
    save(tmp_path / "f", remote, 1, {"a.bin": b"run"})
    save(tmp_path / "w", remote, 1, {"a.bin": b"kind"}, kind="weights")
    checkpoints = call("ls", "-l", remote)[1]["checkpoints"]
    found = {each["kind"]: each["files"][0]["key"] for each in checkpoints}
    assert found == {None: "ckpt/step-1.g1/a.bin", "weights": "kinds/weights/ckpt/step-1.g1/a.bin"}
    assert "kinds/weights/ckpt/step-1.g1/a.bin" in text("ls", "-l", remote)[1]


def test_what_somebody_has_written_as_a_reason_cannot_speak_to_a_terminal(
    tmp_path: Path, remote: str, text: Any
) -> None:
    with Uploader(tmp_path / "f", remote, rank=0, world_size=1, on_error="warn") as uploader:
        (tmp_path / "f" / "a.bin").write_bytes(b"a")
        uploader.enqueue(tmp_path / "f" / "a.bin", 1)
        uploader.give_up(1, "line two\n\x1b[31mred")
        uploader.flush(timeout_s=30)
    for command in (("ls", "--all", remote), ("status", remote)):
        shown = text(*command)[1]
        assert "\x1b" not in shown
        assert r"line two\n\x1b[31mred" in shown


def test_no_name_of_a_key_or_a_folder_can_speak_to_a_terminal(tmp_path: Path, remote: str, text: Any) -> None:
    hostile = "a\x1b[31mred\x9b\u202e\nmissing: forged"
    save(tmp_path / "f", remote, 1, {"a.bin": b"a"})
    (tmp_path / f"store/team/run/ckpt/{hostile}").mkdir()
    (tmp_path / f"store/team/run/ckpt/{hostile}/x").write_bytes(b"x")
    (tmp_path / hostile).mkdir()
    save(tmp_path / hostile, f"file://{tmp_path}/store/other", 1, {"a.bin": b"a"})
    for command in (
        ("verify", remote),
        ("status", tmp_path / hostile, tmp_path / "f"),
        ("sweep", tmp_path / hostile, "--once"),
        ("doctor", tmp_path / hostile),
    ):
        shown = text(*command)[1]
        assert "a\\x1b[31mred\\x9b\\u202e\\nmissing: forged" in shown, command
        assert not {each for each in shown if not each.isprintable()} - {"\n"}


def test_ls_long_names_receipts_that_are_gone(tmp_path: Path, remote: str, call: Call) -> None:
    save(tmp_path / "f", remote, 1, {"a.bin": b"a"})
    (receipt,) = (tmp_path / "store/team/run/.ckpt-async/receipts").rglob("*.json")
    receipt.unlink()
    assert call("ls", remote)[0] == 0
    code, told = call("ls", "-l", remote)
    assert (code, told["checkpoints"][0]["files"]) == (4, [])
    assert told["unreadable"] == [str(receipt.relative_to(tmp_path / "store/team/run"))]


def test_generation_and_step_select(tmp_path: Path, remote: str, call: Call) -> None:
    for generation in (1, 2):
        save(tmp_path / f"f{generation}", remote, 1, {"a.bin": b"a"}, generation=generation)

    def listed(*more: object) -> list[int]:
        return [each["generation"] for each in call("ls", remote, *more)[1]["checkpoints"]]

    assert listed() == listed("1") == [1, 2]
    assert listed("--generation", "1") == listed("1@g1") == [1]
    code, told = call("ls", remote, "--generation", "3")
    assert (code, told["error"]["kind"]) == (3, "ObjectNotFoundError")
    assert call("ls", remote, "7")[0] == 3
    _, pulled = call("pull", remote, tmp_path / "here", "--generation", "1", "--dry-run")
    assert pulled["generation"] == 1
    code, told = call("pull", remote, tmp_path / "here", "--generation", "3", "--dry-run")
    assert (code, told["error"]["kind"]) == (3, "ObjectNotFoundError"), (
        "that it is no fresh start is beside the point"
    )
    assert "no complete checkpoint of generation 3" in told["error"]["message"]
    assert call("verify", remote, "--generation", "2")[1]["committed"] == 1
    assert call("verify", remote, "--generation", "3")[0] == 3
    assert call("pull", remote, tmp_path / "here", "--step", "1@g2", "--generation", "1")[0] == 2
    assert call("ls", remote, "--generation", "0")[0] == 2


def test_ls_of_a_prefix_lists_the_runs_below(tmp_path: Path, remote: str, call: Call, text: Any) -> None:
    save(tmp_path / "a", remote, 3, {"a.bin": b"a" * 100})
    save(tmp_path / "b", f"{remote}-b", 1, {"a.bin": b"a"}, kind="weights")
    (tmp_path / "store/notes.txt").write_text("of somebody else")
    prefix = f"file://{tmp_path}/store"
    for where in (prefix, f"{prefix}/team/"):
        code, told = call("ls", where)
        assert code == 0
        assert [each["remote"] for each in told["runs"]] == [remote, f"{remote}-b"]
    first, second = told["runs"]
    assert (first["checkpoints"], first["latest"]["step"], first["size_bytes"]) == (1, 3, 100)
    assert (second["kinds"], second["checkpoints"]) == (["weights"], 1)
    assert remote in text("ls", prefix)[1]
    assert call("ls", prefix, "-l")[0] == call("ls", f"{prefix}/nobody")[0] == 3
    assert call("ls", remote)[1]["latest"]["step"] == 3


def test_a_run_below_a_prefix_is_shown_by_its_newest_commit_and_what_cannot_be_read_is_told(
    tmp_path: Path, remote: str, call: Call, text: Any
) -> None:
    run = Run(remote)
    for step in (3, 5):
        run.commit(step)
    prefix = f"file://{tmp_path}/store"
    assert call("ls", prefix)[1]["runs"][0]["latest"] == {"generation": 1, "step": 5}
    assert text("ls", prefix)[1].splitlines()[1].split()[:3] == [remote, "2", "5"]
    run.put(keys.BOUNDARY, b"nonsense")
    code, told = call("ls", prefix)
    assert (code, told["runs"][0]["unreadable"]) == (4, [keys.BOUNDARY])
    assert text("ls", prefix)[0] == 4


def test_what_retention_has_begun_and_what_it_has_finished_are_told_apart(
    remote: str, call: Call, text: Any
) -> None:
    run = Run(remote)
    for step in (1, 2, 3):
        run.commit(step)
    run.prune(CheckpointId(1, 1))
    run.prune(CheckpointId(1, 2), finish=False)
    remarks = [line.split("  ")[-1].strip() for line in text("ls", "--all", remote)[1].splitlines()[1:]]
    assert remarks == ["pruned", "being pruned", "latest"]
    used = [line.split("  ")[-1].strip() for line in text("du", remote)[1].splitlines()[1:3]]
    assert used == ["being pruned", "step-3.g1"]


def test_a_checkpoint_whose_record_cannot_be_read_is_not_said_to_be_missing(remote: str, call: Call) -> None:
    run = Run(remote)
    run.commit(1)
    run.put(keys.decision_key(CheckpointId(1, 1)), b"nonsense")
    assert call("ls", remote, "1")[0] == 4


@pytest.mark.fault("F121")
def test_what_is_not_known_to_be_missing_is_never_reported_as_missing(
    tmp_path: Path, remote: str, call: Call
) -> None:
    """A script starts from scratch after exit code 3: not for a wrong kind, a lost decision or an unreadable one."""
    save(tmp_path / "f", remote, 1, {"a.bin": b"a"})
    assert call("pull", remote, tmp_path / "there", "--kind", "weights")[0] == 2
    run = Run(remote)
    decision = run.get(keys.decision_key(CheckpointId(1, 1)))
    run.put(keys.decision_key(CheckpointId(1, 1)), b"nonsense")
    for command in ("pin", "unpin"):
        assert call(command, remote, "1")[0] == 4
    assert call("pull", remote, tmp_path / "there")[0] == 4
    run.put(keys.decision_key(CheckpointId(1, 1)), decision)
    assert call("unmark", remote, "1")[0] == 0
    run.delete(keys.decision_key(CheckpointId(1, 1)))
    code, told = call("pull", remote, tmp_path / "there")
    assert (code, "not a fresh start" in told["error"]["message"]) == (1, True)
    run.delete(keys.LATEST)
    assert call("pull", remote, tmp_path / "there")[0] == 3


def test_unmark_shows_a_mark_that_cannot_control_the_terminal(tmp_path: Path, remote: str, text: Any) -> None:
    """Whoever can write to the bucket can mark a checkpoint with any words."""
    save(tmp_path / "f", remote, 1, {"a.bin": b"a"})
    damage = Damage(CheckpointId(1, 1), "\x1b[2Jall is well\nanother line", "me", 1.0)
    Run(remote).put(keys.damage_key(damage.checkpoint), records.encode_damage(damage))
    code, shown = text("unmark", remote, "1")[:2]
    assert code == 0
    assert shown.rstrip("\n").isprintable()


def test_ls_and_du_tell_kinds_sizes_and_ages(tmp_path: Path, remote: str, call: Call, text: Any) -> None:
    save(tmp_path / "f", remote, 1, {"a.bin": b"a" * 10, "b.bin": b"b" * 20})
    save(tmp_path / "f", remote, 2, {"a.bin": b"a" * 10})
    save(tmp_path / "w", remote, 3, {"a.bin": b"a" * 5}, kind="weights")
    told = call("ls", "-l", remote)[1]
    assert told["kinds"] == {"weights": {"latest": {"generation": 1, "step": 3}}}
    first = told["checkpoints"][0]
    assert (first["ranks"], first["shards"], first["age_s"] < 60) == (1, 2, True)
    checksum = first["files"][0]["checksum"]
    shown = text("ls", "-l", remote)[1]
    assert shown.startswith("KIND")
    assert f"{checksum['algorithm']}:{checksum['value']}" in shown
    prefix = remote.rpartition("/")[0]
    (run,) = call("ls", prefix)[1]["runs"]
    assert (run["size_bytes"], run["age_s"] < 60) == (45, True)
    used = text("du", remote)[1]
    assert "  weights: step-3.g1" in used
    assert used.splitlines()[-1].endswith(f"  {remote}")
    save(tmp_path / "g", f"{remote}-2", 1, {"a.bin": b"a"})
    sizes = call("du", prefix)[1]
    assert sizes["size_bytes"] == sum(each["size_bytes"] for run in sizes["runs"] for each in run["used"])
    assert len(sizes["runs"]) == 2
    assert "of generation 3" in call("ls", remote, "--generation", 3)[1]["error"]["message"]


# --- du ----------------------------------------------------------------------------------------------------


def test_du_accounts_for_every_object(tmp_path: Path, remote: str, call: Call, text: Any) -> None:
    save(tmp_path / "f", remote, 1, {"a.bin": b"a" * 1000, "b.bin": b"b" * 500})
    save(tmp_path / "w", remote, 1, {"a.bin": b"w" * 70}, kind="weights")
    store = tmp_path / "store/team/run"
    (store / "ckpt/step-9.g1").mkdir()
    (store / "ckpt/step-9.g1/late.bin").write_bytes(b"x" * 30)
    (store / "exact.pt").write_bytes(b"x" * 7)
    code, told = call("du", remote)
    assert code == 0
    (run,) = told["runs"]
    sizes = {(each["what"], each["kind"], each.get("step"), each.get("state")): each for each in run["used"]}
    assert sizes["checkpoint", None, 1, "committed"]["size_bytes"] == 1500
    assert sizes["checkpoint", "weights", 1, "committed"]["size_bytes"] == 70
    assert sizes["checkpoint", None, 9, "in_flight"]["objects"] == 1
    assert sizes["others", None, None, None]["size_bytes"] == 7
    own = ".ckpt-async/tmp/"  # belongs to the store itself
    files = [each for each in store.rglob("*") if each.is_file() and own not in str(each)]
    assert told["size_bytes"] == sum(each.stat().st_size for each in files)
    assert sum(each["objects"] for each in run["used"]) == len(files)
    shown = text("du", remote)[1]
    assert "step-9.g1" in shown
    assert "not committed" in shown
    weights = call("du", remote, "--kind", "weights")[1]["runs"][0]["used"]
    assert [each["size_bytes"] for each in weights if each["what"] == "checkpoint"] == [70]


def test_du_of_a_prefix_sums_its_runs(tmp_path: Path, remote: str, call: Call, text: Any) -> None:
    for name in ("a", "b"):
        save(tmp_path / name, f"{remote}-{name}", 1, {"a.bin": b"a" * 1000})
    prefix = remote.rpartition("/")[0]
    told = call("du", prefix)[1]
    assert [each["remote"] for each in told["runs"]] == [f"{remote}-a", f"{remote}-b"]
    assert told["size_bytes"] > 2000
    lines = text("du", prefix)[1].splitlines()
    assert [line.split()[-1] for line in lines] == ["RUN", f"{remote}-a", f"{remote}-b", prefix]
    *runs, in_all = [int(line.split()[2]) for line in lines[1:]]
    assert in_all == sum(runs) == sum(each["objects"] for run in told["runs"] for each in run["used"])


@pytest.mark.fault("F153")
def test_du_tells_of_a_bucket_that_keeps_versions(
    tmp_path: Path, s3_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is pruned there stays, and no listing shows it."""
    session._say_versions.cache_clear()
    s3, bucket = get_session().create_client("s3"), f"versions-{uuid.uuid4().hex}"
    s3.create_bucket(Bucket=bucket)
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    for place, is_kept in ((s3_url, False), (f"s3://{bucket}/run", True)):
        save(tmp_path / str(is_kept), place, 1, {"a": b"x"})
        session._say_versions.cache_clear()
        capsys.readouterr()
        assert cli.main(["du", place]) == 0
        assert ("the bucket keeps versions" in capsys.readouterr().err) is is_kept
