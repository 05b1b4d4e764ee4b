"""What a codec has made of a part, in memory: what a store writes in place of the part's bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefixd_swap.codecs.codec import UInt8s
from prefixd_swap.spans import Span


@dataclass(frozen=True, slots=True)
class CodedPart:
    """A part as a store keeps it: coded, encrypted, or both.

    Attributes:
        data: the stored bytes.
        checksum: xxh3_64 of them.
        key_id: the id of the key that encrypts them; 0: they are in clear.
        codec: the number of the codec that decodes them; 0: none, they are only encrypted.
    """

    data: UInt8s = field(repr=False)
    checksum: int
    key_id: int = 0
    codec: int = 0

    @property
    def span(self) -> Span:
        """Where the stored bytes are, for as long as this object is kept."""
        return Span(self.data.ctypes.data, self.data.nbytes)

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.data.nbytes
