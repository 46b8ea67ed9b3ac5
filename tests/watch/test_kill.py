"""Trainer and watcher are killed at random moments, again and again: never half a checkpoint, and none is lost.

What was committed is told by the store alone, over botocore: its decisions, and the SHA-256 of what they commit.
CKPT_ASYNC_WATCH_KILLS=100 plays it long (with `-o faulthandler_timeout=0`, or pytest ends it after 6 minutes).
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from botocore.session import get_session

from tests.seaweed import SeaweedServer
from tests.watch.killed import Sums, Trainer

NUM_KILLS = int(os.environ.get("CKPT_ASYNC_WATCH_KILLS", "4"))
pytestmark = pytest.mark.timeout(120 + 12 * NUM_KILLS)


class Oracle:
    """What the store has, beside what the trainer has said."""

    def __init__(self, server: SeaweedServer, prefix: str, trainer: Trainer) -> None:
        keys = server.environment()
        self._s3 = get_session().create_client(
            "s3",
            endpoint_url=keys["AWS_ENDPOINT_URL_S3"],
            aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
            region_name="us-east-1",
        )
        self._bucket, self._prefix = server.bucket, prefix
        self._trainer = trainer
        self._seen: dict[str, tuple[int, int, Sums]] = {}

    def committed(self) -> dict[tuple[int, int], Sums]:
        """By generation and step. Fails if one is not, to the byte, what a trainer wrote as a whole."""
        for key in self._keys(".ckpt-async/decisions/"):
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
            assert sums in self._trainer.intended[step], (
                f"{decision['name']} of generation {generation} is no whole"
            )
            self._seen[key] = generation, step, sums
        return {(generation, step): sums for generation, step, sums in self._seen.values()}

    def check_nothing_is_lost(self) -> None:
        newest: dict[int, Sums] = {}
        for (_, step), sums in sorted(self.committed().items()):
            newest[step] = sums
        assert newest == self._trainer.saved

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


class Watcher:
    """Started again when it was killed."""

    def __init__(self, folder: Path, url: str) -> None:
        self._command = [sys.executable, "-m", "ckpt_async", "watch", folder / "out", url, "-v"]
        self._log = (folder / "watcher.log").open("wb")
        self._process = self._start()

    def _start(self, *more: str) -> "subprocess.Popen[bytes]":
        command = [*self._command, "--settle-s", "0.2", "--interval", "1", *more]
        return subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process = self._start()

    def end(self) -> None:
        """In peace; and what it may not have seen is adopted."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(120)
        self._process = self._start("--once")
        assert self._process.wait(120) in (0, 1), "1: a version was written over while it was uploaded"

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


@pytest.mark.fault("F1a")
def test_kills_at_random_moments_lose_nothing_and_publish_no_half(
    tmp_path: Path, s3_server: SeaweedServer, s3_url: str
) -> None:
    chance = random.Random(7)
    (tmp_path / "out").mkdir()
    trainer = Trainer("trainer.py", [tmp_path / "out"], chance, goes_back=0.2)
    watcher = Watcher(tmp_path, s3_url)
    oracle = Oracle(s3_server, s3_url.partition(f"{s3_server.bucket}/")[2], trainer)
    try:
        for _ in range(NUM_KILLS):
            trainer.train(chance.randrange(20, 100))
            victims = chance.choice([[trainer], [watcher], [trainer, watcher]])
            for victim in victims:
                victim.kill()
            oracle.committed()
        trainer.finish()
        watcher.end()
        oracle.check_nothing_is_lost()
    finally:
        trainer.stop()
        watcher.stop()
    print(f"{len(trainer.saved)} saved, {len(oracle.committed())} commits, {NUM_KILLS} kills")
