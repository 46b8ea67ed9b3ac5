"""A real S3 server that is slow, silent, wrong, away or killed, behind a proxy that counts what is sent."""

import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from ckpt_async import CheckpointAbortedError, StoreError, StoreOptions, Uploader, cli
from ckpt_async.cli.output import Exit
from ckpt_async.core.model import CheckpointId
from ckpt_async.errors import FailureReason
from ckpt_async.local import journals
from ckpt_async.transfer import patience
from tests.faults.oracle import Oracle
from tests.faults.processes import ROOT, SOAK, Nursery
from tests.faults.proxy import Fault, FaultProxy
from tests.faults.saves import QUICK, SHARDS, save
from tests.seaweed import SeaweedServer

MIB = 1 << 20
PART = 5 * MIB
CONTROL = r"/\.ckpt-async/"


# --- one request at a time ---------------------------------------------------------------------------------------


@pytest.mark.fault("F8")
@pytest.mark.parametrize("lane", [SHARDS, rf"{CONTROL}(receipts|decisions|latest)"], ids=["bulk", "control"])
@pytest.mark.parametrize("kind", ["silent", "continue_then_stop", "unavailable", "reset", "drop_reply"])
def test_every_kind_of_request_failure_is_survived(
    proxy: FaultProxy, s3_url: str, tmp_path: Path, kind: str, lane: str, caplog: pytest.LogCaptureFixture
) -> None:
    """R13, R14: a peer that accepts and stays silent used to hang aiobotocore forever, and after a lost reply the
    repeated write looks as if another writer had won.
    """
    with Uploader(tmp_path / "folder", f"{s3_url}/run", **QUICK) as uploader:
        fault = proxy.add(Fault(kind, "PUT", lane, times=2, after_bytes=100))
        started = time.monotonic()
        save(uploader, 1)
        uploader.wait(1, timeout_s=30)
        assert time.monotonic() - started < 25, "nearer to the SDK's timeouts than to ours"
        assert fault.num_hits == 2
    assert Oracle(f"{s3_url}/run", 1).look() == {CheckpointId(1, 1)}
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("size_bytes", [1000, 3 * MIB])
def test_an_archived_shard_is_told_and_not_retried(
    proxy: FaultProxy,
    s3_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    size_bytes: int,
) -> None:
    """Glacier answers HEAD as if nothing were wrong, and refuses GET until somebody has restored the object."""
    monkeypatch.setattr("ckpt_async.restore.session.PATIENCE_S", 3.0)  # for as long, it was retried
    with Uploader(tmp_path / "folder", f"{s3_url}/run", **QUICK) as uploader:
        (tmp_path / "folder" / "a.pt").write_bytes(b"x" * size_bytes)
        uploader.enqueue(tmp_path / "folder" / "a.pt", 1)
        uploader.seal(1)
    proxy.add(Fault("archived", "GET", SHARDS))
    assert cli.main(["pull", f"{s3_url}/run", str(tmp_path / "there")]) == Exit.ERROR
    told = capsys.readouterr().err
    assert "a.pt" in told
    assert "archive" in told
    assert "restore it first" in told


@pytest.mark.fault("F8")
def test_an_attempt_to_a_silent_server_ends_at_its_deadline(
    proxy: FaultProxy, s3_url: str, tmp_path: Path
) -> None:
    """R14, measured: an attempt must end when no byte has moved for `stall_timeout_s`, not when the SDK gives up."""
    with Uploader(tmp_path / "folder", f"{s3_url}/run", **QUICK | {"stall_timeout_s": 0.4}) as uploader:
        fault = proxy.add(Fault("silent", "PUT", SHARDS, times=1))
        started = time.monotonic()
        save(uploader, 1, num_shards=1, size_bytes=20 * 1000)
        proxy.wait_for(lambda: fault.num_hits == 1)
        proxy.wait_for(lambda: bool(proxy.sent(SHARDS)), timeout_s=10)
        assert 0.35 <= time.monotonic() - started < 15
        uploader.wait(1, timeout_s=30)


@pytest.mark.fault("F7")
def test_a_lost_reply_to_any_conditional_write_is_survived(
    proxy: FaultProxy, s3_url: str, tmp_path: Path
) -> None:
    """R13: the protocol's decisions depend on these writes, so after a lost reply none may be
    mistaken for another writer's.
    """
    kinds = ("generations", "members", "receipts", "decisions", "latest")
    faults = [proxy.add(Fault("drop_reply", "PUT", f"{CONTROL}{kind}", times=1)) for kind in kinds]
    with Uploader(tmp_path / "folder", f"{s3_url}/run", **QUICK) as uploader:
        assert uploader.generation == 1
        for step in (1, 2):
            save(uploader, step)
            uploader.wait(step, timeout_s=30)
    assert [fault.num_hits for fault in faults] == [1] * len(kinds)
    refused = {
        each.key.split("/.ckpt-async/")[1].split("/")[0] for each in proxy.exchanges if each.status == 412
    }
    assert {"generations", "members", "receipts", "latest.json"} <= refused
    # A decision is read before it is put again.
    puts = [each.key for each in proxy.exchanges if each.method == "PUT" and "/decisions/" in each.key]
    assert len(puts) == len({*puts}) == 2
    oracle = Oracle(f"{s3_url}/run", 1)
    assert oracle.look() == {CheckpointId(1, 1), CheckpointId(1, 2)}
    assert oracle.latest == CheckpointId(1, 2)
    assert not oracle.aborted


def test_refusing_half_of_all_requests_loses_nothing(proxy: FaultProxy, s3_url: str, tmp_path: Path) -> None:
    """S3 sends thousands of 503 SlowDown when a prefix is busy. Everything must arrive, without a retry storm."""
    with Uploader(tmp_path / "folder", f"{s3_url}/run", **QUICK) as uploader:
        before = len(proxy.exchanges)
        proxy.add(Fault("unavailable", probability=0.5))
        for step in range(10):
            save(uploader, step, num_shards=4)
        for step in range(10):
            uploader.wait(step, timeout_s=60)
        num_requests = len(proxy.exchanges) - before
        # The SDK's own retries are off: two layers would multiply. Ten checkpoints of 4 + about 5 requests.
        # Each attempt to decide compares what the store has, and needs three requests in a row that are not refused:
        # 35 to 55 requests a checkpoint. A storm has thousands.
        assert num_requests < 1000
        proxy.heal()
    assert len(Oracle(f"{s3_url}/run", 1, num_shards=4).look()) == 10


def test_the_sdk_makes_one_attempt_per_request(proxy: FaultProxy, s3_url: str, tmp_path: Path) -> None:
    """Retries belong to one layer: the engine, which knows the deadline, the class of error and the budget."""
    with Uploader(tmp_path / "folder", f"{s3_url}/run", **QUICK) as uploader:
        fault = proxy.add(Fault("unavailable", "PUT", SHARDS))
        num_sent_by_then: list[int] = []
        observe = uploader.metrics.attempt_failed

        def note(reason: FailureReason) -> None:
            """Called before the engine tries again."""
            num_sent_by_then.append(fault.num_hits)
            proxy.heal()
            observe(reason)

        uploader.metrics.attempt_failed = note  # type: ignore[method-assign]
        save(uploader, 1, num_shards=1)
        uploader.wait(1, timeout_s=30)
        assert num_sent_by_then == [1]


def test_concurrent_uploads_are_bounded_and_control_requests_bypass_them(
    proxy: FaultProxy, s3_url: str, tmp_path: Path
) -> None:
    """The limit applies to shards, and a receipt must not queue behind shards that hang."""
    settings = QUICK | {"num_concurrent_uploads": 3, "stall_timeout_s": 30.0, "request_timeout_s": 30.0}
    with Uploader(tmp_path / "folder", f"{s3_url}/run", **settings, on_error="warn") as uploader:
        hold = proxy.add(Fault("hold", "PUT", rf"{SHARDS}2"))
        save(uploader, 2, num_shards=20)
        proxy.wait_for(lambda: hold.num_hits == 3)
        uploader.seal(3)  # without shards it is given up, but that also takes a receipt and a decision
        with pytest.raises(CheckpointAbortedError):
            uploader.wait(3, timeout_s=10)
        assert not [each for each in proxy.exchanges if re.search(rf"{SHARDS}2", each.key)]
        assert hold.num_hits == 3
        proxy.release()
        uploader.wait(2, timeout_s=30)


# --- multipart ---------------------------------------------------------------------------------------------------


@pytest.mark.fault("F18")
def test_a_killed_multipart_upload_is_resumed_and_no_finished_part_is_sent_again(
    nursery: Nursery, proxy: FaultProxy, s3_url: str, tmp_path: Path
) -> None:
    """A 100 GB shard that starts over after every preemption never arrives."""
    remote, size_bytes = f"{s3_url}/run", 6 * PART + 12345
    arguments: dict[str, Any] = {
        "folder": str(tmp_path / "folder"),
        "remote": remote,
        "rank": 0,
        "world_size": 1,
        "num_shards": 1,
        "size_bytes": size_bytes,
        "settings": QUICK | {"part_size_bytes": PART, "num_concurrent_uploads": 2, "stall_timeout_s": 30.0},
    }
    held = proxy.add(Fault("hold", "PUT", SHARDS, is_part=True))
    held.kind = "delay"  # let the first parts pass
    trainer = nursery.start("saves", steps=[1], **arguments)
    trainer.expect("saved")
    proxy.wait_for(lambda: len(proxy.sent(SHARDS)) >= 3)
    held.kind = "hold"
    proxy.wait_for(lambda: proxy.num_under_way >= 1)
    trainer.kill()
    proxy.heal()
    proxy.wait_for(lambda: proxy.num_under_way == 0)
    done = {part for (_, part), count in proxy.sent(SHARDS).items()}
    assert 3 <= len(done) < 7, "killed too late to prove anything"
    again = nursery.start("saves", steps=[], **arguments)
    again.expect("saved")
    again.tell("stop")
    assert again.finish() == 0, again.log.read_text()
    assert Oracle(remote, 1, num_shards=1, size_bytes=size_bytes).look() == {CheckpointId(1, 1)}
    sent = proxy.sent(SHARDS)
    # Parts that were sent completely when their sender was killed: stored or not, nobody saw the answer.
    unanswered = {
        each.part
        for each in proxy.exchanges
        if each.body_bytes in (PART, size_bytes % PART) and not each.upstream_status
    }
    assert {part for _, part in sent} | unanswered == set(range(1, 8))
    assert {sent[key] for key in sent} == {1}
    num_created = [each for each in proxy.exchanges if each.method == "POST" and "uploads" in each.query]
    assert len(num_created) == 1


@pytest.mark.fault("F7")
def test_a_broken_part_is_retried_alone(proxy: FaultProxy, s3_url: str, tmp_path: Path) -> None:
    """A single reset in a terabyte must cost only one part."""
    settings = QUICK | {"part_size_bytes": PART, "num_concurrent_uploads": 3}
    with Uploader(tmp_path / "folder", f"{s3_url}/run", **settings) as uploader:
        faults = [
            proxy.add(Fault("reset", "PUT", SHARDS, is_part=True, times=2, after_bytes=MIB)),
            proxy.add(Fault("silent", "PUT", SHARDS, is_part=True, times=1)),
            proxy.add(Fault("drop_reply", "PUT", SHARDS, is_part=True, times=1)),
        ]
        save(uploader, 1, num_shards=1, size_bytes=6 * PART)
        uploader.wait(1, timeout_s=60)
        assert [fault.num_hits for fault in faults] == [2, 1, 1]
    sent = proxy.sent(SHARDS)
    assert sum(sent.values()) == 6 + 1, "only the part whose answer was lost arrived twice"
    num_bytes = sum(each.body_bytes for each in proxy.exchanges if re.search(SHARDS, each.key))
    assert num_bytes <= 7 * PART + 2 * MIB + 64 * 1024
    assert Oracle(f"{s3_url}/run", 1, num_shards=1, size_bytes=6 * PART).look() == {CheckpointId(1, 1)}


# --- outages -----------------------------------------------------------------------------------------------------


@pytest.fixture
def own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SeaweedServer]:
    with SeaweedServer(tmp_path / "seaweed") as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.mark.fault("F31")
@pytest.mark.parametrize(
    "outage_s",
    [
        2.0,
        pytest.param(60.0 * float(os.environ.get("CKPT_ASYNC_SOAK_MINUTES", "1")), marks=SOAK),
    ],
)
def test_training_continues_while_s3_is_down_and_everything_commits_afterwards(
    own_server: SeaweedServer,
    tmp_path: Path,
    outage_s: float,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """During an outage the trainer logs a warning, operators see counters, and nothing is lost."""
    monkeypatch.setattr(patience, "QUIET_OUTAGE_S", min(5.0, outage_s / 4))
    remote, training = f"s3://{own_server.bucket}/run", threading.Event()  # its wait stands for training
    settings = QUICK | {"retry_max_s": 1.0 if outage_s < 30 else 20.0}
    with (
        caplog.at_level(logging.INFO, "ckpt_async"),
        Uploader(tmp_path / "folder", remote, **settings) as uploader,
    ):
        save(uploader, 1)
        uploader.wait(1, timeout_s=30)
        own_server.kill()
        down_at = time.monotonic()
        slowest_s, step = 0.0, 1
        while time.monotonic() - down_at < outage_s:
            step += 1
            started = time.monotonic()
            save(uploader, step)
            slowest_s = max(slowest_s, time.monotonic() - started)
            training.wait(outage_s / 8)
        own_server.start()
        for each in range(1, step + 1):
            uploader.wait(each, timeout_s=60)
        uploader.flush(30)
        assert slowest_s < 1
        counts = uploader.metrics
        assert counts.num_committed == step
        text = generate_latest(counts.registry).decode()

        def count(name: str, label: str = "") -> float:
            lines = (line for line in text.splitlines() if line.startswith(f"ckpt_async_{name}{{"))
            return sum(float(line.split()[-1]) for line in lines if label in line)

        assert count("upload_attempt_failures_total") > 0
        assert count("files_enqueued_total") == count("uploads_total", 'result="ok"') == 2 * step
        assert count("uploads_total") == 2 * step
        assert count("upload_bytes_total") == 2 * step * 5000
    warnings = [each.getMessage().split()[0] for each in caplog.records if each.levelno >= logging.WARNING]
    assert warnings == ["store_failing"]
    assert sum(each.getMessage().startswith("store_recovered") for each in caplog.records) == 1
    oracle = Oracle(remote, 1)
    assert len(oracle.look()) == step
    assert oracle.latest == CheckpointId(1, step)


def test_exiting_without_close_is_bounded_while_the_store_is_silent(
    proxy: FaultProxy, s3_url: str, tmp_path: Path
) -> None:
    """A job that cannot end blocks a node; what is left is in the journal, for the next launch."""
    script = """
import sys
from pathlib import Path
from ckpt_async import Uploader
from tests.faults.trainer import write_shards
folder, remote = sys.argv[1:]
uploader = Uploader(folder, remote, upload_timeout_s=2, request_timeout_s=0.5, stall_timeout_s=0.5, close_grace_s=0)
uploader.enqueue(write_shards(Path(folder), 1, 1, 0, 2), 1)
uploader.seal(1)
print("end")
"""
    proxy.add(Fault("silent", "PUT", SHARDS))
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(tmp_path / "folder"), f"{s3_url}/run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert time.monotonic() - started < 20
    assert done.stdout == "end\n"
    assert "closed_with_unfinished steps=[1]" in done.stderr, done.stderr
    proxy.heal()
    with Uploader(tmp_path / "folder", f"{s3_url}/run", **QUICK):
        pass
    assert Oracle(f"{s3_url}/run", 1).look() == {CheckpointId(1, 1)}


# --- wrong from the start ----------------------------------------------------------------------------------------


@pytest.fixture
def silence() -> Iterator[socket.socket]:
    """A peer whose kernel accepts connections, but which never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.mark.parametrize("what", ["credentials", "bucket", "nobody there", "silence"])
def test_configuration_errors_are_raised_at_open(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silence: socket.socket, what: str
) -> None:
    """The user gets one sentence with what to do before the first step, and nothing is left behind."""
    remote, options = f"{s3_url}/run", StoreOptions(connect_timeout_s=0.5, read_timeout_s=0.5)
    monkeypatch.setattr("ckpt_async.runners.host.START_TIMEOUT_S", 1.0)
    match what:
        case "credentials":
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
            wanted = FailureReason.AUTH
        case "bucket":
            remote, wanted = "s3://no-such-bucket/run", FailureReason.NOT_FOUND
        case "nobody there":
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
            wanted = FailureReason.TRANSIENT
        case _:
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{silence.getsockname()[1]}")
            wanted = FailureReason.TIMEOUT
    started = time.monotonic()
    with pytest.raises(StoreError) as caught:
        Uploader(tmp_path / "folder", remote, store_options=options)
    assert time.monotonic() - started < 20
    assert caught.value.reason is wanted
    assert caught.value.hint or "127.0.0.1" in str(caught.value)
    assert not journals.read(tmp_path / "folder")[0].rows


@pytest.mark.fault("F9")
def test_uploads_wait_for_expired_credentials_to_be_renewed(
    proxy: FaultProxy, s3_url: str, tmp_path: Path
) -> None:
    """Tokens are rotated during a long run; a 403 never means "missing", and giving up would lose the checkpoint."""
    with Uploader(tmp_path / "folder", f"{s3_url}/run", **QUICK) as uploader:
        fault = proxy.add(Fault("denied", key=SHARDS, times=6))
        save(uploader, 1)
        uploader.wait(1, timeout_s=30)
        assert fault.num_hits == 6
    assert json.dumps([each.status for each in proxy.exchanges]).count("403") == 6
