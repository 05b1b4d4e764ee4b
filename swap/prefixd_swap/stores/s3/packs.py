"""Packs: many objects in one object of an S3 bucket, which begins with a table of their places.

    magic  count  created_ms  ttl_ms | name offset nbytes | name offset nbytes | ... | checksum | bytes | bytes | ...
    8 B    u64    u64         u64    | 32 B u64    u64    |                          | u64      |
    [------------------------------------ head ---------------------------------------------]

Numbers are little-endian; offsets count from the pack's beginning; `checksum` is XXH3 (64 bits) of the head before it.
A pack's name has its time of creation and the length of its head, so that one range request reads the head:
"00019a3f5c2b7e41-b1946ac92492d234-000003a8.pack". Names sort by time.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from prefixd_swap.stores.base import NAME_BYTES, Write

_MAGIC = b"PFXPACK1"
_FIXED = struct.Struct("<8sQQQ")
_CHECKSUM = struct.Struct("<Q")
_ENTRY = np.dtype([("name", f"V{NAME_BYTES}"), ("offset", "<u8"), ("nbytes", "<u8")])
_NAME = re.compile(r"([0-9a-f]{16})-[0-9a-f]{16}-([0-9a-f]{8})\.pack")
_MOST_HEAD_BYTES = 1 << 20  # 21,000 objects


@dataclass(frozen=True, slots=True)
class PackName:
    """The fields of a pack's name: milliseconds since 1970, and bytes."""

    created_ms: int
    head_bytes: int


@dataclass(frozen=True, slots=True)
class Head:
    """A pack's table. Row i of all three is one object."""

    created_ms: int
    ttl_ms: int
    names: list[bytes]
    offsets: list[int]
    lengths: list[int]


def head_bytes(count: int) -> int:
    """Bytes of the head of a pack of `count` objects."""
    return _FIXED.size + count * _ENTRY.itemsize + _CHECKSUM.size


def pack_name(created_ms: int, unique: bytes, count: int) -> str:
    """The name of a pack; `unique` is 8 bytes that no other pack has."""
    return f"{created_ms:016x}-{unique.hex()}-{head_bytes(count):08x}.pack"


def earliest_name(created_ms: int) -> str:
    """A name that sorts before all packs that were made then or later."""
    return f"{max(0, created_ms):016x}"


def parse_name(name: str) -> PackName | None:
    """The fields of a name; None if it is not a pack's."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    parsed = PackName(int(match[1], 16), int(match[2], 16))
    return parsed if head_bytes(1) <= parsed.head_bytes <= _MOST_HEAD_BYTES else None


def build_head(writes: Sequence[Write], created_ms: int, ttl_ms: int) -> bytes:
    """The head of a pack with these objects in this order, without gaps."""
    table = np.zeros(len(writes), _ENTRY)
    lengths = np.array([write.nbytes for write in writes], np.uint64)
    table["name"] = np.frombuffer(b"".join(write.name for write in writes), f"V{NAME_BYTES}")
    table["offset"] = head_bytes(len(writes)) + np.cumsum(lengths) - lengths
    table["nbytes"] = lengths
    head = _FIXED.pack(_MAGIC, len(writes), created_ms, ttl_ms) + table.tobytes()
    return head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))


def parse_head(data: bytes | memoryview, pack_bytes: int) -> Head | None:
    """Reads a head.

    Args:
        data: exactly the head.
        pack_bytes: bytes of the pack.

    Returns:
        The table; None if it is torn, altered, or not prefixd's.
    """
    if len(data) < head_bytes(1):
        return None
    magic, count, created_ms, ttl_ms = _FIXED.unpack_from(data)
    if magic != _MAGIC or count > _MOST_HEAD_BYTES or len(data) != head_bytes(count):
        return None
    (checksum,) = _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)
    if checksum != xxhash.xxh3_64_intdigest(memoryview(data)[: -_CHECKSUM.size]):
        return None
    table = np.frombuffer(data, _ENTRY, count, _FIXED.size)
    offsets, lengths = table["offset"], table["nbytes"]
    if (offsets < len(data)).any() or (offsets > pack_bytes).any() or (lengths > pack_bytes - offsets).any():
        return None
    names = table["name"].tobytes()
    return Head(
        created_ms,
        ttl_ms,
        [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)],
        offsets.tolist(),
        lengths.tolist(),
    )
