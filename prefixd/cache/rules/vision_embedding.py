"""Vision embedding: the output of a vision encoder for an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from prefixd.cache.rules.rule import Bools, GroupRule, Int64s


@dataclass(frozen=True, slots=True)
class VisionEmbedding(GroupRule):
    """An image is needed whole or not at all: if one block is missing, the vision encoder has to run again.

    An embedding depends on the image alone, not on what stands before it in a prompt. So images have a namespace of
    their own, in which each *prompt* is one image: its tokens are made of the hash of the image's content (for
    example the hash's words, then the number of the row), and a block holds some rows of the embedding. Example, an
    image of 4 blocks:

        block         0 1 2 3
        there         x x x x     possible: 0 4
        there         x x . x     possible: 0
        needed by 4   r r r r     nothing expires

    - A prefix needs: all blocks of the image.
    - First to go: nothing in particular. All blocks of an image were used last at the same moment, so an eviction by
      time takes one image to its end before it begins another (Jenga gives them one random prefix length for that).
    - Possible lengths: 0, and all blocks that the trie knows of the image if all are there.

    Limits: a rule does not know how many blocks an image has, only how many of them the trie knows. An image whose last
    blocks were evicted looks like a smaller one. So a reader compares the number of blocks that it gets with that of
    the image, and treats fewer as none; it fills the missing blocks with the next `Reserve`.
    """

    lasting: ClassVar[bool] = True

    def needed_range(self, blocks: Int64s) -> tuple[Int64s, Int64s]:
        """The whole image."""
        return np.zeros_like(blocks), blocks

    def possible_prefixes(self, there: Bools) -> Bools:
        """None, or all blocks that are known of the image."""
        possible = np.zeros(len(there) + 1, np.bool_)
        possible[0] = True
        possible[-1] |= there.all()
        return possible
