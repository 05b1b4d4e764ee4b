"""Replay of a real request trace through the cache, with every byte that comes back checked.

Replays a trace in Mooncake's format (a JSON object a line: timestamp, input_length, output_length,
hash_ids of blocks of 512 tokens) against a running daemon as one client after the other's request, as
fast as it goes. Each request matches its prompt, loads the cached prefix, compares every byte with what
was stored for exactly this prefix, and stores the rest. Only full blocks count. Measures the hit rate in
blocks, beside the one that unlimited memory would give (a plain set of all prefixes seen), where the
hits were found, and wrong bytes, which must be 0.

The trace is Mooncake's FAST'25 release: https://github.com/kvcache-ai/Mooncake, FAST25-release/traces.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import harness
from benchmarks.common.block_bytes import BlockBytes, wrong_bytes
from benchmarks.common.options import option, size
from prefixd.client import (
    AsyncCache,
    AsyncClient,
    ExhaustedError,
    MatchResult,
    NamespaceSpec,
    PartSpec,
    Tier,
)
from prefixd.workloads.mooncake import HASH_TOKENS, PrefixCount, TraceRequest, read_trace, tokens_of

_DEFAULT_TRACE = Path(__file__).resolve().parents[2] / "shared" / "traces" / "mooncake_conversation.jsonl"
_TRACE_HELP = "the trace to replay (shared/traces/mooncake_conversation.jsonl beside the repository)"
_TIER_NAMES = {tier: tier.label for tier in (Tier.GPU, Tier.CPU, Tier.DISK)}


class Replay:
    """One client that replays requests and counts."""

    def __init__(self, cache: AsyncCache) -> None:
        self._cache = cache
        self._achievable = PrefixCount()
        self.blocks = 0
        self.hit_blocks = 0
        self.achievable_blocks = 0
        self.wrong_bytes = 0
        self.dropped_blocks = 0
        self.hits = dict.fromkeys(_TIER_NAMES.values(), 0)

    async def request(self, request: TraceRequest) -> None:
        ids = request.hash_ids
        if not ids:
            return
        tokens, nbytes = tokens_of(ids), self._cache.spec.block_bytes
        expected = BlockBytes(self._cache.spec, tokens).content()
        self.blocks += len(ids)
        self.achievable_blocks += self._achievable.hits_of(ids)
        matched = await self._cache.match(tokens)
        self._count_tiers(matched)
        hit = 0
        if matched.blocks:
            got = np.zeros(matched.blocks * nbytes, np.uint8)
            hit = await self._cache.load(tokens, got, max_blocks=matched.blocks)
            self.wrong_bytes += wrong_bytes(got[: hit * nbytes], expected[: hit * nbytes])
        self.hit_blocks += hit
        if hit < len(ids):
            try:
                stored = await self._cache.store(tokens, expected[hit * nbytes :], first_block=hit)
                self.dropped_blocks += stored.dropped
            except ExhaustedError:
                self.dropped_blocks += len(ids) - hit

    def result(self) -> dict[str, Any]:
        return {
            "blocks": self.blocks,
            "different_blocks": self._achievable.blocks,
            "wrong_bytes": self.wrong_bytes,
            "hit_rate": self.hit_blocks / max(1, self.blocks),
            "achievable_hit_rate": self.achievable_blocks / max(1, self.blocks),
            "hit_blocks": self.hit_blocks,
            "achievable_hit_blocks": self.achievable_blocks,
            "hits": self.hits,
            "dropped_blocks": self.dropped_blocks,
        }

    def _count_tiers(self, matched: MatchResult) -> None:
        for tier, name in _TIER_NAMES.items():
            self.hits[name] += matched.blocks_in(tier)


async def replay(address: str, requests: Sequence[TraceRequest], bytes_per_token: int, salt: bytes) -> dict[str, Any]:
    """Replays `requests` against the daemon at `address` in a namespace of its own."""
    block_bytes = HASH_TOKENS * bytes_per_token
    part = PartSpec("full", 0, block_bytes)
    spec = NamespaceSpec(f"benchmark-trace-{block_bytes}", HASH_TOKENS, (part,), salt=salt)
    async with AsyncClient(address, name="benchmark trace") as client:
        run = Replay(await client.register(spec))
        begin = time.perf_counter()
        with harness.progress("requests", len(requests)) as step:
            for request in requests:
                await run.request(request)
                step()
        elapsed = time.perf_counter() - begin
    return {**run.result(), "requests": len(requests), "seconds": round(elapsed, 2)}


@harness.benchmark(
    "trace",
    __doc__,
    option("--trace", _DEFAULT_TRACE, _TRACE_HELP, Path, metavar="FILE", shown=False),
    option("--requests", 2000, "its first N requests"),
    option("--bytes-per-token", 64, "KV bytes of a token"),
    option("--cpu-bytes", 1 << 29, "CPU tier of the own daemon", size),
    option("--disk-bytes", 4 << 30, "disk tier of the own daemon", size),
    harness.ADDRESS,
    unrecorded=("address", "cpu_bytes", "disk_bytes"),
)
def main(options: harness.Options) -> harness.Outcome:
    """The counts of a replay. Raises BenchmarkError for an empty trace."""
    requests = list(read_trace(options.trace, options.requests))
    if not requests:
        raise harness.BenchmarkError(f"{options.trace} is empty")

    tiers = {"cpu.bytes": options.cpu_bytes, "disk.bytes": options.disk_bytes}
    # Prompts of an earlier run on the same daemon must not count as hits.
    salt = os.urandom(16) if options.address else b""
    with harness.daemon_address(options.address, tiers) as address:
        result = asyncio.run(replay(address, requests, options.bytes_per_token, salt))
    if not options.address:
        result |= {"cpu_bytes": options.cpu_bytes, "disk_bytes": options.disk_bytes}

    result = {"trace": options.trace.name, **result}
    return harness.Outcome(result, harness.missed(result, zero=["wrong_bytes"]))


if __name__ == "__main__":
    harness.run(main)
