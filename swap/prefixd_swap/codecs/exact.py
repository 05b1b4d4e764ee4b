"""The codec that changes nothing: what a tier has unless its settings, a tenant or a namespace say otherwise."""

from __future__ import annotations

from typing import ClassVar

from prefixd_swap.codecs.codec import Codec, UInt8s
from prefixd_swap.codecs.part_shape import PartShape
from prefixd_swap.errors import EncodingError


class ExactCodec(Codec):
    """The bytes as they are."""

    name: ClassVar[str] = "exact"
    number: ClassVar[int] = 0
    lossy: ClassVar[bool] = False

    def takes(self, nbytes: int, shape: PartShape | None) -> bool:
        """Any part."""
        return True

    def encode(self, data: UInt8s, shape: PartShape | None) -> UInt8s:
        """`data` itself."""
        return data

    def decode(self, encoded: UInt8s, shape: PartShape | None, into: UInt8s) -> None:
        """Copies."""
        if encoded.size != into.size:
            raise EncodingError(f"{encoded.size} exact bytes are not a part of {into.size} bytes")
        into[:] = encoded
