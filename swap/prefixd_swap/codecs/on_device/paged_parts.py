"""Parts whose numbers lie in an engine's pages on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from prefixd_swap.codecs.part_shape import PartShape
from prefixd_swap.errors import GeometryError


@dataclass(frozen=True, slots=True)
class PagedParts:
    """Keys and values of some layers for the tokens of blocks, each block in one page or in several.

    Token t of a part is place ``t % page_tokens`` of its page ``t // page_tokens``. A dense part is one page.

    Attributes:
        shape: of a part. Its order of axes is that of the decoded bytes; pages have any.
        addresses: int64 ``[layers, 2]``: where the first key and the first value of page 0 are.
        strides: numbers from a page, a token and a head to the next one. Channels lie side by side.
        page_tokens: tokens of a page.
        ids: int64 ``[parts, pages of a part]``: the pages; a negative one is left out when parts are decoded.
    """

    shape: PartShape
    addresses: torch.Tensor
    strides: tuple[int, int, int]
    page_tokens: int
    ids: torch.Tensor

    @classmethod
    def of_layers(
        cls,
        shape: PartShape,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        ids: npt.NDArray[np.int64],
    ) -> PagedParts:
        """Of views of an engine's caches: keys and values ``[pages, tokens of a page, heads, channels]`` a layer.

        Raises GeometryError when they are not what `shape` says, or lie in different ways.
        """
        keys = layers[0][0]
        dtype = str(keys.dtype).removeprefix("torch.")
        pages, page_tokens = int(ids.shape[1]), int(keys.shape[1])
        found = (dtype, len(layers), pages * page_tokens, *keys.shape[2:])
        wanted = (shape.dtype, shape.layers, shape.tokens, shape.heads, shape.channels)
        if found != wanted or dtype not in ("bfloat16", "float16"):
            raise GeometryError(
                f"a part of {pages} pages has dtype, layers, tokens, heads and channels {found}, not {wanted}; "
                "tiles are made on the device of bfloat16 and float16"
            )
        for each in (tensor for layer in layers for tensor in layer):
            if (each.dtype, each.shape[1:], each.stride()) != (keys.dtype, keys.shape[1:], keys.stride()):
                raise GeometryError(f"pages of {each.shape} {each.stride()} do not lie as {keys.shape} {keys.stride()}")
        if keys.stride(3) != 1:
            raise GeometryError(f"channels that are {keys.stride(3)} numbers apart; they must lie side by side")
        addresses = torch.tensor([[tensor.data_ptr() for tensor in layer] for layer in layers], dtype=torch.int64)
        strides = (keys.stride(0), keys.stride(1), keys.stride(2))
        there = torch.from_numpy(np.ascontiguousarray(ids, np.int64)).to(keys.device)
        return cls(shape, addresses.to(keys.device), strides, page_tokens, there)

    def some(self, first: int, count: int) -> PagedParts:
        """`count` of the parts, from `first` on."""
        return replace(self, ids=self.ids[first : first + count])

    @property
    def tiles(self) -> int:
        """Tiles of a part: a layer's head, its keys or its values."""
        return 2 * self.shape.layers * self.shape.heads


@dataclass(frozen=True, slots=True)
class PagedLayers:
    """An engine's cache of some layers, and what a part of it is.

    Attributes:
        shape: of a part.
        layers: keys and values of each layer, as of `PagedParts.of_layers`.
        pages: that follow each other in these for a block of the engine's tables.
    """

    shape: PartShape
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    pages: int = 1

    @property
    def blocks(self) -> int:
        """Of the engine's tables in a part."""
        return self.shape.tokens // (self.pages * self.layers[0][0].shape[1])

    def parts(self, blocks: npt.NDArray[np.int64]) -> PagedParts:
        """Parts of the engine's blocks ``[parts, blocks of a part]``; a negative one is left out when decoded.

        Raises GeometryError when the layers do not lie as the shape says.
        """
        ids = np.where(blocks < 0, -self.pages, blocks * self.pages)[..., None] + np.arange(self.pages)
        return PagedParts.of_layers(self.shape, self.layers, ids.reshape(len(blocks), -1))
