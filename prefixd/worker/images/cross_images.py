"""Layers that attend to the images of a prompt, and to nothing else (Llama 3.2 Vision).

Their keys and values are those of the images' patches, without positions: every row of a request reads the same ones. A
row sees the last image before it, or the last ones if no token is between them. A row before all images has no image of
its own: transformers lets it attend to all patches, and leaves the layer's MLP out. Rows of requests without images
skip the layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

CrossPairs = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
"""By a layer's number, keys and values of an image's patches, both ``[kv_heads, patches, head_dim]``."""


class CrossMemory(Protocol):
    """The memory of the keys and values of a request's images (`cross_kv.CrossKv`)."""

    @property
    def filled(self) -> Sequence[bool]:
        """For each image, whether its keys and values are there."""
        ...

    @property
    def layers(self) -> Sequence[int]:
        """The numbers of the layers that attend to images."""
        ...

    @property
    def patches(self) -> int:
        """Patches of an image, padding included."""
        ...

    @property
    def stride(self) -> int:
        """Keys from one image's first to the next one's, at least `patches`."""
        ...

    def fill(self, image: int, pairs: CrossPairs) -> None:
        """Write an image's keys and values of each layer."""
        ...

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all images in a layer, both ``[kv_heads, images * stride, head_dim]``."""
        ...

    def wait(self) -> None:
        """Wait until all of it can be read."""
        ...


@dataclass(frozen=True, slots=True)
class CrossImages:
    """The images of one sequence, and which rows see them.

    memory: keys and values of all its images.
    firsts: each image's token, ascending.
    visible: for each image, the number of patches that are not padding.
    """

    memory: CrossMemory
    firsts: Sequence[int]
    visible: Sequence[int]

    def sees_image(self, position: int) -> bool:
        """Whether the row at `position` has an image of its own."""
        return position >= self.firsts[0]

    def mask(self, positions: Sequence[int]) -> torch.Tensor:
        """``[len(positions), keys of all images]``, 0 or -inf."""
        stride, patches = self.memory.stride, self.memory.patches
        seen = torch.zeros((len(positions), len(self.firsts), stride), dtype=torch.bool)
        for row, position in enumerate(positions):
            if not self.sees_image(position):
                seen[row, :, :patches] = True
                continue
            last = max(index for index, first in enumerate(self.firsts) if first <= position)
            for index in range(self._first_beside(last), last + 1):
                seen[row, index, : self.visible[index]] = True
        seen = seen.flatten(1)
        return torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)

    def _first_beside(self, index: int) -> int:
        """The first image of those that stand before `index` without a token between them."""
        while index and self.firsts[index - 1] == self.firsts[index] - 1:
            index -= 1
        return index
