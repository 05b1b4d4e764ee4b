"""Layers that attend to the images of a prompt, and to nothing else (Llama 3.2 Vision).

Their keys and values are those of the images' patches, without positions: every row of a request reads the same. A row
sees the last image before it, or the last ones if no token is between them. A row before all images has no image of its
own: transformers then lets it attend to all patches, and leaves the layer's MLP out. Rows of requests without images
pass the layer by, as they do where a request has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CrossImages:
    """What the rows of one sequence see.

    pairs: of each layer, by its number, keys and values of all images' patches, both ``[kv_heads, patches, head_dim]``.
    firsts: each image's token, ascending.
    patches: of an image, padding included. visible: how many of them are not padding, of each image.
    """

    pairs: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    firsts: Sequence[int]
    patches: int
    visible: Sequence[int]

    def sees_image(self, position: int) -> bool:
        """Whether the row at `position` has an image of its own."""
        return position >= self.firsts[0]

    def mask(self, positions: Sequence[int]) -> torch.Tensor:
        """``[len(positions), patches of all images]``, 0 or -inf."""
        seen = torch.zeros((len(positions), len(self.firsts) * self.patches), dtype=torch.bool)
        for row, position in enumerate(positions):
            if not self.sees_image(position):
                seen[row] = True
                continue
            last = max(index for index, first in enumerate(self.firsts) if first <= position)
            for index in range(self._first_beside(last), last + 1):
                start = index * self.patches
                seen[row, start : start + self.visible[index]] = True
        return torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)

    def _first_beside(self, index: int) -> int:
        """The first image of those that stand before `index` without a token between them."""
        while index and self.firsts[index - 1] == self.firsts[index] - 1:
            index -= 1
        return index
