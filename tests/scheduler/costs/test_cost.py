from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd_scheduler import CostModel, Distance, InvalidValueError

MIB = 1 << 20


def slow_disk(probe_every: int = 4) -> CostModel:
    """Computing takes 1 ms a token, loading a MiB from disk 100 ms and from the CPU 0.1 ms."""
    costs = CostModel(probe_every=probe_every)
    costs.observe_compute(1000, 1.0)
    costs.observe_load(Distance.DISK, 10 * MIB, 1.0)
    costs.observe_load(Distance.CPU, 10 * MIB, 0.001)
    return costs


def test_one_observation_is_an_estimate_of_the_same_rate() -> None:
    costs = slow_disk()
    assert costs.compute_s(16) == pytest.approx(0.016)
    assert costs.load_s(MIB, Distance.DISK) == pytest.approx(0.1)
    assert costs.load_s(MIB, Distance.DISK, queued_bytes=MIB) == pytest.approx(0.2)


def test_what_was_never_observed_is_unknown_and_the_gpu_costs_nothing() -> None:
    costs = CostModel()
    assert costs.compute_s(1) is None
    assert costs.load_s(MIB, Distance.DISK) is None
    assert costs.load_s(MIB, Distance.NONE) is None
    assert costs.load_s(1 << 40, Distance.GPU) == 0.0


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_prefill_is_learned_with_its_context(noise: float) -> None:
    source = random.Random(1)

    def seconds(tokens: int, context: int) -> float:
        return 2e-3 + 1e-4 * tokens + 2e-8 * tokens * (context + tokens / 2)

    costs = CostModel()
    for _ in range(80):
        tokens, context = source.choice([16, 64, 200, 512]), source.choice([0, 500, 2000, 4000])
        stall = 10 if source.random() < noise / 2 else 1
        costs.observe_compute(tokens, seconds(tokens, context) * source.uniform(1 - noise, 1 + noise) * stall, context)
    for tokens, context in [(16, 0), (512, 0), (4096, 0), (512, 3000), (32, 512)]:
        assert costs.compute_s(tokens, context) == pytest.approx(seconds(tokens, context), rel=0.01 + 1.5 * noise)


def learned_disk(seconds: Callable[[int], float]) -> CostModel:
    costs = CostModel()
    for number in range(30):
        nbytes = (MIB >> 2, MIB, 8 * MIB)[number % 3]
        costs.observe_load(Distance.DISK, nbytes, seconds(nbytes))
    return costs


def test_latency_and_bandwidth_are_told_apart() -> None:
    costs = learned_disk(lambda nbytes: 0.01 + nbytes / 100e6)
    for nbytes in (1 << 12, MIB, 1 << 30):
        assert costs.load_s(nbytes, Distance.DISK) == pytest.approx(0.01 + nbytes / 100e6, rel=1e-3)


def test_two_stalls_change_little_and_a_disk_that_turns_slow_is_followed() -> None:
    costs = learned_disk(lambda nbytes: nbytes / 100e6)
    for _ in range(2):
        costs.observe_load(Distance.DISK, MIB, 60.0)
    assert costs.load_s(MIB, Distance.DISK) == pytest.approx(MIB / 100e6)
    for _ in range(3):
        costs.observe_load(Distance.DISK, 2 * MIB, 2 * MIB / 10e6)
    for nbytes in (MIB, 64 * MIB):  # of all sizes, also those not seen since
        slow_s = costs.load_s(nbytes, Distance.DISK)
        assert slow_s is not None and slow_s > 5 * nbytes / 100e6


def test_a_disk_that_turns_slow_is_known_as_soon_as_a_load_of_each_size_was_seen() -> None:
    costs, sizes = CostModel(), (MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    for nbytes in sizes * 2:
        costs.observe_load(Distance.DISK, nbytes, 0.003 + nbytes / 5e9)
    for nbytes in sizes:
        costs.observe_load(Distance.DISK, nbytes, 0.003 + nbytes / 100e6)
    for nbytes in sizes:
        assert costs.load_s(nbytes, Distance.DISK) == pytest.approx(0.003 + nbytes / 100e6, rel=0.05)


@settings(max_examples=50)
@given(
    bytes_per_s=st.floats(1e7, 1e10),
    decoded_per_s=st.floats(1e8, 1e10),
    ratio=st.sampled_from([0.38, 0.52, 0.7]),
    seed=st.integers(0, 1000),
)
def test_blocks_as_they_are_and_coded_ones_are_told_apart(
    bytes_per_s: float, decoded_per_s: float, ratio: float, seed: int
) -> None:
    def load(raw: int, exact: int) -> tuple[int, float, int]:
        moved = raw + round(ratio * exact)
        return moved, 1e-3 + moved / bytes_per_s + exact / decoded_per_s, exact

    costs, source = CostModel(), random.Random(seed)
    for _ in range(60):
        nbytes, coded = source.choice([MIB, 4 * MIB, 16 * MIB, 64 * MIB]), source.choice([0.0, 0.5, 1.0])
        moved, elapsed_s, decoded = load(round((1 - coded) * nbytes), round(coded * nbytes))
        costs.observe_load(Distance.DISK, moved, elapsed_s, decoded)
    for raw, exact in [(32 * MIB, 0), (0, 32 * MIB), (24 * MIB, 8 * MIB), (8 * MIB, 24 * MIB)]:
        moved, elapsed_s, decoded = load(raw, exact)
        estimate_s = costs.load_s(moved, Distance.DISK, decoded_bytes=decoded)
        assert estimate_s == pytest.approx(elapsed_s, rel=0.1)


def test_a_first_coded_block_counts_its_stored_bytes_until_one_was_decoded() -> None:
    costs = learned_disk(lambda nbytes: nbytes / 100e6)
    assert costs.load_s(MIB, Distance.DISK, decoded_bytes=2 * MIB) == costs.load_s(MIB, Distance.DISK)
    for nbytes in (MIB, 8 * MIB) * 3:
        costs.observe_load(Distance.DISK, nbytes // 2, nbytes / 2 / 100e6 + nbytes / 400e6, nbytes)
    assert costs.load_s(MIB, Distance.DISK, decoded_bytes=2 * MIB) == pytest.approx(
        MIB / 100e6 + 2 * MIB / 400e6, rel=0.1
    )
    assert costs.load_s(MIB, Distance.DISK) == pytest.approx(MIB / 100e6, rel=0.1)


def test_a_tier_that_is_passed_over_is_probed_now_and_then() -> None:
    costs = slow_disk(probe_every=4)
    assert [costs.probes(Distance.DISK) for _ in range(8)] == [False, False, False, True] * 2


def test_an_empty_observation_says_nothing() -> None:
    costs = CostModel()
    costs.observe_compute(0, 5.0)
    costs.observe_load(Distance.CPU, 0, 5.0)
    assert costs.compute_s(10) is None
    assert costs.load_s(10, Distance.CPU) is None


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_impossible_observations_are_refused(value: float) -> None:
    costs = CostModel()
    for observe in (
        lambda: costs.observe_compute(1, value),
        lambda: costs.observe_compute(1, 1.0, value),
        lambda: costs.observe_load(Distance.CPU, 1, value),
        lambda: costs.observe_load(Distance.CPU, 1, 1.0, value),
        lambda: costs.observe_store(Distance.CPU, 1, value),
        lambda: costs.observe_encode(1, 1, value),
    ):
        with pytest.raises(InvalidValueError, match="have to be"):
            observe()
    with pytest.raises(InvalidValueError, match="loads come from"):
        costs.observe_load(Distance.GPU, 1, 1.0)
    with pytest.raises(InvalidValueError, match="stores go to"):
        costs.observe_store(Distance.NONE, 1, 1.0)
    with pytest.raises(InvalidValueError, match="pass 2 or more"):
        CostModel(probe_every=1)


seconds_of_any_size = st.floats(min_value=0, max_value=1e6)


@given(
    computed=st.lists(st.tuples(st.integers(0, 1 << 20), seconds_of_any_size, st.integers(0, 1 << 20)), max_size=12),
    loaded=st.lists(st.tuples(st.integers(0, 1 << 45), seconds_of_any_size), max_size=12),
)
def test_estimates_are_never_negative_and_grow(
    computed: list[tuple[int, float, int]], loaded: list[tuple[int, float]]
) -> None:
    costs = CostModel()
    for tokens, elapsed_s, context in computed:
        costs.observe_compute(tokens, elapsed_s, context)
    for nbytes, elapsed_s in loaded:
        costs.observe_load(Distance.DISK, nbytes, elapsed_s)
    computing = [costs.compute_s(tokens, context) for tokens, context in [(1, 0), (16, 0), (16, 100), (4096, 100)]]
    loading = [costs.load_s(nbytes, Distance.DISK) for nbytes in (1, MIB, 1 << 40)]
    for estimates in (computing, loading):
        known = [estimate for estimate in estimates if estimate is not None]
        assert known in ([], sorted(known)) and len(known) in (0, len(estimates))
        assert all(math.isfinite(estimate) and estimate >= 0 for estimate in known)


def swapping(load_s: float | None, store_s: float | None) -> CostModel:
    costs = CostModel(probe_every=4)
    costs.observe_compute(1000, 1.0)
    if load_s is not None:
        costs.observe_load(Distance.CPU, MIB, load_s)
    if store_s is not None:
        costs.observe_store(Distance.CPU, MIB, store_s)
    return costs


def test_a_swap_is_a_store_and_a_load() -> None:
    assert swapping(0.04, 0.04).swap_pays(100, MIB, Distance.CPU)
    assert not swapping(0.06, 0.06).swap_pays(100, MIB, Distance.CPU)
    assert not swapping(0.06, None).swap_pays(100, MIB, Distance.CPU)  # the other as fast
    assert not swapping(None, 0.06).swap_pays(100, MIB, Distance.CPU)
    assert swapping(None, None).swap_pays(1, 1 << 40, Distance.CPU)
    assert CostModel().swap_pays(1, 1 << 40, Distance.CPU)
    assert not CostModel().swap_pays(1, 0, Distance.NONE)


def test_a_swap_that_is_refused_is_probed() -> None:
    costs = swapping(1.0, 1.0)
    assert [costs.swap_pays(10, MIB, Distance.CPU) for _ in range(4)] == [False, False, False, True]
