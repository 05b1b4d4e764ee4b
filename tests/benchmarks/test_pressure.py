"""The pressure benchmark in short, and that it sees what it looks for."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import pressure
from prefixd.workloads.text_analysis import BLOCK_TOKENS


def run(name: str, **changes: Any) -> dict[str, Any]:
    counts = {"swap": (2, 0), "recompute": (0, 2), "auto": (1, 1), "unpressed": (0, 0)}[name]
    return {
        "name": name,
        "preempted": sum(counts),
        "swapped": counts[0],
        "recomputed": counts[1],
        "output_digest": "a",
        **changes,
    }


def test_a_batch_wants_each_block_once() -> None:
    batch = pressure.Batch(requests=5, prompt_tokens=48, output_tokens=15, share=3)
    prompts = batch.prompts()
    assert [len(prompt) for prompt in prompts] == [48] * 5
    begins = [tuple(prompt[: batch.prefix_tokens]) for prompt in prompts]
    assert batch.prefix_tokens == 2 * BLOCK_TOKENS
    assert begins[0] == begins[2] == begins[4] and len(set(begins)) == 3
    # 48 + 15 tokens and one to come are 4 blocks each; of three requests 2 are the same.
    assert batch.wanted_blocks == 5 * 4 - 2 * 2
    assert batch.pressed_blocks == 5
    kinds = {(number % 2, batch.options(number)["sampling"].temperature) for number in range(4)}
    assert kinds == {(0, 0.0), (1, 0.0), (0, 1.0), (1, 1.0)}, "shared and not, greedy and sampled"
    assert batch.prompts() == prompts


@pytest.mark.slow
def test_under_pressure_all_get_the_same_tokens_by_swap_and_by_recompute() -> None:
    steps: list[None] = []
    batch = pressure.Batch(requests=4, prompt_tokens=32, output_tokens=40, share=3)
    runs = pressure.measure(batch, lambda: steps.append(None))
    assert [each.name for each in runs] == ["unpressed", *pressure.MODES] and len(steps) == 4 * 4
    result = pressure.summary(runs)
    assert pressure.violations(result) == []
    assert result["same_tokens"] and result["swapped"] > 0 and result["recomputed"] > 0
    unpressed, swap, recompute, auto = runs
    assert unpressed.gpu_blocks == batch.wanted_blocks and swap.gpu_blocks == batch.pressed_blocks
    # With `swap`, too, a request that has filled no block yet has nothing to be copied, and is computed again.
    assert swap.swapped > 0 and recompute.swapped == recompute.swapped_blocks == 0
    # How many tokens each run computes again depends on who gives way when: a dropped prefix may still be cached.
    assert swap.swapped_blocks > 0
    # Of the rest the KV stayed where it was: when they had given way nobody waited for it any more.
    assert 0 < auto.swapped + auto.recomputed <= auto.preempted == auto.resumed
    assert result["swap_ratio"] == pytest.approx(swap.requests_per_s / unpressed.requests_per_s, abs=0.001)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({}, ""),
        ({"recompute": {"output_digest": "b"}}, "with recompute the tokens differ"),
        ({"unpressed": {"preempted": 1}}, "all the memory that the batch wants preempted 1"),
        ({"swap": {"swapped": 0, "recomputed": 2}}, "no request was swapped with scheduler.preemption = swap"),
        ({"recompute": {"recomputed": 0}}, "no request was recomputed with scheduler.preemption = recompute"),
        ({"auto": {"swapped": 0, "recomputed": 0}}, "no request was preempted with scheduler.preemption = auto"),
    ],
)
def test_what_must_not_be_is_said(broken: dict[str, dict[str, Any]], words: str) -> None:
    runs = [run(name, **broken.get(name, {})) for name in ("unpressed", *pressure.MODES)]
    same = len({each["output_digest"] for each in runs}) == 1
    found = "; ".join(pressure.violations({"runs": runs, "same_tokens": same}))
    assert words in found and bool(words) == bool(found)
