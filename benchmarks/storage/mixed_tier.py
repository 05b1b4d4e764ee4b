"""Blocks of several sizes in one full tier, stored and read through the real cache; the mixture of sizes drifts."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from benchmarks.common import harness
from benchmarks.storage.sparse_files import SparseFiles
from prefixd.base.errors import ExhaustedError
from prefixd.cache import BlockChain, NamespaceSpec, PartSpec, Reservation, TieredCache, Tiers
from prefixd.cache.coding.namespace_codings import TierCodec
from prefixd.cache.index.trie import DISK
from prefixd.cache.options import CacheOptions
from prefixd_swap import CpuArena, SlabStore, create_copy_engine, create_eviction_policy

TierName = Literal["cpu", "disk", "coded"]
"""coded: the disk tier, with a lossless codec."""

BLOCK_TOKENS = 4
_STAMP_BYTES = 1024
_NOISE = np.random.default_rng(0).integers(0, 256, 4 << 20, np.uint8)
_MOST_BLOCKS = 8  # of a prompt
_READS = 0.5  # of the operations
_TURNS = 3.0  # of the mixture, in a run


@dataclass(frozen=True, slots=True)
class Mixture:
    """Block sizes in bytes, and a capacity for them."""

    sizes: tuple[int, ...]
    capacity_bytes: int

    @property
    def name(self) -> str:
        """Such as "4 KiB, 64 KiB"."""
        return ", ".join(f"{size >> 10} KiB" if size < 1 << 20 else f"{size / (1 << 20):g} MiB" for size in self.sizes)

    def draw(self, done: float, chance: random.Random) -> int:
        """A size when the run is `done` (0 to 1): each size's share goes up and down at a pace of its own."""
        share = [
            1 + math.sin(2 * math.pi * (_TURNS * done * (1 + at / 3) + at / len(self.sizes))) + 0.02
            for at in range(len(self.sizes))
        ]
        return chance.choices(self.sizes, [part / size**0.5 for part, size in zip(share, self.sizes, strict=True)])[0]


@dataclass(slots=True)
class Figures:
    """What happened to the tier."""

    tier: str
    sizes: str
    capacity_bytes: int
    operations: int = 0
    stored_blocks: int = 0
    refused: int = 0
    hit_blocks: int = 0
    page_bytes: int = 0
    worst_excess_pages: float = 0.0
    """Bytes evicted beyond the bytes asked for, in pages, in the worst operation."""
    utilisation: float = 1.0
    """Lowest share of the capacity that blocks have, after any operation once the tier was full."""
    wrong_bytes: int = 0
    utilisation_over_time: list[float] = field(default_factory=list)


class MixedTier:
    """Prompts of new tokens, and readers of prompts drawn at random, so that recency has nothing to do with place."""

    def __init__(self, cache: TieredCache, tier: TierName, mixture: Mixture, operations: int, seed: int) -> None:
        self.figures = Figures(tier, mixture.name, mixture.capacity_bytes)
        self._cache = cache
        self._mixture = mixture
        self._operations = operations
        self._chance = random.Random(f"{seed} {tier} {mixture.name}")
        self._session = cache.leases.open("benchmark", 0, 0.0, cache.tenants.default)
        self._namespaces = {size: cache.register(_spec(size)) for size in mixture.sizes}
        self._prompts: list[tuple[int, BlockChain]] = []  # size of a block, blocks
        self._number = 0
        self._is_full = False
        self._most_prompts = 2 * sum(mixture.capacity_bytes // size for size in mixture.sizes) // len(mixture.sizes)

    async def run(self, progress: Callable[[], None]) -> None:
        every = max(1, self._operations // 500)
        for done in range(self._operations):
            if self._prompts and self._chance.random() < _READS:
                await self._read(*self._chance.choice(self._prompts))
            else:
                await self._store(self._mixture.draw(done / self._operations, self._chance))
            self.figures.operations += 1
            if self._is_full:
                share = self._used() / self._mixture.capacity_bytes
                self.figures.utilisation = min(self.figures.utilisation, share)
            if done % every == 0:
                self.figures.utilisation_over_time.append(round(self._used() / self._mixture.capacity_bytes, 4))
                progress()

    async def _store(self, size: int) -> None:
        blocks = self._chance.randint(1, max(1, min(_MOST_BLOCKS, self._mixture.capacity_bytes // size // 64)))
        namespace = self._namespaces[size]
        tokens = np.arange(self._number, self._number + blocks, dtype="<u4").repeat(BLOCK_TOKENS)
        self._number += blocks
        chain = self._cache.chain(namespace, tokens.tobytes())
        durable = self.figures.tier != "cpu"
        before = self._used()
        try:
            reservation = await self._cache.reserve(self._session, namespace, chain)
        except ExhaustedError:
            self._count_evicted(before, blocks * size, 0)
            self.figures.refused += 1
            return
        if isinstance(reservation, int):
            raise harness.BenchmarkError("a prompt of new tokens is cached already")
        slots = len(reservation.slots)
        if not durable:
            self._count_evicted(before, blocks * size, slots * size)
        self._fill(reservation, size)
        try:
            await self._cache.commit(reservation, slots, durable=durable)
        except ExhaustedError:
            self.figures.refused += 1
        if durable:
            trie = self._cache.trie(namespace)
            rows = trie.usable(trie.nodes(namespace.root, chain))
            there = rows[trie.there[rows, DISK] != 0]
            stored = int(trie.stored_slots_bytes(there).sum())
            self._count_evicted(before, stored + (slots - len(there)) * size, stored)
        self.figures.stored_blocks += slots
        self._prompts.append((size, chain))
        if len(self._prompts) > self._most_prompts:
            at = self._chance.randrange(len(self._prompts))
            self._prompts[at] = self._prompts[-1]
            del self._prompts[-1]

    async def _read(self, size: int, chain: BlockChain) -> None:
        namespace = self._namespaces[size]
        try:
            lease = await self._cache.acquire(self._session, namespace, chain)
        except ExhaustedError:
            self.figures.refused += 1
            return
        if lease is None:
            return
        offsets = self._cache.offsets(lease, (0,)).ravel().tolist()
        first = int.from_bytes(chain.block(0)[:4], "little")
        for block, offset in enumerate(offsets):
            found = self._cache.tiers.arena.array(offset, size)
            for start, right in _content(first + block, size):
                self.figures.wrong_bytes += int(np.count_nonzero(found[start : start + len(right)] != right))
        self.figures.hit_blocks += len(offsets)
        self._cache.release(self._session, lease.id)

    def _fill(self, reservation: Reservation, size: int) -> None:
        first = int.from_bytes(reservation.chain.block(0)[:4], "little") + reservation.first_block
        for block, (offset,) in enumerate(reservation.slots):
            memory = self._cache.tiers.arena.array(offset, size)
            for start, right in _content(first + block, size):
                memory[start : start + len(right)] = right

    def _count_evicted(self, before: int, asked: int, stored: int) -> None:
        """Count what was evicted by an operation that asked for room; all three in bytes."""
        evicted = before + stored - self._used()
        self.figures.page_bytes = self._page_bytes()
        if evicted > 0 or stored < asked:
            self._is_full = True
            excess = (evicted - asked) / self.figures.page_bytes
            self.figures.worst_excess_pages = max(self.figures.worst_excess_pages, excess)

    def _used(self) -> int:
        tiers = self._cache.tiers
        return tiers.arena.pages.used_bytes if self.figures.tier == "cpu" else tiers.store.used_bytes

    def _page_bytes(self) -> int:
        tiers = self._cache.tiers
        return tiers.arena.pages.page_bytes if self.figures.tier == "cpu" else tiers.store.page_bytes


@asynccontextmanager
async def mixed_tier(
    tier: TierName, mixture: Mixture, operations: int, seed: int, folder: Path
) -> AsyncIterator[MixedTier]:
    """A cache whose CPU tier, or whose disk tier behind a small CPU tier, has the mixture's capacity."""
    clock = _Clock()
    engine = create_copy_engine("cpu", 2)
    small = 4 * _MOST_BLOCKS * sum(mixture.sizes)
    arena = CpuArena(mixture.capacity_bytes if tier == "cpu" else min(small, mixture.capacity_bytes))
    store = None
    if tier != "cpu":
        store = SlabStore.open(folder / "store", mixture.capacity_bytes, io="buffered", ops=SparseFiles())
    options = CacheOptions(write_back=False, disk_codec=TierCodec("lossless" if tier == "coded" else "exact"))
    cache = TieredCache(Tiers.local(arena, store), engine, create_eviction_policy("lru", seed), clock, options)
    try:
        yield MixedTier(cache, tier, mixture, operations, seed)
        await cache.mover.quiesce()
        arena.pages.check_integrity()
        if store is not None:
            store.check_integrity()
    finally:
        await cache.close()
        engine.close()
        if store is not None:
            store.close()
        arena.close()


class _Clock:
    """Each look at it is a moment later, so that recency is a strict order."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 1e-4
        return self._now


def _spec(size: int) -> NamespaceSpec:
    return NamespaceSpec(f"benchmark-mixed-{size}", BLOCK_TOKENS, (PartSpec("full", 0, size),))


def _content(number: int, size: int) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """The pieces of the block with this number, and where they begin.

    In the first one, no byte is what another block has at this place by chance alone. Then comes noise, and zeros, of
    which a codec makes nearly nothing: each block has another share of them.
    """
    stamp = _stamp(number, size)
    noise = (size - len(stamp)) * (number * 7919 % 97) // 96
    start = number * 4099 % (len(_NOISE) - noise)
    yield 0, stamp
    yield len(stamp), _NOISE[start : start + noise]
    yield len(stamp) + noise, np.zeros(size - len(stamp) - noise, np.uint8)


def _stamp(number: int, size: int) -> npt.NDArray[np.uint8]:
    words = np.arange(min(_STAMP_BYTES, size) // 8, dtype=np.uint64)
    mixed = (words + np.uint64(number * 1_000_003 + size)) * np.uint64(0x9E3779B97F4A7C15)
    return mixed.view(np.uint8)
