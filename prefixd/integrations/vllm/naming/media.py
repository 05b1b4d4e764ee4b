"""Token ids that stand for images and other media in the prompts that prefixd gets.

The placeholder tokens of two images are equal, and their KV is not. vLLM tells blocks apart by the media in them
(`kv_cache_utils._gen_mm_extra_hash_keys`): by their identifiers, and by their offsets in the block. Here the content of
the media takes the place of identifiers (`media_content`): every id of a block that a medium reaches into is replaced
by one drawn from a digest of the block's tokens, of the media and of their offsets.

    tokens            5 6 7 8 | 9 I I I | I I 3 4 | 1 2 3 4      I: the model's placeholder, blocks of 4 tokens
    prefixd gets      5 6 7 8 | a b c d | e f g h | 1 2 3 4      a-d: of "9 I I I", the image and its offset

A block has `block_tokens` ids of 32 bits, drawn with SHAKE-256: with blocks
of 4 tokens or more, two different ones are taken for equal with a probability of 2^-128 at the most.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import overload

from prefixd.base.drawn_tokens import drawn_ids
from prefixd.integrations.vllm.naming.media_content import Medium


class MediaTokens(Sequence[int]):
    """The token ids of a request as prefixd gets them. A last block that is not full keeps its ids.

    Args:
        tokens: the ids as the model reads them.
        media: the media of the prompt.
        block_tokens: tokens of a prefixd block.
    """

    def __init__(self, tokens: Sequence[int], media: Sequence[Medium], block_tokens: int) -> None:
        self._tokens = tokens
        self._block_tokens = block_tokens
        self._media: dict[int, list[tuple[str, int]]] = {}  # by block: content, and where it begins from there
        for medium in media:
            begin, end = medium.offset, medium.offset + medium.length
            for block in range(begin // block_tokens, -(-end // block_tokens)):
                self._media.setdefault(block, []).append((medium.content, begin - block * block_tokens))

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: int | slice) -> int | list[int]:
        if not isinstance(place, slice):
            index = range(len(self))[place]
            return self[index : index + 1][0]
        start, stop, step = place.indices(len(self))
        if step != 1:
            raise ValueError(f"step {step}: only consecutive tokens can be asked for")
        each = self._block_tokens
        ids = list(self._tokens[start:stop])
        for block in range(start // each, -(-max(start, stop) // each)):
            if block in self._media and (block + 1) * each <= len(self):
                first, last = max(start, block * each), min(stop, (block + 1) * each)
                ids[first - start : last - start] = self._ids(block)[first - block * each : last - block * each]
        return ids

    def _ids(self, block: int) -> list[int]:
        tokens = self._tokens[block * self._block_tokens : (block + 1) * self._block_tokens]
        ids: list[int] = drawn_ids(tokens, repr(self._media[block]).encode()).tolist()
        return ids


@dataclass(frozen=True, slots=True)
class MediaRequest:
    """A request with media as `SaveQueue` reads it. vLLM's own block hashes cover the media."""

    all_token_ids: Sequence[int]
    block_hashes: Sequence[Hashable]
