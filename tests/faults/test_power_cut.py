"""Power cuts of a real ext4, and of a folder that loses everything that no fsync had made durable."""

import ctypes
import fcntl
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_async.core.model import CheckpointId
from tests.faults.oracle import Oracle, heard
from tests.faults.processes import SOAK, Nursery, Trainer

SETTINGS = {
    "num_checkpoints_to_keep": 1,
    "decision_poll_s": 0.05,
    "close_grace_s": 0.0,
}
# From linux/fs.h and ext4.h: nothing that is only in memory reaches the disk, not even the file system's own
# log. xfstests (src/godown.c) tests file systems with it.
EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2
CLONE_NEWNS = 0x00020000  # linux/sched.h; Python 3.12 has os.unshare


class Ext4:
    """A file system in an image, mounted at `path`, whose power can be cut."""

    def __init__(self, root: Path) -> None:
        self._image, self._other, self.path = root / "disk.img", root / "other.img", root / "disk"
        self.path.mkdir()
        self._num_cuts = 0
        for image in (self._image, self._other):
            with image.open("wb") as file:
                file.truncate(64 << 20)
        _run("mkfs.ext4", "-q", "-F", str(self._image))
        self._mount()

    def _mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self.path))

    def cut(self, trainer: Trainer) -> None:
        """Stop all writes to the image from one moment to the next, and mount it
        again, so that ext4 replays its log.
        """
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(descriptor)
        trainer.kill()
        _run("umount", str(self.path))
        # A boot may number disks differently, so every other time another image takes the lowest number.
        self._num_cuts += 1
        if self._num_cuts % 2 == 0:
            self._mount()
            return
        taken = _run("losetup", "--find", "--show", str(self._other))
        self._mount()
        _run("losetup", "--detach", taken)

    def close(self) -> None:
        if os.path.ismount(self.path):
            _run("umount", str(self.path))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr}")
    return done.stdout.strip()


def mount_in_private() -> None:
    """Make the mounts of this process and its children disappear with them, however they end."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNS) failed")
    _run("mount", "--make-rprivate", "/")


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Ext4]:
    missing = [each for each in ("mkfs.ext4", "mount", "losetup") if shutil.which(each) is None]
    missing += ["root"] if os.geteuid() else []
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    try:
        mount_in_private()
        disk = Ext4(tmp_path)
    except OSError as error:
        pytest.skip(f"no loop devices here: {error}")
    yield disk
    disk.close()


@pytest.fixture
def nursery(ext4: Ext4, tmp_path: Path) -> Iterator[Nursery]:
    """A nursery whose processes see the mounted disk and are gone before it is."""
    with Nursery(tmp_path) as nursery:
        yield nursery


class Machine:
    """A trainer on a disk that loses power again and again, and a remote that does not."""

    def __init__(self, nursery: Nursery, disk: Ext4, remote: Path, seed: int) -> None:
        self.nursery, self.disk, self.remote = nursery, disk, f"file://{remote}"
        self.random = random.Random(seed)
        self.oracle = Oracle(self.remote, 1)
        self.durable: set[CheckpointId] = set()
        self.num_starts = self.num_at_stake = 0

    def start(self, steps: list[int], *, is_held: bool) -> Trainer:
        self.num_starts += 1
        return self.nursery.start(
            "saves_between_cuts",
            {"CKPT_ASYNC_LAUNCH_ID": f"start-{self.num_starts}"},
            boot=f"boot-{self.num_starts}",
            is_held=is_held,
            folder=str(self.disk.path / "folder"),
            remote=self.remote,
            rank=0,
            world_size=1,
            steps=steps,
            train_s=0.05,
            settings=SETTINGS,
        )

    def live_until_a_cut(self) -> None:
        """Run until a power cut. In half of these runs nothing is uploaded, so that only
        the disk holds what was promised.
        """
        trainer = self.start([1, 2, 3, 4], is_held=self.random.random() < 0.5)
        if self.random.random() < 0.9:  # otherwise the cut may come while it opens and recovers
            trainer.expect("opened")
        trainer.listen(self.random.uniform(0.0, 0.35))
        promised = heard(trainer.said, "durable")
        self.disk.cut(trainer)
        self.durable |= promised
        if Path(self.remote.removeprefix("file://")).exists():
            self.oracle.look()
        self.num_at_stake += len(promised - self.oracle.committed)

    def finish(self) -> None:
        trainer = self.start([], is_held=False)
        trainer.tell("stop")
        assert trainer.finish() == 0, trainer.log.read_text()
        self.oracle.look()
        lost = self.durable - self.oracle.committed
        assert not lost, f"acknowledged as durable, yet lost: {lost}; {trainer.log.read_text()[-2000:]}"


def cut_power(nursery: Nursery, disk: Ext4, tmp_path: Path, seed: int, num_cuts: int) -> None:
    machine = Machine(nursery, disk, tmp_path / "remote", seed)
    for number in range(3 * num_cuts):
        if number >= num_cuts and machine.num_at_stake:
            break  # otherwise all cuts missed the moment that matters, so continue
        machine.live_until_a_cut()
        if machine.random.random() < 0.5:  # otherwise the next cut may hit the recovery from this one
            machine.finish()
    machine.finish()
    num_committed, num_aborted = len(machine.oracle.committed), len(machine.oracle.aborted)
    print(
        f"cuts={number} durable={len(machine.durable)} on_disk_alone={machine.num_at_stake}"
        f" committed={num_committed} aborted={num_aborted}"
    )
    assert machine.num_at_stake, "no cut came between the promise and the upload"


@pytest.mark.fault("F3")
@pytest.mark.parametrize("num_cuts", [6, pytest.param(200, marks=SOAK)])
def test_durable_checkpoints_survive_a_power_cut_on_ext4(
    nursery: Nursery, ext4: Ext4, tmp_path: Path, seed: int, num_cuts: int
) -> None:
    """From `MadeDurable` on, a checkpoint must be committed after the next boot, with the bytes that were saved."""
    cut_power(nursery, ext4, tmp_path, seed, num_cuts)
