"""Files of torch.save's whose bytes are not what they say themselves."""

import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpt_async.core.refusal import Refusal
from ckpt_async.watch import plan, unwhole
from ckpt_async.watch.entries import State, entry_of
from ckpt_async.watch.formats import Rules, find
from ckpt_async.watch.tree import Identity, Tree
from ckpt_async.watch.unwhole import AGAIN_S, GIVEN_UP_S, Unwhole
from tests.watch.conftest import Place, hashes
from tests.watch.looking import Place as Looking
from tests.watch.trees import torch_zip, tree_of


def spoilt(data: bytes) -> bytes:
    """One of its tensors is not what its directory says."""
    at = data.index(b"\1" * 400)
    return data[:at] + b"\2" + data[at + 1 :]


WHOLE = torch_zip(tensor=b"\1" * 400, global_step=10)
SPOILT = spoilt(WHOLE)


def test_what_has_not_changed_is_read_again_less_and_less_often_and_refused_soon() -> None:
    now, was, is_now = 0.0, Identity(1, 2, 3), Identity(1, 2, 4)
    seen = Unwhole(lambda: now)
    assert not seen.waits("a", was)
    for again_s in (*AGAIN_S, AGAIN_S[-1]):
        seen.note("a", was, "spoilt")
        assert seen.waits("a", was)
        assert not seen.waits("a", is_now)
        assert seen.refused("a", was) == ("spoilt" if now >= GIVEN_UP_S else "")
        now += again_s
        assert not seen.waits("a", was)
    assert seen.refused("a", is_now) == ""
    seen.forget_all_but({"a": is_now})
    assert seen.refused("a", was) == ""


@pytest.fixture
def looking(tmp_path: Path) -> Iterator[Looking]:
    place = Looking(tmp_path)
    yield place
    place.waker.close()


def test_what_was_written_in_place_and_is_not_whole_is_copied_once(
    looking: Looking, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = []

    def copyfile(source: Path, target: Path, **more: bool) -> None:
        copied.append(source.name)
        target.write_bytes(source.read_bytes())

    lookout, path = looking.lookout(Rules()), looking.folder / "last.ckpt"
    path.write_bytes(WHOLE)
    lookout.look_and_take()
    looking.entries.settle(looking.entries.all[1], State.COMMITTED)
    monkeypatch.setattr(shutil, "copyfile", copyfile)
    with path.open("r+b") as file:
        file.write(SPOILT)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    for _ in range(5):
        lookout.look_and_take()
        assert lookout.num_left == 1
    assert copied == ["last.ckpt"]
    monkeypatch.setattr(unwhole, "GIVEN_UP_S", 0.0)
    lookout.look_and_take()
    assert (lookout.num_left, looking.told) == (0, [("refused", "last.ckpt")])
    assert "last.ckpt is not intact: archive/data/0" in looking.teller.refused["last.ckpt"]
    with path.open("r+b") as file:
        file.write(WHOLE)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 2))
    lookout.look_and_take()
    assert looking.entries.all[max(looking.entries.all)].state is State.STAGED


@pytest.mark.timeout(90)
def test_a_file_that_has_its_end_before_its_middle_is_not_committed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next save has begun to go over it, or a download began with its end; no watcher saw it before."""
    (place.out / "last.ckpt").write_bytes(SPOILT)
    monkeypatch.setattr(unwhole, "GIVEN_UP_S", 0.0)
    code, told = place.once()
    assert (code, told["committed"]) == (1, 0)
    assert "partly overwritten, or damaged" in told["refused"]["last.ckpt"]
    with (place.out / "last.ckpt").open("r+b") as file:
        file.write(WHOLE)
    assert place.once()[0] == 0
    assert place.committed(10) == hashes(place.out)


def without_checksums(value: float) -> bytes:
    buffer = io.BytesIO()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    torch.save({"w": torch.full((100,), value), "global_step": 10}, buffer)
    torch.serialization.set_crc32_options(before)
    return buffer.getvalue()


def test_a_file_without_checksums_is_refused_by_name_when_it_is_written_in_place() -> None:
    """Nothing tells when it is whole, and nothing whether two of them are the same."""
    tree = tree_of({"last.ckpt": without_checksums(1.0), "step=10.ckpt": without_checksums(2.0)})
    found, twin = find(tree)
    known, was = entry_of(found, tree, 1), tree.files["last.ckpt"]
    assert not known.says_sums
    changed = Tree({"last.ckpt": was._replace(mtime_ns=was.mtime_ns + 1)}, tree.read)
    verdict = plan.judge(found, changed, [known], num_nodes=1)
    assert verdict
    assert (verdict.take, verdict.refusal) == (False, Refusal.CHANGED)
    assert "last.ckpt was written in place" in verdict.reason
    verdict = plan.judge(twin, tree, [known], num_nodes=1)
    assert verdict
    assert "nothing shows whether the two are the same" in verdict.reason
