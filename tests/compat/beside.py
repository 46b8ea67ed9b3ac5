"""A play of `ckpt-async watch` beside a trainer that knows nothing of it: both are SIGKILLed at random moments.

A training script is called as `SCRIPT … NODE REMOTE` (it does not use REMOTE). It saves below NODE/checkpoints with its
framework's own rotation, and resumes by itself from what is there. One of its ranks calls the functions below:
`say_left` when it starts, `say_resumed`, `say_step`, and `say_saved` when its framework says that a checkpoint is
complete.
"""

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from botocore.session import get_session

from ckpt_async import restore
from tests.compat.play import ROOT, Job, Training, say, say_loss

FOLDER = "checkpoints"
Sums = dict[str, str]  # SHA-256 of each file of a checkpoint


# --- what training scripts say ------------------------------------------------------------------------------


def say_step(step: int, loss: float, to: str = "/dev/fd/1") -> None:
    """Report a step and its loss, taking 0.15 s. A watcher that was killed is back after 1 s, before the trainer has
    rotated away everything that the watcher had seen. Nothing else may tell the trainer when to continue, or kills
    would not come at random moments.
    """
    time.sleep(0.13)
    say_loss(step, loss, to)


def say_left(folder: Path, to: str = "/dev/fd/1") -> None:
    """Report what an earlier launch has left, complete or not."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if not path.is_symlink():
            say(f"LEFT {path.name} {json.dumps(sums_of(path))}", to)


def say_resumed(step: int, to: str = "/dev/fd/1") -> None:
    say(f"RESUMED {step}", to)


def say_saved(path: Path, to: str = "/dev/fd/1") -> None:
    say(f"SAVED {path.name} {json.dumps(sums_of(path))}", to)


def sums_of(path: Path) -> Sums:
    """Return the checksums of a folder's files, or of one file."""
    if path.is_file():
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}
    files = (each for each in path.rglob("*") if each.is_file())
    return {
        each.relative_to(path).as_posix(): hashlib.sha256(each.read_bytes()).hexdigest() for each in files
    }


# --- the play -----------------------------------------------------------------------------------------------


class Heard:
    """What all starts of a trainer said about its checkpoints."""

    def __init__(self) -> None:
        self.saved: dict[str, Sums] = {}  # the last version of each
        self.versions: defaultdict[str, list[Sums]] = defaultdict(list)

    def hear(self, said: Sequence[str]) -> None:
        for what, name, sums in (
            line.split(maxsplit=2) for line in said if line.startswith(("SAVED", "LEFT"))
        ):
            self.versions[name].append(json.loads(sums))
            if what == "SAVED":
                self.saved[name] = json.loads(sums)


def check_watched(
    job: Job, command: Sequence[str | Path], *, num_steps: int, options: Sequence[str] = ()
) -> None:
    """Fail unless every committed checkpoint is, byte for byte, a complete one that the trainer wrote, and
    every checkpoint that the trainer left is committed; and unless the framework itself resumes from the
    newest one after it was fetched.
    """
    heard, chance = Heard(), random.Random()
    out = job.node("node") / FOLDER
    training = job.start(command, "node")
    with _watcher(out, job.remote, options) as watcher:
        for _ in range(2):
            _train(training, chance.randrange(6, 16))
            watcher.kill()
        _train(training, chance.randrange(6, 16))
        training.kill()
        heard.hear(training.said)
        training = job.start(command, "node")
        _train(training, chance.randrange(2, 8))
        watcher.kill()
        training.finish()
        heard.hear(training.said)
        watcher.end()
    done = committed(job.remote)
    names = [name for _, name, _ in done]
    print(f"committed: {names}; saved: {list(heard.saved)}", file=sys.stderr)
    _check_committed(done, heard, out)
    newest = restore.find(job.remote)
    assert newest is not None
    fetched, name = job.node("fresh") / FOLDER, _local(newest.name, newest.files)
    restore.fetch(newest, fetched if name in newest.files else fetched / name)
    fresh = job.start(command, "fresh")
    fresh.finish()
    assert f"RESUMED {num_steps}" in fresh.said, f"{fresh.said} {fresh.tail()}"


def _train(training: Training, num_steps: int) -> None:
    for count, _ in enumerate(training):
        if count == num_steps:
            return
    raise AssertionError(f"it ended before it was killed: {training.tail()}")


def _check_committed(done: list[tuple[tuple[int, int], str, Sums]], heard: Heard, out: Path) -> None:
    whole = {_shape(sums) for sums in heard.saved.values()}
    newest: dict[str, Sums] = {}
    for id_, name, sums in done:
        assert sums in heard.versions[name], f"{name} of {id_} is not what was written: {sums}"
        assert _shape(sums) in whole, f"{name} of {id_} is no whole: {sorted(sums)}"
        newest[name] = sums
    left = {path.name for path in out.iterdir() if not path.is_symlink()} & heard.saved.keys()
    assert left, "the trainer has left nothing"
    for name in left:
        assert newest.get(name) == heard.saved[name], f"{name} is complete, and was not committed so"
    rotated = newest.keys() - left
    assert rotated, "nothing was committed before the trainer rotated it away: the play shows too little"


def _shape(sums: Sums) -> tuple[str, ...]:
    """Return the names of a checkpoint's files, with their numbers masked."""
    return tuple(sorted(re.sub(r"[0-9]+", "#", name) for name in sums))


def committed(remote: str) -> list[tuple[tuple[int, int], str, Sums]]:
    """Return the generation and step, name and files of each committed checkpoint, oldest first, using
    only the store, over botocore.
    """
    bucket, _, prefix = remote.removeprefix("s3://").partition("/")
    s3 = get_session().create_client("s3")

    def keys(below: str) -> list[str]:
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/{below}")
        return [each["Key"] for page in pages for each in page.get("Contents", ())]

    def get(key: str) -> bytes:
        data: bytes = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
        return data

    found = []
    for decision in (json.loads(get(key)) for key in keys(".ckpt-async/decisions/")):
        if decision["outcome"] == "commit":
            id_, name = (decision["generation"], decision["step"]), decision["name"]
            folder = f"ckpt/{name}.g{id_[0]}/"
            whole = f"{prefix}/{folder}"
            sums = {key.removeprefix(whole): hashlib.sha256(get(key)).hexdigest() for key in keys(folder)}
            found.append((id_, _local(name, sums), sums))
    return sorted(found)


def _local(name: str, files: Iterable[str]) -> str:
    """Return the trainer's name for a checkpoint. A single file has its own name inside a checkpoint whose name is the
    file's with the step appended.
    """
    first, *others = files
    return first if not others and name.startswith(first) else name


class _Watcher:
    def __init__(self, command: list[str | Path], log: IO[bytes]) -> None:
        self._command, self._log = command, log
        self._process = self._start()

    def kill(self) -> None:
        """Kill the watcher and start it again."""
        self._process.kill()
        self._process.wait()
        self._process = self._start()

    def end(self) -> None:
        """End the watcher with SIGTERM; then adopt what it may not have seen."""
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(300) == 0, "the watcher has ended badly"
        self._process = self._start("--once")
        assert self._process.wait(300) == 0, "not all could be adopted"

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _start(self, *more: str) -> subprocess.Popen[bytes]:
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.Popen([*self._command, *more], stdout=self._log, stderr=self._log, env=env)


@contextmanager
def _watcher(out: Path, remote: str, options: Sequence[str]) -> Iterator[_Watcher]:
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "ckpt_async", "watch", out, remote, "-v", "--settle-s", "0.3", *options]
    log = out.parent / "watcher.log"
    with log.open("wb") as lines:
        watcher = _Watcher(command, lines)
        try:
            yield watcher
        except BaseException:
            print(log.read_text(errors="replace")[-6000:], file=sys.stderr)
            raise
        finally:
            watcher.stop()
