"""Jenga's two levels over frames: parts of several sizes share large pages, and any large page serves any size."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from prefixd_swap.errors import IntegrityError, MemoryMisuseError
from prefixd_swap.tiers import NO_SLOT, PagedGpuTier
from prefixd_swap.vmem import FrameId, FramePool, create_memory

FRAME = 4096
WIDTHS = (1, 2, 3, 8)


@pytest.fixture
def pool() -> Iterator[FramePool]:
    with create_memory("cpu", FRAME) as memory:
        pool = FramePool(memory, FRAME, 48, 96)
        yield pool
        pool.close()


def frames_of(slot: int, width: int) -> set[int]:
    return set(range(slot, slot + width))


def sizes(*widths: int) -> list[int]:
    return [width * FRAME for width in widths]


def test_a_large_page_of_a_large_tier_is_a_common_multiple_of_all_sizes() -> None:
    with create_memory("cpu", FRAME) as memory:
        pool = FramePool(memory, FRAME, 6 * 64 * 4)
        tier = PagedGpuTier(pool, [2, 3])
        assert tier.large_page_bytes % (math.lcm(2, 3) * FRAME) == 0
        blocks = tier.allocate(sizes(2, 3), 40)
        assert len(blocks) == 40 and tier.used_bytes == 40 * 5 * FRAME
        tier.check_integrity()
        pool.close()


def test_a_part_is_its_frames_side_by_side_and_none_is_given_twice(pool: FramePool) -> None:
    tier = PagedGpuTier(pool, WIDTHS)
    blocks = tier.allocate([2 * FRAME, 3 * FRAME - 1, FRAME], 6)
    assert blocks.shape == (6, 3)
    taken = [frames_of(slot, width) for row in blocks.tolist() for slot, width in zip(row, (2, 3, 1), strict=True)]
    assert len(set().union(*taken)) == sum(map(len, taken)) == 36
    assert tier.frames_of(blocks[0].tolist()) == 6 and tier.footprint(sizes(2, 3, 1)) == 6 * FRAME
    assert (tier.addresses(blocks) == pool.first_address + blocks * FRAME).all()
    assert tier.allocated().tolist() == sorted(blocks.ravel().tolist())
    tier.free(blocks)
    assert tier.used_bytes == tier.stranded_bytes == 0 and tier.room(48 * FRAME) == 1


def test_pages_of_a_request_lie_together_so_that_its_end_frees_whole_large_pages() -> None:
    with create_memory("cpu", FRAME) as memory:
        pool = FramePool(memory, FRAME, 4096)
        tier = PagedGpuTier(pool, [1])
        page = tier.large_page_bytes // FRAME
        requests: list[list[int]] = [[], []]
        for _ in range(page):
            for own in requests:  # in turns, as running requests get their blocks
                near = np.array(own[-1:] or [NO_SLOT])
                own += tier.allocate(sizes(1), 1, near).ravel().tolist()
        pages = [{slot // page for slot in own} for own in requests]
        assert page > 1 and [len(own) for own in pages] == [1, 1] and pages[0] != pages[1]
        tier.free(requests[0])
        assert not tier.stranded_bytes
        pool.close()


def test_what_is_free_inside_large_pages_is_counted(pool: FramePool) -> None:
    tier = PagedGpuTier(pool, [3])
    slots = tier.allocate(sizes(3), 1)
    page = tier.large_page_bytes // FRAME
    assert tier.stranded_bytes == (page - 3) * FRAME
    tier.free(slots)
    assert tier.stranded_bytes == 0


def test_frames_that_left_come_back_and_new_ones_join(pool: FramePool) -> None:
    tier = PagedGpuTier(pool, WIDTHS)
    leaving = [FrameId(slot) for slot in tier.allocate([FRAME], 20).ravel().tolist()]
    tier.withdraw(leaving)
    assert (pool.capacity, tier.used_bytes, len(tier.allocated())) == (28, 0, 0)
    with pytest.raises(MemoryMisuseError, match="was withdrawn from the gpu tier"):
        tier.free(leaving[:1])
    pool.destroy(leaving)
    pool.forget(leaving)
    tier.check_integrity()
    tier.admit(pool.create(44))
    assert pool.capacity == 72 and tier.room(FRAME) == 72
    tier.check_integrity()
    slots = tier.allocate(sizes(8), 9)
    tier.free(slots)
    assert not tier.used_bytes


def test_a_block_that_never_fits_is_refused_and_one_that_does_not_fit_now_takes_nothing(pool: FramePool) -> None:
    tier = PagedGpuTier(pool, WIDTHS)
    assert not tier.ever_fits(sizes(40, 9))
    with pytest.raises(MemoryMisuseError, match="never fits into the gpu tier of 48 frames of 4096 bytes"):
        tier.allocate(sizes(40, 9), 1)
    held = tier.allocate(sizes(8), 5)
    before = tier.used_bytes
    assert len(tier.allocate(sizes(8, 8), 1)) == 0 and tier.used_bytes == before
    tier.free(held)
    tier._width[3] = 2
    with pytest.raises(IntegrityError, match="are counted as taken"):
        tier.check_integrity()


def evict(tier: PagedGpuTier, width: int, worth: dict[int, float]) -> set[int]:
    """Frees what is chosen to go for one more part; `worth` has the slots that may go. Returns them."""
    choose = tier.choose_victims
    assert choose is not None
    slots = np.array(sorted(worth), np.int64)
    chosen = slots[choose(width * FRAME, 1, slots, np.array([worth[slot] for slot in slots.tolist()])).positions]
    tier.free(chosen)
    return set(chosen.tolist())


def test_jengas_order_evicts_a_large_page_before_it_uses_what_is_free_in_another_requests() -> None:
    """Section 5.4, its five steps."""
    with create_memory("cpu", FRAME) as memory:
        pool = FramePool(memory, FRAME, 1024)
        tier = PagedGpuTier(pool, [1], jenga_order=True)
        page = tier.large_page_bytes // FRAME
        pages = 1024 // page
        assert page > 2

        def allocate(near: int = NO_SLOT, count: int = 1) -> list[int]:
            return tier.allocate(sizes(1), count, np.array([near])).ravel().tolist()

        firsts = [slot for _ in range(pages) for slot in allocate()]
        assert sorted(slot // page for slot in firsts) == list(range(pages)), "step 2: a large page for each request"
        assert allocate(firsts[0])[0] // page == firsts[0] // page, "step 1: beside its own"
        assert allocate() == [] and tier.room(FRAME) == 0, "what is free belongs to other requests"
        assert evict(tier, 1, {firsts[3]: 1.0, firsts[1]: 2.0}) == {firsts[3]}, "step 3: the page used least recently"
        (last,) = allocate()
        assert last // page == firsts[3] // page
        assert evict(tier, 1, {firsts[0]: 1.0}) == set(), "its page has another slot, which may not go"
        assert tier.relent() and not tier.relent()
        free = 1024 - pages - 1
        assert tier.room(FRAME) == free
        assert len(allocate(count=free - 1)) == free - 1, "step 4: any free page"
        assert allocate() == [], "in order again for the next one"
        assert tier.relent() and len(allocate()) == 1
        assert tier.relent() and allocate() == []
        assert evict(tier, 1, {firsts[0]: 1.0}) == {firsts[0]}, "step 5: a page alone"
        assert allocate() == [firsts[0]]
        tier.check_integrity()
        pool.close()


class PagedFrames(RuleBasedStateMachine):
    """Against a set of frames: what is given is free, side by side and given once; pages and slots add up."""

    blocks: Bundle[tuple[tuple[int, ...], tuple[int, ...]]] = Bundle("blocks")

    @initialize(count=st.integers(20, 90))
    def start(self, count: int) -> None:
        self.memory = create_memory("cpu", FRAME)
        self.pool = FramePool(self.memory, FRAME, count, 120)
        self.tier = PagedGpuTier(self.pool, WIDTHS)
        self.taken: dict[int, int] = {}

    @rule(target=blocks, widths=st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=3), near=st.booleans())
    def allocate(self, widths: list[int], near: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if not self.tier.ever_fits(sizes(*widths)):
            return (), ()
        hint = np.array([min(self.taken, default=NO_SLOT)] * len(widths)) if near else None
        alone, room = len(widths) == 1, self.tier.room(widths[0] * FRAME)
        slots = self.tier.allocate(sizes(*widths), 1, hint)
        if not len(slots):
            assert not (alone and room)
            return (), ()
        assert not alone or room
        for slot, width in zip(slots[0].tolist(), widths, strict=True):
            held = set[int]().union(*(frames_of(*each) for each in self.taken.items()))
            assert held.isdisjoint(frames_of(slot, width)) and slot + width <= self.pool.table.size
            self.taken[slot] = width
        return tuple(slots[0].tolist()), tuple(widths)

    @rule(block=consumes(blocks))
    def free(self, block: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        self.tier.free(block[0])
        for slot in block[0]:
            del self.taken[slot]

    @rule()
    def empty_large_pages_serve_any_size(self) -> None:
        whole = self.tier.large_page_bytes // FRAME
        empty = self.tier.room(whole * FRAME)
        for width in WIDTHS:
            assert self.tier.room(width * FRAME) >= empty * (whole // width)

    @rule(count=st.integers(1, 6))
    def shrink(self, count: int) -> None:
        slots = self.tier.allocate([FRAME], min(count, self.pool.capacity - 1)).ravel().tolist()
        leaving = [FrameId(slot) for slot in slots]
        if leaving and len(leaving) < self.pool.capacity:
            self.tier.withdraw(leaving)
            self.pool.destroy(leaving)
            self.pool.forget(leaving)
        else:
            self.tier.free(slots)

    @precondition(lambda self: self.pool.table.count < 100)
    @rule(count=st.integers(1, 20))
    def grow(self, count: int) -> None:
        self.tier.admit(self.pool.create(count))

    @invariant()
    def it_adds_up(self) -> None:
        if not hasattr(self, "tier"):
            return
        self.tier.check_integrity()
        assert self.tier.used_bytes == sum(self.taken.values()) * FRAME
        assert self.tier.allocated().tolist() == sorted(self.taken)
        assert self.tier.used_bytes + self.tier.stranded_bytes <= self.tier.capacity_bytes

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.pool.close()
            self.memory.close()


TestPagedFrames = PagedFrames.TestCase
TestPagedFrames.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
