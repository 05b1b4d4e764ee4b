"""Cross-attention: text attends to the KV of the prompt's images (Llama 3.2 Vision)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from prefixd.cache.rules.rule import Bools, GroupRule, Int64s


@dataclass(frozen=True, slots=True)
class CrossAttention(GroupRule):
    """The KV of the prompt's images is needed whole, by every prefix.

    It belongs to images, not to tokens, and a rule does not know where in a prompt the images are. So it lies in the
    first `image_blocks` blocks of the prompt, wherever the images stand, and the other blocks have no bytes of this
    group. Example with `image_blocks=2`:

        block         0 1 2 3 4 5
        there         x x             possible: 0 2 3 4 5 6
        needed by 4   r r
        expires             e e e e   bytes that no prefix needs, should there be any

    - A prefix needs: the bytes of all images; if one block of them is missing, the vision encoder has to run again.
    - First to go: nothing of the images. They go last, with the first blocks of the prompt.
    - Possible lengths: 0, and from `image_blocks` on if these blocks are all there.

    Limits: prompts of one namespace have images of one size in all; others take a namespace of their own. Prompts with
    different images must differ from their first block on, since that block's bytes depend on the images: its key has
    to say which they are (in the salt or in the tokens). So a conversation to which an image is added begins a new
    prefix. Bytes that prompts share because they have an image in common belong under `VisionEmbedding`.

    Attributes:
        image_blocks: blocks that hold the images' KV, at least 1.
    """

    image_blocks: int = 1
    lasting: ClassVar[bool] = True

    def needed_range(self, blocks: Int64s) -> tuple[Int64s, Int64s]:
        """The images' blocks."""
        return np.zeros_like(blocks), np.minimum(blocks, self.image_blocks)

    def possible_prefixes(self, there: Bools) -> Bools:
        """No length that ends inside the images' blocks; all lengths behind them if they are there."""
        possible = np.zeros(len(there) + 1, np.bool_)
        possible[0] = True
        possible[self.image_blocks :] = there[: self.image_blocks].all()
        return possible
