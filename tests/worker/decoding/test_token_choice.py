"""Choosing tokens from logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from prefixd.base.sampling import MOST_LOGPROBS, Sampling
from prefixd.worker.decoding.token_choice import Choice, TokenCounts, choose_tokens, penalised, uniform, weights

CPU = torch.device("cpu")


def choice(k: int = 0, counts: TokenCounts | None = None, **sampling: object) -> Choice:
    return Choice(Sampling(**{"max_tokens": 99, **sampling}), k, counts)


def tokens(logits: torch.Tensor, choices: Sequence[Choice]) -> list[int | None]:
    return [chosen and chosen.token for chosen in choose_tokens(logits, choices)]


def draw(probabilities: list[float], count: int, **sampling: float) -> list[float]:
    """Frequencies of each token over `count` draws with one seed."""
    logits = torch.tensor([probabilities]).log().repeat(count, 1)
    found = tokens(logits, [choice(k, seed=9, **sampling) for k in range(count)])
    return [found.count(token) / count for token in range(len(probabilities))]


def test_frequencies_follow_the_distribution():
    assert draw([0.5, 0.2, 0.3], 3000, temperature=1.0) == pytest.approx([0.5, 0.2, 0.3], abs=0.03)


def test_temperature_sharpens():
    found = draw([0.6, 0.4], 2000, temperature=0.5)
    assert math.isclose(found[0], 0.36 / (0.36 + 0.16), abs_tol=0.04)


def test_filters_leave_what_they_say_in_its_proportions():
    assert draw([0.1, 0.5, 0.4], 500, temperature=1.0, top_p=0.45) == [0, 1, 0]
    for filtered in ({"top_p": 0.8}, {"top_k": 2}, {"min_p": 0.5}):
        assert draw([0.1, 0.5, 0.4], 2000, temperature=1.0, **filtered) == pytest.approx([0, 5 / 9, 4 / 9], abs=0.04)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.integers(2, 60),
    digits=st.sampled_from([0, 1, 6]),  # few digits: tokens that are exactly as likely
    temperature=st.floats(0.2, 5.0),
    top_k=st.integers(0, 70),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_what_the_filters_keep_is_what_transformers_keeps(seed, vocab, digits, temperature, top_k, top_p, min_p):
    scores = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (1, vocab)).round(digits)).float()
    theirs = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        theirs.append(TopKLogitsWarper(top_k))
    limited = theirs(None, scores)
    if top_p < 1.0:
        theirs.append(TopPLogitsWarper(top_p))
    if min_p:
        theirs.append(MinPLogitsWarper(min_p))
    probabilities = torch.softmax(limited.double(), -1)[0].sort(descending=True).values
    # Not where rounding decides.
    assume((probabilities.cumsum(0) - top_p).abs().min() > 1e-5)
    assume((probabilities / probabilities[0] - min_p).abs().min() > 1e-5)

    sampling = Sampling(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ours = weights(scores, [sampling])
    expected = torch.softmax(theirs(None, scores), -1)
    kept = ours[0] > 0
    # By likelihood, not by token: of several equals at the edge of the nucleus any may be the one that stays.
    assert scores[0, kept].sort().values.tolist() == scores[0, expected[0] > 0].sort().values.tolist()
    found = ours / ours.sum()
    torch.testing.assert_close(found.sort().values, expected.sort().values, rtol=1e-4, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    penalty=st.floats(0.1, 10.0),
    ids=st.lists(st.integers(0, 29), min_size=1, max_size=40),
    generated=st.integers(0, 40),
)
def test_the_repetition_penalty_is_that_of_transformers(seed, penalty, ids, generated):
    scores = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (1, 30))).float()
    counts = TokenCounts(ids, min(generated, len(ids) - 1), 30, CPU)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), scores.clone())
    assert torch.equal(penalised(scores, [choice(counts=counts, repetition_penalty=penalty)]), expected)


def test_presence_and_frequency_go_by_the_output_alone():
    counts = TokenCounts([0, 0, 1, 2, 2, 3], 3, 5, CPU)  # output: 2, 2, 3
    logits = torch.tensor([[1.0, -1.0, 2.0, -2.0, 0.0]])
    found = penalised(logits, [choice(counts=counts, presence_penalty=0.5, frequency_penalty=0.25)])
    assert found.tolist() == [[1.0, -1.0, 1.0, -2.75, 0.0]]
    rewarded = penalised(logits, [choice(counts=counts, frequency_penalty=-1.0)])
    assert rewarded.tolist() == [[1.0, -1.0, 4.0, -1.0, 0.0]]
    assert logits.tolist() == [[1.0, -1.0, 2.0, -2.0, 0.0]]
    assert tokens(logits, [choice(counts=counts, presence_penalty=2.0)]) == [0]


def test_counts_kept_as_tokens_come_are_those_of_the_whole_text():
    counted = TokenCounts([5, 5, 1], 0, 8, CPU)
    for token in (1, 7, 7):
        counted.add(token)
    whole = TokenCounts([5, 5, 1, 1, 7, 7], 3, 8, CPU)
    assert torch.equal(counted.prompt, whole.prompt) and torch.equal(counted.output, whole.output)
    assert counted.output.tolist() == [0, 1, 0, 0, 0, 0, 0, 2]


@pytest.mark.parametrize("tiny", [1e-300, 5e-324, 1e-39, 1e-6])
def test_a_tiny_temperature_is_greedy(tiny):
    logits = torch.tensor([[1.0, 1.0 + 2**-23, -3e38, 0.5], [1e-30, 2e-30, 0.0, -1.0], [3e38, -3e38, 0.0, 1.0]])
    for filters in ({}, {"top_p": 0.9}, {"top_k": 3, "min_p": 0.1}):
        assert tokens(logits, [choice(k, temperature=tiny, **filters) for k in range(3)]) == [1, 1, 0]


@pytest.mark.parametrize("huge", [1e39, 1e300, 1.7e308])
def test_a_huge_temperature_is_uniform_over_what_the_filters_leave(huge):
    assert draw([0.1, 0.5, 0.4], 3000, temperature=huge) == pytest.approx([1 / 3] * 3, abs=0.04)
    assert draw([0.1, 0.5, 0.4], 2000, temperature=huge, top_k=2) == pytest.approx([0, 0.5, 0.5], abs=0.04)
    assert draw([0.0, 0.5, 0.5], 500, temperature=huge)[0] == 0, "what the model rules out stays out"


@pytest.mark.parametrize(
    "extreme",
    [
        {"top_p": 5e-324},
        {"top_p": 1e-39, "top_k": 2**31 - 1},
        {"min_p": 1.0},
        {"min_p": 1.0 - 2**-53, "temperature": 1e39, "top_k": 1},
        {"top_k": 1, "temperature": 1.7e308},
        {"temperature": 1e-5},
    ],
)
def test_the_strictest_filters_leave_the_most_likely_token(extreme):
    logits = torch.tensor([[1.0, 5.0, -2.0, 4.9], [-3e38, -1e38, 3e38, -3e38]])
    for k in range(20):
        assert tokens(logits, [choice(k, **{"temperature": 1.0, **extreme})] * 2) == [1, 2]


def test_the_largest_penalties_leave_a_token():
    counts = TokenCounts([0, 1, 1, 2], 3, 4, CPU)
    logits = torch.tensor([[30.0, 20.0, -30.0, -5.0]])
    largest = {"repetition_penalty": 100.0, "presence_penalty": 2.0, "frequency_penalty": 2.0}
    assert tokens(logits, [choice(counts=counts, **largest)]) == [0]
    assert tokens(logits, [choice(counts=counts, repetition_penalty=0.01, frequency_penalty=-2.0)]) == [0]


@pytest.mark.parametrize("temperature", [0.01, 1.0, 100.0])
def test_no_fraction_meets_a_token_without_weight(temperature, monkeypatch):
    """Nor does the largest number below 1, whose product with a total is rounded."""
    monkeypatch.setattr("prefixd.worker.decoding.token_choice.uniform", lambda seed, k: 1.0 - 2.0**-53)
    logits = torch.randn(200, 64, generator=torch.Generator().manual_seed(3))
    logits[:, 40:] = -math.inf
    found = tokens(logits, [choice(temperature=temperature)] * 200)
    assert all(token is not None and token < 40 for token in found)


def mixed_rows(rows: int, vocab: int, device: torch.device = CPU) -> tuple[torch.Tensor, list[Choice]]:
    dice = np.random.default_rng(1)
    logits = torch.from_numpy(dice.normal(0, 2, (rows, vocab)).round(1)).float()
    choices = []
    for row in range(rows):
        ids = dice.integers(0, vocab, 20).tolist()
        sampling = {
            "temperature": dice.choice([0.0, 1e-3, 0.7, 1.5]),
            "top_k": dice.choice([0, 1, 5, 30]).item(),
            "top_p": dice.choice([1.0, 0.9, 0.3]),
            "min_p": dice.choice([0.0, 0.2]),
            "seed": row % 3,
            "logprobs": [None, 0, 1, MOST_LOGPROBS][dice.integers(4)],
            "repetition_penalty": dice.choice([1.0, 1.3]),
            "frequency_penalty": dice.choice([0.0, 0.5]),
        }
        made = choice(row, **sampling)
        choices.append(made._replace(counts=TokenCounts(ids, 10, vocab, device)) if made.sampling.penalised else made)
    return logits.to(device), choices


def test_a_row_depends_on_its_logits_seed_and_k_alone():
    logits, choices = mixed_rows(48, 300)
    together = choose_tokens(logits, choices)
    for order in (range(48), reversed(range(48))):
        for row in order:
            assert choose_tokens(logits[row : row + 1], [choices[row]]) == [together[row]]
    assert choose_tokens(logits.flip(0), choices[::-1]) == together[::-1]


def test_a_damaged_row_leaves_the_others_as_they_are():
    logits, choices = mixed_rows(16, 50)
    whole = choose_tokens(logits, choices)
    logits[3, 7] = math.nan
    logits[4] = -math.inf
    logits[5, 0] = math.inf
    found = choose_tokens(logits, choices)
    assert found == [None if row in (3, 4, 5) else chosen for row, chosen in enumerate(whole)]


def test_a_step_copies_to_the_host_once(monkeypatch):
    calls = []
    real = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: calls.append(1) or real(tensor))
    for name in ("item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("the host waits for the device"))
    logits, choices = mixed_rows(16, 50)
    for some in (choices, [choice()] * 16):
        choose_tokens(logits, some)
    assert len(calls) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_the_host_waits_for_that_copy_alone(monkeypatch):
    real = torch.Tensor.tolist

    def to_host(tensor: torch.Tensor) -> list[float]:
        torch.cuda.set_sync_debug_mode("default")
        return real(tensor)

    logits, choices = mixed_rows(16, 300, torch.device("cuda"))
    monkeypatch.setattr(torch.Tensor, "tolist", to_host)
    for some in (choices, [choice()] * 16):
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = tokens(logits, some)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(token is not None and 0 <= token < 300 for token in found)


def test_a_greedy_batch_costs_an_argmax():
    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            seen.append(operation.__name__)
            return operation(*args, **(kwargs or {}))

    seen: list[str] = []
    with Operations():
        assert tokens(torch.zeros(4, 9, dtype=torch.bfloat16), [choice(temperature=0.0)] * 4) == [0] * 4
    heavy = [name for name in seen if name.partition(".")[0] in ("_to_copy", "_softmax", "sort", "cumsum", "index")]
    assert not heavy and len(seen) < 12, seen


def test_logprobs_are_the_models_whatever_the_sampling():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(2))
    expected = torch.log_softmax(logits, -1)
    counts = TokenCounts([1, 2, 3], 1, 40, CPU)
    choices = [
        choice(logprobs=3),
        choice(logprobs=0, temperature=0.5),
        choice(logprobs=20, temperature=9.0, top_k=4, counts=counts, repetition_penalty=5.0),
        choice(temperature=1.0),
        choice(logprobs=1, temperature=1.0, top_p=0.1),
    ]
    for row, (chosen, asked) in enumerate(zip(choose_tokens(logits, choices), choices, strict=True)):
        assert chosen is not None
        wanted = asked.sampling.logprobs
        if wanted is None:
            assert chosen.logprobs is None
            continue
        told = chosen.logprobs
        assert told is not None
        best = expected[row].sort(descending=True)
        assert told.chosen == pytest.approx(expected[row, chosen.token].item())
        assert told.token_ids == best.indices[:wanted].tolist()
        assert told.logprobs == pytest.approx(best.values[:wanted].tolist())


def test_logprobs_name_no_token_that_the_model_rules_out():
    logits = torch.full((1, 6), -math.inf)
    logits[0, 2], logits[0, 4] = 1.0, 2.0
    (chosen,) = choose_tokens(logits, [choice(logprobs=5)])
    assert chosen is not None and chosen.logprobs is not None
    assert chosen.logprobs.token_ids == [4, 2]
    assert all(map(math.isfinite, chosen.logprobs.logprobs))


def test_uniform_is_numpys_philox_and_takes_any_integer():
    seeds = (0, 1, -1, 2**64, 2**63)
    values = {uniform(seed, k) for seed in seeds for k in range(50)}
    assert len(values) == 4 * 50, "2**64 is 0 again"
    for seed in seeds:
        for k in (0, 7):
            key = np.array([seed % 2**64, k], np.uint64)
            assert uniform(seed, k) == np.random.Generator(np.random.Philox(key=key)).random()


def test_rows_that_are_not_finite_have_no_token():
    logits = torch.zeros(3, 4)
    logits[0, 2] = math.nan
    logits[1] = -math.inf
    logits[2, 1] = 1.0
    for sampling in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "top_k": 2, "logprobs": 2}):
        found = choose_tokens(logits, [choice(**sampling)] * 3)
        assert found[:2] == [None, None]
        assert found[2] is not None


def test_greedy_takes_the_first_of_equals():
    assert tokens(torch.zeros(1, 5), [choice()]) == [0]
