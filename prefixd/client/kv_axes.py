"""How keys and values lie in the bytes of a part, for a daemon that may store them with less precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prefixd.client.errors import InvalidArgumentError
from prefixd.v1 import cache_pb2

Axis = Literal["layer", "kv", "token", "head", "channel"]

_AXES: dict[str, cache_pb2.PartShape.Axis] = {
    "layer": cache_pb2.PartShape.AXIS_LAYER,
    "kv": cache_pb2.PartShape.AXIS_KV,
    "token": cache_pb2.PartShape.AXIS_TOKEN,
    "head": cache_pb2.PartShape.AXIS_HEAD,
    "channel": cache_pb2.PartShape.AXIS_CHANNEL,
}


@dataclass(frozen=True, slots=True)
class PartShape:
    """The numbers of a part as a dense array in C order: keys and values of some layers for the tokens of a block.

    Give a shape only if all bytes of the part lie so: not if they are packed, quantized or padded, and not for states,
    latents (MLA) or embeddings. A wrong shape of the right size makes the loss of a lossy codec larger than needed; the
    daemon measures that loss and can refuse it (`disk.codec_error`).

    Attributes:
        dtype: "bfloat16", "float16" or "float32".
        layers, tokens, heads, channels: sizes of the axes; heads of this rank. The axis "kv" has 2: keys, then values.
        order: every axis once, the outermost first and "channel" last, such as ("layer", "kv", "token", "head",
            "channel") for a cache [layers, 2, tokens, heads, channels].

    Raises:
        InvalidArgumentError: an axis has no such name.
    """

    dtype: str
    layers: int
    tokens: int
    heads: int
    channels: int
    order: tuple[Axis, ...]

    def __post_init__(self) -> None:
        if unknown := [axis for axis in self.order if axis not in _AXES]:
            raise InvalidArgumentError(f"a shape has the axis {unknown[0]!r}; use {', '.join(_AXES)}")

    def to_proto(self) -> cache_pb2.PartShape:
        """Returns the contract's message."""
        return cache_pb2.PartShape(
            dtype=self.dtype,
            layers=self.layers,
            tokens=self.tokens,
            heads=self.heads,
            channels=self.channels,
            order=[_AXES[axis] for axis in self.order],
        )
