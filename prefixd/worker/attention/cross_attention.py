"""Attention to the images of prompts in one pass, see `images.cross_images`.

As in `tile_attention`, queries are taken in aligned tiles, so that a row's bits do not depend on the pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prefixd.worker.attention.tile_attention import MIN_ROWS, fused_attention
from prefixd.worker.images import CrossImages
from prefixd.worker.memory.kv_memory import Segment
from prefixd.worker.spec.tiles import MAX_TILE


class CrossStep:
    """Cross-attention in one pass.

    mask: ``[1, rows, 1, 1]``; 1 in rows that have an image of their own.

    parts: the pass's segments in their order, each with its images; None if it has none.
    rows: of the pass, padding included.
    """

    def __init__(self, parts: Sequence[tuple[Segment, CrossImages | None]], rows: int) -> None:
        self._tiles: list[tuple[slice, CrossImages, torch.Tensor]] = []
        self._layers = {layer for _, images in parts if images is not None for layer in images.memory.layers}
        self.mask = torch.zeros((1, rows, 1, 1))
        row = 0
        for segment, images in parts:
            start = segment.start
            while start < segment.stop:
                stop = min(segment.stop, (start // MAX_TILE + 1) * MAX_TILE)
                if images is not None:
                    mask = images.mask(range(start, stop))
                    self._tiles.append((slice(row, row + stop - start), images, mask))
                    self.mask[0, row : row + stop - start, 0, 0] = torch.tensor(
                        [float(images.sees_image(position)) for position in range(start, stop)]
                    )
                row += stop - start
                start = stop

    def has(self, layer: int) -> bool:
        """Whether a layer attends to images."""
        return layer in self._layers

    def attend(self, query: torch.Tensor, layer: int, scaling: float) -> torch.Tensor:
        """[1, heads, rows, head_dim] to [1, rows, heads, head_dim]; zeros in rows without images."""
        heads = query.shape[1]
        output = query.new_zeros((1, query.shape[2], heads, query.shape[3]))
        read: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by what a sequence sees, which has several tiles
        for rows, images, mask in self._tiles:
            if id(images) not in read:
                read[id(images)] = images.memory.read(layer)
            keys, values = read[id(images)]
            part = query[0, :, rows]
            count = part.shape[1]
            repeats = max(0, MIN_ROWS - count)
            if repeats:
                part = torch.cat((part, part[:, -1:].expand(-1, repeats, -1)), dim=1)
                mask = torch.cat((mask, mask[-1:].expand(repeats, -1)))
            grouped = mask.to(query.device, query.dtype).repeat(heads // len(keys), 1)
            result = fused_attention(part, keys, values, grouped, scaling)
            output[0, rows] = result.reshape(heads, -1, query.shape[3])[:, :count].transpose(0, 1)
        return output
