"""The benchmark of loads layer by layer in short; how long anything takes is not for a test to judge."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import layerwise


@pytest.mark.slow
def test_both_ways_are_measured_on_one_prefix(tmp_path: Path) -> None:
    result = layerwise.measure(prefix_tokens=128, new_tokens=32, bytes_per_s=50e6, repeats=1, folder=tmp_path)
    load_ms = 128 * (16 << 10) / 50e6 * 1e3
    assert min(result["layers_ms"], result["whole_ms"]) >= load_ms, "so long does the link take"
    assert result["ratio"] == pytest.approx(result["layers_ms"] / result["whole_ms"], rel=0.02)
    assert result["gpu_ms"] > 0 and result["expected_ratio"] > 0


@pytest.mark.parametrize(
    ("whole_s", "computed_s", "ratio"), [(2.0, 1.0, 0.625), (2.0, 0.0, 1.0), (4.0, 3.0, 0.8125), (1.0, 2.0, 2.0)]
)
def test_the_expected_ratio(whole_s: float, computed_s: float, ratio: float) -> None:
    """Loading 1 s and computing 1 s in 4 slabs: 1 s and a quarter, of 2. The last is noise: computing took longer."""
    assert layerwise.expected(whole_s, computed_s) == pytest.approx(ratio)
