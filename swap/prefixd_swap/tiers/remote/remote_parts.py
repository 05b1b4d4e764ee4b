"""Parts of blocks in a shared store, and the names of their objects.

A part without a coding is stored as it is, under the name that every version of prefixd knows. A part with a coding has
another name, made from the coding's label: there it lies coded, or as it is where the codec has refused it. So a host
that asks for exact bytes never finds others, and one whose version knows no codecs finds nothing that it cannot use.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

from prefixd_swap.codecs.coding import Coding
from prefixd_swap.slab.index.block_record import Errors
from prefixd_swap.spans import Span
from prefixd_swap.stores.names import object_name


@dataclass(frozen=True, slots=True)
class RemotePart:
    """A part of a block, and its memory.

    Attributes:
        number: of the part.
        span: its bytes, or the memory for them.
        coding: how the store may have it coded; None: not at all.
        checksum: xxh3_64 of the bytes, if known before they are written.
    """

    number: int
    span: Span
    coding: Coding | None = None
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class PartRead:
    """What was read of a part.

    Attributes:
        checksum: xxh3_64 of its bytes, as they are in memory now.
        errors: what a lossy codec has altered; None: nothing, these are the exact bytes.
    """

    checksum: int
    errors: Errors | None = None


@lru_cache(maxsize=256)
def coding_label(coding: Coding | None) -> bytes:
    """What the name of a part's object says of its coding; empty: the part's own bytes.

    A lossy codec's label has the bound on its errors, so that no host reads a block that its own bound would refuse.
    """
    if coding is None:
        return b""
    name = coding.codec.name.encode()
    return name + struct.pack("<d", most_error(coding)) if coding.codec.lossy else name


def part_object_name(digest: bytes, number: int, coding: Coding | None) -> bytes:
    """The name of the object with a block's part."""
    return object_name(digest, number, coding_label(coding))


def most_error(coding: Coding) -> float:
    """The largest relative RMS error of a layer."""
    return coding.codec.most_error if coding.most_error is None else coding.most_error
