"""The ghosts of a tier: exact where every block is in the sample, and near the truth where few are."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.cache.ghosts.ghost_tier import FACTORS, NOW, GhostTier, Prompt, Sizes
from prefixd.cache.ghosts.miniature import Miniature
from prefixd.cache.ghosts.prefix_hashes import PrefixHashes
from prefixd.cache.prompt_listeners import Lookup
from prefixd_swap import create_eviction_policy

Paths = Sequence[Sequence[int]]
_TREE = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40)


def hashed(path: Sequence[int], hashes: PrefixHashes) -> np.ndarray:
    rows = np.array(path, np.uint32).repeat(2).reshape(-1, 2)
    return hashes.of_blocks(rows, 3)


def play(ghost: GhostTier, paths: Paths, sizes: Sizes, found: Iterable[int], seed: int = 1) -> None:
    hashes = PrefixHashes(np.random.default_rng(seed).bytes(24))
    for at_s, (path, ours) in enumerate(zip(paths, found, strict=True)):
        ghost.begin(sizes, 1)
        prompt = Prompt(2.0 * at_s, "t", 16, 1, Lookup(16 * len(path), len(path), ours))
        for _ in ghost.use(prompt, hashed(path, hashes), sizes):
            pass


def numbered(paths: Paths) -> list[np.ndarray]:
    known: dict[tuple[int, ...], int] = {}
    return [
        np.array([known.setdefault(tuple(path[:end]), len(known)) for end in range(1, len(path) + 1)], np.int64)
        for path in paths
    ]


def replayed(paths: Paths, policy: str, capacity: int) -> list[int]:
    """The exact model: every block, one policy, one size."""
    rows = numbered(paths)
    blocks = max(int(row.max()) for row in rows) + 1
    tier = Miniature(blocks, capacity, create_eviction_policy(policy, 0), block_bytes=1)
    return [tier.use(path, 2.0 * at_s) for at_s, path in enumerate(rows)]


@settings(max_examples=40)
@given(paths=_TREE, policy=st.sampled_from(["lru", "lfu", "s3-fifo"]))
def test_a_sample_of_all_blocks_gives_exactly_what_the_model_finds(paths: Paths, policy: str) -> None:
    sizes = Sizes(8)
    ghost = GhostTier(1, 512, policy, ("lru", "s3-fifo"), rate=1.0)
    ours = replayed(paths, policy, 8)
    play(ghost, paths, sizes, ours)
    asked = sum(map(len, paths))
    exact = [sum(replayed(paths, policy, int(total))) / asked for total in sizes.totals()]
    assert ghost.all.hit_rates().tolist() == pytest.approx(exact)
    assert ghost.all.hit_rate == pytest.approx(sum(ours) / asked)
    assert ghost.other_rates() == pytest.approx(
        {name: sum(replayed(paths, name, 8)) / asked for name in ("lru", "s3-fifo")}
    )


@settings(max_examples=30)
@given(paths=_TREE)
def test_the_sample_stays_in_its_room_and_a_lower_rate_keeps_a_part_of_it(paths: Paths) -> None:
    ghost = GhostTier(1, 16, "lru", ("lfu",), rate=1.0)
    sizes = Sizes(1000)
    rates = []
    for _ in range(3):
        play(ghost, paths, sizes, [0] * len(paths))
        rates.append(ghost.rate)
        assert ghost.blocks <= 16
        ghost.halve(0.0)
    assert rates == sorted(rates, reverse=True)
    assert (ghost.all.hit_rates() >= 0).all() and (ghost.all.hit_rates() <= 1).all()


def conversations(seed: int, prompts: int) -> Paths:
    """A common beginning, and conversations that grow and come back with falling probability."""
    rng = np.random.default_rng(seed)
    open_ones: list[list[int]] = []
    paths = []
    for number in range(prompts):
        if open_ones and rng.random() < 0.7:
            place = len(open_ones) - 1 - int(min(rng.exponential(60), len(open_ones) - 1))
            path = open_ones[place]
            path.extend((1000 + number) * 64 + np.arange(rng.integers(2, 8)))
            if len(path) > 100:
                open_ones.pop(place)
        else:
            path = [0, 1, 2, *((1000 + number) * 64 + np.arange(rng.integers(2, 20))).tolist()]
            open_ones.append(path)
        paths.append(list(path))
    return paths


@pytest.mark.slow
def test_a_small_sample_is_within_two_points_and_within_its_margin() -> None:
    policy = "lru"
    paths = conversations(1, 2500)
    sizes, asked = Sizes(1200), sum(map(len, paths))
    exact = np.array([sum(replayed(paths, policy, int(total))) / asked for total in sizes.totals()])
    ours = replayed(paths, policy, 1200)
    assert exact[-1] - exact[0] > 0.2, "sizes matter in this workload"
    outside = 0
    for seed in range(4):
        ghost = GhostTier(1, 2048, policy)
        play(ghost, paths, sizes, ours, seed)
        assert ghost.rate < 0.2
        error = np.abs(ghost.all.hit_rates() - exact)
        assert error.max() < 0.02
        outside += int(np.count_nonzero(error > np.maximum(ghost.all.margins(), 0.005)))
    assert outside <= 0.2 * 4 * len(FACTORS)


def test_sizes_count_nearer_tiers() -> None:
    assert Sizes(8, beside=4).totals()[NOW] == 12
    assert Sizes(8, within=20).totals()[NOW] == 20
    assert Sizes(8, within=20).totals()[-1] == 64


def test_tenants_are_told_apart_and_stored_blocks_are_not_asked_for() -> None:
    ghost, sizes = GhostTier(1, 64, "lru", rate=1.0), Sizes(16)
    hashes = PrefixHashes(bytes(range(24)))
    stored, asked = (Prompt(0.0, "a", 16, 1, None), Prompt(1.0, "b", 16, 1, Lookup(32, 2, 0)))
    for prompt in (stored, asked):
        for _ in ghost.use(prompt, hashed([1, 2], hashes), sizes):
            pass
    assert list(ghost.tenants) == ["b"]
    assert ghost.tenants["b"].hit_rates()[NOW] == 1.0
    assert ghost.all.hit_rate == 0.0


def test_hashes_depend_on_order_beginning_seed_and_every_token() -> None:
    hashes = PrefixHashes(bytes(range(24)))
    for width in (3, 16):
        rows = np.arange(5 * width, dtype=np.uint32).reshape(5, width)
        found = hashes.of_blocks(rows, 1)
        assert (hashes.of_blocks(rows[:3], 1) == found[:3]).all()
        assert not (hashes.of_blocks(rows, 2) == found).any()
        assert not (hashes.of_blocks(rows[[1, 0, 2, 3, 4]], 1)[1:] == found[1:]).any()
        for token in range(width):
            other = rows.copy()
            other[1, token] += 1
            changed = hashes.of_blocks(other, 1) != found
            assert changed.tolist() == [False, True, True, True, True]
    with pytest.raises(ValueError, match="24 or more"):
        PrefixHashes(b"few")


def test_a_block_of_an_odd_number_of_tokens_is_copied_in_slices() -> None:
    hashes, rows = PrefixHashes(), np.zeros((1024, 1023), np.uint32)
    hashes.of_blocks(rows[:1], 1)
    tracemalloc.start()
    try:
        hashes.of_blocks(rows, 1)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20, "of 4 MiB of tokens"
    finally:
        tracemalloc.stop()


def test_others_run_between_many_miniatures() -> None:
    ghost, hashes = GhostTier(1, 4096, "weighing", ("lru", "lfu"), rate=1.0), PrefixHashes()
    path = hashed(range(200), hashes)
    steps = ghost.use(Prompt(0.0, "t", 16, 1, Lookup(3200, 200, 0)), path, Sizes(4096))
    assert len(list(steps)) >= 12 * 200 // 512, "ten sizes and two other policies"


def test_blocks_that_the_engine_has_are_simulated_and_not_counted() -> None:
    ghost, sizes = GhostTier(1, 64, "lru", rate=1.0), Sizes(16)
    hashes = PrefixHashes(bytes(range(24)))
    for at_s, lookup in enumerate((Lookup(64, 4, 0), Lookup(32, 4, 3, first_block=2))):
        for _ in ghost.use(Prompt(float(at_s), "t", 16, 1, lookup), hashed([1, 2, 3, 4], hashes), sizes):
            pass
    assert (ghost.all.asked_tokens, ghost.all.ours_tokens, ghost.all.references) == (96, 16, 6)
    assert ghost.all.hit_rates()[NOW] == pytest.approx(2 / 6)
