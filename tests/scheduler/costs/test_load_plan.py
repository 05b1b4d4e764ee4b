from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd_scheduler import CostModel, Distance, LoadPlan, Stretch, plan_load

BLOCK = 16
TOKEN_BYTES = 1 << 14
TIERS = (Distance.GPU, Distance.CPU, Distance.DISK)


def machine(
    *, bandwidth: float = 100e6, latency_s: float = 0.0, token_s: float = 1e-4, pass_s: float = 0.0, pair_s: float = 0.0
) -> CostModel:
    """Everything was observed; the CPU tier is 20 times as fast as the disk."""
    costs = CostModel()
    for tokens in (16, 64, 512):
        for context in (0, 512, 4096):
            costs.observe_compute(tokens, pass_s + token_s * tokens + pair_s * tokens * (context + tokens / 2), context)
    for nbytes in (1 << 18, 1 << 21, 1 << 24):
        costs.observe_load(Distance.DISK, nbytes, latency_s + nbytes / bandwidth)
        costs.observe_load(Distance.CPU, nbytes, nbytes / bandwidth / 20)
    return costs


def stretch(distance: Distance, tokens: int) -> Stretch:
    return Stretch(distance, tokens, tokens * TOKEN_BYTES)


def plan(costs: CostModel, *stretches: Stretch, prompt: int = 2064, both: bool = True) -> LoadPlan:
    return plan_load(costs, stretches, prompt, BLOCK, both_at_once=both)


def test_a_fast_disk_is_loaded_from_and_a_slow_one_is_not() -> None:
    fast = plan(machine(bandwidth=2e9), stretch(Distance.DISK, 2048), both=False)
    assert (fast.front_tokens, fast.loaded_tokens) == (2048, 0)
    slow = plan(machine(bandwidth=20e6), stretch(Distance.DISK, 2048), both=False)
    assert slow.used_tokens == 0


def test_a_disk_of_fewer_bytes_is_loaded_from_while_decoding_is_fast() -> None:
    def costs(decoded_per_s: float) -> CostModel:
        costs = machine(bandwidth=100e6)  # 2,048 tokens take 0.34 s as they are, and 0.2 s to compute
        for nbytes in (1 << 18, 1 << 21, 1 << 24):
            costs.observe_load(Distance.DISK, nbytes, nbytes / 100e6 + 2 * nbytes / decoded_per_s, 2 * nbytes)
        return costs

    exact = stretch(Distance.DISK, 2048)
    coded = Stretch(Distance.DISK, 2048, exact.nbytes // 2, exact.nbytes)
    assert plan(costs(4e9), exact, both=False).front_tokens == 0
    fast = plan(costs(4e9), coded, both=False)
    assert fast.front_tokens == 2048
    assert fast.load_s == pytest.approx(0.0016 + exact.nbytes / 2 / 100e6 + exact.nbytes / 4e9, rel=0.05)
    assert plan(costs(1e8), coded, both=False).front_tokens == 0


def test_both_at_once_meets_where_both_take_as_long() -> None:
    found = plan(machine(bandwidth=2048 * TOKEN_BYTES / 0.2048), stretch(Distance.DISK, 2048))  # as fast as computing
    assert (found.front_tokens, found.computed_tokens, found.loaded_tokens) == (0, 1024, 1024)
    assert found.first_token_s == pytest.approx(0.1024 + 0.0016)
    assert (found.load_s, found.compute_s) == (pytest.approx(0.2064), pytest.approx(0.2064))


def test_what_is_on_the_gpu_is_used_whatever_is_behind_it() -> None:
    found = plan(machine(bandwidth=1e3), stretch(Distance.GPU, 512), stretch(Distance.DISK, 1024))
    assert found == LoadPlan(512, first_token_s=found.first_token_s, load_s=found.load_s, compute_s=found.compute_s)


def test_what_is_near_is_loaded_before_what_is_far_is_met() -> None:
    costs = machine(bandwidth=2048 * TOKEN_BYTES / 0.2)
    found = plan(costs, stretch(Distance.CPU, 512), stretch(Distance.DISK, 1536))
    assert found.front_tokens == 512
    assert found.computed_tokens > 0 and found.loaded_tokens > 0 and found.used_tokens == 2048


def test_all_is_loaded_while_something_is_unknown() -> None:
    costs = CostModel()
    assert plan(costs, stretch(Distance.DISK, 2048)).front_tokens == 2048
    costs.observe_compute(100, 1e-9)
    assert plan(costs, stretch(Distance.DISK, 2048)).front_tokens == 2048
    assert plan(costs, stretch(Distance.GPU, 2048)) == LoadPlan(
        2048, first_token_s=plan_s(costs), load_s=plan_s(costs), compute_s=plan_s(costs)
    )


def plan_s(costs: CostModel) -> float | None:
    return costs.compute_s(16, 2048)


def test_what_waits_before_it_counts() -> None:
    costs = machine(bandwidth=1e9)
    alone = plan_load(costs, [stretch(Distance.DISK, 1024)], 1040, BLOCK, both_at_once=False)
    assert alone.front_tokens == 1024
    behind = {Distance.DISK: 1 << 30}
    crowded = plan_load(costs, [stretch(Distance.DISK, 1024)], 1040, BLOCK, both_at_once=True, queued_bytes=behind)
    assert crowded.used_tokens == 0


def test_only_possible_lengths_are_chosen() -> None:
    costs = machine(bandwidth=2e9)
    lengths = (512, 1536)

    def usable(tokens: int) -> int:
        return max((length for length in lengths if length <= tokens), default=0)

    found = plan_load(costs, [stretch(Distance.DISK, 2048)], 2064, BLOCK, both_at_once=True, usable=usable)
    assert (found.front_tokens, found.computed_tokens) == (1536, 0)


def test_a_slow_tier_is_probed_with_little() -> None:
    costs = machine(bandwidth=1e6)
    plans = [plan(costs, stretch(Distance.DISK, 2048)) for _ in range(64)]
    assert sorted({found.front_tokens for found in plans}) == [0, 128]
    assert sum(found.front_tokens > 0 for found in plans) == 2


@settings(max_examples=150)
@given(
    tiers=st.lists(st.tuples(st.sampled_from(TIERS), st.integers(1, 24)), min_size=1, max_size=3),
    rest=st.integers(1, 200),
    bandwidth=st.floats(1e6, 1e10),
    latency_s=st.sampled_from([0.0, 0.005, 0.05]),
    token_s=st.floats(1e-5, 1e-3),
    pass_s=st.sampled_from([0.0, 0.004]),
    pair_s=st.sampled_from([0.0, 1e-7]),
    both=st.booleans(),
)
def test_no_other_split_is_faster(
    tiers: list[tuple[Distance, int]],
    rest: int,
    bandwidth: float,
    latency_s: float,
    token_s: float,
    pass_s: float,
    pair_s: float,
    both: bool,
) -> None:
    costs = machine(bandwidth=bandwidth, latency_s=latency_s, token_s=token_s, pass_s=pass_s, pair_s=pair_s)
    stretches = [stretch(distance, blocks * BLOCK) for distance, blocks in tiers]
    cached = sum(part.tokens for part in stretches)
    prompt = cached + rest
    found = plan_load(costs, stretches, prompt, BLOCK, both_at_once=both)
    where = [part.distance for part in stretches for _ in range(part.tokens // BLOCK)]
    ready = next((at for at, distance in enumerate(where) if distance is not Distance.GPU), len(where))

    def load_s(begin: int, end: int) -> float:
        total = 0.0
        for distance in (Distance.CPU, Distance.DISK):
            total += costs.load_s(where[begin:end].count(distance) * BLOCK * TOKEN_BYTES, distance) or 0.0
        return total

    def compute_s(begin: int, end: int) -> float:
        return costs.compute_s(end - begin, begin) or 0.0

    blocks = len(where)
    fronts = [load_s(ready, end) + compute_s(end * BLOCK, prompt) for end in range(ready, blocks + 1)]
    assert found.first_token_s is not None
    assert found.ready_tokens == ready * BLOCK
    # A computation in two parts has a fixed part twice, which the estimate of one does not.
    ways = [
        max(load_s(ready, front) + compute_s(front * BLOCK, meet * BLOCK), load_s(meet, blocks))
        + compute_s(cached, prompt)
        for front in range(ready, blocks)
        for meet in range(front + 1, blocks)
    ]
    best = min(fronts)
    if both and ways and min(ways) < 0.88 * best:
        assert found.first_token_s <= best
        ends = {ready, *(end for end in accumulate(blocks for _, blocks in tiers) if ready <= end < blocks)}
        whole = [
            max(load_s(ready, front) + compute_s(front * BLOCK, meet * BLOCK), load_s(meet, blocks))
            + compute_s(cached, prompt)
            for front in ends
            for meet in range(front + 1, blocks)
        ]
        if min(whole) < 0.88 * best:
            assert found.first_token_s == pytest.approx(min(whole))
    elif not found.loaded_tokens:
        assert found.first_token_s == pytest.approx(best)
