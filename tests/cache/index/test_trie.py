"""The trie against a plain dict, with keys of 8 bits that collide all the time: no wrong match, ever."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from prefixd.cache import NONE, BlockChain, Trie
from prefixd.cache.index.trie import CPU, DISK, GPU, NO_SLOT, TIERS, Rows
from prefixd.cache.index.trie_table import TrieTable
from tests.cache.index.entering import enter_block, enter_chain
from tests.tries import is_removable, match_rows, remove_row, subtree_rows, used_rows

Prefix = tuple[int, ...]  # (namespace, block, block, ...): block b has the tokens (b, b)

WIDTH = 2
prompts = st.lists(st.integers(0, 5), min_size=1, max_size=6).map(tuple)
namespaces = st.integers(0, 1)
tiers = st.integers(0, TIERS - 1)


def short_digest(data: bytes, seed: int) -> bytes:
    """A key function with 256 different keys."""
    return xxhash.xxh3_64_digest(data, seed)[:1] * 16


def chain_of(prompt: Prefix) -> BlockChain:
    namespace, *blocks = prompt
    return BlockChain(np.repeat(np.array(blocks, "<u4"), WIDTH).tobytes(), WIDTH, namespace, short_digest)


class TrieMachine(RuleBasedStateMachine):
    """`row_of` says which row has which prefix, `copies` what each prefix has where (part -> slot, by tier)."""

    def __init__(self) -> None:
        super().__init__()
        self.trie = Trie(WIDTH, (10, 20))
        self.row_of: dict[Prefix, int] = {}
        self.copies: dict[Prefix, list[dict[int, int]]] = {}
        self.holds: Counter[tuple[Prefix, int]] = Counter()
        self.retained: Counter[Prefix] = Counter()
        self.owner: dict[tuple[int, bytes], Prefix] = {}
        self.priority: dict[Prefix, tuple[int, float]] = {}
        self.next_slot = 0
        self.now = 0.0

    def pick(self, data: st.DataObject) -> Prefix:
        return data.draw(st.sampled_from(sorted(self.row_of)))

    def pick_some(self, data: st.DataObject) -> list[Prefix]:
        return data.draw(st.lists(st.sampled_from(sorted(self.row_of)), min_size=1, max_size=4, unique=True))

    def rows_of(self, prefixes: list[Prefix]) -> Rows:
        return np.array([self.row_of[prefix] for prefix in prefixes])

    def has_children(self, prefix: Prefix) -> bool:
        return any(other[:-1] == prefix for other in self.row_of)

    def kept(self, prefix: Prefix) -> bool:
        return bool(self.retained[prefix]) or any(self.holds[prefix, tier] for tier in range(TIERS))

    @rule(namespace=namespaces, prompt=prompts, before=st.integers(0, 6))
    def insert(self, namespace: int, prompt: Prefix, before: int) -> None:
        """The prompt's blocks behind those of its first `before` blocks that are there."""
        whole = (namespace, *prompt)
        chain = chain_of(whole)
        before = min(before, len(prompt))
        while whole[: before + 1] not in self.row_of and before:
            before -= 1
        parent = self.row_of[whole[: before + 1]] if before else -1 - namespace
        self.now += 1
        keys, tokens = chain.key_rows(before, len(chain)), chain.token_rows[before:]
        rows, old = self.trie.insert_path(parent, namespace, keys, tokens, self.now)
        there = [whole[: end + 1] in self.row_of for end in range(before + 1, len(whole))]
        assert old == there[: len(rows)].index(False) if False in there[: len(rows)] else old == len(rows)
        entered = rows.tolist()
        for end in range(before + 1, len(whole)):
            prefix, key = whole[: end + 1], (namespace, chain.key(end - 1))
            if self.owner.get(key, prefix) != prefix:
                assert not entered, f"{prefix} was taken for {self.owner[key]}"
                return
            row = entered.pop(0)
            assert self.row_of.get(prefix, row) == row
            if key not in self.owner:
                assert row not in self.row_of.values()
                assert self.trie.last_used[row] == self.now
                self.owner[key] = prefix
                self.row_of[prefix] = row
                self.copies[prefix] = [{} for _ in range(TIERS)]

    @precondition(lambda self: self.row_of)
    @rule(data=st.data(), tier=tiers)
    def put(self, data: st.DataObject, tier: int) -> None:
        prefixes = self.pick_some(data)
        slots = np.full((len(prefixes), 2), NO_SLOT)
        for at, prefix in enumerate(prefixes):
            for part in data.draw(st.sampled_from([(0,), (1,), (0, 1)])):
                self.next_slot += 1
                slots[at, part] = self.copies[prefix][tier][part] = self.next_slot
        self.trie.put_copies(self.rows_of(prefixes), tier, slots, self.now)

    @precondition(lambda self: self.row_of)
    @rule(data=st.data(), tier=tiers)
    def drop(self, data: st.DataObject, tier: int) -> None:
        prefixes = self.pick_some(data)
        had = [self.copies[prefix][tier] for prefix in prefixes]
        slots = self.trie.drop_copies(self.rows_of(prefixes), tier)
        assert slots.tolist() == [[parts.get(part, NO_SLOT) for part in (0, 1)] for parts in had]
        for prefix in prefixes:
            self.copies[prefix][tier] = {}

    @precondition(lambda self: self.row_of)
    @rule(data=st.data(), tier=tiers)
    def hold(self, data: st.DataObject, tier: int) -> None:
        prefix = self.pick(data)
        rows = [self.row_of[prefix[: end + 1]] for end in range(1, len(prefix))]
        self.trie.hold(np.array(rows), tier)
        self.holds.update((prefix[: end + 1], tier) for end in range(1, len(prefix)))

    @precondition(lambda self: +self.holds)
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        prefix, tier = data.draw(st.sampled_from(sorted(+self.holds)))
        self.trie.unhold(np.array([self.row_of[prefix]]), tier)
        self.holds[prefix, tier] -= 1

    @precondition(lambda self: self.row_of)
    @rule(data=st.data())
    def retain_or_not(self, data: st.DataObject) -> None:
        prefix = self.pick(data)
        row = np.array([self.row_of[prefix]])
        if self.retained[prefix]:
            self.trie.unretain(row)
            self.retained[prefix] -= 1
        else:
            self.trie.retain(row)
            self.retained[prefix] += 1

    @precondition(lambda self: self.row_of)
    @rule(data=st.data(), priority=st.integers(-100, 100), time_s=st.integers(0, 3) | st.just(math.inf))
    def prioritize(self, data: st.DataObject, priority: int, time_s: float) -> None:
        prefixes = self.pick_some(data)
        self.trie.prioritize(self.rows_of(prefixes), priority, self.now + time_s)
        self.priority.update({prefix: (priority, self.now + time_s) for prefix in prefixes})

    @precondition(lambda self: self.row_of)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        prefix = self.pick(data)
        row = self.row_of[prefix]
        may = not self.has_children(prefix) and not self.kept(prefix)
        assert is_removable(self.trie, row) == may
        if not may or any(self.copies[prefix]):
            assert self.trie.remove_bare([row]) == 0
            return
        before = int(self.trie.generation[row])
        remove_row(self.trie, row)
        assert self.trie.generation[row] == before + 1
        assert not is_removable(self.trie, row), "what is gone cannot be removed again"
        while True:  # ancestors that stayed for its sake alone go too
            del self.row_of[prefix], self.copies[prefix]
            self.priority.pop(prefix, None)
            self.owner = {key: owner for key, owner in self.owner.items() if owner != prefix}
            prefix = prefix[:-1]
            if prefix not in self.row_of or self.has_children(prefix) or self.kept(prefix) or any(self.copies[prefix]):
                return

    @rule(namespace=namespaces, prompt=prompts, limit=st.none() | st.integers(0, 7))
    def match(self, namespace: int, prompt: Prefix, limit: int | None) -> None:
        expected: list[int] = []
        for end in range(1, len(prompt) + 1):
            prefix = (namespace, *prompt[:end])
            if prefix not in self.row_of or not any(len(tier) == 2 for tier in self.copies[prefix]):
                break
            expected.append(self.row_of[prefix])
        expected = expected[: len(prompt) if limit is None else limit]
        found = match_rows(self.trie, -1 - namespace, chain_of((namespace, *prompt)), limit)
        assert found.tolist() == expected
        assert len(found) == len(expected)

    @precondition(lambda self: self.row_of)
    @rule(data=st.data())
    def walk(self, data: st.DataObject) -> None:
        prefix = self.pick(data)
        below = {row for other, row in self.row_of.items() if other[: len(prefix)] == prefix}
        subtree = subtree_rows(self.trie, np.array([self.row_of[prefix]]))
        assert set(subtree) == below and len(subtree) == len(below)
        at = {row: place for place, row in enumerate(subtree)}
        assert all(at[row] > at.get(int(self.trie.parent[row]), -1) for row in subtree)

    @invariant()
    def columns_agree_with_the_model(self) -> None:
        trie = self.trie
        assert len(trie) == len(self.row_of)
        assert sorted(used_rows(trie).tolist()) == sorted(self.row_of.values())
        assert trie.rows == len(self.row_of) + len(trie.free), "rows are recycled, none is lost"
        children: Counter[tuple[Prefix, int]] = Counter()
        for prefix, row in self.row_of.items():
            assert self.owner[prefix[0], trie.key(row)] == prefix
            assert trie.tokens[row].tolist() == [prefix[-1]] * WIDTH
            assert trie.parent[row] == self.row_of.get(prefix[:-1], -1 - prefix[0])
            assert (trie.depth[row], trie.namespace[row]) == (len(prefix) - 2, prefix[0])
            for tier, parts in enumerate(self.copies[prefix]):
                assert trie.has(row, tier) == (len(parts) == 2)
                assert bool(trie.any_part[row] & (1 << tier)) == bool(parts)
                assert trie.slots[row, tier].tolist() == [parts.get(0, NO_SLOT), parts.get(1, NO_SLOT)]
                assert trie.holds[row, tier] == self.holds[prefix, tier]
                children[prefix[:-1], tier] += bool(parts)
            whole = [tier for tier, parts in enumerate(self.copies[prefix]) if len(parts) == 2]
            assert trie.nearest[row] == min(whole, default=NONE)
        for prefix, row in self.row_of.items():
            assert bool(trie.children[row]) == self.has_children(prefix)
            assert trie.tier_children[row].tolist() == [children[prefix, tier] for tier in range(TIERS)]

    @invariant()
    def priorities_are_those_of_the_model(self) -> None:
        expected = {}
        for prefix, row in self.row_of.items():
            priority, until_s = self.priority.get(prefix, (0, 0.0))
            expected[row] = priority if self.now < until_s else 0
        rows = np.array(sorted(expected), np.int64)
        found = self.trie.priorities(rows, self.now)
        assert dict(zip(rows.tolist(), found.tolist(), strict=True)) == expected
        assert self.trie.prioritized == sum(priority != 0 for priority, _ in self.priority.values())
        assert self.trie.has_priorities or not found.any()
        retained: Counter[int] = Counter()
        for prefix, (priority, _) in self.priority.items():
            if priority > 0:
                parts = {part for tier in self.copies[prefix] for part in tier}
                retained[prefix[0]] += 30 if parts else 0  # both parts are of one KV group
        assert self.trie.retained_bytes == +retained

    @invariant()
    def who_may_go_is_as_the_model_says(self) -> None:
        for tier in range(TIERS):
            for demotable in (False, True):
                expected = [row for prefix, row in self.row_of.items() if self.may_go(prefix, tier, demotable)]
                assert self.trie.evictable(tier, demotable=demotable).tolist() == sorted(expected)
        lacking = self.trie.missing(used_rows(self.trie), CPU).tolist()
        assert set(lacking) == {row for p, row in self.row_of.items() if len(self.copies[p][CPU]) < 2}
        dirty = {r for p, r in self.row_of.items() if len(self.copies[p][CPU]) == 2 and not self.copies[p][DISK]}
        on_disk = np.flatnonzero(self.trie.any_part[: self.trie.rows] & (1 << DISK))
        assert set(self.trie.copies(CPU).tolist()) - set(on_disk.tolist()) == dirty

    def may_go(self, prefix: Prefix, tier: int, demotable: bool) -> bool:
        copies = self.copies[prefix]
        if not copies[tier] or self.holds[prefix, tier]:
            return False
        if any(other[:-1] == prefix and self.copies[other][tier] for other in self.row_of):
            return False  # leaves first
        others = [len(copies[other]) for other in range(TIERS) if other != tier]
        if any(others) and (2 in others or len(copies[tier]) < 2):
            return True  # a torn copy stands for no whole one
        if demotable and len(copies[tier]) == 2:
            return True
        return not self.has_children(prefix) and not self.kept(prefix)


@pytest.mark.slow
def test_trie_against_a_dict() -> None:
    run_state_machine_as_test(TrieMachine, settings=settings(max_examples=60, stateful_step_count=50))


def test_a_collision_is_refused_and_matches_nothing() -> None:
    trie = Trie(1, (1,))
    key = b"k" * 16
    first = enter_block(trie, key, (1).to_bytes(4, "little"))
    trie.put_copies(np.array([first]), GPU, np.array([[0]]), 0.0)
    assert enter_block(trie, key, (2).to_bytes(4, "little")) is None, "other tokens"
    same = BlockChain((1).to_bytes(4, "little"), 1, 0, lambda data, seed: key)
    other = BlockChain((2).to_bytes(4, "little"), 1, 0, lambda data, seed: key)
    assert (len(match_rows(trie, -1, same)), len(match_rows(trie, -1, other)), len(match_rows(trie, -2, same))) == (
        1,
        0,
        0,
    )


def test_a_key_of_one_namespace_is_not_in_the_way_of_another() -> None:
    """Whoever chooses tokens chooses keys: one that stands in his namespace takes nothing from others."""
    trie, key = Trie(1, (1,)), b"k" * 16
    tokens = [number.to_bytes(4, "little") for number in range(3)]
    rows = [enter_block(trie, key, tokens[home], -1 - home, home) for home in range(3)]
    assert len({row for row in rows if row is not None}) == 3
    trie.put_copies(np.array(rows), GPU, np.arange(3)[:, None], 0.0)
    chains = [BlockChain(tokens[home], 1, 0, lambda data, seed: key) for home in range(3)]
    for home, chain in enumerate(chains):
        found = [match_rows(trie, -1 - other, chain).tolist() for other in range(3)]
        assert found == [[rows[home]] if other == home else [] for other in range(3)]
    gone = rows[1]
    assert gone is not None
    trie.drop_copies(np.array([gone]), GPU)
    remove_row(trie, gone)
    assert [trie.find(home, key) for home in range(3)] == [rows[0], None, rows[2]]


def test_a_block_that_collides_with_its_own_parent_matches_once() -> None:
    trie = Trie(1, (1,))
    chain = BlockChain(bytes(12), 1, 0, lambda data, seed: b"k" * 16)
    rows = enter_chain(trie, chain)
    assert len(rows) == 1
    trie.put_copies(rows, CPU, np.array([[0]]), 0.0)
    assert match_rows(trie, -1, chain).tolist() == rows.tolist()


def test_the_table_grows_and_keeps_what_it_has() -> None:
    trie = Trie(1, (1,))
    chain = BlockChain(np.arange(3000, dtype="<u4").tobytes(), 1, 0)
    for end in range(10, 3010, 10):
        some = BlockChain(chain.blocks(end), 1, 0)
        rows = enter_chain(trie, some)
        trie.put_copies(rows[-10:], CPU, np.arange(end - 10, end)[:, None], 0.0)
    rows = match_rows(trie, -1, chain)
    assert len(rows) == 3000
    assert trie.slots[rows, CPU, 0].tolist() == list(range(3000))
    assert trie.depth[rows].tolist() == list(range(3000))


def test_growing_copies_nothing() -> None:
    table = TrieTable(16, 2)
    table.take_rows(100_000)
    names = [name for name, value in vars(table).items() if isinstance(value, np.ndarray) and name != "_blocks_of"]
    addresses = [getattr(table, name).ctypes.data for name in names]
    table.take_rows(200_000)
    assert all(len(getattr(table, name)) >= 300_000 for name in names)
    assert [getattr(table, name).ctypes.data for name in names] == addresses


def test_growing_without_addresses_to_spare_holds_one_column_twice_and_no_more() -> None:
    tracemalloc.start()
    try:
        table = TrieTable(16, 1, reserve=lambda nbytes: None)
        table.take_rows(2000)
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        table.take_rows(2000)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after > 1.4 * before, "it did grow"
    assert peak < 1.2 * after, "what is replaced is let go before the next column is made"


def test_a_row_is_found_by_the_first_digits_of_its_key() -> None:
    trie = Trie(1, (1,))
    keys = [bytes.fromhex(digits.ljust(32, "0")) for digits in ("abcd", "abce", "abcef", "b")]
    rows = [enter_block(trie, key, number.to_bytes(4, "little")) for number, key in enumerate(keys)]
    assert [trie.find_by_digits(digits).tolist() for digits in ("a", "abc", "abce", "abcef", "b0", "c")] == [
        *([rows[:3]] * 2),
        rows[1:3],
        rows[2:3],
        rows[3:],
        [],
    ]
    gone = rows[1]
    assert gone is not None
    remove_row(trie, gone)
    assert trie.find_by_digits("abce").tolist() == rows[2:3]
    assert (trie.find(0, keys[1]), trie.find(0, keys[2])) == (None, rows[2])


def test_an_observer_is_told_of_rows_that_change() -> None:
    """Of a copy when it is whole, of one that is dropped, of many that are entered at once, of a tier that goes."""
    trie = Trie(WIDTH, (10, 20))
    told: list[list[int]] = []
    trie.observer = lambda changed, rows: told.append(np.atleast_1d(rows).tolist()) if changed is trie else None
    first = enter_chain(trie, chain_of((0, 1)))
    trie.put_copies(first, CPU, np.array([[7, NO_SLOT]]), 0.0)
    assert told == []
    trie.put_copies(first, CPU, np.array([[NO_SLOT, 8]]), 0.0)
    trie.drop_copies(first, DISK)  # has none
    assert told == [first.tolist()]
    rows = trie.take_rows(3)
    keys = np.arange(48, dtype=np.uint8).reshape(3, 16)
    none = np.zeros(3, np.int64)
    trie.insert_all(rows, none - 1, none, none, keys, np.zeros((3, WIDTH), np.uint32), 0.0)
    trie.put_copies(rows, DISK, np.arange(6).reshape(3, 2), 0.0)
    trie.offer(DISK, False)
    trie.drop_copies(first, CPU)
    assert told == [first.tolist(), rows.tolist(), rows.tolist(), first.tolist()]
