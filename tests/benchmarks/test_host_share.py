"""The benchmark of the host's share as a user runs it, in short; its figures mean nothing here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import host_share
from benchmarks.common.harness import BenchmarkError
from benchmarks.host_parts import free_driver


@pytest.mark.slow
def test_each_part_has_the_figures_that_it_has_bounds_for(tmp_path: Path) -> None:
    figures = free_driver.measure(host_share.PARTS, short=True)
    for part in host_share.PARTS:
        assert set(part.least) | set(part.most) <= set(figures[part.name])
        assert all(value > 0 for value in figures[part.name].values())


def test_a_figure_that_misses_its_bound_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = free_driver.HostPart("one", "none", least={"fast": 2.0}, most={"slow": 1.0})
    monkeypatch.setattr(host_share, "PARTS", (part,))
    monkeypatch.setattr(host_share, "measure", lambda parts, short: {"one": {"fast": 1.5, "slow": 1.5, "other": 7.0}})
    file = tmp_path / "figures.json"
    with pytest.raises(BenchmarkError, match=r"one: slow is 1.5, more than 1; one: fast is 1.5, less than 2"):
        host_share.main(["--json", str(file)])
    assert json.loads(file.read_text())["one"]["other"] == 7.0


def test_a_part_that_fails_is_named_with_its_last_line() -> None:
    part = free_driver.HostPart("broken", "no_such_module", {}, {})
    with pytest.raises(BenchmarkError, match=rf"the part broken failed: .*{sys.executable}.*no_such_module"):
        free_driver.measure((part,), short=True)


def test_the_best_of_rounds_is_the_fastest_rate_and_the_shortest_time() -> None:
    rounds = [{"gbps_4": 2.0, "step_ms_8": 3.0}, {"gbps_4": 1.0, "step_ms_8": 2.0}]
    assert free_driver.best(rounds) == {"gbps_4": 2.0, "step_ms_8": 2.0}
