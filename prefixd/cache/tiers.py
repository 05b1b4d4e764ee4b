"""The tiers of one daemon by their purpose, and counters of their events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from prefixd.base.clocks import elapsed_s
from prefixd.base.errors import UnsupportedError
from prefixd.cache.index.trie import TIERS
from prefixd.cache.troubles import Troubles
from prefixd_swap import CpuArena, FramePool, SlabStore
from prefixd_swap.tiers import (
    AbsentTier,
    CpuTier,
    DiskTier,
    GpuTier,
    Int64s,
    MemoryTier,
    RemoteTier,
    StoreTier,
    Tier,
    can_move,
)
from prefixd_swap.transfers import Transfers

Slots = Int64s

T = TypeVar("T", bound=Tier)


@dataclass(slots=True)
class TierCounters:
    """Blocks evicted from, demoted from, and promoted to a tier since the start, and bytes brought up from it."""

    evicted: int = 0
    demoted: int = 0
    promoted: int = 0
    loaded_bytes: int = 0


class Tiers:
    """The tiers of this daemon by their purpose. In the index a tier is the column of its level.

    Args:
        transfers: moves bytes between the tiers; `close` ends it.
        compute: GPU memory, where requests run; may be added when the worker has told the size of a block.
        shared: the memory that clients map.
        durable: the tier that survives the end of the process.
        remote: a store that other hosts share.
        troubles: the list of failures of tiers; a new one by default.
    """

    def __init__(
        self,
        transfers: Transfers,
        *,
        compute: MemoryTier | None = None,
        shared: MemoryTier | None = None,
        durable: StoreTier | None = None,
        remote: RemoteTier | None = None,
        troubles: Troubles | None = None,
    ) -> None:
        self.transfers = transfers
        self.compute: MemoryTier = AbsentTier("gpu", 0) if compute is None else compute
        """The tier where requests run; changed by `set_compute`."""
        self.shared: MemoryTier = AbsentTier("cpu", 1) if shared is None else shared
        self.durable = durable
        self.remote = remote
        self.troubles = Troubles(elapsed_s) if troubles is None else troubles
        self.counters = tuple(TierCounters() for _ in range(TIERS))
        """Counters of each tier, by level."""
        self._padded = False
        self._list()
        levels = [tier.level for tier in self]
        if levels != sorted({level for level in levels if 0 <= level < TIERS}):
            raise ValueError(f"tiers of the levels {levels}; give each its own, ascending, from 0 to {TIERS - 1}")

    @classmethod
    def local(
        cls,
        arena: CpuArena | None = None,
        store: SlabStore | None = None,
        frames: FramePool | None = None,
        *,
        urgency: bool = True,
        io_threads: int = 4,
        remote: Callable[[Transfers], RemoteTier] | None = None,
        troubles: Troubles | None = None,
        clock: Callable[[], float] = elapsed_s,
    ) -> Tiers:
        """The tiers of this machine, and a store that it shares with others.

        Args:
            arena: the shared tier's memory.
            store: the durable tier's files.
            frames: the compute tier's memory, if it is there already.
            urgency: False: bytes move in the order of the requests.
            io_threads: parallel reads or writes of the files that no caller waits for.
            remote: makes the tier of a store that other hosts share.
            troubles: the list of failures; a new one by default.
            clock: seconds, for the times when transfers are due.

        Raises:
            OutOfMemoryError: the system gives no threads.
        """
        transfers = Transfers(urgency_enabled=urgency, clock=clock)
        return cls(
            transfers,
            compute=None if frames is None else GpuTier(frames),
            shared=None if arena is None else CpuTier(arena),
            durable=None if store is None else DiskTier(store, transfers, threads=io_threads),
            remote=None if remote is None else remote(transfers),
            troubles=troubles,
        )

    def __iter__(self) -> Iterator[Tier]:
        """All tiers, nearest first, including absent memory tiers."""
        yield self.compute
        yield self.shared
        if self.durable is not None:
            yield self.durable
        if self.remote is not None:
            yield self.remote

    def _list(self) -> None:
        self.existing = [tier for tier in self if not isinstance(tier, AbsentTier)]
        """The tiers that are not absent, nearest first."""
        self.own = [tier for tier in self.existing if tier is not self.remote]
        """The tiers of this host that are not absent, nearest first: blocks are demoted and evicted there."""

    @property
    def memories(self) -> tuple[MemoryTier, MemoryTier]:
        """The memory tiers, nearest first, including absent ones."""
        return self.compute, self.shared

    def set_compute(self, tier: MemoryTier) -> None:
        """Replaces the compute tier."""
        self.compute = tier
        if self._padded:
            self.set_padded()
        self._list()

    def set_padded(self) -> None:
        """Blocks of a namespace are padded in the compute tier and packed in all others (`PartSpec.rows`).

        Stores then read and write no bytes there, also where the tier is host memory: they go through the shared tier.
        """
        self._padded = True
        self.compute.addressable = False

    def end_compute(self) -> None:
        """Removes the compute tier, which is not used any more; its maker closes it."""
        self.set_compute(AbsentTier(self.compute.name, self.compute.level))

    @property
    def names(self) -> list[str]:
        """The names of the tiers, by level."""
        names = [f"level {level}" for level in range(TIERS)]
        for tier in self:
            names[tier.level] = tier.name
        return names

    @staticmethod
    def exists(tier: Tier) -> bool:
        """Whether this daemon has the tier."""
        return not isinstance(tier, AbsentTier)

    def below(self, tier: Tier) -> Tier | None:
        """The next tier down that exists, works, and can be written from this one."""
        for lower in self.own:
            # A file cannot be written from memory that a CPU cannot read: such bytes go through the shared tier.
            if lower.level > tier.level and self.writable(lower) and can_move(tier, lower):
                return lower
        return None

    @staticmethod
    def writable(tier: Tier) -> bool:
        """Whether blocks can be written to the tier now."""
        return not isinstance(tier, StoreTier | RemoteTier) or tier.writable

    @staticmethod
    def readable(tier: Tier) -> bool:
        """Whether blocks can be read from the tier now."""
        return not isinstance(tier, StoreTier | RemoteTier) or tier.readable

    @property
    def writes(self) -> bool:
        """Whether there is a durable tier that can be written now."""
        return self.durable is not None and self.durable.writable

    async def close(self) -> None:
        """Ends all transfers, and the threads of the tiers. The makers of memory and files close these."""
        await self.transfers.close()
        if self.durable is not None:
            self.durable.close()
        if self.remote is not None:
            await self.remote.close()

    def check_shared(self) -> None:
        """Raises UnsupportedError if there is no shared tier."""
        if not self.exists(self.shared):
            raise UnsupportedError("this daemon has no CPU tier to share; start it with cpu.bytes above 0")

    def require_durable(self) -> StoreTier:
        """The durable tier, for callers that need one."""
        if self.durable is None:
            raise RuntimeError("this daemon has no durable tier")
        return self.durable

    # -- the tiers of this machine, for callers that need them --------------------------------------------------------

    @property
    def arena(self) -> CpuArena:
        """The shared tier's memory."""
        return _known(self.shared, CpuTier).arena

    @property
    def frames(self) -> FramePool:
        """The compute tier's memory."""
        return self.gpu.pool

    @property
    def gpu(self) -> GpuTier:
        """The compute tier."""
        return _known(self.compute, GpuTier)

    @property
    def store(self) -> SlabStore:
        """The durable tier's files."""
        return _known(self.durable, DiskTier).store


def _known(tier: Tier | None, kind: type[T]) -> T:
    if not isinstance(tier, kind):
        raise RuntimeError(f"this daemon has no {kind.__name__}")
    return tier
