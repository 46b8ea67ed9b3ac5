"""OpenTelemetry, with its real SDK in a process of its own, because providers can be set only once per process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from ckpt_async.monitor.otel import Spans

ROOT = Path(__file__).resolve().parents[2]

PLAY = """
import json, sys, urllib.request
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from ckpt_async import Uploader
from tests.events.saves import QUICK, save

folder, runner = sys.argv[1:]
spans, reader, provider = InMemorySpanExporter(), InMemoryMetricReader(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
metrics.set_meter_provider(MeterProvider([reader]))
with Uploader(folder + "/f", f"file://{folder}/run", runner=runner, metrics_port=0, **QUICK) as uploader:
    save(uploader, 1, 2)
    for step in (1, 2):
        uploader.wait(step)
    uploader.give_up(3, "no more")
    try:
        uploader.wait(3)
    except Exception:
        pass
    points = [
        [each.name, dict(point.attributes), getattr(point, "value", None) if hasattr(point, "value") else point.count]
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for each in scope.metrics
        for point in each.data.data_points
    ]
    scraped = urllib.request.urlopen(uploader.metrics_url).read().decode()
print(json.dumps({
    "points": points,
    "scraped": scraped,
    "spans": [json.loads(each.to_json()) for each in spans.get_finished_spans()],
}))
"""


@pytest.fixture(scope="module", params=["thread", "process"])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was scraped and exported in one play."""
    folder = str(tmp_path_factory.mktemp("played"))
    command = [sys.executable, "-c", PLAY, folder, request.param]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return {**json.loads(ran.stdout), "run": f"file://{folder}/run"}


def test_a_checkpoint_is_a_trace_from_its_save_to_its_commit(played: dict[str, Any]) -> None:
    spans = played["spans"]
    of_checkpoints = {each["attributes"]["ckpt_async.step"]: each for each in spans if not each["parent_id"]}
    assert sorted(of_checkpoints) == [1, 2, 3]
    for step in (1, 2):
        span = of_checkpoints[step]
        assert span["name"] == "ckpt_async.checkpoint"
        assert span["attributes"]["ckpt_async.outcome"] == "committed"
        assert span["attributes"]["ckpt_async.run"] == played["run"]
        [upload] = [each for each in spans if each["parent_id"] == span["context"]["span_id"]]
        assert upload["name"] == "ckpt_async.upload"
        assert upload["context"]["trace_id"] == span["context"]["trace_id"]
        times = [span["start_time"], upload["start_time"], upload["end_time"], span["end_time"]]
        assert times == sorted(times)
    assert of_checkpoints[3]["status"]["status_code"] == "ERROR"
    assert "no more" in of_checkpoints[3]["status"]["description"]


def test_no_upload_begins_before_its_checkpoint() -> None:
    """An upload in another process, say, may have taken longer by its clock than the checkpoint took by ours."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = Spans("file:///run", 0)
    spans._tracer = provider.get_tracer("ckpt_async")
    spans.shards_finished("ok", 1, 2.0, step=1, at=10.0)
    spans.checkpoint_committed(1, 1.0, 10.5)
    began = {each.name: each.start_time for each in exporter.get_finished_spans()}
    assert began["ckpt_async.checkpoint"] == began["ckpt_async.upload"] == 8 * 10**9


def test_metrics_are_those_that_prometheus_scrapes(played: dict[str, Any]) -> None:
    exported = {(name, *sorted(labels.items())): value for name, labels, value in played["points"]}
    for family in text_string_to_metric_families(played["scraped"]):
        for each in family.samples:
            if family.type == "histogram" and not each.name.endswith("_count"):
                continue
            key = (each.name.removesuffix("_count"), *sorted(each.labels.items()))
            if family.type == "histogram" and not each.value:
                assert key not in exported  # OpenTelemetry exports no data point where nothing was observed
            else:
                assert key in exported
            if each.name in (
                "ckpt_async_checkpoints_committed_total",
                "ckpt_async_commit_latency_seconds_count",
            ):
                assert exported[key] == each.value == 2


def test_without_the_api_nothing_of_it_is_imported_and_all_works(tmp_path: Path) -> None:
    text = """
import sys
sys.modules["opentelemetry"] = None  # as if it were not installed
from ckpt_async import Uploader
from tests.events.saves import QUICK, save
with Uploader(sys.argv[1] + "/f", f"file://{sys.argv[1]}/run", **QUICK) as uploader:
    save(uploader, 1)
    uploader.wait(1)
print([name for name in sys.modules if name.startswith("opentelemetry.")])
"""
    ran = subprocess.run(
        [sys.executable, "-c", text, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ran.stdout == "[]\n", ran.stderr


def test_importing_the_package_imports_nothing_of_it() -> None:
    text = (
        "import sys, ckpt_async; ckpt_async.Uploader; print([n for n in sys.modules if 'opentelemetry' in n])"
    )
    ran = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "[]\n", ran.stderr
