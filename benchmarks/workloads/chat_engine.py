"""An engine's stand-in that keeps the KV of chats in the cache, and the bytes of that KV, which follow from tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from prefixd.client import AsyncCache, AsyncLease, ExhaustedError, NamespaceSpec

Bytes = npt.NDArray[np.uint8]

_PATTERN_WORDS = 1 << 16
_PATTERN = np.random.default_rng(0).integers(0, 1 << 64, _PATTERN_WORDS, dtype=np.uint64)


@dataclass(slots=True)
class Counts:
    """What an engine's stand-in came to."""

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
        counts.possible_tokens += content.known(self._seen, usable) * spec.block_tokens
        tokens = np.array([*prompt, *output], np.uint32)
        hit = await self._load(tokens[: usable * spec.block_tokens], content)
        counts.hit_tokens += hit * spec.block_tokens
        await self._store(tokens, content, hit)
        self._seen.update(content.names)

    async def _load(self, tokens: npt.NDArray[np.uint32], content: BlockBytes) -> int:
        async with await self._cache.acquire(tokens) as lease:
            for block in range(lease.blocks):
                for part in range(len(content.spec.parts)):
                    if lease.has(block, part):
                        self._compare(lease, block, part, content)
            return lease.blocks

    def _compare(self, lease: AsyncLease, block: int, part: int, content: BlockBytes) -> None:
        with lease.view(block, part) as view:
            got = np.frombuffer(view, np.uint8).copy()
        self.counts.loaded_bytes += len(got)
        self.counts.wrong_bytes += int(np.count_nonzero(got != content.part(block, part)))

    async def _store(self, tokens: npt.NDArray[np.uint32], content: BlockBytes, computed_from: int) -> None:
        """Stores the blocks that were computed, from `computed_from` on."""
        done, end = computed_from, len(content.names)
        while done < end:
            try:
                reservation = await self._cache.reserve(tokens, first_block=done)
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


class BlockBytes:
    """The right bytes of a prompt's blocks.

    They depend on the namespace, on all tokens up to the block's end, and on the part.

    Attributes:
        names: of each full block, what its bytes follow from.
    """

    def __init__(self, spec: NamespaceSpec, tokens: Sequence[int]) -> None:
        self.spec = spec
        self.names: list[bytes] = []
        digest = blake2b(spec.name.encode() + b"\0" + spec.salt, digest_size=8)
        ids = np.array(tokens, "<u4")
        for start in range(0, len(tokens) - spec.block_tokens + 1, spec.block_tokens):
            digest.update(ids[start : start + spec.block_tokens].tobytes())
            self.names.append(digest.digest())

    def known(self, names: set[bytes], most: int) -> int:
        """Blocks from the first on, `most` at the most, that are among `names`."""
        return next((block for block, name in enumerate(self.names[:most]) if name not in names), most)

    def part(self, block: int, part: int) -> Bytes:
        """The bytes of one part of one block."""
        nbytes = self.spec.parts[part].nbytes
        seed = blake2b(self.names[block], salt=part.to_bytes(2, "little"), digest_size=8).digest()
        words = np.resize(_PATTERN, -(-nbytes // 8)) ^ np.frombuffer(seed, np.uint64)
        content: Bytes = words.view(np.uint8)[:nbytes]
        return content
