"""An engine's stand-in that keeps the KV of chats in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.block_bytes import BlockBytes
from prefixd.client import AsyncCache, ExhaustedError


@dataclass(slots=True)
class Counts:
    """Counts of an engine's stand-in."""

    prompts: int = 0
    prompt_tokens: int = 0
    possible_tokens: int = 0
    """Prompt tokens that a cache without a limit would have served."""
    hit_tokens: int = 0
    loaded_bytes: int = 0
    wrong_bytes: int = 0
    stored_blocks: int = 0
    dropped_blocks: int = 0
    """Not stored, because there was no room or their prefix had gone."""


class ChatEngine:
    """Loads what is cached of a prompt, compares every byte, computes the rest and stores it, one prompt at a time."""

    def __init__(self, cache: AsyncCache) -> None:
        self._cache = cache
        self._seen: set[bytes] = set()
        self.counts = Counts()

    async def answer(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Handles a prompt whose answer is `output`; both end up in the cache, in whole blocks.

        The last token of a prompt is always computed: the next one is sampled from it.
        """
        counts, spec = self.counts, self._cache.spec
        content = BlockBytes(spec, [*prompt, *output])
        usable = (len(prompt) - 1) // spec.block_tokens
        counts.prompts += 1
        counts.prompt_tokens += len(prompt)
        known = next((block for block in range(usable) if content.names[block] not in self._seen), usable)
        counts.possible_tokens += known * spec.block_tokens
        hit = await self._load(content, usable)
        counts.hit_tokens += hit * spec.block_tokens
        await self._store(content, hit)
        self._seen.update(content.names)

    async def _load(self, content: BlockBytes, blocks: int) -> int:
        async with await self._cache.acquire(content.tokens[: blocks * content.spec.block_tokens]) as lease:
            for block in range(lease.blocks):
                for part in range(len(content.spec.parts)):
                    if lease.has(block, part):
                        self.counts.loaded_bytes += content.spec.parts[part].nbytes
                        self.counts.wrong_bytes += content.wrong_in(lease, block, part)
            return lease.blocks

    async def _store(self, content: BlockBytes, computed_from: int) -> None:
        """Stores the blocks that were computed, from `computed_from` on."""
        done, end = computed_from, content.blocks
        while done < end:
            try:
                reservation = await self._cache.reserve(content.tokens, first_block=done)
            except ExhaustedError:
                break
            async with reservation:
                if not reservation.blocks:
                    done = end
                    break
                if reservation.first_block < done:
                    break
                for block in range(reservation.blocks):
                    for part in range(len(content.spec.parts)):
                        with reservation.view(block, part) as view:
                            view[:] = content.part(reservation.first_block + block, part).data
                self.counts.stored_blocks += (await reservation.commit()).committed
                done = reservation.first_block + reservation.blocks
        self.counts.dropped_blocks += end - done
