"""Several kinds of checkpoints in one folder and one run: independent in everything but their limits."""

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
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Settings, SettingsError, Sweeper, Uploader, cli, restore
from ckpt_async.core.model import (
    CheckpointId,
    Decided,
    Enqueued,
    FileIdentity,
    Outcome,
    Released,
    Removed,
    Sealed,
    Shard,
)
from ckpt_async.errors import FolderInUseError, InvalidNameError, UploadFailedError
from ckpt_async.local import kept
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal
from ckpt_async.runners.process import ProcessRunner
from ckpt_async.transfer.upload import SMALL_BYTES
from tests.stores.memory import MemoryStore
from tests.stores.misbehaving import Meddled, Slow
from tests.trainer.uploads import QUICK, wait_until

KINDS = (None, "weights")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "folder"


@pytest.fixture
def remote(tmp_path: Path) -> str:
    return f"file://{tmp_path}/run"


def opened(folder: Path, remote: str, kind: str | None = None, **more: Any) -> Uploader:
    return Uploader(folder, remote, kind=kind, **QUICK | more)


def save(uploader: Uploader, *steps: int, padding: int = 0) -> None:
    """Save checkpoints of every kind under the same names, in a folder for each kind."""
    for step in steps:
        shard = uploader.folder / (uploader.kind or "full") / f"step-{step}" / f"rank-{uploader.rank}.pt"
        shard.parent.mkdir(parents=True, exist_ok=True)
        shard.write_text(text(uploader.kind, step, uploader.rank) + " " * padding)
        uploader.enqueue(shard, step)
        uploader.seal(step)


def text(kind: str | None, step: int, rank: int = 0) -> str:
    return f"{kind or 'full'} {step} {rank}"


def pulled(remote: str, kind: str | None, place: Path) -> tuple[int, set[str]] | None:
    found = restore.fetch_latest(remote, place / (kind or "full"), kind=kind)
    return found and (found[0].step, {path.read_text() for path in found[1].paths.values()})


def steps_of(remote: str, kind: str | None, capsys: pytest.CaptureFixture[str]) -> list[int]:
    assert cli.main(["ls", remote, "--json", *(["--kind", kind] if kind else [])]) == 0
    return [
        each["step"] for each in json.loads(capsys.readouterr().out)["checkpoints"] if each["kind"] == kind
    ]


@pytest.mark.parametrize("runner", ["thread", "process"])
def test_each_kind_has_its_own_checkpoints_latest_and_retention(
    runner: str, folder: Path, remote: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        opened(folder, remote, num_checkpoints_to_keep=2, remote_retention="last=9", runner=runner) as full,
        opened(folder, remote, "weights", remote_retention="last=3", runner=runner) as weights,
    ):
        save(weights, 1, 2, 3, 4, 5)
        save(full, 2, 4, 5)
        weights.wait(5, 30)
        full.wait(5, 30)
    assert sorted(each.name for each in (folder / "full").iterdir()) == ["step-4", "step-5"]
    assert len(list((folder / "weights").iterdir())) == 5
    assert (folder / "latest-rank0").resolve() == folder / "full/step-5"
    assert (folder / "latest-weights-rank0").resolve() == folder / "weights/step-5"
    for kind in KINDS:
        assert pulled(remote, kind, tmp_path / "pulled") == (5, {text(kind, 5)})
    # A sweeper on the node prunes each kind with the settings it was opened with, and the run itself with its
    # own.
    report = asyncio.run(Sweeper([folder], settings=Settings(remote_retention="last=2")).sweep())
    assert report.is_clean
    assert {kind: steps_of(remote, kind, capsys) for kind in KINDS} == {None: [4, 5], "weights": [3, 4, 5]}
    # What it is told itself comes first.
    asyncio.run(Sweeper([folder], kind_retention={"weights": "last=2"}).sweep())
    assert {kind: steps_of(remote, kind, capsys) for kind in KINDS} == {None: [4, 5], "weights": [4, 5]}
    # A sweeper anywhere else finds the kinds below the remote, and keeps what it was not told to prune.
    elsewhere = Settings(remote_retention="last=1")
    asyncio.run(Sweeper(remotes=[remote], settings=elsewhere).sweep())
    assert {kind: steps_of(remote, kind, capsys) for kind in KINDS} == {None: [5], "weights": [4, 5]}
    asyncio.run(Sweeper(remotes=[remote], kind_retention={"weights": "last=1"}).sweep())
    assert steps_of(remote, "weights", capsys) == [5]


def test_a_folder_with_a_kind_that_cannot_be_read_does_not_stop_a_sweep_of_the_others(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with opened(tmp_path / name, f"file://{tmp_path}/remote-{name}") as full:
            save(full, 1)
            full.wait(1, 30)
    kinds = tmp_path / "a/.ckpt-async/kinds"
    kinds.mkdir(exist_ok=True)
    (kinds / "weights").symlink_to("weights")
    report = asyncio.run(Sweeper([tmp_path / "a", tmp_path / "b"]).sweep())
    assert [bool(each.error) for each in report.folders] == [True, False]
    assert [each.url for each in report.remotes] == [f"file://{tmp_path}/remote-b"]


@pytest.mark.parametrize("where", ["folder", "remote"])
def test_a_policy_for_a_kind_that_no_remote_has_is_logged(
    folder: Path, remote: str, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    with opened(folder, remote) as full, opened(folder, remote, "weights") as weights:
        for each in (full, weights):
            save(each, 1)
            each.wait(1, 30)
    what: dict[str, Any] = {"folders": [folder]} if where == "folder" else {"remotes": [remote]}
    policies = {"weights": "last=1", "weigths": "last=1"}
    assert asyncio.run(Sweeper(**what, kind_retention=policies).sweep()).is_clean
    assert [each.message for each in caplog.records if "keep_unused" in each.message] == [
        "keep_unused no remote has checkpoints of kind 'weigths': the policy for it has no effect"
    ]


def test_kinds_on_s3(folder: Path, s3_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(folder, s3_url) as full, opened(folder, s3_url, "weights") as weights:
        save(full, 2)
        save(weights, 1, 2)
        full.wait(2, 30)
        weights.wait(2, 30)
    for kind in KINDS:
        assert pulled(s3_url, kind, tmp_path / "pulled") == (2, {text(kind, 2)})
    assert {kind: steps_of(s3_url, kind, capsys) for kind in KINDS} == {None: [2], "weights": [1, 2]}
    with pytest.raises(restore.UnknownKindError, match=r"kind 'weights'"):
        restore.find(s3_url, kind="ema")
    report = asyncio.run(Sweeper(remotes=[s3_url], kind_retention={"weights": "last=1"}).sweep())
    assert report.is_clean, report
    assert {kind: steps_of(s3_url, kind, capsys) for kind in KINDS} == {None: [2], "weights": [2]}


def test_two_ranks_commit_each_kind_together(folder: Path, remote: str, tmp_path: Path) -> None:
    opening: list[Uploader] = []

    def open_rank(rank: int) -> None:
        more = {"rank": rank, "world_size": 2, "launch_id": "one"}
        opening.extend(opened(folder, remote, kind, **more) for kind in KINDS)

    threads = [threading.Thread(target=open_rank, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert len(opening) == 4
    for each in opening:
        save(each, 7)
    for each in opening:
        each.wait(7, 30)
        each.close()
    for kind in KINDS:
        assert pulled(remote, kind, tmp_path / "pulled") == (7, {text(kind, 7, rank) for rank in range(2)})


class Below(Meddled):
    """One of many runs in a bucket whose shards are all held together."""

    def __init__(self, held: Slow, url: str) -> None:
        super().__init__(held.bucket)
        self._held, self.url = held, url
        self._store = MemoryStore(held.bucket, prefix=url.removeprefix("memory://test").strip("/"), url=url)

    async def before(self, operation: str, key: str) -> None:
        await self._held.before(operation, key)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Slow:
    """A store behind `memory://test` that holds the shards of all kinds."""
    store = Slow()
    monkeypatch.setattr("ckpt_async.transfer.patient.open_store", lambda url, *_, **__: Below(store, url))
    return store


def test_the_limits_of_all_kinds_are_common(folder: Path, held: Slow) -> None:
    """All kinds together make no more requests at once than one engine may make, all in one thread."""
    limits = {"num_concurrent_uploads": 3, "max_concurrent_uploads": 3}
    uploaders = [opened(folder, "memory://test", kind, **limits) for kind in (None, "weights", "ema")]
    loops = [each for each in threading.enumerate() if each.name == "ckpt-async-rank-0"]
    assert len(loops) == 1
    for each in uploaders:
        save(each, *range(1, 7), padding=SMALL_BYTES)
    for each in uploaders:
        wait_until(lambda each=each: each.metrics._num_uploads == 3, each)  # type: ignore[misc]
    wait_until(lambda: held.most_held == 3, uploaders[0])
    held.go.set()
    for each in uploaders:
        each.wait(6, 30)
    assert held.most_held == 3
    for each in uploaders[:2]:
        each.close()
    save(uploaders[2], 7)
    uploaders[2].wait(7, 30)
    assert loops[0].is_alive()
    uploaders[2].close()
    assert not loops[0].is_alive()


@pytest.mark.fault("F80")
def test_an_engine_that_dies_leaves_the_other_kinds_alone(folder: Path, held: Slow) -> None:
    held.go.set()
    full, weights = (opened(folder, "memory://test", kind) for kind in KINDS)
    weights._engine.runner.expect_end()
    weights._engine.runner._host.engine.state.refresh = lambda: 1 / 0
    weights._engine.view().wake()
    wait_until(lambda: weights._engine.runner.death is not None, weights)
    save(full, 1)
    full.wait(1, 30)
    full.close()
    with pytest.raises(UploadFailedError, match="ZeroDivisionError"):
        weights.close()


@pytest.mark.fault("F80")
def test_kinds_have_one_runner_process_and_restart_it_together(
    folder: Path, remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned: list[Any] = []
    spawn = ProcessRunner._spawn
    monkeypatch.setattr(ProcessRunner, "_spawn", lambda self, *how: spawned.append(how) or spawn(self, *how))
    full, weights, ema = (opened(folder, remote, kind, runner="process") for kind in (None, "weights", "ema"))
    assert len(spawned) == 1
    save(full, 1)
    save(weights, 1)
    for each in (full, weights):
        each.wait(1, 30)
    full.close()  # it started the runner
    group = weights._engine.runner.group
    os.killpg(group, signal.SIGKILL)
    save(weights, 2)
    save(ema, 2)
    for each in (weights, ema):
        each.wait(2, 30)
    assert len(spawned) == 2
    with opened(folder, remote, runner="process") as full:
        assert len(spawned) == 2
        assert full._engine.runner.group == weights._engine.runner.group == ema._engine.runner.group != group
    for each in (weights, ema):
        each.close()
        assert pulled(remote, each.kind, tmp_path / "pulled") == (2, {text(each.kind, 2)})


def test_all_kinds_are_scraped_at_one_port(folder: Path, remote: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (
        opened(folder, remote, metrics_port=port) as full,
        opened(folder, remote, "weights", metrics_port=port) as weights,
    ):
        save(full, 1, 2)
        save(weights, 1)
        for uploader, step in ((full, 1), (full, 2), (weights, 1)):
            uploader.wait(step, 30)
        assert full.metrics_url is not None
        assert weights.metrics_url == full.metrics_url
        with urllib.request.urlopen(full.metrics_url) as page:
            series = dict(line.rsplit(" ", 1) for line in page.read().decode().splitlines() if line[0] != "#")
    committed = "ckpt_async_checkpoints_committed_total"
    assert float(series[f'{committed}{{run="{remote}"}}']) == 2
    assert float(series[f'{committed}{{run="{remote}/kinds/weights"}}']) == 1
    assert float(series["ckpt_async_enqueue_duration_seconds_count"]) == 3
    assert [value for name, value in series.items() if name.startswith("ckpt_async_build_info")] == ["1.0"]


def test_a_kind_is_open_once_and_its_symlink_is_its_own(folder: Path, remote: str) -> None:
    with opened(folder, remote, "weights"):
        with pytest.raises(FolderInUseError, match=r"kind 'weights', is in use by process .* this very one"):
            opened(folder, remote, "weights")
        with pytest.raises(
            SettingsError,
            match=r"latest_filename='latest-weights-rank\{rank\}' is taken by the Uploader for kind 'weights'",
        ):
            opened(folder, remote, "ema", latest_filename="latest-weights-rank{rank}")
        code = "import sys; from ckpt_async import Uploader; Uploader(*sys.argv[1:3], kind='weights')"
        import_ = f"import ckpt_async.trainer.handle as h; h.LOCK_WAIT_S = 0.1; {code}"
        other = subprocess.run(
            [sys.executable, "-c", import_, folder, remote], capture_output=True, text=True, timeout=60
        )
        assert re.search(r"FolderInUseError: .*kind 'weights', is in use by process", other.stderr), (
            other.stderr
        )
    with opened(folder, remote, "weights"), opened(folder, remote, "ema"), opened(folder, remote):
        pass


@pytest.mark.parametrize("kind", ["Weights", "a/b", "..", "-a", "a" * 33, "a.b", "ä", 7])
def test_names_that_are_not_safe_are_rejected(kind: Any, folder: Path, remote: str) -> None:
    with pytest.raises(InvalidNameError, match="is not a name for a kind"):
        opened(folder, remote, kind)
    with pytest.raises(InvalidNameError, match="is not a name for a kind"):
        restore.find(remote, kind=kind)
    assert not folder.exists()


def test_a_file_that_two_kinds_have_goes_with_the_last_of_them(folder: Path, remote: str) -> None:
    """Local retention of one kind leaves files that another kind still has, in its journal or set aside for good."""
    with (
        opened(folder, remote, num_checkpoints_to_keep=1) as full,
        opened(folder, remote, "weights", num_checkpoints_to_keep=2) as weights,
        opened(folder, remote, "ema") as ema,
    ):
        for step in range(1, 5):
            save(full, step)
            save(weights, step)
            shared = folder / f"shared-{step}.json"
            shared.write_text(f"{step}")
            for uploader in (full, weights, *((ema,) if step == 1 else ())):
                uploader.enqueue(shared, step + 10)
                uploader.seal(step + 10)
        for uploader, last in ((full, 14), (weights, 14), (ema, 11)):
            uploader.wait(last, 30)
        wait_until(lambda: not (folder / "shared-2.json").exists(), weights)
    # full keeps step 14, weights 13 and 14, ema 11 forever.
    assert sorted(each.name for each in folder.glob("shared-*")) == [
        "shared-1.json",
        "shared-3.json",
        "shared-4.json",
    ]


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_kind_that_has_removed_a_checkpoint_holds_no_file_of_it_for_its_copies(
    folder: Path, is_removed: bool
) -> None:
    """The copies are made within the store. If it held the file, the other kind would leave it behind for good."""
    id_, identity = CheckpointId(1, 1), FileIdentity(1, 2, 3, 4)
    shard = Shard("a.pt", "shared/a.pt", identity, is_linked=True, publish_as="exact.pt")
    with contextlib.closing(Journal(Folder(folder), 0)) as journal:
        journal.append([Enqueued(id_, "step-1", shard), Sealed(id_, "step-1", 1)])
        journal.append([Decided(id_, Outcome.COMMIT, "step-1"), Released(id_)])
        journal.append([Removed(id_)] if is_removed else [])
        assert journal.local().checkpoints[id_].to_copy
    held = kept.of_other_kinds(Folder(folder, kind="weights"))
    assert held == (set() if is_removed else {("shared/a.pt", identity)})


def test_two_kinds_that_let_go_at_once_leave_no_file_behind(
    folder: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, both = kept.of_other_kinds, threading.Barrier(2)

    def looks(of: Folder) -> Any:
        found = look(of)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)  # for the other thread, if that can look at the same time
        return found

    monkeypatch.setattr(kept, "of_other_kinds", looks)
    shared = folder / "shared.json"
    with (
        opened(folder, remote, num_checkpoints_to_keep=0) as full,
        opened(folder, remote, "weights", num_checkpoints_to_keep=0) as weights,
    ):
        shared.write_text("x")
        for uploader in (full, weights):
            uploader.enqueue(shared, 1)
        for uploader in (full, weights):
            uploader.seal(1)
        for uploader in (full, weights):
            wait_until(lambda uploader=uploader: not uploader._engine.view().local.checkpoints, uploader)  # type: ignore[misc]
    assert not shared.exists()


# --- looking -----------------------------------------------------------------------------------------------


def test_a_kind_that_is_not_there_is_no_fresh_start(
    folder: Path, remote: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert restore.find(remote, kind="weights") is None  # there are no checkpoints at all yet
    with opened(folder, remote) as full, opened(folder, remote, "ema"):
        save(full, 1)
        full.wait(1, 30)
        assert restore.find(remote, kind="ema") is None  # begun, but nothing saved yet
        with pytest.raises(
            restore.UnknownKindError,
            match=r"no checkpoints of kind 'emma'.*it has checkpoints without a kind",
        ):
            restore.find(remote, kind="emma")
    for command in (["pull", remote, str(tmp_path / "to")], ["ls", remote], ["verify", remote]):
        assert cli.main([*command, "--kind", "emma"]) == 2
        assert (
            "has no checkpoints of kind 'emma' (it has checkpoints without a kind" in capsys.readouterr().err
        )


def test_a_run_of_kinds_only_is_no_fresh_start_either(
    folder: Path, remote: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with opened(folder, remote, "weights") as weights:
        save(weights, 1)
        weights.wait(1, 30)
        assert cli.main(["status", str(folder), "--json"]) == 0
        status = json.loads(capsys.readouterr().out)
        assert status["ranks"] == status["checkpoints"] == []
        assert status["kinds"]["weights"]["ranks"] == [{"rank": 0, "is_running": True}]
    with pytest.raises(restore.UnknownKindError, match=r"without a kind .it has kind 'weights'"):
        restore.find(remote)
    found = restore.find(f"{remote}/kinds/weights")
    assert found is not None
    assert restore.find(remote, kind="weights") == found
    assert steps_of(remote, "weights", capsys) == [1]
    assert cli.main(["status", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("kind weights\nlast committed step 1")
    report = asyncio.run(Sweeper(remotes=[remote]).sweep())
    assert (report.is_clean, [each.url for each in report.remotes]) == (
        True,
        [remote, f"{remote}/kinds/weights"],
    )


def test_other_formats_are_not_seen_in_kinds(folder: Path, remote: str, tmp_path: Path) -> None:
    """A DCP checkpoint of a kind that is still being uploaded does not belong to the run itself."""
    with opened(folder, remote), opened(folder, remote, "weights") as weights:
        place = folder / "step-1"
        place.mkdir()
        (place / ".metadata").write_bytes(b"x")
        weights.enqueue(place, 1)
        weights.flush(10)
        assert list((tmp_path / "run/kinds/weights/ckpt").rglob(".metadata"))
        assert restore.find(remote) is None


# --- the end of a trainer ----------------------------------------------------------------------------------

# Saves step 1 of both kinds, without uploading anything, on a thread; then waits to be killed.
TRAINER = """
import asyncio, sys
from pathlib import Path
from ckpt_async import Uploader
from ckpt_async.engine.loop import Engine

async def never(self, action):
    await asyncio.Event().wait()

Engine._upload = never
folder, remote = Path(sys.argv[1]), sys.argv[2]
uploaders = [Uploader(folder, remote, kind=kind, runner=sys.argv[3]) for kind in (None, "weights")]
for uploader in uploaders:
    shard = folder / (uploader.kind or "full") / "step-1" / "rank-0.pt"
    shard.parent.mkdir(parents=True)
    shard.write_text(f"{uploader.kind or 'full'} 1 0")
    uploader.enqueue(shard, 1)
    uploader.seal(1)
print("saved", flush=True)
sys.stdin.read()
"""


@pytest.mark.fault("F80")
@pytest.mark.parametrize(
    ("by", "runner"),
    [("drain", "thread"), ("sweep", "thread"), ("find", "thread"), ("start", "thread"), ("start", "process")],
)
def test_what_a_killed_trainer_left_is_finished_of_all_kinds(
    by: str, runner: str, folder: Path, remote: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, folder, remote, runner],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "saved\n"
    trainer.kill()
    trainer.communicate(timeout=60)
    shutil.rmtree(folder / "weights")  # the spool still has it
    if by == "drain":
        assert cli.main(["drain", str(folder), "--json"]) == 0
        ranks = json.loads(capsys.readouterr().out)["ranks"]
        assert [(each["kind"], len(each["committed"])) for each in ranks] == [(None, 1), ("weights", 1)]
    elif by == "sweep":
        assert asyncio.run(Sweeper([folder]).sweep()).is_clean
    elif by == "find":
        restore.find(remote, folder=folder, drain_timeout_s=30)
    else:
        with (
            opened(folder, remote, runner=runner) as full,
            opened(folder, remote, "weights", runner=runner) as weights,
        ):
            assert all(each.wait_for_predecessor(30) for each in (full, weights))
    for kind in KINDS:
        assert pulled(remote, kind, tmp_path / "pulled") == (1, {text(kind, 1)})


# Uploads begin when both are flushed: those of one kind at once, those of the other only after that.
FLUSHED = """
import asyncio, sys, threading
from pathlib import Path
from ckpt_async import Uploader
from ckpt_async.engine.loop import Engine

upload, flush, flushed = Engine._upload, Uploader.flush, {None: threading.Event(), "weights": threading.Event()}

async def waits(self, action):
    while not flushed["weights" if self.state.folder.kind else None].is_set():
        await asyncio.sleep(0.01)
    await upload(self, action)

def flushes(self, timeout_s):
    (flushed[None] if not self.kind else threading.Event()).set()
    try:
        return flush(self, timeout_s)
    finally:
        flushed["weights"].set()

Engine._upload, Uploader.flush = waits, flushes
folder, remote = Path(sys.argv[1]), sys.argv[2]
uploaders = [Uploader(folder, remote, kind=kind, sigterm_flush_s=20) for kind in (None, "weights")]
for uploader in uploaders:
    shard = folder / (uploader.kind or "full") / "step-1" / "rank-0.pt"
    shard.parent.mkdir(parents=True)
    shard.write_text(f"{uploader.kind or 'full'} 1 0")
    uploader.enqueue(shard, 1)
    uploader.seal(1)
print("saved", flush=True)
sys.stdin.read()
"""


def test_sigterm_flushes_all_kinds_before_the_process_ends(folder: Path, remote: str, tmp_path: Path) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", FLUSHED, folder, remote],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "saved\n"
    trainer.terminate()
    trainer.communicate(timeout=60)
    assert trainer.returncode == -signal.SIGTERM
    for kind in KINDS:
        assert pulled(remote, kind, tmp_path / "pulled") == (1, {text(kind, 1)})


def test_drain_to_a_remote_that_has_moved_follows_for_each_kind(
    folder: Path, remote: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the loss of the journal, the spool alone is left, which does not say where to upload to."""
    for kind in KINDS:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("ckpt_async.engine.loop.Engine._start_uploads", lambda _: None)
            uploader = opened(folder, remote, kind)
            save(uploader, 1)
            uploader.flush(0.2)
            uploader.close(timeout_s=0)
    for journal in folder.glob(".ckpt-async/**/journal-*"):
        journal.unlink()
    assert cli.main(["drain", str(folder), "--remote", remote]) == 0
    for kind in KINDS:
        assert pulled(remote, kind, tmp_path / "pulled") == (1, {text(kind, 1)})
