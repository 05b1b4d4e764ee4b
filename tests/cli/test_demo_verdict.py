"""What the demo says of its length, and of the policies."""

from __future__ import annotations

import pytest

from prefixd.cli.demo.policy_verdict import expected_s, left_s, minutes, why_policy_won
from prefixd.workloads.latency_figures import Figures, HitTokens, Quantiles
from prefixd.workloads.text_analysis import TextAnalysis


def run(name: str, rate: float, hits: HitTokens, miss_rate: float = 0.1) -> Figures:
    return Figures(name, 128, 128 / rate, rate, rate, Quantiles(1.0, 2.0), hits, miss_rate, "")


FCFS = run("fcfs", 3.8, HitTokens(12_896, 29_872, 14_576), 0.2)


def test_the_winner_is_named_with_what_it_found() -> None:
    said = why_policy_won(
        [FCFS, run("fpf", 5.3, HitTokens(51_536, 5_808, 0)), run("relaxed-fpf", 5.0, FCFS.hit_tokens)]
    )
    for words in (
        "fpf won (fcfs 3.8, fpf 5.3, relaxed-fpf 5.0 requests/s)",
        "51,536 prefix tokens lay in the GPU tier when their request ran, with fcfs 12,896",
        "loaded 5,808 from CPU memory and disk instead of 44,448",
        "computed 10% of the prefixes again instead of 20%",
    ):
        assert words in said


def test_no_winner_is_made_up() -> None:
    said = why_policy_won([FCFS, run("fpf", 3.9, HitTokens(1, 2, 3)), run("relaxed-fpf", 3.7, HitTokens(1, 2, 3))])
    assert said.startswith("No policy won: fpf and fcfs differ by less than 5%")
    won = why_policy_won([FCFS, run("fpf", 3.0, HitTokens(20_000, 0, 0)), run("relaxed-fpf", 3.1, FCFS.hit_tokens)])
    assert "But it found no more in the GPU tier (12,896, fpf 20,000)" in won


def test_a_length_of_time_for_people() -> None:
    assert minutes(expected_s(TextAnalysis(prefixes=16, requests=128, prefix_tokens=512, seed=0))) == "4 minutes"
    assert [minutes(seconds) for seconds in (3, 44, 89, 95, 700)] == [
        "10 seconds",
        "40 seconds",
        "90 seconds",
        "2 minutes",
        "12 minutes",
    ]
    assert left_s(100.0) == pytest.approx(105.0)
