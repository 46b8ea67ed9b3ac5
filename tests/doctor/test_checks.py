"""`ckpt-async doctor`, run against real folders and a real S3 server; it must leave nothing behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_async import Uploader, cli
from ckpt_async.cli.parsing import as_size as size_argument
from ckpt_async.core import keys
from ckpt_async.core.model import (
    CheckpointId,
    Checksum,
    Enqueued,
    Failed,
    FileIdentity,
    RemoteAddress,
    Sealed,
    Shard,
)
from ckpt_async.doctor import checks as doctor
from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.filesystems import filesystem_of
from ckpt_async.local.folder import Folder
from ckpt_async.local.journal import Journal, RankLock
from ckpt_async.stores import StoreOptions, open_store
from ckpt_async.stores.interface import Body, Condition, Listing, MultipartInfo, ObjectInfo, StoredPart
from ckpt_async.transfer.budgets import CONTROL_REQUESTS
from tests.stores.memory import MemoryBucket, MemoryStore, collected

ROOT = Path(__file__).resolve().parents[2]
Json = dict[str, Any]
Examine = Callable[..., tuple[int, dict[str, Json]]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Examine:
    """Run the doctor with --json; return its exit code and its findings by check (the
    last one where there are several).
    """
    for name in [each for each in os.environ if each.startswith("CKPT_ASYNC_")]:
        monkeypatch.delenv(name)

    def call(*arguments: object) -> tuple[int, dict[str, Json]]:
        code = cli.main(["doctor", *map(str, arguments), "--json"])
        told = json.loads(capsys.readouterr().out)
        assert told["is_ok"] is (code == 0)
        return code, {each["check"]: each for each in told["findings"]}

    return call


# These depend on the machine that runs the tests.
OF_THE_MACHINE = {"file system", "fsync", "open files"}


def levels(found: dict[str, Json]) -> dict[str, str]:
    """Return the level of each finding that is not ok."""
    return {
        check: each["level"]
        for check, each in found.items()
        if each["level"] != "ok" and check not in OF_THE_MACHINE
    }


def train(folder: Path, remote: str, *steps: int) -> None:
    with Uploader(folder, remote, rank=0, world_size=1) as uploader:
        save(uploader, *steps)


def save(uploader: Uploader, *steps: int) -> None:
    for step in steps:
        path = uploader.folder / f"step-{step}" / "model.bin"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * 1024)
        uploader.enqueue(path.parent, step=step)
        uploader.seal(step)


def tree(root: Path) -> dict[str, bytes | None]:
    """Return every file and folder, with the files' content."""
    return {str(each): each.read_bytes() if each.is_file() else None for each in root.rglob("*")}


def stored(url: str) -> tuple[list[str], Sequence[MultipartInfo]]:
    async def main() -> tuple[list[str], Sequence[MultipartInfo]]:
        store = open_store(url)
        await store.open(is_read_only=True)
        try:
            return [each.key for each in (await store.list("")).objects], await store.list_multiparts("")
        finally:
            await store.close()

    return asyncio.run(main())


# --- a real store ------------------------------------------------------------------------------------------


def test_a_sound_environment_passes_every_check_and_nothing_is_left(folder: Path, s3_url: str) -> None:
    """In a shell, each finding is one line, and launcher scripts rely on the exit code."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_async", "doctor", folder, s3_url, "--checkpoint-bytes", "1MiB"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    *lines, verdict = done.stdout.splitlines()
    assert (done.returncode, done.stderr, verdict) == (0, "", "nothing failed")
    checks = [line[6:].split("  ")[0] for line in lines]
    assert checks == [
        *("versions", "open files", "settings"),
        *("folder", "file system", "hard links", "free space", "fsync", "journal"),
        *("list", "write", "read", "records", "multipart", "list parts"),
        *("abort", "list multiparts", "delete"),
        *("conditional writes", "checksums", "clock", "round trip"),
        *("upload", "download", "checkpoint"),
    ]
    assert tree(folder) == {}
    assert stored(s3_url) == ([], [])


def test_copies_are_tried_when_files_are_to_be_published(
    folder: Path, s3_url: str, call: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nobody needs a warning about a store that cannot copy."""
    folder.mkdir()
    assert "copy" not in call(folder, s3_url)[1]
    monkeypatch.setenv("CKPT_ASYNC_PUBLISH_COPIES", "true")
    code, found = call(folder, s3_url)
    assert (code, found["copy"]["level"]) == (0, "ok")
    assert stored(s3_url) == ([], [])


def test_a_live_trainer_is_not_disturbed(folder: Path, s3_url: str, call: Examine) -> None:
    """The doctor uses the remote that the journal names, with the endpoint that the trainer had."""
    with Uploader(folder, s3_url, rank=0, world_size=1) as uploader:
        save(uploader, 1)
        uploader.wait(1, timeout_s=60)
        code, found = call(folder)
        assert (code, levels(found)) == (0, {})
        keys, multiparts = stored(s3_url)
        assert [each for each in (*tree(folder), *keys) if "doctor" in each or "probe" in each] == []
        assert multiparts == []
        assert s3_url in found["list"]["message"]
        assert "ranks running: 0" in found["journal"]["message"]
        save(uploader, 2)
        uploader.wait(2, timeout_s=60)


def test_wrong_credentials_and_a_missing_bucket_are_reported(
    s3_url: str, call: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, found = call("s3://no-such-bucket/run")
    assert (code, levels(found)) == (1, {"list": "fail"})
    assert "create it" in found["list"]["hint"]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    code, found = call(s3_url)
    assert (code, levels(found)) == (1, {"list": "fail", "write": "fail"})
    assert "secret key" in found["list"]["hint"]


def test_an_interrupted_doctor_leaves_nothing(folder: Path, s3_url: str) -> None:
    """An init container that takes too long gets SIGTERM; a person presses Ctrl-C."""
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpt_async", "doctor", folder, s3_url, "--speed"],
        cwd=ROOT,
        env={**os.environ, "CKPT_ASYNC_MAX_BYTES_PER_S": "1000000"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        while not any(each.key.endswith("-f") for each in stored(s3_url)[1]):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60) == (b"", b"")
    finally:
        process.kill()
    assert process.returncode == 130
    assert (stored(s3_url), tree(folder)) == (([], []), {})


# --- a store with weaknesses -------------------------------------------------------------------------------


class Weak(MemoryStore):
    """A store that does not compare checksums and refuses some operations to these credentials."""

    def __init__(self, *refused: str) -> None:
        super().__init__(MemoryBucket(), url="memory://weak")
        self.refused = refused

    def _check(self, operation: str) -> None:
        if operation in self.refused:
            raise StoreError("403 AccessDenied", reason=FailureReason.AUTH, operation=operation, hint="ask")

    async def put(
        self, key: str, body: Body, checksum: Checksum, *, condition: Condition = None
    ) -> ObjectInfo:
        self._check("put")
        data = await collected(body)
        return self._store(key, data, f'"{len(data)}"', checksum)

    async def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        self._check("get")
        return await super().get(key, max_size_bytes=max_size_bytes)

    async def delete(self, keys: Sequence[str]) -> None:
        self._check("delete")
        await super().delete(keys)

    async def abort_multipart(self, key: str, upload_id: str) -> None:
        self._check("abort_multipart")
        await super().abort_multipart(key, upload_id)

    async def list_parts(self, key: str, upload_id: str) -> Sequence[StoredPart]:
        self._check("list_parts")
        return await super().list_parts(key, upload_id)

    async def list_multiparts(self, prefix: str) -> Sequence[MultipartInfo]:
        self._check("list_multiparts")
        return await super().list_multiparts(prefix)


def unfinished(store: MemoryStore) -> list[str]:
    return [each.key for each in store._bucket.uploads.values() if not each.is_completed]


@pytest.mark.parametrize(
    ("refused", "blamed", "num_left"),
    [
        ((), {}, 0),
        (("put",), {"write": "fail"}, 0),
        (("get",), {"read": "fail"}, 0),
        (("abort_multipart", "list_multiparts"), {"abort": "warn", "list multiparts": "warn"}, 0),
        (("list_parts",), {"list parts": "warn"}, 0),
        (("delete",), {"delete": "warn", "clean-up": "warn"}, 3),
    ],
)
def test_missing_permissions_are_reported_and_nothing_is_left(
    refused: tuple[str, ...],
    blamed: dict[str, str],
    num_left: int,
    call: Examine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For example, a trainer's role may not be allowed to abort multipart uploads; the one begun
    is then completed and deleted.
    """
    store = Weak(*refused)
    monkeypatch.setattr(doctor, "open_store", lambda *_, **__: store)
    code, found = call("memory://weak")
    without_checksums = {check: level for check, level in levels(found).items() if check != "checksums"}
    assert (code, without_checksums) == (int("fail" in blamed.values()), blamed)
    assert ("checksums" in levels(found)) is ("put" not in refused)
    assert (len(store._bucket.objects), unfinished(store)) == (num_left, [])


def test_a_speed_test_that_fails_leaves_nothing(
    folder: Path, call: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaking(MemoryStore):
        async def put_part(self, key: str, upload_id: str, number: int, *rest: Any) -> Any:
            if number == 3:
                raise StoreError("no", reason=FailureReason.OTHER, operation="put_part", key=key)
            return await super().put_part(key, upload_id, number, *rest)

    store = Breaking(MemoryBucket(), url="memory://breaking")
    monkeypatch.setattr(doctor, "open_store", lambda *_, **__: store)
    folder.mkdir()
    code, found = call(folder, "memory://breaking", "--speed")
    assert (code, levels(found)) == (1, {"speed": "fail"})
    assert (store._bucket.objects, unfinished(store), tree(folder)) == ({}, [], {})


@pytest.mark.parametrize(
    ("free_mib", "min_free_mib", "remote", "has_folder", "is_measured"),
    [
        (99, 36, "memory://speed/run", True, False),
        (100, 36, "memory://speed/run", True, True),
        (163, 36, "file://{tmp_path}/store/run", True, False),
        (164, 36, "file://{tmp_path}/store/run", True, True),
        (63, 0, "memory://speed/run", True, False),
        (99, 36, "memory://speed/run", False, True),
    ],
)
def test_the_speed_test_respects_min_free_bytes(
    free_mib: int,
    min_free_mib: int,
    remote: str,
    has_folder: bool,
    is_measured: bool,
    tmp_path: Path,
    call: Examine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The doctor may run beside a trainer, which must not be delayed or stopped for the sake of a measurement."""
    monkeypatch.setenv("CKPT_ASYNC_MIN_FREE_BYTES", str(min_free_mib << 20))
    monkeypatch.setattr(Folder, "space", lambda _: (free_mib << 20, 1 << 40))
    places = [tmp_path / "checkpoints"] * has_folder
    code, found = call(*places, remote.format(tmp_path=tmp_path), "--speed")
    assert (code, levels(found)) == (0, {} if is_measured else {"speed": "warn"})
    assert ("upload" in found) is is_measured
    if not is_measured:
        assert f"not measured: {free_mib}.0 MiB are free" in found["speed"]["message"]
        assert (f"min_free_bytes={min_free_mib << 20}" in found["speed"]["message"]) is (min_free_mib > 0)


class Odd(Weak):
    """A store with a clock of its own that returns other bytes, and does not answer what is asked of decisions."""

    data, ahead_s, is_silent = b"a", 0.0, False

    async def get(self, key: str, *, max_size_bytes: int) -> tuple[bytes, ObjectInfo]:
        data, info = await super().get(key, max_size_bytes=max_size_bytes)
        return (self.data if data == b"a" else data), info

    async def list(self, prefix: str, **more: Any) -> Listing:
        if self.is_silent and prefix == keys.DECISIONS:
            await asyncio.Event().wait()
        found = await super().list(prefix, **more)
        return replace(found, server_time=found.server_time + self.ahead_s)

    async def copy(self, source: str, etag: str, key: str) -> None:
        await super().copy(source, etag, key)
        copy = self._bucket.objects[key]
        self._bucket.objects[key] = replace(copy, data=b"x")


@pytest.mark.parametrize(
    ("oddity", "check", "level", "says"),
    [
        ({"data": b"b"}, "read", "fail", "different bytes"),
        ({"ahead_s": 100.0}, "clock", "warn", "s behind the store's"),
        ({"ahead_s": -100.0}, "clock", "warn", "s ahead of the store's"),
        ({"is_silent": True}, "records", "warn", "no answer within"),
        ({}, "copy", "fail", "the copy has different bytes"),
    ],
)
def test_what_is_odd_about_a_store_is_said(
    oddity: Json, check: str, level: str, says: str, call: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Odd()
    for name, value in oddity.items():
        setattr(store, name, value)
    monkeypatch.setattr(doctor, "open_store", lambda *_, **__: store)
    monkeypatch.setattr("ckpt_async.doctor.trial.RECORDS_S", 0.05)
    monkeypatch.setenv("CKPT_ASYNC_PUBLISH_COPIES", str(check == "copy").lower())
    code, found = call("memory://weak")
    assert (code, levels(found)) == (int(level == "fail"), {check: level, "checksums": "warn"})
    assert says in found[check]["message"]


def test_upload_and_download_are_told_apart(call: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = iter([*[0.0] * 2 * doctor.NUM_SAMPLES, 0.0, 2.0, 2.0, 3.0])  # round trips are timed first
    clocks = SimpleNamespace(time=time.time, perf_counter=times_s.__next__)
    monkeypatch.setattr("ckpt_async.doctor.trial.time", clocks)
    found = call("memory://speed/run", "--speed")[1]
    assert found["upload"]["message"] == "64.0 MiB at 32.0 MiB/s"
    assert found["download"]["message"] == "64.0 MiB at 64.0 MiB/s"


def test_a_record_that_cannot_be_read_is_named(folder: Path, tmp_path: Path, call: Examine) -> None:
    train(folder, f"file://{tmp_path}/run", 1)
    (decision,) = (tmp_path / "run" / keys.DECISIONS).iterdir()
    decision.write_bytes(b"nonsense")
    code, found = call(folder)
    assert (code, levels(found)) == (0, {"records": "warn"})
    assert found["records"]["message"].startswith(f"cannot be read: {keys.DECISIONS}{decision.name}: ")


# --- the folder --------------------------------------------------------------------------------------------


def test_a_missing_folder_is_checked_in_its_parent_and_not_created(tmp_path: Path, call: Examine) -> None:
    code, found = call(tmp_path / "a/b", f"file://{tmp_path}/store/run", "--speed")
    assert (code, levels(found)) == (0, {})
    assert found["folder"]["message"] == f"{tmp_path}/a/b can be created in {tmp_path}"
    assert found["upload"]["message"].startswith("64.0 MiB at ")
    assert tree(tmp_path) == {}


def test_an_existing_folder_and_remote_are_unchanged(folder: Path, tmp_path: Path, call: Examine) -> None:
    remote = tmp_path / "store/run"
    train(folder, f"file://{remote}", 1, 2)
    before = tree(tmp_path)
    code, found = call(folder)
    assert (code, levels(found), tree(tmp_path)) == (0, {}, before)
    assert "last committed step 2" in found["backlog"]["message"]
    code, found = call(folder, f"file://{tmp_path}/store/other")
    assert (code, levels(found), tree(tmp_path)) == (0, {"remote": "warn"}, before)


def test_what_an_sftp_server_does_not_promise_is_said(tmp_path: Path, sftp_url: str, call: Examine) -> None:
    """This includes folders that do not exist yet."""
    code, found = call(tmp_path, f"{sftp_url}/run")
    assert (code, levels(found)) == (0, {"conditional writes": "warn", "store": "warn"})
    assert "publish_copies is refused" in found["store"]["message"]  # the last of several findings
    assert "read back" in found["checksums"]["message"]
    assert stored(f"{sftp_url}/run") == ([], [])


@pytest.mark.parametrize(("kind", "level"), [("nfs4", "ok"), ("fuse.sshfs", "warn")])
def test_the_file_system_of_a_remote_folder_is_told(
    tmp_path: Path, call: Examine, monkeypatch: pytest.MonkeyPatch, kind: str, level: str
) -> None:
    monkeypatch.setattr("ckpt_async.stores.directory.filesystem_of", lambda *_: kind)
    code, found = call(tmp_path / "folder", f"file://{tmp_path}/run")
    assert (code, found["conditional writes"]["level"]) == (0, level)
    assert kind in found["conditional writes" if level == "ok" else "store"]["message"]


@pytest.mark.parametrize("at", ["/proc/nowhere", "/etc/passwd"])
def test_an_unwritable_folder_or_remote_is_reported(at: str, call: Examine) -> None:
    code, found = call(at, f"file://{at}/store")
    assert (code, levels(found)) == (1, {"folder": "fail", "write": "fail"})


def test_a_tmpfs_folder_is_a_warning(call: Examine) -> None:
    filesystem = filesystem_of(Path("/dev/shm"))
    assert call("/dev/shm")[1]["file system"]["level"] == ("warn" if filesystem == "tmpfs" else "ok")


@pytest.mark.fault("F21")
def test_a_network_file_system_fails_with_the_uploaders_message(
    folder: Path, call: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_async.local.folder.filesystem_of", lambda *_: "nfs4")
    folder.mkdir()
    code, found = call(folder)
    assert (code, levels(found)) == (1, {"folder": "fail"})
    assert "file system (nfs4) that is not known to be local" in found["folder"]["message"]
    assert tree(folder) == {}


def test_a_damaged_or_newer_journal_is_reported(folder: Path, call: Examine) -> None:
    path = folder / ".ckpt-async" / keys.journal_name(0)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no journal" * 1000)
    code, found = call(folder)
    assert (code, levels(found)) == (1, {"journal": "fail"})
    assert "rebuilds it from the manifests" in found["journal"]["hint"]


def test_of_a_watched_folder_the_watcher_s_journal_is_looked_at(
    folder: Path, call: Examine, tmp_path: Path
) -> None:
    folder.mkdir()
    state, run = folder.parent / f".{folder.name}.ckpt-async", f"file://{tmp_path}/watched"
    (state / "ckpt").mkdir(parents=True)
    (state / "ckpt/step-7.bin").write_bytes(b"x")
    with Uploader(state, run, rank=0, world_size=1) as uploader:
        uploader.enqueue(state / "ckpt/step-7.bin", 7)
        uploader.seal(7)
        uploader.wait(7, timeout_s=30)
        running = call(folder)[1]
    assert running["journal"]["message"] == (
        f"a watcher's, in {str(state)!r}: can be read and written; a watcher is running"
    )
    code, found = call(folder)
    assert (code, found["journal"]["message"].endswith("no watcher is running")) == (0, True)
    assert "last committed step 7" in found["backlog"]["message"]
    assert found["write"]["level"] == "ok", "its remote is the one that is tried"


def test_the_journals_of_all_kinds_count(
    folder: Path, tmp_path: Path, call: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(folder, f"file://{tmp_path}/run", 1)
    of_kind, id_ = Folder(folder, kind="weights"), CheckpointId(1, 2)
    journal, lock = Journal(of_kind, 0), RankLock(of_kind, 0)
    shard = Shard("a", "step-2/a", FileIdentity(1, 1, 10, 1), True)
    journal.append([Enqueued(id_, "step-2", shard), Sealed(id_, "step-2", 1)])
    found = call(folder)[1]
    assert (found["backlog"]["level"], "`ckpt-async drain`" in found["backlog"]["hint"]) == ("warn", True)
    assert "kind weights: nothing committed yet; step 2" in found["backlog"]["message"]
    lock.acquire()
    found = call(folder)[1]
    assert (found["backlog"]["level"], "ranks running: 0" in found["journal"]["message"]) == ("ok", True)
    journal.append([Failed(id_, "a", FailureReason.OTHER, "403")])
    assert "`ckpt-async status` shows why" in call(folder)[1]["backlog"]["hint"]
    lock.release()
    journal.close()
    may = os.access  # root may write everywhere

    def access(path: Path, mode: int) -> bool:
        return may(path, mode) and "kinds" not in Path(path).parts

    monkeypatch.setattr(doctor.os, "access", access)
    code, found = call(folder)
    assert (code, found["journal"]["message"]) == (1, "cannot be written by this user")


def test_the_remote_of_a_folder_is_that_of_the_run_also_if_it_has_only_kinds(
    folder: Path, tmp_path: Path
) -> None:
    with Uploader(folder, f"file://{tmp_path}/run", rank=0, world_size=1, kind="weights"):
        pass
    facts = doctor.examine(folder, None, StoreOptions(), {})
    assert facts.journal is not None
    assert facts.remote is not None
    assert facts.journal.remote == facts.remote.url == f"file://{tmp_path}/run"


def test_what_is_given_takes_precedence_over_what_the_journal_records() -> None:
    recorded = RemoteAddress("s3://b/run", "http://here:9000", "eu-west-1", put_args={"Tagging": "a=b"})
    given = StoreOptions(endpoint_url="http://there:9000", region="us-east-1", profile="mine")
    found = doctor._as_recorded(recorded, given, {})
    assert found == ("s3://b/run", replace(given, put_args={"Tagging": "a=b"}))
    kept = doctor._as_recorded(recorded, StoreOptions(), {})
    assert (kept[1].endpoint_url, kept[1].region) == ("http://here:9000", "eu-west-1")


# --- the environment and the command line ------------------------------------------------------------------


def test_variables_without_effect_are_named(call: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_ASYNC_NUM_CONCURRENT_UPLOADS", "4")
    monkeypatch.setenv("CKPT_ASYNC_LAUNCH_ID", "a")
    monkeypatch.setenv("CKPT_ASYNC_S3_SSE_C_KEY_FILE", "/a")
    monkeypatch.setenv("CKPT_ASYNC_TLS_PROCESSES", "0")
    monkeypatch.setenv("CKPT_ASYNC_WEBHOOK_SECRET", "a")
    code, found = call()
    assert (code, levels(found)) == (0, {})
    assert found["settings"]["message"] == "CKPT_ASYNC_NUM_CONCURRENT_UPLOADS"
    monkeypatch.setenv("CKPT_ASYNC_SERVICE_HOST", "10.0.0.1")
    assert levels(call()[1]) == {"settings": "warn"}
    monkeypatch.delenv("CKPT_ASYNC_SERVICE_HOST")
    for name, value in (("CKPT_ASYNC_UPLOAD_TIMEOUT", "9"), ("CKPT_ASYNC_UPLOAD_TIMEOUT_S", "soon")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            code, found = call()
        assert (code, levels(found)) == (1, {"settings": "fail"})
        assert name in found["settings"]["message"]


def test_a_low_open_file_limit_is_a_warning(call: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (256, 4096))
    assert call()[1]["open files"]["level"] == "warn"


def test_connections_are_counted_for_the_open_file_limit() -> None:
    host = doctor.examine(None, None, StoreOptions(), {"CKPT_ASYNC_MAX_CONCURRENT_UPLOADS": "100"}).host
    assert host.num_requests == 100 + CONTROL_REQUESTS


def test_a_proxy_on_the_way_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    options = StoreOptions(endpoint_url="http://store.example:9000", region="us-east-1")
    for name, value, has_proxy in (("http_proxy", "http://p:1", True), ("no_proxy", "store.example", False)):
        monkeypatch.setenv(name, value)
        assert doctor._has_proxy("s3://b/run", options, os.environ) is has_proxy
    assert doctor._has_proxy("file:///run", StoreOptions(), os.environ) is False


@pytest.mark.parametrize(
    "arguments",
    [
        ("a", "b"),
        ("s3://a/b", "s3://c/d"),
        ("nonsense://a",),
        ("--checkpoint-bytes", "0"),
        ("--checkpoint-bytes", "a lot"),
    ],
)
def test_an_invalid_command_line_is_rejected(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *arguments]) == 2


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("1", 1), ("500MB", 5 * 10**8), ("1.5GiB", 3 << 29), ("2k", 2000), ("1TiB", 1 << 40)],
)
def test_human_readable_sizes_are_parsed(text: str, size_bytes: int) -> None:
    assert size_argument(text) == size_bytes


def test_json_has_the_documented_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(tmp_path), f"file://{tmp_path}/run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    documented = (ROOT / "docs/cli.md").read_text()
    fields = {*told, *told["findings"][0], *told["measured"]}
    assert {each for each in fields if f"`{each}`" not in documented} == set()


def test_a_folder_that_is_its_own_remote_is_refused_as_by_the_uploader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", str(tmp_path), f"file://{tmp_path}"]) == 2
    assert "is also the remote" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
