"""How many bytes a second the daemon's copies could move if a GPU and its driver took no time: Python's bound.

1 GiB of blocks of 2 MiB goes from the CPU tier to the GPU tier and back as the daemon moves it: by `Movement`,
`MemoryCopies` and `CudaCopyEngine` in a running event loop. gbps_N: in pieces of N MiB, the slower way;
loop_ms_per_gib_N: processor time of the event loop's thread.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack

from benchmarks.gpu_parts.daemon_copies import BLOCK_BYTES, PIECES_MIB, Memory, moved, ways_of
from benchmarks.gpu_parts.rig.device import Device
from benchmarks.host_parts.free_driver import HostPart, answer
from prefixd_swap import create_copy_engine

PART = HostPart("copies", "benchmarks.host_parts.piece_copies", least={"gbps_32": 100.0}, most={})


async def _measure(short: bool) -> dict[str, float]:
    blocks, rounds = (64, 2) if short else (480, 9)
    figures: dict[str, float] = {}
    with ExitStack() as stack:
        memory = Memory(Device("stand-in"), blocks, stack, filled=False)
        engine = create_copy_engine("cuda:0")
        stack.callback(engine.close)
        for piece_mib in PIECES_MIB:
            times = [await moved(engine, way, piece_mib, rounds) for way in ways_of(memory)]
            seconds, loop_s = max(times)
            gib = blocks * BLOCK_BYTES / (1 << 30)
            figures[f"gbps_{piece_mib}"] = blocks * BLOCK_BYTES / seconds / 1e9
            figures[f"loop_ms_per_gib_{piece_mib}"] = 1e3 * loop_s / gib
    return figures


if __name__ == "__main__":
    answer(asyncio.run(_measure("--short" in sys.argv)))
