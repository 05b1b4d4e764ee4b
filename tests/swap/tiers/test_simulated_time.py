"""Simulated tiers take the time that they say, to the microsecond, and no other."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np
import pytest

from prefixd.planner.simulation.event_loop import SimulatedTimeLoop, SimulationError
from prefixd.planner.simulation.link import SimulatedCoding, SimulatedLink, UnbackedCopyEngine
from prefixd.planner.simulation.memory import UnbackedMemoryTier
from prefixd_swap import MemoryMisuseError, create_copy_engine
from prefixd_swap.spans import Span
from prefixd_swap.tiers import NO_SLOT, CpuTier, MemoryCopies, MemoryTier
from prefixd_swap.transfers import DeviceLimits, Transfers, Urgency
from tests.swap.simulated_memory import SimulatedMemoryTier
from tests.swap.tiers.simulated import SimulatedCopyEngine, SimulatedStoreTier
from tests.swap.tiers.stores import PART_BYTES, Blocks, Landing

DEMAND, PREFETCH, WRITE_BACK, SCRUB = Urgency
T = TypeVar("T")
BLOCK_BYTES = sum(PART_BYTES)


def simulate(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        return runner.run(work)


def now_s() -> float:
    return asyncio.get_running_loop().time()


def link(bytes_per_s: float, latency_s: float = 0.0) -> SimulatedLink:
    return SimulatedLink(bytes_per_s, latency_s, asyncio.get_running_loop().time, asyncio.sleep)


def store(transfers: Transfers, bytes_per_s: float, latency_s: float, **limits: Any) -> SimulatedStoreTier:
    return SimulatedStoreTier(
        transfers,
        name="far",
        level=2,
        capacity_bytes=1 << 40,
        link=link(bytes_per_s, latency_s),
        limits=DeviceLimits(**limits) if limits else DeviceLimits(4, 1),
    )


def coded(bytes_per_s: float, coding: SimulatedCoding) -> SimulatedLink:
    return SimulatedLink(bytes_per_s, 0.5, asyncio.get_running_loop().time, asyncio.sleep, coding)


@pytest.mark.parametrize(
    ("coded_per_s", "took_s"),
    [
        (math.inf, [1.5, 2.5]),  # a quarter of 400 bytes moves, 100 a second
        (800.0, [1.5, 2.5]),  # decoding takes half a second beside the link, which is slower
        (200.0, [2.5, 4.5]),  # decoding is slower, and the second waits for the first
    ],
)
def test_fewer_bytes_move_while_others_are_decoded(coded_per_s: float, took_s: list[float]) -> None:
    async def work() -> tuple[list[float], int]:
        way = coded(100.0, SimulatedCoding(0.25, coded_per_s))

        async def moved() -> float:
            await way.move(400)
            return now_s()

        return list(await asyncio.gather(moved(), moved())), way.moved_bytes

    assert simulate(work()) == (pytest.approx(took_s), 200)


@pytest.mark.parametrize(("stored", "bytes_per_s"), [(0.0, 1.0), (1.1, 1.0), (0.5, 0.0)])
def test_a_codec_that_cannot_be_is_refused(stored: float, bytes_per_s: float) -> None:
    with pytest.raises(MemoryMisuseError, match="is not possible; give a share above 0"):
        SimulatedCoding(stored, bytes_per_s)


def test_simulated_time_passes_only_while_all_wait() -> None:
    began_s = time.monotonic()

    async def work() -> float:
        await asyncio.gather(*(asyncio.sleep(seconds) for seconds in (3600.0, 7200.0)))
        return now_s()

    assert simulate(work()) == pytest.approx(7200.0)
    assert time.monotonic() - began_s < 60.0


def test_simulated_time_passes_after_a_year_too() -> None:
    async def work() -> float:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(4e7)
        due = loop.create_future()
        loop.call_at(loop.time(), due.set_result, None)
        for _ in range(10):  # turns of the loop, which would go on for ever
            await asyncio.sleep(0)
        assert due.done(), "a timer of this very moment is due"
        await asyncio.sleep(1e-3)
        return now_s()

    assert simulate(work()) == pytest.approx(4e7 + 1e-3)


def test_a_simulation_that_cannot_go_on_says_so() -> None:
    loop = SimulatedTimeLoop()
    with pytest.raises(SimulationError, match="stands still"):
        loop.run_until_complete(loop.create_future())
    loop.close()


def test_movements_share_the_bandwidth_and_each_has_the_latency() -> None:
    async def work() -> list[float]:
        path = link(1000.0, 0.5)

        async def move(nbytes: int) -> float:
            await path.move(nbytes)
            return now_s()

        ends = await asyncio.gather(move(1000), move(2000))
        await asyncio.sleep(10.0)
        began_s = now_s()
        return [*ends, await move(1000) - began_s, path.moved_bytes]

    assert simulate(work()) == pytest.approx([1.5, 3.5, 1.5, 4000])


def test_a_link_that_cannot_be_is_refused() -> None:
    for bytes_per_s, latency_s in ((0.0, 0.0), (1.0, -1.0), (float("nan"), 0.0)):
        with pytest.raises(MemoryMisuseError):
            SimulatedLink(bytes_per_s, latency_s, lambda: 0.0, asyncio.sleep)


def test_a_simulated_store_takes_the_time_of_its_link() -> None:
    async def work() -> tuple[float, float | None]:
        clock = asyncio.get_running_loop().time
        transfers = Transfers(clock=clock)
        tier = store(transfers, 1e6, 0.0)
        places = await tier.write(Blocks(100).new, WRITE_BACK)
        landing = Landing(places)
        began_s = now_s()
        await tier.read(landing.loads, DEMAND)
        return now_s() - began_s, transfers.estimate(tier.read_path).bytes_per_s

    seconds, bytes_per_s = simulate(work())
    assert seconds == pytest.approx(100 * BLOCK_BYTES / 1e6)
    assert bytes_per_s == pytest.approx(1e6, rel=0.01)


@pytest.mark.parametrize(("enabled", "least", "most"), [(True, 1.0, 2.0), (False, 10.0, 100.0)])
def test_demand_does_not_wait_for_a_thousand_blocks_that_nobody_waits_for(
    enabled: bool, least: float, most: float
) -> None:
    """The time of a demand load beside a prefetch and a write-back, in those of one on an idle store."""

    async def work() -> float:
        loop = asyncio.get_running_loop()
        transfers = Transfers(urgency_enabled=enabled, clock=loop.time)
        tier = store(transfers, 100e6, 1e-4, in_flight=6, reserved=3)
        there = await tier.write(Blocks(1000).new, DEMAND)
        wanted = Landing(there[:300])
        began_s = now_s()
        await tier.read(wanted.loads, DEMAND)
        idle_s = now_s() - began_s
        landing = Landing(there)
        others = [tier.submit_read(landing.loads, PREFETCH) for _ in range(5)]
        new = Blocks(1000, seed=5)
        writing = tier.submit_write(new.new, WRITE_BACK, count=1000, nbytes=BLOCK_BYTES)
        await asyncio.sleep(idle_s)
        began_s = now_s()
        await tier.read(wanted.loads, DEMAND)
        busy_s = now_s() - began_s
        for other in others:
            assert await other.finish() == [None] * 1000
        assert all(isinstance(place, tuple) for place in await writing.finish())
        return busy_s / idle_s

    ratio = simulate(work())
    assert least <= ratio <= most


def copy_bench(engine: str) -> tuple[ExitStack, SimulatedMemoryTier, CpuTier]:
    stack = ExitStack()
    near = SimulatedMemoryTier(1 << 20, name="near", level=0, on_device=engine == "simulated")
    cpu = SimulatedMemoryTier(1 << 20, name="cpu", level=1)
    stack.callback(near.close)
    stack.callback(cpu.close)
    return stack, near, cpu


def fill(tier: MemoryTier, slots: np.ndarray, first: int) -> None:
    assert isinstance(tier, CpuTier)
    for at, slot in enumerate(slots[:, 0].tolist()):
        tier.arena.array(slot, PART_BYTES[0])[:] = first + at


def test_copies_between_memory_tiers_arrive_and_take_their_time() -> None:
    async def work() -> float:
        clock = asyncio.get_running_loop().time
        stack, near, cpu = copy_bench("simulated")
        with stack:
            engine = SimulatedCopyEngine(link(1e6))
            copies = MemoryCopies(engine, Transfers(clock=clock))
            out, into = near.allocate(PART_BYTES, 20), cpu.allocate(PART_BYTES, 20)
            fill(near, out, 1)
            into[3, 1] = NO_SLOT
            transfer = copies.submit(near, out, cpu, into, PART_BYTES, DEMAND)
            assert transfer.transfer.path == "near to cpu"
            assert await transfer.finish() == [None] * 20
            seconds = now_s()
            for at, slot in enumerate(into[:, 0].tolist()):
                assert (cpu.arena.array(slot, PART_BYTES[0]) == 1 + at).all()
            await copies.submit(cpu, into[:0], near, out[:0], PART_BYTES, PREFETCH).finish()
            with pytest.raises(MemoryMisuseError, match="two arrays"):
                copies.submit(near, out, cpu, into[:1], PART_BYTES, DEMAND)
            engine.close()
            with pytest.raises(MemoryMisuseError, match="closed"):
                await copies.submit(near, out, cpu, into, PART_BYTES, DEMAND).finish()
            return seconds

    # The part without a slot is not copied.
    assert simulate(work()) == pytest.approx((20 * BLOCK_BYTES - PART_BYTES[1]) / 1e6)


class PieceLog(UnbackedCopyEngine):
    """The sources of each piece, in MiB from the first address of the tier."""

    def __init__(self, bytes_per_s: float, base: int) -> None:
        super().__init__(link(bytes_per_s), link(bytes_per_s))
        self.pieces: list[list[int]] = []
        self._base = base

    async def copy(self, pairs: Sequence[tuple[Span, Span]]) -> None:
        self.pieces.append([(source.address - self._base) >> 20 for _, source in pairs])
        await super().copy(pairs)


def test_copies_move_in_large_pieces_unless_something_more_urgent_waits() -> None:
    """600 MiB for demand and 300 to be written back in blocks of 1 MiB; at 1 GB/s some of these are let through."""

    async def work() -> list[list[int]]:
        gpu = UnbackedMemoryTier(1 << 30, name="gpu", level=0, on_device=True)
        cpu = UnbackedMemoryTier(1 << 30, name="cpu", level=1)
        transfers = Transfers(clock=asyncio.get_running_loop().time)
        out, into = gpu.allocate([1 << 20], 900), cpu.allocate([1 << 20], 900)
        engine = PieceLog(1e9, int(gpu.addresses(out).min()))
        copies = MemoryCopies(engine, transfers)
        demand = copies.submit(gpu, out[:600], cpu, into[:600], [1 << 20], DEMAND)
        others = copies.submit(gpu, out[600:], cpu, into[600:], [1 << 20], WRITE_BACK)
        assert await demand.finish() == [None] * 600
        assert await others.finish() == [None] * 300
        return engine.pieces

    pieces = simulate(work())
    assert {len(piece) for piece in pieces if piece[0] < 600} == {32, 600 % 32}
    last = max(at for at, piece in enumerate(pieces) if piece[0] < 600)
    assert [len(piece) for piece in pieces[:last] if piece[0] >= 600] == [4]
    assert {len(piece) for piece in pieces[last:] if piece[0] >= 600} == {32, (300 - 4) % 32}
    assert sorted(block for piece in pieces for block in piece) == list(range(900))


@pytest.mark.parametrize(
    ("block_bytes", "blocks", "most"), [(2 << 20, 512, 16), (64 << 10, 4096, 512), (64 << 20, 8, 1)]
)
def test_a_piece_has_as_many_blocks_as_its_bytes_and_its_items_allow(block_bytes: int, blocks: int, most: int) -> None:
    async def work() -> list[list[int]]:
        gpu = UnbackedMemoryTier(1 << 30, name="gpu", level=0, on_device=True)
        cpu = UnbackedMemoryTier(1 << 30, name="cpu", level=1)
        out, into = gpu.allocate([block_bytes], blocks), cpu.allocate([block_bytes], blocks)
        engine = PieceLog(1e9, 0)
        copies = MemoryCopies(engine, Transfers(clock=asyncio.get_running_loop().time))
        await copies.submit(gpu, out, cpu, into, [block_bytes], PREFETCH).finish()
        return engine.pieces

    assert {len(piece) for piece in simulate(work())} == {most}


async def test_copies_run_on_the_real_engine() -> None:
    stack, near, cpu = copy_bench("host")
    with stack:
        engine = create_copy_engine("cpu", 1)
        transfers = Transfers()
        copies = MemoryCopies(engine, transfers)
        out, into = near.allocate(PART_BYTES, 20), cpu.allocate(PART_BYTES, 20)
        fill(near, out, 100)
        assert await copies.submit(near, out, cpu, into, PART_BYTES, WRITE_BACK).finish() == [None] * 20
        assert (cpu.arena.array(int(into[19, 0]), PART_BYTES[0]) == 119).all()
        await transfers.close()
        engine.close()
