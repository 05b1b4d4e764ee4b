"""How many tokens a block has, and at what stride they lie: the trade of memory for short blocks.

A block's pieces fill whole chunks of memory (2 MiB on CUDA), so `block_tokens * stride` is a multiple of the chunk. If
a token's bytes have an odd factor, only long blocks do that, and a prompt that is shorter than a block is never found
again. With a padded stride shorter blocks fill chunks:

```
Qwen2.5-7B, 56 KiB a token in the layout "token", chunks of 2 MiB

tokens a block       16        32        64       128       256
stride          128 KiB    64 KiB    64 KiB    64 KiB    56 KiB      a multiple of 2 MiB / tokens
padding            129%       14%       14%       14%         0
                              auto                         none
```

vAttention (section 6.1) changed the driver instead, to map pages of 64 KiB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from prefixd_swap.group_shape import STRIDE_BYTES, KvGeometry

Padding = Literal["auto", "none", "any"]
"""What the tokens of a block may be padded: see `choose_blocks`."""

CUDA_CHUNK_BYTES = 2 << 20
LOW_PADDING = 0.15
SHORT_BLOCK = 64
MOST_PADDING = 2.0
SMALL_TOKEN = CUDA_CHUNK_BYTES // SHORT_BLOCK
"""Bytes of memory of a token in a group, 32 KiB, that are few whatever part of them is padding: a quarter of Llama 3
8B's."""


def choose_blocks(asked: Sequence[KvGeometry], chunk_bytes: int, padding: Padding) -> list[KvGeometry]:
    """The geometries of a model's KV groups with the same `block_tokens`, whose pieces are whole chunks, and a stride
    of tokens for each.

    Candidates are the tokens asked for, rounded up to each power of two. Padding counts over all groups: memory by
    bytes of a token, less one.

    - ``"none"``: the fewest tokens without padding, for the least memory.
    - ``"any"``: the tokens asked for, whatever the padding.
    - ``"auto"``: the fewest tokens with at most `LOW_PADDING`. If these are more than `SHORT_BLOCK`, the least padding
      of blocks of up to `SHORT_BLOCK` tokens. Unless it is above `MOST_PADDING` and a token takes more than
      `SMALL_TOKEN` in a group, as in the layout "layer", where each layer has pieces of its own; or unless more than
      `SHORT_BLOCK` tokens are asked for.
    """
    tokens = asked[0].block_tokens
    step = math.lcm(*(math.lcm(each.piece_token_bytes, chunk_bytes) // each.piece_token_bytes for each in asked))
    exact = _round_up(tokens, step)
    if padding == "none":
        chosen = exact
    elif padding == "any":
        chosen = tokens
    else:
        candidates = sorted({*(_round_up(tokens, 1 << power) for power in range(exact.bit_length())), exact})
        costs = {each: padding_share(pad_to_chunks(asked, each, chunk_bytes)) for each in candidates if each <= exact}
        chosen = next(each for each, cost in costs.items() if cost <= LOW_PADDING)
        short = {
            each: cost
            for each, cost in costs.items()
            if each <= SHORT_BLOCK and (cost <= MOST_PADDING or _is_small(pad_to_chunks(asked, each, chunk_bytes)))
        }
        if chosen > SHORT_BLOCK and short:
            chosen = min(short, key=short.__getitem__)
    return pad_to_chunks(asked, chosen, chunk_bytes)


def pad_to_chunks(asked: Sequence[KvGeometry], tokens: int, chunk_bytes: int) -> list[KvGeometry]:
    """The geometries with blocks of `tokens` tokens, each at the least stride at which a piece is whole chunks."""
    return [replace(each, block_tokens=tokens, token_stride=_stride(each, tokens, chunk_bytes)) for each in asked]


def padding_share(groups: Sequence[KvGeometry]) -> float:
    """Memory of a token that is padding, by the bytes of its keys and values, in all groups: 0.14 for 64 of 56 KiB."""
    return sum(each.token_memory for each in groups) / sum(each.token_bytes for each in groups) - 1


def fill_chunks(asked: KvGeometry, chunk_bytes: int) -> KvGeometry:
    """The geometry with the fewest `block_tokens`, from those asked for up, whose pieces are whole chunks without
    padding."""
    return choose_blocks([asked], chunk_bytes, "none")[0]


def explain_blocks(asked: int, groups: Sequence[tuple[str, KvGeometry]], chunk_bytes: int) -> str:
    """Why a block has more tokens than were asked for, and what its padding costs; empty if it has neither.

    groups: the KV groups with their names.
    """
    geometries = [geometry for _, geometry in groups]
    used = geometries[0].block_tokens
    padded = padding_share(geometries)
    if asked == used and not padded:
        return ""
    if len(groups) == 1:
        rule = chunk_rule(geometries[0], chunk_bytes)
    else:
        sizes = ", ".join(f"{_exact(each.token_bytes)} ({name})" for name, each in groups)
        rule = f"a token takes {sizes} and the blocks of each must fill whole chunks of {_exact(chunk_bytes)}"
    if padded:
        strides = ", ".join(_exact(each.stride) for each in geometries)
        plain = [replace(each, block_tokens=asked, token_stride=0) for each in geometries]
        rule += (
            f"; tokens are padded to {strides}, {padded:.0%} more GPU memory; "
            'worker.block_padding = "none" has no padding and blocks of '
            f"{choose_blocks(plain, chunk_bytes, 'none')[0].block_tokens}"
        )
    return f"{asked} tokens asked, {used} used: {rule}"


def chunk_rule(geometry: KvGeometry, chunk_bytes: int) -> str:
    """Why a block needs its number of tokens, for people: "a token takes 56 KiB and blocks must fill ..."."""
    where = "" if geometry.pieces == 1 else f" in each of {geometry.layers} layers"
    parts = "blocks" if geometry.pieces == 1 else "a block's pieces"
    least = math.lcm(geometry.piece_token_bytes, chunk_bytes)
    return (
        f"a token takes {_exact(geometry.piece_token_bytes)}{where} and {parts} must fill whole chunks of "
        f"{_exact(chunk_bytes)} (lcm {_exact(least)})"
    )


def _is_small(groups: Sequence[KvGeometry]) -> bool:
    return all(each.token_memory <= SMALL_TOKEN for each in groups)


def _stride(geometry: KvGeometry, tokens: int, chunk_bytes: int) -> int:
    """The least stride of `tokens` tokens that fill chunks; 0 if no padding is needed."""
    least = geometry.piece_token_bytes
    if tokens * least % chunk_bytes == 0:
        return 0
    return _round_up(least, math.lcm(chunk_bytes // math.gcd(chunk_bytes, tokens), STRIDE_BYTES))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _exact(nbytes: int) -> str:
    """`56 KiB`, `2 MiB`, `768 bytes`: in the largest unit that leaves no fraction."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} bytes"
