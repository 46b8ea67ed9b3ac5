"""Folders that others may write to: what they put there is neither followed nor obeyed, and no lock is theirs."""

import asyncio
import contextlib
import logging
import os
import re
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader, cli
from ckpt_async.core.keys import PRIVATE
from ckpt_async.core.model import RemoteAddress
from ckpt_async.errors import JournalError, RunnerError, SettingsError
from ckpt_async.local import journals
from ckpt_async.stores import StoreOptions, check_allowed
from ckpt_async.stores.directory import DirectoryStore

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "folder"


@pytest.fixture
def umask_0() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def remote_of(folder: Path) -> Path:
    return folder.with_name(f"remote-of-{folder.name}")


def opened(folder: Path, remote: object = None, **more: Any) -> Uploader:
    return Uploader(folder, f"file://{remote or remote_of(folder)}", **{"rank": 0, "world_size": 1} | more)


def save(uploader: Uploader, *steps: int, mode: int = 0o644) -> None:
    for step in steps:
        path = uploader.folder / f"step-{step}" / "model.pt"
        path.parent.mkdir()
        path.write_bytes(b"weights")
        path.chmod(mode)
        uploader.enqueue(path, step)
        uploader.seal(step)


def saved(folder: Path, *steps: int, **more: int) -> None:
    with opened(folder) as uploader:
        save(uploader, *steps, **more)


def left(folder: Path, remote: object = None) -> None:
    """Leave a checkpoint that waits for another rank."""
    uploader = opened(folder, remote, world_size=2, generation=1, close_grace_s=0.1, on_error="warn")
    save(uploader, 1)
    uploader.close()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def num_committed(folder: Path) -> int:
    return len(list((remote_of(folder) / "ckpt").iterdir()))


# --- the private folder ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("umask_0")
def test_a_private_folder_is_for_its_user_alone(folder: Path) -> None:
    saved(folder, 1)
    assert mode_of(folder / PRIVATE) == 0o700
    assert mode_of(folder / PRIVATE / "rank-00000.lock") == 0o600


@pytest.mark.fault("F127")
@pytest.mark.parametrize(
    "name", ["host.json", "rank-00000.lock", "rank-00000.log", "reserve", "journal-00000.log", "spool"]
)
def test_a_planted_link_is_refused_and_not_followed(folder: Path, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    if name == "spool":
        victim.mkdir()
    else:
        victim.write_text("precious")
    (folder / PRIVATE).mkdir(parents=True)
    (folder / PRIVATE / name).symlink_to(victim)
    with pytest.raises(JournalError, match=re.escape(name)):
        opened(folder, runner="process")
    assert not list(victim.iterdir()) if name == "spool" else victim.read_text() == "precious"


def test_a_link_in_place_of_the_private_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    (tmp_path / "victim").mkdir()
    (folder / PRIVATE).symlink_to(tmp_path / "victim")
    with pytest.raises(JournalError, match="not a folder"):
        opened(folder)
    assert not list((tmp_path / "victim").iterdir())


@pytest.mark.fault("F127")
def test_a_group_that_may_write_loses_that_right(folder: Path) -> None:
    saved(folder, 1)
    (folder / PRIVATE).chmod(0o2770)  # as Kubernetes does for fsGroup
    saved(folder, 2)
    assert mode_of(folder / PRIVATE) == 0o700
    assert num_committed(folder) == 2


def test_what_everybody_may_write_to_is_refused(folder: Path) -> None:
    saved(folder, 1)
    (folder / PRIVATE).chmod(0o777)
    with pytest.raises(JournalError, match="everybody may write") as refused:
        opened(folder)
    assert "chmod go-w" in refused.value.hint
    assert cli.main(["drain", str(folder)]) == 1


@pytest.mark.fault("F127")
def test_a_replaced_private_folder_is_left_alone(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    uploader = opened(folder, on_error="warn")
    (folder / PRIVATE).rename(tmp_path / "away")
    (folder / PRIVATE).symlink_to(victim)
    time.sleep(1.5)  # the engine renews its mark once a second
    with pytest.raises(JournalError, match="replaced"):
        save(uploader, 1)
    assert not list(victim.iterdir())
    (folder / PRIVATE).unlink()
    (tmp_path / "away").rename(folder / PRIVATE)
    uploader.close()


# --- another user's --------------------------------------------------------------------------------------------


@pytest.mark.fault("F127")
@as_root
def test_another_users_folder_is_shown_but_not_obeyed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(folder, 1, 2, 3)
    saved(tmp_path / "own", 1, 2, 3)
    os.chown(folder / PRIVATE, NOBODY, NOBODY)
    assert cli.main(["status", str(folder)]) == 0
    assert cli.main(["drain", str(folder)]) == 1
    assert f"sudo -u nobody ckpt-async drain {folder}" in capsys.readouterr().err
    with pytest.raises(JournalError, match="belongs to user nobody"):
        opened(folder)
    assert cli.main(["sweep", str(folder), str(tmp_path / "own"), "--keep", "last=1"]) == 1
    assert num_committed(folder) == 3
    assert num_committed(tmp_path / "own") == 1


@pytest.mark.fault("F127")
@as_root
def test_another_users_node_process_is_not_talked_to(folder: Path) -> None:
    saved(folder, 1)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / PRIVATE / "node.sock"))
    os.seteuid(NOBODY)
    try:
        listener.listen()
    finally:
        os.seteuid(0)
    with listener, pytest.raises(RunnerError, match=f"belongs to user {NOBODY}"):
        opened(folder, runner="process", node_shared=True)


# --- remotes that may be touched -------------------------------------------------------------------------------


@pytest.mark.fault("F128")
def test_drain_touches_only_the_remotes_that_it_may(folder: Path, tmp_path: Path) -> None:
    left(folder)
    before = sorted(remote_of(folder).rglob("*"))
    others = ["--only-remote", f"file://{remote_of(folder)}-2", "--only-remote", "s3://bucket"]
    assert cli.main(["drain", str(folder), "--grace", "0", *others]) == 2
    assert sorted(remote_of(folder).rglob("*")) == before
    ours = ["--only-remote", f"file://{tmp_path}"]
    assert cli.main(["drain", str(folder), "--grace", "0", *others, *ours]) == 4


@pytest.mark.fault("F128")
def test_a_link_does_not_widen_what_may_be_touched(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "allowed").mkdir()
    (tmp_path / "allowed" / "way").symlink_to(tmp_path)
    remote_of(folder).mkdir()
    left(folder, f"{tmp_path}/allowed/way/{remote_of(folder).name}")
    allowed = ["--only-remote", f"file://{tmp_path}/allowed"]
    assert cli.main(["drain", str(folder), "--grace", "0", *allowed]) == 2
    assert "may be touched" in capsys.readouterr().err


@pytest.mark.fault("F128")
def test_a_sweep_leaves_other_remotes_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(folder, 1, 2, 3)
    saved(tmp_path / "own", 1, 2, 3)
    monkeypatch.setenv("CKPT_ASYNC_ONLY_REMOTES", f"s3://bucket file://{remote_of(tmp_path / 'own')}")
    assert cli.main(["sweep", str(folder), str(tmp_path / "own"), "--keep", "last=1"]) == 1
    assert num_committed(folder) == 3
    assert num_committed(tmp_path / "own") == 1


_MINE = "https://mine.blob.core.windows.net"
_OTHER = "https://other.blob.core.windows.net"


@pytest.mark.fault("F128")
@pytest.mark.parametrize(
    ("url", "endpoint", "is_allowed"),
    [
        ("s3://bucket/team/run", None, True),
        ("s3://bucket/team", "http://minio:9000", True),
        ("s3://bucket/team", "http://elsewhere:9000", False),
        ("s3://bucket/team-2/run", None, False),
        ("gs://bucket/team/run", None, False),
        ("gs://weights/run", "http://elsewhere", False),
        ("abfss://weights@mine.dfs.core.windows.net/run", _MINE, True),
        ("abfss://weights@other.dfs.core.windows.net/run", _OTHER, False),
        ("https://other.blob.core.windows.net/weights/run", _OTHER, False),
        ("az://weights/run", _MINE, True),
        ("az://weights/run", _OTHER, False),
    ],
)
def test_remotes_must_be_named(url: str, endpoint: str | None, is_allowed: bool) -> None:
    env = {"AWS_ENDPOINT_URL": "http://minio:9000", "AZURE_STORAGE_ACCOUNT": "mine"}
    only = (
        "file:///elsewhere s3://bucket/team gs://weights az://weights"
        f" abfss://weights@mine.dfs.core.windows.net {_MINE}/weights"
    )
    address = RemoteAddress(url, endpoint)
    check_allowed(address, "", StoreOptions(), env=env)
    with contextlib.nullcontext() if is_allowed else pytest.raises(SettingsError, match="touched"):
        check_allowed(address, only, StoreOptions(), env=env)
    check_allowed(address, url, StoreOptions(endpoint_url=endpoint), env={})


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/proc/self/environ")])
def test_a_journal_that_is_no_file_is_not_waited_for(folder: Path, put: Callable[[Path], None]) -> None:
    """Another user's folder beside the others kept a sweeper's metrics and page from ever answering."""
    (folder / PRIVATE).mkdir(parents=True)
    put(folder / PRIVATE / "journal-00000.log")
    with pytest.raises(JournalError, match="journal-00000"):
        journals.read(folder)


# --- locks -----------------------------------------------------------------------------------------------------


@pytest.mark.fault("F127")
@as_root
def test_readers_of_a_remote_cannot_lock_it() -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        folder = Path(place) / "folder"
        saved(folder, 1)
        own = remote_of(folder) / PRIVATE / "tmp"
        (own / "readable").touch()
        if locked_by_nobody(own / "readable"):
            pytest.skip("another user cannot read files of this one here")
        assert locked_by_nobody(own / "lock") == 66  # cannot be opened


def locked_by_nobody(path: Path) -> int:
    command = ["flock", "-n", str(path), "true"]
    return subprocess.run(command, user=NOBODY, group=NOBODY, extra_groups=[], check=False).returncode


def test_whoever_may_write_to_a_remote_may_lock_it(folder: Path) -> None:
    saved(folder, 1)
    own = remote_of(folder) / PRIVATE / "tmp"
    own.chmod(0o2775)
    saved(folder, 2)
    assert mode_of(own / "lock") == 0o660


@pytest.mark.fault("F127")
def test_a_wait_for_a_ranks_lock_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(folder, 1)
    _assert_logged(folder / PRIVATE / "rank-00000.lock", lambda: saved(folder, 2), caplog)


def test_a_wait_for_a_remotes_lock_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(folder, 1)
    lock = remote_of(folder) / PRIVATE / "tmp" / "lock"
    _assert_logged(lock, lambda: asyncio.run(DirectoryStore(remote_of(folder)).open()), caplog)


def _assert_logged(lock: Path, work: Callable[[], None], caplog: pytest.LogCaptureFixture) -> None:
    holder = subprocess.Popen(["flock", str(lock), "sleep", "60"], start_new_session=True)
    try:
        while not subprocess.run(["flock", "-n", str(lock), "true"]).returncode:
            time.sleep(0.01)
        working = threading.Thread(target=work)
        working.start()
        time.sleep(1)
        [told] = [each for each in caplog.records if str(lock) in each.getMessage()]
        assert told.levelno == logging.WARNING
        assert f"={holder.pid}" in told.getMessage()
    finally:
        os.killpg(holder.pid, 9)
        holder.wait()
        working.join()


# --- rights of what is uploaded --------------------------------------------------------------------------------


@pytest.mark.usefixtures("umask_0")
def test_a_copy_in_a_folder_has_no_wider_rights(folder: Path) -> None:
    saved(folder, 1, mode=0o600)
    saved(folder, 2, mode=0o640)
    shards = sorted((remote_of(folder) / "ckpt").rglob("model.pt"))
    assert [mode_of(each) for each in shards] == [0o600, 0o640]


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def for_all() -> Iterator[Path]:
    """A folder in which every user may write, and so at its remote."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o777)
        folder = Path(path) / "folder"
        for each in (folder, remote_of(folder)):
            each.mkdir()
            each.chmod(0o777)
        yield folder


@pytest.mark.fault("F158")
@as_root
@pytest.mark.parametrize("name", ["", "rank-00000.lock"])
def test_what_another_user_left_is_named_with_its_owner(for_all: Path, name: str) -> None:
    """It was the folder above that was named, as if it were not writable."""
    with opened(for_all, for_all.with_name("another")):
        pass
    if name:
        os.chown(for_all / PRIVATE, NOBODY, NOBODY)
    with as_nobody(), pytest.raises(JournalError, match=f"/{name or PRIVATE}' belongs to user root"):
        opened(for_all)


@pytest.mark.fault("F158")
@as_root
def test_a_file_that_may_not_be_linked_is_told_once(for_all: Path, caplog: pytest.LogCaptureFixture) -> None:
    if Path("/proc/sys/fs/protected_hardlinks").read_text().strip() != "1":
        pytest.skip("fs.protected_hardlinks is off")
    paths = [for_all / f"{number}.pt" for number in range(3)]
    for path in paths:
        path.write_bytes(b"weights")
    with as_nobody(), opened(for_all) as uploader:
        for step, path in enumerate(paths):
            uploader.enqueue(path, step)
            uploader.seal(step)
    assert num_committed(for_all) == 3
    assert caplog.text.count("not_linked") == 1
    assert str(paths[0]) in caplog.text
