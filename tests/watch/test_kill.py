"""Trainer and watcher are killed at random moments, again and again: never half a checkpoint, and none is lost.

What was committed is told by the store alone, over botocore: its decisions, and the SHA-256 of what they commit.
CKPT_ASYNC_WATCH_KILLS=100 plays it long.
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
from botocore.session import get_session

from tests.seaweed import SeaweedServer

NUM_KILLS = int(os.environ.get("CKPT_ASYNC_WATCH_KILLS", "4"))
pytestmark = pytest.mark.timeout(120 + 12 * NUM_KILLS)

Sums = dict[str, str]


class Oracle:
    """What the trainer has said, and what the store has."""

    def __init__(self, server: SeaweedServer, prefix: str) -> None:
        keys = server.environment()
        self._s3 = get_session().create_client(
            "s3",
            endpoint_url=keys["AWS_ENDPOINT_URL_S3"],
            aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
            region_name="us-east-1",
        )
        self._bucket, self._prefix = server.bucket, prefix
        self.intended: dict[int, list[Sums]] = {}
        self.saved: dict[int, Sums] = {}  # the last version that was said to be saved
        self._seen: dict[str, tuple[int, int, Sums]] = {}

    def hear(self, line: str) -> None:
        what, step, *rest = line.split(maxsplit=2)
        if what == "intends":
            self.intended.setdefault(int(step), []).append(json.loads(rest[0]))
        elif what == "saved":
            self.saved[int(step)] = self.intended[int(step)][-1]

    def committed(self) -> dict[tuple[int, int], Sums]:
        """By generation and step. Fails if one is not, to the byte, what a trainer wrote as a whole."""
        for key in self._keys(".ckpt_async/decisions/"):
            if key in self._seen:
                continue
            decision = json.loads(self._get(key))
            if decision["outcome"] != "commit":
                continue
            generation, step = decision["generation"], decision["step"]
            folder = f"ckpt/{decision['name']}.g{generation}/"
            sums = {
                each.removeprefix(folder): hashlib.sha256(self._get(each)).hexdigest()
                for each in self._keys(folder)
            }
            assert sums in self.intended[step], f"{decision['name']} of generation {generation} is no whole"
            self._seen[key] = generation, step, sums
        return {(generation, step): sums for generation, step, sums in self._seen.values()}

    def check_nothing_is_lost(self) -> None:
        newest: dict[int, Sums] = {}
        for (_, step), sums in sorted(self.committed().items()):
            newest[step] = sums
        assert newest == self.saved

    def _keys(self, below: str) -> list[str]:
        pages = self._s3.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=f"{self._prefix}/{below}"
        )
        found = [each["Key"] for page in pages for each in page.get("Contents", ())]
        return [key.removeprefix(f"{self._prefix}/") for key in found]

    def _get(self, key: str) -> bytes:
        body = self._s3.get_object(Bucket=self._bucket, Key=f"{self._prefix}/{key}")["Body"]
        data: bytes = body.read()
        return data


class Play:
    """A trainer and a watcher, each started again when it was killed."""

    def __init__(self, folder: Path, url: str, oracle: Oracle, chance: random.Random) -> None:
        self._out, self._url, self._oracle, self._chance = folder / "out", url, oracle, chance
        self._out.mkdir()
        self._logs = (folder / "watcher.log").open("wb")
        self.trainer = self.start_trainer(10**9)
        self.watcher = self.start_watcher()

    def start_trainer(self, last: int) -> subprocess.Popen[str]:
        """From the newest checkpoint that it said it had saved, sometimes from the one before."""
        newest = max(self._oracle.saved, default=0)
        if self._chance.random() < 0.2:
            newest = max(0, newest - 10)
        script = Path(__file__).with_name("trainer.py")
        return subprocess.Popen(
            [sys.executable, script, self._out, str(newest + 10), str(last)],
            stdout=subprocess.PIPE,
            text=True,
        )

    def start_watcher(self, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ckpt_async", "watch", self._out, self._url, "-v", *more]
        return subprocess.Popen(
            [*command, "--settle-s", "0.2", "--interval", "1"], stdout=self._logs, stderr=self._logs
        )

    def train(self, num_lines: int) -> None:
        stdout = self.trainer.stdout
        assert stdout
        for _ in range(num_lines):
            self._oracle.hear(stdout.readline())

    def kill_trainer(self, last: int | None = None) -> None:
        """And start it again, to save without end, or so many more."""
        self.trainer.kill()
        self._hear_to_the_end()
        self.trainer = self.start_trainer(
            10**9 if last is None else max(self._oracle.saved, default=0) + last
        )

    def _hear_to_the_end(self) -> None:
        stdout: IO[str] | None = self.trainer.stdout
        assert stdout
        with stdout:
            for line in stdout:
                if line.endswith("\n"):
                    self._oracle.hear(line)
        self.trainer.wait()

    def kill_watcher(self) -> None:
        self.watcher.kill()
        self.watcher.wait()
        self.watcher = self.start_watcher()

    def end(self) -> None:
        """In peace: the trainer saves three more, the watcher finishes."""
        self.kill_trainer(last=30)
        self._hear_to_the_end()
        assert self.trainer.returncode == 0
        self.watcher.send_signal(signal.SIGTERM)
        self.watcher.wait(120)
        code = self.start_watcher("--once").wait(120)
        assert code in (0, 1), "1: a version was written over while it was uploaded"

    def stop(self) -> None:
        for each in (self.trainer, self.watcher):
            each.kill()
            each.wait()
        if self.trainer.stdout:
            self.trainer.stdout.close()
        self._logs.close()


def test_kills_at_random_moments_lose_nothing_and_publish_no_half(
    tmp_path: Path, s3_server: SeaweedServer, s3_url: str
) -> None:
    oracle = Oracle(s3_server, s3_url.partition(f"{s3_server.bucket}/")[2])
    chance = random.Random(7)
    play = Play(tmp_path, s3_url, oracle, chance)
    try:
        for _ in range(NUM_KILLS):
            play.train(chance.randrange(20, 200))
            victim = chance.choice(["trainer", "watcher", "both"])
            if victim != "watcher":
                play.kill_trainer()
            if victim != "trainer":
                play.kill_watcher()
            oracle.committed()
        play.end()
        oracle.check_nothing_is_lost()
    finally:
        play.stop()
    print(f"{len(oracle.saved)} saved, {len(oracle.committed())} commits, {NUM_KILLS} kills")
