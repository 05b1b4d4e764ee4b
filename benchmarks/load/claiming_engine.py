"""An engine in a process of its own that computes prompts which others need at the same time, with claims or without.

Each line on its standard input is an order; the answer says how many blocks it computed:

    {"prompt": 3, "claims": true, "wait_s": 60}   what is cached is loaded, the rest computed and stored
    {"prompt": 3, "only_claims": true}            claims, and computes nothing
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.load.companion import Companion, order_lines
from prefixd.client import AsyncCache, AsyncClient, NamespaceSpec, PartSpec

BLOCKS = 32
_TOKENS, _BLOCK_BYTES = 16, 4096
_SPEC = NamespaceSpec("claiming", _TOKENS, (PartSpec("kv", 0, _BLOCK_BYTES),))


class ClaimingEngine(Companion):
    """Starts and controls the process; used in the harness."""

    def __init__(self, address: str) -> None:
        super().__init__("benchmarks.load.claiming_engine", address)

    def order(self, prompt: int, **how: Any) -> None:
        """Sends an order; `answer` fetches the answers in the order of the orders."""
        self.tell(json.dumps({"prompt": prompt, **how}))


def tokens_of(prompt: int) -> npt.NDArray[np.uint32]:
    """The prompt with this number."""
    return np.random.default_rng(prompt).integers(0, 1 << 31, BLOCKS * _TOKENS).astype(np.uint32)


def content_of(prompt: int) -> npt.NDArray[np.uint8]:
    """[blocks, bytes]: what every engine computes for it."""
    return np.random.default_rng([prompt, 1]).integers(0, 256, (BLOCKS, _BLOCK_BYTES), np.uint8)


async def _serve(address: str) -> None:
    orders = await order_lines()
    async with AsyncClient(address, name="claiming engine") as client:
        cache = await client.register(_SPEC)
        while line := await orders.readline():
            order = json.loads(line)
            claiming = order.get("only_claims")
            answer = await (_claim(cache, order["prompt"]) if claiming else _compute(cache, order))
            print(json.dumps(answer), flush=True)


async def _claim(cache: AsyncCache, prompt: int) -> Mapping[str, int]:
    claim = await cache.claim(tokens_of(prompt))
    return {"claimed": int(bool(claim.claim_id))}


async def _compute(cache: AsyncCache, order: Mapping[str, Any]) -> Mapping[str, int]:
    tokens, right = tokens_of(order["prompt"]), content_of(order["prompt"])
    claim = await cache.claim(tokens, wait_s=order["wait_s"]) if order["claims"] else None
    kv = np.zeros_like(right)
    loaded = await cache.load(tokens, kv.ravel())
    wrong = int((kv[:loaded] != right[:loaded]).any())
    kv[loaded:] = right[loaded:]
    if loaded < BLOCKS:
        await asyncio.sleep(order["compute_s"])
        await cache.store(tokens, kv.ravel())
    if claim is not None:
        await cache.end_claim(claim)
    return {"computed": BLOCKS - loaded, "wrong": wrong}


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
