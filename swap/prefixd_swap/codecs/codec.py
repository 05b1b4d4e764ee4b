"""What a codec is. It knows no tier, no block and no file: it makes fewer bytes of bytes, and bytes of these again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from prefixd_swap.codecs.part_shape import PartShape

UInt8s = npt.NDArray[np.uint8]
Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerErrors:
    """What a lossy codec has altered, measured against the exact bytes. [layers] each.

    Both are relative: to the root mean square of the layer's keys, or of its values; the larger of the two counts.
    """

    largest: Float32s
    """The largest difference of a number."""
    rms: Float32s
    """The root mean square of the differences."""


class Codec(ABC):
    """Encodes the bytes of one part. Any thread may call it; large calls release the interpreter's lock."""

    name: ClassVar[str]
    """In settings and messages: "int8"."""
    number: ClassVar[int]
    """In stored bytes; never used for another codec."""
    lossy: ClassVar[bool]

    @abstractmethod
    def takes(self, nbytes: int, shape: PartShape | None) -> bool:
        """Whether it can encode parts of `nbytes` bytes and this shape; None: nothing is known of them."""

    @abstractmethod
    def encode(self, data: UInt8s, shape: PartShape | None) -> UInt8s | None:
        """The encoded bytes of `data`; None if they would not be fewer, or a number is not finite."""

    @abstractmethod
    def decode(self, encoded: UInt8s, shape: PartShape | None, into: UInt8s) -> None:
        """Decodes into `into`, which has the part's bytes.

        Raises:
            EncodingError: `encoded` is not the result of `encode` for such a part.
        """
