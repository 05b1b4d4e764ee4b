"""Tiles of positions, which attention on a CPU computes together: their size, and the keys that they read."""

from __future__ import annotations

import math

MAX_TILE = 16


def tile_tokens(block_tokens: int) -> int:
    """Positions in a tile: at most 16, and a divisor of the block: a tile's end has memory with its start."""
    return math.gcd(block_tokens, MAX_TILE)


def first_key(position: int, window: int | None, tile: int) -> int:
    """The first token that the tile of the query at `position` reads, a multiple of `tile`.

    Memory before it may be given up, once `position` is the next token to be computed.
    """
    if window is None:
        return 0
    return max(0, (position // tile - tiles_before(window, tile)) * tile)


def tiles_before(window: int, tile: int) -> int:
    """Number of tiles before its own that the first query of a tile sees keys of."""
    return -(-(window - 1) // tile)
