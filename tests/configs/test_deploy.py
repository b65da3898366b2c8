"""Dashboard and alerts can be read, and know no metric and no label that the server does not have."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from maxmoe.server.metrics import Metrics

DEPLOY = Path(__file__).resolve().parents[2] / "configs/deploy"
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
_ADDED_BY_PROMETHEUS = {"instance", "job", "le"}


def _dashboard() -> dict:
    return json.loads((DEPLOY / "grafana_dashboard.json").read_text("utf-8"))


_NAME = r"\b(?:maxmoe:|process_)\w+"  # of a metric; process_ are those that every Prometheus client has


def _alerts() -> list[dict]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus_alerts.yaml").read_text("utf-8"))["groups"]
    return group["rules"]


def _queries() -> list[str]:
    panels = [target["expr"] for panel in _dashboard()["panels"] for target in panel["targets"]]
    return panels + [rule["expr"] for rule in _alerts()] + [_dashboard()["templating"]["list"][1]["query"]]


@pytest.fixture(scope="module")
def labels():
    """The labels of each series that a server may have, by its name."""
    metrics = Metrics("m")
    metrics.request_started("/e")
    metrics.engine_state(0, 0, 0.0, 0, 0, cache_fragmentation=0.0, device_bytes=0)
    metrics.error("k")
    metrics.admission_rejection("r")
    metrics.budget_hit("t")
    found = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for suffix in _SUFFIXES[family.type]:
            keys = {key for sample in family.samples for key in sample.labels}
            found[family.name + suffix] = keys | _ADDED_BY_PROMETHEUS
    return found


def test_every_metric_that_is_asked_for_exists(labels):
    used = {name for query in _queries() for name in re.findall(_NAME, query)}
    assert used <= labels.keys()
    # and none is forgotten, but for what others stand for
    counted = {name for name in labels if not name.endswith(("_bucket", "_sum", "_count", "_created"))}
    counted = {name for name in counted if not name.startswith("process_")}
    assert counted <= used, "no panel shows it"
    assert {name for name in labels if name.endswith("_bucket")} <= used


def test_every_label_that_is_asked_for_exists(labels):
    for query in _queries():
        known = set.union(*(labels[name] for name in re.findall(_NAME, query)), _ADDED_BY_PROMETHEUS)
        asked = {label.strip() for names in re.findall(r"by \(([^)]*)\)", query) for label in names.split(",")}
        asked |= set(re.findall(r"(\w+)=~?\"", query))
        assert asked <= known, query


@pytest.mark.parametrize("query", _queries())
def test_brackets_of_a_query_are_balanced(query):
    opened = []
    for char in re.sub(r'"[^"]*"', "", query):
        if char in "([{":
            opened.append(char)
        elif char in ")]}":
            assert opened and opened.pop() + char in ("()", "[]", "{}")
    assert not opened


def test_panels_are_apart_and_legends_name_labels():
    panels = _dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels) > 15
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, panel["title"]
                taken.add((x, y))
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"]


def test_alerts_say_what_they_mean():
    rules = _alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
