"""The soak harness in short, and proof that its bounds see growth."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from benchmarks import soak
from benchmarks.common.footprint import Footprint, footprint, slope_per_minute


def test_the_slope_is_that_of_most_pairs() -> None:
    at_s = [2.0 * number for number in range(300)]
    rng = random.Random(1)
    steady = [400 + rng.uniform(-20, 20) for _ in at_s]
    assert abs(slope_per_minute(at_s, steady)) < 1
    growing = [level + 3 * at / 60 for level, at in zip(steady, at_s, strict=True)]
    growing[100:120] = [5000.0] * 20
    assert slope_per_minute(at_s, growing) == pytest.approx(3, abs=1)
    assert slope_per_minute([1.0], [1.0]) == slope_per_minute([], []) == 0


def test_a_footprint_is_that_of_the_process() -> None:
    before = footprint(os.getpid(), 0.0)
    kept = bytearray(os.urandom(16 << 20))
    with open(os.devnull) as file:
        after = footprint(os.getpid(), 1.0)
        assert after.descriptors == before.descriptors + 1, file
    assert after.anon - before.anon > 12 and len(kept)
    assert after.rss == pytest.approx(after.anon + after.shmem + after.file, abs=0.1)
    assert after.mappings > 10


def findings(growth: float, descriptors: float = 0.0) -> soak.Findings:
    def series(growth: float) -> list[Footprint]:
        minutes = [number / 30 for number in range(600)]
        levels = [(each, 100 + growth * each) for each in minutes]
        return [Footprint(at * 60, mib, mib, 0, 0, int(40 + descriptors * at), 9) for at, mib in levels]

    return soak.Findings(daemon=series(growth), worker=series(0.0), full_after_s=60.0)


def test_bounds_see_growth_after_the_warm_up() -> None:
    assert findings(0.9).result(1200, 1.0)["broken"] == []
    assert findings(1.1).result(1200, 1.0)["broken"][0] == "rss_slope_mib_per_min is 1.1"
    assert findings(0.0, 2.0).result(1200, 1.0)["broken"] == ["descriptors_slope is 4"]  # of both processes
    short = findings(5.0).result(390, 1.0)
    assert (short["judged"], short["broken"]) == (False, [])
    late = findings(0.0)
    late.full_after_s = 800.0
    assert late.result(1200, 1.0)["warm_up_s"] == 800.0
    late.tally.wrong_bytes = 3
    late.left_of_tenants = ["tenant other: 1 sessions are left over"]
    assert late.result(1200, 1.0)["broken"] == ["wrong_bytes is 3", "left_of_tenants is 1"]


def test_a_short_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, picture = tmp_path / "result.json", tmp_path / "soak.svg"
    arguments = ["--minutes", "0.2", "--sample", "1", "--json", str(file), "--plot", str(picture)]
    monkeypatch.setattr("sys.argv", ["soak", *arguments])
    monkeypatch.setattr(soak, "_CLIENT_LIFE_S", 9.0)
    soak.main()
    result = json.loads(file.read_text())
    assert (result["wrong_bytes"], result["failed_calls"], result["integrity_violations"]) == (0, 0, 0)
    assert result["samples"] >= 2 and not result["judged"]
    assert len(result["series"][0]["worker"]) == result["samples"]
    assert result["calls_by_kind"]["generate"] > 0 and result["clients"] >= 3
    assert result["daemon_rss_mib"] > 48 and result["worker_mappings"] > 0
    assert picture.stat().st_size > 1000
