"""Tokens of a block: at least as many as asked for, and so many that its pieces fill whole chunks of memory.

Qwen2.5-7B, 56 KiB a token in 28 layers, on chunks of 2 MiB; 16 tokens were asked for
layout "token"   a block is one piece           lcm(56 KiB, 2 MiB) = 14 MiB   256 tokens
layout "layer"   a block is a piece in a layer  lcm(2 KiB, 2 MiB) = 2 MiB     1,024 tokens
"""

from __future__ import annotations

import math
from dataclasses import replace

from prefixd_swap.group_shape import KvGeometry


def fill_chunks(asked: KvGeometry, chunk_bytes: int) -> KvGeometry:
    """The geometry with the fewest `block_tokens`, from those asked for up, whose pieces are whole chunks."""
    step = _least_piece_bytes(asked, chunk_bytes) // _piece_token_bytes(asked)
    filled = replace(asked, block_tokens=-(-asked.block_tokens // step) * step)
    filled.check_chunk(chunk_bytes)
    return filled


def explain_block_tokens(asked: int, used: KvGeometry, chunk_bytes: int) -> str:
    """Why a block has more tokens than were asked for; empty if it has not."""
    if asked == used.block_tokens:
        return ""
    return f"{asked} tokens asked, {used.block_tokens} used: {chunk_rule(used, chunk_bytes)}"


def chunk_rule(geometry: KvGeometry, chunk_bytes: int) -> str:
    """Why a block needs its number of tokens, for people: "a token takes 56 KiB and blocks must fill ..."."""
    where = "" if geometry.pieces == 1 else f" in each of {geometry.layers} layers"
    parts = "blocks" if geometry.pieces == 1 else "a block's pieces"
    return (
        f"a token takes {_exact(_piece_token_bytes(geometry))}{where} and {parts} must fill whole chunks of "
        f"{_exact(chunk_bytes)} (lcm {_exact(_least_piece_bytes(geometry, chunk_bytes))})"
    )


def _piece_token_bytes(geometry: KvGeometry) -> int:
    return geometry.token_bytes // geometry.pieces


def _least_piece_bytes(geometry: KvGeometry, chunk_bytes: int) -> int:
    return math.lcm(_piece_token_bytes(geometry), chunk_bytes)


def _exact(nbytes: int) -> str:
    """`56 KiB`, `2 MiB`, `768 bytes`: in the largest unit that leaves no fraction."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} bytes"
