"""Google Cloud Storage that is slow, silent, wrong or forgetful, simulated by the tests' own peer."""

import asyncio
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import StoreOptions, Uploader, restore
from ckpt_async.core.model import CheckpointId
from ckpt_async.core.settings import Settings
from ckpt_async.protocol.cas import create_once
from ckpt_async.transfer.patient import connect
from tests.faults.oracle import Oracle, verified
from tests.faults.processes import SOAK, Nursery
from tests.faults.saves import QUICK, save
from tests.stores.gcs_peer import Answer, GcsPeer, Request, json_error, xml_error
from tests.stores.gcs_servers import FakeGcsServer

MIB = 1 << 20
PART = 5 * MIB
CONTROL = b"/.ckpt-async/"

Serve = Callable[[], Answer]


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsPeer]:
    with GcsPeer() as peer:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", peer.url)
        yield peer


@pytest.fixture
def remote(peer: GcsPeer) -> str:
    return f"gs://{peer.bucket}/run"


def lost(serve: Serve) -> Answer:
    """Carry out the request without telling anybody."""
    answer = serve()
    answer.sent_bytes = 0
    return answer


FAULTS: dict[str, Callable[[Serve], Answer]] = {
    "unavailable": lambda _: xml_error(503, "SlowDown", "because"),
    "too many": lambda _: json_error(429, "rateLimitExceeded", "because"),
    "reset": lambda _: Answer(200, sent_bytes=0),
    "lost reply": lost,
    "half a reply": lambda serve: (answer := serve(), setattr(answer, "sent_bytes", 30))[0],
    "silent": lambda _: Answer(200, is_silent=True),
    "false 412": lambda _: json_error(412, "conditionNotMet", "though it was met"),
}


def _lane(request: Request) -> str:
    if request.is_upload:
        return "control" if CONTROL in request.body[:2000] else "bulk"
    return "part" if request.is_part else ""


@pytest.mark.fault("F81")
@pytest.mark.parametrize(
    ("kind", "lane"),
    [
        (kind, lane)
        for kind in FAULTS
        for lane in ("bulk", "part", "control")
        if kind != "false 412" or lane == "control"  # only control writes are conditional
    ],
)
def test_every_kind_of_request_failure_is_survived(
    peer: GcsPeer, remote: str, tmp_path: Path, kind: str, lane: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each object's first upload fails in this way, and the protocol's decisions depend on these writes."""
    seen: Counter[str | bytes] = Counter()

    def meddle(request: Request, serve: Serve) -> Answer:
        if _lane(request) != lane:
            return serve()
        what = (
            request.query.get("partNumber")
            or request.body[:600].partition(b'"name": "')[2].partition(b'"')[0]
        )
        seen[what] += 1
        return FAULTS[kind](serve) if seen[what] == 1 else serve()

    size_bytes = 2 * PART + 1 if lane == "part" else 5000
    with Uploader(tmp_path / "folder", remote, **QUICK | {"part_size_bytes": PART}) as uploader:
        peer.meddle = meddle
        for step in (1, 2):
            save(uploader, step, size_bytes=size_bytes)
            uploader.wait(step, timeout_s=60)
        peer.meddle = lambda _, serve: serve()
    oracle = Oracle(remote, 1, size_bytes=size_bytes)
    assert oracle.look() == {CheckpointId(1, 1), CheckpointId(1, 2)}
    assert oracle.latest == CheckpointId(1, 2)
    assert not oracle.aborted
    assert len(seen) >= 3, "receipts, decisions, latest; or shards, or parts"
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.fault("F81")
def test_refusing_half_of_all_requests_loses_nothing(
    peer: GcsPeer, remote: str, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    with Uploader(tmp_path / "folder", remote, **QUICK) as uploader:
        peer.requests.clear()
        peer.meddle = lambda _, serve: FAULTS["unavailable"](serve) if rng.random() < 0.5 else serve()
        for step in range(10):
            save(uploader, step, num_shards=4)
        for step in range(10):
            uploader.wait(step, timeout_s=60)
        # Half of the requests fail, and polls continue for as long as needed. A checkpoint takes 4 shards, and
        # a receipt, a decision and latest.
        num_uploads = len([each for each in peer.requests if each.is_upload])
        assert num_uploads < 4 * 10 * (4 + 3), "a storm"
        peer.meddle = lambda _, serve: serve()
    assert len(Oracle(remote, 1, num_shards=4).look()) == 10


@pytest.mark.fault("F81")
def test_a_byte_that_changes_on_the_way_is_sent_again(peer: GcsPeer, remote: str, tmp_path: Path) -> None:
    """The store refuses a changed small shard or part, and the file that arrives in the end is correct."""
    flipped: Counter[str] = Counter()

    def flip(request: Request, serve: Serve) -> Answer:
        kind = (
            "part"
            if request.is_part
            else "object"
            if request.is_upload and b"ckpt/step-" in request.body[:600]
            else ""
        )
        if kind and not flipped[kind]:
            flipped[kind] += 1
            middle = len(request.body) // 2
            changed = bytes([request.body[middle] ^ 1])
            request.body = request.body[:middle] + changed + request.body[middle + 1 :]
        return serve()

    with Uploader(tmp_path / "folder", remote, **QUICK | {"part_size_bytes": PART}) as uploader:
        peer.meddle = flip
        save(uploader, 1)
        uploader.wait(1, timeout_s=30)
        save(uploader, 2, num_shards=1, size_bytes=2 * PART + 1)
        uploader.wait(2, timeout_s=30)
    assert flipped == {"part": 1, "object": 1}
    found = verified(remote)
    assert (found.num_committed, found.violations) == (2, [])


@pytest.mark.fault("F81")
def test_a_killed_upload_is_resumed_and_no_finished_part_is_sent_again(
    nursery: Nursery, peer: GcsPeer, remote: str, tmp_path: Path
) -> None:
    """A 100 GB shard that starts over after every preemption never arrives."""
    size_bytes = 6 * PART + 12345
    arguments: dict[str, Any] = {
        "folder": str(tmp_path / "folder"),
        "remote": remote,
        "rank": 0,
        "world_size": 1,
        "num_shards": 1,
        "size_bytes": size_bytes,
        "settings": QUICK | {"part_size_bytes": PART, "num_concurrent_uploads": 2, "stall_timeout_s": 30.0},
    }
    stored: Counter[int] = Counter()
    has_some, is_held, goes_on = threading.Event(), threading.Event(), threading.Event()

    def hold(request: Request, serve: Serve) -> Answer:
        if not request.is_part:
            return serve()
        if sum(stored.values()) >= 3 and not goes_on.is_set():
            is_held.set()
            goes_on.wait(60)
            return Answer(503)  # the sender is dead
        stored[int(request.query["partNumber"])] += 1
        has_some.set()
        return serve()

    peer.meddle = hold
    trainer = nursery.start("saves", {"STORAGE_EMULATOR_HOST": peer.url}, steps=[1], **arguments)
    trainer.expect("saved")
    assert is_held.wait(60)
    trainer.kill()
    goes_on.set()
    assert 3 <= len(stored) < 7, "killed too late to prove anything"
    again = nursery.start("saves", {"STORAGE_EMULATOR_HOST": peer.url}, steps=[], **arguments)
    again.expect("saved")
    again.tell("stop")
    assert again.finish() == 0, again.log.read_text()
    assert Oracle(remote, 1, num_shards=1, size_bytes=size_bytes).look() == {CheckpointId(1, 1)}
    assert stored == dict.fromkeys(range(1, 8), 1), "each part is stored once"
    assert len([each for each in peer.requests if "uploads" in each.query and "/step-1" in each.path]) == 1
    assert not peer.uploads


@pytest.mark.fault("F81")
def test_a_damaged_answer_is_not_restored(peer: GcsPeer, remote: str, tmp_path: Path) -> None:
    """Every byte that is read is compared with its checksum; what was changed on the way is requested again."""
    with Uploader(tmp_path / "folder", remote, **QUICK) as uploader:
        save(uploader, 1)
        uploader.wait(1, timeout_s=30)
    flipped: Counter[str] = Counter()

    def flip(request: Request, serve: Serve) -> Answer:
        answer = serve()
        if (
            "/ckpt/step-" in request.path
            and request.path.startswith("/download")
            and not flipped[request.path]
        ):
            flipped[request.path] += 1
            answer.body = bytes([answer.body[0] ^ 1]) + answer.body[1:]
        return answer

    peer.meddle = flip
    checkpoint = restore.find(remote)
    assert checkpoint is not None
    report = restore.fetch(checkpoint, tmp_path / "resume")
    assert flipped
    whole = {path.name: path.read_bytes() for path in report.paths.values()}
    there = {
        name.rpartition("/")[2]: each.data for name, each in peer.objects.items() if "/ckpt/step-" in name
    }
    assert whole == there


@pytest.mark.fault("F81")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("server", ["peer", "emulator"])
@pytest.mark.parametrize("num_rounds", [20, pytest.param(1000, marks=SOAK)])
def test_one_of_eight_writers_wins_each_key_and_knows_it(
    peer: GcsPeer, seed: int, num_rounds: int, server: str
) -> None:
    """Every third of the peer's answers is a refusal, lost, or a 412 for no reason;
    fake-gcs-server is used unmodified.
    """
    rng = random.Random(seed)

    def trouble(request: Request, serve: Serve) -> Answer:
        if not request.is_upload:
            return serve()
        match rng.randrange(9):
            case 0:
                answer = serve()
                answer.sent_bytes = rng.choice((0, 50))
                return answer
            case 1:
                return xml_error(503, "SlowDown", "because")
            case 2:
                return json_error(412, "conditionNotMet", "though it was met")
            case _:
                return serve()

    async def race(url: str) -> None:
        settings = Settings(retry_initial_s=0.001, retry_max_s=0.01)
        stores = [connect("gs://ckpt/run", StoreOptions(endpoint_url=url), settings) for _ in range(8)]
        for store in stores:
            await store.open()
        peer.meddle = trouble
        try:
            for number in range(num_rounds):
                key, mine = f"decisions/{number}", [b"%d by %d" % (number, writer) for writer in range(8)]
                told = await asyncio.gather(*map(lambda s, m, key=key: create_once(s, key, m), stores, mine))
                there, _ = await stores[number % 8].get(key, max_size_bytes=99)
                assert set(told) == {there}
                assert [one == other for one, other in zip(told, mine, strict=True)].count(True) == 1
                peer.requests.clear()
        finally:
            peer.meddle = lambda _, serve: serve()
            for store in stores:
                await store.close()

    if server == "peer":
        asyncio.run(race(peer.url))
    else:
        with FakeGcsServer() as emulator:
            asyncio.run(race(emulator.url))
