"""The power-cut harness in short, and proof that it sees: stores that leave out one of the rules are found out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.checks import power_loss
from benchmarks.checks.power_cuts.power_cut import PowerCutOps
from benchmarks.checks.power_cuts.power_player import Violation
from prefixd_swap.slab.changes import StoreChanges
from prefixd_swap.slab.files.slab_file import SlabFile
from prefixd_swap.slab.group_commit import Commit
from prefixd_swap.slab.index.block_record import record_slots
from prefixd_swap.slab.index.lmdb_file import Pread, newest_meta
from prefixd_swap.slab.index.packed_rows import RowCollector
from prefixd_swap.slab.index.page_check import check_pages

FLUSH = StoreChanges._flush


def steps(finding: power_loss.Finding) -> int:
    return sum(len(life.steps) for life in finding.lives)


@pytest.mark.slow
def test_no_cut_breaks_a_promise() -> None:
    acknowledged, findings = power_loss.run_cases(range(200))
    assert findings == []
    assert acknowledged > 200


def sync_no_data(self: StoreChanges, batch: Sequence[Commit]) -> None:
    """Names blocks in the index before their bytes are on the disk."""
    for commit in batch:
        commit.slabs.clear()
    FLUSH(self, batch)


def reuse_early(self: StoreChanges, batch: Sequence[Commit]) -> None:
    """Gives slots of removed blocks to others before the removal is on the disk."""
    for commit in batch:
        for key, value in commit.changes:
            old = self._index.get(key)
            if value is None and old is not None:
                free(self, old)
    self._sync(set[SlabFile]().union(*(commit.slabs for commit in batch)))
    replaced = {key for commit in batch for key, value in commit.changes if value is not None}
    changes = [change for commit in batch for change in commit.changes]
    for (key, _), value in zip(changes, self._index.apply(changes), strict=True):
        if value is not None and key in replaced:
            free(self, value)


def free(changes: StoreChanges, record: bytes) -> None:
    with changes.lock:
        changes._slabs.free(np.array([slot for slot, _ in record_slots(record)], np.int64))


def forget_pins(self: StoreChanges, batch: Sequence[Commit]) -> None:
    """Takes a block's pin away when the block is written again."""
    FLUSH(self, batch)
    self._index.pin([key for commit in batch for key, value in commit.changes if value is not None], False)


@pytest.mark.slow
def test_a_store_without_a_rule_is_found_out_by_a_small_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreChanges, "_flush", sync_no_data)
    _, findings = power_loss.run_cases(range(20))
    assert findings
    smallest = findings[0]
    assert steps(smallest) <= 2, smallest
    assert "other bytes" in smallest.problem or "have checksum" in smallest.problem
    with pytest.raises(Violation):
        power_loss.run_case(smallest.lives, tmp_path)


@pytest.mark.slow
def test_slots_that_are_reused_early_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreChanges, "_flush", reuse_early)
    # Not made smaller: one case in a hundred finds it, a long one, and each step less costs seconds.
    _, findings = power_loss.run_cases(range(100), shrink_first=0)
    assert findings and "have checksum" in findings[0].problem
    with pytest.raises(Violation):
        power_loss.run_case(findings[0].lives, tmp_path)


def test_an_index_that_is_thrown_away_though_it_is_whole_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB's file may end before its last page: to take that for damage loses everything."""

    def every_page_counts(fd: int, pread: Pread, nbytes: int, rows: RowCollector | None = None) -> str:
        meta = newest_meta(fd, pread)
        if meta is not None and nbytes < (expected := (meta.last_page + 1) * meta.page_bytes):
            return f"data.mdb has {nbytes} bytes of {expected}"
        return check_pages(fd, pread, nbytes, rows)

    monkeypatch.setattr("prefixd_swap.slab.index.index.check_pages", every_page_counts)
    _, findings = power_loss.run_cases(range(540, 560), shrink_first=0)
    assert findings and "missing" in findings[0].problem


@pytest.mark.slow
def test_pins_that_are_lost_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreChanges, "_flush", forget_pins)
    _, findings = power_loss.run_cases(range(150), shrink_first=0)
    assert findings and "pins" in findings[0].problem


@pytest.mark.slow
def test_names_that_are_not_synced_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = PowerCutOps.sync_directory

    def forget_slabs(self: PowerCutOps, path: Path) -> None:
        if path.name != "slabs":
            sync(self, path)

    monkeypatch.setattr(PowerCutOps, "sync_directory", forget_slabs)
    _, findings = power_loss.run_cases(range(60), shrink_first=0)
    assert findings and "is missing" in findings[0].problem


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    power_loss.main(["--cases", "3", "--processes", "1", "--json", str(file)])
    result = json.loads(file.read_text())
    assert (result["cases"], result["violations"]) == (3, 0) and result["seconds"] > 0
