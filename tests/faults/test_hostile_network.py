"""A network that refuses, resets, stalls and loses answers: everything arrives, once, and training continues."""

import asyncio
import random
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.settings import Settings
from ckpt_async.sweep.sweeper import Sweeper
from tests.faults.oracle import Oracle, verified
from tests.faults.processes import SOAK
from tests.faults.proxy import Exchange, Fault, FaultProxy
from tests.faults.trainer import content, shard_name

MIB = 1 << 20
PART = 5 * MIB
SETTINGS: dict[str, Any] = {
    "part_size_bytes": PART,
    "decision_poll_s": 0.05,
    "retry_initial_s": 0.05,
    "retry_max_s": 0.5,
    "request_timeout_s": 3.0,
    "stall_timeout_s": 1.0,
    "minimum_rate_bytes_per_s": 20.0 * MIB,
    "num_concurrent_uploads": 4,
    "close_grace_s": 0.0,
}
SHARDS = r"/ckpt/step-"
CONTROL = r"/\.ckpt-async/"
# The longest that the training thread may ever be blocked; a single attempt at the store may take longer.
BOUND_S = 1.0
FAULTS_PER_STEP = 7


def save(uploader: Uploader, step: int, sizes: tuple[int, ...]) -> float:
    """Save shards of these sizes; return how long the uploader's calls took."""
    place = uploader.folder / f"step-{step}" / "rank-0"
    place.mkdir(parents=True)
    for number, size_bytes in enumerate(sizes):
        (place / shard_name(0, number)).write_bytes(content(uploader.generation, step, 0, number, size_bytes))
    started = time.monotonic()
    uploader.enqueue(place, step)
    uploader.seal(step)
    return time.monotonic() - started


def stored(proxy: FaultProxy, what: str) -> Counter[str]:
    """Return how often each object was written successfully, whether or not the answer arrived."""
    counts: Counter[str] = Counter()
    for (key, _), count in proxy.sent(what).items():
        counts[key] += count
    return counts


def begun(proxy: FaultProxy) -> list[Exchange]:
    return [each for each in proxy.exchanges if each.method == "POST" and "uploads" in each.query]


@pytest.mark.fault("F6")
@pytest.mark.parametrize("outage_s", [5.0, pytest.param(60.0, marks=SOAK)])
def test_uploads_survive_three_of_four_requests_refused(
    proxy: FaultProxy, s3_url: str, tmp_path: Path, outage_s: float
) -> None:
    """During a minute of 503 SlowDown, everything must arrive, each shard once, without a retry
    storm, and training must continue.
    """
    remote, training = f"{s3_url}/run", threading.Event()
    sizes = (5000, 2 * PART + 17)
    with Uploader(tmp_path / "folder", remote, **SETTINGS | {"retry_max_s": 2.0}) as uploader:
        before = len(proxy.exchanges)
        fault = proxy.add(Fault("unavailable", probability=0.75))
        began, step, slowest_s = time.monotonic(), 0, 0.0
        while time.monotonic() - began < outage_s:
            step += 1
            slowest_s = max(slowest_s, save(uploader, step, sizes))
            training.wait(outage_s / 16)
        fault.times = 0
        for each in range(1, step + 1):
            uploader.wait(each, timeout_s=120)
    num_requests = len(proxy.exchanges) - before
    num_refused = sum(each.status == 503 for each in proxy.exchanges)
    print(f"steps={step} requests={num_requests} refused={num_refused} slowest_s={slowest_s:.4f}")
    assert slowest_s < BOUND_S
    assert num_refused > 5  # because of back-off, most requests are made after the store has recovered
    # A checkpoint takes 1 + 5 requests for its shards and some 8 for receipt, decision and latest. Refused
    # requests are repeated, three times on average.
    assert num_requests < 4 * 14 * step * 1.5
    assert set(stored(proxy, f"{CONTROL}decisions/").values()) == {1}
    assert set(proxy.sent(SHARDS).values()) == {1}
    check(remote, step, sizes)


def check(remote: str, num_steps: int, sizes: tuple[int, ...]) -> None:
    """Check that every step of the first generation is committed and complete, byte by
    byte, and that nothing else exists.
    """
    result = verified(remote)
    assert (result.findings, result.num_committed) == ([], num_steps)
    assert result.num_shards_read == num_steps * len(sizes)
    oracle = Oracle(remote, 1, num_shards=len(sizes), sizes_bytes=sizes)
    assert oracle.look() == {CheckpointId(1, step) for step in range(1, num_steps + 1)}
    assert oracle.latest == CheckpointId(1, num_steps)


@pytest.mark.fault("F7")
@pytest.mark.parametrize("num_faults", [14, pytest.param(210, marks=SOAK)])
def test_a_connection_that_breaks_at_any_byte_costs_at_most_one_part(
    proxy: FaultProxy, s3_url: str, tmp_path: Path, seed: int, num_faults: int
) -> None:
    """Connections are reset, stall or lose replies at random bytes of random parts; only the
    broken part may be sent again.
    """
    rng, remote = random.Random(seed), f"{s3_url}/run"
    sizes = (6 * PART + 1, 5000)
    num_steps = -(-num_faults // FAULTS_PER_STEP)
    faults: list[Fault] = []

    def add_fault() -> Fault:
        kind = rng.choice(("reset", "reset", "reset", "stall", "drop_reply", "cut_reply"))
        after_bytes = rng.randrange(300 if kind == "cut_reply" else PART)
        fault = Fault(kind, "PUT", SHARDS, is_part=True, times=1, probability=0.3, after_bytes=after_bytes)
        return proxy.add(fault)

    with Uploader(tmp_path / "folder", remote, **SETTINGS) as uploader:
        for step in range(1, num_steps + 1):
            added = [add_fault() for _ in range(FAULTS_PER_STEP)]
            assert save(uploader, step, sizes) < BOUND_S
            uploader.wait(step, timeout_s=120)
            for fault in added:
                fault.times = 0
            faults += added
    hit = [fault for fault in faults if fault.num_hits]
    num_stored_again = sum(proxy.sent(SHARDS).values()) - len(proxy.sent(SHARDS))
    num_bytes = sum(each.body_bytes for each in proxy.exchanges if re.search(SHARDS, each.key))
    # The bodies of `CompleteMultipartUpload` requests are among them.
    allowed = num_steps * (sum(sizes) + 4096) + len(hit) * PART
    print(f"faults={len(hit)} of {len(faults)} sent_twice={num_stored_again} bytes={num_bytes} of {allowed}")
    assert len(hit) > len(faults) / 2
    assert num_stored_again <= sum(fault.kind in ("drop_reply", "cut_reply") for fault in hit)
    assert num_bytes <= allowed
    assert len(begun(proxy)) == num_steps
    assert set(stored(proxy, f"{CONTROL}decisions/").values()) == {1}
    check(remote, num_steps, sizes)


# How each kind of request is recognised on the wire.
OPERATIONS: dict[str, Fault] = {
    "PUT of a shard": Fault("", "PUT", f"{SHARDS}.*{shard_name(0, 1)}", is_part=False),
    "CreateMultipartUpload": Fault("", "POST", SHARDS, query="uploads"),
    "UploadPart": Fault("", "PUT", SHARDS, is_part=True),
    "CompleteMultipartUpload": Fault("", "POST", SHARDS, query="uploadId"),
    "PUT of a generation": Fault("", "PUT", f"{CONTROL}generations/"),
    "PUT of a member": Fault("", "PUT", f"{CONTROL}members/"),
    "PUT of a receipt": Fault("", "PUT", f"{CONTROL}receipts/"),
    "PUT of a decision": Fault("", "PUT", f"{CONTROL}decisions/"),
    "PUT of latest": Fault("", "PUT", f"{CONTROL}latest"),
    "GET": Fault("", "GET", CONTROL),
    "LIST": Fault("", "GET", query="list-type"),
    "HEAD": Fault("", "HEAD"),
    "DELETE": Fault("", query="^delete"),
}


@pytest.mark.fault("F7", "F18")
@pytest.mark.parametrize("kind", ["drop_reply", "cut_reply"])
def test_losing_one_reply_of_each_kind_of_request_is_survived(
    proxy: FaultProxy, s3_url: str, tmp_path: Path, kind: str
) -> None:
    """The store did what was asked, but its answer was lost. The repeated request must not do it a second time."""
    remote = f"{s3_url}/run"
    sizes = (2 * PART, 5000)
    for fault in OPERATIONS.values():
        proxy.add(Fault(kind, fault.method, fault.key, fault.query, fault.is_part, times=1, after_bytes=40))
    faults = dict(zip(OPERATIONS, proxy._faults, strict=True))
    with Uploader(tmp_path / "folder", remote, **SETTINGS) as uploader:
        assert uploader.generation == 1
        for step in (1, 2, 3):
            save(uploader, step, sizes)
            uploader.wait(step, timeout_s=60)
    assert set(stored(proxy, f"{CONTROL}decisions/").values()) == {1}
    sent = proxy.sent(SHARDS)
    assert sum(sent.values()) - len(sent) == 2, "one part and one shard, of which no answer came"
    oracle = Oracle(remote, 1, num_shards=len(sizes), sizes_bytes=sizes)
    assert oracle.look() == {CheckpointId(1, step) for step in (1, 2, 3)}
    # The sweep removes the upload whose creation was never answered, and applies retention.
    report = asyncio.run(Sweeper([], [remote], settings=Settings(remote_retention="last=1")).sweep())
    assert report.is_clean, report
    assert {what: fault.num_hits for what, fault in faults.items()} == dict.fromkeys(OPERATIONS, 1)
    check_one(remote, oracle)


def check_one(remote: str, oracle: Oracle) -> None:
    result = verified(remote)
    assert (result.findings, result.num_committed) == ([], 1)
    oracle.look()
    assert oracle.latest == CheckpointId(1, 3)


@pytest.mark.fault("F9")
@pytest.mark.parametrize(
    ("kind", "outage_s"),
    [
        ("expired", 2.0),
        ("denied", 2.0),
        pytest.param("expired", 30.0, marks=SOAK),
        pytest.param("denied", 30.0, marks=SOAK),
    ],
)
def test_credentials_may_expire_in_the_middle_of_a_multipart_upload(
    proxy: FaultProxy, s3_url: str, tmp_path: Path, kind: str, outage_s: float
) -> None:
    """When the credentials are renewed, the same upload continues: no part that arrived is sent
    again, and nothing is given up.
    """
    remote, sizes, training = f"{s3_url}/run", (8 * PART,), threading.Event()
    two = {"num_concurrent_uploads": 2, "max_concurrent_uploads": 2}
    with Uploader(tmp_path / "folder", remote, **SETTINGS | two) as uploader:
        slow = proxy.add(Fault("delay", "PUT", SHARDS, is_part=True, delay_s=0.1))
        save(uploader, 1, sizes)
        proxy.wait_for(lambda: len(proxy.sent(SHARDS)) >= 2)
        slow.times = 0
        fault = proxy.add(Fault(kind))
        began, slowest_s = time.monotonic(), 0.0
        step = 1
        while time.monotonic() - began < outage_s:
            step += 1
            slowest_s = max(slowest_s, save(uploader, step, sizes))
            training.wait(outage_s / 2)
        num_before = len(proxy.sent(SHARDS))
        fault.times = 0
        for each in range(1, step + 1):
            uploader.wait(each, timeout_s=60)
        assert slowest_s < BOUND_S
        assert fault.num_hits
        assert num_before < 8, "the first upload was over before the credentials expired"
    assert set(proxy.sent(SHARDS).values()) == {1}
    assert len([each for each in begun(proxy) if each.upstream_status == 200]) == step
    check(remote, step, sizes)
