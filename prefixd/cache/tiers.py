"""The memory of the three tiers: slots taken and given back, and where a slot's bytes are."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.trie import CPU, DISK, GPU, NO_SLOT, TIERS
from prefixd.cache.troubles import Troubles
from prefixd_swap import CpuArena, FrameId, FramePool, PageAllocator, SlabStore, Span, round_to_slot

Slots = npt.NDArray[np.int64]

TIER_NAMES = ("gpu", "cpu", "disk")


def tier_part(tier: int) -> str:
    """What a tier's troubles are about, in `Troubles`."""
    return f"{TIER_NAMES[tier]} tier"


@dataclass(slots=True)
class TierCounters:
    """What happened in a tier since the start, in blocks."""

    evicted: int = 0
    demoted: int = 0
    promoted: int = 0


class Tiers:
    """What this daemon has of GPU, CPU and disk.

    A slot is a frame in the GPU tier, a byte offset in the CPU tier, and a slot of the slab store on disk. Slots of the
    first two that are taken but not (yet) in a trie are *in_flight*: reservations, blocks a request is filling, copies
    under way.

    Args:
        cpu: the arena, if there is a CPU tier.
        disk: the slab store, if there is a disk tier.
        gpu: the frames; set later, when the worker has said what a block looks like.
        troubles: where what is wrong with a tier is entered; a list of their own by default.
    """

    def __init__(
        self,
        cpu: CpuArena | None = None,
        disk: SlabStore | None = None,
        gpu: FramePool | None = None,
        *,
        troubles: Troubles | None = None,
    ) -> None:
        self.cpu = cpu
        self.disk = disk
        self.gpu = gpu
        self.counters = tuple(TierCounters() for _ in range(TIERS))
        self.troubles = Troubles(time.monotonic) if troubles is None else troubles
        self.disk_takes = True
        """Whether the disk tier is written to; False from a failure until it is known to work again."""
        self.disk_gives = True
        """Likewise, whether it is read."""
        self.in_flight: tuple[set[int], set[int]] = (set(), set())

    @property
    def trouble(self) -> list[str]:
        """By tier, why it is out or shrunk; empty for one that is well."""
        return [self.troubles.what(tier_part(tier)) for tier in range(TIERS)]

    def exists(self, tier: int) -> bool:
        """Whether this daemon has the tier."""
        return (self.gpu, self.cpu, self.disk)[tier] is not None

    def below(self, tier: int) -> int | None:
        """The next tier down that exists, works, and can be written from this one."""
        for lower in range(tier + 1, TIERS):
            # A file cannot be written from an address that a CPU cannot read: that goes by way of the CPU tier.
            reachable = lower != DISK or tier != GPU or not self.gpu_on_device
            if self.exists(lower) and (lower != DISK or self.disk_takes) and reachable:
                return lower
        return None

    @property
    def arena(self) -> CpuArena:
        """The CPU tier's memory, where the caller knows there is one."""
        if self.cpu is None:
            raise RuntimeError("there is no CPU tier")
        return self.cpu

    @property
    def frames(self) -> FramePool:
        """The GPU tier's memory, where the caller knows there is one."""
        if self.gpu is None:
            raise RuntimeError("there is no GPU tier")
        return self.gpu

    @property
    def store(self) -> SlabStore:
        """The disk tier, where the caller knows there is one."""
        if self.disk is None:
            raise RuntimeError("there is no disk tier")
        return self.disk

    @property
    def gpu_on_device(self) -> bool:
        """Whether the GPU tier is memory that a CPU cannot address."""
        return self.gpu is not None and self.gpu.memory.on_device

    def span(self, tier: int, slot: int, nbytes: int) -> Span:
        """The memory of a slot in the GPU or CPU tier."""
        return self.frames.span(FrameId(slot)) if tier == GPU else self.arena.span(slot, nbytes)

    def pages(self, tier: int) -> PageAllocator | None:
        """The pages of a tier whose slots have several sizes; None for one whose slots are all alike."""
        return self.arena.pages if tier == CPU else None

    def ever_fits(self, tier: int, sizes: Sequence[int]) -> bool:
        """Whether an empty tier has room for one block; if not, nothing need be evicted for it."""
        return tier == GPU or sum(map(round_to_slot, sizes)) <= self.arena.capacity_bytes

    def allocate(self, tier: int, sizes: Sequence[int], count: int = 1, near: Sequence[int] = ()) -> Slots:
        """Slots in flight for up to `count` blocks in the GPU or CPU tier: all parts of a block or none.

        Args:
            tier: where.
            sizes: bytes of each of the p parts of a block.
            count: blocks.
            near: slots [p] of a block of the same prefix, close to which the new ones should lie; NO_SLOT for none.

        Returns:
            [m, p], m <= count: fewer blocks when there is no room for more.
        """
        if tier == GPU:
            frames = self.frames.allocate(min(count, self.frames.free_count)) or ()
            slots = np.array([int(frame) for frame in frames], np.int64).reshape(-1, 1)
        else:
            slots = self._allocate_in_arena(sizes, count, near)
        self.in_flight[tier].update(slots.ravel().tolist())
        return slots

    def _allocate_in_arena(self, sizes: Sequence[int], count: int, near: Sequence[int]) -> Slots:
        arena, hints = self.arena, [None if slot == NO_SLOT else slot for slot in near] or [None] * len(sizes)
        count = min([count, *(arena.room(size) for size in set(sizes))])
        while count:  # what one size takes another may lack, so the smaller number is tried where a larger one fails
            columns: list[Slots] = []
            for size, hint in zip(sizes, hints, strict=True):
                column = arena.allocate_many(size, count, hint)
                if column is None:
                    break
                columns.append(column)
            if len(columns) == len(sizes):
                return np.stack(columns, axis=1)
            for column in columns:
                arena.free_many(column)
            count //= 2
        return np.empty((0, len(sizes)), np.int64)

    def release(self, tier: int, slots: Iterable[int] | Slots) -> None:
        """Gives back slots of the GPU or CPU tier, in flight or just dropped from a trie; NO_SLOT is skipped."""
        flat = np.array(slots if isinstance(slots, np.ndarray) else list(slots), np.int64).ravel()
        present = flat[flat != NO_SLOT]
        self.in_flight[tier].difference_update(present.tolist())
        if tier == GPU:
            self.frames.free([FrameId(slot) for slot in present.tolist()])
        else:
            self.arena.free_many(present)
