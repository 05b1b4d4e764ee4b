"""The check in short, and proof that it would see blocks that are computed twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.checks import compute_once
from benchmarks.load.claiming_engine import BLOCKS


@pytest.mark.slow
def test_eight_engines_compute_each_prompt_once(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    compute_once.main(["--engines", "4", "--prompts", "4", "--kill-every", "2", "--json", str(file)])
    result = json.loads(file.read_text())
    assert (result["kills"], result["computed_blocks"], result["blocks"]) == (2, 4 * BLOCKS, 4 * BLOCKS)
    assert result["computed_blocks_without_claims"] >= 4 * BLOCKS


def test_a_block_that_is_computed_twice_is_seen() -> None:
    right = {"blocks": 64, "computed_blocks": 64, "wrong_loads": 0, "claims_left": 0, "integrity_violations": 0}
    assert compute_once.failures(right) == []
    assert compute_once.failures({**right, "computed_blocks": 65}) == ["computed_blocks is 65, more than 64"]
    assert compute_once.failures({**right, "claims_left": 1}) == ["claims_left is 1"]
