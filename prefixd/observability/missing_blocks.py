"""What a prompt lacked of the cache when it came: kept with its record, so that the reason can be found later."""

from __future__ import annotations

from dataclasses import dataclass

MOST_KEYS = 32
"""Missing blocks whose keys are kept, the first ones: a block that left the cache took those behind it along."""
MOST_TOKENS = 256
"""Token ids that are kept of the first missing block."""


@dataclass(frozen=True, slots=True)
class MissingBlocks:
    """The blocks of a prompt that were not in the cache when it came.

    Attributes:
        namespace: the id of the prompt's namespace.
        block_tokens: tokens a block.
        found: blocks that were usable, from the prompt's first on.
        blocks: full blocks that could have been found.
        parent_key: key of the last found block; empty if none was found.
        tokens: the ids of the first missing block, little-endian uint32; at most `MOST_TOKENS` of them.
        keys: keys of the first missing blocks, 16 bytes each, at most `MOST_KEYS`.
    """

    namespace: bytes
    block_tokens: int
    found: int
    blocks: int
    parent_key: bytes
    tokens: bytes
    keys: bytes

    @property
    def missing(self) -> int:
        """How many blocks were missing."""
        return self.blocks - self.found
