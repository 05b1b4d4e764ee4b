"""Blocks to store and to read back, and the store tiers that every test of the contract runs on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from prefixd.planner.simulation.link import SimulatedLink
from prefixd_swap import BlockRecord, FileOps, NewBlock, SlabStore, Span, SwapError
from prefixd_swap.tiers import NO_SLOT, DiskTier, Loads, Places
from prefixd_swap.transfers import Transfers
from tests.swap.tiers.simulated import FaultyStoreTier, SimulatedFaults, SimulatedStoreTier

PART_BYTES = (5000, 4096)
NAMESPACE = b"space-01"

_KEPT: list[object] = []
"""Spans and addresses borrow: what they point at stays for as long as the tests run."""


class Blocks:
    """A chain of blocks with random bytes, kept here to compare with."""

    def __init__(self, count: int, *, seed: int = 0, lacking: Sequence[int] = ()) -> None:
        """Blocks in `lacking` have no second part."""
        chance = random.Random(seed)
        self.data = [
            [np.frombuffer(bytearray(chance.randbytes(size)), np.uint8) for size in PART_BYTES] for _ in range(count)
        ]
        _KEPT.append(self.data)
        self.keys = [chance.randbytes(16) for _ in range(count)]
        self.new = [
            NewBlock(
                NAMESPACE,
                key,
                self.keys[at - 1] if at else b"",
                bytes(8),
                at,
                [
                    None if part and at in lacking else Span(data.ctypes.data, data.nbytes)
                    for part, data in enumerate(self.data[at])
                ],
                [xxhash.xxh3_64_intdigest(data.tobytes()) for data in self.data[at]] if at % 2 else None,
            )
            for at, key in enumerate(self.keys)
        ]

    def records(self, places: Sequence[Places | SwapError | None]) -> list[BlockRecord]:
        """What the index has to say about blocks that were stored there."""
        return [
            BlockRecord(new.namespace, new.key, new.parent, new.tokens, place, new.depth)
            for new, place in zip(self.new, places, strict=True)
            if isinstance(place, tuple)
        ]

    @property
    def names(self) -> list[tuple[bytes, bytes]]:
        return [(NAMESPACE, key) for key in self.keys]


class Landing:
    """Memory to read blocks into."""

    def __init__(self, places: Sequence[Places | SwapError | None]) -> None:
        self.data = [[np.zeros(size, np.uint8) for size in PART_BYTES] for _ in places]
        _KEPT.append(self.data)
        parts = [place if isinstance(place, tuple) else (None, None) for place in places]
        self.loads = Loads(
            np.array([[NO_SLOT if p is None else p.slot for p in row] for row in parts], np.int64).reshape(-1, 2),
            np.array([[0 if p is None else p.checksum for p in row] for row in parts], np.uint64).reshape(-1, 2),
            np.array([[into.ctypes.data for into in row] for row in self.data], np.int64).reshape(-1, 2),
            PART_BYTES,
        )

    def holds(self, blocks: Blocks, at: int) -> bool:
        return all(np.array_equal(mine, theirs) for mine, theirs in zip(self.data[at], blocks.data[at], strict=True))


async def at_once(seconds: float) -> None:
    """A sleeper for which no time passes."""
    assert seconds >= 0
    await asyncio.sleep(0)


def disk(folder: Path, transfers: Transfers, capacity_bytes: int, ops: FileOps | None = None) -> DiskTier:
    return DiskTier(SlabStore.open(folder, capacity_bytes, ops=ops), transfers)


def simulated(
    transfers: Transfers,
    capacity_bytes: int,
    faults: SimulatedFaults | None = None,
    name: str = "far",
    kind: type[FaultyStoreTier] = SimulatedStoreTier,
) -> FaultyStoreTier:
    link = SimulatedLink(1e9, 1e-3, lambda: 0.0, at_once)
    return kind(transfers, name=name, level=3, capacity_bytes=capacity_bytes, link=link, faults=faults)


def unbacked(transfers: Transfers, capacity_bytes: int, faults: SimulatedFaults) -> FaultyStoreTier:
    return simulated(transfers, capacity_bytes, faults, kind=FaultyStoreTier)
