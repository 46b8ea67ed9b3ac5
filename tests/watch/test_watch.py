"""`ckpt-async watch` beside a trainer that writes files: what is sent, what is not, and what it leaves alone."""

import errno
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_async import Uploader, cli, formats, restore
from ckpt_async.core import keys
from ckpt_async.errors import NoJournalError
from ckpt_async.formats import Found, Rules, Tree
from ckpt_async.monitor import status
from ckpt_async.watch import watcher
from ckpt_async.watch.background import REST
from ckpt_async.watch.supervisor import SAME_SIGNAL_S
from ckpt_async.watch.wake import Waker
from tests.dcp_metadata import metadata_of
from tests.watch.conftest import BEING_UPLOADED_S, LIMIT_S, Place, hashes, save
from tests.watch.trees import safetensors, torch_zip

pytestmark = pytest.mark.timeout(90)


def test_once_adopts_what_is_complete_and_says_what_is_not(place: Place) -> None:
    saved = {step: save(place, step) for step in (3, 20)}
    (place.out / "checkpoint-30").mkdir()
    (place.out / "checkpoint-30/model.safetensors").write_bytes(safetensors())
    before = {path: path.stat() for path in place.out.rglob("*")}
    code, ended = place.once()
    assert (code, ended["committed"], ended["unfinished"]) == (0, 2, [])
    assert list(ended["incomplete"]) == ["checkpoint-30"]
    assert {step: place.committed(step) for step in saved} == saved
    assert place.newest() == 20, "oldest first"
    after = {path: path.stat() for path in place.out.rglob("*")}
    assert [(path, facts.st_mtime_ns, facts.st_nlink) for path, facts in after.items()] == [
        (path, facts.st_mtime_ns, facts.st_nlink) for path, facts in before.items()
    ], "the trainer's files are as they were, and nothing holds them"


@pytest.mark.parametrize("ignores_times", [False, True])
def test_of_an_old_folder_what_was_saved_last_is_the_newest(
    place: Place, *, ignores_times: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its trainer had gone back. Or it is a copy in the order of the names, of which times tell nothing."""
    saved = {step: save(place, step) for step in (1, 10, 3, 4)}
    for each in place.out.rglob("*") if ignores_times else ():
        os.utime(each, (1_700_000_000, 1_700_000_000))
    code, ended = place.once(*(["--ignore-times"] if ignores_times else []))
    assert (code, ended["committed"]) == (0, 4)
    assert place.newest() == (10 if ignores_times else 4)
    assert {step: place.committed(step) for step in saved} == saved
    assert ("gone back to step 3" in caplog.text, "--once --ignore-times" in caplog.text) == (
        not ignores_times,
        not ignores_times,
    )


def test_once_again_sends_nothing_and_another_watcher_finds_it_by_its_checksums(place: Place) -> None:
    save(place, 10)
    assert place.once()[1]["committed"] == 1
    assert place.once()[1] | {"incomplete": {}} == {
        "event": "ended",
        "exit_code": 0,
        "committed": 0,
        "there": 1,
        "refused": {},
        "incomplete": {},
        "unfinished": [],
        "not_taken": {},
        "stood_by": False,
        "cut_short": False,
    }
    code, ended = place.once("--state", place.here / "other")
    assert (code, ended["committed"], ended["there"]) == (0, 0, 1)
    (place.out / "checkpoint-10/optimizer.pt").write_bytes(torch_zip(step=11))
    (place.out / "checkpoint-10/trainer_state.json").write_text('{"global_step": 10}')
    assert place.once("--state", place.here / "third")[1]["committed"] == 1, (
        "of the same size and other content"
    )


def test_what_a_wiped_remote_has_lost_is_not_said_to_be_there(place: Place, tmp_path: Path) -> None:
    """A watcher that was running had claimed its generation again and had gone on with newer checkpoints. The next one
    only asked for the newest, and ended with 0.
    """
    saved = {step: save(place, step) for step in (1, 2, 3)}
    assert place.once()[1]["committed"] == 3
    shutil.rmtree(place.out / "checkpoint-1")
    for step in (1, 2):
        for what in (f"{keys.RECEIPTS}*{step}/*", f"{keys.DECISIONS}*{step}.json", f"ckpt/*-{step}.g1/*"):
            found = list((tmp_path / "remote").glob(what))
            assert found, what
            for each in found:
                each.unlink()
    for _ in range(2):
        code, ended = place.once()
        assert (code, ended["committed"], ended["there"]) == (1, 0, 1)
        assert "the store has lost it" in ended["refused"]["checkpoint-2"]
    assert place.committed(3) == saved[3]


@pytest.mark.parametrize("changed", ["model.safetensors", "trainer_state.json"])
def test_what_has_changed_since_the_commit_is_named_and_not_uploaded(place: Place, changed: str) -> None:
    saved = save(place, 10)
    assert place.once()[1]["committed"] == 1
    os.truncate(place.out / "checkpoint-10" / changed, 20)
    code, ended = place.once()
    if changed == "trainer_state.json":  # of another save, or half of this one
        assert (code, list(ended["incomplete"])) == (0, ["checkpoint-10"])
    else:
        assert code == 1
        assert f"{changed} was written again after" in ended["refused"]["checkpoint-10"]
    assert place.committed(10) == saved


def test_where_nothing_can_be_locked_beside_the_folder_a_warning_says_so(place: Place) -> None:
    save(place, 10)
    (place.here / ".out.ckpt-async.lock").mkdir()
    watching = place.watch("--once")
    output, errors = watching.process.communicate(timeout=60)
    assert ("run only one watcher of this folder" in errors, '"committed": 1' in output) == (True, True)


def test_files_on_another_disk_are_copied(place: Place) -> None:
    place.out.rmdir()
    place.out = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        saved = {step: save(place, step) for step in (10, 20, 30)}
        code, ended = place.once("--state", place.here / "state")
        assert (code, ended["committed"]) == (0, 3)
        assert {step: place.committed(step) for step in saved} == saved
        assert not list((place.here / "state/run/staged").iterdir()), "the copies are gone"
    finally:
        shutil.rmtree(place.out)
        Path(f"{place.out.parent}/.{place.out.name}.ckpt-async.lock").unlink(missing_ok=True)


def test_a_name_that_not_every_store_takes_is_refused_and_the_others_are_sent(place: Place) -> None:
    saved = save(place, 10)
    save(place, 20)
    (place.out / "checkpoint-20/model.safetensors").rename(place.out / "checkpoint-20/my model.safetensors")
    code, ended = place.once()
    assert (code, list(ended["refused"]), place.committed(10)) == (1, ["checkpoint-20"], saved)
    assert "'my model.safetensors' has a character" in ended["refused"]["checkpoint-20"]
    assert place.newest() == 10


def test_a_folder_that_no_store_takes_stops_no_other(place: Place) -> None:
    for name in ("step-1 backup", "step-2"):
        (place.out / name).mkdir()
        (place.out / name / "model.bin").write_bytes(name.encode())
        (place.out / name / "DONE").touch()
    code, ended = place.once("--done", "DONE")
    assert (code, ended["committed"], list(ended["refused"])) == (1, 1, ["step-1 backup"])
    (place.out / "step-1 backup").rename(place.out / "step-1-backup")
    code, ended = place.once("--done", "DONE", "--kind", "old")
    assert (code, ended["committed"], ended["refused"]) == (0, 2, {})


def test_nothing_to_find_is_not_found(place: Place) -> None:
    assert place.once()[0] == 3
    missing = subprocess.run(
        [sys.executable, "-m", "ckpt_async", "watch", place.here / "nowhere", place.remote, "--once"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (missing.returncode, "there is no folder" in missing.stderr) == (2, True)


def test_a_folder_that_its_trainer_has_yet_to_make_is_waited_for_and_named(place: Place) -> None:
    place.out.rmdir()
    watching = place.watch()
    watching.until_logged(f"folder={place.out}: it does not exist yet")
    place.out.mkdir()
    save(place, 10)
    watching.until("committed", 10)
    assert watching.end() == 0


def test_a_state_of_another_remote_is_refused(place: Place) -> None:
    save(place, 10)
    place.once()
    place.remote = f"file://{place.here}/another"
    assert place.once()[1]["error"]["exit_code"] == 2
    place.remote = "another"
    assert "'another' is not a store URL" in place.once()[1]["error"]["message"]


@pytest.mark.parametrize("command", ["watch", "run"])
def test_a_watcher_that_has_ended_leaves_nothing_open(place: Place, command: str) -> None:
    """In the process of another program, which calls `ckpt_async.cli.main`."""
    how = ("--once",) if command == "watch" else ("--", "true")

    def num_open() -> int:
        save(place, next(steps))
        assert place.main(*how, command=command)[0] == 0
        return len(os.listdir("/proc/self/fd"))

    steps = itertools.count(10, 10)
    before = num_open()
    assert [num_open(), num_open()] == [before, before]


def test_what_fails_at_the_end_leaves_nothing_else_open(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(place, 3)
    with monkeypatch.context() as broken:

        def fail(_: object) -> None:
            raise OSError(errno.EIO, "broken")

        broken.setattr(watcher.Remote, "close", fail)
        broken.setattr(watcher.FolderScanner, "end", fail)
        assert place.once()[0] != 0
    save(place, 4)
    assert place.once()[0] == 0, "the lock and the journal are free"


def test_no_concurrent_uploads_are_refused(place: Place) -> None:
    code, told = place.once("--uploads", "0")
    assert code == 2
    assert "num_concurrent_uploads=0 must be from 1 to 1024" in told["error"]["message"]


def test_a_watcher_whose_state_is_removed_ends_so_that_a_supervisor_starts_it_again(place: Place) -> None:
    """It refused every further checkpoint, for as long as it ran: `git clean` had removed the state."""
    watching = place.watch()
    save(place, 10)
    watching.until("committed", 10)
    shutil.rmtree(place.state)
    assert watching.process.wait(LIMIT_S) == 1
    assert "was removed while it was watching (start it again" in watching.errors()
    saved = save(place, 20)
    assert place.once()[0] == 0
    assert place.committed(20) == saved


def test_a_rotation_while_it_is_uploaded_loses_nothing(place: Place) -> None:
    watching = place.watch("--max-bytes-per-s", "20e6", "-v")
    saved = save(place, 10, size_bytes=20_000_000)
    watching.until_logged("complete path=checkpoint-10")
    shutil.rmtree(place.out / "checkpoint-10")
    watching.until("committed", 10)
    assert place.committed(10) == saved
    assert watching.end() == 0


def test_what_is_complete_is_linked_also_while_the_store_is_away(place: Place) -> None:
    remote, place.remote = place.remote, "s3://bucket/run"
    away = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    watching = place.watch("--endpoint-url", "http://127.0.0.1:1", "-v", **away)
    saved = save(place, 10)
    watching.until_logged("complete path=checkpoint-10")
    shutil.rmtree(place.out / "checkpoint-10")
    watching.kill()
    place.remote = remote
    assert place.once()[1]["committed"] == 1
    assert place.committed(10) == saved


def test_a_file_that_is_renamed_over_itself_is_a_new_checkpoint_each_time(place: Place) -> None:
    watching = place.watch()
    sums = {}
    for step in (10, 20):
        new = place.here / "new.ckpt"
        new.write_bytes(torch_zip(global_step=step))
        os.replace(new, place.out / "last.ckpt")
        watching.until("committed", step)
        sums[step] = hashes(place.out)
    assert {step: place.committed(step) for step in sums} == sums
    assert watching.end() == 0


def test_a_file_of_torchs_that_is_written_in_place_is_compared_with_its_own_checksums(
    place: Place,
) -> None:
    """Lightning does so when its temporary folder is on another file system."""
    watching = place.watch("-v")
    saved: dict[int, dict[str, str]] = {}
    for step in (10, 20, 30):
        with (place.out / "last.ckpt").open("wb") as file:
            file.write(torch_zip(global_step=step, tensor=os.urandom(1 << 20)))
        saved[step] = hashes(place.out)
        watching.until("committed", step)
    whole = torch_zip(global_step=40, tensor=os.urandom(1 << 20))
    half = bytearray(whole)
    half[1 << 19] ^= 1
    (place.out / "last.ckpt").write_bytes(half)
    watching.until_logged("last.ckpt is not intact")
    assert place.newest() == 30
    (place.out / "last.ckpt").write_bytes(whole)
    saved[40] = hashes(place.out)
    watching.until("committed", 40)
    assert watching.end() == 0
    assert {step: place.committed(step) for step in saved} == saved


def test_a_file_that_is_written_in_place_is_refused_until_it_is_made_anew(place: Place) -> None:
    watching = place.watch()
    (place.out / "last.ckpt").write_bytes(torch_zip(global_step=10, tensor=None))
    was = hashes(place.out)
    watching.until("committed", 10)
    (place.out / "last.ckpt").write_bytes(torch_zip(global_step=20, tensor=None))
    told = watching.until("refused")
    assert "written in place" in told["reason"]
    assert (place.newest(), place.committed(10)) == (10, was)
    (place.out / "last.ckpt").unlink()
    (place.out / "last.ckpt").write_bytes(torch_zip(global_step=30))  # ext4 gives it the same inode
    watching.until("committed", 30)
    assert watching.end() == 1


def test_what_changes_in_place_while_it_is_uploaded_is_never_committed(place: Place) -> None:
    watching = place.watch("--max-bytes-per-s", "5e6", "-v")
    save(place, 10, size_bytes=20_000_000)
    watching.until_logged("complete path=checkpoint-10")
    saved, changing = save(place, 20), place.out / "checkpoint-10/model.safetensors"
    time.sleep(BEING_UPLOADED_S)
    with changing.open("r+b") as file:
        file.seek(10_000_000)
        file.write(b"other bytes")
    told = watching.until("refused", 10)
    assert ("model.safetensors" in told["reason"], told["cause"]) == (True, "given_up")
    assert watching.end() == 1
    assert (place.committed(10), place.committed(20)) == (None, saved)


def test_a_trainer_that_goes_back_is_newer_whatever_its_steps(place: Place) -> None:
    watching = place.watch()
    for step in (10, 20):
        save(place, step)
        watching.until("committed", step)
    shutil.rmtree(place.out / "checkpoint-20")
    saved = save(place, 20, size_bytes=99)
    watching.until("committed", 20)
    assert place.committed(20) == saved
    save(place, 15)
    watching.until("committed", 15)
    assert place.newest() == 15, "begun when 20 was complete, so from 10"
    assert watching.end() == 0


def test_a_trainer_that_has_gone_back_between_two_starts_is_newer_and_a_warning_says_so_once(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    for step in (10, 20, 30):
        save(place, step)
    assert place.once()[0] == 0
    assert "gone back" not in capfd.readouterr().err
    for step in (10, 20, 30):
        shutil.rmtree(place.out / f"checkpoint-{step}")
    for step in (15, 20, 40):
        save(place, step, size_bytes=99)
    assert place.once()[0] == 0
    assert capfd.readouterr().err.count("gone back to step") == 1
    assert place.newest() == 40


def test_one_of_two_watchers_stands_by_and_takes_over(place: Place) -> None:
    first = place.watch()
    save(place, 10)
    first.until("committed", 10)
    second = place.watch()
    second.until_logged("standing_by")
    assert place.once()[0] == 5
    first.kill()
    saved = save(place, 20)
    second.until("committed", 20)
    assert place.committed(20) == saved
    assert second.end() == 0


def test_what_is_committed_is_deleted_only_if_that_is_asked_for(place: Place) -> None:
    for step in (10, 20, 30):
        save(place, step)
    (place.out / "checkpoint-30/trainer_state.json").unlink()
    assert place.once("--keep-local", "1")[0] == 0
    assert sorted(path.name for path in place.out.iterdir()) == ["checkpoint-20", "checkpoint-30"]
    save(place, 40)
    code, ended = place.once("--keep-local", "1")
    assert (code, ended["committed"], ended["there"]) == (0, 1, 1), "20, which is deleted for it"


def test_what_has_more_than_was_sent_is_not_deleted(place: Place) -> None:
    """A file that came too late is nowhere else, and without the others it is worth nothing."""
    for step in (10, 20):
        save(place, step)
    assert place.once()[0] == 0
    (place.out / "checkpoint-20/adapter.bin").write_bytes(b"late")
    before = sorted((place.out / "checkpoint-20").iterdir())
    place.once("--keep-local", "0")
    assert not (place.out / "checkpoint-10").exists()
    assert sorted((place.out / "checkpoint-20").iterdir()) == before


def test_what_a_dead_watcher_had_in_hand_is_in_the_state_s_journal(place: Place) -> None:
    """`drain` and a trainer's own Uploader work on it like on any other folder."""
    saved = save(place, 10, size_bytes=20_000_000)
    watching = place.watch("--max-bytes-per-s", "5e6", "-v")
    watching.until_logged("watching folder")
    while [each.state for each in status.load(place.state)[""].checkpoints] != ["uploading"]:
        pass
    watching.kill()
    with pytest.raises(NoJournalError, match=re.escape(str(place.state))):
        status.load(place.out)
    Uploader(place.state, place.remote).close(60)
    assert place.committed(10) == saved
    assert place.once()[1]["committed"] == 1, "it learns of that"


def test_run_passes_the_status_and_signals_through_and_finishes_what_was_saved(place: Place) -> None:
    script = Path(place.here / "train.py")
    script.write_text(
        "import json, os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: (save(20), sys.exit(7)))\n"
        "def save(step):\n"
        "    here = f'out/checkpoint-{step}'\n"
        "    os.mkdir(here)\n"
        "    open(f'{here}/model.bin', 'w').write('x')\n"
        "    open(f'{here}/trainer_state.json', 'w').write(json.dumps({'global_step': step}))\n"
        "save(10)\n"
        "print(json.dumps({'event': 'saved', 'args': sys.argv[1:]}), flush=True)\n"
        "while True: signal.pause()\n"
    )
    os.chdir(place.here)
    watching = place.watch("--", sys.executable, script, "--json", "--folder", command="run")
    assert watching.until("saved")["args"] == ["--json", "--folder"]
    watching.process.send_signal(signal.SIGTERM)
    ended = watching.until("ended")
    assert (watching.process.wait(60), ended["committed"], ended["unfinished"]) == (7, 2, [])
    assert place.newest() == 20


def test_run_says_what_it_could_not_finish(place: Place) -> None:
    command = [sys.executable, "-c", "pass"]
    save(place, 10)  # with nothing to finish, nobody waits for the store
    place.remote = "file:///dev/null/nowhere"
    watching = place.watch("--", *command, command="run")
    assert watching.process.wait(60) == 6
    assert "checkpoints may not be in the store" in watching.errors()
    place.remote = f"file://{place.here}/remote"
    assert place.main("--", *command, command="run")[0] == 0
    assert place.main("--", "/nonexistent", command="run")[0] == 127
    assert place.main("--", "/etc/passwd", command="run")[0] == 126
    assert place.main("--", "sh", "-c", "kill -9 $$", command="run")[0] == 137
    place.remote = "nope://x"
    assert place.main("--", "touch", place.out / "ran", command="run")[0] == 2
    assert not (place.out / "ran").exists()


@pytest.mark.parametrize("command", ["run", "watch", "watch --once"])
def test_a_store_that_does_not_answer_is_given_up_in_time(place: Place, command: str) -> None:
    """A socket that listens, and never speaks. Opening would try for 100 s."""
    save(place, 10)
    place.remote = "s3://bucket/run"
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command, *once = command.split()
        ours = ["-v", "--drain-timeout", "1", "--endpoint-url", endpoint, *once]
        theirs = ["--", "sleep", "3"] if command == "run" else []
        watching = place.watch(*ours, *theirs, command=command, **keys)
        watching.until_logged("complete path=checkpoint-10")
        if command == "watch":
            watching.process.terminate()
        assert watching.process.wait(20) == 6
    assert "checkpoints may not be in the store" in watching.errors()


def test_a_signal_that_is_sent_twice_at_once_is_one(place: Place) -> None:
    """As by `timeout`, to its child and to its group. One that comes later ends it at once."""
    save(place, 10, size_bytes=3_000_000)
    watching = place.watch("-v", "--max-bytes-per-s", "1e6")
    watching.until_logged("complete path=checkpoint-10")
    for _ in range(3):
        watching.process.terminate()
    assert watching.process.wait(30) == 0
    assert place.newest() == 10
    save(place, 20, size_bytes=30_000_000)
    watching = place.watch("-v", "--max-bytes-per-s", "1e6")
    watching.until_logged("complete path=checkpoint-20")
    watching.process.terminate()
    assert not has_ended_within(watching.process, SAME_SIGNAL_S + 0.2)
    watching.process.terminate()
    assert watching.process.wait(5) == 130


def test_after_the_command_s_end_a_second_signal_ends_run_at_once(place: Place) -> None:
    save(place, 10)
    place.remote = "s3://bucket/run"
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        watching = place.watch("-v", "--endpoint-url", endpoint, "--", "true", command="run", **keys)
        watching.until_logged("complete path=checkpoint-10")
        assert not has_ended_within(watching.process, 2), "it would finish for an hour"
        watching.process.terminate()
        assert not has_ended_within(watching.process, 1), "10 s more"
        watching.process.terminate()
        assert watching.process.wait(5) == 6
    assert "checkpoints may not be in the store: stopped by a second signal" in watching.errors()


def test_a_signal_after_the_command_s_end_leaves_run_the_grace_that_it_was_given_and_no_more(
    place: Place,
) -> None:
    save(place, 10, size_bytes=5_000_000)
    watching = place.watch("-v", "--max-bytes-per-s", "1e5", "--grace", "1", "--", "true", command="run")
    watching.until_logged("complete path=checkpoint-10")
    assert not has_ended_within(watching.process, SAME_SIGNAL_S + 0.2), (
        "an earlier signal may be the one that ended it"
    )
    watching.process.terminate()
    assert not has_ended_within(watching.process, 0.9)
    assert watching.process.wait(3) == 6
    assert json.loads(watching.process.communicate()[0].splitlines()[-1])["unfinished"] == ["checkpoint-10"]


def has_ended_within(process: "subprocess.Popen[str]", timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def test_an_empty_command_for_events_is_refused(place: Place) -> None:
    code, told = place.main("--exec", "")
    assert (code, "--exec: it is empty" in told["error"]["message"]) == (2, True)


def test_a_command_is_run_for_each_checkpoint_that_is_committed(place: Place) -> None:
    """The adopted run of an unmodified trainer; docs/events.md has the rest."""
    save(place, 10)
    script = place.here / "told.py"
    script.write_text(f"import sys; open({str(place.here / 'told')!r}, 'a').write(' '.join(sys.argv[1:]))\n")
    code, ended = place.once("--exec", f"{sys.executable} {script} {{step}} {{kind}}")
    assert (code, ended["committed"]) == (0, 1)
    assert (place.here / "told").read_text() == "10 committed"


def test_a_remote_in_the_watched_folder_is_not_watched(place: Place) -> None:
    """Or each checkpoint would become another one there, for ever."""
    place.remote = f"file://{place.out}/remote"
    written = save(place, 10)
    code, told = place.once()
    assert (code, told["committed"]) == (0, 1)
    assert place.committed(10) == written
    code, told = place.once()
    assert (code, told["committed"], told["there"]) == (0, 0, 1)
    place.remote = f"file://{place.out}"
    code, told = place.once()
    assert (code, "is the watched folder itself" in str(told)) == (2, True)


def save_dcp(place: Place, step: int, *, size_bytes: int = 400) -> dict[str, str]:
    """A checkpoint as DCP writes it: in a folder of any name."""
    here = place.out / f"step-{step}"
    here.mkdir()
    (here / "__0_0.distcp").write_bytes(os.urandom(size_bytes))
    (here / ".metadata").write_bytes(metadata_of({"__0_0.distcp": size_bytes}))
    return hashes(here)


COPIES: dict[str, Callable[[Path, Path], object]] = {
    "mv": os.rename,
    "cp -r": lambda old, new: shutil.copytree(old, new, copy_function=shutil.copyfile),
    "cp -a": shutil.copytree,
    "cp -al": lambda old, new: shutil.copytree(old, new, copy_function=os.link),
}


@pytest.mark.parametrize("name", ["best", "step-10-best", "best-20261124", "best_v2"])
@pytest.mark.parametrize("how", COPIES)
def test_what_somebody_has_renamed_or_copied_is_known_by_its_bytes(place: Place, how: str, name: str) -> None:
    """Whatever its new name: latest does not go back, and its trainer has not."""
    watching = place.watch()
    for step in (10, 20):
        save_dcp(place, step)
        watching.until("committed", step)
    COPIES[how](place.out / "step-10", place.out / name)
    assert watching.until("there")["step"] == 10
    saved = save_dcp(place, 30)
    watching.until("committed", 30)
    found = restore.find(place.remote)
    assert found is not None
    assert (found.step, found.generation, place.committed(30)) == (30, 1, saved)
    assert watching.end() == 0
    assert place.once()[1]["committed"] == 0, "nor is it new to the next watcher"


@pytest.mark.parametrize("name", ["step-10-best", "step-5"])
@pytest.mark.parametrize("how", COPIES)
def test_renamed_copy_is_recognised_after_a_restart(place: Place, how: str, name: str) -> None:
    for step in (10, 20):
        save_dcp(place, step)
    assert place.once()[0] == 0
    COPIES[how](place.out / "step-10", place.out / name)
    code, ended = place.once()
    assert (code, ended["committed"], ended["refused"], place.newest()) == (0, 0, {}, 20)


def test_a_copy_of_a_single_file_is_known_by_its_bytes(place: Place) -> None:
    watching = place.watch()
    for step in (10, 20):
        (place.out / f"step={step}.ckpt").write_bytes(torch_zip(global_step=step, tensor=os.urandom(400)))
        watching.until("committed", step)
    copy = place.here / "copy"
    shutil.copyfile(place.out / "step=10.ckpt", copy)
    os.utime(
        copy, (time.time() + 100, time.time() + 100)
    )  # later than another file of the same save would be
    os.rename(copy, place.out / "best.ckpt")
    assert watching.until("there")["step"] == 10
    assert (watching.end(), place.newest()) == (0, 20)


def test_a_copy_that_differs_in_a_byte_is_new(place: Place) -> None:
    """Where no block was sampled, too."""
    watching = place.watch()
    for step in (10, 20):
        save_dcp(place, step, size_bytes=1 << 20)
        watching.until("committed", step)
    new = place.here / "new"
    for step in (30, 31):
        shutil.copytree(place.out / "step-10", new, copy_function=shutil.copyfile)
        data = bytearray((new / "__0_0.distcp").read_bytes())
        data[0 if step == 30 else 5000] ^= 1
        (new / "__0_0.distcp").write_bytes(data)
        saved = hashes(new)
        os.utime(new / ".metadata")
        os.rename(new, place.out / f"step-{step}")
        watching.until("committed", step)
        assert place.committed(step) == saved
    assert watching.end() == 0


@pytest.mark.parametrize("how", ["mv", "cp -a", "cp -al"])
def test_copy_of_a_pruned_checkpoint_is_known_by_its_times(place: Place, how: str) -> None:
    watching = place.watch()
    for step in (10, 20):
        save_dcp(place, step)
        watching.until("committed", step)
    assert cli.main(["prune", place.remote, "--keep", "last=1", "--yes"]) == 0
    COPIES[how](place.out / "step-10", place.out / "best")
    assert "it has the files of step 10" in watching.until("refused")["reason"]
    assert (watching.end(), place.newest()) == (1, 20)


def test_a_copy_over_a_copy_of_another_one_is_known_by_its_bytes(place: Place) -> None:
    watching = place.watch()
    for step in (10, 20):
        save_dcp(place, step)
        watching.until("committed", step)
    for step in (10, 20, 10):
        for each in (place.out / f"step-{step}").iterdir():
            (place.out / "best").mkdir(exist_ok=True)
            shutil.copyfile(each, place.here / "file")
            os.replace(place.here / "file", place.out / "best" / each.name)
        os.utime(place.out / "best/.metadata")
        assert watching.until("there")["step"] == step
    assert (watching.end(), place.newest()) == (0, 20)


@pytest.fixture
def new_node(place: Place) -> Iterator[Place]:
    """Another node of the run, whose watcher remembers nothing."""
    node = Place(place.here / "new")
    node.remote = place.remote
    yield node
    node.end()


def test_an_older_one_pulled_elsewhere_is_not_the_newest(place: Place, new_node: Place) -> None:
    for step in (10, 20):
        save_dcp(place, step)
    assert place.once()[0] == 0
    watching = new_node.watch()
    before = save_dcp(new_node, 5)
    watching.until("committed", 5)
    assert cli.main(["pull", place.remote, str(new_node.out / "step-10"), "--step", "10"]) == 0
    assert watching.until("there")["step"] == 10
    assert (watching.end(), place.committed(5), place.newest()) == (0, before, 5)


def test_a_run_continues_from_what_was_pulled(place: Place, new_node: Place) -> None:
    for step in (10, 20):
        save_dcp(place, step)
    assert place.once()[0] == 0
    assert cli.main(["pull", place.remote, str(new_node.out / "resume")]) == 0
    saved = save_dcp(place, 30)
    copying = f"import shutil; shutil.move({str(place.out / 'step-30')!r}, {str(new_node.out)!r})"
    code, told = new_node.main("--", sys.executable, "-c", copying, command="run")
    assert (code, told["committed"], told["there"]) == (0, 1, 1)
    assert (place.newest(), place.committed(30)) == (30, saved)


def test_a_faithful_copy_of_a_folder_is_taken_whole(place: Place, new_node: Place) -> None:
    saved = {step: save_dcp(new_node, step) for step in (10, 20, 30)}
    watching = place.watch()
    save_dcp(place, 5)
    watching.until("committed", 5)
    shutil.copytree(new_node.out, place.out, dirs_exist_ok=True)
    watching.until("committed", 30)
    assert watching.end() == 0
    assert {step: place.committed(step) for step in saved} == saved
    assert place.newest() == 30


def test_one_that_cannot_be_judged_holds_up_nothing_else(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is in a file: `int` refuses thousands of digits, `zipfile` a version that it does not know."""
    zipped = bytearray(torch_zip(global_step=10))
    at = zipped.rindex(b"PK\x01\x02")
    zipped[at + 6] = 255  # what version is needed to read it
    (place.out / "step=10.ckpt").write_bytes(zipped)
    (place.out / "iter_0000005").mkdir()
    (place.out / "iter_0000005/model.pt").write_bytes(torch_zip(x=1))
    (place.out / "latest_checkpointed_iteration.txt").write_text("5" * 5000)
    save(place, 20)
    code, told = place.once()
    assert (code, told["committed"], place.newest()) == (0, 2, 20)
    assert "is incomplete or invalid" in told["incomplete"]["iter_0000005"]

    def broken(tree: Tree, found: Found, rules: Rules) -> Found:
        if found.path == "step=40.ckpt":
            raise RecursionError("too deep")
        return checked(tree, found, rules)

    checked = formats.checked
    monkeypatch.setattr(formats, "checked", broken)
    save(place, 30)
    (place.out / "step=40.ckpt").write_bytes(torch_zip(global_step=40))
    code, told = place.once()
    assert (code, told["committed"], place.newest()) == (1, 1, 30)
    assert "cannot be examined: RecursionError('too deep')" in told["refused"]["step=40.ckpt"]


def test_a_watcher_rests_for_several_times_as_long_as_a_round_has_kept_the_core(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log in a folder of thousands wakes it all the time; listing the folder is not all that a round takes."""
    rests: list[float] = []
    wait = Waker.wait

    def noted(self: Waker, timeout_s: float, *, rest_s: float = 0.0) -> None:
        rests.append(rest_s)
        wait(self, timeout_s)

    monkeypatch.setattr(Waker, "wait", noted)
    busy_s = itertools.count(0.0, 100.0)
    monkeypatch.setattr(
        watcher, "time", SimpleNamespace(**vars(time) | {"thread_time": lambda: next(busy_s)})
    )
    save(place, 10)
    assert place.once()[0] == 0
    assert rests
    assert min(rests) == REST * 100.0


def test_what_is_no_folder_is_refused_at_once(place: Place) -> None:
    place.out.rmdir()
    place.out.write_text("a file")
    watching = place.watch()
    assert (watching.process.wait(60), "is not a folder" in watching.errors()) == (2, True)


def test_what_was_finished_but_never_complete_is_named_when_it_is_removed(place: Place) -> None:
    """With a wrong `--ranks` all would be lost so, and nothing said."""
    watching = place.watch("--ranks", "2")
    for step, num_ranks in ((10, 1), (20, 2)):
        here = place.out / f"checkpoint-{step}"
        here.mkdir()
        for rank in range(num_ranks):
            (here / f"rng_state_{rank}.pth").write_bytes(torch_zip(step=rank))
        (here / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    watching.until("committed", 20)  # so it has seen the other one
    shutil.rmtree(place.out / "checkpoint-10")
    assert "it has been removed" in watching.until("incomplete", 10)["reason"]
    shutil.rmtree(place.out / "checkpoint-20")
    assert watching.end() == 0


def test_a_folder_with_nothing_but_its_mark_is_named_and_the_mark_stays(place: Place) -> None:
    (place.out / "step-7").mkdir()
    (place.out / "step-7/DONE").write_bytes(b"x")
    code, told = place.once("--done", "DONE", "--keep-local", "0")
    assert (code, told["committed"]) == (0, 0)
    assert told["incomplete"] == {"step-7": "it contains nothing but DONE yet"}
    assert (place.out / "step-7/DONE").exists()


def test_a_copy_of_an_older_one_is_not_the_newest(place: Place) -> None:
    watching = place.watch()
    for step in (10, 20):
        save(place, step)
        watching.until("committed", step)
    (place.out / "best").mkdir()
    os.utime(shutil.copytree(place.out / "checkpoint-10", place.out / "copied") / "trainer_state.json")
    (place.out / "copied").rename(place.out / "best/checkpoint-10")
    assert watching.until("there", 10)["path"] == "best/checkpoint-10"
    assert watching.end() == 0
    assert place.newest() == 20
    # While nobody watched: with its times and without.
    shutil.copytree(place.out / "checkpoint-10", place.out / "kept/checkpoint-10")
    os.utime(
        shutil.copytree(place.out / "checkpoint-10", place.out / "new/checkpoint-10") / "trainer_state.json"
    )
    code, ended = place.once("--keep-local", "1")
    assert (code, ended["committed"], place.newest()) == (0, 0, 20)
    assert sorted(each.name for each in place.out.iterdir()) == ["best", "checkpoint-20", "kept", "new"]


def test_a_folder_s_name_is_no_line_of_its_own(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = place.out / "x\nstep-9: step 9 committed"
    hostile.mkdir()
    save(place, 10)
    (place.out / "checkpoint-10").rename(hostile / "checkpoint-10")
    arguments = [each for each in place._arguments("watch", ("--once",)) if each != "--json"]
    assert cli.main(arguments) == 0
    assert not [line for line in capsys.readouterr().out.splitlines() if line.startswith("step-9")]


def test_a_folder_that_cannot_be_listed_is_named_and_is_not_an_empty_one(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """(Root may list all, so the answer of the system is made up.)"""
    for step in (10, 20):
        here = place.out / f"step-{step}"
        (here / "optim").mkdir(parents=True)
        for name in ("model.pt", "optim/state.pt", "DONE"):
            (here / name).write_bytes(b"%d" % step)
    closed = {str(place.out / "step-10/optim"), str(place.out / "closed")}
    (place.out / "closed").mkdir()
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if str(path) in closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    code, told = place.once("--done", "DONE")
    assert (code, told["committed"], place.committed(10)) == (1, 1, None)
    assert told["incomplete"] == {"step-10": "step-10/optim cannot be read: Permission denied"}
    assert told["refused"].keys() == {"step-10/optim", "closed"}
    assert "closed: it cannot be read: Permission denied" in caplog.text
    closed.clear()
    assert place.once("--done", "DONE")[:1] == (1,), "it is older than the other"
