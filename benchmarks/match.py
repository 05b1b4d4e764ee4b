"""Latency of matching a cached prompt, from another process.

Measures how long a client in another process waits for the match of a prompt whose blocks are all
cached, in microseconds (p50, p99), beside an RPC that has nothing to do (a match of one token, less than
a block), over the daemon's unix socket. The prompt is given as a numpy array; list_p50_us gives it as a
list of int.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from benchmarks.common import harness
from benchmarks.common.options import option
from prefixd.client import AsyncClient, NamespaceSpec, PartSpec

_PART_BYTES = 4096
_WARM_UP = 50


async def measure(address: str, blocks: int, block_tokens: int, repeats: int) -> dict[str, Any]:
    """Stores a prompt of `blocks` blocks in the daemon at `address` and times matches of it."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 128_000, blocks * block_tokens, dtype=np.uint32)
    as_list = tokens.tolist()
    spec = NamespaceSpec(f"benchmark-match-{block_tokens}", block_tokens, (PartSpec("full", 0, _PART_BYTES),))
    async with AsyncClient(address, name="benchmark match") as client:
        cache = await client.register(spec)
        await cache.store(tokens, np.zeros(blocks * _PART_BYTES, np.uint8))
        matched = await cache.match(tokens)
        if matched.blocks != blocks:
            raise harness.BenchmarkError(
                f"the daemon kept {matched.blocks} of {blocks} blocks: give it more --cpu-bytes"
            )
        with harness.progress("match", 3) as step:
            empty = await _times(lambda: cache.match(tokens[:1]), repeats)
            step()
            full = await _times(lambda: cache.match(tokens), repeats)
            step()
            listed = await _times(lambda: cache.match(as_list), max(1, repeats // 4))
            step()
    return {
        "blocks": blocks,
        "block_tokens": block_tokens,
        "repeats": repeats,
        "p50_us": _percentile(full, 50),
        "p99_us": _percentile(full, 99),
        "empty_rpc_p50_us": _percentile(empty, 50),
        "empty_rpc_p99_us": _percentile(empty, 99),
        "list_p50_us": _percentile(listed, 50),
        "samples_us": [round(sample * 1e6, 1) for sample in full],
    }


async def _times(call: Callable[[], Awaitable[Any]], repeats: int) -> list[float]:
    for _ in range(_WARM_UP):
        await call()
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter()
        await call()
        samples.append(time.perf_counter() - begin)
    return samples


def _percentile(samples: list[float], q: float) -> float:
    return round(float(np.percentile(samples, q)) * 1e6, 1)


@harness.benchmark(
    "match",
    __doc__,
    option("--blocks", 1000, "blocks of the prompt"),
    option("--block-tokens", 16, "tokens of a block"),
    option("--repeats", 1000, "matches to time"),
    harness.ADDRESS,
    unrecorded=("address",),
)
def main(options: harness.Options) -> harness.Outcome:
    """The times of one client."""
    cpu_bytes = max(256 << 20, 2 * options.blocks * _PART_BYTES)
    with harness.daemon_address(options.address, {"cpu.bytes": cpu_bytes, "disk.bytes": 0}) as address:
        result = asyncio.run(measure(address, options.blocks, options.block_tokens, options.repeats))

    return harness.Outcome(result)


if __name__ == "__main__":
    harness.run(main)
