"""Plan and daemon are compared by the medians of their rounds, and a prediction that is off fails the benchmark."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checks import plan_check
from benchmarks.common.harness import BenchmarkError
from prefixd.cli.demo.runner import settings_for
from prefixd.planner.machine import calibrate
from prefixd.planner.machine.calibration import Calibration
from prefixd.planner.plan_figures import PlanFigures
from prefixd.workloads.latency_figures import Quantiles
from prefixd.workloads.text_analysis import TextAnalysis

ROUND = PlanFigures(
    requests=10,
    refused=0,
    elapsed_s=1.0,
    requests_per_s=10.0,
    prompt_tokens_per_s=100.0,
    output_tokens_per_s=10.0,
    hit_rate=0.5,
    hits={"gpu": 0.25, "cpu": 0.25},
    achievable_hit_rate=None,
    ttft_s=Quantiles(0.1, 0.2),
    disk_written_bytes=0,
    disk_read_bytes=0,
    disk_saved_bytes=0,
    evicted_blocks={},
    preempted=0,
    gpu_busy=1.0,
)
MACHINE = Calibration(
    machine="here",
    disk_read_bytes_per_s=1e9,
    disk_write_bytes_per_s=1e9,
    disk_latency_s=1e-4,
    copy_bytes_per_s=1e9,
    copy_latency_s=1e-6,
)


def test_the_median_of_the_rounds_is_compared() -> None:
    plans = [replace(ROUND, requests_per_s=rate) for rate in (1.0, 11.0, 12.0)]
    measured = [({"gpu": 0.2, "cpu": 0.2}, 2.0), ({"gpu": 0.4, "cpu": 0.0}, 10.0), ({"gpu": 0.4, "cpu": 0.4}, 99.0)]
    row = plan_check.compare("work", plans, measured)
    assert (row["hit_rate"], row["predicted_hit_rate"]) == (pytest.approx(0.4), 0.5)
    assert (row["requests_per_s"], row["predicted_requests_per_s"]) == (10.0, 11.0)
    assert row["hit_rate_off"] == pytest.approx(0.25) and row["requests_per_s_off"] == pytest.approx(0.1)
    assert [each["requests_per_s"] for each in row["rounds"]] == [2.0, 10.0, 99.0]


def test_what_was_not_to_be_found_and_was_not_found_is_right() -> None:
    row = plan_check.compare("work", [replace(ROUND, hit_rate=0.0)], [({"gpu": 0.0}, 10.0)])
    assert row["hit_rate_off"] == 0.0
    row = plan_check.compare("work", [ROUND], [({"gpu": 0.0}, 10.0)])
    assert row["hit_rate_off"] == float("inf"), "a hit was promised, and there was none"


def test_without_a_cache_one_round_is_enough() -> None:
    workload = TextAnalysis(prefixes=2, requests=4, repeats=3)
    assert plan_check.rounds("no-cache", workload).repeats == 1
    assert plan_check.rounds("fpf", workload).repeats == 3


@pytest.mark.slow
def test_the_benchmark_in_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides see the same requests; how well their times agree is not for a test to judge. Chat is left out here:
    its conversations take a minute, as a whole calibration does."""
    monkeypatch.setattr(calibrate, "_LOADS", ((8, 48), (4, 240), (2, 496)))
    monkeypatch.setattr(plan_check, "chats", lambda *_: [])
    # What is loaded, and what computed instead, would be decided by measured times: not the same on both sides.
    always: dict[str, Any] = {"scheduler.load": "always"}
    monkeypatch.setattr(plan_check, "settings_for", lambda *chosen: settings_for(*chosen) | always)
    numbers = {"prefixes": 6, "gpu-prefixes": 2, "cpu-prefixes": 3, "disk-prefixes": 6, "requests": 12, "rounds": 1}
    numbers |= {"prefix-tokens": 64, "tolerance": 1000}
    file = tmp_path / "plan_check.json"
    given = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
    plan_check.main([*given, "--configs", "no-cache", "fcfs", "--codec", "int8", "--json", str(file)])
    computed, found = json.loads(file.read_text())["workloads"]
    assert computed["hit_rate"] == computed["predicted_hit_rate"] == 0
    assert found["hit_rate"] > 0.5 and abs(found["hit_rate_off"]) < 0.05
    assert found["requests_per_s"] > 0 and found["predicted_requests_per_s"] > 0


def test_a_prediction_that_is_off_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(*_: object) -> list[dict[str, object]]:
        return [plan_check.compare("work", [ROUND], [({"gpu": 0.5}, 5.0)])]

    monkeypatch.setattr(plan_check, "chats", off)
    monkeypatch.setattr(plan_check, "calibrated", lambda *_: MACHINE)
    monkeypatch.setattr(plan_check, "text_analyses", lambda *_: ())
    file = tmp_path / "plan_check.json"
    with pytest.raises(BenchmarkError, match=r"a prediction is off by 100\.0%, more than 15%"):
        plan_check.main(["--json", str(file)])
    assert json.loads(file.read_text())["worst_off"] == pytest.approx(1.0), "the result is written nevertheless"


def test_a_tolerance_that_everything_is_within_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan_check.main(["--tolerance", "nan"])
    assert "'nan' is not from 0" in capsys.readouterr().err
