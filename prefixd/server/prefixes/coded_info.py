"""Says how a prefix is stored on disk, and how far its bytes are from the exact ones."""

from __future__ import annotations

import numpy as np

from prefixd.cache import TieredCache, Trie
from prefixd.cache.index.trie import DISK, NO_SLOT, Rows
from prefixd.v1 import admin_pb2 as pb
from prefixd_swap import SwapError

LAYERS_BLOCKS = 64
"""Most blocks of a page that are read for the errors of their layers."""


class CodedSums:
    """Sums of what is stored of a prefix.

    Args:
        trie: its blocks' trie.
    """

    def __init__(self, trie: Trie) -> None:
        self._trie = trie
        self._stored = self._exact = self._coded = self._altered = 0
        self._errors = np.zeros(2, np.float32)

    def add(self, rows: Rows) -> None:
        """Adds some of the prefix's rows."""
        trie = self._trie
        there = trie.slots[rows, DISK] != NO_SLOT
        exact = int((there @ np.array(trie.part_bytes, np.int64)).sum())
        self._exact += exact
        if not trie.has_coded:
            self._stored += exact
            return
        self._stored += int(np.where(there, trie.stored_bytes(rows), 0).sum())
        altered = trie.errors[rows, 0] > 0
        self._altered += int(np.count_nonzero(altered))
        self._coded += int(np.count_nonzero(there.any(axis=1) & ~altered & trie.coded_bytes[rows].any(axis=1)))
        self._errors = np.maximum(self._errors, trie.errors[rows].max(axis=0, initial=0.0))

    def describe(self) -> pb.PrefixStorage:
        """The message."""
        largest, rms = self._errors.tolist()
        return pb.PrefixStorage(
            stored_bytes=self._stored,
            exact_bytes=self._exact,
            coded_blocks=self._coded,
            altered_blocks=self._altered,
            largest_error=largest,
            rms_error=rms,
        )


def block_storage(trie: Trie, row: int) -> pb.BlockStorage | None:
    """How one block is stored on disk, and whether memory has bytes from a lossy copy; None if neither says more than
    that it is stored as it is."""
    if not trie.has_coded:
        return None
    here = np.array([row])
    there = trie.slots[row, DISK] != NO_SLOT
    largest, rms = trie.errors[row].tolist()
    if not (largest or trie.coded_bytes[row].any()):
        return None
    return pb.BlockStorage(
        stored_bytes=int(np.where(there, trie.stored_bytes(here)[0], 0).sum()),
        form="" if not there.any() else "altered" if largest else "coded",
        altered_in_memory=bool(trie.decoded[row]),
        largest_error=largest,
        rms_error=rms,
    )


async def add_layers(cache: TieredCache, trie: Trie, rows: Rows, answer: pb.InspectResponse) -> None:
    """Reads blocks on disk that a lossy codec has altered, behind all other reads, and adds the errors of each layer.

    Args:
        cache: the cache.
        trie: the blocks' trie.
        rows: of the blocks in `answer`.
        answer: gets the errors, of its first `LAYERS_BLOCKS` altered blocks.
    """
    generations, left = trie.generation[rows].tolist(), LAYERS_BLOCKS
    for row, generation, block in zip(rows.tolist(), generations, answer.blocks, strict=True):
        if not left or cache.tiers.durable is None:
            return
        if block.storage.form != "altered" or trie.generation[row] != generation:
            continue
        left -= 1
        read = await cache.mover.disk.reads.read_aside(trie, row)
        if isinstance(read, SwapError):
            block.storage.unread = str(read)
            continue
        for part, decoded in enumerate(read or ()):
            if decoded is not None and decoded.errors is not None:
                block.storage.parts.add(
                    part=part,
                    codec=decoded.codec,
                    largest_errors=decoded.errors.largest.tolist(),
                    rms_errors=decoded.errors.rms.tolist(),
                )
