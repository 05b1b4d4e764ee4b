"""What a codec is. It knows no tier, no block and no file: it makes fewer bytes of bytes, and bytes of these again."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from prefixd_swap.codecs.part_shape import PartShape

Bools = npt.NDArray[np.bool_]
UInt8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
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


cut_short = threading.Event()
"""Set once the system has refused files or memory while a codec was imported or compiled: what has half of its modules
fails in any way from then on."""


class Refused(Enum):
    """Why a codec does not code a part. The values are names in counters."""

    NOT_TAKEN = "not_taken"
    """The codec does not encode such parts: a lossy one knows no shape of it, or the shape has other bytes."""
    NOT_FEWER = "not_fewer"
    """It would not be fewer bytes."""
    NOT_FINITE = "not_finite"
    """A number of it is infinite or none."""
    ABOVE_BOUND = "above_bound"
    """A layer's relative RMS error would be above the bound."""


class Codec(ABC):
    """Encodes the bytes of one part. Any thread may call it; large calls release the interpreter's lock."""

    name: ClassVar[str]
    """In settings and messages: "int8"."""
    number: ClassVar[int]
    """In stored bytes; never used for another codec."""
    lossy: ClassVar[bool]
    most_error: ClassVar[float] = 0.0
    """The largest relative RMS error of a layer, unless whoever encodes says otherwise."""

    @abstractmethod
    def takes(self, nbytes: int, shape: PartShape | None) -> bool:
        """Whether it can encode parts of `nbytes` bytes and this shape; None: nothing is known of them."""

    @abstractmethod
    def encode(self, data: UInt8s, shape: PartShape | None) -> UInt8s | Refused:
        """The encoded bytes of `data`, which `takes` allows; not to be written to."""

    @abstractmethod
    def decode(self, encoded: UInt8s, shape: PartShape | None, into: UInt8s) -> None:
        """Decodes into `into`, which has the part's bytes. Takes no more memory than twice these.

        Raises:
            EncodingError: `encoded` is not the result of `encode` for such a part. `into` has any bytes then.
        """

    def decode_objects(
        self,
        objects: UInt64s,
        nbytes: Int64s,
        checksums: UInt64s,
        payload_nbytes: int,
        shape: PartShape | None,
        targets: UInt64s,
    ) -> Bools | None:
        """Decodes and verifies many objects in one call, without the interpreter's lock.

        Args:
            objects: [n], addresses.
            nbytes: [n], of each object; its last `payload_nbytes` are what `encode` gave.
            checksums: [n, 2], xxh3_64 of each object, and of what it is decoded to.
            payload_nbytes: see `nbytes`.
            shape: of each part.
            targets: [n], where the bytes of each part go.

        Returns:
            [n], whether it had and has these checksums; None: they must be decoded one by one.
        """
        return None
