"""How fast the daemon moves blocks between GPU and pinned CPU memory, by the size of the pieces of a transfer."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.common.harness import wait_until
from benchmarks.gpu_parts.rig.device import CHUNK_BYTES, Device
from benchmarks.gpu_parts.rig.part import Budget, Part
from benchmarks.gpu_parts.rig.prediction import Prediction, point_figure
from prefixd.cache.placement.movement import Movement
from prefixd_swap import CpuArena, FramePool, HostPin, create_copy_engine
from prefixd_swap.copies.copy_engine import CopyEngine
from prefixd_swap.padded_rows import PaddedRows
from prefixd_swap.tiers import CpuTier, GpuTier, Int64s, MemoryCopies, MemoryTier
from prefixd_swap.transfers import Transfers, Urgency

_MIB = 1 << 20
PIECES_MIB = (4, 16, 32, 64)
BLOCK_BYTES = CHUNK_BYTES
PADDED_KIB = ((12, 32), (56, 64))
"""Bytes of a token and its stride, of blocks that are packed on their way: Qwen2.5-0.5B, Qwen2.5-7B."""
_PIN_S = 60.0
_PAUSE_S = 1e-3  # before a demand copy, so that background pieces are under way


def measure(device: Device, budget: Budget) -> Mapping[str, Any]:
    """By piece size and way: GB/s of 1 GiB of blocks of 2 MiB, loop time, and what a demand copy waits.

    Blocks are moved as `Mover` moves them, by `Movement`, `MemoryCopies` and the device's engine in a running loop: to
    the GPU for demand, from there for write-back. A point:

        gbps             of the transfer, from its submission to its end
        loop_ms_per_gib  processor time of the event loop's thread (without a GPU's time: `benchmarks.host_share`)
        demand_ms        [median, longest] of a copy of one block for demand, while write-back keeps the way busy

    Further points, with `width_kib`, are of blocks whose tokens are padded on the GPU and packed in CPU memory, in
    pieces of 32 MiB; their bytes are the packed ones.

    Every byte that comes back is compared. Raises RuntimeError when one is wrong.
    """
    blocks, rounds = (512, 7) if device.measures else (64, 2)
    with ExitStack() as stack:
        return asyncio.run(_measure(Memory(device, blocks, stack), device, rounds, budget))


class Memory:
    """A GPU tier with `blocks` blocks and a CPU tier with twice as many, pinned as the daemon's is.

    CPU tier   | source | back |    source -> GPU -> back

    filled: False leaves the memory untouched, for a driver that copies nothing.
    """

    def __init__(self, device: Device, blocks: int, stack: ExitStack, *, filled: bool = True) -> None:
        memory = stack.enter_context(device.memory())
        pool = FramePool(memory, CHUNK_BYTES, blocks)
        stack.callback(pool.close)
        arena = CpuArena(2 * blocks * CHUNK_BYTES)
        stack.callback(arena.close)
        self.nbytes = blocks * CHUNK_BYTES
        self.gpu, self.cpu = GpuTier(pool), CpuTier(arena)
        random = np.random.default_rng(0)
        self.frames = random.permutation(self.gpu.allocate([CHUNK_BYTES], blocks))  # as after some evictions
        slots = self.cpu.allocate([CHUNK_BYTES], 2 * blocks)
        self.source, self.back = slots[:blocks], slots[blocks:]
        self._arena = arena
        if not filled:
            return
        pattern = random.integers(0, 256, CHUNK_BYTES, np.uint8)
        for number, slot in enumerate(self.source[:, 0].tolist()):
            self._bytes(slot)[:] = pattern
            self._bytes(slot)[:8].view(np.int64)[0] = number
        self.clear()
        if device.kind != "cpu":
            pin = HostPin(arena.span(0, 1).address, arena.capacity_bytes, device.ordinal, print)
            stack.callback(pin.close)
            if not wait_until(lambda: pin.pinned_bytes >= arena.capacity_bytes, _PIN_S, 0.01):
                raise RuntimeError(f"only {pin.pinned_bytes} of {arena.capacity_bytes} bytes were pinned")

    def clear(self) -> None:
        """Zeros what comes back."""
        for slot in self.back[:, 0].tolist():
            self._bytes(slot)[:] = 0

    def check(self, nbytes: int = CHUNK_BYTES) -> None:
        """Compares what came back of each block, `nbytes` bytes. Raises RuntimeError."""
        for was, came in zip(self.source[:, 0].tolist(), self.back[:, 0].tolist(), strict=True):
            if not np.array_equal(self._bytes(was)[:nbytes], self._bytes(came)[:nbytes]):
                raise RuntimeError("what came back from the GPU is not what was copied to it")

    def _bytes(self, slot: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self._arena.array(slot, CHUNK_BYTES)


@dataclass(frozen=True, slots=True)
class Way:
    """Slots to copy, from one tier to another."""

    name: str
    source: MemoryTier
    out: Int64s
    target: MemoryTier
    into: Int64s
    urgency: Urgency
    padded: PaddedRows | None = None


def ways_of(memory: Memory, padded: PaddedRows | None = None) -> tuple[Way, Way]:
    """To the GPU for demand, and from there as write-back."""
    return (
        Way("h2d", memory.cpu, memory.source, memory.gpu, memory.frames, Urgency.DEMAND, padded),
        Way("d2h", memory.gpu, memory.frames, memory.cpu, memory.back, Urgency.WRITE_BACK, padded),
    )


async def _measure(memory: Memory, device: Device, rounds: int, budget: Budget) -> dict[str, Any]:
    ways = ways_of(memory)
    points: list[dict[str, Any]] = []
    with ExitStack() as stack:
        engine = create_copy_engine(device.memory_name)
        stack.callback(engine.close)
        for piece_mib in PIECES_MIB:
            if not budget.allows(f"pieces of {piece_mib} MiB"):
                continue
            with budget.attempt(f"pieces of {piece_mib} MiB"):
                memory.clear()
                these = []
                for way in ways:
                    seconds, loop_s = await moved(engine, way, piece_mib, rounds)
                    these.append(
                        {
                            "way": way.name,
                            "piece_mib": piece_mib,
                            "gbps": round(memory.nbytes / seconds / 1e9, 3),
                            "loop_ms_per_gib": round(loop_s * 1e3 * (1 << 30) / memory.nbytes, 3),
                        }
                    )
                memory.check()
                these[1]["demand_ms"] = await _demand_ms(engine, ways[1], piece_mib, 40 if device.measures else 4)
                points += these
        for width_kib, stride_kib in PADDED_KIB:
            what = f"tokens of {width_kib} KiB, {stride_kib} KiB apart"
            if budget.allows(what):
                with budget.attempt(what):
                    points += await _padded(memory, engine, width_kib, stride_kib, rounds)
    return {"bytes": memory.nbytes, "block_bytes": CHUNK_BYTES, "points": points}


async def _padded(
    memory: Memory, engine: CopyEngine, width_kib: int, stride_kib: int, rounds: int
) -> list[dict[str, Any]]:
    """Both ways of blocks whose tokens are padded on the GPU."""
    rows = PaddedRows(stride_kib << 10, width_kib << 10, CHUNK_BYTES)
    memory.clear()
    points = []
    for way in ways_of(memory, rows):
        seconds, loop_s = await moved(engine, way, 32, rounds)
        nbytes = len(way.out) * rows.packed_bytes
        points.append(
            {
                "way": way.name,
                "piece_mib": 32,
                "width_kib": width_kib,
                "stride_kib": stride_kib,
                "gbps": round(nbytes / seconds / 1e9, 3),
                "loop_ms_per_gib": round(loop_s * 1e3 * (1 << 30) / nbytes, 3),
            }
        )
    memory.check(rows.packed_bytes)
    return points


async def moved(engine: CopyEngine, way: Way, piece_mib: int, rounds: int) -> tuple[float, float]:
    """Median seconds of a transfer of all blocks, and of the loop's thread in it."""
    transfers = Transfers()
    copies = MemoryCopies(engine, transfers, piece_bytes=piece_mib * _MIB)
    times = []
    for number in range(1 + rounds):
        loop_began_s, began_s = time.thread_time(), time.perf_counter()
        await _move(copies, way, way.urgency)
        if number:
            times.append((time.perf_counter() - began_s, time.thread_time() - loop_began_s))
    await transfers.close()
    wall_s, loop_s = zip(*times, strict=True)
    return statistics.median(wall_s), statistics.median(loop_s)


async def _demand_ms(engine: CopyEngine, way: Way, piece_mib: int, samples: int) -> list[float]:
    """Median and longest milliseconds of a copy of one block for demand, while the others are written back."""
    transfers = Transfers()
    copies = MemoryCopies(engine, transfers, piece_bytes=piece_mib * _MIB)
    one = replace(way, out=way.out[:1], into=way.into[:1], urgency=Urgency.DEMAND)
    others = replace(way, out=way.out[1:], into=way.into[1:], urgency=Urgency.WRITE_BACK)
    stopping = False

    async def keep_busy() -> None:
        while not stopping:
            await _move(copies, others, others.urgency)

    busy = asyncio.create_task(keep_busy())
    times = []
    for _ in range(samples):
        await asyncio.sleep(_PAUSE_S)
        began_s = time.perf_counter()
        await _move(copies, one, one.urgency)
        times.append(1e3 * (time.perf_counter() - began_s))
    stopping = True
    await busy
    await transfers.close()
    return [round(statistics.median(times), 3), round(max(times), 3)]


async def _move(copies: MemoryCopies, way: Way, urgency: Urgency) -> None:
    nbytes = CHUNK_BYTES if way.padded is None else way.padded.packed_bytes
    submitted = copies.submit(way.source, way.out, way.target, way.into, [nbytes], urgency, padded=[way.padded])
    failed = [error for error in await Movement(urgency).run(submitted) if error is not None]
    if failed:
        raise failed[0]


PREDICTIONS = tuple(
    Prediction(
        f"the daemon's copies in pieces of 32 MiB, {way}",
        "46 GB/s or more",
        point_figure("gbps", way=way, piece_mib=32),
        at_least=42.0,
    )
    for way in ("h2d", "d2h")
) + tuple(
    Prediction(
        f"blocks of tokens of {width} KiB, {stride} KiB apart on the GPU, packed on their way, {way}",
        "40 GB/s or more of packed bytes",
        point_figure("gbps", way=way, width_kib=width),
        at_least=30.0,
    )
    for width, stride in PADDED_KIB
    for way in ("h2d", "d2h")
)

PART = Part("daemon_copies", 15, measure, predictions=PREDICTIONS)
