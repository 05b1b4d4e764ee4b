"""The benchmark of hybrid models in short, and that it sees what it looks for."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import jenga
from benchmarks.common import harness

GOOD: dict[str, Any] = {"waste": 0.05, "hit_ratio": 1.5, "requests_ratio": 1.0, "same_tokens": True}


@pytest.mark.parametrize("model", ["window", "state"])
def test_what_each_rule_needs_finds_more_in_the_same_memory_wastes_less_and_gives_the_same_tokens(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if model == "state":  # block tables are seen with the other
        monkeypatch.delitem(jenga.WAYS, "paged")
    steps: list[None] = []
    plan = jenga.Plan(chats=4, turns=2, user_tokens=290, output_tokens=2, at_once=1, share=0.5)
    runs = jenga.measure(model, plan, lambda: steps.append(None))
    assert [run.way for run in runs] == list(jenga.WAYS) and len(steps) == len(runs) * 4 * 2
    baseline, *others = runs
    for run in others:
        assert run.gpu_bytes == baseline.gpu_bytes and run.samples > 0
        assert run.output_digest == baseline.output_digest
        assert run.hit_tokens > baseline.hit_tokens
        assert run.computed_tokens == run.prompt_tokens - run.hit_tokens
        assert run.waste <= jenga.MOST_WASTE < baseline.waste
    assert jenga.summary(runs)["models"][model]["virtual"]["same_tokens"]


def test_a_chat_about_images_embeds_each_once_and_the_baseline_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(jenga.WAYS, "paged")
    plan = jenga.Plan(chats=2, turns=2, user_tokens=24, output_tokens=2, at_once=1, share=2.0, images=2)
    baseline, virtual = runs = jenga.measure("vision", plan)
    assert (baseline.images, virtual.images, virtual.encoded_images) == (2, 2, 2)
    assert baseline.encoded_images > 2
    assert jenga.summary(runs)["models"]["vision"]["virtual"]["same_tokens"]


def test_the_order_of_the_turns_is_the_same_each_time_and_gives_each_chat_its_own() -> None:
    plan = jenga.Plan(chats=5, turns=3, user_tokens=1, output_tokens=1, at_once=1, share=1.0)
    assert plan.order() == plan.order() and sorted(plan.order()) == sorted([*range(5)] * 3)
    assert plan.order() != jenga.Plan(5, 3, 1, 1, 1, 1.0, seed=1).order()
    assert plan.said(1, 2) == plan.said(1, 2) != plan.said(2, 1)


@pytest.mark.parametrize(
    ("model", "broken", "words"),
    [
        ("window", {}, ""),
        ("window", {"same_tokens": False}, "window, virtual: the tokens differ"),
        ("state", {"waste": 0.0501}, "state, virtual: 0.0501 of the allocated bytes are not needed, more than 0.05"),
        ("window", {"hit_ratio": 1.49}, "1.49 times the hit tokens, less than 1.5"),
        ("state", {"hit_ratio": 1.49}, "1.49 times the hit tokens, less than 1.5"),
        ("vision", {"hit_ratio": 1.0, "images": 4, "encoded_images": 4}, ""),
        ("vision", {"hit_ratio": 0.99}, "0.99 times the hit tokens, less than 1"),
        ("vision", {"images": 4, "encoded_images": 5}, "vision, virtual: 5 embeddings for 4 images"),
        ("vision", {"requests_ratio": 0.99}, "0.99 times the requests a second, less than 1"),
    ],
)
def test_what_does_not_hold_is_said(model: str, broken: dict[str, Any], words: str) -> None:
    baseline = {"waste": 0.6, "hit_ratio": 1.0, "requests_ratio": 1.0, "same_tokens": True}
    found = jenga.violations({"models": {model: {jenga.BASELINE: baseline, "virtual": {**GOOD, **broken}}}})
    assert words in "; ".join(found) and len(found) == bool(words)


def run_of(
    way: str, hits: int, *, model: str = "window", rate: float = 2.0, waste: float = 0.01, said: str = "same"
) -> jenga.Run:
    return jenga.Run(model, way, 0, 1 << 20, rate, 1000, hits, 1000 - hits, waste, 0.0, 3, 0, said)


def test_of_several_rounds_the_best_rate_counts_and_all_hits_bytes_and_tokens() -> None:
    runs = [
        run_of("baseline", 100, rate=2.0),
        run_of("virtual", 200, rate=1.0, waste=0.02),
        run_of("baseline", 300, rate=1.0),
        run_of("virtual", 400, rate=3.0, waste=0.04),
    ]
    result = jenga.summary(runs)["models"]["window"]["virtual"]
    assert result == {
        "waste": 0.03,
        "found": 0.3,
        "requests_per_s": 3.0,
        "hit_ratio": 1.5,
        "requests_ratio": 1.5,
        "same_tokens": True,
    }
    runs[1] = run_of("virtual", 200, said="other")
    assert not jenga.summary(runs)["models"]["window"]["virtual"]["same_tokens"]


def test_a_result_that_does_not_hold_fails_the_command_after_it_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def run(model: str, way: str) -> jenga.Run:
        return run_of(way, 100 if way == jenga.BASELINE else 140, model=model)

    monkeypatch.setattr(jenga, "measure", lambda model, plan, step: [run(model, way) for way in jenga.WAYS])
    file, picture = tmp_path / "jenga.json", tmp_path / "jenga.png"
    with pytest.raises(harness.BenchmarkError, match=r"window, virtual: 1.4 times the hit tokens, less than 1.5"):
        jenga.main(["--models", "window", "--json", str(file), "--plot", str(picture)])
    assert '"hit_ratio": 1.4' in file.read_text()
    assert picture.stat().st_size > 0
