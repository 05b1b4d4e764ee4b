"""Who has to go: the policy's order, but leaves before their parents, over all tries, and never what is protected."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.base.tenancy.tenants import Tenants
from prefixd.cache import Tiers, Trie
from prefixd.cache.index.trie import CPU, DISK, GPU, NO_SLOT, Rows
from prefixd.cache.moving.victims import Limits, Search, can_free, find_expired, find_victims, no_limits
from prefixd.cache.placement.tenant_use import Losses, TenantUse
from prefixd.cache.rules import FullAttention, SlidingWindow
from prefixd_swap import create_eviction_policy
from prefixd_swap.eviction import POLICY_NAMES
from prefixd_swap.tiers import Tier
from prefixd_swap.transfers import Transfers
from tests.cache.index.entering import enter_block
from tests.tries import remove_row

pytestmark = pytest.mark.usefixtures("turns_by_hand")

T = TypeVar("T")

POLICIES = POLICY_NAMES
LRU = Search(CPU, create_eviction_policy("lru", 0), demotable=False)


def in_turns(search: Coroutine[Any, Any, T], between: Callable[[int], None] = lambda turn: None) -> T:
    """What a search comes to; `between` is called between its turns, with how many there have been."""
    for turn in range(1, 1000):
        try:
            search.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
        between(turn)
    raise AssertionError("the search does not end")


class Forest:
    """Two tries with blocks of which each continues an earlier one, as `parents` says (-1: a first block)."""

    def __init__(self, parents: list[int]) -> None:
        self.tries = [Trie(1, (1,), 0), Trie(1, (1,), 1)]
        self.rows: list[tuple[Trie, int]] = []
        for number, parent in enumerate(parents):
            trie = self.rows[parent][0] if parent >= 0 else self.tries[number % 2]
            up = self.rows[parent][1] if parent >= 0 else -1
            row = enter_block(trie, number.to_bytes(16, "little"), number.to_bytes(4, "little"), up)
            assert row is not None
            self.rows.append((trie, row))

    def put(self, number: int, tier: int, entered: float = 0.0) -> None:
        trie, row = self.rows[number]
        trie.put_copies(np.array([row]), tier, np.array([[number]]), entered)

    def victims(
        self,
        tier: int,
        want: int,
        policy: str = "lru",
        *,
        demotable: bool,
        spare: bool = False,
        limits: Limits = no_limits,
        now_s: float = 0.0,
    ) -> list[int]:
        """Numbers of the victims; within a trie in order."""
        number_of = {(trie.ordinal, row): number for number, (trie, row) in enumerate(self.rows)}
        search = Search(tier, create_eviction_policy(policy, 0), demotable, spare, now_s)
        found = in_turns(find_victims(self.tries, search, want, limits))
        return [number_of[trie.ordinal, row] for trie, rows in found for row in rows.tolist()]


@contextmanager
def scanned_at_once(rows: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in ("index.scan", "moving.victims"):
            patch.setattr(f"prefixd.cache.{module}.SCANNED_AT_ONCE", rows)
        yield


@st.composite
def forests(draw: st.DrawFn) -> Forest:
    size = draw(st.integers(5, 20))
    forest = Forest([draw(st.integers(max(-1, number - 4), number - 1)) for number in range(size)])
    for number, (trie, row) in enumerate(forest.rows):
        for tier in draw(st.sampled_from([(CPU,), (CPU,), (GPU, CPU), (CPU, DISK), (GPU, CPU, DISK), (DISK,), ()])):
            forest.put(number, tier, draw(st.floats(0, 9)))
        trie.last_used[row] = draw(st.integers(0, 5))
        one = np.array([row])
        protection = draw(st.sampled_from(["none"] * 9 + ["held", "held elsewhere", "kept", "pinned"]))
        if protection == "held":
            trie.hold(one, CPU)
        elif protection == "held elsewhere":
            trie.hold(one, GPU)
        elif protection == "kept":
            trie.retain(one)
        trie.pinned[row] = protection == "pinned"
    return forest


@settings(max_examples=200)
@given(forests(), st.integers(0, 25), st.sampled_from(POLICIES), st.booleans(), st.booleans(), st.sampled_from([3, 99]))
def test_each_victim_may_go_when_its_turn_comes(
    forest: Forest, want: int, policy: str, demotable: bool, spare: bool, at_once: int
) -> None:
    with scanned_at_once(at_once):
        victims = forest.victims(CPU, want, policy, demotable=demotable, spare=spare)
    assert len(set(victims)) == len(victims) <= want
    for number in victims:
        trie, row = forest.rows[number]
        assert row in trie.evictable(CPU, demotable=demotable), "a leaf of its tier, and not protected"
        assert not spare or not trie.any_part[row] & (1 << GPU)
        alone = trie.any_part[row] == 1 << CPU
        trie.drop_copies(np.array([row]), CPU)
        if alone and demotable:
            trie.put_copies(np.array([row]), DISK, np.array([[0]]), 0.0)
        elif alone:
            remove_row(trie, row)
    if len(victims) < want:
        for trie in forest.tries:
            left = trie.evictable(CPU, demotable=demotable)
            assert not len(left[(trie.any_part[left] & (1 << GPU) == 0) | (not spare)]), "nobody who may go was left"


@settings(max_examples=100)
@given(forests(), st.integers(0, 25), st.sampled_from(["lru", "fifo"]), st.booleans())
def test_a_scan_in_slices_finds_the_same(forest: Forest, want: int, policy: str, demotable: bool) -> None:
    expected = forest.victims(CPU, want, policy, demotable=demotable)
    with scanned_at_once(3):
        assert forest.victims(CPU, want, policy, demotable=demotable) == expected


def test_what_is_held_or_goes_during_a_scan_is_not_chosen() -> None:
    forest = Forest([-1] * 40)
    for number, (trie, row) in enumerate(forest.rows):
        forest.put(number, CPU)
        trie.last_used[row] = number
    scanned: list[int] = []

    def others(turn: int) -> None:
        if turn > 1:
            return
        (trie, first), (_, second), (_, third) = forest.rows[:6:2]
        trie.hold(np.array([first]), CPU)
        trie.drop_copies(np.array([second]), CPU)
        remove_row(trie, second)
        trie.last_used[third] = 100.0
        scanned.append(turn)

    with scanned_at_once(4):
        search = find_victims(forest.tries, LRU, 4)
        found = in_turns(search, others)
    assert scanned, "others had a turn"
    numbers = {(trie.ordinal, row): number for number, (trie, row) in enumerate(forest.rows)}
    assert sorted(numbers[trie.ordinal, row] for trie, rows in found for row in rows.tolist()) == [1, 3, 5, 6]


def test_a_scan_begins_again_when_all_that_it_found_is_held_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixd.cache.moving.victims._SPARE", 0)
    forest = Forest([-1] * 40)
    for number, (trie, row) in enumerate(forest.rows):
        forest.put(number, CPU)
        trie.last_used[row] = number
    trie, first = forest.rows[0]
    also = forest.rows[2][1]

    def others(turn: int) -> None:
        if turn == 2:
            trie.hold(np.array([first, also]), CPU)

    with scanned_at_once(4):
        search = find_victims([trie], LRU, 1)
        ((_, rows),) = in_turns(search, others)
    assert rows.tolist() == [forest.rows[4][1]]


def test_no_turn_looks_at_more_rows_than_a_slice_has(monkeypatch: pytest.MonkeyPatch) -> None:
    forest = Forest([-1] * 100)
    for number in range(100):
        forest.put(number, CPU)
    looked_at = [0]
    evictable = Trie.evictable

    def counting(trie: Trie, tier: int, *, demotable: bool, among: Rows | slice | None = None) -> Rows:
        looked_at[-1] += among.stop - among.start if isinstance(among, slice) else 0
        return evictable(trie, tier, demotable=demotable, among=among)

    monkeypatch.setattr(Trie, "evictable", counting)
    with scanned_at_once(8):
        search = find_victims(forest.tries, LRU, 4)
        in_turns(search, lambda turn: looked_at.append(0))
    assert sum(looked_at) == 100
    assert max(looked_at) <= 2 * 8


@pytest.mark.parametrize(("policy", "order"), [("lru", [2, 1, 0]), ("fifo", [0, 1, 2])])
def test_the_policy_decides_among_leaves(policy: str, order: list[int]) -> None:
    forest = Forest([-1, -1, -1])
    for number, (trie, row) in enumerate(forest.rows):
        forest.put(number, CPU, entered=number)
        trie.last_used[row] = 10 - number
    assert [forest.victims(CPU, n, policy, demotable=False) for n in (1, 2, 3)] == [
        sorted(order[:n], key=lambda number: (number % 2, order.index(number))) for n in (1, 2, 3)
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chain_goes_from_its_end(policy: str) -> None:
    forest = Forest([-1, 0, 1, 2])
    for number, (trie, row) in enumerate(forest.rows):
        forest.put(number, CPU, entered=-number)
        trie.last_used[row] = number
    assert forest.victims(CPU, 3, policy, demotable=False) == [3, 2, 1]
    forest.rows[2][0].hold(np.array([forest.rows[2][1]]), CPU)
    assert forest.victims(CPU, 3, policy, demotable=False) == [3]


def test_a_parent_stays_while_its_child_is_elsewhere() -> None:
    forest = Forest([-1, 0, 0])
    for number in range(3):
        forest.put(number, DISK)
    forest.put(1, CPU)
    assert forest.victims(DISK, 3, demotable=False) == [1, 2], "block 1 would be without its prefix"
    forest.put(0, GPU)
    assert forest.victims(DISK, 3, demotable=False) == [1, 2, 0]


async def test_a_torn_block_cannot_go_down() -> None:
    trie = Trie(1, (1, 1), 0)
    rows = np.array([enter_block(trie, bytes(16), bytes(4))])
    trie.put_copies(rows, CPU, np.array([[0, -1]]), 0.0)
    lru = create_eviction_policy("lru", 0)
    assert await find_victims([trie], Search(CPU, lru, demotable=True), 1) != []
    trie.pinned[rows] = True
    assert await find_victims([trie], Search(CPU, lru, demotable=True), 1) == [], (
        "pinned, and no tier below can take half a block"
    )
    trie.put_copies(rows, CPU, np.array([[-1, 1]]), 0.0)
    assert await find_victims([trie], Search(CPU, lru, demotable=True), 1) != []


def test_a_block_above_others_without_copies_goes_after_what_continues_them() -> None:
    forest = Forest([-1, 0, 1, 2])
    forest.put(0, CPU)
    forest.put(3, CPU)
    assert forest.victims(CPU, 4, demotable=False) == [3, 0]
    forest.put(0, DISK)
    assert sorted(forest.victims(CPU, 4, demotable=False)) == [0, 3], "a leaf of its tier from the start; once"
    forest.put(1, DISK)
    forest.tries[0].drop_copies(np.array([forest.rows[0][1]]), DISK)
    assert forest.victims(CPU, 4, demotable=False) == [3], "a block between them stays"


@pytest.mark.parametrize("at_once", [3, 1000])
def test_what_evictions_can_free_is_counted_as_far_as_is_needed(at_once: int) -> None:
    forest = Forest([-1, 0, 1, 2, -1, -1])
    for number in range(6):
        forest.put(number, CPU)
    held, kept = forest.rows[3], forest.rows[4]
    held[0].hold(np.array([held[1]]), CPU)
    kept[0].retain(np.array([kept[1]]))
    with scanned_at_once(at_once):
        can = {
            (blocks, demotable): in_turns(can_free(forest.tries, CPU, blocks, demotable=demotable))
            for blocks in (-1, 0, 4, 5, 6)
            for demotable in (False, True)
        }
    assert [blocks for blocks, demotable in can if can[blocks, demotable] and demotable] == [-1, 0, 4, 5]
    assert [blocks for blocks, demotable in can if can[blocks, demotable] and not demotable] == [-1, 0, 4]


def test_nothing_is_scanned_where_enough_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trie, "held", lambda *args: pytest.fail("scanned"))
    forest = Forest([-1] * 10)
    assert in_turns(can_free(forest.tries, CPU, 0, demotable=True))


# -- priorities ----------------------------------------------------------------------------------------------------


def prioritize(forest: Forest, priorities: dict[int, int], until_s: float = math.inf) -> None:
    for number, priority in priorities.items():
        trie, row = forest.rows[number]
        trie.prioritize(np.array([row]), priority, until_s)


def test_a_lower_priority_goes_first_whatever_was_used_last() -> None:
    forest = Forest([-1] * 8)
    for number, (trie, row) in enumerate(forest.rows):
        forest.put(number, CPU)
        trie.last_used[row] = number
    prioritize(forest, {0: 5, 2: 5, 6: -5, 4: 100})
    expected = [6, 1, 3, 5, 7, 0, 2, 4]  # by priority, then by use
    for want in range(1, 9):
        assert set(forest.victims(CPU, want, demotable=False)) == set(expected[:want])
    assert set(forest.victims(CPU, 2, demotable=False, now_s=math.inf)) == {0, 1}, "the priorities are over"


def test_a_parent_goes_after_its_child_and_by_its_own_priority() -> None:
    forest = Forest([-1, 0, 1, -1, -1])
    for number, (trie, row) in enumerate(forest.rows):
        forest.put(number, CPU)
        trie.last_used[row] = number
    prioritize(forest, {0: -5, 1: -5, 2: 5})
    assert set(forest.victims(CPU, 2, demotable=False)) == {3, 4}, "those of a low priority are behind one of a high"
    assert set(forest.victims(CPU, 3, demotable=False)) == {3, 4, 2}
    assert set(forest.victims(CPU, 5, demotable=False)) == {0, 1, 2, 3, 4}
    trie, row = forest.rows[2]
    trie.prioritize(np.array([row]), -1, math.inf)
    prioritize(forest, {1: 7})
    assert set(forest.victims(CPU, 3, demotable=False)) == {2, 3, 4}, "its parent, revealed by it, is worth more"


@settings(max_examples=100)
@given(forests(), st.integers(0, 25), st.booleans(), st.sampled_from([3, 99]), st.data())
def test_priorities_come_before_the_policy(
    forest: Forest, want: int, demotable: bool, at_once: int, data: st.DataObject
) -> None:
    numbers = range(len(forest.rows))
    priorities = {number: data.draw(st.sampled_from([-1, 0, 0, 1])) for number in numbers}
    prioritize(forest, priorities)
    with scanned_at_once(at_once):
        victims = forest.victims(CPU, want, demotable=demotable)
    highest = max((priorities[number] for number in victims), default=-1)
    for number in set(numbers) - set(victims):
        trie, row = forest.rows[number]
        if row in trie.evictable(CPU, demotable=demotable):
            assert priorities[number] >= highest, "a leaf of a lower priority goes before"


# -- what tenants may lose -----------------------------------------------------------------------------------------


def limits_of(forest: Forest, owners: list[int], left: list[int]) -> Limits:
    """Block i is of tenant `owners[i]`, and tenant j may lose `left[j]` bytes: a block has a page of 4096."""
    tenants = Tenants()
    use, tier = TenantUse(Tiers(Transfers()), tenants), AbsentStore("cpu", CPU)
    for number in range(1, len(left)):
        use.assign(number, tenants.known(f"t{number}"))
    for (trie, row), owner in zip(forest.rows, owners, strict=True):
        trie.namespace[row] = owner
    return lambda: Losses(use, tier, np.array([*left, -1]))


class AbsentStore(Tier):
    """For the sizes of slots alone."""

    capacity_bytes = used_bytes = 0

    def check_integrity(self) -> None:
        """Nothing."""


@settings(max_examples=200)
@given(forests(), st.integers(0, 25), st.sampled_from(POLICIES), st.booleans(), st.sampled_from([3, 99]), st.data())
def test_nobody_loses_more_than_it_may(
    forest: Forest, want: int, policy: str, demotable: bool, at_once: int, data: st.DataObject
) -> None:
    owners: list[int] = []
    for number, (trie, row) in enumerate(forest.rows):  # a block belongs to whom its parent belongs to
        parent = next((at for at, each in enumerate(forest.rows) if each == (trie, int(trie.parent[row]))), None)
        owners.append(data.draw(st.integers(0, 2)) if parent is None else owners[parent])
        assert number >= 0
    left = [data.draw(st.sampled_from([-1, 0, 4095, 4096, 3 * 4096, 1 << 60])) for _ in range(3)]
    limits = limits_of(forest, owners, left)
    with scanned_at_once(at_once):
        victims = forest.victims(CPU, want, policy, demotable=demotable, limits=limits)
    lost = Counter(owners[number] for number in victims)
    assert all(4096 * blocks <= max(left[owner], 0) for owner, blocks in lost.items())
    assert len(set(victims)) == len(victims) <= want
    for number in victims:
        trie, row = forest.rows[number]
        assert row in trie.evictable(CPU, demotable=demotable)
        alone = trie.any_part[row] == 1 << CPU
        trie.drop_copies(np.array([row]), CPU)
        if alone and demotable:
            trie.put_copies(np.array([row]), DISK, np.array([[0]]), 0.0)
        elif alone:
            remove_row(trie, row)
    if len(victims) < want:
        for trie in forest.tries:
            for row in trie.evictable(CPU, demotable=demotable).tolist():
                owner = owners[forest.rows.index((trie, row))]
                assert 4096 * (lost[owner] + 1) > left[owner], "nobody who may go was left"


def test_a_batch_takes_of_each_as_much_as_it_may_lose() -> None:
    forest = Forest([-1] * 8)
    for number, (trie, row) in enumerate(forest.rows):
        forest.put(number, CPU)
        trie.last_used[row] = number
    limits = limits_of(forest, [0, 0, 0, 0, 1, 1, 1, 1], [2 * 4096, 1 << 60])
    assert set(forest.victims(CPU, 4, demotable=False, limits=limits)) == {0, 1, 4, 5}
    assert in_turns(can_free(forest.tries, CPU, 6 * 4096, demotable=False, weigh=lambda n: 4096, losses=limits()))
    assert not in_turns(can_free(forest.tries, CPU, 7 * 4096, demotable=False, weigh=lambda n: 4096, losses=limits()))


def test_expired_bytes_of_others_go_as_far_as_they_may_lose_them() -> None:
    trie = Trie(1, (1, 1), 0, [FullAttention(), SlidingWindow(1)])
    rows = np.array([enter_block(trie, bytes([number]) * 16, bytes([number] * 4)) for number in range(6)])
    trie.put_copies(rows, CPU, np.arange(12).reshape(6, 2), 0.0)
    trie.last_used[rows] = np.arange(6)
    window = trie.part_mask[1]
    trie.expired[rows] = window
    forest = Forest([])
    forest.tries, forest.rows = [trie], [(trie, row) for row in rows.tolist()]
    limits = limits_of(forest, [0, 0, 0, 1, 1, 1], [2 * 4096, 1 << 60])
    ((_, found, groups),) = in_turns(find_expired([trie], CPU, 6, limits=limits))
    assert set(found.tolist()) == {*rows[[0, 1, 3, 4, 5]].tolist()} and (groups == window).all()
    limits = limits_of(forest, [0, 0, 0, 1, 1, 1], [-1, 4096])
    ((_, found, _),) = in_turns(find_expired([trie], CPU, 6, limits=limits))
    assert found.tolist() == rows[[3]].tolist()


def test_what_one_block_costs_is_what_is_said_of_rows() -> None:
    """Blocks of three parts of different sizes, of which some are not there."""
    rng = np.random.default_rng(0)
    tenants = Tenants()
    use, tier = TenantUse(Tiers(Transfers()), tenants), AbsentStore("cpu", CPU)
    for number in range(1, 4):
        use.assign(number, tenants.known(f"t{number}"))
    slots = rng.integers(0, 50, (40, 4, 3))
    slots[rng.random(slots.shape) < 0.4] = NO_SLOT
    trie = cast(
        Trie,
        SimpleNamespace(
            ordinal=0,
            namespace=rng.integers(0, 4, 40),
            slots=slots,
            part_bytes=(64, 5000, 9000),
            part_mask=np.ones(3, np.uint8),
            all_groups=1,
            has_coded=False,
        ),
    )
    losses = Losses(use, tier, np.array([0, 0, 0]))  # the last place is that of all tenants from it on
    rows = np.arange(40)
    both = list(zip(losses.owners(trie, rows).tolist(), losses.bytes_of(trie, rows).tolist(), strict=True))
    assert [losses.cost(trie, row) for row in rows.tolist()] == both
    assert len({owner for owner, _ in both}) == 3 and len({nbytes for _, nbytes in both}) > 4
