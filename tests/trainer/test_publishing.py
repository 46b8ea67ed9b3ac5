"""Files under the exact keys that a user chose: copies within the store, made after the commit and pruned with it."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ckpt_async import Sweeper, Uploader, cli, restore
from ckpt_async.core import keys, records
from ckpt_async.core.model import CheckpointId, Latest, Shard
from ckpt_async.core.settings import Settings
from ckpt_async.errors import (
    FailureReason,
    InvalidNameError,
    InvalidShardError,
    ObjectNotFoundError,
    SettingsError,
    StoreError,
)
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.interface import BytesBody
from ckpt_async.sweep.drain import drain
from ckpt_async.trainer.checkpoints import OpenCheckpoint
from ckpt_async.transfer import copying
from tests.conftest import Run
from tests.stores.gcs_peer import GcsPeer
from tests.stores.memory import CAPABILITIES
from tests.stores.misbehaving import Meddled, trouble
from tests.stores.objects import objects
from tests.trainer.uploads import Open, decisions, wait_until, write

MIB = 1 << 20


@pytest.fixture(params=["file", "s3"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/run" if request.param == "file" else request.getfixturevalue("s3_url")


def save(
    uploader: Uploader, step: int, publish_as: str | None, data: bytes = b"", name: str = "a.pt"
) -> None:
    path = write(uploader, f"step-{step}/{name}", data or f"state {step}".encode())
    uploader.enqueue(path, step, publish_as=publish_as)
    uploader.seal(step)


def published(remote: str) -> dict[str, bytes]:
    """Return what any other tool sees under the remote, without our own folders."""
    return {
        key: data for key, data in objects(remote).items() if not key.startswith(("ckpt/", ".ckpt-async/"))
    }


def has_copies_to_make(uploader: Uploader) -> bool:
    return any(each.to_copy for each in uploader._engine.view().fresh_local().checkpoints.values())


def claims(remote: str) -> list[str]:
    return [key for key in objects(remote) if key.startswith(".ckpt-async/claims/")]


def test_a_file_is_published_under_its_exact_key(remote: str, tmp_path: Path) -> None:
    with Uploader(tmp_path / "folder", remote, publish_copies=True) as uploader:
        for step in (1, 2):
            save(uploader, step, f"ckpts/ep1-ba{step}-rank0.pt")
    assert published(remote) == {"ckpts/ep1-ba1-rank0.pt": b"state 1", "ckpts/ep1-ba2-rank0.pt": b"state 2"}
    assert objects(remote)["ckpt/step-2.g1/a.pt"] == b"state 2", "the checkpoint itself is where it always is"


def test_files_of_a_folder_are_published_below_one_key(remote: str, tmp_path: Path) -> None:
    with Uploader(tmp_path / "folder", remote, publish_copies=True) as uploader:
        folder = write(uploader, "step-1/.metadata", b"m").parent
        write(uploader, "step-1/shards/__0_0.distcp", b"0")
        uploader.enqueue(folder, 1, publish_as="run/ep1-ba1")
        with uploader.open(1, "notes.txt", publish_as="run/notes.txt") as file:
            file.write(b"hello")
        uploader.enqueue(write(uploader, "more/plain.bin"), 1)
        uploader.seal(1)
    assert published(remote) == {
        "run/ep1-ba1/.metadata": b"m",
        "run/ep1-ba1/shards/__0_0.distcp": b"0",
        "run/notes.txt": b"hello",
    }


def test_a_large_file_is_copied_in_parts(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "COPY_PART_BYTES", 5 * MIB)
    data = os.urandom(12 * MIB + 5)
    with Uploader(tmp_path / "folder", s3_url, publish_copies=True) as uploader:
        save(uploader, 1, "exact/large.pt", data)
    assert published(s3_url) == {"exact/large.pt": data}


def test_where_parts_cannot_be_copied_a_large_file_is_copied_at_once(
    gcs_peer: GcsPeer, gcs_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "COPY_PART_BYTES", 5 * MIB)
    data = os.urandom(12 * MIB + 5)
    with Uploader(tmp_path / "folder", gcs_url, publish_copies=True) as uploader:
        save(uploader, 1, "exact/large.pt", data)
    name = f"{gcs_url.removeprefix(f'gs://{gcs_peer.bucket}/')}/exact/large.pt"
    assert gcs_peer.objects[name].data == data


def test_enqueue_looks_through_no_earlier_shards_if_it_publishes_nothing() -> None:
    """The trainer waits for it, with every shard for all that came before."""

    class Unread(dict[str, Shard]):
        def values(self) -> Any:
            raise AssertionError("looked at every shard")

    OpenCheckpoint(CheckpointId(1, 1), "step-1", Unread()).check_published({})


def test_nothing_is_published_before_the_commit_or_of_what_is_never_committed(opened: Open) -> None:
    store = Meddled()
    seen: list[str] = []

    async def before(operation: str, key: str) -> None:
        if operation in ("copy", "put") and not key.startswith(".ckpt-async/probe/"):
            seen.append(f"{operation} {key}")

    store.before = before  # type: ignore[method-assign]
    with opened(store, publish_copies=True) as uploader:
        save(uploader, 1, "exact/1.pt")
        uploader.enqueue(write(uploader, "step-2/a.pt"), 2, publish_as="exact/2.pt")  # not sealed
    assert store.keys("exact/") == ["exact/1.pt"]
    decided = seen.index("put .ckpt-async/decisions/000001-000000000001.json")
    assert seen.index("copy ckpt/step-1.g1/a.pt") > decided
    claim = next(each for each in seen if "claims/" in each)
    assert seen.index(claim) > decided


def test_a_copy_that_fails_affects_no_commit_and_is_tried_again(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    store = Meddled()
    left = [3]

    async def before(operation: str, key: str) -> None:
        if operation == "copy" and key.startswith("ckpt/") and left[0]:
            left[0] -= 1
            raise trouble(FailureReason.OTHER)

    store.before = before  # type: ignore[method-assign]
    with opened(store, publish_copies=True, on_error="warn", num_checkpoints_to_keep=0) as uploader:
        save(uploader, 1, "exact/1.pt")
        uploader.wait(1, timeout_s=10)
        assert list(decisions(store).values()) == ["commit"]
        wait_until(lambda: store.keys("exact/") == ["exact/1.pt"], uploader)
        assert not (uploader.folder / "step-1").exists(), "local retention does not wait for copies"
        wait_until(lambda: not uploader._engine.view().fresh_local().checkpoints, uploader)
        exported = uploader.metrics.registry.get_sample_value
        labels = {"run": "memory://test"}
        assert exported("ckpt_async_copies_total", labels | {"result": "ok"}) == 1
        assert exported("ckpt_async_copies_total", labels | {"result": "failed"}) == 3
    assert "action_failed" in caplog.text


KILLED_AT_A_COPY = """
import json, os, signal, sys
from pathlib import Path
from urllib.parse import urlsplit
from ckpt_async import Uploader
from ckpt_async.transfer import copying
told = json.loads(sys.argv[1])
async def die(*_): os.kill(os.getpid(), signal.SIGKILL)
uploader = Uploader(told["folder"], told["remote"], publish_copies=True, num_checkpoints_to_keep=0)
setattr(copying, told["at"], die)
path = Path(told["folder"], "a.pt")
path.write_bytes(b"state")
uploader.enqueue(path, 1, publish_as="exact/a.pt")
uploader.seal(1)
uploader.close()
"""


@pytest.mark.parametrize("at", ["copy", "verify_stored"])
@pytest.mark.parametrize("by", ["start", "drain", "sweeper"])
def test_a_copy_is_finished_after_sigkill(remote: str, tmp_path: Path, run: Run, at: str, by: str) -> None:
    """The process is killed between the commit and the copy, or after the copy and before anyone knew that it was
    made.
    """
    folder = tmp_path / "folder"
    told = {"folder": str(folder), "remote": remote, "at": at}
    died = subprocess.run([sys.executable, "-c", KILLED_AT_A_COPY, json.dumps(told)], timeout=60)
    assert died.returncode == -signal.SIGKILL
    assert restore.find(remote) is not None, "it was committed"
    assert published(remote).keys() == ({"exact/a.pt"} if at == "verify_stored" else set())
    if by == "start":
        Uploader(folder, remote).close()
    elif by == "drain":
        run(drain(folder, timeout_s=30, grace_s=1))
    else:
        assert run(Sweeper([folder]).sweep()).is_clean
    assert published(remote) == {"exact/a.pt": b"state"}
    with Uploader(folder, remote) as uploader:
        assert not has_copies_to_make(uploader), "it was recorded"


def test_an_outstanding_copy_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`status` said that nothing was pending, and `drain` that there was nothing to do."""
    folder, remote = tmp_path / "folder", f"file://{tmp_path}/store"
    told = {"folder": str(folder), "remote": remote, "at": "copy"}
    subprocess.run([sys.executable, "-c", KILLED_AT_A_COPY, json.dumps(told)], timeout=60)
    [shard] = (tmp_path / "store/ckpt").glob("*/a.pt")
    hidden = shard.rename(tmp_path / "hidden")  # somebody has deleted it since
    assert cli.main(["status", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith("; 1 copy under exact keys outstanding (step 1)")
    assert "1 file to copy" in out
    assert f"step 1: `ckpt-async drain {folder}` makes the copies" in out
    assert cli.main(["drain", str(folder)]) == 6
    assert "rank 0: step 1@g1 is not copied to its exact keys: " in capsys.readouterr().out
    assert cli.main(["drain", str(folder), "--json"]) == 6
    drained = json.loads(capsys.readouterr().out)
    [left] = drained["ranks"][0]["uncopied"]
    assert (drained["is_drained"], left["step"], "ckpt/step-1.g1/a.pt" in left["reason"]) == (False, 1, True)
    hidden.rename(shard)
    assert cli.main(["drain", str(folder)]) == 0
    capsys.readouterr()
    assert cli.main(["status", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("; nothing is pending")
    assert published(remote) == {"exact/a.pt": b"state"}


def test_copies_are_pruned_with_their_checkpoint_and_only_its_own(
    remote: str, tmp_path: Path, run: Run
) -> None:
    """A key that several checkpoints share belongs to the newest; an object that someone else has put there stays."""
    with Uploader(tmp_path / "folder", remote, publish_copies=True) as uploader:
        for step in (1, 2, 3):
            folder = write(uploader, f"step-{step}/config.json", b"the same").parent
            write(uploader, f"step-{step}/model.pt", f"state {step}".encode())
            uploader.enqueue(folder, step, publish_as="shared")
            uploader.enqueue(write(uploader, f"own/{step}.pt", b"own"), step, publish_as=f"own/{step}.pt")
            uploader.seal(step)
            uploader.wait(step, 30)
        wait_until(lambda: len(published(remote)) == 5, uploader)
    objects(remote, put={"own/1.pt": b"replaced by hand"})
    for _ in range(2):
        assert run(Sweeper([], [remote], settings=Settings(remote_retention="last=1")).sweep()).is_clean
    assert restore.find(remote).id.step == 3  # type: ignore[union-attr]
    assert published(remote) == {
        "shared/config.json": b"the same",
        "shared/model.pt": b"state 3",
        "own/1.pt": b"replaced by hand",
        "own/3.pt": b"own",
    }
    assert len(claims(remote)) == 3


def test_of_two_checkpoints_under_one_key_the_newest_wins(opened: Open) -> None:
    """This must hold however late the older checkpoint's copy gets through."""
    store = Meddled()
    held: list[str] = []

    async def after(operation: str, key: str) -> None:
        if operation == "put" and "claims/" in key and not held:
            held.append(key)
            raise trouble(FailureReason.OTHER)  # the first checkpoint's engine falls behind the second's

    store.after = after  # type: ignore[method-assign]
    with opened(store, publish_copies=True, on_error="warn") as uploader:
        for step in (1, 2):
            save(uploader, step, "exact/latest.pt")
            uploader.wait(step, timeout_s=10)
    assert store.bucket.objects["exact/latest.pt"].data == b"state 2"


def test_a_store_that_cannot_copy_is_refused_when_opened(opened: Open) -> None:
    store = Meddled(capabilities=replace(CAPABILITIES, copies=False))
    with pytest.raises(StoreError, match="cannot copy objects"), opened(store, publish_copies=True):
        pass
    assert store.keys() == [], "nothing was made"
    with opened(store) as uploader:
        save(uploader, 1, None)


def test_a_store_that_takes_a_copy_for_a_put_of_nothing_is_refused_when_opened(opened: Open) -> None:
    class TakesNoCopySource(Meddled):
        async def after(self, operation: str, key: str) -> None:
            if operation == "copy":
                copy = next(each for each in self.keys(".ckpt-async/probe/") if each.endswith("-copy"))
                del self.bucket.objects[copy]

    with (
        pytest.raises(StoreError, match="cannot copy objects"),
        opened(TakesNoCopySource(), publish_copies=True),
    ):
        pass


@pytest.mark.parametrize(
    "key",
    [
        "/a.pt",
        "../a.pt",
        "a//b",
        "ckpt/a.pt",
        ".ckpt-async/latest.json",
        "kinds/x/a.pt",
        "a.symlink",
        "a b",
        "",
    ],
)
def test_unsafe_keys_are_refused_at_once(opened: Open, key: str) -> None:
    with opened(Meddled(), publish_copies=True) as uploader:
        with pytest.raises(InvalidNameError):
            uploader.enqueue(write(uploader, "a.pt"), 1, publish_as=key)
        assert not uploader._engine.view().fresh_local().checkpoints


def test_contradictions_are_refused_at_once(opened: Open) -> None:
    store = Meddled()
    with opened(store) as uploader, pytest.raises(SettingsError, match="publish_copies=True"):
        uploader.enqueue(write(uploader, "a.pt"), 1, publish_as="exact/a.pt")
    with opened(store, publish_copies=True) as uploader:
        uploader.enqueue(write(uploader, "a.pt"), 1, publish_as="exact/a.pt")
        uploader.enqueue(uploader.folder / "a.pt", 1, publish_as="exact/a.pt")
        with pytest.raises(InvalidShardError, match="both published"):
            uploader.enqueue(write(uploader, "b.pt"), 1, publish_as="exact/a.pt")
        with pytest.raises(InvalidShardError, match="already enqueued"):
            uploader.enqueue(uploader.folder / "a.pt", 1, publish_as="exact/other.pt")


@pytest.mark.parametrize("is_gone", [False, True], ids=["there", "gone"])
def test_what_was_pruned_before_it_was_copied_is_not_published(opened: Open, run: Run, is_gone: bool) -> None:
    """The engine was away for long; the sweeper that pruned could not see a copy that did not exist yet. That the
    shards are gone by then is no failure.
    """
    store = Meddled()

    async def before(operation: str, key: str) -> None:
        if operation == "copy" and key.startswith("ckpt/"):
            record = store.bucket.objects[".ckpt-async/decisions/000001-000000000001.json"]
            data = record.data.replace(b'"commit"', b'"pruning"')
            store.bucket.objects[".ckpt-async/decisions/000001-000000000001.json"] = replace(
                record, data=data
            )
            if is_gone:
                raise ObjectNotFoundError(key)

    store.before = before  # type: ignore[method-assign]
    with opened(store, publish_copies=True) as uploader:
        save(uploader, 1, "exact/1.pt")
        uploader.wait(1, timeout_s=10)
        wait_until(lambda: not has_copies_to_make(uploader), uploader)
        assert not uploader._engine.view().failures
    assert store.keys("exact/") == []
    assert store.keys(".ckpt-async/claims/") == []


# --- Composer's pointer ------------------------------------------------------------------------------------


def follow(remote: str, pointer: str) -> dict[str, bytes]:
    """Return what Composer (0.32) finds behind a pointer: `get_file` reads an object name from it, without the
    bucket, and downloads that object; for a sharded checkpoint, it reads the objects below that name.
    """
    there = objects(remote)
    name = there[pointer].decode()
    assert name == name.strip("/\n")
    root = f"{urlsplit(remote).path.strip('/')}/"
    assert name.startswith(root)
    target = name.removeprefix(root)
    return {key: data for key, data in there.items() if key == target or key.startswith(f"{target}/")}


POINTER = "latest-rank{rank}.pt.symlink"


@pytest.mark.parametrize(
    "wrong",
    [
        "latest-{step}.pt.symlink",
        "/latest.symlink",
        "a b.symlink",
        "../latest.symlink",
        ".ckpt-async/latest.json",
        "ckpt/latest.symlink",
        "latest-rank0.pt",
        f"{'a' * 200}/" * 2 + "a" * 197,
    ],
)
def test_a_pointer_that_cannot_be_written_is_refused_at_once(
    opened: Open, tmp_path: Path, wrong: str
) -> None:
    """It was noticed after the first commit only, and then in every round of the engine."""
    remote = f"memory://test/{'p' * 500}"
    with pytest.raises(InvalidNameError, match=re.escape(wrong[:40])):
        Uploader(tmp_path / "folder", remote, rank=0, world_size=1, composer_symlink=wrong).close()
    assert list(tmp_path.iterdir()) == []


def test_the_pointer_names_the_one_file_of_a_checkpoint(remote: str, tmp_path: Path) -> None:
    """Composer's monolithic resume downloads the object that the pointer names."""
    with Uploader(tmp_path / "folder", remote, composer_symlink=POINTER) as uploader:
        for step in (1, 2):
            save(uploader, step, None)
            uploader.wait(step, 30)
    assert follow(remote, "latest-rank0.pt.symlink") == {"ckpt/step-2.g1/a.pt": b"state 2"}


def test_the_pointer_names_the_published_file(remote: str, tmp_path: Path) -> None:
    with Uploader(tmp_path / "folder", remote, composer_symlink=POINTER, publish_copies=True) as uploader:
        for step in (1, 2):
            save(uploader, step, f"ckpts/ep1-ba{step}-rank0.pt")
    assert follow(remote, "latest-rank0.pt.symlink") == {"ckpts/ep1-ba2-rank0.pt": b"state 2"}


def test_the_pointer_names_the_folder_of_several_files(remote: str, tmp_path: Path) -> None:
    """Composer's own pointer names a folder for sharded checkpoints: the published one, if there is one."""
    with Uploader(tmp_path / "folder", remote, composer_symlink=POINTER, publish_copies=True) as uploader:
        for step, publish_as in ((1, None), (2, "ckpts/ep1-ba2")):
            folder = write(uploader, f"step-{step}/.metadata", b"m").parent
            write(uploader, f"step-{step}/__0_0.distcp", b"0")
            uploader.enqueue(folder, step, publish_as=publish_as)
            uploader.seal(step)
            uploader.wait(step, 30)
            if step == 1:
                wait_until(lambda: "latest-rank0.pt.symlink" in objects(remote), uploader)
                found = follow(remote, "latest-rank0.pt.symlink")
                assert set(found) == {"ckpt/step-1.g1/.metadata", "ckpt/step-1.g1/__0_0.distcp"}
    found = follow(remote, "latest-rank0.pt.symlink")
    assert set(found) == {"ckpts/ep1-ba2/.metadata", "ckpts/ep1-ba2/__0_0.distcp"}


def test_the_pointer_waits_for_the_copies_it_names(opened: Open) -> None:
    """A reader may follow the pointer at any time, so what it names must be readable."""
    store = Meddled()
    seen: list[str] = []

    def pointer() -> str:
        there = store.bucket.objects.get("latest-rank0.pt.symlink")
        return there.data.decode() if there else ""

    async def before(operation: str, key: str) -> None:
        if operation == "copy" and key.startswith("ckpt/step-2") and len(seen) < 3:
            seen.append(pointer())
            raise trouble(FailureReason.OTHER)

    store.before = before  # type: ignore[method-assign]
    with opened(store, composer_symlink=POINTER, publish_copies=True, on_error="warn") as uploader:
        for step in (1, 2):
            save(uploader, step, f"exact/{step}.pt")
            uploader.wait(step, timeout_s=10)
            wait_until(lambda: pointer() == f"exact/{step}.pt", uploader)  # noqa: B023
    assert seen == ["exact/1.pt"] * 3


def test_markers_are_copied_after_all_ranks_files(opened: Open, tmp_path: Path) -> None:
    """Other tools take a folder with `config.yaml` for a whole checkpoint of OLMo."""
    store = Meddled()
    order: list[str] = []
    num_failed = 0

    async def before(operation: str, key: str) -> None:
        nonlocal num_failed
        if operation == "copy" and key.endswith("__1_0.distcp") and num_failed < 4:
            num_failed += 1
            raise trouble(FailureReason.OTHER)

    async def after(operation: str, key: str) -> None:
        if operation == "copy" and key.startswith("ckpt/"):  # not the trial when opened
            order.append(key.rpartition("/")[2])

    store.before, store.after = before, after  # type: ignore[method-assign]
    files = {0: ["config.yaml", "model/.metadata", "model/__0_0.distcp"], 1: ["model/__1_0.distcp"]}
    settings = {"world_size": 2, "launch_id": "1", "publish_copies": True, "on_error": "warn"}
    with (
        opened(store, tmp_path / "node-0", rank=0, **settings) as zero,
        opened(store, tmp_path / "node-1", rank=1, **settings) as one,
    ):
        for uploader in (zero, one):
            for name in files[uploader.rank]:
                write(uploader, f"step5/{name}", name.encode())
            uploader.enqueue(uploader.folder / "step5", 5, publish_as="step5")
            uploader.seal(5)
        for uploader in (zero, one):
            uploader.wait(5, timeout_s=10)
            wait_until(lambda: not has_copies_to_make(uploader), uploader)  # noqa: B023
    assert num_failed == 4
    first = list(dict.fromkeys(order))  # two ranks may make the same copy
    assert sorted(first[:2]) == ["__0_0.distcp", "__1_0.distcp"]
    assert first[2:] == [".metadata", "config.yaml"]


def test_the_pointer_is_written_where_nothing_is_kept_locally(opened: Open) -> None:
    store = Meddled()
    with opened(store, composer_symlink=POINTER, num_checkpoints_to_keep=0) as uploader:
        save(uploader, 1, None)
        uploader.wait(1, timeout_s=10)
    assert store.bucket.objects["latest-rank0.pt.symlink"].data == b"ckpt/step-1.g1/a.pt"
    with opened(store, composer_symlink=POINTER, num_checkpoints_to_keep=0) as uploader:
        save(uploader, 1, None)  # the start begins over
    assert store.bucket.objects["latest-rank0.pt.symlink"].data == b"ckpt/step-1.g2/a.pt"


def test_the_pointer_never_moves_behind_latest(opened: Open) -> None:
    """A newer launch has committed since, and has moved the pointer."""
    store, newer = Meddled(), CheckpointId(2, 9)
    latest = Latest(newer, "step-9", keys.data_prefix("step-9", 2), 1, "n")
    with opened(store, composer_symlink=POINTER) as uploader:
        engine: Any = uploader._engine.view()
        asyncio.run(_put(store, keys.LATEST, records.encode_latest(latest)))
        save(uploader, 1, None)
        uploader.wait(1, timeout_s=10)
        wait_until(lambda: engine.state.published.pointed_at == CheckpointId(1, 1), uploader)
    assert store.keys("latest-rank0") == []


async def _put(store: Meddled, key: str, data: bytes) -> None:
    await store._store.put(key, BytesBody(data), checksum_of(data, "crc64nvme"))
