from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixd_swap.errors import IntegrityError, MemoryMisuseError
from prefixd_swap.pages.mixed_eviction import choose_mixed_victims
from prefixd_swap.pages.page_eviction import choose_victims
from prefixd_swap.pages.page_size import MAX_PAGES, MAX_UNITS, SHARE, choose_page_bytes, unit_bytes
from prefixd_swap.pages.page_table import EMPTY, IRREGULAR
from prefixd_swap.pages.pages import _FEW, PageAllocator
from prefixd_swap.slots import PAGE_BYTES, round_to_slot

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def allocator(capacity_bytes: int) -> PageAllocator:
    pages = PageAllocator(capacity_bytes)
    pages.add(0, capacity_bytes)
    return pages


def fill(pages: PageAllocator, nbytes: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    offsets = pages.allocate_many(nbytes, pages.room(nbytes))
    assert offsets is not None
    return offsets


# -- the size of a page --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "capacity", "page"),
    [
        ([], 16 * MIB, 64 * KIB),
        ([4 * KIB], 16 * MIB, 64 * KIB),
        ([4 * KIB, 64 * KIB], 16 * MIB, 64 * KIB),
        ([96 * KIB, 2 * MIB], 512 * MIB, 6 * MIB),
        ([96 * KIB, 2 * MIB], 200 * MIB, 2 * MIB),  # 6 MiB would be more than 1/64; a rest of 32 KiB instead
        ([2 * MIB], 200 * GIB, 16 * MIB),
        ([100 * KIB], 100_000 * KIB, 100 * KIB),
        ([4 * KIB], 4 * KIB, 4 * KIB),
    ],
)
def test_the_page_size(sizes: list[int], capacity: int, page: int) -> None:
    assert choose_page_bytes(sizes, capacity) == page


@given(
    sizes=st.lists(st.integers(1, 600), min_size=1, max_size=6, unique=True),
    capacity=st.integers(1000, 1 << 28),
    now=st.integers(0, 40),
)
def test_a_page_is_bounded_and_has_no_rest_where_it_is_small(sizes: list[int], capacity: int, now: int) -> None:
    nbytes, capacity = [size * PAGE_BYTES for size in sizes], capacity * PAGE_BYTES
    unit = unit_bytes(capacity)
    before = choose_page_bytes([now * PAGE_BYTES], capacity) if now else 1
    page = choose_page_bytes(nbytes, capacity, before)
    assert page % unit == 0 and page >= max(nbytes)
    assert capacity // unit <= MAX_UNITS and capacity // page <= MAX_PAGES
    assert page <= max(capacity // SHARE, 2 * max(nbytes), unit)
    common = math.lcm(unit, *nbytes)
    if common <= capacity // SHARE:
        assert page % common == 0
        assert page % before == 0 or math.lcm(page, before) > capacity // SHARE


# -- allocation ----------------------------------------------------------------------------------------------------


def test_a_prefix_lies_together_then_takes_a_page_then_any_free_slot() -> None:
    pages = allocator(16 * MIB)
    first, other = pages.allocate(4096), pages.allocate(4096)
    assert first is not None and other is not None
    assert pages.pages_of(np.array([first, other])).tolist() == [0, 1], "each prefix has a page of its own"
    mine = [first]
    for _ in range(16):
        offset = pages.allocate(4096, near=mine[-1])
        assert offset is not None
        mine.append(offset)
    homes = pages.pages_of(np.array(mine)).tolist()
    assert homes == [0] * 16 + [2], "the page is full; the next is an empty one, not the other prefix's"
    whole = fill(pages, 64 * KIB)
    assert len(whole) == 253
    last = [pages.allocate(4096, near=mine[-1]) for _ in range(30)]
    assert None not in last and pages.allocate(4096) is None, "at the end any free slot is taken"
    pages.check_integrity()


def test_prefixes_do_not_spread_over_a_tier() -> None:
    pages = allocator(16 * MIB)
    for _ in range(256):
        pages.allocate(4096)
    used = np.count_nonzero(pages.pages().used_slots)
    assert 4 * 256 <= used * 64 <= 4 * 256 + 16 * KIB // 128 + 64, "at most 1/128 of the capacity is free inside pages"
    assert pages.room(64 * KIB) > 230


def test_many_are_taken_as_one_by_one() -> None:
    pages = allocator(16 * MIB)
    near = pages.allocate(4096)
    offsets = pages.allocate_many(4096, 100, near)
    assert offsets is not None and len(set(offsets.tolist())) == 100
    homes = pages.pages_of(offsets)
    assert np.count_nonzero(homes == 0) == 15, "the rest of the first one's page comes first"
    assert len(set(homes.tolist())) == 7
    assert pages.allocate_many(4096, 0, near) is not None and pages.slots_used == 101
    assert pages.allocate_many(64 * KIB, 250) is None and pages.slots_used == 101, "all or nothing"
    pages.check_integrity()


def test_a_size_that_never_fits_changes_nothing() -> None:
    pages = allocator(MIB)
    assert pages.room(MIB + 1) == 0 and pages.allocate(2 * MIB) is None and pages.slots_per_page(2 * MIB) == 0
    assert pages.page_bytes == 4 * KIB
    with pytest.raises(MemoryMisuseError, match="0 bytes"):
        pages.allocate(0)


def test_sizes_share_from_the_first_page_that_is_empty() -> None:
    pages = allocator(16 * MIB)
    small = fill(pages, 4096)
    assert pages.room(64 * KIB) == 0
    pages.free_many(small[pages.pages_of(small) == small[0] // (64 * KIB)])
    assert pages.room(64 * KIB) == 1 and pages.allocate(64 * KIB) == 0
    pages.check_integrity()


def test_the_page_grows_under_slots_that_stay() -> None:
    """96 KiB comes when pages are 64 KiB: groups of three old pages are one new page once they are empty."""
    pages = allocator(16 * MIB)
    small = fill(pages, 4096)
    assert pages.page_bytes == 64 * KIB
    for offset in small[small < 192 * KIB].tolist():
        pages.free(offset)
    assert pages.room(96 * KIB) == 2 and pages.page_bytes == 192 * KIB
    pages.check_integrity()
    inside = (small >= 192 * KIB) & (small < 192 * KIB + 64 * KIB)
    pages.free_many(small[inside])  # a third of the next new page: too short for 96 KiB, good for what is shorter
    assert (pages.room(96 * KIB), pages.room(64 * KIB)) == (2, 4)
    assert pages.allocate(4096) == 192 * KIB, "the short page is used first"
    pages.free(192 * KIB)
    pages.free_many(small[(small >= 256 * KIB) & (small < 320 * KIB)])
    assert pages.room(96 * KIB) == 3, "two thirds are one free run"
    pages.check_integrity()


def test_a_huge_slot_enlarges_the_pages_for_as_long_as_it_is_there() -> None:
    pages = allocator(16 * MIB)
    kept = pages.allocate(4096)
    huge = pages.allocate(5 * MIB)
    assert kept is not None and huge is not None and pages.page_bytes >= 5 * MIB
    pages.check_integrity()
    pages.free(huge)
    assert pages.page_bytes == 64 * KIB
    pages.check_integrity()


@pytest.mark.parametrize("others", [0, 2, 2 * _FEW])
def test_misuse_is_refused_and_changes_nothing(others: int) -> None:
    """With few slots beside the wrong ones, which are freed one by one, and with many."""
    pages = allocator(16 * MIB)
    offsets = pages.allocate_many(8192, others + 2)
    assert offsets is not None
    wrong = [[-1], [16 * MIB], [int(offsets[0]) + 4096], [int(offsets[0]), int(offsets[0])], [8 * MIB]]
    for bad in wrong:
        with pytest.raises(MemoryMisuseError):
            pages.free_many(np.array([*offsets[1 : others + 1].tolist(), *bad], np.int64))
        if len(bad) == 1:
            with pytest.raises(MemoryMisuseError, match=f"no slot begins at offset {bad[0]}"):
                pages.free(bad[0])
    assert pages.slots_used == others + 2
    pages.free(int(offsets[0]))
    for again in (lambda: pages.free(int(offsets[0])), lambda: pages.free_many(offsets[: others + 1])):
        with pytest.raises(MemoryMisuseError, match="is not taken; free a slot once"):
            again()
    assert pages.slots_used == others + 1
    with pytest.raises(MemoryMisuseError, match="no slot begins"):
        pages.pages_of(np.array([0, 1 << 40]))
    pages.free_many(np.zeros(0, np.int64))
    pages.check_integrity()


def test_a_page_without_another_rest_than_the_capacitys() -> None:
    pages = allocator(5 * PAGE_BYTES)
    assert pages.room(2 * PAGE_BYTES) == 2
    assert len(fill(pages, 2 * PAGE_BYTES)) == 2 and pages.room(PAGE_BYTES) == 1
    pages.check_integrity()


# -- ranges --------------------------------------------------------------------------------------------------------


def test_ranges_come_close_and_go() -> None:
    pages = PageAllocator(8 * MIB)
    assert pages.room(4096) == 0 and pages.allocated().tolist() == []
    pages.check_integrity()
    for start in (1 << 40, 2 << 40, 3 << 40):
        pages.add(start, MIB)
    for wrong, nbytes in ((1 << 40, MIB), (4 << 40, 0)):
        with pytest.raises(MemoryMisuseError, match="cannot follow"):
            pages.add(wrong, nbytes)
    offsets = fill(pages, 4096)
    assert len(offsets) == 768 and pages.used_in(2 << 40) == MIB
    assert pages.allocate(4096, near=9 << 40) is None
    middle = offsets[(offsets >= 2 << 40) & (offsets < 3 << 40)]
    assert pages.occupied(2 << 40)[0].tolist() == sorted(middle.tolist())
    with pytest.raises(MemoryMisuseError, match="are taken"):
        pages.remove(2 << 40)
    pages.close(2 << 40)
    pages.free_many(middle[:-1])
    assert pages.room(4096) == 0, "closed"
    pages.check_integrity()
    pages.free(int(middle[-1]))
    pages.check_integrity()
    pages.remove(2 << 40)
    with pytest.raises(MemoryMisuseError, match="no range begins"):
        pages.remove(2 << 40)
    assert pages.slots_used == 512 and [start for start, *_ in pages.ranges()] == [1 << 40, 3 << 40]
    pages.free_many(offsets[offsets >= 3 << 40])
    pages.check_integrity()
    pages.close(3 << 40)
    assert pages.room(4096) == 0
    pages.reopen()
    assert pages.room(4096) == 256
    pages.check_integrity()


# -- after a restart -----------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_slots_are_claimed_as_they_were(seed: int) -> None:
    """Slots as an allocator of other sizes left them: claimed, freed, and then every size has its room again."""
    chance = random.Random(seed)
    sizes = [chance.randint(1, 12) * PAGE_BYTES for _ in range(3)]
    before = allocator(200 * PAGE_BYTES)
    held: dict[int, int] = {}
    for _ in range(60):
        size = chance.choice(sizes)
        offset = before.allocate(size)
        if offset is not None:
            held[offset] = size
        elif held:
            for gone in chance.sample(list(held), min(len(held), 5)):
                del held[gone]
                before.free(gone)
    held = {offset: size for offset, size in held.items() if chance.random() < 0.7}
    pages = allocator(200 * PAGE_BYTES)
    offsets = np.array(list(held), np.int64)
    pages.claim(offsets, np.array(list(held.values()), np.int64))
    pages.check_integrity()
    assert dict(zip(*(each.tolist() for each in pages.occupied()), strict=True)) == held
    for size in sizes:
        offset = pages.allocate(size)
        if offset is not None:
            assert all(offset + size <= other or other + length <= offset for other, length in held.items())
            pages.free(offset)
    pages.check_integrity()
    if len(offsets) > 3:
        pages.free_many(offsets[:3])
        pages.check_integrity()
        offsets = offsets[3:]
    for offset in offsets.tolist():
        pages.free(offset)
    pages.check_integrity()
    assert pages.used_bytes == 0 and pages.room(200 * PAGE_BYTES) == 1


def test_an_irregular_page_gives_out_nothing_until_it_is_empty() -> None:
    pages = PageAllocator(GIB)  # units of 16 KiB
    pages.add(0, 16 * MIB)
    pages.claim(np.array([8192, 0, 64 * KIB], np.int64), np.array([3 * PAGE_BYTES, 8192, 4096], np.int64))
    assert pages.pages().slot_bytes[0] == IRREGULAR and pages.pages().used_bytes[0] == 5 * PAGE_BYTES
    pages.check_integrity()
    with pytest.raises(MemoryMisuseError):
        pages.free(4096)
    with pytest.raises(MemoryMisuseError, match="no slot begins at offset 4096"):
        pages.free_many(np.array([0, 4096], np.int64))
    assert pages.used_in(0) == 6 * PAGE_BYTES
    pages.free_many(np.array([8192, 64 * KIB], np.int64))
    pages.check_integrity()
    pages.free(0)
    assert pages.pages().slot_bytes[0] == EMPTY and pages.room(4 * MIB) == 4
    pages.check_integrity()


def test_what_cannot_be_claimed() -> None:
    pages = allocator(MIB)
    one = np.array([4096], np.int64)
    for offsets, sizes, message in [
        ([0, 4096], [8192, 4096], "two slots have the bytes at offset 4096"),
        ([MIB], [4096], "no slot begins"),
        ([MIB - 4096], [8192], "reaches outside its range"),
    ]:
        with pytest.raises(MemoryMisuseError, match=message):
            pages.claim(np.array(offsets, np.int64), np.array(sizes, np.int64))
    pages.claim(np.zeros(0, np.int64), np.zeros(0, np.int64))
    pages.claim(one, one)
    with pytest.raises(MemoryMisuseError, match="1 slots are taken already"):
        pages.claim(one * 2, one)
    beside = PageAllocator(2 * MIB)
    beside.add(0, MIB)
    beside.add(MIB, MIB)
    with pytest.raises(MemoryMisuseError, match="reaches outside its range"):
        beside.claim(np.array([MIB - 4096], np.int64), np.array([8192], np.int64))


# -- eviction ------------------------------------------------------------------------------------------------------


def test_single_slots_go_when_they_are_worth_less_than_any_page() -> None:
    pages = allocator(MIB)
    large, small = pages.allocate_many(64 * KIB, 8), fill(pages, 4096)
    assert large is not None
    offsets = np.concatenate([large, small])
    worth = np.concatenate([np.arange(8.0), np.full(len(small), 5.0)])
    victims = choose_victims(pages, 64 * KIB, 3, offsets, worth)
    assert (victims.positions.tolist(), victims.slots) == ([0, 1, 2], 3)
    evictable = np.ones(len(offsets), np.bool_)
    evictable[:7] = False
    victims = choose_victims(pages, 64 * KIB, 1, offsets, worth, evictable)
    gone = offsets[victims.positions]
    assert victims.slots == 1 and len(gone) == 16 and len(set((gone // (64 * KIB)).tolist())) == 1
    evictable[8::16] = False  # a slot of every page
    victims = choose_victims(pages, 64 * KIB, 2, offsets, worth, evictable)
    assert (victims.positions.tolist(), victims.slots) == ([7], 1), "there is no more"


def test_a_page_is_worth_its_most_valuable_slot() -> None:
    pages = allocator(MIB)
    small = fill(pages, 4096)
    pages.slots_per_page(64 * KIB)
    rng = np.random.default_rng(1)
    worth = rng.random(len(small))
    victims = choose_victims(pages, 64 * KIB, 1, small, worth)
    by_page = [worth[small // (64 * KIB) == page].max() for page in range(16)]
    assert set((small[victims.positions] // (64 * KIB)).tolist()) == {int(np.argmin(by_page))}
    assert len(victims.positions) == 16 and victims.slots == 1, "sixteen short pages that are one when they are empty"
    pages.free_many(small[victims.positions])
    assert pages.room(64 * KIB) == 1


def test_slots_are_kept_again_where_the_last_page_gives_more_than_was_missing() -> None:
    pages = allocator(16 * MIB)
    small, large = pages.allocate_many(4096, 32), fill(pages, 64 * KIB)
    assert small is not None
    offsets = np.concatenate([small, large])
    worth = np.concatenate([np.arange(32.0), np.full(len(large), 40.0)])
    worth[len(small)] = 20.0  # the page is worth 20: slots 0 to 19 and then it
    victims = choose_victims(pages, 4096, 22, offsets, worth)
    gone = offsets[victims.positions]
    assert victims.slots == 22 and np.count_nonzero(gone < 128 * KIB) == 6 and len(gone) == 7
    assert set(worth[victims.positions].tolist()) == {0, 1, 2, 3, 4, 5, 20}


def test_pages_that_are_half_empty_go_first_when_much_is_left_behind_in_them() -> None:
    pages = allocator(16 * MIB)
    small = pages.allocate_many(4096, 16 * 64)
    assert small is not None
    pages.free_many(small[np.arange(len(small)) % 16 > 3])
    left = small[::16]
    large = fill(pages, 64 * KIB)
    offsets = np.concatenate([np.concatenate([left, left + 4096, left + 8192, left + 12288]), large])
    worth = np.concatenate([np.full(256, 9.0), np.full(len(large), 1.0)])
    victims = choose_victims(pages, 64 * KIB, 5, offsets, worth)
    assert len(victims.positions) == 20 and (worth[victims.positions] == 9.0).all() and victims.slots == 5


def test_nothing_is_evicted_where_nothing_is_wanted_or_can_be_had() -> None:
    pages = allocator(MIB)
    small = fill(pages, 4096)
    closed = allocator(MIB)
    offsets = fill(closed, 4096)
    closed.close(0)
    worth = np.zeros(len(small))
    for victims in [
        choose_victims(pages, 4096, 0, small, worth),
        choose_victims(pages, 2 * MIB, 1, small, worth),
        choose_victims(pages, 4096, 1, small[:0], worth[:0]),
        choose_victims(pages, 4096, 1, small, worth, np.zeros(len(small), np.bool_)),
        choose_victims(closed, 4096, 1, offsets, worth),
    ]:
        assert victims.positions.tolist() == [] and victims.slots == 0


def test_a_full_tier_stays_full_and_no_more_than_a_page_too_many_goes() -> None:
    """Sizes whose share drifts, recency that has nothing to do with the place."""
    for sizes, capacity in [((4, 64), 8 * MIB), ((96, 160, 1000), 96 * MIB), ((4, 96, 512), 96 * MIB)]:
        chance = random.Random(1)
        pages = allocator(capacity)
        held: dict[int, tuple[int, float]] = {}
        is_full = False
        for turn in range(1500):
            share = [1 + math.sin(turn / 200 * (at + 1) + at) for at in range(len(sizes))]
            size = chance.choices(sizes, share)[0] * KIB
            count = chance.choice([1, 1, 2, 5])
            missing = count - pages.room(size)
            if missing > 0:
                is_full = True
                offsets = np.array(list(held), np.int64)
                worth = np.array([recency for _, recency in held.values()])
                victims = choose_victims(pages, size, missing, offsets, worth)
                gone = offsets[victims.positions]
                evicted = sum(held.pop(offset)[0] for offset in gone.tolist())
                pages.free_many(gone)
                assert victims.slots >= missing and pages.room(size) >= count
                assert evicted <= missing * size + pages.page_bytes
            near = None
            for _ in range(count):
                near = pages.allocate(size, near)
                assert near is not None
                held[near] = size, chance.random()
            if is_full:
                assert pages.used_bytes >= 0.95 * capacity, (sizes, turn)
            if turn % 300 == 0:
                pages.check_integrity()


# -- integrity -----------------------------------------------------------------------------------------------------


def planted() -> PageAllocator:
    """Pages of 64 KiB: the first with slots of 4 KiB, a quarter of the second irregular, the third with one slot."""
    pages = PageAllocator(GIB)  # units of 16 KiB
    pages.add(0, 16 * MIB)
    offsets = np.array([0, 4096, 64 * KIB, 64 * KIB + 8192, 128 * KIB], np.int64)
    pages.claim(offsets, np.array([4096, 4096, 8192, 4096, 64 * KIB], np.int64))
    pages.check_integrity()
    return pages


def table(name: str, at: int, value: Any) -> Callable[[PageAllocator], None]:
    def change(pages: PageAllocator) -> None:
        getattr(pages._table, name)[at] = value

    return change


def lists(name: str, at: int, value: Any) -> Callable[[PageAllocator], None]:
    def change(pages: PageAllocator) -> None:
        getattr(pages._lists, name)[at] = value

    return change


def one_page_more(pages: PageAllocator) -> None:
    pages.used_bytes += 4096


def one_slot_more(pages: PageAllocator) -> None:
    pages._lists.free_bytes += 4096


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (table("head", 16, 12), "do not cover the range"),
        (table("length", 0, 4096), "do not cover the range"),
        (table("slot", 1, 4096), "entry 1 is no page"),
        (table("used", 0, 3), "page 0 of 65536 bytes with slots of 4096 has 16 slots, 2 of them taken; 16 and 3 are"),
        (table("count", 0, 15), "15 and 2 are counted"),
        (table("slot", 0, 8192), "page 0"),
        (table("slot", 8, IRREGULAR), "page 8"),
        (table("taken", 0, None), "page 0"),
        (table("taken", 12, bytearray(1)), "page 12"),
        (table("taken", 0, bytearray(16)), "page 0"),
        (table("taken", 4, {}), "page 4"),
        (table("taken", 4, {65536: 8192, 65536 + 4096: 4096}), "page 4"),
        (table("taken", 4, {65536 - 4096: 8192, 65536 + 8192: 4096}), "page 4"),
        (table("taken", 4, {65536: 4096, 65536 + 12288: 8192}), "page 4"),
        (one_page_more, "bytes are taken and"),
        (one_slot_more, "bytes of free slots are"),
        (lists("free", 4096, 13), "free slots are"),
        (lists("free", 8192, -1), "free slots are"),
        (lists("pages_of_size", 4096, 2), "pages by size are"),
        (lists("partial", 4096, []), "pages with free slots are"),
        (lists("empty", 64 * KIB, [12]), "empty pages are"),
    ],
)
def test_every_contradiction_is_found_and_stays_found(plant: Callable[[PageAllocator], None], message: str) -> None:
    pages = planted()
    plant(pages)
    for _ in range(2):
        with pytest.raises(IntegrityError, match=message):
            pages.check_integrity()


def test_free_bytes_that_are_cut_wrongly_are_found() -> None:
    pages = planted()
    pages._table.length[12], pages._table.length[16] = 128 * KIB, 0
    pages._table.head[12:20] = 12
    with pytest.raises(IntegrityError, match="the free unit 16 belongs to page 16"):
        pages.check_integrity()


def test_a_list_that_promises_a_slot_that_is_not_there_is_an_error_not_a_wrong_slot() -> None:
    pages = planted()
    pages._table.taken[0] = bytearray(b"\1" * 16)
    with pytest.raises(IntegrityError, match="listed as one with a free slot"):
        pages.allocate(4096, near=0)
    with pytest.raises(IntegrityError, match="listed as one with a free slot"):
        pages.allocate_many(4096, 1, near=0)
    pages = planted()
    pages._lists.free[4096] = 1 << 20
    with pytest.raises(IntegrityError, match="counted as free and are not found"):
        pages.allocate_many(4096, 1 << 19)
    pages._lists.empty = {64 * KIB: [1]}
    with pytest.raises(IntegrityError, match="not listed"):
        pages._vacate(8, 64 * KIB)


# -- pages with slots of any sizes -----------------------------------------------------------------------------------


def mixed_tier(pages: int = 8) -> PageAllocator:
    tier = PageAllocator(pages * MIB)
    tier.add(0, pages * MIB)
    return tier


def test_slots_of_any_sizes_lie_one_behind_the_other() -> None:
    tier = mixed_tier()
    sizes = [5 * PAGE_BYTES, 7 * PAGE_BYTES, 100, 3 * PAGE_BYTES]
    offsets = [tier.allocate_mixed(nbytes) for nbytes in sizes]
    assert offsets == [0, 5 * PAGE_BYTES, 12 * PAGE_BYTES, 13 * PAGE_BYTES]
    assert tier.used_bytes == 16 * PAGE_BYTES and tier.slots_used == 4


def test_holes_join_and_the_best_fitting_one_is_used_again() -> None:
    tier = mixed_tier()
    offsets = [tier.allocate_mixed(PAGE_BYTES) or 0 for _ in range(12)]
    for at in (1, 2, 3, 7, 8, 6):
        tier.free(offsets[at])
    assert tier.allocate_mixed(3 * PAGE_BYTES) == offsets[1]
    assert tier.allocate_mixed(2 * PAGE_BYTES) == offsets[6]
    assert tier.allocate_mixed(PAGE_BYTES) == offsets[8]
    tier.check_integrity()


def test_a_mixed_page_that_is_empty_serves_any_size() -> None:
    tier = mixed_tier(1)
    mixed = []
    while (offset := tier.allocate_mixed(9 * PAGE_BYTES)) is not None:
        mixed.append(offset)
    assert tier.allocate(MIB // 4) is None
    tier.free_many(np.array(mixed, np.int64))
    assert tier.room(MIB // 4) == 4


def test_a_tier_of_slots_of_any_sizes_is_nearly_full_when_it_says_so() -> None:
    tier, rng = mixed_tier(256), np.random.default_rng(0)
    while tier.allocate_mixed(int(rng.integers(40, 60)) * PAGE_BYTES) is not None:
        pass
    assert tier.used_bytes > 0.95 * 256 * MIB


def test_what_a_hole_is_said_to_be_is_checked() -> None:
    tier = mixed_tier()
    tier.allocate_mixed(PAGE_BYTES)
    tier._mixed._holes[0][0] = (0, PAGE_BYTES)
    with pytest.raises(IntegrityError, match="the free space of mixed pages"):
        tier.check_integrity()
    tier = mixed_tier()
    tier._mixed._largest[0], tier._mixed._by_largest, tier._mixed._holes[0] = 4096, [(4096, 0)], [(0, 4096)]
    with pytest.raises(IntegrityError, match="listed as a mixed one"):
        tier.allocate_mixed(PAGE_BYTES)


# -- against a model -----------------------------------------------------------------------------------------------


class PagesModel(RuleBasedStateMachine):
    """The allocator against a dict of slots; sizes come and go, so that the page size changes under them."""

    sizes = (1, 4096, 3 * PAGE_BYTES, 5 * PAGE_BYTES, 16 * PAGE_BYTES, 50 * PAGE_BYTES)

    @initialize(ranges=st.lists(st.integers(1, 90), min_size=1, max_size=3))
    def start(self, ranges: list[int]) -> None:
        self.bounds = {number << 30: units * PAGE_BYTES for number, units in enumerate(ranges)}
        self.pages = PageAllocator(sum(self.bounds.values()))
        for start, nbytes in self.bounds.items():
            self.pages.add(start, nbytes)
        self.held: dict[int, int] = {}
        self.mixed: set[int] = set()
        """Those of `held` that may lie in mixed pages, and some that are free again."""
        self.closed: set[int] = set()

    def enter(self, offset: int, size: int) -> None:
        start = offset >> 30 << 30
        assert start not in self.closed and offset + size <= start + self.bounds[start]
        assert all(offset + size <= other or other + length <= offset for other, length in self.held.items())
        self.held[offset] = size
        self.mixed.discard(offset)

    @rule(nbytes=st.sampled_from(sizes), data=st.data())
    def allocate(self, nbytes: int, data: st.DataObject) -> None:
        near = data.draw(st.sampled_from([None, *self.held]))
        room = self.pages.room(nbytes)
        offset = self.pages.allocate(nbytes, near)
        assert (offset is None) == (room == 0)
        if offset is not None:
            assert self.pages.room(nbytes) == room - 1
            self.enter(offset, round_to_slot(nbytes))

    @rule(nbytes=st.integers(1, 20 * PAGE_BYTES), data=st.data())
    def allocate_mixed(self, nbytes: int, data: st.DataObject) -> None:
        """Nowhere else is room as long as a hole of a mixed page is large enough."""
        near = data.draw(st.sampled_from([None, *self.held]))
        size = round_to_slot(nbytes)
        holes = [bytes_of for bytes_of, _ in self.pages._mixed._by_largest]
        before = len(self.pages.pages())
        offset = self.pages.allocate_mixed(nbytes, near)
        if offset is None:
            assert max(holes, default=0) < size
            return
        if holes and holes[-1] >= size:
            assert len(self.pages.pages()) == before
        self.enter(offset, size)
        self.mixed.add(offset)

    @rule(nbytes=st.sampled_from(sizes), count=st.integers(0, 40))
    def allocate_many(self, nbytes: int, count: int) -> None:
        room = self.pages.room(nbytes)
        offsets = self.pages.allocate_many(nbytes, count)
        assert (offsets is None) == (room < count)
        if offsets is not None:
            assert len(offsets) == count and self.pages.room(nbytes) == room - count
            for offset in offsets.tolist():
                self.enter(offset, round_to_slot(nbytes))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.held)))
        self.pages.free(offset)
        del self.held[offset]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_many(self, data: st.DataObject) -> None:
        offsets = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True, max_size=60))
        self.pages.free_many(np.array(offsets, np.int64))
        for offset in offsets:
            del self.held[offset]

    @rule(nbytes=st.sampled_from(sizes), count=st.integers(1, 5), seed=st.integers(0, 99))
    def evict(self, nbytes: int, count: int, seed: int) -> None:
        size = round_to_slot(nbytes)
        room = self.pages.room(nbytes)
        offsets = np.array(sorted(self.held), np.int64)
        worth = np.random.default_rng(seed).random(len(offsets))
        victims = choose_victims(self.pages, nbytes, count, offsets, worth, pages_alone=seed % 3 == 0)
        self.leave(offsets[victims.positions].tolist(), count, size)
        assert self.pages.room(nbytes) >= room

    def leave(self, gone: list[int], count: int, size: int) -> None:
        """Frees the slots chosen for `count` of `size` bytes: no more than these and a page."""
        longest = max(int(self.pages.pages().nbytes.max()), self.pages.page_bytes)
        wasted = self.pages.page_bytes % size if size <= self.pages.page_bytes else 0
        assert sum(self.held[offset] for offset in gone) <= count * (size + wasted) + longest
        self.pages.free_many(np.array(gone, np.int64))
        for offset in gone:
            del self.held[offset]

    @rule(nbytes=st.integers(1, 20 * PAGE_BYTES), count=st.integers(1, 5), seed=st.integers(0, 99))
    def evict_mixed(self, nbytes: int, count: int, seed: int) -> None:
        size = round_to_slot(nbytes)
        offsets = np.array(sorted(self.held), np.int64)
        worth = np.random.default_rng(seed).random(len(offsets))
        victims = choose_mixed_victims(self.pages, nbytes, count, offsets, worth)
        self.leave(offsets[victims.positions].tolist(), count, size)
        if victims.slots:
            offset = self.pages.allocate_mixed(nbytes)
            assert offset is not None
            self.pages.free(offset)

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.bounds)))
        self.pages.close(start)
        self.closed.add(start)

    @rule()
    def reopen(self) -> None:
        self.pages.reopen()
        self.closed.clear()

    @rule()
    def restart(self) -> None:
        """Claim what is held anew."""
        self.pages.clear()
        self.pages.check_integrity()
        sizes = np.array(list(self.held.values()), np.int64)
        mixed = np.array([offset in self.mixed for offset in self.held], np.bool_)
        self.pages.claim(np.array(list(self.held), np.int64), sizes, mixed)

    @rule()
    def copy(self) -> None:
        """What happens to a copy does not happen to the original."""
        other = self.pages.copy()
        other.check_integrity()
        assert [each.tolist() for each in other.occupied()] == [each.tolist() for each in self.pages.occupied()]
        other.free_many(np.array(list(self.held), np.int64))
        other.allocate(12288)
        other.reopen()
        other.check_integrity()

    @rule()
    def empty(self) -> None:
        self.pages.free_many(np.array(list(self.held), np.int64))
        self.held.clear()
        self.pages.check_integrity()
        for size in (4096, 5 * PAGE_BYTES):
            usable = [nbytes for start, nbytes in self.bounds.items() if start not in self.closed]
            assert self.pages.room(size) <= sum(nbytes // size for nbytes in usable)
        assert self.pages.room(4096) == sum(nbytes // 4096 for nbytes in usable), "nothing is lost for good"

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "pages"):
            return
        self.pages.check_integrity()
        assert self.pages.used_bytes == sum(self.held.values()) and self.pages.slots_used == len(self.held)
        assert dict(zip(*(each.tolist() for each in self.pages.occupied()), strict=True)) == self.held
        for start in self.bounds:
            inside = sum(size for offset, size in self.held.items() if offset >> 30 << 30 == start)
            assert self.pages.used_in(start) == inside


TestPagesModel = PagesModel.TestCase
TestPagesModel.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
