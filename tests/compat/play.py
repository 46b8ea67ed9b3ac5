"""A play: a framework's training script is SIGKILLed at a random moment, its node is lost, and a fresh node resumes
from the store. The losses must be those of an undisturbed run.

    def test_a_killed_run_goes_on_on_a_fresh_node(job: Job) -> None:
        job.check_kill_and_resume([sys.executable, SCRIPT])

The script is called as `SCRIPT NODE REMOTE`: a folder that is empty on a fresh node, and a URL below which this run is.
It resumes by itself if the store has a checkpoint, and one of its ranks reports each step with `say_loss(step, loss)`.
"""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckpt_async import restore

ROOT = Path(__file__).resolve().parents[2]
_MARK = "CKPT_ASYNC_PLAY"  # in the environment of every process that a play starts, however deep
_LOSS = "LOSS"


def say_loss(step: int, loss: float, to: str = "/dev/fd/1") -> None:
    """Report a step's loss from a training script, on one rank, in one write, because other ranks print to the same
    pipe. A process whose stdout is not the script's passes the script's as `to=`.

    It takes 20 ms, so that a step takes time, as real ones do.
    """
    time.sleep(0.02)
    say(f"{_LOSS} {step} {float(loss).hex()}", to)


def say(line: str, to: str = "/dev/fd/1") -> None:
    """Print a line of its own from a training script; it will be in `Training.said`."""
    with open(to, "wb", buffering=0) as pipe:
        pipe.write(f"\n{line}\n".encode())


def ranks(count: int) -> list[str]:
    """Return the start of a command by which torchrun starts a script."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={count}"]
    return [*torchrun, "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]


class Training:
    """One launch of a training script. Iterate over it for its losses as they come; it is always killed at the end."""

    def __init__(self, command: Sequence[str | Path], node: Path, log: Path) -> None:
        self._mark = uuid.uuid4().hex
        self._log = log
        self.node = node
        self.losses: dict[int, str] = {}
        self.said: list[str] = []  # every other line
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                cwd=node,
                env=os.environ
                | {_MARK: self._mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
                | {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
            )

    def __iter__(self) -> Iterator[int]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(f"{_LOSS} "):
                _, step, loss = line.split()
                if self.losses.setdefault(int(step), loss) != loss:
                    raise AssertionError(f"step {step} came twice, with different losses: {self.tail()}")
                yield int(step)
            else:
                self.said.append(line.rstrip())

    def finish(self) -> dict[int, str]:
        """Return all losses of a run that must end well."""
        for _ in self:
            pass
        assert self.process.wait(120) == 0, self.tail()
        return self.losses

    def processes(self) -> list[int]:
        """Return every process of this launch: ranks and what they started, whether adopted by init or not."""
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:  # it has ended, or belongs to another user
                    continue
        return found

    def kill(self) -> None:
        """Send SIGKILL to all processes, as when a node dies; those forked in between are found in the next round."""
        while pids := [pid for pid in self.processes() if not _is_zombie(pid)]:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self.process.wait()
        assert self.process.stdout is not None
        if not self.process.stdout.closed:
            for _ in self:  # what it had said before the kill
                pass
            self.process.stdout.close()

    def tail(self) -> str:
        log = self._log.read_text(errors="replace")[-8000:]
        return f"exit {self.process.poll()}, after {len(self.losses)} steps:\n{log}"


class Job:
    """Several starts of one training script, each on a node of its own."""

    def __init__(self, folder: Path, remote: str) -> None:
        self._folder = folder
        self._started: list[Training] = []
        self._kind: str | None = None
        self.remote = remote

    def start(self, command: Sequence[str | Path], name: str, remote: str | None = None) -> Training:
        """Start the script on the node of this name, whose folder is new unless the name was used before."""
        node = self.node(name)
        log = self._folder / f"{name}-{len(self._started)}.log"
        training = Training([*command, node, remote or f"{self.remote}/run"], node, log)
        self._started.append(training)
        return training

    def node(self, name: str) -> Path:
        """Return the folder of a node, creating it if necessary."""
        node = self._folder / name
        node.mkdir(exist_ok=True)
        return node

    def check_kill_and_resume(
        self, command: Sequence[str | Path], kills: int = 1, *, kind: str | None = None
    ) -> None:
        """Fail unless a run that loses its node `kills` times has the losses of an undisturbed run.

        Each kill comes within about a second after the commit of a checkpoint that the start before had not seen.
        """
        self._kind = kind
        expected = self.start(command, "undisturbed", f"{self.remote}/undisturbed").finish()
        assert expected, "the script said no losses"
        committed = 0  # a run resumed from step 0 would look like one that started afresh
        for count in range(kills):
            training = self.start(command, f"node-{count}")
            committed = self._kill_after_commit(training, committed)
            self.check_losses(training, expected, is_resumed=count > 0)
        last = self.start(command, f"node-{kills}")
        last.finish()
        self.check_losses(last, expected, is_resumed=True)
        assert max(last.losses) == max(expected), last.tail()
        assert self.committed() == self.committed("undisturbed")

    def committed(self, name: str = "run") -> int:
        """Return the step of the newest committed checkpoint; -1 if there is none."""
        found = restore.find(f"{self.remote}/{name}", kind=self._kind)
        return -1 if found is None else found.step

    def kill(self) -> None:
        for each in self._started:
            each.kill()

    def _kill_after_commit(self, training: Training, before: int) -> int:
        """Kill it at a random moment after a commit newer than `before`, and return the newest committed step."""
        for _ in training:
            if self.committed() > before:
                break
        else:
            raise AssertionError(f"it ended before a commit was seen: {training.tail()}")
        wait_s = random.random() ** 2  # early moments are the interesting ones
        until = time.monotonic() + wait_s
        for _ in training:
            if time.monotonic() > until:
                break
        else:
            raise AssertionError(f"it ended before it was killed: make it train longer. {training.tail()}")
        training.kill()
        print(f"killed {wait_s:.3f} s after a commit, at step {max(training.losses)}", file=sys.stderr)
        return self.committed()

    def check_losses(self, training: Training, expected: dict[int, str], *, is_resumed: bool) -> None:
        """Fail unless every step had the same loss as in the undisturbed run."""
        assert training.losses, training.tail()
        wrong = {
            step: (float.fromhex(loss), float.fromhex(expected[step]) if step in expected else None)
            for step, loss in training.losses.items()
            if expected.get(step) != loss
        }
        assert not wrong, f"losses differ from those of the undisturbed run: {wrong}\n{training.tail()}"
        if is_resumed:
            assert min(training.losses) > min(expected), f"it began afresh: {training.tail()}"


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
