"""The benchmark of long prefixes in short, and proof that it sees what was not loaded."""

from __future__ import annotations

import pytest

from benchmarks import long_prefix
from prefixd.client.memory.slices import Slices

pytestmark = pytest.mark.slow


def test_all_that_fits_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_prefix, "FACTORS", (0.5, 2.5))
    monkeypatch.setattr(long_prefix, "HELD", (0.6,))
    result = long_prefix.run(32, 1, vllm=False)
    assert long_prefix.broken(result) == []
    assert result["fitting_blocks"] > 500


def test_what_is_not_loaded_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Slices.load

    async def short(self: Slices, first_block: int, asked: int) -> int:
        return await whole(self, first_block, asked) - (asked > 40)

    monkeypatch.setattr(long_prefix, "FACTORS", (0.5, 2.5))
    monkeypatch.setattr(long_prefix, "HELD", (0.6,))
    monkeypatch.setattr(Slices, "load", short)
    assert any("loaded_of_fitting" in found for found in long_prefix.broken(long_prefix.run(32, 1, vllm=False)))
