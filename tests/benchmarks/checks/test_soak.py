"""The soak harness in short, and proof that its bounds see growth."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from benchmarks.checks import soak
from benchmarks.common.process_footprint import Footprint, footprint, slope_per_minute
from prefixd_swap.vmem import HostMemory


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


def test_of_the_gpu_tier_the_length_counts_and_not_the_pieces() -> None:
    chunk = 256 << 10
    memory = HostMemory(chunk)
    try:
        memory.create(8)
        before, row = footprint(os.getpid(), 0.0), memory.reserve(4 * chunk)
        reserved = footprint(os.getpid(), 0.0)
        assert reserved.gpu_tier_mapped == before.gpu_tier_mapped
        for chunks in ([0, 1, 2, 3], [7, 5, 3, 1]):  # one mapping of the kernel, and four
            row.map(0, chunks)
            mapped = footprint(os.getpid(), 0.0)
            assert mapped.gpu_tier_mapped - before.gpu_tier_mapped == 1.0
            assert mapped.mappings <= reserved.mappings
            row.clear(0, 4 * chunk)
    finally:
        memory.close()


def findings(growth: float, descriptors: float = 0.0, mappings: float = 0.0, mapped: float = 0.0) -> soak.Findings:
    """What a run would find of which these grow so much a minute: MiB, descriptors, mappings, MiB of the GPU tier."""

    def series(growth: float, mapped: float) -> list[Footprint]:
        minutes = [number / 30 for number in range(600)]
        levels = [(each, 100 + growth * each) for each in minutes]
        counts = [(int(40 + descriptors * at), int(900 + mappings * at), 100 + mapped * at) for at in minutes]
        return [Footprint(at * 60, mib, mib, 0, 0, *each) for (at, mib), each in zip(levels, counts, strict=True)]

    return soak.Findings(daemon=series(growth, 0.0), worker=series(0.0, mapped), full_after_s=60.0)


def test_bounds_see_growth_after_the_warm_up() -> None:
    assert findings(0.9).result(1200, 1.0)["broken"] == []
    assert findings(1.1).result(1200, 1.0)["broken"][0] == "rss_slope_mib_per_min is 1.1"
    assert findings(0.0, 2.0).result(1200, 1.0)["broken"] == ["descriptors_slope is 4"]  # of both processes
    (mappings,) = findings(0.0, mappings=0.6).result(1200, 1.0)["broken"]
    assert mappings.startswith("mappings_slope is 1.")
    assert findings(0.0, mappings=0.4, mapped=0.2).result(1200, 1.0)["broken"] == []
    gpu_tier = findings(0.0, mapped=0.3).result(1200, 1.0)
    assert gpu_tier["broken"] == ["gpu_tier_mapped_slope_mib_per_min is 0.3"]
    short = findings(5.0).result(390, 1.0)
    assert (short["judged"], short["broken"]) == (False, [])
    late = findings(0.0)
    late.full_after_s = 800.0
    assert late.result(1200, 1.0)["warm_up_s"] == 800.0
    late.tally.wrong_bytes = 3
    late.left_of_tenants = ["tenant other: 1 sessions are left over"]
    assert late.result(1200, 1.0)["broken"] == ["wrong_bytes is 3", "left_of_tenants is 1"]


@pytest.mark.slow
def test_a_short_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, picture = tmp_path / "result.json", tmp_path / "soak.svg"
    arguments = ["--minutes", "0.12", "--sample", "1", "--json", str(file), "--plot", str(picture)]
    monkeypatch.setattr(soak, "_CLIENT_LIFE_S", 5.0)
    soak.main(arguments)
    result = json.loads(file.read_text())
    assert (result["wrong_bytes"], result["failed_calls"], result["integrity_violations"]) == (0, 0, 0)
    assert result["samples"] >= 2 and not result["judged"]
    assert len(result["series"][0]["worker"]) == result["samples"]
    assert result["calls_by_kind"]["generate"] > 0 and result["clients"] >= 3
    assert result["daemon_rss_mib"] > 48 and result["worker_mappings"] > 0
    assert result["worker_gpu_tier_mapped_mib"] > 0 and result["daemon_gpu_tier_mapped_mib"] == 16  # in one piece
    assert picture.stat().st_size > 1000
