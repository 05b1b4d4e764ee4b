"""Processor time of the process for a batch of `PageCopies`, by layer: tables, launch, copies, events, both threads.

A batch is half a staging buffer, 32 MiB: 8 parts of two blocks of 16 tokens of an 8B model, which has pages of 64 KiB
in 32 layers, in any order. us_a_layer_load, us_a_layer_save: with the kernel; us_a_layer_strided: blocks outermost,
without it; calls_a_batch: of the driver, of a load with the kernel.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.host_parts.free_driver import HostPart, answer
from prefixd_swap import PackedPages, PageCopies, PageRun, create_memory
from prefixd_swap.vmem.backends.cuda_driver import open_device

PART = HostPart(
    "pages",
    "benchmarks.host_parts.page_batches",
    least={},
    most=dict.fromkeys(("us_a_layer_load", "us_a_layer_save", "us_a_layer_strided"), 15.0),
)
_LAYERS, _PAGE_BYTES, _BLOCKS, _PARTS = 32, 64 << 10, 2, 8


async def _measure(short: bool) -> dict[str, float]:
    rounds = 20 if short else 500
    region = _PARTS * _BLOCKS * _PAGE_BYTES
    memory = create_memory("cuda")
    cache = memory.reserve(_LAYERS * region)
    cache.map(0, memory.create(cache.nbytes // memory.chunk_bytes))
    host = np.zeros(2 * _LAYERS * region, np.uint8)
    part_bytes = _BLOCKS * _LAYERS * _PAGE_BYTES
    places = np.random.default_rng(0).permutation(2 * _PARTS)[:_PARTS]
    addresses = host.ctypes.data + part_bytes * places
    ids = np.random.default_rng(1).permutation(_PARTS * _BLOCKS).reshape(_PARTS, _BLOCKS)
    layers_outermost = [PageRun(cache.base + layer * region, _PAGE_BYTES, _PAGE_BYTES) for layer in range(_LAYERS)]
    blocks_outermost = [
        PageRun(cache.base + layer * _PAGE_BYTES, _LAYERS * _PAGE_BYTES, _PAGE_BYTES) for layer in range(_LAYERS)
    ]
    packed, strided = (PackedPages(runs, ids, addresses) for runs in (layers_outermost, blocks_outermost))
    with patch("prefixd_swap.copies.page_copies.check_kernel"):  # this driver copies nothing
        copies = PageCopies(0)
    figures = {
        "us_a_layer_load": await _us(copies.scatter, packed, rounds) / _LAYERS,
        "us_a_layer_save": await _us(copies.gather, packed, rounds) / _LAYERS,
        "us_a_layer_strided": await _us(copies.scatter, strided, rounds) / _LAYERS,
        "calls_a_batch": float(await _calls(copies, packed)),
    }
    copies.close()
    memory.close()
    return figures


async def _us(copy: Callable[[PackedPages], Awaitable[None]], packed: PackedPages, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began_s = time.process_time()
        await copy(packed)
        times.append(time.process_time() - began_s)
    return 1e6 * statistics.median(times)


async def _calls(copies: PageCopies, packed: PackedPages) -> int:
    cuda = open_device(0)
    names: list[str] = []
    call = cuda.call

    def counted(name: str, *arguments: Any) -> Any:
        names.append(name)
        return call(name, *arguments)

    cuda.call = counted  # type: ignore[method-assign]
    await copies.scatter(packed)
    cuda.call = call  # type: ignore[method-assign]
    return len(names)


if __name__ == "__main__":
    answer(asyncio.run(_measure("--short" in sys.argv)))
