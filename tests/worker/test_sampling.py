"""Choosing tokens from logits."""

from __future__ import annotations

import math

import torch

from prefixd.worker.protocol import Sampling
from prefixd.worker.sampling import choose_tokens, uniform


def draw(probabilities: list[float], count: int, **sampling: float) -> list[float]:
    """Frequencies of each token over `count` draws with one seed."""
    logits = torch.tensor([probabilities]).log().repeat(count, 1)
    chosen = choose_tokens(logits, [(Sampling(max_tokens=1, seed=9, **sampling), k) for k in range(count)])
    return [chosen.count(token) / count for token in range(len(probabilities))]


def test_frequencies_follow_the_distribution():
    assert all(
        math.isclose(found, wanted, abs_tol=0.03)
        for found, wanted in zip(draw([0.5, 0.2, 0.3], 3000, temperature=1.0), [0.5, 0.2, 0.3], strict=True)
    )


def test_temperature_sharpens():
    found = draw([0.6, 0.4], 2000, temperature=0.5)
    assert math.isclose(found[0], 0.36 / (0.36 + 0.16), abs_tol=0.04)


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    assert draw([0.1, 0.5, 0.4], 500, temperature=1.0, top_p=0.45) == [0, 1, 0]
    found = draw([0.1, 0.5, 0.4], 2000, temperature=1.0, top_p=0.8)
    assert found[0] == 0
    assert math.isclose(found[1], 5 / 9, abs_tol=0.04)


def test_a_row_depends_on_seed_and_k_alone():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    choices = [(Sampling(max_tokens=9, temperature=1.5, seed=row % 3), row) for row in range(6)]
    together = choose_tokens(logits, choices)
    alone = [choose_tokens(logits[row : row + 1], [choices[row]])[0] for row in reversed(range(6))]
    assert together == alone[::-1]


def test_uniform_differs_in_seed_and_in_k_and_takes_any_integer():
    values = {uniform(seed, k) for seed in (0, 1, -1, 2**64, 2**63) for k in range(50)}
    assert len(values) == 4 * 50, "2**64 is 0 again"
    assert all(0.0 <= value < 1.0 for value in values)


def test_rows_that_are_not_finite_have_no_token():
    logits = torch.zeros(3, 4)
    logits[0, 2] = math.nan
    logits[1] = -math.inf
    logits[2, 1] = 1.0
    for temperature in (0.0, 1.0):
        choice = Sampling(max_tokens=1, temperature=temperature)
        chosen = choose_tokens(logits, [(choice, 0)] * 3)
        assert chosen[:2] == [None, None]
        assert chosen[2] is not None


def test_greedy_takes_the_first_of_equals():
    assert choose_tokens(torch.zeros(1, 5), [(Sampling(max_tokens=1), 0)]) == [0]
