"""The exported metrics, read as Prometheus reads them: over HTTP, parsed by its own parser."""

import ast
import contextlib
import logging
import math
import re
import shutil
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from ckpt_async.core import keys
from ckpt_async.core.model import (
    CheckpointId,
    Checksum,
    Decided,
    Enqueued,
    Event,
    Failed,
    FileIdentity,
    Forgotten,
    MultipartOpened,
    Opened,
    Outcome,
    ReceiptStored,
    Released,
    RemoteAddress,
    Sealed,
    Shard,
    StoredShard,
    Verified,
)
from ckpt_async.errors import FailureReason, JournalError
from ckpt_async.local import journals
from ckpt_async.local.folder import Folder
from ckpt_async.monitor import definitions
from ckpt_async.monitor.definitions import DEFINITIONS
from ckpt_async.monitor.metrics import Metrics, SweeperMetrics
from ckpt_async.page.server import serve
from ckpt_async.protocol import sweep_plan
from ckpt_async.protocol.verify import Finding
from ckpt_async.sweep import sweeper as sweeper_module
from ckpt_async.sweep.drain import DrainedCheckpoint, DrainReport, RankReport
from ckpt_async.sweep.remote import Done, RemoteReport
from ckpt_async.sweep.sweeper import FolderReport, SweepReport
from tests.monitor.metrics_page import describe
from tests.node import Node

ROOT = Path(__file__).resolve().parents[2]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Clock:
    """A clock that advances only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "checkpoints")


@pytest.fixture
def wall() -> Clock:
    return Clock()


@pytest.fixture
def journal(folder: Folder, wall: Clock) -> Iterator[Node]:
    opened = Node(folder, wall)
    yield opened
    opened.close()


@pytest.fixture
def metrics(folder: Folder) -> Metrics:
    return Metrics("run-a", folder)


def fetch(metrics: Metrics | SweeperMetrics, accept: str = "text/plain;version=0.0.4") -> str:
    server = serve(metrics.registry, 0, "127.0.0.1", {})
    assert server is not None
    try:
        request = urllib.request.Request(server.url, headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=30) as reply:
            assert reply.status == 200
            return reply.read().decode()
    finally:
        server.close()


def parse(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, key
            found[key] = sample.value
    return found


def scrape(metrics: Metrics | SweeperMetrics) -> Samples:
    """Scrape without the half second that stopping a server takes."""
    return parse(generate_latest(metrics.registry).decode())


def value(samples: Samples, name: str, **labels: str) -> float | None:
    """Return a sample by its name without the prefix; None if it is absent. `run` is added where it applies."""
    full = f"ckpt_async_{name}"
    for run in ({"run": "run-a"}, {}):
        found = samples.get((full, tuple(sorted({**run, **labels}.items()))))
        if found is not None:
            return found
    return None


def shard(name: str, size_bytes: int, *, inode: int = 0, is_linked: bool = True) -> Shard:
    identity = FileIdentity(1, inode or hash(name) & 0xFFFFFF, size_bytes, 3)
    return Shard(name, f"step/{name}", identity, is_linked)


def verified(id_: CheckpointId, each: Shard) -> Verified:
    return Verified(
        id_, StoredShard(each.name, f"k/{each.name}", each.size_bytes, Checksum("crc32c", "AAAA"))
    )


def committed(id_: CheckpointId) -> list[Event]:
    """Return all events of a committed checkpoint with one shard of 10 bytes."""
    name, one = f"step-{id_.step}", shard(f"one-{id_.step}", 10)
    return [
        Enqueued(id_, name, one),
        Sealed(id_, name, 1),
        verified(id_, one),
        Decided(id_, Outcome.COMMIT, name),
        Released(id_),
    ]


def report_everything(metrics: Metrics, reasons: Iterable[FailureReason] = FailureReason) -> None:
    """Report every fact of an Observer, with every value it may have."""
    metrics.shards_enqueued(1, 0.002)
    for operation in ("put", "list"):
        metrics.requests_finished(operation, [0.2])
    for reason in reasons:
        metrics.attempt_failed(reason)
    metrics.bytes_uploaded(1 << 40)
    for result in definitions.RESULTS:
        metrics.shards_finished(result, 1, 12.0)
    metrics.checkpoint_committed(300, 40.0)
    metrics.checkpoint_aborted(200, "rank 1 died")
    for location in definitions.LOCATIONS:
        metrics.checkpoint_pruned(location)
    metrics.fenced()
    metrics.engine_restarted()


# --- the shape of what is exported -------------------------------------------------------------------------


def test_every_series_is_exported_from_the_start(metrics):
    """`increase()` misses a failure that is also the first sample of its series."""
    samples = parse(fetch(metrics))
    counters = {
        key: number for key, number in samples.items() if key[0].endswith(("_total", "_count", "_bucket"))
    }
    assert set(counters.values()) == {0}

    def children(name: str, label: str) -> set[str]:
        return {dict(labels)[label] for full, labels in samples if full == f"ckpt_async_{name}"}

    assert children("upload_attempt_failures_total", "reason") == set(), (
        "too many for every rank to have at 0"
    )
    assert children("uploads_total", "result") == {
        "ok",
        "failed",
        "source_changed",
        "source_missing",
        "superseded",
    }
    assert children("queue_files", "state") == {"queued", "uploading", "retrying", "failed"}
    assert children("pruned_checkpoints_total", "location") == {"local"}
    assert children("store_request_duration_seconds_count", "run") == {"run-a"}
    assert value(samples, "fenced") == 0


@pytest.mark.fault("F30")
def test_names_and_labels_follow_the_conventions(metrics, journal):
    """Units and suffixes must follow Prometheus' conventions, and no label may have values that grow with the run."""
    report_everything(metrics)
    journal.append(0, [Enqueued(CheckpointId(1, 3), "step-3", shard("a", 1)), *committed(CheckpointId(1, 2))])
    text = fetch(metrics)
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert kinds == {each.name: each.kind for each in DEFINITIONS}
    for name, kind in kinds.items():
        assert name.startswith("ckpt_async_")
        assert name.endswith("_total") == (kind == "counter")
        assert kind != "histogram" or name.endswith("_seconds")
        assert not re.search(r"_(bytes|seconds)_(?!total$)", name), "the unit comes last"
    assert "_created" not in text
    allowed = {"run", "result", "reason", "state", "location", "le", "version", "python_version"}
    assert {label for _, labels in parse(text) for label, _ in labels} <= allowed


# The reasons for which an attempt can fail. The others are about shards, or are not failures.
OF_ATTEMPTS = set(FailureReason) - {
    *(FailureReason.PRECONDITION, FailureReason.SOURCE_CHANGED, FailureReason.SOURCE_MISSING),
    FailureReason.STORE_LOST_OBJECTS,
}


@pytest.mark.fault("O10")
def test_a_rank_has_at_most_sixty_series(metrics, journal):
    """A thousand ranks then have 60,000: with all gauges present, and every failure that an attempt can have."""
    id_ = CheckpointId(1, 3)
    journal.append(0, committed(CheckpointId(1, 2)))
    journal.append(0, [Enqueued(id_, "step-3", shard("a", 1))])
    journal.append(1, [Sealed(id_, "step-3", 3), ReceiptStored(id_)])
    report_everything(metrics, OF_ATTEMPTS)
    samples = scrape(metrics)
    for name in (
        "last_committed_step",
        "oldest_pending_timestamp_seconds",
        "oldest_waiting_timestamp_seconds",
    ):
        assert value(samples, name) is not None
    assert 50 < len(samples) <= 60


def test_openmetrics_output_is_valid(metrics, journal):
    """A Prometheus server asks for this format by default, and its parser is strict."""
    report_everything(metrics)
    journal.append(0, committed(CheckpointId(1, 2)))
    text = fetch(metrics, "application/openmetrics-text;version=1.0.0")
    families = list(openmetrics.text_string_to_metric_families(text))
    assert {family.name for family in families} >= {
        each.name.removesuffix("_total") for each in DEFINITIONS[:-1]
    } - {"ckpt_async_oldest_pending_timestamp_seconds"}
    assert "_created" not in text


def test_promtool_accepts_the_output(metrics, journal):
    """Prometheus' own linter is used where it is available; the parser must find every definition in any case."""
    report_everything(metrics)
    journal.append(0, [Enqueued(CheckpointId(1, 3), "step-3", shard("a", 1)), *committed(CheckpointId(1, 2))])
    text = fetch(metrics)
    assert text.count("# HELP ") == len(DEFINITIONS)
    promtool = shutil.which("promtool")
    if promtool is not None:
        done = subprocess.run(
            [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_page_matches_the_code():
    """docs/metrics.md is generated from the definitions; its second paragraph says how to regenerate it."""
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == describe()


def test_every_reported_fact_has_a_metric():
    """Undefined label values are dropped, so a new operation or result must be added here first."""
    reported: dict[str, set[str]] = {}
    for path in (ROOT / "ckpt_async").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    reported.setdefault(node.func.attr, set()).add(first.value)
    assert {"ok"} <= reported["shards_finished"] <= set(definitions.RESULTS)
    assert reported["checkpoint_pruned"] <= set(definitions.LOCATIONS)
    assert reported["save_finished"] == set(definitions.SAVES)


def test_a_watcher_adds_eight_series(metrics):
    """They are absent without a watcher. With one, they start at 0: `increase()` misses what is also the first
    sample.
    """
    before = scrape(metrics)
    metrics.watcher_opened()
    added = {key: count for key, count in scrape(metrics).items() if key not in before}
    assert [*added.values()] == [0] * 8
    assert {name for name, _ in added} == {"ckpt_async_watch_refused_total"}


def test_a_saver_adds_four_series(metrics):
    """They are absent without a saver. With one, they start at 0, except for the interval, which may not be set."""
    before = scrape(metrics)
    metrics.saver_opened()
    added = {key: count for key, count in scrape(metrics).items() if key not in before}
    assert set(added.values()) == {0}
    assert {name for name, _ in added} == {
        "ckpt_async_saves_total",
        "ckpt_async_save_blocked_seconds_total",
    }
    metrics.save_interval_chosen(60.0)
    assert len(scrape(metrics)) == len(before) + 4


# --- counting ----------------------------------------------------------------------------------------------


def test_reported_facts_are_counted(metrics):
    report_everything(metrics)
    metrics.bytes_uploaded(1)
    samples = scrape(metrics)
    assert value(samples, "files_enqueued_total") == 1
    assert value(samples, "upload_bytes_total") == (1 << 40) + 1
    assert value(samples, "checkpoints_committed_total") == 1
    assert value(samples, "checkpoints_aborted_total") == 1
    assert value(samples, "fenced") == 1
    assert value(samples, "engine_restarts_total") == 1
    for result in definitions.RESULTS:
        assert value(samples, "uploads_total", result=result) == 1
    for reason in FailureReason:
        assert value(samples, "upload_attempt_failures_total", reason=reason.value) == 1
    for location in definitions.LOCATIONS:
        assert value(samples, "pruned_checkpoints_total", location=location) == 1
    assert value(samples, "store_request_duration_seconds_count") == 2
    assert value(samples, "commit_latency_seconds_sum") == 40
    assert value(samples, "enqueue_duration_seconds_count") == 1
    assert value(samples, "upload_duration_seconds_count") == 1, "failed shards took no meaningful time"


def test_an_observer_never_raises(metrics):
    """Training must continue despite a value that no definition knows, a clock set back, or a duration that is no
    number.
    """
    before = scrape(metrics)
    metrics.shards_finished("lost in space", 1, 1.0)
    metrics.checkpoint_pruned("moon")
    assert scrape(metrics).keys() == before.keys()
    metrics.shards_enqueued(1, -5.0)
    metrics.shards_enqueued(1, float("nan"))
    samples = scrape(metrics)
    assert value(samples, "enqueue_duration_seconds_count") == 2
    assert value(samples, "enqueue_duration_seconds_sum") == 0


def test_buckets_are_cumulative_and_inclusive(metrics):
    for duration_s in (0.1, 10.0, 10.00001, 100.0, 100.5, 9e9):
        metrics.shards_finished("ok", 1, duration_s)
    report_everything(metrics)
    buckets: dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[float, float]]] = {}
    samples = scrape(metrics)
    for (name, labels), count in samples.items():
        if name.endswith("_bucket"):
            rest = tuple(pair for pair in labels if pair[0] != "le")
            buckets.setdefault((name, rest), []).append((float(dict(labels)["le"]), count))
    assert len(buckets) == 4
    for (name, rest), found in buckets.items():
        assert found == sorted(found)
        assert [count for _, count in found] == sorted(count for _, count in found)
        assert found[-1] == (float("inf"), samples[name.replace("_bucket", "_count"), rest])
    upload = dict(buckets["ckpt_async_upload_duration_seconds_bucket", ()])
    assert (upload[10], upload[100], upload[float("inf")]) == (2, 5, 7)


def test_two_uploaders_in_one_process_do_not_clash(folder, journal):
    """A trainer that exports metrics of its own may have two uploaders."""
    before = sorted(family.name for family in REGISTRY.collect())
    one, two = Metrics("run-a", folder), Metrics("run-b", folder)
    one.bytes_uploaded(7)
    assert value(scrape(one), "upload_bytes_total") == 7
    assert scrape(two)["ckpt_async_upload_bytes_total", (("run", "run-b"),)] == 0
    assert sorted(family.name for family in REGISTRY.collect()) == before
    assert not any(name.startswith("ckpt_async") for name in before)


def test_a_run_of_any_name_can_be_scraped(folder, journal):
    metrics = Metrics('a"b\\c\nd\udc80', folder)
    runs = {dict(labels)["run"] for name, labels in scrape(metrics) if name == "ckpt_async_fenced"}
    assert runs == {'a"b\\c\nd?'}


# --- what the folder holds ---------------------------------------------------------------------------------


def test_queue_of_all_ranks_is_exported_by_state(metrics, journal, wall):
    """One scrape covers the node, including ranks that run in other processes or are dead."""
    old, new = CheckpointId(1, 100), CheckpointId(2, 100)
    a, b, c, d, e, f = (
        shard(name, size) for name, size in zip("abcdef", (1, 10, 100, 1000, 10_000, 100_000), strict=True)
    )
    wall.now = 500.0
    journal.append(0, [Enqueued(old, "s", a), Sealed(old, "s", 2)])
    journal.append(0, [Opened(2, 2, RemoteAddress("file:///run"))])
    wall.now = 600.0
    journal.append(0, [Enqueued(new, "s", b), Enqueued(new, "s", c), Enqueued(new, "s", f)])
    journal.append(0, [verified(new, b), MultipartOpened(new, "c", "id", 5 << 20)])
    journal.append(
        1, [Enqueued(new, "s", d), Enqueued(new, "s", e), Failed(new, "e", FailureReason.AUTH, "no")]
    )
    journal.note_progress(1, [(new, "d", 512)])
    samples = scrape(metrics)
    files = {state: value(samples, "queue_files", state=state) for state in definitions.QUEUE_STATES}
    assert files == {"queued": 1, "uploading": 2, "retrying": 1, "failed": 1}
    assert value(samples, "queue_bytes") == 111_101
    assert value(samples, "oldest_pending_timestamp_seconds") == 500
    assert value(samples, "last_enqueued_step") == 100
    assert value(samples, "last_enqueued_timestamp_seconds") == 600
    assert value(samples, "last_committed_step") is None
    assert value(samples, "last_committed_timestamp_seconds") is None


def test_an_empty_queue_exports_no_oldest_shard(metrics, journal, wall):
    wall.now = 700.0
    journal.append(0, committed(CheckpointId(1, 100)))
    samples = scrape(metrics)
    assert value(samples, "oldest_pending_timestamp_seconds") is None
    assert value(samples, "last_committed_step") == 100
    assert value(samples, "last_committed_timestamp_seconds") == 700
    assert sum(value(samples, "queue_files", state=state) for state in definitions.QUEUE_STATES) == 0
    assert value(samples, "checkpoints_retained", location="local") == 1


def test_newest_checkpoint_is_by_generation_then_step(metrics, journal, wall):
    """After a restart from an older step, the new checkpoints are newer although their steps are smaller (R6)."""
    wall.now = 800.0
    journal.append(0, committed(CheckpointId(1, 900)))
    wall.now = 801.0
    journal.append(1, committed(CheckpointId(2, 300)))
    wall.now = 802.0
    journal.append(2, committed(CheckpointId(1, 901)))
    samples = scrape(metrics)
    assert value(samples, "last_committed_step") == 300
    assert value(samples, "last_committed_timestamp_seconds") == 801
    assert value(samples, "last_enqueued_step") == 300
    assert value(samples, "checkpoints_retained", location="local") == 3


def test_an_aborted_checkpoint_leaves_the_queue(metrics, journal):
    id_ = CheckpointId(1, 5)
    journal.append(
        0, [Enqueued(id_, "s", shard("a", 9)), Failed(id_, "a", FailureReason.SOURCE_MISSING, "gone")]
    )
    assert value(scrape(metrics), "queue_files", state="failed") == 1
    journal.append(0, [Decided(id_, Outcome.ABORT, "s")])
    samples = scrape(metrics)
    assert value(samples, "queue_files", state="failed") == 0
    assert value(samples, "checkpoints_retained", location="local") == 0


def test_pinned_bytes_count_linked_files(metrics, journal):
    """Each file counts once, however often it was enqueued; nothing counts after release, or if it is not linked."""
    one, two = CheckpointId(1, 1), CheckpointId(1, 2)
    journal.append(0, [Enqueued(one, "s", shard("same", 10, inode=7)), Enqueued(one, "s", shard("b", 200))])
    journal.append(0, [Enqueued(two, "t", shard("same", 10, inode=7))])
    journal.append(0, [Enqueued(two, "t", shard("far", 4000, is_linked=False))])
    assert value(scrape(metrics), "spool_pinned_bytes") == 210
    journal.append(0, [Decided(one, Outcome.ABORT, "s"), Released(one)])
    assert value(scrape(metrics), "spool_pinned_bytes") == 10


def test_file_system_metrics_are_of_the_folder(metrics, folder):
    samples = scrape(metrics)
    free, size = folder.space()
    assert value(samples, "spool_filesystem_size_bytes") == size
    assert 0 <= value(samples, "spool_filesystem_free_bytes") <= size
    assert abs(value(samples, "spool_filesystem_free_bytes") - free) < size


def test_removed_checkpoints_are_reflected(metrics, journal):
    journal.append(0, committed(CheckpointId(1, 1)) + committed(CheckpointId(1, 2)))
    assert value(scrape(metrics), "checkpoints_retained", location="local") == 2
    journal.append(0, [Forgotten(CheckpointId(1, 1), None)])
    journal.append(0, committed(CheckpointId(1, 3)))
    assert value(scrape(metrics), "checkpoints_retained", location="local") == 2
    assert value(scrape(metrics), "last_committed_step") == 3


def test_last_enqueued_survives_removal_of_its_rows(metrics, journal, wall):
    """With num_checkpoints_to_keep=0 the rows are removed with the files; an alert compares this metric with the
    commit.
    """
    wall.now = 900.0
    id_ = CheckpointId(1, 4)
    journal.append(0, committed(id_))
    assert value(scrape(metrics), "last_enqueued_step") == 4
    journal.append(0, [Forgotten(id_, 900.0)])
    samples = scrape(metrics)
    assert value(samples, "last_enqueued_step") == 4
    assert value(samples, "last_enqueued_timestamp_seconds") == 900
    assert value(samples, "last_committed_step") == 4
    assert value(samples, "last_committed_timestamp_seconds") == 900


def test_a_damaged_journal_leaves_other_metrics(metrics, journal, folder):
    journal.append(0, committed(CheckpointId(1, 4)))
    metrics.bytes_uploaded(5)
    (folder.private / keys.journal_name(1)).write_bytes(b"no journal" * 1000)
    samples = scrape(metrics)
    assert value(samples, "upload_bytes_total") == 5
    assert value(samples, "spool_filesystem_size_bytes") > 0
    for name in ("last_committed_step", "spool_pinned_bytes"):
        assert value(samples, name) is None
    assert value(samples, "queue_files", state="queued") is None


def test_a_journal_that_cannot_be_read_leaves_other_metrics(metrics, journal, monkeypatch):
    """Then the queue is missing, but not the scrape."""
    journal.append(0, committed(CheckpointId(1, 4)))
    assert value(scrape(metrics), "last_committed_step") == 4

    def locked(*_, **__):
        raise JournalError("journal: Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(journals, "read", locked)
        assert value(scrape(metrics), "last_committed_step") is None
        assert value(scrape(metrics), "fenced") == 0
    assert value(scrape(metrics), "last_committed_step") == 4


def test_scraping_works_beside_writers(folder, journal):
    """With 2,000 events from another thread, every scrape must succeed, and none may see the queue shrink or skip."""
    metrics = Metrics("run-a", folder)
    id_ = CheckpointId(1, 1)
    done = threading.Event()
    failures: list[BaseException] = []

    def append() -> None:
        try:
            for number in range(2000):
                journal.append(number % 4, [Enqueued(id_, "s", shard(f"f{number}", 1, inode=number + 1))])
                metrics.shards_enqueued(1, 0.001)
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=append)
    server = serve(metrics.registry, 0, "127.0.0.1", {})
    seen: list[float] = []
    thread.start()
    try:
        while True:
            is_last = done.is_set()
            with urllib.request.urlopen(server.url, timeout=30) as reply:
                samples = parse(reply.read().decode())
            seen.append(value(samples, "queue_files", state="queued"))
            assert value(samples, "queue_bytes") == seen[-1] == value(samples, "spool_pinned_bytes")
            if is_last:
                break
    finally:
        thread.join()
        server.close()
    assert not failures
    assert seen == sorted(seen)
    assert seen[-1] == value(samples, "files_enqueued_total") == 2000


# --- serving -----------------------------------------------------------------------------------------------


def test_without_a_port_there_is_no_server(metrics):
    assert serve(metrics.registry, -1, "127.0.0.1", {}) is None
    assert serve(metrics.registry, -1, "127.0.0.1", {"LOCAL_RANK": "3"}) is None


def two_free_ports() -> int:
    """Return the first of two adjacent free ports."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                other.bind(("127.0.0.1", port + 1))
                return port


@pytest.mark.fault("O5")
@pytest.mark.parametrize("name", ["LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"])
def test_each_local_rank_has_its_own_port(metrics, name):
    port = two_free_ports()
    one = {name: "1", "SLURM_PROCID": "9"} if name == "SLURM_LOCALID" else {"SLURM_LOCALID": "0", name: "1"}
    for environment, expected in (({}, port), ({name: "0"}, port), (one, port + 1)):
        server = serve(metrics.registry, port, "127.0.0.1", environment)
        assert server is not None
        server.close()
        assert server.url == f"http://127.0.0.1:{expected}/metrics"


@pytest.mark.parametrize("environment", [{}, {"LOCAL_RANK": "5"}])
def test_any_free_port_ignores_the_rank(metrics, environment):
    one, two = (
        serve(metrics.registry, 0, "127.0.0.1", environment),
        serve(metrics.registry, 0, "127.0.0.1", environment),
    )
    assert one.url != two.url
    one.close()
    two.close()


@pytest.mark.fault("F30")
def test_a_taken_port_is_one_warning(metrics, caplog):
    """Metrics must never stop training."""
    with socket.socket() as taken, caplog.at_level(logging.WARNING):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert serve(metrics.registry, port, "127.0.0.1", {}) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"address=127.0.0.1 port={port}" in record.getMessage()


@pytest.mark.parametrize(
    ("port", "address", "local_rank"),
    [(65_535, "127.0.0.1", "1"), (9000, "203.0.113.1", "0"), (9000, "127.0.0.1", "first")],
)
def test_an_impossible_port_is_one_warning(metrics, caplog, port, address, local_rank):
    with caplog.at_level(logging.WARNING):
        assert serve(metrics.registry, port, address, {"LOCAL_RANK": local_rank}) is None
    assert len(caplog.records) == 1


def test_a_closed_server_frees_its_port(metrics):
    """The port is free again and no thread is left: a second Uploader in the process may take both."""
    before = threading.active_count()
    server = serve(metrics.registry, 0, "127.0.0.1", {})
    port = int(server.url.rpartition(":")[2].removesuffix("/metrics"))
    server.close()
    server.close()
    assert threading.active_count() == before
    again = serve(metrics.registry, port, "127.0.0.1", {})
    assert again is not None
    again.close()


def test_a_single_metric_can_be_scraped(metrics):
    """`?name[]=` is what a dashboard's author tries by hand."""
    text = generate_latest(metrics.registry.restricted_registry(["ckpt_async_fenced"])).decode()
    assert {name for name, _ in parse(text)} == {"ckpt_async_fenced"}


# --- the sweeper -------------------------------------------------------------------------------------------


def test_a_sweeper_counts_what_it_did() -> None:
    """The counts come from the report of one sweep: every kind of action, what failed, and what verifying found."""
    one, two, three = CheckpointId(1, 1), CheckpointId(1, 2), CheckpointId(1, 3)
    fate, lost = DrainedCheckpoint(one, "step-1"), Finding("I1", "k", "the shard is missing", "missing")
    ranks = tuple(
        RankReport(rank, committed=(fate,), uploaded_shards=2, uploaded_bytes=10) for rank in (0, 1)
    )
    done = [
        Done(sweep_plan.Settle(one, 2, "r"), outcome=Outcome.COMMIT),
        Done(sweep_plan.Settle(two, 2, "r"), outcome=Outcome.ABORT),
        Done(sweep_plan.Settle(three, 2, "r")),  # another process was first
        Done(sweep_plan.GiveUp(two, "step-2", 2, "r"), outcome=Outcome.ABORT),
        Done(sweep_plan.BeginPrune(one, "r"), outcome=Outcome.PRUNING),
        Done(sweep_plan.FinishPrune(one, "r"), outcome=Outcome.PRUNED),
        Done(sweep_plan.FinishPrune(two, "r"), error="no answer"),
        Done(sweep_plan.AbortMultipart("k", "id", "r")),
        *(
            Done(sweep_plan.Delete(("a", "b"), kind, "r"))
            for kind in definitions.ORPHANS
            if kind not in ("multipart", "decision")
        ),
        Done(sweep_plan.Delete(("a", "b"), "lease", "r"), error="no answer"),
        Done(sweep_plan.CollectDecisions(one, frozenset(), ("a", "b", "c"), "r")),
        Done(sweep_plan.Wait(three, "r")),
    ]
    report = SweepReport(
        (FolderReport("f", DrainReport("f", (), ranks)), FolderReport("g", error="unreadable")),
        (RemoteReport("u", done, violations=[lost]), RemoteReport("v", error="away")),
    )
    sweeper = SweeperMetrics(clock=Clock())
    sweeper_module._count(report, sweeper)
    sweeper.swept(2.0, is_clean=report.is_clean, failing=None)
    samples = scrape(sweeper)
    ends = {each: value(samples, "sweep_checkpoints_total", result=each) for each in definitions.ENDS}
    assert ends == {"committed": 2, "aborted": 2, "pruned": 1}
    removed = {each: value(samples, "sweep_orphans_removed_total", kind=each) for each in definitions.ORPHANS}
    assert removed == dict.fromkeys(definitions.ORPHANS, 2) | {"multipart": 1, "decision": 3}
    failed = {each: value(samples, "sweep_failures_total", scope=each) for each in definitions.SWEEP_SCOPES}
    assert failed == {"folder": 1, "remote": 1, "action": 2}
    assert value(samples, "sweep_adopted_uploads_total") == 4
    assert value(samples, "sweep_adopted_upload_bytes_total") == 20
    assert value(samples, "verify_failures_total", kind="missing") == 1
    assert value(samples, "sweeps_total", result="failed") == 1
    assert value(samples, "sweep_duration_seconds_sum") == 2
    assert value(samples, "sweep_last_completed_timestamp_seconds") is None, "it broke off"
    sweeper.swept(1.0, is_clean=True, failing=[])
    assert value(scrape(sweeper), "sweep_last_completed_timestamp_seconds") == 100


@pytest.mark.fault("O8")
def test_a_sweeper_exports_failing_targets_with_the_time_of_the_first_failure() -> None:
    """One remote that does not answer does not mean that the sweeper is idle: everything else on its node is well."""
    clock = Clock()
    sweeper = SweeperMetrics(clock=clock)
    away, damaged = (
        RemoteReport("s3://b/away", error="no answer"),
        Finding("I1", "k", "is missing", "missing"),
    )
    broken = RemoteReport(
        "s3://b/broken", [Done(sweep_plan.AbortMultipart("k", "id", "r"), error="no answer")]
    )
    well = RemoteReport("s3://b/well", violations=[damaged])
    folders = (FolderReport("/well"), FolderReport("/unreadable", error="is no journal"))

    def sweep(*remotes: RemoteReport) -> dict[str, float]:
        report = SweepReport(folders, remotes)
        sweeper.swept(1.0, is_clean=report.is_clean, failing=report.failing)
        samples = scrape(sweeper)
        assert value(samples, "sweep_last_completed_timestamp_seconds") == clock.now
        name = "ckpt_async_sweep_failing_since_timestamp_seconds"
        return {dict(labels)["target"]: at for (full, labels), at in samples.items() if full == name}

    assert sweep(away, broken, well) == {"/unreadable": 100, "s3://b/away": 100, "s3://b/broken": 100}
    clock.now = 200
    assert sweep(away, well) == {"/unreadable": 100, "s3://b/away": 100}
    clock.now = 300
    assert sweep(broken, well) == {"/unreadable": 100, "s3://b/broken": 300}


@pytest.mark.fault("O7")
def test_a_sweeper_exports_what_a_killed_trainer_left(folder, journal, wall, tmp_path) -> None:
    """The trainer's own port died with it. Two runs, one of them in two folders, and a folder that no trainer has
    used.
    """
    one = RemoteAddress("s3://b/exp7/checkpoints/")
    journal.append(0, [Opened(1, 2, one), *committed(CheckpointId(1, 1))])
    journal.append(0, [Enqueued(CheckpointId(1, 2), "step-2", shard("a", 5))])
    wall.now = 200
    journal.append(1, [Opened(1, 2, RemoteAddress("s3://b/exp8/checkpoints"))])
    journal.append(1, [Enqueued(CheckpointId(1, 3), "step-3", shard("b", 7))])
    wall.now = 300
    journal.append(1, [Sealed(CheckpointId(1, 2), "step-2", 2), ReceiptStored(CheckpointId(1, 2))])
    folders = [str(folder.path), str(tmp_path / "none")]
    samples = scrape(SweeperMetrics(lambda: folders))
    seven, eight = {"run": "s3://b/exp7/checkpoints"}, {"run": "s3://b/exp8/checkpoints"}
    assert value(samples, "queue_bytes", **seven) == 5
    assert value(samples, "queue_files", state="queued", **eight) == 1
    assert value(samples, "oldest_pending_timestamp_seconds", **seven) == 100
    assert value(samples, "oldest_pending_timestamp_seconds", **eight) == 200
    assert value(samples, "last_committed_step", **seven) == 1
    assert value(samples, "last_enqueued_step", **eight) == 3
    assert value(samples, "waiting_checkpoints", **seven) == 0
    assert value(samples, "waiting_checkpoints", **eight) == 1
    assert value(samples, "oldest_waiting_timestamp_seconds", **eight) == 300


def test_every_value_a_sweeper_reports_is_defined() -> None:
    """An undefined value would be dropped silently."""

    def arguments(path: str, name: str, place: int) -> set[str]:
        calls = (node for node in ast.walk(ast.parse((ROOT / "ckpt_async" / path).read_text())))
        return {
            node.args[place].value
            for node in calls
            if isinstance(node, ast.Call)
            and getattr(node.func, "id", getattr(node.func, "attr", "")) == name
            and len(node.args) > place
            and isinstance(node.args[place], ast.Constant)
        }

    assert arguments("protocol/sweep_plan.py", "Delete", 1) | {"multipart", "decision"} == set(
        definitions.ORPHANS
    )
    assert arguments("protocol/verify.py", "Finding", 3) | {"record"} == {
        *definitions.VERIFY_KINDS,
        "leftover",
    }
    assert arguments("sweep/sweeper.py", "failed", 0) == set(definitions.SWEEP_SCOPES)
    assert arguments("sweep/sweeper.py", "ended", 0) == set(definitions.ENDS)


def test_sweeper_metrics_follow_the_conventions() -> None:
    """The rules are those for an uploader: all children at 0 from the start, units last, no growing labels, valid
    OpenMetrics.
    """
    metrics = SweeperMetrics()
    samples = parse(fetch(metrics))
    totals = {key: count for key, count in samples.items() if key[0].endswith("_total")}
    assert set(totals.values()) == {0}
    for each in definitions.SWEEPER_DEFINITIONS:
        assert each.name.startswith("ckpt_async_")
        assert each.name.endswith("_total") == (each.kind == "counter")
        assert not re.search(r"_(bytes|seconds)_(?!total$)", each.name), "the unit comes last"
        if each.kind == "counter":
            children = 0 if each.is_sparse else math.prod(len(values) for values in each.labels.values())
            assert sum(name == each.name for name, _ in totals) == children
    metrics.of("s3://b/run/").attempt_failed(FailureReason.TIMEOUT)
    metrics.of("s3://b/run").requests_finished("list", [1.0, 2.0])
    samples = parse(fetch(metrics))
    assert value(samples, "sweep_attempt_failures_total", run="s3://b/run", reason="timeout") == 1
    assert value(samples, "store_request_duration_seconds_count", run="s3://b/run") == 2
    assert len(samples) <= 60
    assert list(
        openmetrics.text_string_to_metric_families(
            fetch(metrics, "application/openmetrics-text;version=1.0.0")
        )
    )
