"""Throughput of storing and loading blocks through shared memory, from another process.

Measures, from another process, how fast blocks are stored (reserve, copy, commit) and loaded (acquire,
copy, release) through the memory that the daemon shares with its clients, in GB/s, beside a plain copy
of the same bytes between two warm buffers by as many threads. Every round stores blocks the daemon has
not seen, over slots it has used, then loads them and compares the bytes. Figures are medians over the
rounds; the first round, which takes the page faults, is reported apart (cold_*).
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import harness
from benchmarks.common.options import option, size
from prefixd.client import AsyncCache, AsyncClient, NamespaceSpec, PartSpec

_BLOCK_TOKENS = 16
_DECIMALS = 6  # of GB/s: of a small round on a busy machine three would leave nothing


async def measure(address: str, block_bytes: int, blocks: int, rounds: int, threads: int) -> dict[str, Any]:
    """Stores and loads `blocks` blocks of `block_bytes`, `rounds` times and once before to warm up."""
    part = PartSpec("full", 0, block_bytes)
    spec = NamespaceSpec(f"benchmark-shared-memory-{block_bytes}", _BLOCK_TOKENS, (part,))
    source = np.random.default_rng(0).integers(0, 256, blocks * block_bytes, dtype=np.uint8)
    target = np.ones_like(source)
    store: list[float] = []
    load: list[float] = []
    plain: list[float] = []
    async with AsyncClient(address, name="benchmark shared_memory", memory="shared", copy_threads=threads) as client:
        cache = await client.register(spec)
        with ThreadPoolExecutor(threads) as pool, harness.progress("rounds", rounds + 1) as step:
            for number in range(rounds + 1):
                plain.append(_plain_copy(pool, source, target, threads))
                tokens = np.arange(blocks * _BLOCK_TOKENS, dtype=np.uint32) + np.uint32(number * 1_000_003)
                store.append(await _store(cache, tokens, source, blocks))
                target[:] = 0
                load.append(await _load(cache, tokens, target, blocks))
                if not np.array_equal(source, target):
                    raise harness.BenchmarkError(f"round {number}: the bytes loaded are not the bytes stored")
                await client.evict(namespace_id=cache.namespace_id)
                step()
    nbytes = blocks * block_bytes
    plain_gbps, store_gbps, load_gbps = (_median_gbps(nbytes, times[1:]) for times in (plain, store, load))
    return {
        "block_bytes": block_bytes,
        "blocks": blocks,
        "rounds": rounds,
        "threads": threads,
        "plain_copy_gbps": round(plain_gbps, _DECIMALS),
        "store_gbps": round(store_gbps, _DECIMALS),
        "load_gbps": round(load_gbps, _DECIMALS),
        "store_ratio": round(store_gbps / plain_gbps, _DECIMALS),
        "load_ratio": round(load_gbps / plain_gbps, _DECIMALS),
        "cold_store_gbps": round(nbytes / store[0] / 1e9, _DECIMALS),
        "cold_load_gbps": round(nbytes / load[0] / 1e9, _DECIMALS),
    }


async def _store(
    cache: AsyncCache, tokens: npt.NDArray[np.uint32], source: npt.NDArray[np.uint8], blocks: int
) -> float:
    begin = time.perf_counter()
    stored = await cache.store(tokens, source)
    elapsed = time.perf_counter() - begin
    if stored.committed != blocks:
        raise harness.BenchmarkError(f"the daemon kept {stored.committed} of {blocks} blocks: it needs more CPU memory")
    return elapsed


async def _load(cache: AsyncCache, tokens: npt.NDArray[np.uint32], target: npt.NDArray[np.uint8], blocks: int) -> float:
    begin = time.perf_counter()
    loaded = await cache.load(tokens, target)
    elapsed = time.perf_counter() - begin
    if loaded != blocks:
        raise harness.BenchmarkError(f"the daemon gave back {loaded} of {blocks} blocks")
    return elapsed


def _plain_copy(
    pool: ThreadPoolExecutor, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], threads: int
) -> float:
    shares = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    begin = time.perf_counter()
    for copy in [pool.submit(np.copyto, to, origin) for to, origin in shares]:
        copy.result()
    return time.perf_counter() - begin


def _median_gbps(nbytes: int, seconds: list[float]) -> float:
    return nbytes / float(np.median(seconds)) / 1e9


@harness.benchmark(
    "shared_memory",
    __doc__,
    option("--block-bytes", 2 << 20, "bytes of a block", size),
    option("--blocks", 256, "blocks a round"),
    option("--rounds", 15, "rounds to time"),
    option("--threads", 1, "threads that copy"),
    harness.ADDRESS,
    unrecorded=("address",),
)
def main(options: harness.Options) -> harness.Outcome:
    """The rates of one client."""
    cpu_bytes = options.blocks * options.block_bytes * 5 // 4 + (64 << 20)
    with harness.daemon_address(options.address, {"cpu.bytes": cpu_bytes, "disk.bytes": 0}) as address:
        sizes = (options.block_bytes, options.blocks, options.rounds, options.threads)
        result = asyncio.run(measure(address, *sizes))

    return harness.Outcome(result)


if __name__ == "__main__":
    harness.run(main)
