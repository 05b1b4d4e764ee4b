"""docs/results.md and the README's figures: that they are of the files, and which files are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results_page
from benchmarks.common.harness import BenchmarkError
from benchmarks.results_page import PAGE, PAPERS, README, RESULTS, SECTIONS, check, main, page, papers, readme
from benchmarks.results_parts import provenance
from benchmarks.results_parts.results import Result, read_results

ALL = read_results(RESULTS)


def result(file: str, **changes: Any) -> Result:
    """A committed result with other values."""
    (found,) = (each for each in ALL if each.file == file)
    return Result(found.benchmark, copy.deepcopy(dict(found.content)) | changes, file)


def test_the_pages_and_the_readme_are_what_the_results_say() -> None:
    check(ALL)
    assert PAGE.read_text() == page(ALL)
    assert PAPERS.read_text() == papers(ALL)
    assert README.read_text() == readme(README.read_text(), ALL)
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and ".json)" in line]
    assert len(rows) == len(ALL)


def test_a_figure_that_changes_makes_the_page_and_the_readme_stale(tmp_path: Path, monkeypatch: Any) -> None:
    for name, committed in (("PAGE", PAGE), ("README", README)):
        copied = tmp_path / committed.name
        copied.write_text(committed.read_text())
        monkeypatch.setattr(results_page, name, copied)
    monkeypatch.setattr(results_page, "ROOT", tmp_path)
    main(["--check"])
    peers = result("peers.json")
    peers.content["caches"]["prefixd"]["cold"]["requests_per_s"] = 9.99
    others = [each for each in ALL if each.file != "peers.json"]
    monkeypatch.setattr(results_page, "read_results", lambda folder: [*others, peers])
    for stale in ("results.md", "README.md"):
        with pytest.raises(BenchmarkError, match=f"{stale} is stale; run"):
            main(["--check"])
        main([])
        assert "9.99" in (tmp_path / stale).read_text()
        main(["--check"])
        if stale == "results.md":
            (tmp_path / "README.md").write_text(README.read_text())


def test_uncommitted_changes_are_refused_wherever_a_result_names_its_commit() -> None:
    clean = result("match.json")
    assert not list(provenance.refusals(clean))
    clean.content["circumstances"]["commit"] += "+changes"
    with pytest.raises(BenchmarkError, match=r"match\.json was measured on .* changes.*python -m benchmarks\.match"):
        check([clean])
    remote = result("remote.json")
    remote.content["store_down"]["commit"] += "+changes"  # one suite of it
    with pytest.raises(BenchmarkError, match=r"remote\.json"):
        check([remote])


def test_a_result_from_before_the_rule_is_known_by_its_day_and_leaves_the_list_once_it_is_clean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dirty, clean = result("match.json"), result("match.json")
    dirty.content["circumstances"]["commit"] += "+changes"
    day = clean.content["circumstances"]["date"][:10]
    monkeypatch.setattr(provenance, "BEFORE_THE_RULE", {"match.json": (day, "a reason")})
    check([dirty])
    with pytest.raises(BenchmarkError, match="take it off"):
        check([clean])
    dirty.content["circumstances"]["date"] = "2027-01-01T00:00:00Z"  # measured again, with changes again
    with pytest.raises(BenchmarkError, match=r"match\.json was measured on 2027-01-01"):
        check([dirty])


def test_a_result_without_circumstances_is_refused() -> None:
    with pytest.raises(BenchmarkError, match=r"match\.json does not say its date, commit and machine"):
        check([result("match.json", circumstances={})])


def test_a_file_that_is_no_result_is_refused_by_name(tmp_path: Path) -> None:
    for content in ("{", "[1]", "{}"):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(BenchmarkError, match=r"a\.json is no result"):
            read_results(tmp_path)


def test_a_file_without_a_sentence_and_a_sentence_without_its_figure_are_named() -> None:
    unknown = Result("match", result("match.json").content, "new.json")
    with pytest.raises(BenchmarkError, match=r"new\.json has no sentence"):
        check([unknown])
    broken = result("match.json")
    del broken.content["p99_us"]
    with pytest.raises(BenchmarkError, match=r"match\.json lacks a figure.*'p99_us'.*python -m benchmarks\.match"):
        page([broken])
    with pytest.raises(BenchmarkError, match=r"README\.md: 'peers\.json' is missing"):
        readme(README.read_text(), [each for each in ALL if each.file != "peers.json"])
    with pytest.raises(BenchmarkError, match="no lines"):
        readme("# prefixd", ALL)


def test_every_sentence_fits_one_file_alone() -> None:
    patterns = [pattern for sentences in SECTIONS.values() for pattern in sentences]
    assert len(patterns) == len(set(patterns))
    for each in ALL:
        assert page([each]).count(f"`{each.file}`") == 1


def test_sizes_of_wheels_and_environments() -> None:
    header = result("match.json").content["circumstances"]
    sizes = {"client": 110 << 20, "daemon": 210 << 20, "worker": 1500 << 20}
    wheels = {"benchmark": "wheels", "wheel_bytes": 3 << 19, "environments": sizes, "circumstances": header}
    said = page([Result("wheels", json.loads(json.dumps(wheels)), "wheels.json")])
    assert "The wheel has 1.5 MiB; a fresh environment takes 110.0 MiB for client, 210.0 MiB for daemon" in said
