"""The benchmark of mixed sizes in short, and proof that it sees."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import mixed_sizes
from benchmarks.common.harness import BenchmarkError
from benchmarks.storage import mixed_tier
from benchmarks.storage.sparse_files import SparseFiles

SHORT = ("--operations", "1200", "--mixtures", "small", "--capacity", "8MiB")


def result_of(folder: Path, *arguments: str) -> dict[str, Any]:
    file = folder / "result.json"
    try:
        mixed_sizes.main([*arguments, "--json", str(file)])
    except BenchmarkError as error:
        pytest.fail(str(error))
    result: dict[str, Any] = json.loads(file.read_text())
    return result


@pytest.mark.slow
def test_no_more_is_evicted_than_asked_for_and_a_page(tmp_path: Path) -> None:
    result = result_of(tmp_path, *SHORT)
    assert result["worst_excess_pages"] <= 1 and result["utilisation"] >= 0.95 and result["wrong_bytes"] == 0
    assert result["coded_utilisation"] >= 0.85
    assert [run["tier"] for run in result["runs"]] == ["cpu", "disk", "coded"]
    assert all(run["hit_blocks"] and run["stored_blocks"] and not run["refused"] for run in result["runs"])


@pytest.mark.slow
def test_a_wrong_byte_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really, calls = mixed_tier._content, 0

    def content(number: int, size: int) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        nonlocal calls
        calls += 1
        for start, piece in really(number, size):
            found = piece.copy()
            if not start:
                found[7] ^= calls == 3
            yield start, found

    monkeypatch.setattr(mixed_tier, "_content", content)
    file = tmp_path / "result.json"
    with pytest.raises(BenchmarkError, match="wrong_bytes is"):
        mixed_sizes.main([*SHORT, "--tiers", "cpu", "--json", str(file)])
    assert json.loads(file.read_text())["wrong_bytes"] >= 1


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"wrong_bytes": 3}, "wrong_bytes is 3"),
        ({"worst_excess_pages": 1.01}, "worst_excess_pages is 1.01, more than 1"),
        ({"utilisation": 0.9499}, "utilisation is 0.9499, less than 0.95"),
        ({"coded_utilisation": 0.8999}, "coded_utilisation is 0.8999, less than 0.9"),
        ({}, ""),
    ],
)
def test_each_figure_has_a_limit(broken: dict[str, float], words: str) -> None:
    result = {"wrong_bytes": 0, "worst_excess_pages": 1.0, "utilisation": 0.95, "coded_utilisation": 0.9, **broken}
    found = mixed_sizes.violations(result)
    assert len(found) == len(broken) and all(words in each for each in found)


def test_sparse_files_give_back_what_was_written(tmp_path: Path) -> None:
    ops = SparseFiles()
    fd = ops.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    ops.fallocate(fd, 1 << 20)
    rng = np.random.default_rng(0)
    expected = np.zeros(1 << 20, np.uint8)
    for _ in range(60):
        start = int(rng.integers(0, 200)) * 4096
        data = np.zeros(int(rng.integers(1, 12)) * 4096, np.uint8)
        filled = int(rng.integers(0, len(data) + 1))
        data[:filled] = rng.integers(0, 256, filled)
        buffer = memoryview(mmap.mmap(-1, len(data)))
        buffer[:] = data.tobytes()
        assert ops.pwrite(fd, buffer, start) == len(data)
        expected[start : start + len(data)] = data
        found = os.pread(fd, 1 << 20, 0)
        assert found == expected.tobytes()
    os.close(fd)
