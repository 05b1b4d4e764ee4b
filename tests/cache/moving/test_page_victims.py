"""Pages to be emptied are chosen in slices and in a thread where tables are large; what is returned may go, and with it
records without bytes that nothing continues."""

from __future__ import annotations

import asyncio
import math
from functools import partial

import numpy as np
import pytest

from prefixd.base.tenancy.tenants import Tenants
from prefixd.cache import Tiers, Trie
from prefixd.cache.index.trie import CPU, DISK
from prefixd.cache.moving.page_victims import _worth, find_page_victims
from prefixd.cache.moving.victims import Limits, Search, no_limits
from prefixd.cache.placement.tenant_use import Losses, TenantUse
from prefixd_swap import PageAllocator, Victims, choose_page_victims, create_eviction_policy
from prefixd_swap.transfers import Transfers
from tests.cache.index.entering import enter_block
from tests.cache.moving.test_victims import AbsentStore
from tests.tries import remove_row

SMALL, LARGE = 4096, 65536
CAPACITY = 64 * LARGE


class Tier:
    """A full tier: blocks of 4 KiB, but for four pages with one block of 64 KiB each, which was used last."""

    def __init__(self) -> None:
        self.pages = PageAllocator(CAPACITY)
        self.pages.add(0, CAPACITY)
        self.tries = [Trie(1, (SMALL,), 0), Trie(1, (LARGE,), 1)]
        self.number = 0
        for _ in range(4):
            self.put(1, used_s=1e6)
        while self.pages.room(SMALL):
            self.put(0, used_s=float(self.number))

    def put(self, ordinal: int, used_s: float) -> None:
        trie = self.tries[ordinal]
        self.number += 1
        row = enter_block(trie, self.number.to_bytes(16, "little"), self.number.to_bytes(4, "little"))
        slot = self.pages.allocate(trie.part_bytes[0])
        assert row is not None and slot is not None
        trie.touch(np.array([row]), used_s)
        trie.put_copies(np.array([row]), CPU, np.array([[slot]]), 0.0)

    async def victims(
        self, sizes: list[int], want: int, limits: Limits = no_limits, now_s: float = 0.0
    ) -> list[tuple[int, list[int]]]:
        def copied() -> partial[Victims]:
            return partial(choose_page_victims, self.pages.copy())

        found = await find_page_victims(
            self.tries,
            Search(CPU, create_eviction_policy("lru", 0), demotable=False, now_s=now_s),
            sizes,
            want,
            partial(choose_page_victims, self.pages),
            for_thread=copied,
            limits=limits,
        )
        return [(trie.ordinal, rows.tolist()) for trie, rows in found]


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("index.scan", "moving.page_victims"):
        monkeypatch.setattr(f"prefixd.cache.{module}.SCANNED_AT_ONCE", 16)


@pytest.mark.parametrize(("sizes", "want"), [([LARGE], 1), ([LARGE], 3), ([SMALL], 5), ([SMALL, LARGE], 2)])
async def test_slices_and_a_thread_find_the_same(sizes: list[int], want: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Tier()
    expected = await tier.victims(sizes, want)
    assert expected
    for module in ("index.scan", "moving.page_victims"):
        monkeypatch.setattr(f"prefixd.cache.{module}.SCANNED_AT_ONCE", 16)
    assert await tier.victims(sizes, want) == expected


@pytest.mark.usefixtures("small_slices")
async def test_a_block_that_is_held_meanwhile_stays_and_another_page_goes() -> None:
    tier = Tier()
    ((_, first),) = await tier.victims([LARGE], 1)
    search = asyncio.create_task(tier.victims([LARGE], 1))
    for _ in range(3):
        await asyncio.sleep(0)
    tier.tries[0].hold(np.array(first[:1]), CPU)
    ((ordinal, rows),) = await search
    assert (ordinal, len(rows)) == (0, LARGE // SMALL), "a whole page, as if it had been held from the start"
    assert first[0] not in rows


@pytest.mark.usefixtures("small_slices")
async def test_no_turn_reads_more_than_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Tier()
    read = [0]
    held = Trie.held

    def counting(trie: Trie, rows: np.ndarray, which: int) -> np.ndarray:
        read[-1] += len(rows)
        return held(trie, rows, which)

    monkeypatch.setattr(Trie, "held", counting)
    search = asyncio.create_task(tier.victims([LARGE], 1))
    while not search.done():
        read.append(0)
        await asyncio.sleep(0)
    assert sum(read) >= sum(trie.rows for trie in tier.tries)
    assert max(read) <= 2 * 16


def chain(blocks: int, tier: int) -> tuple[Trie, list[int]]:
    """A prompt of which every block has a copy in `tier`, in slots 0, 1, ..."""
    trie = Trie(1, (4096,), 0)
    keys = np.frombuffer(b"".join(block.to_bytes(16, "little") for block in range(blocks)), np.uint8).reshape(-1, 16)
    rows, _ = trie.insert_path(-1, 0, keys, np.arange(blocks, dtype=np.uint32)[:, None], 0.0)
    trie.put_copies(rows, tier, np.arange(blocks)[:, None], 0.0)
    return trie, rows.tolist()


async def leaving(trie: Trie, slots: set[int]) -> list[int]:
    """The rows that leave the disk where `slots` are chosen."""

    def choose(nbytes: int, count: int, taken: np.ndarray, worth: object, may: object, allow: object) -> Victims:
        return Victims(np.flatnonzero(np.isin(taken, sorted(slots))), len(slots))

    policy = create_eviction_policy("lru", 0)
    found = await find_page_victims([trie], Search(DISK, policy, demotable=False), (65536,), 1, choose)
    return [row for _, rows in found for row in rows.tolist()]


async def test_a_record_without_bytes_that_nothing_continues_goes() -> None:
    trie, rows = chain(4, DISK)
    for row in rows[:3]:
        trie.drop_copies(np.array([row]), DISK, np.array([trie.all_groups], np.uint8))
    assert await leaving(trie, set()) == [], "block 3 has bytes, and needs the records before it"
    assert await leaving(trie, {3}) == [rows[3]]
    trie.drop_copies(np.array(rows[3:4]), DISK)
    remove_row(trie, rows[3])
    assert await leaving(trie, set()) == [rows[2]]
    last = np.array([rows[2]])
    trie.hold(last, DISK)
    assert await leaving(trie, set()) == []
    trie.unhold(last, DISK)
    trie.retain(last)
    assert await leaving(trie, set()) == []
    trie.unretain(last)
    trie.drop_copies(np.array(rows[2:3]), DISK)
    remove_row(trie, rows[2])
    assert await leaving(trie, set()) == [rows[1]]


async def test_a_record_without_bytes_goes_though_there_is_a_copy_above() -> None:
    trie, (row,) = chain(1, CPU)
    trie.put_copies(np.array([row]), DISK, np.array([[7]]), 0.0)
    trie.drop_copies(np.array([row]), DISK, np.array([trie.all_groups], np.uint8))
    assert trie.any_part[row] & (1 << DISK) and await leaving(trie, set()) == [row]


def test_of_slots_with_one_score_the_deeper_is_worth_less() -> None:
    worth = _worth(np.array([2.5, 1.0, 2.5, 1.0, 7.0]), np.array([0, 3, 9, 4, 2], np.int32), np.zeros(5, np.int8))
    assert np.argsort(worth).tolist() == [3, 1, 2, 0, 4]
    assert not len(_worth(np.zeros(0), np.zeros(0, np.int32), np.zeros(0, np.int8)))


async def test_pages_with_a_higher_priority_go_only_where_others_do_not_do() -> None:
    tier = Tier()
    ((_, first),) = await tier.victims([LARGE], 1)
    small = tier.tries[0]
    small.prioritize(np.array(first[:1]), 3, 10.0)
    ((_, second),) = await tier.victims([LARGE], 1)
    assert not set(first) & set(second), "one slot of it is worth more than the next page"
    small.prioritize(np.arange(small.rows), 3, 10.0)
    assert (await tier.victims([LARGE], 1))[0][0] == 1, "a large block, though it was used last"
    wanted = await tier.victims([LARGE], 6)
    assert {ordinal: len(rows) for ordinal, rows in wanted} == {0: 2 * LARGE // SMALL, 1: 4}
    assert await tier.victims([LARGE], 1, now_s=10.0) == [(0, first)], "they are over"


def limits_of(tier: Tier, owners: list[int], left: list[int]) -> Limits:
    """The tries' blocks are of these tenants, which may lose so many bytes."""
    tenants = Tenants()
    use, store = TenantUse(Tiers(Transfers()), tenants), AbsentStore("cpu", CPU)
    use.assign(1, tenants.known("another"))
    for trie, owner in zip(tier.tries, owners, strict=True):
        trie.namespace[: trie.rows] = owner
    return lambda: Losses(use, store, np.array([*left, -1]))


@pytest.mark.parametrize("at_once", [16, 1 << 20])
async def test_whole_pages_go_as_far_as_their_owners_may_lose_them(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("index.scan", "moving.page_victims"):
        monkeypatch.setattr(f"prefixd.cache.{module}.SCANNED_AT_ONCE", at_once)
    tier, page = Tier(), LARGE // SMALL
    for surplus, small_pages in ((0, 0), (page - 1, 0), (page, 1), (2 * page - 1, 1), (2 * page, 2), (9 * page, 3)):
        limits = limits_of(tier, [0, 1], [surplus * SMALL, 0])
        found = await tier.victims([LARGE], 3, limits)
        assert [(ordinal, len(rows)) for ordinal, rows in found] == ([(0, small_pages * page)] if small_pages else [])
    limits = limits_of(tier, [0, 1], [5 * SMALL, 1 << 60])
    assert [(ordinal, len(rows)) for ordinal, rows in await tier.victims([SMALL], 19, limits)] == [(0, 3), (1, 1)]
    limits = limits_of(tier, [0, 1], [-1, 2 * LARGE])
    assert [(ordinal, len(rows)) for ordinal, rows in await tier.victims([LARGE], 3, limits)] == [(1, 2)]


async def test_a_block_goes_with_all_its_parts_and_an_owner_loses_them_all() -> None:
    pages = PageAllocator(CAPACITY)
    pages.add(0, CAPACITY)
    trie, other = Trie(1, (SMALL, LARGE), 0), Trie(1, (LARGE,), 1)
    for number in range(8):
        row = enter_block(trie, number.to_bytes(16, "little"), number.to_bytes(4, "little"))
        trie.put_copies(np.array([row]), CPU, np.array([[pages.allocate(SMALL), pages.allocate(LARGE)]]), 0.0)
    tenants = Tenants()
    tenants.known("another")
    use, store = TenantUse(Tiers(Transfers()), tenants), AbsentStore("cpu", CPU)
    for sizes in ([SMALL], [LARGE], [SMALL, LARGE]):
        for blocks in (0, 1, 3):
            left = np.array([(blocks + 1) * (SMALL + LARGE) - 1, 0, -1])
            found = await find_page_victims(
                [trie, other],
                Search(CPU, create_eviction_policy("lru", 0), demotable=False),
                sizes,
                5,
                partial(choose_page_victims, pages),
                limits=lambda left=left: Losses(use, store, left.copy()),  # type: ignore[misc]
            )
            gone = sum(len(rows) for _, rows in found)
            assert gone <= blocks and bool(gone) == bool(blocks)


async def test_a_page_that_is_nearly_empty_goes_first_only_among_equals() -> None:
    tier, small = Tier(), Trie(1, (SMALL,), 0)
    tier.pages, tier.tries = PageAllocator(CAPACITY), [small, Trie(1, (LARGE,), 1)]
    tier.pages.add(0, CAPACITY)
    tier.put(1, used_s=1.0)  # so that pages are as large as one of them
    while tier.pages.room(SMALL):
        tier.put(0, used_s=0.0)
    rows = np.arange(small.rows)
    pages = tier.pages.pages_of(small.slots[rows, CPU, 0])
    numbers, first = np.unique(pages, return_index=True)
    sparse = np.isin(pages, numbers[::2])
    gone = rows[sparse & ~np.isin(rows, first)]
    for slot in small.drop_copies(gone, CPU).ravel().tolist():
        tier.pages.free(slot)
    small.remove_all(gone)
    ((_, found),) = await tier.victims([LARGE], 1)
    assert len(found) == 1, "of a page with one slot"
    small.prioritize(rows[sparse & ~np.isin(rows, gone)], 1, math.inf)
    ((_, found),) = await tier.victims([LARGE], 1)
    assert len(found) == LARGE // SMALL, "it has a priority"
