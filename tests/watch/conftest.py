"""A folder that a trainer writes to, and `ckpt-async watch` as a process of its own."""

import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import cli, restore
from tests.watch.trees import safetensors, torch_zip

LIMIT_S = 120.0
# After this time a complete checkpoint is being uploaded, which takes four seconds in the tests that wait for it.
BEING_UPLOADED_S = 1.5
METRIC = "ckpt_async_watch_refused_total"
FAST = ("--settle-s", "0.2", "--interval", "1", "--json")


class Watching:
    """One `ckpt-async watch` or `run`; killed in any case at the end. Its lines of JSON are read as they come."""

    def __init__(self, *args: str | Path, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ckpt_async", *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )

    def told(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                yield json.loads(line)

    def until(self, event: str, step: int | None = None) -> dict[str, Any]:
        """The next thing of this kind that is told."""
        for each in self.told():
            if each.get("event") == event and step in (None, each.get("step")):
                return each
        raise AssertionError(f"no {event} {step} was told: {self.errors()}")

    def until_logged(self, text: str) -> None:
        assert self.process.stderr
        assert any(text in line for line in self.process.stderr)

    def errors(self) -> str:
        assert self.process.stderr
        return self.process.stderr.read()

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


class Place:
    """A trainer's folder `out` and a remote, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.here = folder
        self.out = folder / "out"
        self.out.mkdir(parents=True)
        self.state = folder / ".out.ckpt-async"
        self.remote = f"file://{folder}/remote"
        self._started: list[Watching] = []

    def watch(self, *more: str | Path, command: str = "watch", **environment: str) -> Watching:
        self._started.append(Watching(*self._arguments(command, more), **environment))
        return self._started[-1]

    def _arguments(self, command: str, more: tuple[str | Path, ...]) -> list[str]:
        args = (self.out, self.remote) if command == "watch" else (self.remote, "--folder", self.out)
        return [*map(str, (command, *args, *FAST, *more))]

    def once(self, *more: str | Path) -> tuple[int, dict[str, Any]]:
        return self.main("--once", *more)

    def main(self, *more: str | Path, command: str = "watch") -> tuple[int, dict[str, Any]]:
        """A command to its end, in this process: a new one takes a second to begin."""
        with contextlib.redirect_stdout(io.StringIO()) as told:
            code = cli.main(self._arguments(command, more))
        output = told.getvalue()
        is_error = output.startswith("{\n")
        return code, json.loads(output if is_error else output.splitlines()[-1]) if output else {}

    def committed(self, step: int, generation: int | None = None) -> dict[str, str] | None:
        """SHA-256 of what `fetch` gives back of a step, by name; None if nobody has committed it."""
        found = restore.find(self.remote, step=step, generation=generation)
        if found is None:
            return None
        destination = self.here / f"fetched-{found.generation}-{step}"
        restore.fetch(found, destination, overwrite=True)
        return hashes(destination)

    def newest(self) -> int | None:
        found = restore.find(self.remote)
        return found.step if found else None

    def end(self) -> None:
        for each in self._started:
            each.kill()


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def save(place: Place, step: int, *, size_bytes: int = 64) -> dict[str, str]:
    """A checkpoint as transformers writes it, and its SHA-256s."""
    here = place.out / f"checkpoint-{step}"
    here.mkdir()
    (here / "model.safetensors").write_bytes(safetensors(size_bytes))
    (here / "optimizer.pt").write_bytes(torch_zip(step=step))
    (here / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return hashes(here)


def counts(port: int, run: str) -> dict[str, float]:
    """What is exported now, by reason; empty while nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            lines = [line for line in reply.read().decode().splitlines() if line.startswith(METRIC)]
    except OSError:
        return {}
    assert all(f'run="{run}"' in line for line in lines)
    return {line.partition('reason="')[2].partition('"')[0]: float(line.split()[-1]) for line in lines}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    here = Place(tmp_path)
    yield here
    here.end()
