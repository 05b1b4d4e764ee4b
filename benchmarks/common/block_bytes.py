"""The right bytes of blocks, and counts of wrong ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from prefixd.client import AsyncLease, NamespaceSpec

Tokens = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]


class BlockBytes:
    """The right bytes of a prompt's whole blocks. Any process can check a block, independent of its writer.

    They follow from the namespace, all tokens up to the block's end, and the part. Every word differs between any two
    blocks, so bytes of another block, or moved ones, do not pass.

    Attributes:
        names: names of the blocks, from which their bytes follow.
    """

    def __init__(self, spec: NamespaceSpec, tokens: Sequence[int] | Tokens) -> None:
        self.spec = spec
        self.tokens: Tokens = np.asarray(tokens, "<u4")
        self.names: list[bytes] = []
        digest, width = blake2b(spec.name.encode() + b"\0" + spec.salt, digest_size=8), spec.block_tokens
        for end in range(width, len(self.tokens) + 1, width):
            digest.update(self.tokens[end - width : end].tobytes())
            self.names.append(digest.digest())

    @property
    def blocks(self) -> int:
        return len(self.names)

    def part(self, block: int, part: int) -> Bytes:
        """Returns the bytes of one part of one block."""
        nbytes = self.spec.parts[part].nbytes
        seed = blake2b(self.names[block], salt=part.to_bytes(2, "little"), digest_size=8).digest()
        if self.spec.parts[part].shape is not None:  # bfloat16: another mantissa in each
            words = _numbers(-(-nbytes // 8)) ^ (np.frombuffer(seed, np.uint64) & np.uint64(0x007F_007F_007F_007F))
        else:
            words = _pattern(-(-nbytes // 8)) ^ np.frombuffer(seed, np.uint64)
        return words.view(np.uint8)[:nbytes]

    def content(self, first_block: int = 0, parts: Sequence[int] | None = None) -> Bytes:
        """Returns the bytes of the blocks from `first_block` on, block after block, part after part."""
        chosen = range(len(self.spec.parts)) if parts is None else parts
        pieces = [self.part(block, part) for block in range(first_block, self.blocks) for part in chosen]
        return np.concatenate([np.empty(0, np.uint8), *pieces])

    def of_part(self, part: int) -> Bytes:
        """[blocks, bytes of the part]"""
        return self.content(parts=[part]).reshape(self.blocks, -1)

    def wrong_in(self, lease: AsyncLease, block: int, part: int = 0) -> int:
        """Returns the number of wrong bytes in a part of a leased block."""
        with memoryview(lease.view(block, part)) as view:
            return wrong_bytes(np.frombuffer(view, np.uint8).copy(), self.part(block, part))


def wrong_bytes(got: Bytes, expected: Bytes) -> int:
    """Returns the number of bytes that differ."""
    return 0 if np.array_equal(got, expected) else int(np.count_nonzero(got != expected))


@cache
def _numbers(words: int) -> npt.NDArray[np.uint64]:
    """Four bfloat16 a word, of a normal distribution, as keys and values are."""
    drawn = np.random.default_rng(0).standard_normal(4 * words, np.float32)
    return (drawn.view(np.uint32) >> 16).astype(np.uint16).view(np.uint64)


@cache
def _pattern(words: int) -> npt.NDArray[np.uint64]:
    return np.random.default_rng(0).integers(0, 1 << 64, words, dtype=np.uint64)
