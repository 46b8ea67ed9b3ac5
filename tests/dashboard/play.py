"""Every query of deploy/grafana in a real Prometheus that scrapes real runs: this is what `./dev dashboard` runs.

There is a run that commits, one whose store is unavailable, one that waits for a rank, a trainer that is blocked, one
that lost a shard, one that saves with `CheckpointSaver`, and sweepers that work and that fail. A panel that stays
empty is an error: it queries what nothing exports.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import torch

from ckpt_async.saver import CheckpointSaver
from tests.alerts import play as alerts

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "deploy/grafana/dashboard.py"
PATIENCE_S = 120.0


def dashboard() -> Any:
    """Return the script that writes the dashboard, as a module."""
    spec = importlib.util.spec_from_file_location("ckpt_async_dashboard", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module


def panel_queries(written: str) -> list[tuple[str, str]]:
    """Return the (title, expression) of each query in a dashboard's JSON."""
    panels = json.loads(written)["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", ())]


def as_asked(expression: str) -> str:
    """Return the expression as Grafana sends it, with all runs selected."""
    return expression.replace("$run", ".*").replace("$__rate_interval", "10s")


def ask(port: int, query: str) -> list[Any]:
    """Return what Prometheus answers now. Raises HTTPError if the query is invalid."""
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(url, timeout=10) as reply:
        found: list[Any] = json.load(reply)["data"]["result"]
    return found


def begin(world: alerts.World, ends: contextlib.ExitStack) -> None:
    """Start everything that a dashboard may show, at once."""
    world.trainer("usual", pause_s=0.5, num_checkpoints_to_keep=2)
    watched = world.trainer("watched")
    watched.uploader.metrics.watcher_opened()
    for name, more in (("away", {}), ("blocked", {"max_backlog_checkpoints": 2})):
        trainer = world.trainer(name, pause_s=0.5, **more)
        ends.enter_context(alerts.away(trainer.remote))
        world.sweeper(world.root / name, remotes=(trainer.remote,))
    world.trainer("lone", world_size=2, launch_id="lone").save()
    losing = world.trainer("losing")
    with alerts.away(losing.remote):
        losing.save().write_bytes(b"another")
    world.sweeper(remotes=(world.root / "remotes/usual/checkpoints", world.root / "remotes/nobody"))
    saver = CheckpointSaver(world.root / "saver", f"file://{world.root}/remotes/saver", save_interval="1ba")
    ends.callback(saver.close)
    world.serve(saver.uploader.metrics)
    for batch in range(1, 4):
        saver.step(lambda: {"weight": torch.zeros(1000)}, batch)


def sweep_what_does_not_answer(world: alerts.World, ends: contextlib.ExitStack) -> None:
    """Run a process of its own: it retries for half a minute, and we do not wait for that."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        "sweep",
        "--remote",
        "s3://bucket/run",
        "--endpoint-url",
        "http://127.0.0.1:9",
        "--interval",
        "60",
    ]
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "us-east-1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpt_async", *command, "--metrics-port", str(port)],
        env=os.environ | keys,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    ends.callback(process.wait, 60)
    ends.callback(process.terminate)
    world.targets.append(f"127.0.0.1:{port}")


def play() -> dict[tuple[str, str], int]:
    """Return how many series each query has found. Raises TimeoutError if one stays empty."""
    wanted = panel_queries(dashboard().FILE.read_text())
    found: dict[tuple[str, str], int] = {}
    with contextlib.ExitStack() as ends:
        root = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-async-dashboard-")))
        world = alerts.World(root, ends)
        prometheus = alerts.Prometheus(root / "prometheus")
        ends.callback(prometheus.close)
        begin(world, ends)
        sweep_what_does_not_answer(world, ends)
        prometheus.scrape(world.targets)
        began = time.monotonic()
        while missing := [each for each in wanted if each not in found]:
            if time.monotonic() - began > PATIENCE_S:
                raise TimeoutError("empty: " + "; ".join(f"{title}: {query}" for title, query in missing))
            with contextlib.suppress(ConnectionError):  # it is still starting
                prometheus.firing()
                for title, query in missing:
                    if series := ask(prometheus.port, as_asked(query)):
                        found[title, query] = len(series)
            time.sleep(0.5)
    return found


def main() -> int:
    logging.getLogger("ckpt_async").setLevel(logging.CRITICAL)  # there is trouble on purpose
    found = play()
    for (title, _), series in found.items():
        print(f"{series:4} series  {title}")
    print(f"all {len(found)} queries of the dashboard found something")
    return 0


if __name__ == "__main__":
    sys.exit(main())
