"""How the numbers of a part lie in its bytes: what a lossy codec has to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prefixd_swap.errors import GeometryError

Axis = Literal["layer", "kv", "token", "head", "channel"]

AXES: tuple[Axis, ...] = ("layer", "kv", "token", "head", "channel")
DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}

_MOST = 1 << 32  # a size that no part has


@dataclass(frozen=True, slots=True)
class PartShape:
    """The numbers of a part as a dense array in C order: keys and values of some layers for the tokens of a block.

    Attributes:
        dtype: "bfloat16", "float16" or "float32".
        layers, tokens, heads, channels: sizes of the axes; "kv" has 2, keys and then values.
        order: every axis once, the outermost first and "channel" last: ("token", "layer", "kv", "head", "channel") for
            the layout "token" of `KvGeometry`.

    Raises GeometryError when a field has no valid value.
    """

    dtype: str
    layers: int
    tokens: int
    heads: int
    channels: int
    order: tuple[Axis, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise GeometryError(f"a part of {self.dtype!r} is not possible; use one of {', '.join(DTYPE_BYTES)}")
        for name in ("layers", "tokens", "heads", "channels"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value < _MOST:
                raise GeometryError(f"a part has {value!r} {name}; it must have at least 1, and less than {_MOST}")
        if sorted(self.order) != sorted(AXES) or self.order[-1] != "channel":
            raise GeometryError(
                f"the axes of a part are {', '.join(self.order)}; name each of {', '.join(AXES)} once, channel last"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the axes in their order, outermost first."""
        of = {"layer": self.layers, "kv": 2, "token": self.tokens, "head": self.heads, "channel": self.channels}
        return tuple(of[axis] for axis in self.order)

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return 2 * self.layers * self.tokens * self.heads * self.channels * DTYPE_BYTES[self.dtype]
