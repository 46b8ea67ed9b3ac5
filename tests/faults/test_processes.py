"""Forks and exits, and which process may touch what as processes come and go."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckpt_async.core.model import CheckpointId
from tests.faults.oracle import Oracle
from tests.faults.processes import ROOT, Nursery


@contextmanager
def fifo_in(tmp_path: Path) -> Iterator[str]:
    """Yield a FIFO whose readers block until the block ends."""
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    try:
        yield path
    finally:
        os.close(writer)


@pytest.mark.fault("F23")
@pytest.mark.parametrize("how", ["os.fork", "multiprocessing"])
def test_using_an_uploader_in_a_forked_child_raises_and_does_no_harm(
    nursery: Nursery, tmp_path: Path, how: str
) -> None:
    """Dataloader workers are forks of the trainer; a call into an event loop that does not run there would hang."""
    remote = f"file://{tmp_path}/remote"
    with fifo_in(tmp_path) as fifo:
        trainer = nursery.start("forks", folder=str(tmp_path / "f"), remote=remote, how=how, fifo=fifo)
        trainer.expect("forked")
        trainer.expect("child pid")
    errors = [line for line in trainer.said if line.startswith("child UploaderClosedError")]
    assert len(errors) == 3
    assert all("this is its fork" in line for line in errors)
    took_s = float(trainer.expect("child took").split()[-1])
    assert took_s < 1
    trainer.tell("go on")
    assert trainer.finish() == 0, trainer.log.read_text()
    assert "not_closed" not in trainer.log.read_text()
    assert Oracle(remote, 1, num_shards=200).look() == {CheckpointId(1, 1)}


@pytest.mark.fault("F23")
def test_a_forked_child_does_not_keep_the_lock_of_a_killed_parent(nursery: Nursery, tmp_path: Path) -> None:
    """Otherwise a dataloader worker that outlives its trainer would keep the restarted trainer out."""
    remote = f"file://{tmp_path}/remote"
    with fifo_in(tmp_path) as fifo:
        trainer = nursery.start("forks", folder=str(tmp_path / "f"), remote=remote, how="os.fork", fifo=fifo)
        child = int(trainer.expect("child pid").split()[-1])
        trainer.kill()
        os.kill(child, 0)  # it is still alive
        started = time.monotonic()
        again = nursery.start(
            "saves", folder=str(tmp_path / "f"), remote=remote, rank=0, world_size=1, steps=[]
        )
        again.expect("opened 2")
        assert time.monotonic() - started < 10
        again.tell("stop")
        assert again.finish() == 0, again.log.read_text()
    assert Oracle(remote, 1, num_shards=200).look() == {CheckpointId(1, 1)}


def run_script(text: str, *args: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(text), *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


PREAMBLE = """
import sys
from pathlib import Path
from ckpt_async import Uploader
from tests.faults.trainer import write_shards
folder, remote = sys.argv[1:3]
def save(uploader, step, num_shards=20):
    uploader.enqueue(write_shards(Path(folder), uploader.generation, step, 0, num_shards), step)
    uploader.seal(step)
"""


def test_a_script_that_forgets_to_close_still_uploads_before_it_exits(tmp_path: Path) -> None:
    """The last checkpoint of a run is the one that everyone wants, but executors refuse work at exit."""
    remote = f"file://{tmp_path}/remote"
    done = run_script(
        PREAMBLE + "uploader = Uploader(folder, remote)\nsave(uploader, 1)\nprint('end')",
        str(tmp_path / "folder"),
        remote,
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert "not_closed" in done.stderr
    assert "Traceback" not in done.stderr
    assert Oracle(remote, 1, num_shards=20).look() == {CheckpointId(1, 1)}


def test_an_exception_in_the_training_loop_is_not_masked(tmp_path: Path) -> None:
    """An uploader that hides the training's own error, or exits as if all were well, is worse than none."""
    remote = f"file://{tmp_path}/remote"
    done = run_script(
        PREAMBLE
        + "with Uploader(folder, remote) as uploader:\n    save(uploader, 1)\n    raise ValueError('loss is nan')",
        str(tmp_path / "folder"),
        remote,
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("ValueError: loss is nan")
    assert done.stderr.count("Traceback") == 1
    assert Oracle(remote, 1, num_shards=20).look() == {CheckpointId(1, 1)}


@pytest.mark.parametrize("is_known", [True, False])
def test_a_second_uploader_for_the_same_rank_and_folder_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """Two engines on one journal would race for every shard, so the error must say who holds it. An uploader in the
    same process would not go away by waiting (a notebook cell that is run again), so the lock is not even tried.
    """
    from ckpt_async import Uploader
    from ckpt_async.errors import FolderInUseError
    from ckpt_async.local.journal import RankLock
    from ckpt_async.trainer import at_exit, handle

    remote = f"file://{tmp_path}/remote"
    with Uploader(tmp_path / "folder", remote):
        monkeypatch.setattr(handle, "LOCK_WAIT_S", 0.1)
        if is_known:
            monkeypatch.setattr(RankLock, "acquire", lambda *_, **__: pytest.fail("waits for itself"))
        else:
            monkeypatch.setattr(at_exit, "_open", set())
        before = threading.active_count()
        with pytest.raises(FolderInUseError, match=f"rank 0 of folder .* is in use by process {os.getpid()}"):
            Uploader(tmp_path / "folder", remote)
        assert threading.active_count() == before
        monkeypatch.undo()
        Uploader(tmp_path / "folder", remote, rank=1, world_size=2, generation=2).close(timeout_s=0)
    Uploader(tmp_path / "folder", remote).close()


def test_ctrl_c_while_opening_does_not_hang(tmp_path: Path) -> None:
    """A user who sees that the bucket is wrong presses Ctrl-C, once."""
    done = run_script(
        PREAMBLE
        + textwrap.dedent("""
        import os, signal
        from ckpt_async.engine import loop as engine
        recover = engine.Engine.recover
        async def interrupted(self, *args):
            os.kill(os.getpid(), signal.SIGINT)
            import asyncio
            await asyncio.sleep(0.3)
            await recover(self, *args)
        engine.Engine.recover = interrupted
        Uploader(folder, remote)
        """),
        str(tmp_path / "folder"),
        f"file://{tmp_path}/remote",
        timeout_s=30,
    )
    assert done.returncode != 0
    assert "KeyboardInterrupt" in done.stderr


@pytest.mark.fault("F23")
def test_a_forked_child_can_exit_normally(tmp_path: Path, s3_url: str) -> None:
    """libuv joined the threads of a name lookup, which do not exist in the child: SIGSEGV after the last line."""
    done = run_script(
        PREAMBLE
        + textwrap.dedent("""
        import atexit, os, warnings
        warnings.simplefilter("ignore")  # of later Pythons: that there are threads
        with Uploader(folder, remote) as uploader:
            save(uploader, 1)
            child = os.fork()
            if not child:
                atexit.register(lambda: print("at exit", flush=True))
                sys.exit(3)
            print(os.waitpid(child, 0)[1], flush=True)
        """),
        str(tmp_path / "folder"),
        s3_url,
    )
    assert (done.returncode, done.stdout) == (0, f"at exit\n{3 << 8}\n"), done.stderr
    assert Oracle(s3_url, 1, num_shards=20).look() == {CheckpointId(1, 1)}
