"""What every benchmark shares: its result, its exit, and where a result may be written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common import harness, options
from benchmarks.common.harness import BenchmarkError, Outcome
from benchmarks.common.options import option, seed, size


@harness.benchmark(
    "checks.counted",
    "Counts.",
    option("--blocks", 4, "blocks"),
    option("--lost", 0, "of them", int),
    option("--bytes", 32 << 20, "the tier", size),
    option("--folder", None, "where to work", Path),
    option("--hidden", 1, "not recorded"),
    seed("of the blocks"),
    unrecorded=("hidden",),
)
def main(given: harness.Options) -> Outcome:
    """A run that finds so many lost blocks."""
    result = {"lost_blocks": given.lost, "wrong_bytes": 0, "found": ["lost: 17"], "blocks": 2 * given.blocks}
    return Outcome(result, harness.missed(result, zero=["wrong_bytes", "lost_blocks"]))


def test_a_result_has_the_options_the_time_and_the_circumstances(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    main(["--bytes", "1MiB", "--folder", str(tmp_path), "--json", str(file)])
    result = json.loads(file.read_text())
    assert result["benchmark"] == "counted" and result["circumstances"]["machine"] and result["seconds"] >= 0
    assert (result["seed"], result["bytes"], result["lost_blocks"]) == (0, 1 << 20, 0)
    assert result["blocks"] == 8, "the result's figure, not the option of the same name"
    assert not {"folder", "hidden", "json", "plot"} & set(result)


def test_a_broken_promise_fails_once_the_result_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    with pytest.raises(BenchmarkError, match=r"^lost_blocks is 3$"):
        main(["--lost", "3", "--json", str(file)])
    assert json.loads(file.read_text())["lost_blocks"] == 3 and "\nlost: 17\n" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        harness.run(lambda: main(["--lost", "3"]))
    assert ended.value.code == 2


def test_the_help_has_each_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert "python -m benchmarks.checks.counted" in said
    assert "blocks (4)" in said and "the tier (32MiB)" in said and "of the blocks (0)" in said


@pytest.mark.parametrize("commit", ["abc+changes", "abc", None])
def test_the_repository_takes_only_results_of_a_commit(
    commit: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "ROOT", tmp_path / "repository")
    monkeypatch.setattr(options, "circumstances", lambda: {"commit": commit})
    inside, elsewhere = tmp_path / "repository" / "results" / "counted.json", tmp_path / "counted.json"
    main(["--json", str(elsewhere)])
    assert elsewhere.exists()
    if commit == "abc+changes":
        with pytest.raises(SystemExit):
            main(["--json", str(inside)])
        assert "has uncommitted changes" in capsys.readouterr().err and not inside.exists()
        with pytest.raises(BenchmarkError, match="has uncommitted changes"):
            harness.committed(inside)
    else:
        main(["--json", str(inside)])
        assert inside.exists() and harness.committed(inside) == inside
