"""The memory of the three tiers: slots taken and given back, and where a slot's bytes are."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prefixd.cache.index.trie import CPU, DISK, GPU, NO_SLOT, TIERS
from prefixd.cache.troubles import Troubles
from prefixd_swap import CpuArena, FrameId, FramePool, SlabStore, Span, round_to_slot

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

    def ever_fits(self, tier: int, sizes: Sequence[int]) -> bool:
        """Whether an empty tier has room for one block; if not, nothing need be evicted for it."""
        return tier == GPU or sum(map(round_to_slot, sizes)) <= self.arena.capacity_bytes

    def allocate(self, tier: int, sizes: Sequence[int]) -> list[int] | None:
        """Loose slots for the parts of one block, or None when there is no room for all of them."""
        if tier == GPU:
            frames = self.frames.allocate(1)
            if frames is None:
                return None
            self.in_flight[GPU].update(frames)
            return list(frames)
        offsets: list[int] = []
        for size in sizes:
            offset = self.arena.allocate(size)
            if offset is None:
                self.release(CPU, offsets)
                return None
            offsets.append(offset)
        self.in_flight[CPU].update(offsets)
        return offsets

    def allocate_frames(self, count: int) -> list[int]:
        """Up to `count` loose slots in the GPU tier, at once."""
        frames = self.frames.allocate(min(count, self.frames.free_count)) or []
        self.in_flight[GPU].update(frames)
        return list(frames)

    def release(self, tier: int, slots: Iterable[int]) -> None:
        """Gives back slots of the GPU or CPU tier, in_flight or just dropped from a trie; NO_SLOT is skipped."""
        present = [slot for slot in slots if slot != NO_SLOT]
        self.in_flight[tier].difference_update(present)
        if tier == GPU:
            self.frames.free([FrameId(slot) for slot in present])
        else:
            for slot in present:
                self.arena.free(slot)
