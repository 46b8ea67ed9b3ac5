"""Descriptors, memory, write permission and our own folder are each taken away from a real process that needs them."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ckpt_async.core.failures import AGAIN_S, Troubles
from tests.faults.processes import ROOT
from tests.faults.small_disk import on_small_disk

both = pytest.mark.parametrize("runner", ["thread", "process"])
PREAMBLE = """
    import logging, os, resource, shutil, signal, sys
    from pathlib import Path
    from ckpt_async import *
    from ckpt_async.core import failures
    from ckpt_async.errors import FailureReason, JournalError, RunnerError
    from tests.faults.trainer import write_shards
    logging.basicConfig(format="%(levelname)s %(message)s")
    failures.RETRY_ACTION_S = 0.1
    tmp, runner = Path(sys.argv[1]), sys.argv[2]
    folder, remote = tmp / "folder", f"file://{tmp}/remote"
    def engine_pid(uploader):
        if runner == "thread":
            return os.getpid()
        group = uploader._engine.runner.group
        for each in filter(str.isdecimal, os.listdir("/proc")):
            try:
                if os.getpgid(int(each)) == group:
                    return int(each)
            except ProcessLookupError:
                pass
"""


def run(tmp_path: Path, runner: str, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(PREAMBLE) + textwrap.dedent(script),
            str(tmp_path),
            runner,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.fault("F42")
@both
def test_opening_with_too_few_descriptors_raises_and_never_aborts_or_hangs(
    tmp_path: Path, runner: str
) -> None:
    """libuv aborts silently if it gets no pipe, and a lock sent to a process without a
    free descriptor does not arrive.
    """
    done = run(
        tmp_path,
        runner,
        """
        for limit in (4, 7, 9, 10, 200) if runner == "thread" else (7, 14, 200):
            if not (pid := os.fork()):
                os.closerange(3, 200)
                signal.alarm(20)
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, 200))
                try:
                    with Uploader(tmp / f"folder-{limit}", remote, runner=runner) as uploader:
                        uploader.enqueue(write_shards(tmp / f"folder-{limit}", 1, 1, 0, 2), 1)
                        uploader.seal(1)
                        uploader.wait(1, 15)
                    os.write(1, b"committed\\n")
                except (JournalError, RunnerError) as error:
                    os.write(1, b"refused\\n" if "open" in str(error) else f"{error}\\n".encode())
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0, limit
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused"] * (4 if runner == "thread" else 2) + ["committed"]


@pytest.mark.fault("F42")
@pytest.mark.parametrize(("runner", "what"), [("thread", "NOFILE"), ("process", "NOFILE"), ("thread", "AS")])
def test_an_engine_short_of_descriptors_or_memory_resumes_when_they_are_back(
    tmp_path: Path, runner: str, what: str
) -> None:
    """Memory is not limited in the runner process: if its polite threads are being recreated at that moment,
    CPython's `Thread.start` waits forever for a thread that had no memory to begin. Such a process is killed at
    close, and the journal has everything.
    """
    done = run(
        tmp_path,
        runner,
        f"""
        which = resource.RLIMIT_{what}
        with Uploader(folder, remote, runner=runner, on_error="warn") as uploader:
            for step in (1, 2):
                write_shards(folder, 1, step, 0, 5)
            uploader.enqueue(folder / "step-1/rank-0", 1)
            uploader.seal(1)
            uploader.wait(1, 30)
            pid = engine_pid(uploader)
            before = resource.prlimit(pid, which)
            resource.prlimit(pid, which, (10 if which == resource.RLIMIT_NOFILE else 1 << 20, before[1]))
            for _ in range(2):
                try:
                    uploader.enqueue(folder / "step-2/rank-0", 2)
                    uploader.seal(2)
                    uploader.wait(2, 2)
                    break
                except (CommitTimeoutError, JournalError) as error:
                    print(type(error).__name__)
                    resource.prlimit(pid, which, before)
                    uploader.wait(2, 30) if runner == "process" else None
                except SealedError:
                    break
            uploader.wait(2, 30)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "engine_failed" not in done.stderr
    if what == "NOFILE":
        assert done.stdout.split() == ["JournalError" if runner == "thread" else "CommitTimeoutError"]
        assert done.stderr.count("action_failed") <= 4


@pytest.mark.fault("F43")
@both
def test_removing_our_folder_beside_a_live_trainer_raises(tmp_path: Path, runner: str) -> None:
    """Nothing may be promised that would not survive, and the next launch continues."""
    done = run(
        tmp_path,
        runner,
        """
        uploader = Uploader(folder, remote, runner=runner, on_error="warn")
        for step in (1, 2, 3):
            write_shards(folder, 1, step, 0, 2)
        uploader.enqueue(folder / "step-1/rank-0", 1)
        uploader.seal(1)
        uploader.wait(1, 30)
        uploader.enqueue(folder / "step-2/rank-0", 2)
        while os.path.exists(folder / ".ckpt-async"):  # in which the engine is just writing
            shutil.rmtree(folder / ".ckpt-async", ignore_errors=True)
        for call in (
            lambda: uploader.seal(2),
            lambda: uploader.enqueue(folder / "step-3/rank-0", 3),
            lambda: uploader.open(4, "a.pt"),
        ):
            try:
                call()
            except JournalError as error:
                print("deleted" if "was deleted" in str(error) else error)
        uploader.close(5)
        with Uploader(folder, remote, runner=runner) as uploader:
            uploader.enqueue(folder / "step-3/rank-0", 3)
            uploader.seal(3)
            uploader.wait(3, 30)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["deleted"] * 3
    assert "Traceback" not in done.stderr


@pytest.mark.fault("F43")
def test_a_file_system_that_becomes_read_only_is_reported_and_recovers(tmp_path: Path) -> None:
    done = on_small_disk(
        tmp_path,
        """
        import subprocess
        with Uploader(disk / "folder", remote, on_error="warn") as uploader:
            write_shards(disk / "folder", 1, 1, 0, 2)
            spool = disk / "folder/.ckpt-async/spool"
            for how in (["--bind", spool, spool], ["-o", "remount,bind,ro", spool]):
                subprocess.run(["mount", *how], check=True)
            for _ in range(2):
                try:
                    uploader.enqueue(disk / "folder/step-1/rank-0", 1)
                except JournalError as error:
                    print("told" if "Read-only file system (the file system is read-only" in str(error) else error)
            subprocess.run(["umount", spool], check=True)
            uploader.enqueue(disk / "folder/step-1/rank-0", 1)
            uploader.seal(1)
            uploader.wait(1, 30)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["told", "told"]


@pytest.mark.fault("F43")
def test_a_full_disk_is_one_log_line_for_any_number_of_shards(tmp_path: Path) -> None:
    done = on_small_disk(
        tmp_path,
        """
        import asyncio, logging
        from ckpt_async.stores.directory import DirectoryStore
        logging.basicConfig(format="%(levelname)s %(message)s")
        put, gate, has_come = DirectoryStore.put, threading.Event(), threading.Event()
        async def held(self, key, *args, **kwargs):
            if key.startswith("ckpt/"):
                has_come.set()
                while not gate.is_set():
                    await asyncio.sleep(0.01)
            return await put(self, key, *args, **kwargs)
        DirectoryStore.put = held
        with Uploader(disk / "folder", remote, on_error="warn") as uploader:
            uploader.enqueue(write_shards(disk / "folder", 1, 1, 0, 60), 1)
            uploader.seal(1)
            assert has_come.wait(30)
            fill(disk)
            gate.set()
            try:
                uploader.wait(1, 1)
            except CommitTimeoutError:
                print("full")
            os.unlink(disk / "ballast")
            uploader.wait(1, 30)
        """,
        size="8m",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "full\n"
    lines = [each for each in done.stderr.splitlines() if "action_failed" in each]
    assert 2 <= len(lines) <= 4, lines
    assert "is full" in lines[0] or "No space left" in lines[0]  # depends on which of the two writes first
    assert any("num_more=" in each for each in lines[1:]), lines


@pytest.mark.fault("F43")
def test_suppressed_log_lines_are_counted_and_reported_later() -> None:
    troubles = Troubles()
    assert troubles.is_new("disk", "a", 0.0)
    assert not troubles.is_new("disk", "b", 1.0)
    assert troubles.is_new("store", "c", 1.0)
    assert not troubles.is_new("disk", "d", 2.0)
    assert troubles.due(AGAIN_S - 1.0) == []
    assert troubles.due(AGAIN_S + 1.0) == [(2, AGAIN_S + 1.0, "d")]
    assert troubles.due(AGAIN_S + 2.0) == []
    assert troubles.is_new("store", "e", AGAIN_S + 2.0), "it had not come for as long"
    assert not troubles.is_new("disk", "f", AGAIN_S + 2.0)
    assert troubles.due(AGAIN_S + 3.0, is_end=True) == [(1, 2.0, "f")]
