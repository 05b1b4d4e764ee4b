"""The daemon's events with default settings, whose blocks of 64 tokens routers know as blocks of 16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from prefixd.cache.index.keys.block_keys import BlockChain
from tests.routers.conftest import BLOCK_TOKENS, Dynamo, Holder, VllmRouter, until

PROMPT = list(range(1000, 1320))  # five blocks of the daemon, twenty of a router
ALIKE = [*PROMPT[:-24], *range(9000, 9024)]  # parts from PROMPT inside a block: 18 of a router's are the same


def last_key(holder: Holder, prompt: Sequence[int]) -> str:
    """By which the prompt's last block is evicted."""
    tokens, seed = np.asarray(prompt, "<u4").tobytes(), int.from_bytes(holder.cache.namespace_id, "little")
    return BlockChain(tokens, BLOCK_TOKENS, seed).key(len(prompt) // BLOCK_TOKENS - 1).hex()


def test_dynamo_knows_every_block(hold: Callable[[], Holder], dynamo: Callable[..., Dynamo]) -> None:
    """Stored, removed, on disk after a restart; of prompts that part inside a block, too."""
    holder = hold()
    router = dynamo(holder.endpoint)
    assert router.known(PROMPT) == (0, 0)
    holder.store(PROMPT)
    until(lambda: router.known(PROMPT) == (20, 0))
    assert router.known(ALIKE) == (18, 0)
    holder.store(ALIKE)
    until(lambda: router.known(ALIKE) == (20, 0))
    holder.client.evict(key=last_key(holder, PROMPT))
    until(lambda: router.known(PROMPT) == (18, 0))
    assert router.known(ALIKE) == (20, 0)
    holder.client.flush()
    holder.restart()
    until(lambda: router.known(ALIKE) == (0, 20))
    late = dynamo(holder.endpoint)
    until(lambda: late.known(ALIKE) == (0, 20) and late.known(PROMPT) == (0, 18))
    holder.client.evict(all=True)
    until(lambda: router.known(ALIKE) == late.known(ALIKE) == (0, 0))


def test_vllm_router_sends_prompts_to_the_worker_that_has_them(
    hold: Callable[[], Holder], vllm_router: Callable[..., VllmRouter]
) -> None:
    """Eight of eight; and where a prompt is gone, one that parts from it inside a block is known still."""
    holders = [hold(), hold()]
    router = vllm_router([holder.endpoint for holder in holders])
    prompts = [[list(range(first, first + 320)) for first in range(at, at + 40_000, 10_000)] for at in (1000, 50_000)]
    for holder, mine in zip(holders, prompts, strict=True):
        for prompt in mine:
            holder.store(prompt)
    for at, mine in enumerate(prompts):
        until(partial(_sent_to, router, mine[-1], at))
    assert [[router.ask(prompt) for prompt in mine] for mine in prompts] == [[0] * 4, [1] * 4]

    whole = list(range(90_000, 90_320))
    parted = [*whole[:-24], *range(9000, 9024)]
    holders[0].store([*whole[:272], *range(8000, 8048)])  # one of a router's blocks more than the daemon's whole ones
    holders[1].store(parted)
    until(partial(_sent_to, router, parted, 1))
    holders[1].store(whole)
    until(partial(_sent_to, router, whole, 1))
    holders[1].client.evict(key=last_key(holders[1], whole))
    marker = list(range(95_000, 95_064))  # told after what is gone
    holders[1].store(marker)
    until(partial(_sent_to, router, marker, 1))
    assert _sent_to(router, parted, 1)
    holders[1].client.evict(all=True)
    until(partial(_sent_to, router, parted, 0))


def _sent_to(router: VllmRouter, prompt: Sequence[int], worker: int) -> bool:
    """Four times: one that nobody has is sent to either."""
    return [router.ask(prompt) for _ in range(4)] == [worker] * 4
