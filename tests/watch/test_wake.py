"""What wakes a watcher."""

import shutil
import time
from pathlib import Path

import pytest

from ckpt_async.watch.disk import Disk
from ckpt_async.watch.wake import Waker
from tests.descriptors import many_open

LONG_S = 10.0


def is_woken(waker: Waker) -> bool:
    began_s = time.monotonic()
    waker.wait(LONG_S)
    return time.monotonic() - began_s < LONG_S / 2


def follow(waker: Waker, folder: Path) -> None:
    waker.follow(folder, Disk(folder).scan().folders_below(""))


def settle(waker: Waker) -> None:
    """What has happened until now is known."""
    for _ in range(2):
        waker.wait(0)


def test_only_a_call_ends_the_rest_after_a_look(tmp_path: Path) -> None:
    """A log that is written all the time would have the folder looked at all the time."""
    waker = Waker()
    follow(waker, tmp_path)
    settle(waker)
    (tmp_path / "log").touch()
    began_s = time.monotonic()
    waker.wait(LONG_S, rest_s=0.2)
    rested_s = time.monotonic() - began_s
    assert 0.2 <= rested_s < LONG_S / 2, "and then what happened meanwhile wakes it"
    waker.wake()
    began_s = time.monotonic()
    waker.wait(LONG_S, rest_s=LONG_S)
    assert time.monotonic() - began_s < LONG_S / 2
    waker.close()


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_folder_that_is_made_again_under_its_name_wakes_too(tmp_path: Path, is_moved: bool) -> None:
    waker, folder = Waker(), tmp_path / "out"
    (folder / "latest").mkdir(parents=True)
    follow(waker, folder)
    settle(waker)
    if is_moved:
        (folder / "latest").rename(tmp_path / "old")
    else:
        shutil.rmtree(folder / "latest")
    (folder / "latest").mkdir()
    follow(waker, folder)
    settle(waker)
    (folder / "latest/DONE").touch()
    assert is_woken(waker)
    waker.close()


def test_one_that_inherited_thousands_of_open_files_is_woken_too(tmp_path: Path) -> None:
    with many_open():
        waker = Waker()
    follow(waker, tmp_path)
    settle(waker)
    (tmp_path / "DONE").touch()
    assert is_woken(waker)
    waker.wake()
    assert is_woken(waker)
    waker.close()


def test_a_new_folder_is_looked_at_once_more(tmp_path: Path) -> None:
    waker = Waker()
    follow(waker, tmp_path)
    settle(waker)
    (tmp_path / "new").mkdir()
    tree = Disk(tmp_path).scan()
    (tmp_path / "new/DONE").touch()
    settle(waker)
    waker.follow(tmp_path, tree.folders_below(""))
    assert is_woken(waker)
    waker.close()
