"""The harness of faults in short, and proof that it sees: daemons that break a promise are found out."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.checks import faults
from benchmarks.checks.fault_injection import worker_fault as worker
from benchmarks.checks.fault_injection.fault_result import Result
from benchmarks.checks.fault_injection.faults_made import SCENARIOS, Stage

SHORT = faults.Pace(calls=3, during_s=0.0, pause_s=0.005)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


@pytest.mark.parametrize(
    "name",
    ["write error", "read error", "no room for the index", "wrong bytes read", "out of descriptors", "slab deleted"],
)
@pytest.mark.slow
def test_a_fault_is_survived(name: str, tmp_path: Path) -> None:
    result = faults.run_scenario(BY_NAME[name], tmp_path, pace=SHORT)
    assert result.good, result


@pytest.mark.slow
def test_a_worker_without_mappings_serves_everybody(tmp_path: Path) -> None:
    result = worker.run_worker_scenario(tmp_path, faults.harness.free_port())
    assert result.good and result.noticed_s is not None, result


@pytest.mark.slow
def test_the_harness_sees_what_is_not_reported_and_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_NOTICED_S", 1.0)
    monkeypatch.setattr(faults, "_BACK_S", 1.0)
    scenario = BY_NAME["write error"]

    @contextmanager
    def stays(stage: Stage) -> Iterator[None]:
        stage.daemon.break_disk("write error")
        yield

    monkeypatch.setattr(faults, "_AGAIN_S", 2.0)
    result = faults.run_scenario(replace(scenario, fault=stays, trouble="cpu tier"), tmp_path, pace=SHORT)
    assert {"stats", "tier", "health", "metrics", "log (0 lines)"} <= set(result.unreported)
    assert any("trouble after" in line for line in result.not_back)
    assert any("do not succeed again" in line for line in result.not_back)


@pytest.mark.slow
def test_the_harness_sees_a_daemon_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_NOTICED_S", 0.1)
    monkeypatch.setattr(faults, "_BACK_S", 0.1)
    monkeypatch.setattr(faults, "_AGAIN_S", 0.1)

    @contextmanager
    def dies(stage: Stage) -> Iterator[None]:
        os.kill(stage.daemon.pid, signal.SIGKILL)
        yield

    result = faults.run_scenario(replace(BY_NAME["write error"], fault=dies), tmp_path, pace=replace(SHORT, calls=1))
    assert result.crashes == 1 and result.unserved > 0


def test_a_result_says_in_one_line_what_was_wrong() -> None:
    assert str(Result("a fault", seconds=1.5)) == "a fault: survived (1.5 s)"
    result = Result("a fault", wrong_bytes=3, unreported=["log"], seconds=1.5)
    assert str(result) == "a fault: NOT survived: wrong_bytes 3; unreported by log (1.5 s)" and not result.good
