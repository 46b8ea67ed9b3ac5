"""What a killed fetch has left is finished by the next one of the same checkpoint, and removed by one of another."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from ckpt_async import restore
from ckpt_async.restore.destination import PARTIAL_FOLDER, discard_unlocked, locked_now
from tests.restore import plays
from tests.restore.runs import Run, content, left_in, shard_key

MANY = 30  # more than are fetched one by one


def files_of(step: int) -> dict[int, dict[str, bytes]]:
    """Each step has other names, one of them in a folder of its own."""
    names = [f"step-{step}-{n}.pt" for n in range(MANY)] + [f"optim-{step}/0.pt"]
    return {0: {name: content(step, name) for name in names}}


def committed(run: Run, step: int) -> restore.Checkpoint:
    run.commit(step, files_of(step))
    found = restore.find(run.url, step=step)
    assert found is not None
    return found


def killed(checkpoint: restore.Checkpoint, there: Path) -> None:
    """Fetch, and die by SIGKILL on the way."""
    with plays.playing(plays.fetches_a_few_files, checkpoint, str(there), MANY // 3) as (process, _):
        process.join(plays.PATIENCE_S)
        assert process.exitcode == -9


def is_only(there: Path, step: int) -> bool:
    found = {name: (there / name).read_bytes() for name in left_in(there)}
    return found == files_of(step)[0]


@pytest.mark.fault("F102")
@pytest.mark.parametrize("num_kills", [1, 3])
def test_a_killed_fetch_leaves_nothing_among_the_files_of_another_checkpoint(
    run_: Run, tmp_path: Path, num_kills: int
) -> None:
    there, old = tmp_path / "there", committed(run_, 1)
    for _ in range(num_kills):
        killed(old, there)
    assert [name for name in left_in(there) if not name.startswith(PARTIAL_FOLDER)], "nothing to take back"
    restore.fetch(committed(run_, 2), there)
    assert is_only(there, 2)


def test_a_killed_fetch_is_finished_by_the_next_one_and_then_stays(run_: Run, tmp_path: Path) -> None:
    there, old = tmp_path / "there", committed(run_, 1)
    killed(old, there)
    assert restore.fetch(old, there).bytes_from["there"] > 0
    assert is_only(there, 1)
    restore.fetch(committed(run_, 2), there)
    assert set(left_in(there)) == {*files_of(1)[0], *files_of(2)[0]}


@pytest.mark.fault("F102")
def test_a_fallback_leaves_nothing_of_the_damaged_checkpoint(run_: Run, tmp_path: Path) -> None:
    there = tmp_path / "there"
    committed(run_, 1)
    newest = committed(run_, 2)
    killed(newest, there)
    there_already = next(name for name in newest.files if not (there / name).exists())
    run_.flip(shard_key(2, there_already))
    found = restore.fetch_latest(run_.url, there)
    assert found is not None
    assert found[0].step == 1
    assert is_only(there, 1)


def test_a_fetch_that_was_killed_before_it_noted_its_file_leaves_no_empty_one(
    run_: Run, tmp_path: Path
) -> None:
    there, old = tmp_path / "there", committed(run_, 1)
    killed(old, there)
    (there / PARTIAL_FOLDER / f"{1:032x}").touch()
    restore.fetch(committed(run_, 2), there)
    assert is_only(there, 2)
    assert not (there / PARTIAL_FOLDER).exists()


def test_what_has_finished_at_the_moment_when_the_next_fetch_looks_stays(
    run_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record was open already when it was removed: it was taken for that of a killed fetch, and the files went."""
    there, old, new = tmp_path / "there", committed(run_, 1), committed(run_, 2)
    killed(old, there)
    flock, is_finished = fcntl.flock, False

    def finish_first(descriptor: int, how: int) -> None:
        nonlocal is_finished
        is_record = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.startswith("fetch-")
        if is_record and not is_finished:
            is_finished = True
            restore.fetch(old, there)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", finish_first)
    restore.fetch(new, there)
    assert is_finished
    assert set(left_in(there)) == {*files_of(1)[0], *files_of(2)[0]}


def test_what_others_have_put_there_since_stays(run_: Run, tmp_path: Path) -> None:
    there, old = tmp_path / "there", committed(run_, 1)
    killed(old, there)
    name = next(name for name in old.files if (there / name).exists())
    (there / name).rename(tmp_path / "kept")  # so that no other file gets its inode
    (there / name).write_text("mine")
    (there / "notes.txt").write_text("mine, too")
    restore.fetch(committed(run_, 2), there)
    assert set(left_in(there)) == {name, "notes.txt", *files_of(2)[0]}


@pytest.mark.fault("F102")
def test_a_fetch_that_is_running_keeps_its_files(run_: Run, tmp_path: Path) -> None:
    there, old, new = tmp_path / "there", committed(run_, 1), committed(run_, 2)
    is_second_done = False

    def on_progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal is_second_done
        if 0 < done_bytes < total_bytes and not is_second_done:
            restore.fetch(new, there)
            is_second_done = True

    restore.fetch(old, there, on_progress=on_progress)
    assert is_second_done
    assert set(left_in(there)) == {*files_of(1)[0], *files_of(2)[0]}


@pytest.mark.parametrize("damage", ["", "cut short", "not ours"])
def test_a_record_that_cannot_be_read_is_harmless(run_: Run, tmp_path: Path, damage: str) -> None:
    there, old = tmp_path / "there", committed(run_, 1)
    killed(old, there)
    (record,) = (there / PARTIAL_FOLDER).glob("fetch-*")
    text = record.read_text()
    outside = tmp_path / "outside"
    outside.write_text("mine")
    facts = outside.stat()
    escaping = f'["../outside", "../../outside", {facts.st_dev}, {facts.st_ino}]\n'
    record.write_text({"": "", "cut short": text[:-20], "not ours": text + escaping}[damage])
    restore.fetch(committed(run_, 2), there)
    assert set(files_of(2)[0]) <= set(left_in(there))
    assert outside.read_text() == "mine"


def test_a_partial_file_that_another_process_fetches_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "partial"
    with locked_now(path, 10, "crc64nvme") as partial:
        assert partial is not None
        discard_unlocked(path)
        assert path.exists()
    discard_unlocked(path)
    assert not path.exists()
