"""What attaching a prefix costs by mapping it and by copying it, and which of the two costs less."""

from __future__ import annotations

import pytest

from prefixd_swap.vtensor import AttachCosts


def measured(map_s: float, copy_s: float) -> AttachCosts:
    costs = AttachCosts()
    costs.observe_map(4, 4 * map_s)
    costs.observe_copy(2, 2 * copy_s)
    return costs


def test_without_both_costs_a_prefix_is_mapped() -> None:
    costs = AttachCosts()
    assert not costs.copy_pays(8, to_map=8, to_map_for_copy=0)
    costs.observe_map(1, 1.0)
    assert not costs.copy_pays(8, to_map=8, to_map_for_copy=0)
    costs.observe_copy(1, 0.001)
    assert costs.copy_pays(8, to_map=8, to_map_for_copy=0)
    unmeasured = AttachCosts()
    unmeasured.observe_copy(1, 0.001)
    assert not unmeasured.copy_pays(8, to_map=8, to_map_for_copy=0)


@pytest.mark.parametrize(
    ("copy_s", "to_map", "to_map_for_copy", "pays"),
    [
        (0.5, 8, 0, True),
        (2.0, 8, 0, False),
        (0.5, 8, 3, True),  # 4 + 3 < 8
        (0.5, 8, 4, False),  # as long as mapping, and it would cost memory
        (0.5, 8, 8, False),
        (0.5, 5, 0, True),
        (0.5, 4, 0, False),  # the other half is mapped there already
        (0.5, 0, 0, False),
    ],
)
def test_a_copy_pays_when_all_that_it_needs_takes_less_than_mapping(
    copy_s: float, to_map: int, to_map_for_copy: int, pays: bool
) -> None:
    costs = measured(1.0, copy_s)
    assert costs.copy_pays(8, to_map=to_map, to_map_for_copy=to_map_for_copy) == pays


def test_costs_are_of_one_block_and_follow_what_is_measured() -> None:
    costs = measured(1.0, 0.5)
    assert (costs.map_s, costs.copy_s) == (1.0, 0.5)
    costs.observe_map(10, 20.0)
    assert costs.map_s == pytest.approx(1.2)
    for _ in range(50):
        costs.observe_copy(3, 9.0)
    assert costs.copy_s == pytest.approx(3.0, rel=0.01)
