"""A table of blocks as eviction policies see it, that a test fills by hand."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prefixd_swap.eviction import Rows

TIERS = 2


class Blocks:
    """Up to `rows` blocks; each has the key that its number stands for."""

    def __init__(self, rows: int, block_tokens: int = 16, block_bytes: int = 1 << 20, ordinal: int = 0) -> None:
        self.ordinal, self.block_tokens, self.block_bytes = ordinal, block_tokens, block_bytes
        self.last_used = np.zeros(rows)
        self.entered = np.zeros((rows, TIERS))
        self.rank = np.zeros((rows, TIERS))
        self.uses = np.zeros(rows, np.uint8)
        self.any_part = np.zeros(rows, np.uint8)
        self.parent = np.full(rows, -1)
        self.depth = np.zeros(rows, np.int64)
        self.namespace = np.zeros(rows, np.int32)
        self.number = np.arange(rows)
        self.compressed = np.ones(rows)

    def compression(self, rows: Rows, tier: int) -> npt.NDArray[np.float64]:
        return self.compressed[rows]

    def keys(self, rows: Rows) -> npt.NDArray[np.uint8]:
        hashes = (self.number[rows].astype(np.uint64) + np.uint64(1)) * np.uint64(0xD6E8FEB86659FD93)
        return np.stack([hashes, hashes >> np.uint64(5)], axis=1).view(np.uint8)
