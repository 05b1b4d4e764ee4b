"""The token ids under which the blocks of a prompt with images are cached.

The placeholders of two images are equal, but their KV differs. The cache compares token ids only, so an image's ids are
drawn from its digest:

    tokens            5 6 7 8 | 9 I I I | I I 3 4 | 1 2 3 4      I: the model's placeholder, blocks of 4 tokens
    identity          5 6 7 8 | a b c d | e f 3 4 | 1 2 3 4      a-d: from "9 I I I", digest and begin of the image
                                                                 e, f: from the digest
    identity (cross)  a b c d | 9 I I I | I I 3 4 | 1 2 3 4      a-d: from "5 6 7 8", digests and begins of all images

All ids of the block in which an image begins are drawn, even if the block has few of the image's placeholders: the
smallest block, of 8 tokens, has 256 bits. The ids of an incomplete block change with each token, until it is full.

In cross-attention models every row of a prompt reads the images, even rows before them (Llama 3.2 Vision), so all
blocks of prompts with different images must differ: the ids of the first block make all later blocks differ.

A prefix never ends inside an image: its tokens may attend to each other in both directions (Gemma 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd.base.drawn_tokens import drawn_ids

LEAST_BLOCK_TOKENS = 8
"""Tokens of a block that are enough to distinguish images."""


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The place of an image in a prompt: its placeholders are the tokens [first, first + tokens)."""

    first: int
    tokens: int
    digest: bytes
    """32 bytes that identify its content."""

    @property
    def end(self) -> int:
        """The first token after the image."""
        return self.first + self.tokens


def identity_tokens(
    tokens: npt.NDArray[np.uint32], spans: Sequence[ImageSpan], block_tokens: int, *, cross: bool = False
) -> npt.NDArray[np.uint32]:
    """Returns the ids under which the blocks of `tokens` are cached; `tokens` itself if there are no images.

    Args:
        tokens: [n], the model's input, with one placeholder for each of an image's tokens.
        spans: the images in order, without overlaps.
        block_tokens: tokens of a block, 8 or more.
        cross: all rows depend on all images.

    Raises:
        ValueError: blocks are too small, or spans are not in order or end after the last token.
    """
    if not spans:
        return tokens
    if block_tokens < LEAST_BLOCK_TOKENS:
        raise ValueError(f"blocks of {block_tokens} tokens cannot distinguish images; use {LEAST_BLOCK_TOKENS} or more")
    if [span.first for span in spans] != sorted(span.first for span in spans) or spans[-1].end > len(tokens):
        raise ValueError(f"images at {[(span.first, span.tokens) for span in spans]} in {len(tokens)} tokens")
    ids = tokens.astype(np.uint32, copy=True)
    if cross:
        _draw_block(ids, tokens, 0, block_tokens, spans)
        return ids
    for span in spans:
        ids[span.first : span.end] = drawn_ids(tokens[span.first : span.end], span.digest)
    for block in sorted({span.first // block_tokens for span in spans}):
        begin, end = block * block_tokens, (block + 1) * block_tokens
        _draw_block(ids, tokens, block, block_tokens, [span for span in spans if span.first < end and span.end > begin])
    return ids


def drawn_block(spans: Sequence[ImageSpan], blocks: int, block_tokens: int, *, cross: bool = False) -> bool:
    """True if the ids of the block after the first `blocks` blocks depend on all tokens in it (`identity_tokens`)."""
    if cross:
        return bool(spans) and blocks == 0
    return any(span.first // block_tokens == blocks for span in spans)


def last_cut(tokens: int, spans: Sequence[ImageSpan]) -> int:
    """Returns the largest length up to `tokens` that does not end inside an image."""
    for span in spans:
        if span.first < tokens < span.end:
            return span.first
    return tokens


def uncut_blocks(blocks: int, spans: Sequence[ImageSpan], block_tokens: int) -> int:
    """Returns the largest number of blocks up to `blocks` that does not end inside an image."""
    while (cut := last_cut(blocks * block_tokens, spans)) < blocks * block_tokens:
        blocks = cut // block_tokens
    return blocks


def next_uncut_blocks(blocks: int, spans: Sequence[ImageSpan], block_tokens: int) -> int:
    """Returns the smallest number of blocks above `blocks` that does not end inside an image."""
    blocks += 1
    for span in spans:
        if span.first < blocks * block_tokens < span.end:
            blocks = -(-span.end // block_tokens)
    return blocks


def _draw_block(
    ids: npt.NDArray[np.uint32],
    tokens: npt.NDArray[np.uint32],
    block: int,
    block_tokens: int,
    spans: Sequence[ImageSpan],
) -> None:
    """Replaces the ids of a block by ids drawn from its tokens, and from digests and begins of these images."""
    begin, end = block * block_tokens, (block + 1) * block_tokens
    facts = [(span.digest.hex(), span.first - begin) for span in spans]
    ids[begin:end] = drawn_ids(tokens[begin:end], repr(facts).encode())
