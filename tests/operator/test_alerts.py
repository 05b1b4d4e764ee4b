"""Prometheus' own tool finds no fault with the metrics page and the alert rules, and every alert fires."""

from __future__ import annotations

import re

import yaml

from prefixd.server.figures.metrics import metrics_page
from tests.operator.programs import ROOT, run_program
from tests.server.figures.filled_stats import filled_stats

RULES = ROOT / "deploy/prometheus/prefixd.rules.yaml"
TESTS = ROOT / "tests/operator/prefixd.rules.test.yaml"


def test_promtool_finds_no_fault_with_the_metrics() -> None:
    page, _ = metrics_page(filled_stats(), "")
    done = run_program("promtool", "check", "metrics", stdin=page.decode())
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_promtool_finds_no_fault_with_the_rules() -> None:
    done = run_program("promtool", "check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_and_a_healthy_daemon_raises_none() -> None:
    done = run_program("promtool", "test", "rules", TESTS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_both_ways() -> None:
    alerts = {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
    cases = [case for test in yaml.safe_load(TESTS.read_text())["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == alerts
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == alerts


def test_every_alert_says_what_to_do() -> None:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"].keys() == {"summary", "remedy"}
            for page in re.findall(r"docs/[\w/]+\.md", rule["annotations"]["remedy"]):
                assert (ROOT / page).exists(), page


def test_what_rules_and_pages_ask_for_is_on_the_metrics_page() -> None:
    page, _ = metrics_page(filled_stats(), "")
    there = set(re.findall(r"^(?:# TYPE )?(prefixd_\w+)", page.decode(), re.MULTILINE))
    for file in (RULES, ROOT / "docs/monitoring.md", ROOT / "deploy/grafana/prefixd.json"):
        named = set(re.findall(r"\bprefixd_\w+", file.read_text())) - {"prefixd_", "prefixd_model_"}
        assert len(named) > 10 and not named - there, file
