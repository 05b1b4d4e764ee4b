"""What was written to the drive is remembered over restarts, until the settings say how much it is."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from prefixd.server.figures.wear_file import WearFile


def live(folder: Path, written_bytes: int, start_bytes: int = 0) -> int:
    """A daemon that writes so much; returns what it found at its start."""
    file = WearFile(folder, start_bytes, lambda: written_bytes)
    file.save()
    return file.before_bytes


def test_it_adds_up_over_restarts(tmp_path: Path) -> None:
    assert [live(tmp_path, written) for written in (5, 7, 0, 1)] == [0, 5, 12, 12]
    assert [each.name for each in tmp_path.iterdir()] == ["wear.json"]


def test_another_start_in_the_settings_begins_anew(tmp_path: Path) -> None:
    live(tmp_path, 5)
    assert live(tmp_path, 3, start_bytes=100) == 0
    assert live(tmp_path, 0, start_bytes=100) == 3


def test_a_daemon_that_writes_nothing_leaves_no_file(tmp_path: Path) -> None:
    live(tmp_path, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "[]", '{"start_bytes": 0}', '{"start_bytes": "x", "written_bytes": 1}', "\xff"])
def test_a_file_that_is_damaged_counts_from_now_on(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "wear.json").write_bytes(text.encode("latin-1"))
    assert live(tmp_path, 4) == 0 and "the wear is counted from now on" in caplog.text
    assert json.loads((tmp_path / "wear.json").read_text()) == {"start_bytes": 0, "written_bytes": 4}


def test_a_disk_that_takes_no_file_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    file = WearFile(tmp_path / "gone", 0, lambda: 4)
    file.save()
    file.save()
    assert len(caplog.records) == 1 and "the wear of this run is forgotten" in caplog.text
