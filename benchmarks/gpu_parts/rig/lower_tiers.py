"""The CPU tier's arena and the disk tier's store below an engine's rig, as the daemon puts them together."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.rig.device import Device
from benchmarks.gpu_parts.rig.engine_rig import EngineRig
from benchmarks.gpu_parts.rig.part import Budget
from prefixd_swap.arena import CpuArena
from prefixd_swap.copies.copy_engine import CopyEngine, create_copy_engine
from prefixd_swap.copies.pinning import HostPin
from prefixd_swap.errors import StorageError
from prefixd_swap.slab.index.block_record import NAMESPACE_BYTES, DiskPart, NewBlock
from prefixd_swap.slab.store import SlabStore
from prefixd_swap.vmem import FrameId

_READERS = 6
_PIECE_BLOCKS = 8  # that are read from disk at once, and copied on while the next are read


class LowerTiers:
    """The arena, pinned as the daemon pins it, and a slab store; block i of the prompt lies in slot i of either."""

    def __init__(self, device: Device, rig: EngineRig, nbytes: int) -> None:
        self._rig = rig
        self._block_bytes = rig.geometry.block_bytes
        self._stack = ExitStack()
        self._parts: list[DiskPart] = []
        self._written = 0
        self._troubles: list[str] = []
        with ExitStack() as undo:
            self.arena = CpuArena(nbytes, populate=True)
            undo.callback(self.arena.close)
            self.arena.wait_populated()
            self._pin: HostPin | None = None
            if device.kind != "cpu":
                base = self.arena.span(0, nbytes).address
                self._pin = HostPin(base, self.arena.capacity_bytes, device.ordinal, self._troubles.append)
                undo.callback(self._pin.close)
                _wait(lambda: self.pinned_bytes == self.arena.capacity_bytes or bool(self._troubles))
            self.copies: CopyEngine = create_copy_engine(device.memory_name)
            undo.callback(self.copies.close)
            folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="prefixd-disk-"))
            self.store = SlabStore.open(Path(folder), 2 * nbytes + (64 << 20))
            undo.callback(self.store.close)
            self._readers = undo.enter_context(ThreadPoolExecutor(_READERS))
            self._stack = undo.pop_all()

    def __enter__(self) -> LowerTiers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def pinned_bytes(self) -> int:
        return self._pin.pinned_bytes if self._pin else 0

    def save(self, frames: Sequence[FrameId]) -> None:
        asyncio.run(self.copies.copy([(self._slot(index), self._rig.pool.span(f)) for index, f in enumerate(frames)]))

    def load(self, frames: Sequence[FrameId]) -> None:
        asyncio.run(self._load(range(len(frames)), frames))

    def write(self, blocks: int, budget: Budget) -> bool:
        """Arena to disk, durably; False, and not all written, when the time is up."""
        self._written += 1
        self._parts = []
        for first in range(0, blocks, 4 * _PIECE_BLOCKS):
            if budget.over:
                return False
            numbers = range(first, min(first + 4 * _PIECE_BLOCKS, blocks))
            for record in self.store.write([self._new_block(number) for number in numbers]):
                if record is None or not isinstance(record.parts[0], DiskPart):
                    return False
                self._parts.append(record.parts[0])
        return True

    def forget(self) -> None:
        """Zero the arena, so that what it holds next has come from disk."""
        self.arena.array(0, self.arena.capacity_bytes)[:] = 0

    def read(self, frames: Sequence[FrameId]) -> None:
        """Disk to GPU by way of the arena, in pieces: copied on while the next are read. Raises StorageError."""
        asyncio.run(self._read(frames))

    async def _read(self, frames: Sequence[FrameId]) -> None:
        loop = asyncio.get_running_loop()

        async def piece(numbers: range) -> None:
            await loop.run_in_executor(self._readers, self._read_piece, numbers)
            await self._load(numbers, [frames[number] for number in numbers])

        starts = range(0, len(frames), _PIECE_BLOCKS)
        await asyncio.gather(*(piece(range(start, min(start + _PIECE_BLOCKS, len(frames)))) for start in starts))

    def _read_piece(self, numbers: range) -> None:
        """In a thread."""
        parts = [self._parts[number] for number in numbers]
        addresses = [self._slot(number).address for number in numbers]
        for error in self.store.read_all(parts, addresses, self._block_bytes):
            if isinstance(error, StorageError):
                raise error

    async def _load(self, numbers: range, frames: Sequence[FrameId]) -> None:
        pairs = [(self._rig.pool.span(f), self._slot(n)) for n, f in zip(numbers, frames, strict=True)]
        await self.copies.copy(pairs)

    def _slot(self, block: int) -> Any:
        return self.arena.span(block * self._block_bytes, self._block_bytes)

    def _new_block(self, number: int) -> NewBlock:
        key = (self._written << 32 | number + 1).to_bytes(16, "big")
        parent = (self._written << 32 | number).to_bytes(16, "big") if number else b""
        tokens = bytes(4 * self._rig.geometry.block_tokens)
        return NewBlock(bytes(NAMESPACE_BYTES), key, parent, tokens, number, [self._slot(number)])


def _wait(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)
