"""The layers of a block as rows of bytes: the first layers of many blocks can be copied before the last ones."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from prefixd_swap.errors import GeometryError
from prefixd_swap.group_shape import Layout

MOST_SLABS = 4
"""With 4, three quarters of a load can pass beside computing; with 8, seven eighths, in twice as many copies."""
LEAST_SLAB_BYTES = 32 << 20
"""A copy of 32 MiB costs the event loop 0.1 ms, as `tiers.memory_copies` says, and a GPU's link 0.6 ms."""
LEAST_ROW_BYTES = 16 << 10
"""Of the layout "token", whose rows a GPU copies one by one. An estimate, not yet measured."""


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Some layers of a block: `rows` rows of `width` bytes, the first at `offset`, and one every `pitch` bytes."""

    offset: int
    width: int
    rows: int
    pitch: int


@dataclass(frozen=True, slots=True)
class BlockLayers:
    """Where the layers of a block of one piece of memory lie (`KvGeometry`).

    layers, tokens: of the block. layer_bytes: of one token in one layer.
    stride: bytes from one token to the next in a piece, where tokens are padded; without padding the token's bytes.

    ```
    "token"   | token 0: layer 0, layer 1, layer 2 | token 1: layer 0, layer 1, layer 2 | ...
    "layer"   | layer 0: token 0, token 1, ...     | layer 1: token 0, token 1, ...     | ...
    ```

    Raises GeometryError when a field has no valid value.
    """

    layers: int
    tokens: int
    layer_bytes: int
    stride: int
    layout: Layout = "token"

    def __post_init__(self) -> None:
        for name in ("layers", "tokens", "layer_bytes"):
            if (value := getattr(self, name)) < 1:
                raise GeometryError(f"{name} is {value}; it must be positive")
        if self.stride < self.piece_token_bytes:
            raise GeometryError(f"stride is {self.stride}; give at least a token's {self.piece_token_bytes} bytes")

    @property
    def piece_token_bytes(self) -> int:
        """Bytes of a token in a piece, without padding."""
        return self.layer_bytes * (self.layers if self.layout == "token" else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the block, without padding."""
        return self.layers * self.tokens * self.layer_bytes

    def rows(self, first: int, last: int, *, padded: bool) -> LayerRows:
        """The layers from `first` to `last`, in memory where tokens are `padded` or packed."""
        pitch = self.stride if padded else self.piece_token_bytes
        if self.layout == "token":
            return LayerRows(first * self.layer_bytes, (last - first) * self.layer_bytes, self.tokens, pitch)
        return LayerRows(first * self.tokens * pitch, self.layer_bytes, (last - first) * self.tokens, pitch)

    def slabs(self, blocks: int, *, least: bool = False) -> list[tuple[int, int]]:
        """The layers, (first, last), of each slab of a copy of so many blocks: as few slabs as pay, of about one size.

        At most 4, of at least 32 MiB, and with rows of at least 16 KiB in the layout "token". `least`: 4 in any case.
        """
        most = min(MOST_SLABS, self.layers)
        if not least:
            most = min(most, blocks * self.nbytes // LEAST_SLAB_BYTES)
            if self.layout == "token":
                most = min(most, self.piece_token_bytes // LEAST_ROW_BYTES)
        count = max(1, most)
        return list(pairwise(self.layers * number // count for number in range(count + 1)))
