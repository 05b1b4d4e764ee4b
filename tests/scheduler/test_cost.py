from __future__ import annotations

import pytest

from prefixd_scheduler import CostModel, Distance, InvalidValueError

MIB = 1 << 20


def slow_disk(probe_every: int = 4) -> CostModel:
    """Computing takes 1 ms a token, loading a MiB from disk 100 ms and from the CPU 0.1 ms."""
    costs = CostModel(probe_every=probe_every)
    costs.observe_compute(1000, 1.0)
    costs.observe_load(Distance.DISK, 10 * MIB, 1.0)
    costs.observe_load(Distance.CPU, 10 * MIB, 0.001)
    return costs


def test_a_load_pays_until_it_was_seen_to_be_slow() -> None:
    costs = CostModel()
    assert costs.load_pays(1, 1 << 40, Distance.DISK)
    costs.observe_compute(1000, 0.001)
    assert costs.load_pays(1, 1 << 40, Distance.DISK)
    assert costs.load_s(MIB, Distance.DISK) is None


def test_the_cheaper_way_is_taken() -> None:
    costs = slow_disk()
    assert costs.compute_s(16) == pytest.approx(0.016)
    assert costs.load_s(MIB, Distance.DISK) == pytest.approx(0.1)
    assert not costs.load_pays(16, MIB, Distance.DISK)
    assert costs.load_pays(200, MIB, Distance.DISK)
    assert costs.load_pays(16, MIB, Distance.CPU)


def test_the_gpu_costs_nothing_and_nothing_cached_never_pays() -> None:
    costs = slow_disk()
    assert costs.load_pays(1, 1 << 40, Distance.GPU)
    assert costs.load_s(1 << 40, Distance.GPU) == 0.0
    assert not costs.load_pays(1, 0, Distance.NONE)
    assert costs.load_s(MIB, Distance.NONE) is None


def test_a_slow_tier_is_probed_so_that_it_can_recover() -> None:
    costs = slow_disk(probe_every=4)
    answers = [costs.load_pays(16, MIB, Distance.DISK) for _ in range(8)]
    assert answers == [False, False, False, True] * 2
    for _ in range(40):
        costs.observe_load(Distance.DISK, 10 * MIB, 0.001)
    assert all(costs.load_pays(16, MIB, Distance.DISK) for _ in range(8))


def test_the_newest_observations_count_most() -> None:
    costs = CostModel(smoothing=0.5)
    costs.observe_compute(100, 1.0)
    costs.observe_compute(100, 2.0)
    assert costs.compute_s(100) == pytest.approx(1.5)
    for _ in range(20):
        costs.observe_compute(100, 4.0)
    assert costs.compute_s(100) == pytest.approx(4.0, rel=1e-3)


def test_an_observation_counts_by_its_size() -> None:
    costs = CostModel(smoothing=0.5)
    costs.observe_load(Distance.CPU, 1000 * MIB, 1.0)
    costs.observe_load(Distance.CPU, MIB, 0.1)  # all latency: 100 times the seconds a MiB
    estimate = costs.load_s(1000 * MIB, Distance.CPU)
    assert estimate is not None
    assert estimate == pytest.approx(1.1, rel=0.01)


def test_an_empty_observation_says_nothing() -> None:
    costs = CostModel()
    costs.observe_compute(0, 5.0)
    assert costs.compute_s(10) is None


@pytest.mark.parametrize(("smoothing", "probe_every"), [(0.0, 32), (1.1, 32), (0.2, 1)])
def test_parameters_outside_their_range_are_refused(smoothing: float, probe_every: int) -> None:
    with pytest.raises(InvalidValueError, match="pass"):
        CostModel(smoothing, probe_every)


def test_impossible_observations_are_refused() -> None:
    costs = CostModel()
    with pytest.raises(InvalidValueError, match="-1 units"):
        costs.observe_compute(-1, 1.0)
    with pytest.raises(InvalidValueError, match=r"-1\.0 s"):
        costs.observe_load(Distance.CPU, 1, -1.0)
    with pytest.raises(InvalidValueError, match="a load from GPU"):
        costs.observe_load(Distance.GPU, 1, 1.0)


# -- swapping a preempted request -------------------------------------------------------------------------------------


def test_a_swap_pays_until_it_was_seen_to_be_slow() -> None:
    costs = CostModel()
    assert costs.swap_pays(1, 1 << 40, Distance.CPU), "nothing was observed"
    costs.observe_compute(1000, 0.001)
    assert costs.swap_pays(1, 1 << 40, Distance.CPU), "neither way of the path was observed"
    assert not costs.swap_pays(1, 0, Distance.NONE), "there is nowhere to go"


def test_a_swap_costs_a_store_and_a_load() -> None:
    costs = slow_disk()
    costs.observe_store(Distance.CPU, MIB, 0.5)
    assert costs.store_s(2 * MIB, Distance.CPU) == pytest.approx(1.0)
    assert costs.store_s(MIB, Distance.DISK) is None
    assert costs.swap_pays(510, MIB, Distance.CPU)
    assert not costs.swap_pays(490, MIB, Distance.CPU)


@pytest.mark.parametrize("seen", ["load", "store"])
def test_one_way_of_a_path_is_assumed_to_be_as_fast_as_the_other(seen: str) -> None:
    costs = CostModel()
    costs.observe_compute(1000, 1.0)
    (costs.observe_load if seen == "load" else costs.observe_store)(Distance.CPU, MIB, 0.1)
    assert costs.swap_pays(210, MIB, Distance.CPU)
    assert not costs.swap_pays(190, MIB, Distance.CPU)


def test_swaps_that_are_too_slow_are_probed_by_themselves() -> None:
    costs = slow_disk(probe_every=4)
    assert [costs.swap_pays(16, MIB, Distance.DISK) for _ in range(8)] == [False, False, False, True] * 2
    assert not costs.load_pays(16, MIB, Distance.DISK), "loads are counted apart"


def test_stores_go_to_the_cpu_or_the_disk() -> None:
    with pytest.raises(InvalidValueError, match="GPU"):
        CostModel().observe_store(Distance.GPU, 1, 1.0)
