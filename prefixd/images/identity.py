"""The token ids under which the blocks of a prompt with images are cached.

The placeholders of two images are equal, and their KV is not. A look-up has token ids alone, so an image's ids are
drawn from its digest:

    tokens            5 6 7 8 | 9 I I I | I I 3 4 | 1 2 3 4      I: the model's placeholder, blocks of 4 tokens
    identity          5 6 7 8 | a b c d | e f 3 4 | 1 2 3 4      a-d: of "9 I I I", digest and begin of the image
                                                                 e, f: of the digest
    identity (cross)  a b c d | 9 I I I | I I 3 4 | 1 2 3 4      a-d: of "5 6 7 8", all digests and where they begin

The whole block in which an image begins is drawn, however few placeholders it has of the image: the smallest block, of
8 tokens, has 256 bits. The ids of an incomplete block change with each token, until it is full.

In cross-attention models every row of a prompt reads the images, even rows before them (Llama 3.2 Vision), so every
block differs with other images: the ids of the first block make all blocks behind it differ.

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
    """32 bytes that name its content."""

    @property
    def end(self) -> int:
        """The first token behind it."""
        return self.first + self.tokens


def identity_tokens(
    tokens: npt.NDArray[np.uint32], spans: Sequence[ImageSpan], block_tokens: int, *, cross: bool = False
) -> npt.NDArray[np.uint32]:
    """The ids under which the blocks of `tokens` are cached; `tokens` itself if there are no images.

    Args:
        tokens: [n], as the model reads them, each image's placeholders repeated.
        spans: the images in their order; none overlaps another.
        block_tokens: tokens of a block, 8 or more.
        cross: all rows depend on all images.

    Raises:
        ValueError: blocks are too small, or the spans are out of order or of the tokens.
    """
    if not spans:
        return tokens
    if block_tokens < LEAST_BLOCK_TOKENS:
        raise ValueError(f"blocks of {block_tokens} tokens cannot tell images apart; {LEAST_BLOCK_TOKENS} are needed")
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
    """Whether the ids of the block behind the first `blocks` depend on all tokens in it (`identity_tokens`)."""
    if cross:
        return bool(spans) and blocks == 0
    return any(span.first // block_tokens == blocks for span in spans)


def last_cut(tokens: int, spans: Sequence[ImageSpan]) -> int:
    """The largest length up to `tokens` that does not end inside an image."""
    for span in spans:
        if span.first < tokens < span.end:
            return span.first
    return tokens


def uncut_blocks(blocks: int, spans: Sequence[ImageSpan], block_tokens: int) -> int:
    """The largest number of blocks up to `blocks` that does not end inside an image."""
    while (cut := last_cut(blocks * block_tokens, spans)) < blocks * block_tokens:
        blocks = cut // block_tokens
    return blocks


def next_uncut_blocks(blocks: int, spans: Sequence[ImageSpan], block_tokens: int) -> int:
    """The smallest number of blocks above `blocks` that does not end inside an image."""
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
    """Draws a block from its tokens and these images."""
    begin, end = block * block_tokens, (block + 1) * block_tokens
    facts = [(span.digest.hex(), span.first - begin) for span in spans]
    ids[begin:end] = drawn_ids(tokens[begin:end], repr(facts).encode())
