"""A real Prometheus scrapes a real daemon, and answers every query of the dashboard and of the alerts."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.v1 import inference_pb2
from tests.daemons import Remote, collect, token_bytes
from tests.operator.programs import ROOT, find_program

DASHBOARD = ROOT / "deploy/grafana/prefixd.json"
RULES = ROOT / "deploy/prometheus/prefixd.rules.yaml"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
_WAIT_S = 60.0
_MAY_LACK = (
    "prefixd_trouble_seconds",
    "prefixd_lost_blocks_total",
    "prefixd_prefetch_lead_",
    "prefixd_remote_",
    "prefixd_ghost_",
)
"""Metrics that a young and healthy daemon without prefetches and without a shared store may not have."""


class Prometheus:
    """A server that scrapes one address every second."""

    def __init__(self, directory: Path, target: str) -> None:
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "prefixd", "static_configs": [{"targets": [target]}]}],
        }
        file = directory / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        self._log = directory / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    find_program("prometheus"),
                    f"--config.file={file}",
                    f"--storage.tsdb.path={directory / 'data'}",
                    "--web.listen-address=127.0.0.1:0",
                    "--enable-feature=exemplar-storage",
                    "--log.format=json",
                ],
                stdout=log,
                stderr=log,
            )
        self.url = f"http://{self._address()}"

    def _address(self) -> str:
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in self._log.read_text().splitlines():
                said = json.loads(line)
                if said.get("msg") == "Listening on" and "address" in said:
                    return str(said["address"])
            time.sleep(0.1)
        raise RuntimeError(self._log.read_text())

    def ask(self, path: str, **parameters: str) -> Any:
        """Returns `data` of an answer of the HTTP API."""
        with urllib.request.urlopen(
            f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=30
        ) as answer:
            said = json.load(answer)
        assert said["status"] == "success", said
        return said["data"]

    def query(self, expression: str) -> list[Any]:
        return list(self.ask("query", query=expression)["result"])

    def wait_for(self, expression: str) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not self.query(expression):
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
    find_program("prometheus")
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
        server = Prometheus(tmp_path_factory.mktemp("prometheus"), daemon.metrics.removeprefix("http://"))
        try:
            server.wait_for("prefixd_build_info")
            number, deadline = 1, time.monotonic() + _WAIT_S
            wanted = ("prefixd_time_to_first_token_seconds_count", 'prefixd_load_seconds_count{urgency="demand"}')
            while not all(server.query(f"rate({metric}[10s]) > 0") for metric in wanted):
                assert time.monotonic() < deadline
                use(remote, number)
                number += 1
            yield server
        finally:
            server.process.terminate()
            server.process.wait(_WAIT_S)


def test_every_panel_has_an_answer(prometheus: Prometheus) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", "10s")
            for variable in ("instance", "tenant", "model"):
                query = query.replace(f"${variable}", ".*")
            found = prometheus.query(query)  # raises for what is no PromQL
            assert found or any(name in query for name in _MAY_LACK), f"{panel['title']}: {query}"


def test_variables_have_values(prometheus: Prometheus) -> None:
    tenants = prometheus.ask("series", **{"match[]": "prefixd_traffic_asked_tokens_total"})
    assert {(each["tenant"], each["model"]) for each in tenants} == {
        ("default", "engine-model"),
        ("default", "embedded-v1"),
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
