"""The command that is run for events, tested by itself."""

import json
import os
import select
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt_async import Uploader
from ckpt_async.cli import main
from ckpt_async.core.model import CheckpointId
from ckpt_async.events.command import Command, environment, warn_if_missing
from ckpt_async.events.delivery import DeliveryError
from ckpt_async.events.event import Event, of_checkpoint
from tests.descriptors import many_open
from tests.events.saves import save


def test_a_command_is_run_in_a_trainer_with_thousands_of_open_files(tmp_path: Path) -> None:
    event = of_checkpoint("committed", "s3://bucket/run", CheckpointId(1, 7), "step-7", 0.0)
    with many_open():
        Command(f"touch {tmp_path}/told-{{step}}", 60.0).deliver(event)
    assert (tmp_path / "told-7").exists()


def test_what_a_command_has_started_ends_with_it_even_if_it_ignores_sigterm(tmp_path: Path) -> None:
    """An evaluation that goes on after its command was ended would hold the GPU for ever."""
    alive = tmp_path / "alive"
    os.mkfifo(alive)
    child = f"trap : TERM; exec > {alive}; echo begun; while :; do sleep 1000; done"
    command = Command(f"sh -c '({child}) & wait'", 60.0)
    event = of_checkpoint("committed", "s3://bucket/run", CheckpointId(1, 7), "step-7", 0.0)
    with ThreadPoolExecutor(1) as thread:
        delivery = thread.submit(command.deliver, event)
        with alive.open() as reading:
            assert reading.readline() == "begun\n"
            command.stop()
            with pytest.raises(DeliveryError, match="terminated"):
                delivery.result(60)
            ended = select.poll()
            ended.register(reading, select.POLLHUP)
            assert ended.poll(10_000), "it still runs"


REAPER = """
import logging, os, pathlib, signal, sys, time
from ckpt_async.core.model import CheckpointId
from ckpt_async.events.command import Command
from ckpt_async.events.event import of_checkpoint

real = os.pidfd_open

def too_late(pid):
    while pathlib.Path(f"/proc/{pid}").exists():
        time.sleep(0.001)
    return real(pid)

os.pidfd_open = too_late
logging.basicConfig()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
event = of_checkpoint("committed", "s3://bucket/run", CheckpointId(1, 7), "step-7", 0.0)
for _ in range(2):
    Command(f"sh -c 'echo told >> {sys.argv[1]}'", 60.0).deliver(event)
"""


def test_a_command_is_run_once_where_nobody_waits_for_children(tmp_path: Path) -> None:
    """As under a program that ignores SIGCHLD. The command had ended, was taken for failed, and was run again."""
    told = tmp_path / "told"
    subprocess.run([sys.executable, "-c", REAPER, str(told)], check=True, timeout=60)
    assert told.read_text() == "told\n" * 2


def test_an_event_that_no_argument_holds_is_told_without_its_metrics(tmp_path: Path) -> None:
    metrics = {f"expert-{number}/load-of-its-router": 0.5 for number in range(10_000)}
    event = of_checkpoint(
        "committed", "s3://bucket/run", CheckpointId(1, 7), "step-7", 0.0, num_shards=3, metrics=metrics
    )
    Command(f"sh -c 'echo \"$1\" > {tmp_path}/told' - {{json}}", 60.0).deliver(event)
    for text in ((tmp_path / "told").read_text(), environment(event, os.environ)["CKPT_ASYNC_EVENT_JSON"]):
        told = Event.from_json(text)
        assert told.id == event.id
        assert told.details == {"num_shards": 3, "metrics": {}, "num_metrics_left_out": 10_000}
    few = of_checkpoint("committed", "s3://bucket/run", CheckpointId(1, 7), "", 0.0, metrics={"loss": 2.5})
    assert json.loads(environment(few, {})["CKPT_ASYNC_EVENT_JSON"])["details"] == {"metrics": {"loss": 2.5}}


@pytest.mark.parametrize("command", [["drain"], ["sweep"], ["watch"]])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--exec", "evaluate {stpe}"),
        ("--exec-on", "comitted"),
        ("--webhook", "example.com"),
        ("--webhook-on", "comitted"),
        ("--webhook-secret-file", "/nowhere"),
    ],
)
def test_what_is_wrong_is_called_as_it_was_typed(
    tmp_path: Path, command: list[str], option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--exec": "true", "--webhook": "http://127.0.0.1:9/", option: value}
    arguments = [word for pair in given.items() for word in pair]
    remote = [f"file://{tmp_path}/run"] if command == ["watch"] else []
    assert main([*command, str(tmp_path), *remote, *arguments]) == 2
    told = capsys.readouterr().err
    assert f"{option} " in told or f"{option}=" in told
    assert "event_" not in told


@pytest.mark.parametrize("name", ["ckpt-async-evalaute", "./evaluate"])
def test_a_missing_command_is_told_at_start_and_is_run_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """It was told only when an event came, perhaps hours later."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "kept").mkdir()
    sweep = ["sweep", str(tmp_path / "kept"), "--exec", f"{name} {{step}}"]
    assert main(sweep) == 0
    missing = f"event_command_missing command={name}; this is not "
    assert caplog.text.count(missing) == 1
    caplog.clear()
    warn_if_missing.cache_clear()  # as in another process
    with Uploader("folder", f"file://{tmp_path}/run", event_exec=f"{name} {{step}}") as uploader:
        assert missing in caplog.text
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\necho $1 > {tmp_path}/told\n")
        command.chmod(0o755)
        save(uploader, 7)
    assert (tmp_path / "told").read_text() == "7\n"
    caplog.clear()
    warn_if_missing.cache_clear()
    assert main(sweep) == 0
    assert "event_command_missing" not in caplog.text
