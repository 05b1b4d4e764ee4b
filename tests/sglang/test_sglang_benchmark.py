"""benchmarks.sglang, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import sglang as benchmark
from benchmarks.common import harness


def test_the_benchmark_runs(tmp_path: Path) -> None:
    file = tmp_path / "sglang.json"
    try:
        benchmark.main(["--pages", "4", "--layers", "1", "--rounds", "1", "--flips", "6", "--json", str(file)])
    except harness.BenchmarkError as error:
        assert "times the file backend's speed" in str(error)  # which so few bytes do not tell
    result = json.loads(file.read_text())
    assert result["prefixd_served_wrong"] == 0
    assert 6 <= result["prefixd_served_pages"] + 6 <= 24
    assert (result["file_served_pages"], result["file_served_wrong"]) == (24, 6)
    assert result["integrity_violations"] == []
    assert set(result["layouts"]) == {"page_first", "layer_first"}
    assert result["layouts"]["page_first"]["page_bytes"] == 128 << 10


def test_wrong_bytes_end_it_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = {"save_times_file": 3.0, "load_times_file": 1.9}
    monkeypatch.setattr(benchmark, "measure_speed", lambda *arguments: dict(layout))
    flips = {"prefixd_served_wrong": 1, "integrity_violations": []}
    monkeypatch.setattr(benchmark, "measure_flips", lambda *arguments: dict(flips))
    broken = benchmark.measure(1, 1, 1, 1, 0)["broken"]
    assert broken == [
        "page_first: load at 1.9 times the file backend's speed, less than 2",
        "layer_first: load at 1.9 times the file backend's speed, less than 2",
        "1 wrong pages, []",
    ]
