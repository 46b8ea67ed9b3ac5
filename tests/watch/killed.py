"""A training script that is killed and started again, and what it has said of its checkpoints."""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

Sums = dict[str, str]  # SHA-256 of each file of a checkpoint
ENDLESS = 10**9


class Trainer:
    """`SCRIPT FOLDER… FIRST LAST [MORE…]` of this folder. It begins behind the newest checkpoint that it said it had
    saved; now and then (`goes_back`) a save further back.
    """

    def __init__(
        self,
        script: str,
        folders: Sequence[Path],
        chance: random.Random,
        *,
        goes_back: float,
        more: Sequence[str] = (),
    ) -> None:
        self.intended: dict[int, list[Sums]] = {}  # every version of a step
        self.saved: dict[int, Sums] = {}  # the last version that was said to be saved
        self._command = [sys.executable, Path(__file__).with_name(script), *folders]
        self._chance, self._goes_back, self._more = chance, goes_back, more
        self._process = self._start(ENDLESS)

    def _start(self, last: int) -> "subprocess.Popen[str]":
        newest = max(self.saved, default=0)
        if self._chance.random() < self._goes_back:
            newest = max(0, newest - 10)
        command = [*self._command, str(newest + 10), str(last), *self._more]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def train(self, num_lines: int) -> None:
        """Until it has said so much more."""
        assert self._process.stdout
        for _ in range(num_lines):
            self._hear(self._process.stdout.readline())

    def kill(self, last: int = ENDLESS) -> None:
        """And start it again, to save up to `last`."""
        self._process.kill()
        self._hear_to_the_end()
        self._process = self._start(last)

    def finish(self) -> int:
        """In peace: three more. Returns the last step."""
        last = max(self.saved, default=0) + 30
        self.kill(last)
        self._hear_to_the_end()
        assert self._process.returncode == 0
        return last

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()

    def _hear_to_the_end(self) -> None:
        stdout = self._process.stdout
        assert stdout
        with stdout:
            for line in stdout:
                if line.endswith("\n"):
                    self._hear(line)
        self._process.wait()

    def _hear(self, line: str) -> None:
        what, step, *rest = line.split(maxsplit=2)
        if what == "intends":
            self.intended.setdefault(int(step), []).append(json.loads(rest[0]))
        elif what == "saved":
            self.saved[int(step)] = self.intended[int(step)][-1]
