"""Whoever chooses keys cannot choose where they are placed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.checks.attacks.crafted_tokens import (
    BLOCK_TOKENS,
    block_with_key,
    blocks_with_equal_first_half,
)
from prefixd.cache import Trie
from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.index.keys.key_hash import KeyHash
from prefixd.cache.index.keys.key_index import KeyIndex
from tests.cache.index.entering import enter_block

COUNT = 20_000


def key_families(count: int) -> dict[str, npt.NDArray[np.uint8]]:
    """[count, 16]: different keys each, with the structure that a weak function of both halves would keep."""
    numbers = np.arange(count, dtype=np.uint64)
    side = int(np.ceil(np.sqrt(count)))
    x, y = numbers % np.uint64(side), numbers // np.uint64(side)
    zero = np.zeros(count, np.uint64)
    families = {
        "equal first half": (zero, numbers),
        "equal second half": (numbers, zero),
        "equal halves": (numbers, numbers),
        "opposite halves": (numbers, zero - numbers),
        "one half the complement of the other": (numbers, ~numbers),
    }
    for bits in (16, 32, 40, 48):
        families[f"multiples of 2**{bits}"] = (numbers << np.uint64(bits), zero)
        families[f"a grid of multiples of 2**{bits + 8}"] = (x << np.uint64(bits + 8), y << np.uint64(bits + 8))
    return {name: np.stack(halves, axis=1).view(np.uint8) for name, halves in families.items()}


FAMILIES = key_families(COUNT)


def key_hash(seed: int) -> KeyHash:
    rng = np.random.default_rng(seed)
    return KeyHash(rng.integers(0, 2**64, 4, np.uint64), rng.integers(0, 2**32, (3, 2048), np.uint32))


def detours(index: KeyIndex) -> tuple[float, int]:
    """How many places are passed until a key is found: the mean, and the largest number."""
    table = index._table
    places = np.flatnonzero(table.entries)
    rows = table.entries[places].astype(np.int64) - 1
    passed = places - table.homes(index._hashes(rows)) & table.mask
    return float(passed.mean()), int(passed.max())


def test_tokens_can_be_chosen_for_keys_that_agree_in_a_half() -> None:
    """The attack that is to be withstood: it needs the namespace's seed, which follows from its public name."""
    seed = 0x1234567890ABCDEF
    keys = [BlockChain(block, BLOCK_TOKENS, seed).key(0) for block in blocks_with_equal_first_half(100, seed)]
    assert len(set(keys)) == 100
    assert len({key[:8] for key in keys}) == 1


def test_tokens_can_be_chosen_for_the_key_of_somebody_else() -> None:
    """The attack for which keys of one namespace must not be in the way of another's."""
    theirs, ours = 0x1234567890ABCDEF, 0xFEDCBA0987654323
    for number in range(40):
        key = BlockChain(number.to_bytes(64, "little"), BLOCK_TOKENS, theirs).key(0)
        block = block_with_key(key, ours)
        assert block is not None and BlockChain(block, BLOCK_TOKENS, ours).key(0) == key


@pytest.mark.slow
def test_crafted_tokens_do_not_crowd_in_one_place() -> None:
    trie = Trie(BLOCK_TOKENS, (1,))
    trie._keys = KeyIndex(key_hash(0))
    for block in blocks_with_equal_first_half(COUNT, 7):
        assert enter_block(trie, BlockChain(block, BLOCK_TOKENS, 7).key(0), block) is not None
    mean, longest = detours(trie._keys)
    assert mean < 1
    assert longest < 64


@pytest.mark.slow
def test_one_key_in_many_namespaces_does_not_crowd() -> None:
    """Each crafts tokens for it, by the seed of his namespace."""
    trie = Trie(1, (1,))
    trie._keys = KeyIndex(key_hash(0))
    for home in range(COUNT):
        assert enter_block(trie, bytes(16), bytes(4), -1 - home, home) is not None
    mean, longest = detours(trie._keys)
    assert mean < 1
    assert longest < 64


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_keys_with_structure_are_placed_as_random_ones(name: str, seed: int) -> None:
    index = KeyIndex(key_hash(seed))
    index.reserve(COUNT)
    keys = FAMILIES[name]
    assert len(np.unique(keys.view("V16"))) == COUNT
    index.insert_all(keys, np.arange(COUNT))
    mean, longest = detours(index)
    assert mean < 1
    assert longest < 64


def test_another_process_places_keys_elsewhere() -> None:
    keys = FAMILIES["equal second half"].view(np.uint64)
    one, other = KeyHash.random(), KeyHash.random()
    assert np.count_nonzero(one.all(keys) == other.all(keys)) < 10


def test_one_hash_is_that_of_many() -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**64, (1000, 2), np.uint64)
    keys[:2] = 0, 2**64 - 1
    joined = keys.tobytes()
    hashed = key_hash(0)
    one_by_one = [hashed.one(joined, at) for at in range(0, len(joined), 16)]
    assert hashed.all(keys).tolist() == one_by_one
    assert hashed.one(joined[16:32]) == one_by_one[1]


def test_two_keys_meet_as_rarely_as_random_numbers() -> None:
    """Over many secret numbers, for pairs that multiply-shift without the upper half of the words would confuse."""
    pairs = np.array([[0, 0], [1 << 63, 1 << 63], [1 << 63, 0], [0, 1 << 31], [1 << 32, 0], [1, 0]], np.uint64)
    met = 0
    for seed in range(300):
        places = key_hash(seed).all(pairs) >> np.uint32(22)
        met += len(places) - len(np.unique(places))
    assert met < 20, "expected: 300 * 15 pairs in 1,024 places, 4.4"


def test_a_hash_of_other_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[4\] multipliers"):
        KeyHash(np.zeros(3, np.uint64), np.zeros((3, 2048), np.uint32))
