"""A second host that starts cold: counts the shared blocks that it finds, and compares their bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import harness
from benchmarks.common.block_bytes import BlockBytes, wrong_bytes
from benchmarks.sharing.hosts import Secrets, cache_host, remote_stats, sharing, wait_until_shared
from benchmarks.sharing.valkey_server import ValkeyServer
from prefixd.client import Cache, Client, NamespaceSpec, PartSpec, Tier
from prefixd.workloads.mooncake import HASH_TOKENS, TraceRequest, tokens_of

_SLACK_BLOCKS = 64


def measure(
    requests: Sequence[TraceRequest], bytes_per_token: int, folder: Path, step: Callable[[], None]
) -> dict[str, Any]:
    """Host A stores the prompts, B is asked for them.

    B's CPU tier has room for half of them, so that blocks leave it and come from the store again.
    """
    block_bytes = HASH_TOKENS * bytes_per_token
    spec = NamespaceSpec("trace", HASH_TOKENS, (PartSpec("full", 0, block_bytes),))
    blocks = len({request.hash_ids[: end + 1] for request in requests for end in range(len(request.hash_ids))})
    longest = max(len(request.hash_ids) for request in requests)
    secrets = Secrets(folder)
    with ValkeyServer(folder / "valkey") as valkey:
        settings = sharing(valkey.port, secrets)
        with cache_host((blocks + _SLACK_BLOCKS) * block_bytes, settings) as a, Client(a.address) as client:
            stored_s = _store_all(client.register(spec), client, requests, blocks, step)
            written_bytes = remote_stats(client).written_bytes
        b_blocks = max(blocks // 2, longest) + _SLACK_BLOCKS
        with cache_host(b_blocks * block_bytes, settings) as b, Client(b.address) as client:
            counted = _read_all(client.register(spec), requests, step)
            remote = remote_stats(client)
            violations = client.check_integrity().violations
    tokens = sum(request.input_length for request in requests)
    achievable = sum(len(request.hash_ids) for request in requests) * HASH_TOKENS
    return {
        "requests": len(requests),
        "tokens": tokens,
        "different_blocks": blocks,
        "block_bytes": block_bytes,
        "hit_rate": counted["hit_blocks"] * HASH_TOKENS / tokens,
        "achievable_hit_rate": achievable / tokens,
        "wrong_bytes": counted["wrong_bytes"],
        "hit_blocks_by_tier": counted["by_tier"],
        "unanswered_prompts": remote.unanswered_prompts,
        "integrity_violations": len(violations),
        "written_bytes": written_bytes,
        "read_bytes": remote.read_bytes,
        "store_s": round(stored_s, 2),
        "load_s": round(counted["seconds"], 2),
    }


def _store_all(
    cache: Cache,
    client: Client,
    requests: Sequence[TraceRequest],
    blocks: int,
    step: Callable[[], None],
) -> float:
    began_s = time.perf_counter()
    for request in requests:
        if request.hash_ids:
            tokens = tokens_of(request.hash_ids)
            there = cache.match(tokens).blocks
            if there < len(request.hash_ids):
                stored = cache.store(tokens, BlockBytes(cache.spec, tokens).content(there), first_block=there)
                if stored.dropped:
                    raise harness.BenchmarkError(f"host A dropped {stored.dropped} blocks; its CPU tier is too small")
        step()
    wait_until_shared(client, blocks)
    return time.perf_counter() - began_s


def _read_all(cache: Cache, requests: Sequence[TraceRequest], step: Callable[[], None]) -> dict[str, Any]:
    hit_blocks = wrong = 0
    by_tier = {tier.name.lower(): 0 for tier in Tier}
    began_s = time.perf_counter()
    for request in requests:
        if request.hash_ids:
            tokens = tokens_of(request.hash_ids)
            expected = BlockBytes(cache.spec, tokens).content()
            for run in cache.match(tokens).runs:
                by_tier[run.tier.name.lower()] += run.blocks
            got = np.zeros_like(expected)
            hit = cache.load(tokens, got)
            hit_blocks += hit
            nbytes = hit * cache.spec.block_bytes
            wrong += wrong_bytes(got[:nbytes], expected[:nbytes])
        step()
    seconds = time.perf_counter() - began_s
    return {"hit_blocks": hit_blocks, "wrong_bytes": wrong, "by_tier": by_tier, "seconds": seconds}


def violations(result: dict[str, Any]) -> list[str]:
    """Returns the bounds that a result misses, in words."""
    zero, least = ("wrong_bytes", "integrity_violations"), {"hit_rate": result["achievable_hit_rate"]}
    return harness.missed(result, zero=zero, least=least)
