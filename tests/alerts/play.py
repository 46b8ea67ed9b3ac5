"""Every alert of deploy/prometheus fires and resolves in a real Prometheus: this is what `./dev alerts` runs.

Real trainers and sweepers get into real trouble, and out of it again. The rules are those of the file with all times
divided by 300, so that an hour is twelve seconds: thresholds, ranges and `for`. Only the disk space is simulated:
filling a disk needs the permission to mount one, and the real one is shared with others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ckpt_async import Sweeper, Uploader
from ckpt_async.core.refusal import Refusal, Refused
from ckpt_async.errors import CkptAsyncError
from ckpt_async.page.server import MetricsServer, serve
from ckpt_async.watch.reporter import Reporter

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy/prometheus/alerts.yaml"
FASTER = 300
PATIENCE_S = 240.0

CONFIG = """
global: {scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}
rule_files: [rules.yaml]
scrape_configs:
  - job_name: ckpt-async
    file_sd_configs: [{files: [targets.json], refresh_interval: 500ms}]
"""

# A pair of an alert and one of its label values. An act gets into trouble, yields what must fire, and then
# gets out of trouble again. Its first yield is empty, and it continues when all is well.
Wanted = set[tuple[str, str]]
Act = Iterator[Wanted]


def faster(rules: str) -> str:
    """Return the same rules for a world in which everything takes a 300th of the time."""

    def duration(found: re.Match[str]) -> str:
        return f"{int(found[1]) * {'m': 60, 'h': 3600}[found[2]] * 1000 // FASTER}ms"

    def seconds(found: re.Match[str]) -> str:
        return f"{int(found[0]) / FASTER:g}"

    head, *alerts = re.split(r"(?m)^(?=      - alert:)", rules)
    scaled = [re.sub(r"\b(\d+)([mh])\b", duration, re.sub(r"\b\d{3,}\b", seconds, each)) for each in alerts]
    return "".join([head, *scaled])


# --- the participants --------------------------------------------------------------------------------------


class Trainer:
    """Saves a checkpoint of one small shard; by itself every `pause_s` seconds, if that is given."""

    server: MetricsServer

    def __init__(
        self, root: Path, name: str, *, pause_s: float = 0, remote: str = "", **settings: Any
    ) -> None:
        self.remote = root / "remotes" / (remote or name) / "checkpoints"
        usual = {"rank": 0, "world_size": 1, "launch_id": name, "on_error": "warn", "close_grace_s": 0}
        # Polling and retries are faster, like everything else.
        usual |= {
            "retry_initial_s": 0.05,
            "retry_max_s": 0.1,
            "decision_poll_s": 0.05,
            "decision_poll_max_s": 0.1,
        }
        arguments: dict[str, Any] = usual | settings
        self.uploader = Uploader(root / name, f"file://{self.remote}", **arguments)
        self.set_space(free_bytes=50 << 30)
        self.run = f"file://{self.remote}"
        self._step, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._train, args=(pause_s,))
        if pause_s:
            self._thread.start()

    def set_space(self, free_bytes: int) -> None:
        """Set the free space, of 100 GiB. The real disk is shared, and what others do must not look like a trend."""
        self.uploader._folder.space = lambda: (free_bytes, 100 << 30)  # type: ignore[method-assign]

    def train(self) -> None:
        """Save every half second from now on."""
        self._thread = threading.Thread(target=self._train, args=(0.5,))
        self._thread.start()

    def save(self) -> Path:
        self._step += 1
        path = self.uploader.folder / f"step-{self._step}" / f"rank-{self.uploader.rank}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1000)
        self.uploader.enqueue(path, self._step)
        self.uploader.seal(self._step)
        return path

    def _train(self, pause_s: float) -> None:
        while not self._ended.wait(pause_s):
            with contextlib.suppress(CkptAsyncError):  # it was told; training continues
                self.save()

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(CkptAsyncError):
            self.uploader.close(timeout_s=1)


class SweepLoop:
    """Sweeps again and again, unless it is made to hang."""

    def __init__(self, *folders: Path, remotes: tuple[Path, ...] = ()) -> None:
        self.sweeper = Sweeper(folders, [f"file://{each}" for each in remotes], verifies=True)
        self.may_go_on, self._ended = threading.Event(), threading.Event()
        self.may_go_on.set()
        self._thread = threading.Thread(target=self._sweep)
        self._thread.start()

    def _sweep(self) -> None:
        while not self._ended.wait(0.3):
            self.may_go_on.wait()
            asyncio.run(self.sweeper.sweep())

    def close(self) -> None:
        self._ended.set()
        self.may_go_on.set()
        self._thread.join()


class World:
    """Creates what the acts need, and ends all of it. Everything that exports metrics is a scrape target."""

    def __init__(self, root: Path, ends: contextlib.ExitStack) -> None:
        self.root, self.targets, self._ends = root, list[str](), ends

    def serve(self, exported: Any, port: int = 0) -> MetricsServer:
        server = serve(exported.registry, port, "127.0.0.1", {})
        assert server is not None
        self._ends.callback(server.close)
        self.targets.append(target(server))
        return server

    def trainer(self, name: str, **more: Any) -> Trainer:
        made = Trainer(self.root, name, **more)
        self._ends.callback(made.close)
        made.server = self.serve(made.uploader.metrics)
        return made

    def sweeper(self, *folders: Path, remotes: tuple[Path, ...] = ()) -> tuple[SweepLoop, str]:
        """Return a sweeper, and its name among the targets."""
        made = SweepLoop(*folders, remotes=remotes)
        self._ends.callback(made.close)
        return made, target(self.serve(made.sweeper.metrics))


def target(server: MetricsServer) -> str:
    return urllib.parse.urlsplit(server.url).netloc


@contextlib.contextmanager
def away(store: Path) -> Iterator[None]:
    """Put a file in place of the store's folder."""
    aside = store.with_name("aside")
    store.rename(aside)
    store.write_text("")
    try:
        yield
    finally:
        store.unlink()
        aside.rename(store)


# --- the acts ----------------------------------------------------------------------------------------------


def the_store_is_away(world: World) -> Act:
    trainer = world.trainer("usual", pause_s=0.5)
    yield set()
    with away(trainer.remote):
        yield {
            (alert, trainer.run)
            for alert in ("CkptAsyncCommitStale", "CkptAsyncBacklogGrowing", "CkptAsyncStoreFailing")
        }


def training_waits_for_uploads(world: World) -> Act:
    trainer = world.trainer("blocked", pause_s=0.5, max_backlog_checkpoints=2)
    yield set()
    with away(trainer.remote):
        yield {("CkptAsyncTrainerBlocked", trainer.run)}


def a_rank_never_delivers(world: World) -> Act:
    trainer = world.trainer("lone-0", remote="lone", world_size=2, launch_id="lone")
    trainer.save()
    yield set()
    yield {("CkptAsyncWaitsForRanks", trainer.run), ("CkptAsyncNeverCommitted", trainer.run)}
    world.trainer("lone-1", remote="lone", world_size=2, rank=1, launch_id="lone").save()


def the_trainer_hangs(world: World) -> Act:
    trainer = world.trainer("idle")
    trainer.save()
    yield set()
    yield {("CkptAsyncNoCheckpoints", trainer.run)}
    trainer.train()


def a_shard_is_changed(world: World) -> Act:
    trainer = world.trainer("losing")
    yield set()
    with away(trainer.remote):
        trainer.save().write_bytes(b"another")
    yield {("CkptAsyncUploadsFailing", trainer.run)}


def a_watcher_refuses(world: World) -> Act:
    trainer = world.trainer("watched")
    reporter = Reporter()
    reporter.count_in(trainer.uploader.metrics)
    yield set()
    reporter.record(Refused("last.ckpt", Refusal.CHANGED, "it was written in place"))
    yield {("CkptAsyncWatchRefused", trainer.run)}


def it_is_started_twice(world: World) -> Act:
    older = world.trainer("older", remote="twice", generation=1, pause_s=0.5)
    yield set()
    world.trainer("newer", remote="twice", generation=2).save()
    yield {("CkptAsyncFenced", older.run)}
    world.targets.remove(target(older.server))
    older.server.close()
    older.close()


def the_disk_is_full(world: World) -> Act:
    trainer = world.trainer("disk")
    yield set()
    trainer.set_space(free_bytes=5 << 30)
    yield {("CkptAsyncDiskFilling", "127.0.0.1")}
    trainer.set_space(free_bytes=50 << 30)


def a_remote_fails(world: World) -> Act:
    missing = world.root / "remotes" / "later" / "checkpoints"
    world.sweeper(remotes=(missing,))
    yield set()
    yield {("CkptAsyncSweepFailing", f"file://{missing}")}
    world.trainer("later").save()


def the_sweeper_hangs(world: World) -> Act:
    sweeper, name = world.sweeper()
    yield set()
    sweeper.may_go_on.clear()
    yield {("CkptAsyncSweeperStale", name)}
    sweeper.may_go_on.set()


def a_checkpoint_is_damaged(world: World) -> Act:
    trainer = world.trainer("sound")
    trainer.save()
    trainer.uploader.wait(1, timeout_s=30)
    _, name = world.sweeper(remotes=(trainer.remote,))
    yield set()
    (shard,) = (trainer.remote / "ckpt").rglob("*.bin")
    shard.rename(trainer.remote.with_name("lost"))
    yield {("CkptAsyncVerifyFailed", name)}
    trainer.remote.with_name("lost").rename(shard)


def a_port_does_not_answer(world: World) -> Act:
    trainer = world.trainer("silent")
    port = int(target(trainer.server).rpartition(":")[2])
    yield set()
    trainer.server.close()
    yield {("CkptAsyncDown", f"127.0.0.1:{port}")}
    world.serve(trainer.uploader.metrics, port)


ACTS: tuple[Callable[[World], Act], ...] = (
    *(
        the_store_is_away,
        training_waits_for_uploads,
        a_rank_never_delivers,
        the_trainer_hangs,
        a_shard_is_changed,
        a_watcher_refuses,
    ),
    *(it_is_started_twice, the_disk_is_full, a_remote_fails, the_sweeper_hangs, a_checkpoint_is_damaged),
    a_port_does_not_answer,
)


# --- the play ----------------------------------------------------------------------------------------------


class Prometheus:
    """A Prometheus server of its own, queried over HTTP."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        (folder / "rules.yaml").write_text(faster(RULES.read_text()))
        (folder / "prometheus.yaml").write_text(CONFIG)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder}/prometheus.yaml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--query.lookback-delta=1s",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def scrape(self, targets: list[str]) -> None:
        part = self.folder / "targets.part"
        part.write_text(json.dumps([{"targets": sorted(set(targets))}]))
        part.rename(self.folder / "targets.json")

    def firing(self) -> Wanted:
        """Return each firing alert with each of its labels. Empty while the server starts."""
        if self._process.poll() is not None:
            raise RuntimeError((self.folder / "log").read_text())
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/alerts", timeout=10) as reply:
                told = json.load(reply)["data"]["alerts"]
        except OSError:
            return set()
        alerts = [each["labels"] for each in told if each["state"] == "firing"]
        return {(labels["alertname"], value) for labels in alerts for value in labels.values()}

    def is_scraping(self) -> bool:
        query = urllib.parse.urlencode({"query": "min(up) == 1 and count(up) > 10"})
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/api/v1/query?{query}", timeout=10
            ) as reply:
                return bool(json.load(reply)["data"]["result"])
        except OSError:
            return False

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._log.close()


def play(say: Callable[[str], None] = print) -> set[str]:
    """Return the alerts that fired and resolved. Raises TimeoutError that names the one that did not."""
    with contextlib.ExitStack() as ends:
        root = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-async-alerts-")))
        world = World(root, ends)
        acts = {act.__name__.replace("_", " "): act(world) for act in ACTS}
        awaited: dict[str, Wanted] = {name: next(act) for name, act in acts.items()}
        prometheus = Prometheus(root / "prometheus")
        ends.callback(prometheus.close)
        ends.callback(
            lambda: [act.close() for act in acts.values()]
        )  # the stores come back before the trainers end
        began, unresolved, resolved = time.monotonic(), Wanted(), set[str]()
        is_begun = False
        while awaited or unresolved:
            if (passed_s := time.monotonic() - began) > PATIENCE_S:
                raise TimeoutError(f"not firing: {awaited}; not resolved: {unresolved}")
            prometheus.scrape(world.targets)
            firing = prometheus.firing()
            is_begun = is_begun or (prometheus.is_scraping() and not firing)
            for name, wanted in list(awaited.items()) if is_begun else ():
                if wanted <= firing:
                    for alert, _ in sorted(wanted):
                        say(f"{passed_s:5.1f} s  {alert} fires: {name}")
                    unresolved |= wanted
                    awaited[name] = next(acts[name], Wanted())
                    if not awaited[name]:
                        del awaited[name]
            for alert, label in sorted(unresolved - firing - set().union(*awaited.values())):
                say(f"{passed_s:5.1f} s  {alert} has resolved")
                unresolved.discard((alert, label))
                resolved.add(alert)
            time.sleep(0.2)
        return resolved


def main() -> int:
    logging.getLogger("ckpt_async").setLevel(logging.CRITICAL)  # there is trouble on purpose
    alerts = set(re.findall(r"- alert: (\w+)", RULES.read_text()))
    missing = alerts - play()
    print(
        f"alerts that did not fire: {sorted(missing)}"
        if missing
        else f"all {len(alerts)} alerts fired and resolved"
    )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
