"""The papers' figures: how rows are measured, kept and shown; and quick figures in their short form."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import papers
from benchmarks.common.harness import BenchmarkError
from benchmarks.jenga_parts.chats import Plan
from benchmarks.jenga_parts.subject_runs import Run
from benchmarks.jenga_parts.subjects import Subject
from benchmarks.papers_parts import jenga_figures, prefix_cache_figures
from benchmarks.papers_parts.catalogue import FIGURES
from benchmarks.papers_parts.comparison_page import lines_of, page
from benchmarks.papers_parts.figure import Claim, Curve, Figure, Measured, Paper
from benchmarks.papers_parts.gpu_files import on_gpu
from benchmarks.papers_parts.measured_rows import read_rows, row_of
from benchmarks.papers_parts.measures.cpu_kernels import Shape, kernel_times
from benchmarks.papers_parts.measures.shared_blocks import SCALE, Lengths, of_beams, of_samples, share_gpt_lengths
from benchmarks.results_parts.results import read_results
from benchmarks.text_analysis_parts.measuring import Measured as OfCell
from benchmarks.text_analysis_parts.suites import Cell
from prefixd.workloads.latency_figures import Figures, HitTokens, Quantiles

QUICK = ("vtensor-7", "vtensor-8", "vattention-table-3", "vattention-table-7", "vattention-table-8")
"""Those whose short form takes less than a second."""
FIGURE = Figure(
    name="paper-1",
    paper=Paper("Paper", "A Paper", "section 1", "a GPU"),
    place="figure 1",
    shows="what is compared",
    claims=(Claim("speed", "times as fast", "x", 2.0), Claim("waste", "bytes", "%", words="little")),
    conditions="one model",
    ours="another one",
    why="They differ.",
    seconds=1,
    cpu=lambda short: Measured({"speed": 1.23456, "waste": 0.5}, Curve("x", "y", {"a line": ([1, 2], [3, 4])})),
    gpu=lambda parts: {"speed": parts["attention"]["speed"]},
)


def gpu_file(date: str, parts: Mapping[str, Any], figures: str = "measured") -> dict[str, Any]:
    circumstances = {"date": date, "commit": "c" * 40}
    return {"figures": figures, "device": f"of {date}", "parts": parts, "circumstances": circumstances}


def test_every_figure_can_be_named_measured_and_compared_within_the_time() -> None:
    names = [figure.name for figure in FIGURES]
    assert len(names) == len(set(names))
    for figure in FIGURES:
        keys = [claim.key for claim in figure.claims]
        assert keys and len(keys) == len(set(keys)), figure.name
        assert all((claim.paper is None) == bool(claim.words) for claim in figure.claims), figure.name
        assert figure.cpu is not None or figure.gpu is not None, figure.name
        assert (figure.seconds > 0) == (figure.cpu is not None), figure.name
        assert not figure.ours.endswith(".") and figure.why.endswith("."), figure.name
    assert sum(figure.seconds for figure in FIGURES) < 40 * 60


def test_what_gpus_measured_is_found_by_the_keys_of_the_claims() -> None:
    files = {result.file: result.content for result in read_results(papers.RESULTS) if result.benchmark == "gpu"}
    shown = 0
    for figure in FIGURES:
        if (found := on_gpu(figure, files)) is not None:
            shown += 1
            assert set(found.values) <= {claim.key for claim in figure.claims}, figure.name
            assert all(math.isfinite(value) for value in found.values.values()), figure.name
    assert shown > 0


def test_parts_that_measured_nothing_are_no_values() -> None:
    names = ("virtual_memory", "attach", "memory_held", "attention", "first_token", "decode")
    for parts in ({}, {name: {"status": "failed"} for name in names}, {name: {"points": []} for name in names}):
        files = {"empty.json": gpu_file("2026-01-01", parts)}
        assert [figure.name for figure in FIGURES if on_gpu(figure, files) is not None] == []


def test_the_newest_gpu_that_measured_a_part_is_shown() -> None:
    files = {
        "old.json": gpu_file("2026-01-01", {"attention": {"speed": 1.0}}),
        "new.json": gpu_file("2026-02-01", {"attention": {"speed": 3.0}}),
        "newest.json": gpu_file("2026-03-01", {}),
        "stand_in.json": gpu_file("2026-04-01", {"attention": {"speed": 9.0}}, "stand-in, no figures"),
    }
    found = on_gpu(FIGURE, files)
    assert found is not None and (found.file, found.values) == ("new.json", {"speed": 3.0})
    assert on_gpu(replace(FIGURE, gpu=None), files) is None
    assert on_gpu(FIGURE, {}) is None
    lines = lines_of(FIGURE, None, found)
    assert "| times as fast | 2 x |  |  | 3 x | 1.50 |" in lines
    assert lines[-2:] == [
        "CPU: not yet measured; `python -m benchmarks.papers paper-1`.",
        "GPU: of 2026-02-01, 2026-02-01, commit ccccccccc, [`new.json`](../benchmarks/results/new.json).",
    ]


def test_a_row_is_compared_with_the_paper_and_says_where_it_is_from() -> None:
    assert FIGURE.cpu is not None
    row = row_of(FIGURE.cpu(False), 1.26, short=False)
    said = page([FIGURE], {"paper-1": row}, {})
    assert "| times as fast | 2 x | 1.24 x | 0.62 |  |  |" in said
    assert "| bytes | little | 0.5% |  |  |  |" in said
    assert f"CPU: {row['circumstances']['date'][:10]}, commit {row['circumstances']['commit'][:9]}" in said
    assert "GPU: not yet measured; `make gpu-check`." in said
    with pytest.raises(BenchmarkError, match="'paper-1' is of the short form"):
        page([FIGURE], {"paper-1": row_of(FIGURE.cpu(True), 1.0, short=True)}, {})
    with pytest.raises(BenchmarkError, match="'paper-2' is no figure"):
        page([FIGURE], {"paper-2": row}, {})


def test_a_row_is_measured_anew_beside_the_others_and_a_failure_leaves_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(short: bool) -> Measured:
        raise BenchmarkError("no such model")

    file = tmp_path / "papers.json"
    second = replace(FIGURE, name="paper-2", cpu=lambda short: Measured({"speed": 4.0}))
    drawn: list[Path] = []
    monkeypatch.setattr(papers.harness, "plot", lambda file, draw: drawn.append(file))
    assert papers.run([FIGURE, second], False, file, tmp_path / "plots") == []
    assert drawn == [tmp_path / "plots/paper-1.png"]
    before = read_rows(file)
    assert before["paper-1"]["values"] == {"speed": 1.235, "waste": 0.5}
    third = replace(FIGURE, name="paper-3", cpu=fail)
    again = replace(second, cpu=lambda short: Measured({"speed": 5.0}))
    assert papers.run([third, again], False, file, None) == ["paper-3: BenchmarkError: no such model"]
    rows = read_rows(file)
    assert rows["paper-1"] == before["paper-1"] and rows["paper-2"]["values"] == {"speed": 5.0}
    assert list(rows) == ["paper-1", "paper-2"]
    assert "paper-3: BenchmarkError: no such model" in capsys.readouterr().err
    file.write_text(json.dumps({"benchmark": "chat", "rows": {}}))
    with pytest.raises(BenchmarkError, match=r"papers\.json is no result of benchmarks\.papers .*chat"):
        read_rows(file)


def test_figures_are_chosen_by_pattern_and_a_short_run_is_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert [figure.name for figure in papers.chosen_figures(["vtensor-[78]"])] == ["vtensor-7", "vtensor-8"]
    assert papers.chosen_figures([]) == list(FIGURES)
    with pytest.raises(BenchmarkError, match="'vtensor-99' is no figure; --list"):
        papers.chosen_figures(["vtensor-8", "vtensor-99"])
    papers.main(["--list"])
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(FIGURES) + 1 and listed[0].startswith(FIGURES[0].name)


def test_attention_over_each_memory_is_the_same_and_takes_time() -> None:
    for shape in (Shape(2, 48, 1), Shape(1, 64, 40, kv_heads=1)):
        times = kernel_times(shape, 2)  # raises where the three differ
        assert set(times) == {"virtual", "paged", "native"}
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.values())


def measured(name: str) -> Measured:
    """A figure in its short form: every claim has a number."""
    (figure,) = papers.chosen_figures([name])
    assert figure.cpu is not None
    found = figure.cpu(True)
    assert set(found.values) <= {claim.key for claim in figure.claims}
    assert all(math.isfinite(value) for value in found.values.values())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vattention-table-6", "vattention-11"])
def test_figures_of_the_worker(name: str) -> None:
    assert measured(name).values


@pytest.mark.slow
def test_memory_held_follows_the_load() -> None:
    """The short form has a wave of one request and one of two equal ones: half of the memory."""
    assert measured("vtensor-11").values["quiet"] == 50


def test_jenga_is_compared_with_the_first_way_and_other_tokens_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = iter(["same"] * 4 + ["same", "other"])

    def runs(name: str, subject: Subject, plan: Plan) -> list[Run]:
        numbers = {"requests_per_s": (2.0, 3.0), "hit_tokens": (40, 60)}
        return [
            Run(
                model=name,
                way=way,
                round=0,
                gpu_bytes=0,
                requests_per_s=numbers["requests_per_s"][place],
                prompt_tokens=100,
                hit_tokens=int(numbers["hit_tokens"][place]),
                computed_tokens=0,
                waste=0.0,
                spare=0.0,
                samples=1,
                preempted=0,
                output_digest=next(digests),
            )
            for place, way in enumerate(subject.ways)
        ]

    monkeypatch.setattr(jenga_figures, "measure_subject", runs)
    assert measured("jenga-17").values == pytest.approx({"hits": 1.5, "rate": 1.5, "few": 1.5})
    assert measured("jenga-18").values == pytest.approx({"rate": 1.5, "latency": 1.5})
    with pytest.raises(BenchmarkError, match="the ways of draft give different tokens"):
        measured("jenga-19")


def test_tier_sets_are_compared_with_no_cache_in_the_same_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {
        "no-cache": (2.0, 4.0, 3.0),
        "gpu": (2.0, 5.0, 3.0),
        "gpu+cpu": (4.0, 8.0, 6.0),
        "gpu+cpu+disk": (9.0,) * 3,
    }

    def measure_group(suite: str, cells: Sequence[Cell], *rest: object) -> list[OfCell]:
        return [OfCell(suite, cell, tuple(map(of_cell, rates[cell.name]))) for cell in cells]

    def of_cell(rate: float) -> Figures:
        return Figures("", 1, 1 / rate, rate, rate, Quantiles(1 / rate, 1.0), HitTokens(0, 0, 0), 0.25, digests[0])

    digests = ["the same"]
    monkeypatch.setattr(prefix_cache_figures, "measure_group", measure_group)
    misses = {f"miss_{tier}": 25.0 for tier in ("gpu", "cpu", "disk")}
    assert measured("prefix-cache-text-analysis").values == {"gpu": 1.0, "cpu": 2.0, "disk": 3.0, **misses}
    assert measured("prefix-cache-latency").values == pytest.approx({"gpu": 1.0, "cpu": 0.5, "disk": 1 / 3})
    monkeypatch.setattr(prefix_cache_figures, "same_answers", lambda measured: False)
    with pytest.raises(BenchmarkError, match="outputs of the configurations differ"):
        measured("prefix-cache-latency")


@pytest.mark.slow
def test_blocks_saved_by_samples_and_by_beams() -> None:
    requests = [Lengths(prompt=13, output=8)]
    samples = of_samples(3, requests)
    assert samples.saved % 6 == 0 and samples.saved // 6 >= 7, "two of three share three full blocks in each pass"
    assert 0 < samples.share < 2 / 3
    assert of_samples(1, requests).saved == 0
    beams = of_beams(3, requests)
    assert 0 < samples.share < beams.share < 2 / 3, "beams share what they generate, too"
    lengths = share_gpt_lengths(500, 10_000)
    assert sum(each.prompt for each in lengths) / 500 == pytest.approx(161 / SCALE, rel=0.1)
    assert sum(each.output for each in lengths) / 500 == pytest.approx(338 / SCALE, rel=0.1)


@pytest.mark.parametrize("name", QUICK)
def test_quick_figures(name: str) -> None:
    assert measured(name).values
