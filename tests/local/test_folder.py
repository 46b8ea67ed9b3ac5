"""The checkpoint folder on a real file system: nothing outside it is touched, and a changed file is detected."""

import errno
import fcntl
import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_async.core.model import FileIdentity
from ckpt_async.errors import (
    FailureReason,
    FolderInUseError,
    InvalidNameError,
    InvalidShardError,
    JournalError,
    SourceError,
)
from ckpt_async.filesystems import parse_mountinfo
from ckpt_async.local import folder as files
from ckpt_async.local import host_mark
from ckpt_async.local.durable import fsync_path, point_symlink, write_durably
from ckpt_async.local.folder import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "checkpoints")


def write(folder: Folder, name: str, content: bytes = b"content") -> Path:
    path = folder.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def link(folder: Folder, source: str, spool: str) -> tuple[FileIdentity, bool]:
    """Link one file to a path below `.ckpt-async/`."""
    below, _, name = spool.rpartition("/")
    [linked] = folder.link([(source, name)], below)
    return linked


# --- what may be enqueued ------------------------------------------------------------------------------------


@pytest.mark.fault("F27")
@pytest.mark.parametrize("kind", ["symlink", "folder symlink", "fifo", "socket", "device"])
def test_only_regular_files_are_walked_and_linked(folder: Folder, tmp_path: Path, kind: str) -> None:
    """A symlink could lead to /etc/shadow, and a FIFO would hang the trainer (fault F27)."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "x").write_bytes(b"secret")
    path = folder.path / "x"
    match kind:
        case "symlink":
            path.symlink_to(secret / "x")
        case "folder symlink":
            path.symlink_to(secret)
        case "fifo":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
        case _:
            try:
                os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3))
            except PermissionError:
                pytest.skip("making a device needs root")
    with pytest.raises(InvalidShardError):
        folder.walk("x")
    with pytest.raises(InvalidShardError):
        link(folder, "x", "spool/x")
    assert not (folder.private / "spool" / "x").exists()


@pytest.mark.fault("F27")
def test_symlink_on_the_way_is_not_followed(folder: Folder, tmp_path: Path) -> None:
    """Someone may replace a folder with a symlink between the check and the use (I10)."""
    outside = tmp_path / "outside"
    outside.mkdir()
    victim = outside / "a"
    victim.write_bytes(b"theirs")
    (folder.path / "step-1").symlink_to(outside)
    facts = victim.stat()
    identity = FileIdentity(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)
    with pytest.raises(InvalidShardError):
        link(folder, "step-1/a", "spool/a")
    with pytest.raises((SourceError, OSError)):
        os.close(folder.open_source("step-1/a", None, identity))
    assert folder.remove_source("step-1/a", identity)
    assert victim.exists()
    assert not folder.is_same("step-1/a", identity)


@pytest.mark.parametrize(
    "path", ["..", ".", "../x", "sub/../../x", "/etc/passwd", ".ckpt-async/journal.log", ""]
)
def test_path_outside_the_folder_is_refused(
    folder: Folder, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes our own private files: a checkpoint that contained the journal would be a loop."""
    monkeypatch.chdir(folder.path)
    with pytest.raises((InvalidShardError, InvalidNameError)):
        folder.relative(path)


def test_path_through_a_symlink_to_the_folder_is_inside(folder: Folder, tmp_path: Path) -> None:
    """Clusters often provide scratch space through a symlink."""
    (tmp_path / "alias").symlink_to(folder.path)
    write(folder, "step-1/a")
    assert folder.relative(tmp_path / "alias" / "step-1" / "a") == "step-1/a"


@pytest.mark.parametrize("path", ["sub/../x/a", "x//a", "x/./a", "./x/a", "x/a/"])
def test_paths_are_normalized(folder: Folder, path: str) -> None:
    """Configurations commonly build paths like `os.path.join(folder, "../run-a/x")`."""
    assert folder.relative(f"{folder.path}/{path}") == "x/a"
    assert folder.relative(os.path.relpath(f"{folder.path}/{path}")) == "x/a"
    assert folder.relative(f"{folder.path}/../checkpoints/{path}") == "x/a"


def test_walk_finds_every_file_in_order(folder: Folder) -> None:
    """All ranks and all restarts must see the same shards."""
    for name in ("s/b", "s/a/c", "s/a/b"):
        write(folder, name)
    assert folder.walk("s") == ["s/a/b", "s/a/c", "s/b"]
    assert folder.walk("s/b") == ["s/b"]
    with pytest.raises(InvalidShardError, match="does not exist"):
        folder.walk("missing")
    write(folder, "s/a b")
    with pytest.raises(InvalidNameError):
        folder.walk("s")


# --- links and identity --------------------------------------------------------------------------------------


def test_hard_link_survives_deletion_of_the_original(folder: Folder) -> None:
    """transformers rotates checkpoints before `on_save`, so the bytes must still be there."""
    path = write(folder, "step-1/a", b"bytes")
    identity, is_linked = link(folder, "step-1/a", "spool/rank-00000/x/a")
    assert is_linked
    path.unlink()
    descriptor = folder.open_source("step-1/a", "spool/rank-00000/x/a", identity)
    assert os.read(descriptor, 10) == b"bytes"
    os.close(descriptor)


def test_a_link_is_what_was_enqueued_with_another_inode(folder: Folder, tmp_path: Path) -> None:
    """Not every file system keeps inode numbers, and nothing replaces a link."""
    write(folder, "step-1/a", b"bytes")
    identity, _ = link(folder, "step-1/a", "spool/rank-00000/x/a")
    subprocess.run(["cp", "-a", folder.path, tmp_path / "copy"], check=True)
    copied = Folder(tmp_path / "copy")
    descriptor = copied.open_source("step-1/a", "spool/rank-00000/x/a", identity)
    assert os.read(descriptor, 10) == b"bytes"
    os.close(descriptor)
    with pytest.raises(SourceError):  # a file of the user's own may have been replaced
        copied.open_source("step-1/a", None, identity)
    changed = copied.private / "spool/rank-00000/x/a"
    os.utime(changed, ns=(0, identity.mtime_ns + 1))
    with pytest.raises(SourceError):
        copied.open_source("step-1/a", "spool/rank-00000/x/a", identity)


def test_many_files_are_linked(folder: Folder) -> None:
    """Files from several folders are linked in one call, each under its own name."""
    files = [(f"s/{name}", name) for name in ("a", "b/c", "b/d", "e")]
    for source, name in files:
        write(folder, source, name.encode())
    linked = folder.link(files, "spool/x")
    for (source, name), (identity, is_linked) in zip(files, linked, strict=True):
        assert is_linked
        assert (folder.private / "spool/x" / name).read_bytes() == name.encode()
        assert folder.is_same(source, identity)


@pytest.mark.parametrize("trouble", ["symlink", "missing", "folder", "folder is a symlink"])
def test_linking_is_all_or_nothing(folder: Folder, tmp_path: Path, trouble: str) -> None:
    """A refused `enqueue` must hold no disk space, and links made before it must stay."""
    write(folder, "s/a")
    link(folder, "s/a", "spool/x/before")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/b").write_bytes(b"secret")
    bad = folder.path / "s/b"
    match trouble:
        case "symlink":
            bad.symlink_to(tmp_path / "outside/b")
        case "folder":
            bad.mkdir()
        case "folder is a symlink":
            (folder.path / "t").symlink_to(tmp_path / "outside")
        case _:
            pass
    source = "t/b" if trouble == "folder is a symlink" else "s/b"
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidShardError, match=source):
        folder.link([("s/a", "a"), (source, "b")], "spool/x")
    assert os.listdir(folder.private / "spool/x") == ["before"]
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_leftover_link_is_replaced(folder: Folder) -> None:
    """A crash between the link and the journal row leaves a link behind: the next save must neither fail nor read the
    old file.
    """
    write(folder, "old", b"old")
    link(folder, "old", "spool/a")
    write(folder, "new", b"new")
    link(folder, "new", "spool/a")
    assert (folder.private / "spool/a").read_bytes() == b"new"


@pytest.mark.fault("F11")
@pytest.mark.parametrize("how", ["overwrite", "truncate", "append", "same size", "replace", "delete"])
def test_changed_file_is_detected(folder: Folder, how: str) -> None:
    """A hard link does not protect against in-place writes, and mixed bytes must never be committed."""
    path = write(folder, "a", b"content")
    os.utime(path, ns=(10**18, 10**18))
    identity, _ = link(folder, "a", "spool/a")
    assert folder.is_same("a", identity)
    match how:
        case "overwrite":
            path.write_bytes(b"other content")
        case "truncate":
            os.truncate(path, 3)
        case "append":
            with path.open("ab") as file:
                file.write(b"more")
        case "same size":
            path.write_bytes(b"CONTENT")
        case "replace":
            write(folder, "b", b"content").replace(path)
        case _:
            path.unlink()
    assert not folder.is_same("a", identity)
    reason = FailureReason.SOURCE_MISSING if how == "delete" else FailureReason.SOURCE_CHANGED
    with pytest.raises(SourceError) as caught:
        folder.open_source("a", None, identity)
    assert reason is caught.value.reason
    if how in {"replace", "delete"}:  # the link still holds what was enqueued
        os.close(folder.open_source("a", "spool/a", identity))
        return
    with pytest.raises(SourceError):
        folder.open_source("a", "spool/a", identity)


def test_remove_source_leaves_another_file_at_the_same_path(folder: Folder) -> None:
    """After a restart the trainer may have saved the same step again, and that file is not ours to delete."""
    path = write(folder, "step-1/a")
    identity, _ = link(folder, "step-1/a", "spool/a")
    path.unlink()
    write(folder, "step-1/a", b"another")
    assert not folder.remove_source("step-1/a", identity)
    assert path.read_bytes() == b"another"


@pytest.mark.parametrize("then", ["", "written again", "no hard links"])
def test_remove_source_leaves_a_file_that_is_written_to_the_path_at_that_moment(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Retention of an older launch may run just as a restarted trainer saves the same step again."""
    path = write(folder, "step-1/a", b"old")
    identity, _ = link(folder, "step-1/a", "spool/1/a")
    move, make_link = os.rename, os.link

    def just_before(act: Callable[..., None], content: bytes) -> Callable[..., None]:
        def racing(*arguments: Any, **more: Any) -> None:
            (path.parent / "new").write_bytes(content)
            (path.parent / "new").replace(path)
            act(*arguments, **more)

        return racing

    def refuse(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(os, "rename", move)
        raise PermissionError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "rename", just_before(move, b"new"))
    if then:
        monkeypatch.setattr(
            os, "link", refuse if then == "no hard links" else just_before(make_link, b"newer")
        )
    assert not folder.remove_source("step-1/a", identity)
    assert path.read_bytes() == (b"newer" if then == "written again" else b"new")
    assert not list(folder.private.glob("removing-*"))


def test_remove_source_can_keep_the_folder_for_a_restarted_trainer(folder: Folder) -> None:
    path = write(folder, "step-1/r0/a")
    identity, _ = link(folder, "step-1/r0/a", "spool/1/a")
    assert folder.remove_source("step-1/r0/a", identity, keeps_folders=True)
    assert path.parent.is_dir()
    assert not path.exists()


def test_remove_source_removes_empty_folders_only(folder: Folder) -> None:
    """Other ranks may still have files there; the checkpoint folder itself always stays."""
    write(folder, "step-1/r0/a")
    write(folder, "step-1/r1/b")
    one, _ = link(folder, "step-1/r0/a", "spool/a")
    two, _ = link(folder, "step-1/r1/b", "spool/b")
    assert folder.remove_source("step-1/r0/a", one)
    assert not (folder.path / "step-1/r0").exists()
    assert (folder.path / "step-1/r1/b").exists()
    assert folder.remove_source("step-1/r1/b", two)
    assert not (folder.path / "step-1").exists()
    assert folder.path.exists()
    assert folder.remove_source("step-1/r1/b", two), "done again after a crash"


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP])
def test_without_links_the_original_is_kept(
    folder: Folder, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another mount inside the folder, or without hard links, protection is weaker but uploads still work."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    write(folder, "a", b"bytes")
    monkeypatch.setattr(os, "link", refuse)
    identity, is_linked = link(folder, "a", "spool/a")
    assert not is_linked
    descriptor = folder.open_source("a", None, identity)
    assert os.read(descriptor, 10) == b"bytes"
    os.close(descriptor)


def test_remove_spool_leaves_the_user_s_files(folder: Folder) -> None:
    """Only our links are removed, never the data, and an interrupted removal can be repeated."""
    path = write(folder, "a")
    link(folder, "a", "spool/x/sub/a")
    folder.remove_spool("spool/x")
    folder.remove_spool("spool/x")
    assert path.read_bytes() == b"content"
    assert not (folder.private / "spool/x").exists()


def test_a_file_moved_aside_and_put_back_is_still_walked(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention may mistake a new file for the old one: it moves the file aside, checks it, and puts it back.

    A trainer that enqueues the folder at that moment would miss the shard, and the checkpoint would be committed
    without it.
    """
    path = write(folder, "step-1/a", b"old")
    write(folder, "step-1/b")
    identity, _ = link(folder, "step-1/a", "spool/1/a")
    move = os.rename
    found: list[list[str]] = []
    trainer = threading.Thread(target=lambda: found.append(folder.walk("step-1")))

    def racing(*arguments: Any, **more: Any) -> None:
        (folder.path / "new").write_bytes(b"new")
        (folder.path / "new").replace(path)
        move(*arguments, **more)
        trainer.start()
        trainer.join(0.3)  # returns only once the file is back

    monkeypatch.setattr(os, "rename", racing)
    assert not folder.remove_source("step-1/a", identity)
    trainer.join()
    assert found == [["step-1/a", "step-1/b"]]
    assert path.read_bytes() == b"new"


def test_a_lock_held_by_a_fork_of_a_killed_process_only_delays(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataloader worker that was forked during a removal may outlive its trainer."""
    path = write(folder, "step-1/a")
    identity, _ = link(folder, "step-1/a", "spool/1/a")
    monkeypatch.setattr(files, "REMOVAL_S", 0.05)
    descriptor = os.open(folder.private, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert folder.walk("step-1") == ["step-1/a"]
        began = time.monotonic()
        assert folder.walk(*["step-1/a"] * 100, "step-1") == ["step-1/a"]
        assert time.monotonic() - began < 100 * files.REMOVAL_S  # one wait for all of them
        assert folder.remove_source("step-1/a", identity)
    finally:
        os.close(descriptor)
    assert not path.exists()


# --- the local symlink ---------------------------------------------------------------------------------------


@pytest.mark.fault("F20")
def test_readers_never_find_the_symlink_missing(folder: Folder) -> None:
    """Fault F20: removing and recreating the symlink leaves a moment in which a restart finds no checkpoint."""
    targets = [write(folder, f"step-{number}/a").parent for number in range(2)]
    latest = folder.path / "latest"
    point_symlink(latest, targets[0], folder.private)
    missing: list[OSError] = []
    num_reads, is_over = 0, threading.Event()

    def read() -> None:
        nonlocal num_reads
        while num_reads < 20_000 or not is_over.is_set():
            try:
                os.readlink(latest)
            except OSError as error:
                missing.append(error)
            num_reads += 1

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, 301):
        point_symlink(latest, targets[number % 2], folder.private)
    is_over.set()
    reader.join()
    assert missing == []
    assert not os.path.isabs(os.readlink(latest)), "the folder may be mounted elsewhere"
    assert sorted(os.listdir(folder.path)) == [".ckpt-async", "latest", "step-0", "step-1"]


def test_old_leftovers_of_killed_processes_are_removed(folder: Folder) -> None:
    """Every kill may leave a probe and a half-made symlink, which add up; a recent one may belong to another rank."""
    for name in ("probe-1-a", "probe-1-a.link"):
        (folder.private / name).touch()
    (folder.private / "latest.1.tmp").symlink_to("gone")
    for name in ("probe-1-a", "probe-1-a.link", "latest.1.tmp"):
        os.utime(folder.private / name, (0, 0), follow_symlinks=False)
    young = folder.private / "latest.2.tmp"
    young.symlink_to("gone")
    Folder(folder.path)
    assert sorted(os.listdir(folder.private)) == ["host.json", "latest.2.tmp", "reserve", "spool"]


def test_symlink_never_replaces_a_file(folder: Folder) -> None:
    """A file that the user calls `latest` belongs to the user."""
    path = write(folder, "latest")
    with pytest.raises(InvalidNameError, match="not a symlink"):
        point_symlink(path, folder.path / "step-1", folder.private)
    assert path.read_bytes() == b"content"


def test_the_symlink_may_be_in_a_folder_that_does_not_exist_yet(folder: Folder) -> None:
    target = write(folder, "step-1/a")
    point_symlink(folder.path / "links/new/latest", target, folder.private)
    assert (folder.path / "links/new/latest").read_bytes() == b"content"


def test_the_symlinks_folder_never_replaces_a_file(folder: Folder) -> None:
    path = write(folder, "links")
    for name in ("links/latest", "links/new/latest"):
        with pytest.raises(InvalidNameError, match="not a folder"):
            point_symlink(folder.path / name, folder.path / "step-1", folder.private)
    assert path.read_bytes() == b"content"


# --- durable writes, file systems ----------------------------------------------------------------------------


def test_durable_write_leaves_nothing_behind_when_it_fails(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old content stays complete, and no temporary file takes more space on a full disk."""
    path = write(folder, "m", b"old")

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="full"):
        write_durably(path, b"new")
    assert path.read_bytes() == b"old"
    assert sorted(os.listdir(folder.path)) == [".ckpt-async", "m"]
    with pytest.raises(OSError, match="full"):
        fsync_path(path)


MOUNTS = [
    "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw",
    "23 22 0:40 / /shared rw - nfs4 server:/x rw",
    "24 23 0:41 / /shared/scratch rw shared:2 master:3 - xfs /dev/nvme0n1 rw",
    r"25 22 0:42 / /with\040space rw - lustre x rw",
    r"26 22 0:43 / /tab\011and\134backslash rw - cifs x rw",
    "27 22 0:44 / /donn\u00e9es rw - nfs server:/y rw",
    "28 22 0:45 / /over rw - nfs server:/z rw",
    "29 28 0:46 / /over rw - tmpfs tmpfs rw",
    "",
    "garbage",
    "30 22 0:47 / /no-separator rw ext4",
]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/x", "ext4"),
        ("/shared", "nfs4"),
        ("/shared/a", "nfs4"),
        ("/sharedbutnot", "ext4"),
        ("/shared/scratch/a", "xfs"),
        ("/with space/a", "lustre"),
        ("/tab\tand\\backslash", "cifs"),
        ("/donn\u00e9es/a", "nfs"),
        ("/over/a", "tmpfs"),
        ("/no-separator/a", "ext4"),
    ],
)
def test_file_system_of_a_path_is_its_deepest_mount(path: str, kind: str) -> None:
    """Otherwise a journal on NFS goes unnoticed until two nodes corrupt it (fault F21)."""
    assert kind == parse_mountinfo(path, MOUNTS)


OVERLAYS = [
    "22 1 8:1 / / rw - ext4 /dev/sda1 rw",
    "23 22 0:40 / /net rw - nfs4 server:/x rw",
    "24 22 0:41 / /fine rw - overlay overlay rw,lowerdir=/net/low,upperdir=/disk/up,workdir=/disk/work",
    r"25 22 0:42 / /bad rw - overlay overlay rw,lowerdir=/low,upperdir=/net/my\040up,workdir=/net/work",
    "26 22 0:43 / /nested rw - overlay overlay rw,lowerdir=/low,upperdir=/bad/up,workdir=/bad/work",
    "27 22 0:44 / /container rw - overlay overlay rw,lowerdir=/l,upperdir=/var/lib/docker/overlay2/1/diff",
    "28 22 0:45 / /itself rw - overlay overlay rw,lowerdir=/l,upperdir=/itself/up",
    "29 22 0:46 / /readonly rw - overlay overlay ro,lowerdir=/net/a:/net/b",
]


@pytest.mark.fault("F21")
@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/fine/a", "overlay"),
        ("/bad/a", "overlay on nfs4"),
        ("/nested/a", "overlay on nfs4"),
        ("/container/a", "overlay"),
        ("/itself/a", "overlay"),
        ("/readonly/a", "overlay"),
    ],
)
def test_an_overlay_counts_as_its_upper_layer(path: str, kind: str) -> None:
    assert kind == parse_mountinfo(path, OVERLAYS, lambda folder: not folder.startswith("/var"))


@pytest.mark.fault("F21")
@pytest.mark.parametrize(
    "kind",
    ["nfs4", "fuse.s3fs", "fuse", "lustre", "wekafs", "virtiofs", "ocfs2", "overlay on nfs4", "of tomorrow"],
)
def test_an_unknown_file_system_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """An flock may not keep out other machines, and a clear error is better than a corrupt journal."""
    monkeypatch.setattr(files, "filesystem_of", lambda *_: kind)
    folder = tmp_path / "x"
    with pytest.raises(
        JournalError, match=rf"\({kind}\) that is not known to be local.*allow_unknown_filesystem"
    ):
        Folder(folder)
    assert not folder.exists(), "nothing was changed"
    Folder(folder, allows_unknown_filesystem=True)
    Folder(folder)  # `drain` and the sweeper have no settings, but must still work


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", ""])
def test_a_local_file_system_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(files, "filesystem_of", lambda *_: kind)
    Folder(tmp_path / "x")


@pytest.mark.fault("F21")
def test_a_folder_in_use_by_another_machine_is_rejected_and_a_stale_one_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File locks do not work across machines that mount the same file system."""
    ours = Folder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(host_mark, "WATCH_S", 0.3)
        patch.setattr(files, "boot_id", lambda: "of another machine")
        theirs = Folder(tmp_path)  # takes over the folder, as nobody renews our mark
    is_over = threading.Event()

    def renew() -> None:
        while not is_over.wait(0.02):
            theirs.tend()

    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        with pytest.raises(FolderInUseError, match=f"another machine, '{socket.gethostname()}'"):
            Folder(tmp_path)
    finally:
        is_over.set()
        renewing.join()
    monkeypatch.setattr(host_mark, "WATCH_S", 0.3)
    Folder(tmp_path)
    ours.tend()
    (tmp_path / ".ckpt-async" / "host.json").write_text("[" * 100_000)  # useless content must do no harm
    Folder(tmp_path)


def test_an_impossible_folder_is_rejected(tmp_path: Path) -> None:
    """The error must come at the start, with the reason."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(JournalError):
        Folder(tmp_path / "file")
    with pytest.raises(JournalError):
        Folder(tmp_path / "file" / "below")


@pytest.mark.fault("F4")
def test_a_write_that_fails_names_its_file(tmp_path: Path) -> None:
    """When a checkpoint is given up because of this error, the operator must see which disk is affected."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="too large") as caught:
            write_durably(tmp_path / "file", bytes(100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []
