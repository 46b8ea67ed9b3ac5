"""The scripts of deploy/slurm under a real Slurm: this is what `./dev slurm` runs.

Two nodes on loopback, each with a disk of its own. The multi-node job is told that its time is up, then one of its
tasks is killed, then a node is lost with its disk. The single-node chain is told that its time is up. Nothing that
all ranks have saved is lost, except with the disk, and the result is that of an undisturbed run.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from ckpt_async import restore
from tests.slurm.cluster import Cluster, lacking, until

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "deploy/slurm"
TRAINER = ROOT / "tests/slurm/train.py"


class Run:
    """A job's logs: what each rank has reported in each of its launches."""

    def __init__(self, cluster: Cluster, name: str, ranks: int) -> None:
        self.shared = cluster.root / name
        self.shared.mkdir()
        self.remote = f"file://{cluster.root}/remotes/{name}"
        self.folder = cluster.disk / name
        self.ranks = ranks

    def command(self, steps: int) -> list[str]:
        trainer = [sys.executable, str(TRAINER), str(self.folder), self.remote, str(steps), str(self.shared)]
        return [str(self.folder), *trainer]

    def starts(self, rank: int) -> list[tuple[int, str, int]]:
        """Return (step it resumed after, node, last step that it saved) for each launch."""
        log = self.shared / f"log-{rank}"
        found: list[tuple[int, str, int]] = []
        for line in log.read_text().splitlines() if log.exists() else ():
            word, step, *node = line.split()
            if word == "START":
                found.append((int(step), node[0], int(step)))
            else:
                found[-1] = (*found[-1][:2], int(step))
        return found

    def saved_by_all(self, start: int = -1) -> int:
        return min(self.starts(rank)[start][2] for rank in range(self.ranks))

    def has_saved(self, start: int, steps: int) -> bool:
        """Return whether every rank has started that often, and has saved that many steps since."""
        starts = [self.starts(rank) for rank in range(self.ranks)]
        return all(len(each) == start and each[-1][2] >= each[-1][0] + steps for each in starts)

    def check(self, steps: int) -> None:
        """Check that the store has what an undisturbed run would have made."""
        found = restore.find(self.remote)
        assert found is not None
        assert found.step == steps, found
        report = restore.fetch(found, self.shared / "result")
        for rank in range(self.ranks):
            state = b"begin"
            for _ in range(steps):
                state = hashlib.sha256(state + b"%d" % rank).hexdigest().encode()
            assert Path(report.paths[f"rank-{rank}.bin"]).read_bytes() == state, rank


def tasks(cluster: Cluster, node: str) -> list[int]:
    """Return the trainers on a node."""

    def words(pid: int) -> list[bytes]:
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return []

    return [pid for pid in cluster.processes(node) if words(pid)[1:2] == [str(TRAINER).encode()]]


def multi_node(cluster: Cluster, say: Callable[[str], None]) -> None:
    run = Run(cluster, "multi", 2)
    steps = 400
    small = {"nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "0", "time": "60"}
    job = cluster.submit(
        SCRIPTS / "multi-node.sbatch", *run.command(steps), output=f"{run.shared}/out", **small
    )
    until("both ranks save", lambda: run.has_saved(1, 10))
    cluster.end(job)
    goes_on(cluster, run, job, start=2)
    last = run.saved_by_all(-2)
    assert [run.starts(rank)[-1][0] for rank in (0, 1)] == [last, last], (run.starts(0), run.starts(1))
    say(
        f"time is up: flushed, drained, requeued, goes on after step {last}, the last that both ranks had saved"
    )

    os.kill(tasks(cluster, "node1")[0], signal.SIGKILL)
    os.kill(
        tasks(cluster, "node0")[0], signal.SIGTERM
    )  # as Slurm does after --wait, which would take two minutes
    goes_on(cluster, run, job, start=3)
    last = run.saved_by_all(-2)
    after = run.starts(0)[-1][0]
    assert after in (last, last + 1), (run.starts(0), run.starts(1))  # it may not have had time to report it
    say(f"a task is killed: what it left is drained on its node, goes on after step {after}")

    before = restore.find(run.remote)
    cluster.lose("node1")
    until("Slurm sees that the node is gone", lambda: cluster.state(job) != "RUNNING")
    cluster.boot("node1")
    goes_on(cluster, run, job, start=4)
    after = run.starts(0)[-1][0]
    assert before is not None
    assert before.step <= after <= run.saved_by_all(-2), (before.step, after)
    say(f"a node is lost with its disk: Slurm requeues, goes on after step {after}, a commit before the loss")
    until("the job completes", lambda: cluster.state(job) == "COMPLETED")
    run.check(steps)
    say("multi-node: completed, and every byte is that of a run that nobody disturbed")


def goes_on(cluster: Cluster, run: Run, job: str, start: int) -> None:
    def is_on() -> bool:
        cluster.hurry(job)
        return run.has_saved(start, 10)

    until(f"start {start} of job {job} saves", is_on)


def single_node(cluster: Cluster, say: Callable[[str], None]) -> None:
    run = Run(cluster, "single", 1)
    steps = 60
    small = {"array": "1-4%1", "gpus": "0", "time": "60", "output": f"{run.shared}/out-%a"}
    job = cluster.submit(SCRIPTS / "single-node.sbatch", *run.command(steps), **small)
    until("it saves", lambda: run.has_saved(1, 10))
    running = cluster.call("squeue", "-h", "-t", "RUNNING", "-j", job, "-o", "%A").strip()
    cluster.end(running)
    until("the next one saves", lambda: run.has_saved(2, 10))
    last = run.saved_by_all(-2)
    assert run.starts(0)[-1][0] == last, run.starts(0)
    say(f"single-node: time is up, the next job of the chain goes on after step {last}")

    def left() -> str:
        return cluster.call("squeue", "-h", "-j", job)

    until("the chain ends", lambda: not left().strip())
    assert len(run.starts(0)) == 2, run.starts(0)
    run.check(steps)
    say("single-node: completed, the rest of the chain is cancelled")


def play(say: Callable[[str], None] = print) -> None:
    """Run the play. Raises AssertionError or TimeoutError, with the logs of Slurm and of the jobs on stderr."""
    with tempfile.TemporaryDirectory(prefix="ckpt-async-slurm-") as folder:
        try:
            os.environ["CKPT_ASYNC_SIGTERM_FLUSH_S"] = "5"  # the rank that has lost the other waits that long
            with Cluster(Path(folder)) as cluster:
                multi_node(cluster, say)
                single_node(cluster, say)
        except BaseException:
            for log in [
                *Path(folder).glob("*.log"),
                *Path(folder).glob("*.out"),
                *Path(folder).glob("*/out*"),
            ]:
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}", file=sys.stderr)
            raise


def main() -> int:
    if reason := lacking():
        print(f"no Slurm can be run here: {reason}", file=sys.stderr)
        return 1
    play()
    return 0


if __name__ == "__main__":
    sys.exit(main())
