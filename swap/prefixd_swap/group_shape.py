"""The shape of one KV group, and its sizes in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from prefixd_swap.errors import GeometryError

Layout = Literal["token", "layer"]

STRIDE_BYTES = 16
"""A padded stride is a multiple of this: attention kernels load 16 bytes at a time."""
ELEMENT_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """One KV group: the layers of a model that share a shape.

    `layout` says how a request's KV lies in its contiguous address range:

    - ``"token"``: ``[tokens, layers, 2, kv_heads, head_dim]``, a block is one piece;
    - ``"layer"``: one run a layer, ``[layers][tokens, 2, kv_heads, head_dim]``, a block is a piece a layer.

    A stored block is the concatenation of its pieces, so blocks of different layouts have different bytes.

    `token_stride`: bytes from one token to the next in a piece; 0 for the bytes of the token. A larger one is padding,
    which lets short blocks fill whole chunks (`block_size`); nothing reads it.

    ```
    token_bytes 12 KiB, token_stride 32 KiB      | token 0 |/////////////| token 1 |/////////////| ...
    ```

    Raises GeometryError when a field has no valid value.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int
    layout: Layout = "token"
    token_stride: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise GeometryError(f"{name} is {value!r}; it must be a positive integer")
        if self.dtype not in ELEMENT_BYTES:
            raise GeometryError(f"dtype {self.dtype!r} is not supported; use one of {', '.join(ELEMENT_BYTES)}")
        if self.layout not in ("token", "layer"):
            raise GeometryError(f'layout {self.layout!r} does not exist; use "token" or "layer"')
        least = self.piece_token_bytes
        if self.token_stride not in (0, least) and (self.token_stride < least or self.token_stride % STRIDE_BYTES):
            raise GeometryError(
                f"token_stride is {self.token_stride}; it must be 0, or a multiple of {STRIDE_BYTES} from the token's "
                f"{least} bytes up"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of one number."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def piece_token_bytes(self) -> int:
        """Bytes of one token in one piece, without padding."""
        return self.token_bytes // self.pieces

    @property
    def stride(self) -> int:
        """Bytes from one token to the next in a piece."""
        return self.token_stride or self.piece_token_bytes

    @property
    def token_memory(self) -> int:
        """Bytes of memory that one token takes in all layers: `token_bytes` and padding."""
        return self.pieces * self.stride

    @property
    def kv_bytes(self) -> int:
        """Bytes of a block's keys and values in all layers, without padding."""
        return self.block_tokens * self.token_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of memory of one block in all layers, with padding."""
        return self.block_tokens * self.token_memory

    @property
    def strides(self) -> tuple[int, int, int, int, int]:
        """Strides of a piece as ``[tokens, layers, 2, kv_heads, head_dim]``, in numbers.

        In the layout "layer" a piece has one layer; the caller knows where the next layer's piece lies.
        """
        heads = self.kv_heads * self.head_dim
        return self.stride // self.element_bytes, 2 * heads, heads, self.head_dim, 1

    @property
    def pieces(self) -> int:
        """Number of address runs that one block is spread over."""
        return 1 if self.layout == "token" else self.layers

    @property
    def piece_bytes(self) -> int:
        """Bytes of one piece of a block."""
        return self.block_bytes // self.pieces

    def check_chunk(self, chunk_bytes: int) -> None:
        """Raise GeometryError unless every piece of a block is a whole number of chunks of `chunk_bytes`."""
        if chunk_bytes > 0 and self.piece_bytes % chunk_bytes == 0:
            return
        if chunk_bytes < 1:
            raise GeometryError(f"a chunk of {chunk_bytes} bytes is not possible; it must be positive")
        fitting = math.lcm(self.stride, chunk_bytes) // self.stride
        raise GeometryError(
            f"a block of {self.block_tokens} tokens has pieces of {self.piece_bytes} bytes "
            f"(layout {self.layout!r}), not a multiple of the chunk of {chunk_bytes}; "
            f"set block_tokens to a multiple of {fitting}"
            + (' or use the "token" layout' if self.layout == "layer" else "")
        )

    def chunks_per_block(self, chunk_bytes: int) -> int:
        """Chunks of `chunk_bytes` in one block. Raises GeometryError like `check_chunk`."""
        self.check_chunk(chunk_bytes)
        return self.block_bytes // chunk_bytes


def chunks_per_frame(frame_bytes: int, chunk_bytes: int) -> int:
    """Chunks in a frame. Raises GeometryError unless a frame is a whole number of chunks."""
    if chunk_bytes < 1 or frame_bytes < 1 or frame_bytes % chunk_bytes:
        raise GeometryError(
            f"a frame of {frame_bytes} bytes is not a whole number of chunks of {chunk_bytes}; make it a multiple"
        )
    return frame_bytes // chunk_bytes
