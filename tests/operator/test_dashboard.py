"""A real Prometheus scrapes a real daemon, and answers every query of the dashboard and of the alerts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deploy.grafana.picture import DASHBOARD, RULES, Prometheus, draw, fill_in
from deploy.grafana.picture import prometheus as run_prometheus
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.v1 import inference_pb2
from tests.daemons import Remote, collect, token_bytes
from tests.operator.programs import find_program

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
_WAIT_S = 60.0
_MAY_LACK = (
    "prefixd_trouble_seconds",
    "prefixd_lost_blocks_total",
    "prefixd_prefetch_lead_",
    "prefixd_remote_",
    "prefixd_ghost_",
    "prefixd_disk_codec_",
)
"""Metrics that a young and healthy daemon without prefetches, a shared store and a lossy codec may not have."""


def wait_for(server: Prometheus, expression: str) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not server.query(expression):
        assert time.monotonic() < deadline, f"{expression} has had no value for {_WAIT_S:g} s"
        time.sleep(0.5)


def use(remote: Remote, number: int) -> None:
    """As an engine and a client of the daemon's own worker do."""
    tokens = [number, *range(31)]
    with remote.session("engine") as session:
        namespace = remote.register(session.session_id, "engine-model", 4096)
        remote.put(session.session_id, namespace, tokens, bytes(8 * 4096), durable=True)
        earlier = [max(number - 8, 0), *tokens[1:]]  # on disk alone, in time
        assert remote.get(session.session_id, namespace, earlier)[0] == 8
    request = inference_pb2.GenerateRequest(sampling=inference_pb2.SamplingParams(max_tokens=4, ignore_eos=True))
    request.token_ids.ids = token_bytes(range(100, 164))
    collect(remote.inference.Generate(request, metadata=(("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01"),)))


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A server that has scraped a busy daemon with a model."""
    program = find_program("prometheus")
    settings = {
        "worker.embedded": True,
        "gpu.bytes": "16MiB",
        "cpu.bytes": "128KiB",
        "disk.bytes": "64MiB",
        "disk.endurance_bytes": "1.2PB",
        "server.metrics": "127.0.0.1:0",
    }
    with DaemonProcess(settings) as daemon, Remote(daemon) as remote:
        assert daemon.metrics is not None
        use(remote, 0)
        target = daemon.metrics.removeprefix("http://")
        with run_prometheus(program, tmp_path_factory.mktemp("prometheus"), target) as server:
            wait_for(server, "prefixd_build_info")
            number, deadline = 1, time.monotonic() + _WAIT_S
            wanted = ("prefixd_time_to_first_token_seconds_count", 'prefixd_load_seconds_count{urgency="demand"}')
            while not all(server.query(f"rate({metric}[10s]) > 0") for metric in wanted):
                assert time.monotonic() < deadline
                use(remote, number)
                number += 1
            yield server


def test_every_panel_has_an_answer(prometheus: Prometheus) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            query = fill_in(target["expr"], "10s")
            found = prometheus.query(query)  # raises for what is no PromQL
            assert found or any(name in query for name in _MAY_LACK), f"{panel['title']}: {query}"


def test_variables_have_values(prometheus: Prometheus) -> None:
    tenants = prometheus.ask("series", **{"match[]": "prefixd_traffic_asked_tokens_total"})
    assert {(each["tenant"], each["model"]) for each in tenants} == {
        ("default", "engine-model"),
        ("default", "embedded-v2"),
    }


def test_the_rules_are_loaded_and_nothing_fires(prometheus: Prometheus) -> None:
    (group,) = prometheus.ask("rules")["groups"]
    known = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    assert [rule["name"] for rule in group["rules"]] == [rule["alert"] for rule in known]
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
    assert {rule["name"] for rule in group["rules"] if rule["state"] == "firing"} == set()


def test_exemplars_lead_to_the_trace(prometheus: Prometheus) -> None:
    now = time.time()
    found = prometheus.ask(
        "query_exemplars",
        query="prefixd_time_to_first_token_seconds_bucket",
        start=str(now - 600),
        end=str(now + 60),
    )
    traces = {exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]}
    assert traces == {TRACE}


def test_the_dashboard_can_be_drawn(prometheus: Prometheus, tmp_path: Path) -> None:
    draw(json.loads(DASHBOARD.read_text()), prometheus, time.time() - 60, time.time(), tmp_path / "dashboard.png")
    assert (tmp_path / "dashboard.png").read_bytes().startswith(b"\x89PNG")
