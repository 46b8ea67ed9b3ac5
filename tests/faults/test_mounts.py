"""The trainer's folder on a file system that is unmounted, or mounted again, underneath it. Real mounts, as root."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.faults.oracle import verified
from tests.faults.small_disk import on_small_disk

STEPS = 8
# Uploads take 0.3 s each, so most of them find that the file system is away.
TRAINER = """
    import logging, subprocess
    logging.basicConfig(format="%(message)s")
    folder = disk / "folder"
    settings = dict(on_error="warn", close_grace_s=0.0, num_checkpoints_to_keep=40, max_bytes_per_s=1_000_000)
    def save(step):
        shard = folder / f"step-{step}/a.pt"
        shard.parent.mkdir(parents=True)
        shard.write_bytes(bytes([step]) * 300_000)
        uploader.enqueue(shard, step)
        uploader.seal(step)
    def unmount():
        subprocess.run(["umount", "-l", disk], check=True)
    def drained():
        drain = [sys.executable, "-m", "ckpt_async", "drain", folder, "--timeout", "60"]
        print(subprocess.run(drain, capture_output=True, text=True), file=sys.stderr)
    def refused(call):
        try:
            call()
        except JournalError:
            return True
    uploader = Uploader(folder, remote, **settings)
    for step in range(1, 9):
        save(step)
"""


def num_committed(tmp_path: Path) -> int:
    result = verified(f"file://{tmp_path}/remote")
    assert not result.violations
    return result.num_committed


@pytest.fixture
def image(tmp_path: Path) -> Path:
    if os.geteuid():
        pytest.skip("only root may mount an image")
    path = tmp_path / "image"
    with path.open("wb") as file:
        file.truncate(100 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", "-F", path], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no ext4 here: {made.stderr}")
    return path


@pytest.mark.fault("F157")
def test_a_trainer_outlives_its_file_systems_absence(tmp_path: Path, image: Path) -> None:
    """While it is not mounted, nothing is given up or made below the mount point; then uploads go on."""
    done = on_small_disk(
        tmp_path,
        f"""{TRAINER}
    unmount()
    time.sleep(3)
    print("refused", refused(lambda: uploader.seal(9)), refused(lambda: uploader.open(9, "a.pt")), os.listdir(disk))
    subprocess.run(["mount", "-o", "loop", tmp / "image", disk], check=True)
    save(9)
    for step in range(1, 10):
        uploader.wait(step, 30)
    uploader.close()
        """,
        image=image,
    )
    assert done.stdout == "refused True True []\n", done.stderr
    assert done.returncode == 0, done.stderr
    assert num_committed(tmp_path) == STEPS + 1
    said = [line for line in done.stderr.splitlines() if "not mounted" in line and "num_more=" not in line]
    assert len(said) == 1, "the others are only counted"
    assert f"{tmp_path}/disk/folder" in said[0]


@pytest.mark.fault("F157")
def test_a_drain_finishes_what_an_unmounted_disk_kept(tmp_path: Path, image: Path) -> None:
    done = on_small_disk(
        tmp_path,
        f"""{TRAINER}
    unmount()
    time.sleep(3)
    uploader.close(1)
    drained()
    print(os.listdir(disk))
    subprocess.run(["mount", "-o", "loop", tmp / "image", disk], check=True)
    drained()
        """,
        image=image,
    )
    assert done.stdout == "[]\n", done.stderr
    assert num_committed(tmp_path) == STEPS, done.stderr


@pytest.mark.fault("F157")
def test_a_folder_mounted_as_another_device_is_left_to_drain(tmp_path: Path, image: Path) -> None:
    """The lock of its rank went with the earlier mount: the trainer goes on, but nothing more is done there."""
    done = on_small_disk(
        tmp_path,
        f"""
    import subprocess
    layers = [tmp / each for each in ("disk/lower", "disk/upper", "disk/work", "overlay")]
    for each in layers:
        each.mkdir()
    lower, upper, work, overlay = layers
    def mount():
        options = f"lowerdir={{lower}},upperdir={{upper}},workdir={{work}}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, overlay], check=True)
        return os.stat(overlay).st_dev
    disk, device = overlay, mount()
    {TRAINER}
    unmount()
    time.sleep(1.5)
    print("another", mount() != device)
    time.sleep(1.5)
    print("refused", refused(lambda: uploader.seal(9)))
    uploader.close(1)
    drained()
        """,
        image=image,
    )
    assert done.stdout == "another True\nrefused True\n", done.stderr
    assert "Traceback" not in done.stderr
    assert num_committed(tmp_path) == STEPS, done.stderr
