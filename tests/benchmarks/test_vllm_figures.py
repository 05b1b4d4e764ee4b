"""What benchmarks.vllm asks for and what it judges by; without vLLM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import harness
from benchmarks.engines.vllm_figures import PromptTokens, Reply, Round, Run, Stage, broken_promises, nothing_to_hit
from benchmarks.vllm import draw
from benchmarks.workloads.growing_chats import ChatPlan, Chats, distinct_prompts

PLAN = ChatPlan(conversations=5, turns=3, system_tokens=20, user_tokens=7, output_tokens=3, vocabulary=1000, seed=1)


def play(plan: ChatPlan, turns: int) -> list[list[tuple[int, ...]]]:
    """The prompts of each turn, when the engine's answer is the prompt's length three times."""
    chats = Chats(plan)
    asked = []
    for _ in range(turns):
        prompts = chats.next_turn()
        asked.append(prompts)
        chats.answered([(len(prompt),) * 3 for prompt in prompts])
    return asked


def test_a_prompt_is_all_that_was_said_before() -> None:
    first, second, third = play(PLAN, 3)
    assert [len({len(prompt) for prompt in turn}) for turn in (first, second, third)] == [1, 1, 1]
    assert [len(turn[0]) for turn in (first, second, third)] == [PLAN.prompt_tokens(turn) for turn in (1, 2, 3)]
    assert {prompt[:20] for prompt in first + second + third} == {first[0][:20]}
    for earlier, later in ((first, second), (second, third)):
        answered = {(*prompt, *(len(prompt),) * 3) for prompt in earlier}
        assert {prompt[: len(earlier[0]) + 3] for prompt in later} == answered


def test_the_same_plan_asks_the_same_and_another_seed_does_not() -> None:
    assert play(PLAN, 3) == play(PLAN, 3)
    assert play(PLAN, 1) != play(replace(PLAN, seed=2), 1)


def test_users_say_more_and_less_as_far_as_the_plan_spreads() -> None:
    plan = replace(PLAN, user_tokens=8, spread=0.5)
    said = [len(prompt) - 20 for prompt in play(plan, 1)[0]]
    assert min(said) >= 4 and max(said) <= 12 and len(set(said)) > 1
    assert plan.prompt_tokens(2) == 20 + 2 * 12 + 3


def test_conversations_take_turns_in_changing_order() -> None:
    first, second, _ = play(PLAN, 3)
    begun = [prompt[:27] for prompt in first]
    assert sorted(begun) == sorted(prompt[:27] for prompt in second)
    assert begun != [prompt[:27] for prompt in second]


def test_a_turn_without_answers_does_not_go_on() -> None:
    chats = Chats(PLAN)
    chats.next_turn()
    with pytest.raises(ValueError, match="turn 1 was not answered"):
        chats.next_turn()
    with pytest.raises(ValueError, match="4 answers to 5 prompts"):
        chats.answered([(1,)] * 4)


def test_distinct_prompts_share_nothing() -> None:
    prompts = distinct_prompts(30, 50, 4096, "a") + distinct_prompts(30, 50, 4096, "b")
    assert len({prompt[:4] for prompt in prompts}) == 60 and {len(prompt) for prompt in prompts} == {50}


def stage(computed: int, ttft_s: float, tokens: tuple[int, ...] = (1, 2)) -> Stage:
    prompt = PromptTokens(total=1000, local=100, cpu=0, disk=0, external=900 - computed)
    return Stage("turn 1", (Reply(tokens, ttft_s), Reply((5, 6), ttft_s * 2)), elapsed_s=2.0, prompt=prompt)


ALONE = Run("vllm", (stage(900, 1.0),), (3.0, 3.0))
PREFIXD = Run("prefixd", (stage(300, 0.5),), (3.0, 3.0))


def round_(alone_s: float, prefixd_s: float, *, same_tokens: bool = True) -> Round:
    return Round(10, alone_s, prefixd_s, same_tokens, alone_cpu_s=3.0, prefixd_cpu_s=3.1, daemon_cpu_s=0.2)


ROUNDS = [round_(10.0, taken) for taken in (10.1, 10.0, 14.0, 10.2, 9.9)]


def broken(prefixd: Run = PREFIXD, rounds: list[Round] = ROUNDS) -> list[str]:
    return broken_promises(ALONE, prefixd, nothing_to_hit(rounds))


def test_what_holds_is_not_reported() -> None:
    assert broken() == []


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (broken(Run("prefixd", (stage(300, 0.5, (1, 3)),), ())), "1 of 2 requests got other tokens"),
        (broken(Run("prefixd", (stage(460, 0.5),), ())), "saved 1.96 times the prompt tokens, not 2 times"),
        (broken(Run("prefixd", (stage(300, 1.0),), ())), "first token is 1.500 s with prefixd, 1.500 s without"),
        (
            broken(rounds=[round_(9.4, 10.0)] * 3),
            "leaves 94.0% of vLLM's requests a second, not 95%",
        ),
        (
            broken(rounds=[round_(9.9, 10.0, same_tokens=False)]),
            "prompts that nobody asked before got other tokens",
        ),
    ],
)
def test_what_does_not_hold_is_one_line(found: list[str], says: str) -> None:
    assert len(found) == 1 and says in found[0]


def test_a_run_too_short_for_times_is_judged_by_the_rest() -> None:
    slow = Run("prefixd", (stage(460, 1.0, (1, 3)),), ())
    found = broken_promises(ALONE, slow, nothing_to_hit([round_(5.0, 10.0)]), times=False)
    assert [line.partition(" ")[0] for line in found] == ["1", "prefixd"]


def test_a_disturbed_round_does_not_decide() -> None:
    nothing = nothing_to_hit(ROUNDS)
    assert nothing["share"] == pytest.approx(10 / 10.1)
    assert nothing["share_quartiles"] == pytest.approx([10 / 10.2, 1.0])
    cpu_ms = [nothing[f"{name}_cpu_ms"] for name in ("alone", "prefixd", "daemon")]
    assert cpu_ms == pytest.approx([300, 310, 20])


def test_figures_of_a_run_add_up() -> None:
    run = replace(PREFIXD, stages=(stage(300, 0.5), stage(100, 0.1))).to_plain()
    assert (run["requests"], run["elapsed_s"], run["requests_per_s"]) == (4, 4.0, 1.0)
    assert run["prompt_tokens"]["computed"] == 400 == sum(each["prompt_tokens"]["computed"] for each in run["stages"])
    # Of 0.1, 0.2, 0.5 and 1.0 s.
    assert run["ttft"] == pytest.approx({"p50": 0.35, "p95": 0.925})


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    result: dict[str, Any] = {
        "runs": [ALONE.to_plain(), PREFIXD.to_plain()],
        "nothing_to_hit": nothing_to_hit(ROUNDS),
    }
    harness.plot(tmp_path / "plot.png", lambda panels: draw(panels, result), columns=3)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
