"""The Grafana dashboard: the file is what the script writes, and queries only what is exported.

`./dev dashboard` shows what each panel displays for real runs, in a real Prometheus.
"""

import json
import re
import shutil

import pytest

from ckpt_async.monitor.definitions import DEFINITIONS, SWEEPER_DEFINITIONS, Definition
from tests.dashboard.play import ROOT, dashboard, panel_queries, play

FILE = ROOT / "deploy/grafana/ckpt-async.json"
# Labels that are in no definition: Prometheus sets them, or the query itself does.
OF_PROMETHEUS = {"alertname", "alertstate", "instance", "job", "node", "le"}


def known() -> dict[str, Definition]:
    made = {each.name: each for each in (*DEFINITIONS, *SWEEPER_DEFINITIONS)}
    parts = ("sum", "count", "bucket")
    return made | {
        f"{name}_{part}": each for name, each in made.items() if each.kind == "histogram" for part in parts
    }


def test_the_file_is_what_the_script_writes() -> None:
    assert FILE.read_text() == dashboard().as_json(), "run: python deploy/grafana/dashboard.py"


def test_queries_ask_for_metrics_and_labels_that_are_exported() -> None:
    """A query for a metric that nothing exports is an empty panel, which looks as if all were well."""
    asked = panel_queries(FILE.read_text())
    assert len(asked) > 30
    metrics = known()
    for title, query in asked:
        selected = re.findall(r"(ckpt_async_\w+)(\{[^}]*\})?", query)
        names = {name for name, _ in selected}
        assert names <= metrics.keys(), title
        for name, matchers in selected:
            definition = metrics[name]
            for label, value in re.findall(r'(\w+)=~?"([^"]*)"', matchers):
                if label == "le":
                    assert float(value) in definition.bounds_s, title
                else:
                    assert label in definition.labels, (title, label)
                    closed = definition.labels[label]
                    assert not closed or value in closed, (title, value)
        grouped = {label for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(", ")}
        for name in names:
            assert grouped <= {*metrics[name].labels, *OF_PROMETHEUS}, (title, name)
        _legend_has_its_labels(title, query)


def _legend_has_its_labels(title: str, query: str) -> None:
    targets = [
        target for panel in json.loads(FILE.read_text())["panels"] for target in panel.get("targets", ())
    ]
    legends = {target["legendFormat"] for target in targets if target["expr"] == query}
    groups = re.findall(r"by \(([^)]*)\)", query)
    for label in {label for legend in legends for label in re.findall(r"\{\{(\w+)\}\}", legend)}:
        if groups:
            assert label in groups[0].split(", "), (title, label)


def test_it_shows_what_a_person_on_call_looks_for() -> None:
    """Every gauge and counter that an alert uses has a panel."""
    queries = " ".join(query for _, query in panel_queries(FILE.read_text()))
    rules = re.findall(
        r"(?ms)^ +expr: (.*?)^ +(?:for|labels):", (ROOT / "deploy/prometheus/alerts.yaml").read_text()
    )
    for metric in set(re.findall(r"ckpt_async_\w+", " ".join(rules))):
        assert metric in queries, metric


def test_provisioning_names_the_folder_of_the_dashboard() -> None:
    folder = ROOT / "deploy/grafana/provisioning"
    (path,) = re.findall(r"path: (\S+)", (folder / "dashboards/ckpt-async.yaml").read_text())
    assert path in (ROOT / "docs/operations.md").read_text()
    assert "type: prometheus" in (folder / "datasources/prometheus.yaml").read_text()


@pytest.mark.soak
def test_every_query_finds_something_in_a_real_prometheus() -> None:
    if not shutil.which("prometheus"):
        pytest.skip("no Prometheus here: ./dev alerts says how to get it")
    assert set(play()) == set(panel_queries(FILE.read_text()))
