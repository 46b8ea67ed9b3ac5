"""On two nodes the trainer and the watchers are killed at random moments: never half a checkpoint, nor one mixed of two
saves of a step. The store is a folder, and what is in it is listed and hashed.

CKPT_ASYNC_WATCH_KILLS=100 plays it long (with `-o faulthandler_timeout=0`, or pytest ends it after 6 minutes).
"""

import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.watch.conftest import hashes
from tests.watch.killed import Sums, Trainer

NUM_KILLS = int(os.environ.get("CKPT_ASYNC_WATCH_KILLS", "2"))
# How many checkpoints the trainer leaves in its folders.
NUM_KEPT = [3, 1000] if NUM_KILLS > 5 else [3]
pytestmark = pytest.mark.timeout(180 + 30 * NUM_KILLS)


class Play:
    """A trainer on two nodes and the watcher of each, started again when they were killed."""

    def __init__(self, folder: Path, num_kept: int, chance: random.Random) -> None:
        self._folder = folder
        self._seen: dict[str, Sums] = {}  # what was committed, by name and generation
        self._nodes = [folder / f"node-{node}/out" for node in range(2)]
        for out in self._nodes:
            out.mkdir(parents=True)
        self._logs = [(folder / f"watcher-{node}.log").open("wb") for node in range(2)]
        self.trainer = Trainer("node_trainer.py", self._nodes, chance, goes_back=0.3, more=[str(num_kept)])
        self.watchers = [self._start_watcher(node) for node in range(2)]

    def _start_watcher(self, node: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ckpt_async", "watch", self._nodes[node]]
        options = ["--node", f"{node}/2", "--settle-s", "0.2", "--interval", "1", "-v"]
        log = self._logs[node]
        remote = f"file://{self._folder}/remote"
        return subprocess.Popen([*command, remote, *options], stdout=log, stderr=log)

    def kill_watcher(self, node: int) -> None:
        self.watchers[node].kill()
        self.watchers[node].wait()
        self.watchers[node] = self._start_watcher(node)

    def end(self) -> list[int]:
        """In peace: the trainer saves three more, the watchers finish. Returns their exit codes."""
        last = self.trainer.finish()
        while last not in self.committed():
            for each in self.watchers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    raise AssertionError(f"a watcher has ended with {each.wait(0.5)}")
        for each in self.watchers:
            each.terminate()
        return [each.wait(120) for each in self.watchers]

    def committed(self) -> dict[int, Sums]:
        """The newest commit of each step. Fails if one is not, to the byte, what a trainer wrote as a whole."""
        found: dict[int, Sums] = {}
        decisions = (self._folder / "remote/.ckpt-async/decisions").rglob("*.json")
        decided = [json.loads(path.read_bytes()) for path in decisions]
        for each in sorted(decided, key=lambda each: (each["generation"], each["step"])):
            if each["outcome"] == "commit":
                name = f"{each['name']}.g{each['generation']}"
                if name not in self._seen:
                    self._seen[name] = hashes(self._folder / "remote/ckpt" / name)
                sums = self._seen[name]
                versions = self.trainer.intended[each["step"]]
                whose = {
                    shard: [n for n, was in enumerate(versions) if was.get(shard) == of]
                    for shard, of in sums.items()
                }
                assert sums in versions, f"{name} is no whole, but mixed of these saves: {whose}"
                found[each["step"]] = sums
        return found

    def stop(self) -> None:
        self.trainer.stop()
        for each in self.watchers:
            each.kill()
            each.wait()
        for log in self._logs:
            log.close()


@pytest.mark.fault("F1a")
@pytest.mark.parametrize("num_kept", NUM_KEPT)
def test_kills_on_two_nodes_publish_no_half_and_lose_nothing_that_is_still_there(
    tmp_path: Path, num_kept: int
) -> None:
    chance = random.Random(7)
    play = Play(tmp_path, num_kept, chance)
    try:
        for _ in range(NUM_KILLS):
            play.trainer.train(chance.randrange(20, 100))
            victims = chance.choice([["trainer"], [0], [1], [0, 1], ["trainer", 0, 1]])
            for victim in victims:
                play.kill_watcher(victim) if isinstance(victim, int) else play.trainer.kill()
            play.committed()
        codes = play.end()
        committed = play.committed()
        lost = [step for step, sums in play.trainer.saved.items() if committed.get(step) != sums]
        print(f"{len(play.trainer.saved)} saved, {len(lost)} lost, {NUM_KILLS} kills, exit codes {codes}")
        newest = sorted(play.trainer.saved)[-min(num_kept, len(play.trainer.saved)) :]
        assert not set(newest) & {*lost}
    finally:
        play.stop()
