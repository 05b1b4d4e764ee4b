from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from prefixd_scheduler import (
    WEIGHT_CLASSES,
    Distance,
    InvalidValueError,
    QueuedRequest,
    RequestQueue,
    create_policy,
    prompt_weight,
    weight_class,
)

GPU, CPU, DISK, REMOTE, NONE = Distance
NOW_S = 1000.0
PARTS = st.lists(st.tuples(st.sampled_from(Distance), st.integers(1, 5000)), max_size=12)


def test_distances_weigh_as_in_the_paper() -> None:
    assert sorted(Distance) == [GPU, CPU, DISK, REMOTE, NONE]
    weights = {distance: 4 - n for n, distance in enumerate((GPU, CPU, DISK, NONE))}
    assert {distance: distance.weight for distance in weights} == weights
    assert DISK.weight > REMOTE.weight > NONE.weight
    assert {distance.weight for distance in Distance} <= set(WEIGHT_CLASSES)


@pytest.mark.parametrize(
    ("cached", "prompt_tokens", "weight"),
    [
        ([], 4096, 1.0),
        ([(GPU, 512)], 4096, 1.5),  # a header on the GPU, 3,584 tokens to compute
        ([(GPU, 16)], 4096, 1.0),
        ([(GPU, 512), (DISK, 3584)], 4128, 2.5),
        ([(DISK, 4096)], 4128, 2.0),
        ([(GPU, 512), (CPU, 3584)], 4128, 3.0),
        ([(GPU, 2048)], 4096, 2.5),
        ([(GPU, 448)], 512, 3.5),  # the question is an eighth of the prompt
        ([(GPU, 449)], 512, 4.0),  # shorter
        ([(CPU, 449)], 512, 3.0),
        ([(DISK, 449)], 512, 2.0),
        ([(REMOTE, 449)], 512, 1.5),
        ([(GPU, 512)], 512, 4.0),
        ([], 0, 1.0),
    ],
)
def test_each_token_of_a_prompt_counts(cached: list[tuple[Distance, int]], prompt_tokens: int, weight: float) -> None:
    assert prompt_weight(cached, prompt_tokens) == weight


@given(PARTS, st.integers(0, 20_000))
def test_the_class_is_within_half_a_step_or_so_of_the_mean(cached: list[tuple[Distance, int]], others: int) -> None:
    tokens = sum(count for _, count in cached) + others
    assume(tokens)
    mean = Fraction(sum(Fraction(where.weight) * count for where, count in cached) + others, tokens)
    weight = prompt_weight(cached, tokens)
    assert weight in WEIGHT_CLASSES
    assert -Fraction(1, 8) <= Fraction(weight) - mean < Fraction(3, 8)


@given(PARTS, st.integers(0, 20_000), st.data())
def test_what_comes_nearer_or_is_computed_makes_no_prompt_farther(
    cached: list[tuple[Distance, int]], others: int, data: st.DataObject
) -> None:
    tokens = sum(count for _, count in cached) + others
    assume(cached)
    at = data.draw(st.integers(0, len(cached) - 1))
    where, count = cached[at]
    nearer = data.draw(st.sampled_from([each for each in Distance if each <= where]))
    moved = [*cached[:at], (nearer, count), *cached[at + 1 :]]
    assert prompt_weight(moved, tokens) >= prompt_weight(cached, tokens)
    if others:
        computed = data.draw(st.integers(1, others))
        assert prompt_weight([*cached, (GPU, computed)], tokens) >= prompt_weight(cached, tokens)


@given(st.floats(1.0, 4.0), st.floats(1.0, 4.0))
def test_classes_keep_the_order_of_the_means(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert weight_class(low) <= weight_class(high)


@given(
    requests=st.lists(
        st.tuples(
            st.sampled_from([GPU, CPU, DISK, NONE]),
            st.integers(64, 5000),  # tokens of the prefix
            st.integers(0, 99),  # of the longest question that is short, in percent
            st.integers(0, 500),  # age in seconds
        ),
        min_size=1,
        max_size=30,
    ),
    policy=st.sampled_from(["fpf", "relaxed-fpf"]),
)
def test_whole_prefixes_with_short_questions_run_in_the_order_of_the_paper(
    requests: list[tuple[Distance, int, int, int]], policy: str
) -> None:
    """The paper's workload: a template, which is cached as a whole or not at all, and a text of its own behind it,
    shorter than an eighth of the prompt. Section V.F: FPF takes the nearest, Relaxed-FPF the highest age * (4 - N)."""
    queue = RequestQueue(create_policy(policy), len(requests))
    paper: list[tuple[Any, ...]] = []
    for number, (where, prefix_tokens, percent, age_s) in enumerate(requests):
        prompt_tokens = prefix_tokens + (prefix_tokens - 1) // 7 * percent // 100
        cached = [] if where is NONE else [(where, prefix_tokens)]
        arrival_s = NOW_S - age_s
        weight = prompt_weight(cached, prompt_tokens)
        queue.push(QueuedRequest(number, arrival_s, prompt_tokens, sum(n for _, n in cached), weight))
        n = {GPU: 0, CPU: 1, DISK: 2, NONE: 3}[where]
        paper.append(((n,) if policy == "fpf" else (-age_s * (4 - n),)) + (arrival_s, number))
    assert [request.id for request in queue.window(len(requests), NOW_S)] == [each[-1] for each in sorted(paper)]


@pytest.mark.parametrize("policy", ["fpf", "relaxed-fpf"])
def test_a_header_on_the_gpu_does_not_put_a_new_prompt_before_one_that_returns(policy: str) -> None:
    """The first came a little later than the second and has a header on the GPU; of the second all is on disk."""
    queue = RequestQueue(create_policy(policy), 2)
    queue.push(QueuedRequest(1, NOW_S - 9.0, 4096, 512, prompt_weight([(GPU, 512)], 4096)))
    queue.push(QueuedRequest(2, NOW_S - 10.0, 4096, 4095, prompt_weight([(DISK, 4095)], 4096)))
    assert [request.id for request in queue.window(2, NOW_S)] == [2, 1]


@pytest.mark.parametrize(("prompt", "cached"), [(10, 11), (10, -1), (-1, 0)])
def test_counts_outside_their_range_are_refused_with_the_value(prompt: int, cached: int) -> None:
    with pytest.raises(InvalidValueError, match=f"request 7 has {cached} cached of {prompt} prompt tokens; pass"):
        QueuedRequest(id=7, arrival_s=0.0, prompt_tokens=prompt, cached_tokens=cached)


@pytest.mark.parametrize("weight", [0.0, 1.25, 4.5, float("nan"), -1.0])
def test_a_weight_that_is_no_class_is_refused_with_the_value(weight: float) -> None:
    """Relaxed-FPF's bound rests on weights between 1 and 4, and the queue has a place for each class only."""
    with pytest.raises(InvalidValueError, match=f"request 7 has the weight {weight}; pass"):
        QueuedRequest(7, 0.0, 10, 0, weight)
    queue = RequestQueue(create_policy("relaxed-fpf"), 1)
    queue.push(QueuedRequest(7, 0.0, 10))
    with pytest.raises(InvalidValueError, match=f"request 7 has the weight {weight}; pass"):
        queue.update(7, weight, 0, None)
    assert queue.window(1, 1.0)[0].weight == 1.0
