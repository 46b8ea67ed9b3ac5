"""What only a folder can get wrong: durability, links, locks, and disk errors."""

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ckpt_async import Uploader, filesystems
from ckpt_async.errors import (
    CkptAsyncError,
    FailureReason,
    IntegrityError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
)
from ckpt_async.stores import directory
from ckpt_async.stores.directory import DirectoryStore
from ckpt_async.stores.interface import BytesBody, Create, Match
from tests.stores.bodies import ReusingBody, crc, put

OWN = ".ckpt-async/tmp"


@pytest.fixture
def store(tmp_path, run):
    made = DirectoryStore(tmp_path / "run")
    run(made.open())
    return made


def files(root: Path) -> set[str]:
    """Return all files but the sign of a store that is open."""
    return {
        str(each.relative_to(root)) for each in root.rglob("*") if each.is_file() and each.suffix != ".open"
    }


def test_every_step_of_a_write_is_durable_before_the_next(store, tmp_path, run, monkeypatch):
    """The file is fsynced before its link, and each new folder's parent and the folder itself before we return."""
    steps = []
    real_fsync, real_link = os.fsync, os.link

    def fsync(descriptor):
        steps.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path)))
        real_fsync(descriptor)

    def link(source, target, **options):
        real_link(source, target, **options)
        steps.append(("link", Path(target).relative_to(tmp_path)))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    run(put(store, "a/b/c", b"1", condition=Create()))
    (kind, first), *rest = steps
    assert (kind, first.parent) == ("fsync", Path("run") / OWN)
    assert rest == [
        ("fsync", Path("run")),
        ("fsync", Path("run/a")),
        ("link", Path("run/a/b/c")),
        ("fsync", Path("run/a/b")),
    ]


def test_what_is_swapped_is_newer_than_what_was_there_whatever_the_clock_says(store, tmp_path, run):
    """Else an inode that is given out again would bring an old ETag back."""
    run(put(store, "a", b"1"))
    ahead_ns = time.time_ns() + 3600 * 10**9
    os.utime(tmp_path / "run/a", ns=(ahead_ns, ahead_ns))
    run(put(store, "a", b"2", condition=Match(run(store.head("a")).etag)))
    assert (tmp_path / "run/a").stat().st_mtime_ns > ahead_ns


def test_a_file_that_is_cut_short_while_it_is_read_is_no_short_answer(store, tmp_path, run, monkeypatch):
    monkeypatch.setattr(directory, "_SLICE_BYTES", 4)
    run(put(store, "a", b"12345678"))
    read = []

    def sink(piece):
        read.append(bytes(piece))
        os.truncate(tmp_path / "run/a", 4)

    with pytest.raises(IntegrityError, match="truncated while being read"):
        run(store.get_range("a", 0, 8, sink))
    assert read == [b"1234"]


def test_own_files_are_hidden_and_leftovers_are_harmless(store, tmp_path, run):
    (tmp_path / "run" / OWN / "0123").write_bytes(b"half a shard of a writer that was killed")
    run(put(store, ".ckpt-async/latest.json", b"{}"))
    listing = run(store.list(""))
    assert [each.key for each in listing.objects] == [".ckpt-async/latest.json"]
    for request in (store.head(f"{OWN}/0123"), store.delete([f"{OWN}/0123"]), put(store, f"{OWN}/x", b"1")):
        with pytest.raises(StoreError):
            run(request)


def test_old_leftovers_are_removed_at_open(store, tmp_path, run):
    own = tmp_path / "run" / OWN
    old, young, idle, left = "0" * 32, "1" * 32, "2" * 32 + ".open", "3" * 32 + ".open"
    ages_s = {old: 90_000, young: 60, "lock": 90_000, "notes.txt": 90_000, idle: 90_000, left: 31 * 86_400}
    for name, age_s in ages_s.items():
        (own / name).touch()
        then = (own / name).stat().st_mtime - age_s
        os.utime(own / name, (then, then))
    run(store.open())
    run(store.close())
    assert {each.name for each in own.iterdir()} == {young, idle, "lock", "reserve", "notes.txt"}


@pytest.mark.fault("F127")
@pytest.mark.parametrize("place", [".ckpt-async", OWN])
def test_no_link_is_followed_to_temporary_files(tmp_path, run, place):
    """Whoever may write to a shared folder could have old files of somebody else deleted."""
    victim = tmp_path / "victim"
    precious = [victim / "tmp" / ("0" * 32), victim / ("0" * 32)]
    precious[0].parent.mkdir(parents=True)
    for each in precious:
        each.write_text("precious")
        os.utime(each, (0, 0))
    link = tmp_path / "shared" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    with pytest.raises(StoreError, match="symbolic link"):
        run(DirectoryStore(tmp_path / "shared").open())
    assert all(each.exists() for each in precious)
    assert len(list(victim.rglob("*"))) == 3


def test_no_temporary_file_is_left(store, tmp_path, run):
    run(put(store, "a", b"1"))
    for body, condition in ((BytesBody(b"1"), Create()), (BytesBody(b"2"), None)):
        with pytest.raises(StoreError):
            run(store.put("a", body, crc(b"1"), condition=condition))
    assert files(tmp_path / "run") == {"a", f"{OWN}/lock", f"{OWN}/reserve"}


def test_symlinks_are_not_followed(store, tmp_path, run):
    """A symlink among the folders could lead outside the root (I10)."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"1")
    (tmp_path / "run" / "way").symlink_to(outside)
    (tmp_path / "run" / "file").symlink_to(outside / "secret")
    assert run(store.list("")).objects == ()
    for request in (
        store.head("way/secret"),
        store.get("file", max_size_bytes=9),
        put(store, "way/new", b"1"),
        store.delete(["way/secret"]),
    ):
        with pytest.raises(StoreError):
            run(request)
    assert files(outside) == {"secret"}


def test_delete_removes_empty_parents_but_never_the_root(store, tmp_path, run):
    run(put(store, "a/b/c", b"1"))
    run(put(store, "a/d", b"1"))
    run(store.delete(["a/b/c"]))
    assert not (tmp_path / "run/a/b").exists()
    run(store.delete(["a/d", "a"]))
    assert not (tmp_path / "run/a").exists()
    assert (tmp_path / "run").is_dir()


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, FailureReason.DISK),
        (errno.EDQUOT, FailureReason.DISK),
        (errno.EROFS, FailureReason.DISK),
        (errno.EIO, FailureReason.DISK),
        (errno.EACCES, FailureReason.AUTH),
        (errno.ENOTCONN, FailureReason.TRANSIENT),
        (errno.EHOSTDOWN, FailureReason.TRANSIENT),
        (errno.ESTALE, FailureReason.TRANSIENT),
        (errno.ETIMEDOUT, FailureReason.TRANSIENT),
    ],
)
@pytest.mark.parametrize("call", ["open", "write", "fsync", "link"])
def test_disk_errors_are_classified(store, tmp_path, run, monkeypatch, call, number, reason):
    real = getattr(os, call)

    def failing(first, *args, **kwargs):
        if call == "open" and OWN not in str(first):
            return real(first, *args, **kwargs)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(StoreError) as raised:
            run(put(store, "a", b"1", condition=Create()))
    assert raised.value.reason is reason
    assert raised.value.hint
    assert run(store.list("")).objects == ()


def test_an_error_that_nobody_has_listed_is_tried_again(store, run, monkeypatch):
    def failing(*_, **__):
        raise OSError(errno.EREMOTEIO, os.strerror(errno.EREMOTEIO))

    monkeypatch.setattr(os, "link", failing)
    with pytest.raises(StoreError) as raised:
        run(put(store, "a", b"1", condition=Create()))
    assert raised.value.reason is FailureReason.TRANSIENT


@pytest.mark.fault("F154")
@pytest.mark.parametrize("number", [errno.EPERM, errno.EIO, errno.ENOTCONN])
def test_a_refused_link_to_what_exists_is_a_lost_race(store, run, monkeypatch, number):
    """sshfs says EPERM; and after a lost answer, what is there may be our own (R13)."""
    run(put(store, "a", b"1"))

    def failing(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", failing)
        with pytest.raises(PreconditionFailedError):
            run(put(store, "a", b"2", condition=Create()))
        with pytest.raises(StoreError, match="put 'b'"):
            run(put(store, "b", b"2", condition=Create()))


@pytest.mark.fault("F154")
def test_nothing_counts_as_deleted_while_the_file_server_is_away(store, run, monkeypatch):
    run(put(store, "a", b"1"))
    lstat = os.lstat

    def failing(path, **options):
        if str(path).endswith("/a"):
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(path))
        return lstat(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", failing)
        with pytest.raises(StoreError):
            run(store.delete(["a"]))
    assert run(store.head("a")).size_bytes == 1


@pytest.mark.parametrize(("filesystem", "hint"), [("ext4", "dmesg"), ("fuse.sshfs", "file server")])
def test_an_io_error_names_what_to_look_at(store, run, monkeypatch, filesystem, hint):
    run(put(store, "a", b"1"))

    def failing(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(filesystems, "filesystem_of", lambda *_: filesystem)
    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(StoreError) as raised:
        run(store.head("a"))
    assert hint in raised.value.hint
    assert raised.value.reason.is_retryable


@pytest.mark.fault("F160")
@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EIO, errno.EINVAL, errno.EACCES])
def test_works_on_a_file_system_without_hard_links(tmp_path, run, monkeypatch, caplog, number):
    """The last three are what mounted buckets answer."""

    def link(*_):
        raise OSError(number, "no hard links here")

    monkeypatch.setattr(os, "link", link)
    store = DirectoryStore(tmp_path)
    run(store.open())
    assert not store.capabilities.conditional_put
    (told,) = caplog.messages
    assert "rank 0 alone decides: there are no hard links on " in told
    source = run(put(store, "a", b"1"))
    run(store.copy("a", source.etag, "b"))
    assert run(store.get("b", max_size_bytes=9))[0] == b"1"


@pytest.mark.fault("F160")
@pytest.mark.parametrize(
    ("filesystem", "decides_by_swap"),
    [
        *(
            (kind, True)
            for kind in ("ext4", "nfs4", "lustre", "gpfs", "ceph", "fuse.ceph-fuse", "fuse.glusterfs")
        ),
        *((kind, False) for kind in ("fuse.sshfs", "fuse.rclone", "fuse", "cifs", "9p", "overlay on nfs4")),
    ],
)
def test_the_type_of_mount_tells_who_decides(tmp_path, run, monkeypatch, caplog, filesystem, decides_by_swap):
    monkeypatch.setattr(directory, "filesystem_of", lambda _: filesystem)
    store = DirectoryStore(tmp_path)
    run(store.open())
    assert store.capabilities.conditional_put is decides_by_swap
    assert store.capabilities.place == filesystem
    told = [line for line in caplog.messages if "rank 0 alone decides" in line and filesystem in line]
    assert len(told) == (0 if decides_by_swap else 1)


@pytest.mark.fault("F159")
def test_a_lock_that_another_node_has_just_made_is_taken(tmp_path, run, monkeypatch):
    """On GlusterFS, the slower of two nodes is told that the file exists, although it does not ask for a new one."""
    opened, refused = os.open, []

    def slower(path, flags, *args, **options):
        if str(path).endswith("/lock") and len(refused) < 2:
            refused.append(path)
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", slower)
    run(DirectoryStore(tmp_path).open())
    assert len(refused) == 2


@pytest.mark.fault("F159")
def test_a_swap_does_not_trust_what_a_name_stood_for(store, run, monkeypatch):
    """As on GlusterFS: this node still sees the file that another has replaced."""
    stale = run(put(store, "a", b"1")).etag
    remembered = os.stat(store._tree.path("a"))
    run(put(store, "a", b"2", condition=Match(stale)))
    stat = os.stat
    monkeypatch.setattr(
        os,
        "stat",
        lambda path, **options: remembered if str(path).endswith("/run/a") else stat(path, **options),
    )
    with pytest.raises(PreconditionFailedError):
        run(put(store, "a", b"3", condition=Match(stale)))
    with pytest.raises(PreconditionFailedError):
        run(store.delete_if("a", stale))
    monkeypatch.undo()
    assert run(store.get("a", max_size_bytes=9))[0] == b"2"


@pytest.mark.fault("F159")
def test_etags_never_repeat_where_times_are_whole_seconds(store, run, monkeypatch):
    utime = os.utime

    def whole(path, times=None, *, ns=None):
        then_ns = time.time_ns() if ns is None else ns[1]
        utime(path, ns=(then_ns // 10**9 * 10**9,) * 2)

    monkeypatch.setattr(os, "utime", whole)
    etags = [run(put(store, "a", b"0")).etag]
    for number in range(20):
        etags.append(run(put(store, "a", b"%d" % (number % 10), condition=Match(etags[-1]))).etag)
    times = [int(etag.split("-")[1], 16) for etag in etags]
    assert times == sorted(set(times))


def test_swapped_back_content_has_another_etag(store, run, monkeypatch):
    """A→B→A must not pass a compare-and-swap even within one clock tick, since inode numbers are reused."""
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)

    async def body():
        etags = [(await put(store, "a", b"A")).etag]
        for i in range(20):
            info = await put(store, "a", b"AB"[i % 2 : i % 2 + 1], condition=Match(etags[-1]))
            etags.append(info.etag)
        times = [int(etag.split("-")[1], 16) for etag in etags]
        assert times == sorted(set(times))
        with pytest.raises(PreconditionFailedError):
            await put(store, "a", b"C", condition=Match(etags[0]))

    run(body())


ADDER = """
import asyncio, sys
from ckpt_async.errors import PreconditionFailedError
from ckpt_async.stores.interface import BytesBody, Match
from ckpt_async.stores.checksums import checksum_of
from ckpt_async.stores.directory import DirectoryStore

async def main():
    store = DirectoryStore(sys.argv[1])
    done = 0
    while done < 25:
        data, info = await store.get("counter", max_size_bytes=9)
        new = b"%d" % (int(data) + 1)
        try:
            checksum = checksum_of(new, "crc64nvme")
            await store.put("counter", BytesBody(new), checksum, condition=Match(info.etag))
            done += 1
        except PreconditionFailedError:
            pass

asyncio.run(main())
"""


def test_conditional_writes_of_processes_are_mutually_exclusive(store, tmp_path, run):
    run(put(store, "counter", b"0"))
    adders = [subprocess.Popen([sys.executable, "-c", ADDER, str(tmp_path / "run")]) for _ in range(4)]
    assert [adder.wait() for adder in adders] == [0] * 4
    assert run(store.get("counter", max_size_bytes=9))[0] == b"100"


def test_concurrent_puts_and_deletes_in_one_folder(store, run):
    """A parent folder that a delete finds empty may vanish between its creation and its use."""

    async def body():
        async def churn(name):
            for _ in range(50):
                await put(store, f"p/q/{name}", b"1", condition=Create())
                await store.delete([f"p/q/{name}"])

        await asyncio.gather(*(churn(str(i)) for i in range(8)))
        with pytest.raises(ObjectNotFoundError):
            await store.head("p/q/0")

    run(body())


def test_cancelled_put_waits_for_its_running_write(store, tmp_path, run, monkeypatch):
    """Buffer and descriptor belong to the write until it ends."""
    real = os.write
    entered, may_go = threading.Event(), threading.Event()
    ended = []

    def slow(descriptor, data):
        entered.set()
        may_go.wait()
        written = real(descriptor, data)
        ended.append(written)
        return written

    async def body():
        putting = asyncio.ensure_future(store.put("a", ReusingBody(b"12345678", 8), crc(b"12345678")))
        await asyncio.to_thread(entered.wait)
        putting.cancel()
        asyncio.get_running_loop().call_soon(may_go.set)
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert ended == [8]

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", slow)
        run(body())
    assert files(tmp_path / "run") == {f"{OWN}/lock", f"{OWN}/reserve"}


def test_cancelled_puts_leave_no_file_open_or_behind(store, tmp_path, run, monkeypatch):
    """What the thread has just created has an owner before it returns."""
    create, entered, may_go = store._tree.create_temporary, threading.Event(), threading.Event()

    def slow(*args):
        created = create(*args)
        entered.set()
        may_go.wait()
        return created

    async def body():
        putting = asyncio.ensure_future(put(store, "a", b"1"))
        await asyncio.to_thread(entered.wait)
        putting.cancel()
        await asyncio.sleep(0.05)
        may_go.set()
        with pytest.raises(asyncio.CancelledError):
            await putting

    monkeypatch.setattr(store._tree, "create_temporary", slow)
    run(body())
    assert files(tmp_path / "run") == {f"{OWN}/lock", f"{OWN}/reserve"}
    opened = {os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")}
    assert not [each for each in opened if each.startswith(str(tmp_path))]


# --- the file system's clock, and what is not there --------------------------------------------------------


@pytest.mark.fault("F75")
def test_times_come_from_the_file_systems_clock(store, tmp_path, run, monkeypatch):
    """A machine whose clock is two hours ahead must not take a fresh lease for an old one."""
    run(put(store, "a", b"1"))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 7200)
    monkeypatch.setattr(time, "time_ns", lambda: int((real() + 7200) * 1e9))
    listing = run(store.list(""))
    assert 0 <= listing.server_time - listing.objects[0].last_modified < 3600
    for body in (b"2", b"3"):
        run(put(store, "a", body, condition=Match(run(store.head("a")).etag)))
    listing = run(store.list(""))
    assert 0 <= listing.server_time - listing.objects[0].last_modified < 3600
    young = tmp_path / "run" / OWN / "young"
    young.touch()
    then = young.stat().st_mtime - 23 * 3600
    os.utime(young, (then, then))
    run(store.open())
    assert young.exists()


@pytest.mark.fault("F74")
@pytest.mark.parametrize("is_read_only", [False, True])
def test_listing_a_vanished_folder_is_an_error(store, tmp_path, run, is_read_only):
    """If the file system was unmounted, with or without a visible mount point, that is not an empty listing."""
    run(put(store, ".ckpt-async/leases/x", b"1"))
    run(store.open(is_read_only=is_read_only))
    (tmp_path / "run").rename(tmp_path / "away")
    for is_there in (False, True):
        if is_there:
            (tmp_path / "run").mkdir()
        for prefix in ("", ".ckpt-async/leases/"):
            with pytest.raises(StoreError) as raised:
                run(store.list(prefix))
            assert raised.value.reason is FailureReason.TRANSIENT
    (tmp_path / "run").rmdir()
    (tmp_path / "away").rename(tmp_path / "run")
    assert [each.key for each in run(store.list("")).objects] == [".ckpt-async/leases/x"]


@pytest.mark.fault("F74")
def test_reading_or_writing_in_a_vanished_folder_is_an_error(store, tmp_path, run):
    """Otherwise new data would go into the mount point, and be hidden once the file system is back."""
    root, away = tmp_path / "run", tmp_path / "away"
    etag = run(put(store, "a", b"1")).etag
    calls = {
        "put": lambda: put(store, "b", b"2"),
        "create": lambda: put(store, "b", b"2", condition=Create()),
        "swap": lambda: put(store, "a", b"2", condition=Match(etag)),
        "get": lambda: store.get("a", max_size_bytes=9),
        "get_range": lambda: store.get_range("a", 0, 1, lambda _: None),
        "head": lambda: store.head("a"),
        "delete": lambda: store.delete(["a"]),
    }
    root.rename(away)
    for is_there in (False, True):
        if is_there:
            root.mkdir()
        for name, call in calls.items():
            with pytest.raises(StoreError, match="is no longer the same folder") as raised:
                run(call())
            assert raised.value.reason is FailureReason.TRANSIENT, name
    root.rmdir()  # nothing was created in it
    away.rename(root)
    run(put(store, "b", b"2", condition=Create()))
    assert run(store.get("a", max_size_bytes=9))[0] == b"1"


def test_a_reader_can_write_to_a_copied_run_without_our_own_folder(store, tmp_path, run):
    """A reader may write a lease, for example: `cp` and buckets drop empty folders, and someone may have tidied up."""
    shutil.rmtree(tmp_path / "run" / OWN)
    reader = DirectoryStore(tmp_path / "run")
    run(reader.open(is_read_only=True))
    run(put(reader, ".ckpt-async/leases/x", b"1"))
    assert run(reader.get(".ckpt-async/leases/x", max_size_bytes=9))[0] == b"1"


@pytest.mark.fault("F74")
def test_a_write_in_progress_is_not_published_after_the_folder_vanished(store, tmp_path, run, monkeypatch):
    root, away = tmp_path / "run", tmp_path / "away"
    link = os.link

    def vanish(*args, **options):
        if root.exists() and not away.exists():
            root.rename(away)
            root.mkdir()
        link(*args, **options)

    monkeypatch.setattr(os, "link", vanish)
    with pytest.raises(StoreError, match="is no longer the same folder"):
        run(put(store, "ckpt/a", b"1", condition=Create()))
    assert not [*root.iterdir()]


def test_nothing_is_committed_below_a_mount_point_that_another_has_opened(tmp_path):
    """As a launch or `drain` of another folder does, while the remote's file system is not mounted."""
    root, away, folder = tmp_path / "mnt" / "run", tmp_path / "away", tmp_path / "local"
    folder.mkdir()
    with Uploader(folder, f"file://{root}", rank=0, world_size=1) as uploader:
        (folder / "a").write_bytes(b"1")
        uploader.enqueue(folder / "a", step=1)
        uploader.seal(step=1)
        uploader.wait(1, timeout_s=60.0)
        root.parent.rename(away)
        asyncio.run(DirectoryStore(root).open())
        (folder / "b").write_bytes(b"2")
        uploader.enqueue(folder / "b", step=2)
        uploader.seal(step=2)
        with pytest.raises(CkptAsyncError):
            uploader.wait(2, timeout_s=1.0)
        assert not (root / "ckpt").exists()
        root.parent.rename(tmp_path / "below")
        away.rename(root.parent)
        uploader.wait(2, timeout_s=60.0)
    assert (root / "ckpt/step-2.g1/b").read_bytes() == b"2"


@pytest.mark.fault("F74")
def test_a_trainer_waits_for_a_remote_folder_that_comes_back(tmp_path):
    root, away, folder = tmp_path / "mnt" / "run", tmp_path / "away", tmp_path / "local"
    folder.mkdir()
    (folder / "a").write_bytes(b"1")
    with Uploader(folder, f"file://{root}", rank=0, world_size=1) as uploader:
        root.parent.rename(away)
        root.parent.mkdir()
        uploader.enqueue(folder / "a", step=1)
        uploader.seal(step=1)
        with pytest.raises(CkptAsyncError):
            uploader.wait(1, timeout_s=1.0)
        assert not [*root.parent.iterdir()]
        root.parent.rmdir()
        away.rename(root.parent)
        uploader.wait(1, timeout_s=60.0)
    assert (root / "ckpt/step-1.g1/a").read_bytes() == b"1"


KILLED = """
import asyncio, os, pathlib, signal, sys
from ckpt_async.stores.directory import DirectoryStore
pathlib.Path.rmdir = lambda _: os.kill(os.getpid(), signal.SIGKILL)
store = DirectoryStore(sys.argv[1])
asyncio.run(store.open())
asyncio.run(store.delete(["ckpt/step-1.g1/a"]))
"""


@pytest.mark.fault("F76")
def test_a_folder_left_empty_by_a_kill_is_removed(store, tmp_path, run):
    """SIGKILL may hit between deleting the last file and its folder. Other people's folders and new ones must stay."""
    root = tmp_path / "run"
    run(put(store, "ckpt/step-1.g1/a", b"1"))
    run(put(store, "ckpt/step-2.g1/a", b"1"))
    killed = subprocess.run([sys.executable, "-c", KILLED, root], check=False, timeout=60)
    assert killed.returncode == -9
    (root / "notes").mkdir()
    left = root / "ckpt/step-1.g1"
    assert list(left.iterdir()) == []
    run(store.list(""))
    assert left.is_dir()  # may belong to a writer
    for folder in (left, root / "notes"):
        os.utime(folder, (1, 1))
    reading = DirectoryStore(root)
    run(reading.open(is_read_only=True))
    run(reading.list(""))
    assert left.is_dir()
    run(store.list("ckpt/"))
    run(store.list(""))
    assert {each.name for each in (root / "ckpt").iterdir()} == {"step-2.g1"}
    assert (root / "notes").is_dir()


def test_a_listing_reads_no_further_than_is_enough_and_goes_on_from_there(store, tmp_path, run, monkeypatch):
    """A search for runs below a prefix must not walk all their files, even though `-` and `.` sort before `/`."""
    monkeypatch.setattr("ckpt_async.stores.directory.PAGE_KEYS", 2)
    names = ["a-b", "a.c", "a/1", "a/2/x", "a/2-x", "a0", "b/1", "b/2", "c"]
    for name in names:
        path = tmp_path / "run" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    read = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: read.append(Path(path).name) or scandir(path))

    def page(start_after, prefix=""):
        read.clear()
        listing = run(store.list(prefix, start_after=start_after, enough=lambda found: len(found) >= 2))
        return [each.key for each in listing.objects], listing.is_whole

    assert page("") == (["a-b", "a.c"], False)
    assert "b" not in read
    assert page("a.c") == (["a/1", "a/2-x"], False)
    assert page("a/2-x") == (["a/2/x", "a0"], False)
    assert page("a0") == (["b/1", "b/2"], False)
    assert "a" not in read, "what is before it is not looked at again"
    assert page("b/2") == (["c"], True)
    assert page("", "b/") == (["b/1", "b/2"], True)
    assert [each.key for each in run(store.list("")).objects] == sorted(names)
