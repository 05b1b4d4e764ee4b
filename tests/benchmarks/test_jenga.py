"""The benchmark of hybrid models in short, and that it sees what it looks for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import jenga
from benchmarks.common import harness
from benchmarks.engines import hybrid_models
from benchmarks.jenga_parts.chats import Plan
from benchmarks.jenga_parts.comparison import MOST_WASTE, PAPERS_ONE_SIZE_WASTE, summary, violations
from benchmarks.jenga_parts.subject_runs import Run, measure
from benchmarks.jenga_parts.subjects import ALONE, BASELINE, BLOCK_TOKENS, DRAFT, SUBJECTS, TWO_WAYS, WAYS, count_bytes

GOOD: dict[str, Any] = {
    "waste": 0.05,
    "hit_ratio": 1.5,
    "requests_ratio": 1.0,
    "same_tokens": True,
    "integrity_violations": 0,
}
GOOD_TWO = {"gpu_blocks": [[20, 5], [10, 15], [12, 13]], "restarts": 0}


@pytest.mark.slow
def test_what_each_rule_needs_finds_more_in_the_same_memory_wastes_less_and_gives_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = "state"
    monkeypatch.delitem(WAYS, "paged")  # block tables are seen with two models
    steps: list[None] = []
    plan = Plan(chats=4, turns=2, user_tokens=290, output_tokens=2, at_once=1, share=0.5)
    runs = measure(model, plan, lambda: steps.append(None))
    assert [run.way for run in runs] == list(WAYS) and len(steps) == len(runs) * 4 * 2
    baseline, *others = runs
    for run in others:
        assert run.gpu_bytes == baseline.gpu_bytes and run.samples > 0
        assert run.output_digest == baseline.output_digest
        assert run.hit_tokens > baseline.hit_tokens
        assert run.computed_tokens == run.prompt_tokens - run.hit_tokens
        assert run.waste <= MOST_WASTE < baseline.waste
    assert summary(runs)["models"][model]["virtual"]["same_tokens"]


@pytest.mark.slow
def test_a_chat_about_images_embeds_each_once_and_the_baseline_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(WAYS, "paged")
    plan = Plan(chats=2, turns=2, user_tokens=24, output_tokens=2, at_once=1, share=2.0, images=2)
    baseline, virtual = runs = measure("vision", plan)
    assert (baseline.images, virtual.images, virtual.encoded_images) == (2, 2, 2)
    assert baseline.encoded_images > 2
    assert summary(runs)["models"]["vision"]["virtual"]["same_tokens"]


@pytest.mark.slow
def test_two_models_in_one_tier_find_more_than_in_halves_and_memory_goes_to_the_busy_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(TWO_WAYS, "halves")
    monkeypatch.delitem(TWO_WAYS, "virtual")  # tests/server/generation/test_two_models.py has it
    steps: list[None] = []
    plan = Plan(chats=4, turns=3, user_tokens=100, output_tokens=2, at_once=1, share=0.6)
    halves, shared = runs = measure("two", plan, lambda: steps.append(None))
    assert len(steps) == 2 * 2 * 4 * 3
    assert shared.output_digest == halves.output_digest and shared.prompt_tokens == halves.prompt_tokens
    assert shared.hit_tokens > halves.hit_tokens and shared.waste <= MOST_WASTE < halves.waste
    (before, _), after, _ = shared.gpu_blocks
    assert after[0] < before and after[1] > halves.gpu_blocks[1][1], "the busy model has more than half of the memory"
    assert halves.gpu_blocks[0][0] == halves.gpu_blocks[1][0], "in halves nothing moves"
    assert not shared.integrity_violations and not shared.restarts
    assert violations(summary(runs)) == []


@pytest.mark.slow
def test_a_draft_gives_the_same_tokens_in_fewer_passes_and_its_kv_lies_in_the_same_blocks() -> None:
    plan = Plan(chats=2, turns=2, user_tokens=40, output_tokens=16, at_once=1, share=2.0)
    alone, both = runs = measure("draft", plan)
    assert (alone.way, both.way) == (ALONE, DRAFT) and alone.output_digest == both.output_digest
    assert alone.hit_tokens == both.hit_tokens > 0
    assert both.passes < 0.7 * alone.passes and 0 < both.accepted_tokens < both.proposed_tokens
    assert alone.proposed_tokens == 0 and alone.gpu_blocks == both.gpu_blocks
    of_llama = 5 * 2 * 2 * 32 * 4 * BLOCK_TOKENS  # layers, keys and values, heads, their size, bytes
    blocks = alone.gpu_blocks[0][0]
    assert (alone.used_bytes, both.used_bytes) == (blocks * of_llama, blocks * of_llama * 6 // 5)
    assert violations(summary(runs)) == []


def test_one_page_size_for_llama_vision_wastes_what_the_paper_says(tmp_path: Path) -> None:
    """(32 T + 8 I) E bytes are needed, of 40 (T + I) E (Jenga, 3.2)."""
    plan = Plan(chats=3, turns=1, user_tokens=42, output_tokens=8, at_once=1, share=1.0)
    counted = count_bytes(hybrid_models.save("cross", tmp_path), plan)
    text, image, layer_bytes = 48, 6404, 2 * 16 * 4  # full blocks of 50 tokens, patches, a KV head of 16 numbers
    assert counted.needed == 3 * layer_bytes * (32 * text + 8 * image)
    assert counted.one_size == 3 * layer_bytes * 40 * 6464  # in whole pages
    assert 1 - counted.needed / counted.one_size == pytest.approx(PAPERS_ONE_SIZE_WASTE, abs=0.001)


def test_the_order_of_the_turns_is_the_same_each_time_and_gives_each_chat_its_own() -> None:
    plan = Plan(chats=5, turns=3, user_tokens=1, output_tokens=1, at_once=1, share=1.0)
    assert plan.phases(1) == plan.phases(1) and sorted(plan.phases(1)[0]) == sorted([*range(5)] * 3)
    assert plan.phases(1) != Plan(5, 3, 1, 1, 1, 1.0, seed=1).phases(1)
    assert plan.said(1, 2) == plan.said(1, 2) != plan.said(2, 1)


def test_the_first_of_two_models_is_busy_then_the_other_then_both() -> None:
    plan = Plan(chats=8, turns=2, user_tokens=1, output_tokens=1, at_once=1, share=1.0)
    phases = plan.phases(2)
    assert [sorted(set(phase)) for phase in phases] == [
        [0, 1, 2, 3, 8],
        [4, 9, 10, 11, 12],
        [5, 6, 7, 13, 14, 15],
    ]
    assert all(phase.count(chat) == 2 for phase in phases for chat in phase)
    for chats in range(1, 20):
        few = Plan(chats, 1, 1, 1, 1, 1.0).phases(2)
        assert sorted(chat for phase in few for chat in phase) == [*range(2 * chats)], "each chat once"


@pytest.mark.parametrize(
    ("model", "broken", "words"),
    [
        ("window", {}, ""),
        ("window", {"same_tokens": False}, "window, virtual: the tokens differ from those of baseline"),
        ("state", {"integrity_violations": 2}, "state, virtual: the daemon finds 2 errors in accounting"),
        ("state", {"waste": 0.0501}, "state, virtual: 0.0501 of the allocated bytes are not needed, more than 0.05"),
        ("window", {"hit_ratio": 1.49}, "1.49 times the hit tokens, less than 1.5"),
        ("state", {"hit_ratio": 1.49}, "1.49 times the hit tokens, less than 1.5"),
        ("vision", {"hit_ratio": 1.0, "images": 4, "encoded_images": 5}, ""),
        ("vision", {"hit_ratio": 0.99}, "0.99 times the hit tokens, less than 1"),
        ("vision", {"images": 4, "encoded_images": 6}, "6 embeddings for 4 images, instead of 4 to 5"),
        ("vision", {"images": 4, "encoded_images": 3}, "3 embeddings for 4 images, instead of 4 to 5"),
        ("vision", {"requests_ratio": 0.99}, "0.99 times the requests a second, less than 1"),
        ("two", GOOD_TWO | {"hit_ratio": 1.0}, ""),
        ("two", GOOD_TWO | {"hit_ratio": 0.99}, "0.99 times the hit tokens, less than 1"),
        ("two", GOOD_TWO | {"restarts": 1}, "two, virtual: workers were started again 1 times"),
        ("two", GOOD_TWO | {"gpu_blocks": [[20, 5], [20, 5], [9, 9]]}, "[20, 5] blocks in the GPU tier, then [20, 5]"),
        ("two", GOOD_TWO | {"gpu_blocks": [[20, 5]]}, ""),
    ],
)
def test_what_does_not_hold_is_said(model: str, broken: dict[str, Any], words: str) -> None:
    baseline = {**GOOD, "waste": 0.6, "hit_ratio": 1.0} | ({"encoded_images": 20} if model == "vision" else {})
    found = violations({"models": {model: {BASELINE: baseline, "virtual": {**GOOD, **broken}}}})
    assert words in "; ".join(found) and len(found) == bool(words)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({}, ""),
        ({"waste": 0.06}, "cross, virtual: 0.06 of the cached bytes are not needed, more than 0.05"),
        ({"one_size_waste": 0.7}, "cross, virtual: one page size wastes 0.7, less than 0.75"),
        ({"used_bytes": 99}, "cross, virtual: 99 bytes are cached, less than the 100 of all chats"),
    ],
)
def test_what_counts_break_is_said(broken: dict[str, Any], words: str) -> None:
    counts = {"used_bytes": 102, "needed_bytes": 100, "one_size_waste": 0.796}
    found = violations({"models": {"cross": {"virtual": GOOD | counts | broken}}})
    assert words in "; ".join(found) and len(found) == bool(words)


def test_two_models_find_no_less_than_in_halves() -> None:
    baseline = {**GOOD, **GOOD_TWO, "hit_ratio": 1.0, "found": 0.3}
    ways = {BASELINE: baseline, "halves": {**baseline, "found": 0.4}, "virtual": {**baseline, "found": 0.4}}
    assert violations({"models": {"two": ways}}) == []
    ways["virtual"]["found"] = 0.39
    assert violations({"models": {"two": ways}}) == [
        "two, virtual: 0.39 of the prompt tokens found, less than the 0.4 of halves"
    ]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({}, ""),
        ({"requests_ratio": 0.5, "waste": 0.06}, ""),
        ({"passes": 100}, "draft, draft: 100 passes of the model, no fewer than the 100 of it alone"),
        ({"used_bytes": 500}, "500 bytes of the GPU tier are used, no more than by the model alone"),
        ({"same_tokens": False}, "draft, draft: the tokens differ from those of alone"),
    ],
)
def test_what_a_draft_breaks_is_said(broken: dict[str, Any], words: str) -> None:
    alone = {**GOOD, "hit_ratio": 1.0, "passes": 100, "used_bytes": 500}
    found = violations(
        {"models": {"draft": {ALONE: alone, DRAFT: {**alone, "passes": 60, "used_bytes": 600, **broken}}}}
    )
    assert words in "; ".join(found) and len(found) == bool(words)


def run_of(
    way: str, hits: int, *, model: str = "window", rate: float = 2.0, waste: float = 0.01, said: str = "same"
) -> Run:
    return Run(model, way, 0, 1 << 20, rate, 1000, hits, 1000 - hits, waste, 0.0, 3, 0, said)


def test_of_several_rounds_the_best_rate_counts_and_all_hits_bytes_and_tokens() -> None:
    runs = [
        run_of("baseline", 100, rate=2.0),
        run_of("virtual", 200, rate=1.0, waste=0.02),
        run_of("baseline", 300, rate=1.0),
        run_of("virtual", 400, rate=3.0, waste=0.04),
    ]
    result = summary(runs)["models"]["window"]["virtual"]
    assert result == {
        "waste": 0.03,
        "found": 0.3,
        "requests_per_s": 3.0,
        "hit_ratio": 1.5,
        "requests_ratio": 1.5,
        "same_tokens": True,
        "integrity_violations": 0,
    }
    runs[1] = run_of("virtual", 200, said="other")
    assert not summary(runs)["models"]["window"]["virtual"]["same_tokens"]


def test_a_result_that_does_not_hold_fails_the_command_after_it_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def run(model: str, way: str) -> Run:
        return run_of(way, 100 if way == BASELINE else 140, model=model)

    monkeypatch.setattr(jenga, "measure", lambda model, plan, step: [run(model, way) for way in SUBJECTS[model].ways])
    file, picture = tmp_path / "jenga.json", tmp_path / "jenga.png"
    with pytest.raises(harness.BenchmarkError, match=r"window, virtual: 1.4 times the hit tokens, less than 1.5"):
        jenga.main(["--models", "window", "--json", str(file), "--plot", str(picture)])
    assert '"hit_ratio": 1.4' in file.read_text()
    assert picture.stat().st_size > 0


def test_the_command_plans_every_subject(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The figures of a good run of all, with those that only some subjects have, in table, file and plot."""
    plans: dict[str, Plan] = {}

    def runs(model: str, plan: Plan, step: Any) -> list[Run]:
        plans[model] = plan
        ways = list(SUBJECTS[model].ways)
        return [
            replace(
                run_of(way, 400 if way in ("virtual", "paged") else 200, model=model),
                gpu_blocks=((8, 2), (2, 8), (5, 5)),
                passes=100 - 40 * number,
                used_bytes=100 + number,
                needed_bytes=100,
                one_size_bytes=490,
                proposed_tokens=20 * number,
                accepted_tokens=15 * number,
            )
            for number, way in enumerate(ways)
        ]

    monkeypatch.setattr(jenga, "measure", runs)
    file, picture = tmp_path / "jenga.json", tmp_path / "jenga.png"
    jenga.main(["--json", str(file), "--plot", str(picture)])
    assert list(plans) == ["window", "state", "vision", "cross", "two", "draft"]
    assert (plans["draft"].at_once, plans["draft"].output_tokens) == (1, 32)
    assert plans["two"].share == pytest.approx(1.5 * plans["window"].share)
    models = json.loads(file.read_text())["models"]
    assert (models["cross"]["virtual"]["one_size_waste"], models["cross"]["paged"]["memory_ratio"]) == (0.7959, 4.85)
    assert models["two"]["virtual"]["gpu_blocks"] == [[8, 2], [2, 8], [5, 5]]
    assert models["draft"]["draft"] | {"passes": 60, "passes_ratio": 0.6, "accepted": 0.75} == models["draft"]["draft"]
    assert picture.stat().st_size > 0
