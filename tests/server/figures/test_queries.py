"""Every query of the dashboard and of the alert rules names metrics and labels that the metrics page has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from prefixd.server.figures.metrics import metrics_page
from tests.server.figures.filled_stats import filled_stats

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD = DEPLOY / "grafana/prefixd.json"
RULES = DEPLOY / "prometheus/prefixd.rules.yaml"

_METRIC = re.compile(r"\b(?:prefixd|process|up)(?:_\w+)?\b(?!\s*\()(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
_GROUPED = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_LEGEND = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")
_OF_PROMETHEUS = {"instance", "job", "le"}


@cache
def page() -> dict[str, set[str]]:
    """Labels by the name of each sample of a page that has all figures."""
    labels: dict[str, set[str]] = {"up": set()}
    for family in text_string_to_metric_families(metrics_page(filled_stats(), "")[0].decode()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def metrics_in(query: str) -> Iterator[tuple[str, set[str]]]:
    """The metrics of a query, each with the labels that its selector names."""
    without_strings = re.sub(r'"[^"]*"', '""', query)
    for match in _METRIC.finditer(without_strings):
        yield match[0].partition("{")[0], set(_MATCHER.findall(match[1] or ""))


def faults(query: str, legends: str = "") -> list[str]:
    """What a query asks for that no page has."""
    known = page()
    found, labels = [], set(_OF_PROMETHEUS)
    for name, selected in metrics_in(query):
        if name not in known:
            found.append(f"no metric {name}")
            continue
        labels |= known[name]
        found += [f"{name} has no label {label}" for label in selected - known[name] - _OF_PROMETHEUS]
    grouped = {label.strip() for group in _GROUPED.findall(query) for label in group.split(",")}
    found += [f"no label {label}" for label in (grouped | set(_LEGEND.findall(legends))) - labels]
    if not list(metrics_in(query)):
        found.append("no metric")
    return found


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text())


def test_every_panel_asks_for_what_there_is() -> None:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    assert len(panels) > 25
    wrong = {
        f"{panel['title']}: {target['expr']}": found
        for panel in panels
        for target in panel["targets"]
        if (found := faults(target["expr"].replace("$__rate_interval", "5m"), target["legendFormat"]))
    }
    assert not wrong


def test_every_variable_and_annotation_asks_for_what_there_is() -> None:
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
            assert label in page()[name] | _OF_PROMETHEUS
    for annotation in dashboard()["annotations"]["list"]:
        assert not faults(annotation["expr"], annotation["textFormat"])


def test_panels_do_not_overlap_and_have_names() -> None:
    taken = set[tuple[int, int]]()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["title"]
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells


def test_every_alert_asks_for_what_there_is() -> None:
    text = re.sub(r"^\s*#.*$", "", RULES.read_text(), flags=re.MULTILINE)
    alerts = re.findall(
        r"- alert: (\w+)\n\s+expr: (?:>\n)?(.*?)\n\s+(?:for|labels): (.*?)(?=- alert:|\Z)", text, re.DOTALL
    )
    assert len(alerts) == text.count("- alert:") > 10
    for name, expression, rest in alerts:
        assert not faults(expression, rest), name


@pytest.mark.parametrize(
    ("query", "legend", "fault"),
    [
        ("rate(prefixd_hits_total[5m])", "", "no metric prefixd_hits_total"),
        ('prefixd_tier_blocks{model="x"}', "", "prefixd_tier_blocks has no label model"),
        ("sum by (model) (prefixd_tier_blocks)", "", "no label model"),
        ("prefixd_tier_blocks", "{{model}}", "no label model"),
        ("1 + 1", "", "no metric"),
    ],
)
def test_what_there_is_not_would_be_seen(query: str, legend: str, fault: str) -> None:
    assert faults(query, legend) == [fault]
