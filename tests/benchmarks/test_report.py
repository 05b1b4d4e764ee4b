"""The page of all results: of the committed ones, in a browser, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.harness import BenchmarkError
from benchmarks.report import SECTIONS, main
from benchmarks.report_parts.results import read_results

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def test_the_committed_results_are_a_page_that_a_browser_shows_without_a_network(tmp_path: Path) -> None:
    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    main([str(RESULTS), "--output", str(page)])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.report_parts.browser", str(page), "--screenshot", str(picture)],
        cwd=RESULTS.parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "there is no browser" in done.stderr:  # asked in a process of its own: Qt changes how the importing one imports
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen["title"] == "prefixd: results"
    assert seen["drawn"] == seen["images"] >= len(SECTIONS)
    assert seen["fetched"] == [] and seen["messages"] == []
    # The answers come first, and every kind of result has its section.
    results = {result.benchmark: result for result in read_results(RESULTS)}
    assert results.keys() >= SECTIONS.keys()
    text = seen["text"]
    assert "Which policy" in text[:300] and "How much memory" in text[:600]
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000


def test_what_is_no_result_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="no folder; name one"):
        main([str(tmp_path / "none")])
    with pytest.raises(BenchmarkError, match=r"has no \*.json"):
        main([str(tmp_path)])
    file = tmp_path / "a.json"
    for content, why in [("{", "not JSON"), ("[1]", "no result"), ('{"benchmark": "chat"}', "run it again")]:
        file.write_text(content)
        with pytest.raises(BenchmarkError, match=rf"a\.json.*{why}"):
            main([str(tmp_path)])
    assert not (tmp_path / "report.html").exists()
    with pytest.raises(BenchmarkError):
        main([str(tmp_path), "--output", str(tmp_path / "new" / "report.html")])
    assert not (tmp_path / "new").exists()


def test_a_result_without_a_section_is_a_table_and_nothing_in_it_is_markup(tmp_path: Path) -> None:
    content = {
        "benchmark": "new",
        "name": "<b>&",
        "parts": {"ratio": 0.12345678, "on": True, "none": None},
        "list": [1],
    }
    (tmp_path / "new.json").write_text(json.dumps(content))
    main([str(tmp_path)])
    text = (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;&amp;" in text and "<b>&" not in text
    assert "parts.ratio" in text and "0.1235" in text
