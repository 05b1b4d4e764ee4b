"""Stretches of mixed pages that are evicted, against all stretches there are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.pages.mixed_eviction import choose_mixed_victims
from prefixd_swap.pages.pages import PageAllocator
from prefixd_swap.slots import PAGE_BYTES

MIB = 1 << 20


def tier_of(pages: int = 8) -> PageAllocator:
    tier = PageAllocator(pages * MIB)
    tier.add(0, pages * MIB)
    return tier


def fill_mixed(tier: PageAllocator, units: list[int]) -> list[int]:
    """Takes mixed slots of so many units; returns their offsets."""
    offsets = []
    for count in units:
        offset = tier.allocate_mixed(count * PAGE_BYTES)
        assert offset is not None
        offsets.append(offset)
    return offsets


def choose(
    tier: PageAllocator, units: int, worth: dict[int, float], stays: frozenset[int] = frozenset(), count: int = 1
) -> tuple[list[int], int]:
    """The offsets that go for `count` slots of `units` units; worth by offset."""
    offsets = np.array(list(worth), np.int64)
    may = np.array([offset not in stays for offset in worth], np.bool_)
    found = choose_mixed_victims(tier, units * PAGE_BYTES, count, offsets, np.array([*worth.values()]), may)
    return offsets[found.positions].tolist(), found.slots


def test_what_is_missing_goes_and_no_more() -> None:
    """A hole beside a slot is a part of the room."""
    tier = tier_of(1)
    a, b, c, d = fill_mixed(tier, [5, 4, 6, 1])
    tier.free(b)
    worth = {a: 1.0, c: 2.0, d: 0.0}
    assert choose(tier, 9, worth) == ([a], 1)
    assert choose(tier, 10, worth) == ([c], 1)
    assert choose(tier, 11, worth) == ([c, d], 1)
    assert choose(tier, 9, worth, frozenset([a])) == ([c], 1)


def test_more_than_a_page_is_whole_pages_and_a_stretch() -> None:
    tier = tier_of(16)
    offsets = fill_mixed(tier, [4] * 160)
    length = int(tier.pages().nbytes[tier.pages_of(np.array(offsets))].max())
    each = length // (4 * PAGE_BYTES)
    assert 4 < each < 80
    worth = {offset: float(at) for at, offset in enumerate(offsets)}
    assert choose(tier, 4, worth, count=each + 2) == (offsets[: each + 2], each + 2)


def test_shorter_stretches_where_longer_ones_have_a_slot_that_stays() -> None:
    tier = tier_of(1)
    offsets = fill_mixed(tier, [4] * 4)
    worth = {offset: float(at) for at, offset in enumerate(offsets)}
    gone, slots = choose(tier, 4, worth, frozenset([offsets[1]]), count=3)
    assert gone == [offsets[0], *offsets[2:]] and slots == 3
    gone, slots = choose(tier, 4, worth, frozenset([*offsets[:3]]), count=2)
    assert (gone, slots) == ([offsets[3]], 1)
    assert choose(tier, 4, worth, frozenset(offsets)) == ([], 0)


def test_a_page_with_slots_of_one_size_goes_whole() -> None:
    tier = tier_of(64)
    taken = tier.allocate_many(PAGE_BYTES, 3)
    assert taken is not None and tier.page_bytes == 16 * PAGE_BYTES
    offsets = taken.tolist()
    worth = {offset: float(at) for at, offset in enumerate(offsets)}
    gone, slots = choose(tier, 1, worth)
    assert gone == offsets and slots >= 1
    assert choose(tier, 1, worth, frozenset([0])) == ([], 0)
    assert choose(tier, 1, dict(list(worth.items())[1:])) == ([], 0), "a slot that is not given stays"


def test_adjacent_pages_where_each_is_too_short() -> None:
    """Small slots made the pages short; the stretch for a larger one is several of them."""
    tier = tier_of(1)
    worth = {}
    while (offset := tier.allocate_mixed(PAGE_BYTES)) is not None:
        worth[offset] = 1.0
    gone, slots = choose(tier, 40, worth)
    assert slots >= 1
    tier.free_many(np.array(gone, np.int64))
    assert tier.allocate_mixed(40 * PAGE_BYTES) is not None


def test_a_closed_range_gives_no_room() -> None:
    tier = tier_of(1)
    worth = dict.fromkeys(fill_mixed(tier, [4, 4]), 1.0)
    tier.close(0)
    assert choose(tier, 4, worth) == ([], 0)


def test_what_may_not_go_together_does_not() -> None:
    tier = tier_of(1)
    offsets = np.array(fill_mixed(tier, [4] * 4), np.int64)
    asked: list[list[int]] = []

    def allow(inside: np.ndarray) -> bool:
        asked.append(inside.tolist())
        return inside.tolist() == [2, 3]

    found = choose_mixed_victims(tier, 8 * PAGE_BYTES, 1, offsets, np.arange(4.0), None, allow)
    assert found.positions.tolist() == [2, 3] and found.slots == 1
    assert asked == [[0, 1], [1, 2], [2, 3]]


def test_nothing_is_wanted_or_there() -> None:
    tier, nothing = tier_of(1), np.zeros(0, np.int64)
    assert choose(tier, 1, {}) == ([], 0)
    worth = dict.fromkeys(fill_mixed(tier, [4]), 1.0)
    assert choose(tier, 1, worth, count=0) == ([], 0)
    with pytest.raises(MemoryMisuseError):
        choose_mixed_victims(tier, 0, 1, nothing, np.zeros(0))


def stretches(tier: PageAllocator, worth: dict[int, float], stays: frozenset[int]) -> list[tuple[float, int, int]]:
    """Worth, bytes and bytes of slots of all stretches of mixed pages; worth by offset, of all slots."""
    sizes = dict(zip(*(each.tolist() for each in tier.occupied()), strict=True))
    now, found = tier.pages(), []
    for number in range(len(now)):
        start, stop = int(now.address[number]), int(now.address[number] + now.nbytes[number])
        inside = [offset for offset in sizes if start <= offset < stop]
        bounds = [start, *(offset + sizes[offset] for offset in inside)], [*inside[1:], stop]
        for first in range(len(inside)):
            for last in range(first, len(inside)):
                some = inside[first : last + 1]
                if not stays.intersection(some):
                    length = bounds[1][last] - bounds[0][first]
                    found.append((max(map(worth.__getitem__, some)), length, sum(map(sizes.__getitem__, some))))
    return found


@given(
    units=st.lists(st.integers(1, 16), min_size=1, max_size=60),
    missing=st.integers(1, 16),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_stretch_of_least_worth(units: list[int], missing: int, seed: int) -> None:
    tier, chance = tier_of(2), np.random.default_rng(seed)
    offsets = [offset for count in units if (offset := tier.allocate_mixed(count * PAGE_BYTES)) is not None]
    freed = [offset for offset in offsets if chance.random() < 0.3]
    tier.free_many(np.array(freed, np.int64))
    left = [offset for offset in offsets if offset not in freed]
    worth = {offset: float(chance.integers(0, 5)) for offset in left}
    stays = frozenset(offset for offset in left if chance.random() < 0.2)
    sizes = dict(zip(*(each.tolist() for each in tier.occupied()), strict=True))
    possible = [each for each in stretches(tier, worth, stays) if each[1] >= missing * PAGE_BYTES]
    gone, slots = choose(tier, missing, worth, stays)
    assert not stays.intersection(gone)
    if not possible:
        return
    assert slots >= 1
    used = sum(sizes[offset] for offset in gone)
    assert (max(map(worth.__getitem__, gone)), used) == min((least, taken) for least, _, taken in possible)
    assert used < missing * PAGE_BYTES + max(sizes[offset] for offset in gone)
    tier.free_many(np.array(gone, np.int64))
    assert tier.allocate_mixed(missing * PAGE_BYTES) is not None


@pytest.mark.parametrize("alternating", [False, True])
@pytest.mark.parametrize("missing", [4, 20, 40])
def test_the_stretch_of_least_worth_among_many(missing: int, alternating: bool) -> None:
    """Those with the slots of least worth are looked at first, and all where no two of them are side by side."""
    tier, chance = tier_of(32), np.random.default_rng(5)
    offsets = fill_mixed(tier, [12] * 600 if alternating else chance.integers(8, 18, 600).tolist())
    values = [at % 2 * 1000 + at for at in range(600)] if alternating else chance.permutation(600).tolist()
    worth = {offset: float(each) for offset, each in zip(offsets, values, strict=True)}
    sizes = dict(zip(*(each.tolist() for each in tier.occupied()), strict=True))
    least = min(each for each in stretches(tier, worth, frozenset()) if each[1] >= missing * PAGE_BYTES)
    gone, slots = choose(tier, missing, worth)
    assert slots == 1
    assert (max(map(worth.__getitem__, gone)), sum(map(sizes.__getitem__, gone))) == (least[0], least[2])
