"""The command line as a shell sees it: exit codes, one-line errors, and JSON that scripts may rely on."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader, __version__, cli, errors, restore
from ckpt_async.cli.output import SILENCE_S, code_of
from ckpt_async.core import keys
from ckpt_async.core.boundary import Boundary, Checkpoints
from ckpt_async.core.model import (
    CheckpointId,
    Decided,
    Enqueued,
    Failed,
    FileIdentity,
    Outcome,
    Sealed,
    Shard,
)
from ckpt_async.core.records import encode_boundary
from ckpt_async.core.settings import Settings
from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal, RankLock
from ckpt_async.protocol.deciding import decide_once
from ckpt_async.protocol.steps import (
    begin_prune,
    finish_prune,
    move_latest,
    new_decision,
    set_pin,
)
from ckpt_async.stores.s3.client import S3Store
from ckpt_async.transfer.patient import PatientStore, connect
from tests.stores.memory import MemoryStore

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("aiobotocore", "aiohttp", "asyncio", "awscrt", "botocore", "prometheus_client", "tenacity", "torch")
Json = dict[str, Any]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "ckpt_async", *map(str, arguments)]


def shell(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def remote(tmp_path: Path) -> str:
    return f"file://{tmp_path}/run"


def train(folder: Path, remote: str, *steps: int) -> None:
    with Uploader(folder, remote, rank=0, world_size=1) as uploader:
        for step in steps:
            path = folder / f"step-{step}" / "model.bin"
            path.parent.mkdir(parents=True)
            path.write_bytes(b"x" * 1024)
            uploader.enqueue(path.parent, step=step)
            uploader.seal(step, metrics={"loss": 0.5})


def on_store(remote: str, act: Callable[[PatientStore], Any]) -> None:
    async def main() -> None:
        store = connect(remote, None, Settings())
        await store.open()
        await act(store)
        await store.close()

    asyncio.run(main())


def json_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> Json:
    assert cli.main([*map(str, arguments), "--json"]) == 0
    found: Json = json.loads(capsys.readouterr().out)
    return found


# --- looking -----------------------------------------------------------------------------------------------


def test_read_only_commands_import_nothing_heavy(folder: Path, remote: str) -> None:
    """`status` is what people type when something is wrong, so it must answer at once."""
    train(folder, remote, 1)
    for arguments in (["status", str(folder)], ["version"], ["--help"], ["status", str(folder / "no")]):
        code = (
            f"import sys; from ckpt_async.cli import main; main({arguments});"
            f" print('heavy:', *sorted(sys.modules.keys() & set({HEAVY})))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.stdout.splitlines()[-1] == "heavy:", (arguments, done.stdout, done.stderr)


def test_status_starts_with_what_would_be_lost(folder: Path, remote: str) -> None:
    train(folder, remote, 100, 200)
    done = shell("status", folder)
    first, *rest = done.stdout.splitlines()
    assert re.fullmatch(r"last committed step 200, \d+ s ago; nothing is pending", first)
    assert f"remote  {remote}" in rest
    assert "queue   empty" in rest
    assert (done.returncode, done.stderr) == (0, "")


def test_status_as_json_has_the_documented_fields(
    folder: Path, remote: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scripts rely on these fields, so docs/cli.md names every one."""
    train(folder, remote, 100)
    found = json_of(capsys, "status", folder)
    documented = (ROOT / "docs/cli.md").read_text()
    assert found.keys() == {
        *(
            "folder",
            "remote",
            "summary",
            "last_committed",
            "would_lose",
            "queue",
            "ranks",
            "checkpoints",
            "kinds",
        ),
        *("bytes_per_s", "eta_s", "idle_s"),
    }
    assert found["would_lose"] == {"steps": [], "size_bytes": 0}
    assert found["last_committed"].keys() == {"generation", "step", "committed_at", "age_s"}
    assert found["queue"] == {
        state: {"shards": 0, "bytes": 0} for state in ("queued", "uploading", "retrying", "failed")
    }
    assert found["ranks"] == [{"rank": 0, "is_running": False}]
    fields = {*found, *found["last_committed"], *found["checkpoints"][0], *found["queue"], *found["ranks"][0]}
    assert {each for each in fields if f"`{each}`" not in documented} == set()
    listed = json_of(capsys, "ls", remote)
    drained = json_of(capsys, "drain", folder)
    fields = {*listed, *listed["checkpoints"][0], *drained, *drained["ranks"][0]}
    assert {each for each in fields if f"`{each}`" not in documented} == set()


def test_ls_shows_committed_checkpoints_and_marks_the_latest(folder: Path, remote: str) -> None:
    train(folder, remote, 9, 10)
    on_store(remote, lambda store: set_pin(store, CheckpointId(1, 9), True))
    done = shell("ls", remote)
    assert done.returncode == 0, done.stderr
    titles, *rows = done.stdout.splitlines()
    assert titles.split() == ["STEP", "NAME", "GENERATION", "RANKS", "SHARDS", "SIZE", "AGE"]
    assert [row.split()[:6] for row in rows] == [
        ["9", "step-9", "1", "1", "1", "1.0"],
        ["10", "step-10", "1", "1", "1", "1.0"],
    ]
    assert [row.split()[-1] for row in rows] == ["pinned", "latest"]
    assert len({row.index("step-") for row in rows}) == 1


def test_ls_reads_the_decisions_not_the_latest_pointer(
    folder: Path, remote: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rule R3: a stale pointer must never hide a good checkpoint, and a pruned one must not be shown as good."""
    train(folder, remote, 1, 2, 3)

    async def act(store: PatientStore) -> None:
        await begin_prune(store, CheckpointId(1, 1))
        await finish_prune(store, CheckpointId(1, 1))
        await move_latest(store, CheckpointId(9, 9), "step-9")

    on_store(remote, act)
    found = json_of(capsys, "ls", remote)
    assert found["latest"] == {"generation": 1, "step": 3}
    assert [(each["step"], each["is_latest"]) for each in found["checkpoints"]] == [(2, False), (3, True)]
    assert found["checkpoints"][0]["metrics"] == {"loss": 0.5}
    every = json_of(capsys, "ls", remote, "--all")["checkpoints"]
    assert [each["state"] for each in every] == ["pruned", "committed", "committed"]


def test_ls_omits_decisions_voided_by_the_boundary(
    folder: Path, remote: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rule R4: a straggler wrote a commit that lies below the boundary and is not kept, and its shards are gone."""
    train(folder, remote, 1, 2, 3)
    boundary = Boundary(CheckpointId(1, 2), Checkpoints.of({CheckpointId(1, 1)}), 1)
    on_store(remote, lambda store: store.put(keys.BOUNDARY, encode_boundary(boundary)))
    assert [each["step"] for each in json_of(capsys, "ls", remote, "--all")["checkpoints"]] == [1, 3]
    assert cli.main(["pin", remote, "2"]) == 3


@pytest.mark.fault("F41")
def test_ls_shows_readable_checkpoints_beside_unreadable_records(
    folder: Path, remote: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unreadable record hides only itself and is named in the error; `pin` still finds the others."""
    train(folder, remote, 1, 2, 3)
    root = Path(remote.removeprefix("file://"))
    bad = keys.decision_key(CheckpointId(1, 2)), keys.BOUNDARY
    for key in bad:
        (root / key).write_bytes(b"nonsense")
    assert cli.main(["ls", remote]) == 4
    told = capsys.readouterr()
    assert [line.split()[0] for line in told.out.splitlines()[1:]] == ["1", "3"]
    for key in bad:
        assert key in told.err
    assert json_of(capsys, "pin", remote, "1")["is_pinned"]


def test_ls_writes_nothing(folder: Path, remote: str, tmp_path: Path) -> None:
    """`ls` works with read-only credentials, and a typo in a URL creates no folder."""
    train(folder, remote, 1)
    root = Path(remote.removeprefix("file://"))

    def snapshot() -> dict[Path, int]:
        return {each: each.stat().st_mtime_ns for each in [root, *root.rglob("*")]}

    before = snapshot()
    assert shell("ls", remote).returncode == 0
    assert snapshot() == before
    done = shell("ls", f"file://{tmp_path}/tyop")
    assert (done.returncode, (tmp_path / "tyop").exists()) == (3, False)


def test_ls_of_a_run_without_a_checkpoint_is_not_an_error(folder: Path, remote: str) -> None:
    train(folder, remote)
    done = shell("ls", remote)
    assert (done.returncode, done.stdout) == (0, "no checkpoint is committed yet\n")


def test_ls_works_on_s3(
    folder: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On S3 nothing is written either, not even a probe, so read-only credentials suffice."""
    train(folder, s3_url, 1, 2)

    async def refuse(*_: object, **__: object) -> None:
        raise StoreError("AccessDenied", reason=FailureReason.AUTH)

    for name in ("put", "delete", "create_multipart"):
        monkeypatch.setattr(f"ckpt_async.stores.s3.client.S3Store.{name}", refuse)
    assert [each["step"] for each in json_of(capsys, "ls", s3_url)["checkpoints"]] == [1, 2]
    assert cli.main(["ls", f"{s3_url}-none"]) == 3
    assert cli.main(["ls", f"s3://no-such-bucket/{s3_url.rpartition('/')[2]}"]) == 3
    assert cli.main(["ls", s3_url, "--profile", "no-such-profile"]) not in (0, 3)


def test_ls_counts_aborted_checkpoints_and_all_shows_the_reasons(
    folder: Path, remote: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The journal soon forgets aborted checkpoints, so this is where users look for one that never arrived."""
    train(folder, remote, 1)
    wanted = new_decision(
        CheckpointId(1, 2),
        Outcome.ABORT,
        name="step-2",
        world_size=1,
        by="rank 0",
        now=0.0,
        reason="it is gone",
    )
    on_store(remote, lambda store: decide_once(store, wanted))
    assert cli.main(["ls", remote]) == 0
    told = capsys.readouterr()
    assert (told.out.count("\n"), told.err) == (2, f"1 given up; `ckpt-async ls {remote} --all` shows why\n")
    assert cli.main(["ls", remote, "--all"]) == 0
    told = capsys.readouterr()
    assert ("given up: it is gone" in told.out, told.err) == (True, "")


@pytest.mark.parametrize(
    ("reason", "decision", "is_running", "hint"),
    [
        (FailureReason.OTHER, None, False, "drain {folder}` retries it now"),
        (FailureReason.OTHER, None, True, "failed uploads are retried every half minute"),
        (FailureReason.SOURCE_CHANGED, None, True, "given up for good"),
        (FailureReason.SOURCE_CHANGED, Outcome.ABORT, False, "given up for good"),
    ],
)
def test_status_shows_a_hint_for_each_failure(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    reason: FailureReason,
    decision: Outcome | None,
    is_running: bool,
    hint: str,
) -> None:
    """Refused shards are retried automatically; an abort is final (rule R4), so there is nothing to retry."""
    id_, opened = CheckpointId(1, 7), Folder(folder)
    events: list[Any] = [
        Enqueued(id_, "step-7", Shard("a", "step-7/a", FileIdentity(1, 1, 10, 1), True)),
        Sealed(id_, "step-7", 1),
        Failed(id_, "a", reason, "403 AccessDenied"),
    ]
    if decision:
        events.append(Decided(id_, decision, "step-7", "rank 0: changed"))
    journal, lock = Journal(opened, 0), RankLock(opened, 0)
    journal.append(events)
    if is_running:
        lock.acquire()
    try:
        told = json_of(capsys, "status", folder)["checkpoints"][0]
        assert cli.main(["status", str(folder)]) == 0
    finally:
        lock.release()
        journal.close()
    assert hint.format(folder=folder) in told["hint"]
    assert f"step 7: {told['hint']}" in capsys.readouterr().out.splitlines()


# --- errors ------------------------------------------------------------------------------------------------


READING = (["ls"], ["verify"], ["prune", "--keep", "last=1"], ["pull", "DEST"], ["pull", "DEST", "--dry-run"])


def reading(words: list[str], url: str, tmp_path: Path) -> list[str]:
    command, *rest = words
    return [command, url, *(str(tmp_path / "dest") if each == "DEST" else each for each in rest)]


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_wrong_credentials_fail_at_once_and_name_the_full_url(
    words: list[str],
    s3_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A trainer waits for rotated credentials, but a person who mistyped them must not wait 20 s."""
    asked: list[str] = []
    for name in ("list", "get"):
        real = getattr(S3Store, name)

        def counted(self: S3Store, *key: str, real: Any = real, **more: Any) -> Any:
            asked.append(key[0])
            return real(self, *key, **more)

        monkeypatch.setattr(S3Store, name, counted)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert cli.main(reading(words, s3_url, tmp_path)) == 1
    *_, told = capsys.readouterr().err.splitlines()
    assert f"'{s3_url}/.ckpt-async/" in told
    assert told.endswith("(the secret key does not belong to the access key)")
    assert len(asked) == len(set(asked)) <= 3, "nothing is asked for twice"


@pytest.mark.parametrize("words", [READING[0], READING[1], READING[3]], ids=" ".join)
def test_waiting_for_an_unresponsive_store_is_reported_on_stderr(
    words: list[str],
    s3_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A silent program looks hung, but a message must not appear within the seconds a remote store may need."""
    assert f"after {SILENCE_S:.0f} s a message on stderr says so" in (ROOT / "docs/cli.md").read_text()
    assert SILENCE_S == 5
    monkeypatch.setattr("ckpt_async.cli.output.SILENCE_S", 0.01)
    for place in ("cli.ls.LS_TIMEOUT_S", "cli.upkeep.COMMAND_TIMEOUT_S", "restore.session.PATIENCE_S"):
        monkeypatch.setattr(f"ckpt_async.{place}", 1.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        closed = ["--endpoint-url", f"http://127.0.0.1:{taken.getsockname()[1]}"]
        assert cli.main([*reading(words, s3_url, tmp_path), *closed]) == 5
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"ckpt-async: no answer yet from {s3_url}; retrying for up to ")
    assert "correct, and reachable from here?" in last


def test_a_store_that_answers_slowly_is_not_called_silent(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remote = f"memory://{tmp_path.name}"
    train(folder, remote, 1)

    def slow(answer: Any) -> Any:
        async def slowly(*args: Any, **how: Any) -> Any:
            await asyncio.sleep(0.1)
            return await answer(*args, **how)

        return slowly

    for name in ("get", "list", "put"):
        monkeypatch.setattr(MemoryStore, name, slow(getattr(MemoryStore, name)))
    monkeypatch.setattr("ckpt_async.cli.output.SILENCE_S", 0.25)
    assert cli.main(["pull", remote, str(tmp_path / "there")]) == 0
    told = capsys.readouterr().err
    assert "no answer" not in told
    assert "answers slowly" in told


@pytest.mark.fault("O1")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "required: COMMAND"),
        (["bogus"], 2, "there is no command 'bogus' (see `ckpt-async --help`)"),
        (["stauts", "x"], 2, "there is no command 'stauts' (did you mean status?)"),
        (["sweep", "x", "--dry"], 2, "unrecognized arguments: --dry (did you mean --dry-run?)"),
        (["drain", "x", "--time=5"], 2, "unrecognized arguments: --time=5 (did you mean --timeout?)"),
        (["ls", "file:///a/b", "--jsno"], 2, "(did you mean --json?)"),
        (["run", "sh", "file:///a"], 2, "unrecognized arguments: file:///a (see `ckpt-async run --help`)"),
        (["status", "file:///nonexistent/run"], 3, "open '/nonexistent/run': no such folder"),
        (["status", "x", "--interval", "0"], 2, "0 would mean no pause between refreshes"),
        (["drain", "s3://b/run"], 2, "`--remote s3://b/run`"),
        (["sweep", "s3://b/run"], 2, "use `--remote s3://b/run`"),
        (["pull", "/data/run", "s3://b/run"], 2, "give the remote first, then the destination folder"),
        (["ls", "s3:/b/run"], 2, "(did you mean s3://b/run?)"),
        (["pull", "file:///a/b", "c", "--step", "100@2"], 2, "'100@2' is not a step such as 100, or 100@g2"),
        (["ls"], 2, "required: REMOTE (see `ckpt-async ls --help`)"),
        (["ls", "nonsense"], 2, "'nonsense' is not a store URL (s3://bucket/prefix or file:///folder)"),
        (["drain", "x", "--timeout", "soon"], 2, "'soon' is not a number of seconds"),
        (["drain", "x", "--grace", "nan"], 2, "'nan' is not a number of seconds"),
        (["status", ""], 2, "'' is not a path"),
        (["drain", ""], 2, "'' is not a path"),
        (["sweep", ""], 2, "'' is not a path"),
        (["doctor", ""], 2, "'' is not a path"),
        (["pull", "file:///a/b", ""], 2, "'' is not a path"),
        (["pull", "file:///a/b", "c", "--folder", ""], 2, "'' is not a path"),
        (["ls", "s3://bucket/run", "--region", ""], 2, "region is ''"),
        (["status", "/nonexistent"], 3, "no journal in '/nonexistent'"),
        (["drain", "/nonexistent"], 3, "no journal in '/nonexistent'"),
        (["ls", "file:///nonexistent/run"], 3, "open '/nonexistent/run': no such folder"),
    ],
)
def test_an_error_is_one_line_on_stderr_and_a_json_object(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.startswith("ckpt-async: ")) == ("", 1, True)
    assert message in err
    assert cli.main([*arguments, "--json"]) == code
    out, err_again = capsys.readouterr()
    told = json.loads(out)["error"]
    assert (told.keys(), told["exit_code"]) == ({"kind", "message", "hint", "exit_code"}, code)
    assert err_again == err
    assert told["message"] in err
    assert (told["hint"] or "") in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.SettingsError("x"), 2),
        (errors.InvalidNameError("x"), 2),
        (errors.NoJournalError("x"), 3),
        (errors.UnknownKindError("x"), 2),
        (errors.ObjectNotFoundError("x"), 3),
        (StoreError("no such bucket", reason=FailureReason.NOT_FOUND, operation="open"), 3),
        (errors.ObjectNotFoundError("x", operation="get"), 1),
        (errors.IntegrityError("x"), 4),
        (errors.DamagedCheckpointError("x"), 4),
        (errors.NoUsableCheckpointError("x"), 4),
        (errors.FolderInUseError("x"), 5),
        (StoreError("x", reason=FailureReason.THROTTLED), 5),
        (StoreError("x", reason=FailureReason.TRANSIENT), 5),
        (StoreError("x", reason=FailureReason.TIMEOUT), 5),
        (errors.UnreliableReadError("x"), 7),
        (StoreError("x", reason=FailureReason.AUTH), 1),
        (errors.JournalError("x"), 1),
        (OSError("x"), 1),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else None,
)
def test_each_error_has_the_exit_code_on_which_scripts_branch(error: Exception, code: int) -> None:
    assert code_of(error) == code


def test_a_bug_is_one_line_unless_debugging_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("ckpt_async.cli.status.FolderWatch", broken)
    assert cli.main(["status", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        "ckpt-async: this is a bug: ZeroDivisionError('oh') (CKPT_ASYNC_DEBUG=1 shows the traceback)\n"
    )
    monkeypatch.setenv("CKPT_ASYNC_DEBUG", "1")
    assert cli.main(["status", str(tmp_path)]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_corrupt_decision_is_not_shown_as_a_checkpoint(folder: Path, remote: str) -> None:
    train(folder, remote, 1)
    (decision,) = Path(remote.removeprefix("file://"), ".ckpt-async/decisions").iterdir()
    decision.write_bytes(b'{"format": "who knows"}')
    done = shell("ls", remote)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (4, "", 1)


def test_ctrl_c_exits_without_a_traceback(folder: Path) -> None:
    """The server in this test accepts the connection and then says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        process = subprocess.Popen(
            command("ls", "s3://bucket/run", "--endpoint-url", f"http://127.0.0.1:{silent.getsockname()[1]}"),
            cwd=ROOT,
            env={
                **os.environ,
                "AWS_ACCESS_KEY_ID": "a",
                "AWS_SECRET_ACCESS_KEY": "b",
                "AWS_REGION": "eu-north-1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
    assert out == ""
    assert {line for line in err.splitlines() if "no answer yet" not in line} == set()
    assert process.returncode == 130


def test_a_command_without_separator_is_refused_with_what_to_write(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["run", "file:///a", "sh", "-c", "a b"]) == 2
    assert "(did you mean `ckpt-async run file:///a -- sh -c 'a b'`?)" in capsys.readouterr().err
    assert cli.main(["run", "file:///a", "sh", "--", "x"]) == 2
    assert "unrecognized arguments: sh (see" in capsys.readouterr().err


def test_watching_a_checkpoint_itself_uploads_it(tmp_path: Path) -> None:
    checkpoint = tmp_path / "out/checkpoint-5"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.bin").write_bytes(b"x")
    (checkpoint / "trainer_state.json").write_text('{"global_step": 5}')
    assert cli.main(["watch", str(checkpoint), f"file://{tmp_path}/remote", "--once"]) == 0
    found = restore.find(f"file://{tmp_path}/remote")
    assert found is not None
    assert (found.step, found.name) == (5, "checkpoint-5")


def test_ctrl_c_while_the_package_is_imported_exits_without_a_traceback() -> None:
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'ckpt_async.cli.parsing':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from ckpt_async.__main__ import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    (script,) = metadata.entry_points(group="console_scripts", name="ckpt-async")
    assert script.value == "ckpt_async.__main__:main"


def test_the_command_begins_without_further_imports() -> None:
    """Ctrl-C before the entry point runs would end in a traceback."""
    code = "import sys; before = set(sys.modules); import ckpt_async.__main__; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "['__future__', 'ckpt_async', 'ckpt_async.__main__']\n"


@pytest.mark.parametrize("arguments", [["version"], ["--help"], ["version", "--json"], ["bogus", "--json"]])
def test_a_broken_pipe_is_not_reported_as_an_error(arguments: list[str]) -> None:
    """`ckpt-async ls … | head -1` must not end in a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command(*arguments),
        cwd=ROOT,
        # The output is still buffered when it turns out that the pipe is broken.
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writer)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.fault("O15")
@pytest.mark.parametrize("arguments", [["version"], ["version", "--json"], ["bogus", "--json"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_unwritable_output_is_reported(arguments: list[str], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(*arguments),
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert "No space left on device" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("as_json", [(), ("--json",)])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_is_cut_short_is_one_error(
    tmp_path: Path, as_json: tuple[str, ...], unbuffered: str
) -> None:
    """This also covers output larger than a buffer, where the command itself sees the error."""
    with Uploader(tmp_path / "f", f"file://{tmp_path}/run", rank=0, world_size=1) as uploader:
        for step in range(60):
            name = "n" * 150 + f"-{step}"
            with uploader.open(step, "shard.bin", name=name) as file:
                file.write(b"x")
            uploader.seal(step, name=name)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("ls", f"file://{tmp_path}/run", *as_json),
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == "ckpt-async: the output cannot be written: No space left on device\n"


@pytest.mark.fault("O15")
@pytest.mark.parametrize(
    ("closed", "arguments", "code", "out"),
    [
        (">&-", ["version"], 0, ""),
        (">&-", ["bogus", "--json"], 2, ""),
        ("2>&-", ["bogus"], 2, ""),  # error messages do not go to stdout instead
        (">&- 2>&-", ["bogus"], 2, ""),
    ],
)
def test_a_closed_standard_stream_is_not_an_error(
    closed: str, arguments: list[str], code: int, out: str
) -> None:
    """Cron and daemons start their children like this: the work is done, and the exit code reflects the work."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command(*arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (code, out)
    assert "Traceback" not in done.stderr


@pytest.mark.fault("O15")
def test_a_name_that_the_terminal_cannot_encode_is_shown_escaped(tmp_path: Path) -> None:
    folder, remote = tmp_path / "ü✓", f"file://{tmp_path}/über"
    train(folder, remote, 1)
    done = shell("status", folder, PYTHONIOENCODING="ascii:strict")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xfcber" in done.stdout


def test_verbose_logs_to_stderr_and_leaves_no_handler(
    folder: Path, remote: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """stdout stays a single JSON object, and a second call does not log twice."""
    train(folder, remote, 1)
    logger = logging.getLogger("ckpt_async")
    before = (list(logger.handlers), logger.level)
    for _ in range(2):
        assert cli.main(["drain", str(folder), "--json", "-vv"]) == 0
        json.loads(capsys.readouterr().out)
    assert (list(logger.handlers), logger.level) == before


def test_version_prints_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert shell("version").stdout == shell("--version").stdout == f"ckpt-async {__version__}\n"
    assert json_of(capsys, "version")["version"] == json_of(capsys, "--version")["version"] == __version__


def test_the_documentation_names_every_exit_code_and_command() -> None:
    text = (ROOT / "docs/cli.md").read_text()
    assert {int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)} == {
        int(code) for code in cli.Exit
    }
    helped = shell("--help").stdout
    for name in ("doctor", "status", "ls", "du", "drain", "version"):
        assert f"`{name}" in text
        assert name in helped
    for name in ("doctor", "status", "ls", "du", "drain", "version"):
        flags = set(re.findall(r"--[a-z][a-z-]+", shell(name, "--help").stdout)) - {"--help"}
        assert {flag for flag in flags if f"`{flag}" not in text} == set()


def test_every_line_of_watch_is_an_object_also_if_it_fails(
    tmp_path: Path, remote: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["watch", str(tmp_path / "missing"), remote, "--once", "--json"]) != 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "missing" in lines[-1]["error"]["message"]
