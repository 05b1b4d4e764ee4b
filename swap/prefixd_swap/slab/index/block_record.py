"""The disk tier's record of a block, and its bytes in the index.

The index key is namespace (8 bytes) + block key (16 bytes). The value is, little-endian: depth u32, number
of parts u16, flags u16 (bit 0: has a parent, bit 1: has errors, bit 2: its end is encrypted), parent 16 bytes; for each
part slot u64, nbytes u64 (0: the part is not on disk; bit 62: it is coded, with the id of its key in bits 32 to 61, 0:
in clear), xxh3_64 of the stored bytes u64. The end: with errors two f32, the largest and the RMS error of all parts;
then the token ids as u32. The superblock's version covers this layout. Blocks of one geometry have values of one
length, so that a million of them can be read as one array.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from prefixd_swap.codecs.coded_part import CodedPart
from prefixd_swap.errors import RecordDamagedError, StorageError
from prefixd_swap.sealing.rest_keys import KEY_ID_BITS, RestKey, RestKeys
from prefixd_swap.sealing.sealed_records import RECORD_SEAL_BYTES, open_record, seal_record
from prefixd_swap.slots import round_to_slot
from prefixd_swap.spans import Span

NAMESPACE_BYTES = 8
KEY_BYTES = 16

HEADER = np.dtype([("depth", "<u4"), ("parts", "<u2"), ("flags", "<u2"), ("parent", "V16")])
"""The fixed beginning of a value, as the columns that `slab_records` reads."""
HEADER_BYTES = HEADER.itemsize
PARENT_OFFSET = 8
PART_BYTES = 24
HAS_PARENT = 1
HAS_ERRORS = 2
ENCRYPTED = 4
FLAGS = HAS_PARENT | HAS_ERRORS | ENCRYPTED
"""All flags that are known."""
ERRORS_BYTES = 8
CODED = 1 << 62
"""In the bytes of a part: it is coded."""
KEY_SHIFT = 32
"""In the bytes of a coded part: from this bit on it has the id of its key."""
CODED_BYTES = (1 << KEY_SHIFT) - 1
"""In the bytes of a coded part: its bytes."""
KEY_IDS = (1 << KEY_ID_BITS) - 1
NO_KEYS = RestKeys()

TOKEN_BYTES = 4

_HEADER = struct.Struct("<IHH16s")
_PART = struct.Struct("<QQQ")
_ERRORS = struct.Struct("<ff")
_MAX_PARTS = 0xFFFF
_LARGEST = (1 << 63) - 1  # slots are int64 in columns
_LARGEST_PART = CODED - 1


Errors = tuple[float, float]
"""The largest and the RMS error of a block's parts, relative as in `LayerErrors`."""


@dataclass(frozen=True, slots=True)
class DiskPart:
    """Where a part is: slot number, length of what is stored in bytes, xxh3_64 of it, whether it is coded, and the id
    of the key that encrypts it, if one does. The id is the index's business: parts are equal without it."""

    slot: int
    nbytes: int
    checksum: int
    coded: bool = False
    key_id: int = field(default=0, compare=False)

    @property
    def slot_bytes(self) -> int:
        """Bytes of its slot."""
        return round_to_slot(self.nbytes)


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block to store."""

    namespace: bytes
    key: bytes
    parent: bytes
    """The parent's key, or b"" for the first block of a prompt."""
    tokens: bytes
    """Token ids, little-endian uint32."""
    depth: int
    """Larger than the parent's."""
    parts: Sequence[Span | CodedPart | DiskPart | None]
    """For each part: host memory that does not change until the write returns; or what a codec has made of it; or the
    block's present part on disk, which is kept; or None for a part that is not stored. All may be None: the block is
    then a node, kept for its children."""
    checksums: Sequence[int | None] | None = None
    """xxh3_64 of each part, computed when its bytes were known to be right; None: the write computes it."""
    near: Sequence[int | None] | None = None
    """Slots of the parent's parts, to place this block's slots close to; not needed for a parent in the same write."""
    errors: Errors | None = None
    """Of its parts that are on disk, where lossy codecs have made some of them."""
    encryption: RestKey | None = None
    """Encrypts its token ids; its parts that are given are encrypted, too."""
    mixed: bool = False
    """Its parts go to pages with slots of any sizes, as coded ones always do: for blocks of which some are coded."""

    def check(self) -> None:
        """Check that a record can hold the fields.

        Raises:
            StorageError: a field has a wrong length or range.
        """
        if self.encryption is not None and any(_is_clear(part) for part in self.parts):
            raise StorageError(f"block {self.key.hex()} has a part in clear; encrypt it with {self.encryption.name}")
        wrong = (
            len(self.namespace) != NAMESPACE_BYTES
            or len(self.key) != KEY_BYTES
            or len(self.parent) not in (0, KEY_BYTES)
            or len(self.tokens) % 4
            or not 0 <= self.depth < 1 << 32
            or not 0 < len(self.parts) <= _MAX_PARTS
            or any(each is not None and len(each) != len(self.parts) for each in (self.checksums, self.near))
        )
        if wrong:
            raise StorageError(
                f"block {self.key.hex()} cannot be stored: namespace of {len(self.namespace)} bytes (8), "
                f"key of {len(self.key)} (16), parent of {len(self.parent)} (0 or 16), tokens of "
                f"{len(self.tokens)} (4 each), depth {self.depth}, {len(self.parts)} parts (at least one)"
            )


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """A block on disk."""

    namespace: bytes
    key: bytes
    parent: bytes
    tokens: bytes
    parts: tuple[DiskPart | None, ...]
    depth: int
    errors: Errors | None = None


def index_key(namespace: bytes, key: bytes) -> bytes:
    """The block's key in the index."""
    return namespace + key


def encode_record(block: NewBlock, parts: Sequence[DiskPart | None]) -> bytes:
    """The block's value in the index, `parts` standing for its spans."""
    flags = HAS_PARENT * bool(block.parent) | HAS_ERRORS * bool(block.errors) | ENCRYPTED * bool(block.encryption)
    header = _HEADER.pack(block.depth, len(parts), flags, block.parent)
    packed = [_PART.pack(p.slot, _size_word(p), p.checksum) if p else _PART.pack(0, 0, 0) for p in parts]
    end = (_ERRORS.pack(*block.errors) if block.errors else b"") + block.tokens
    return b"".join((header, *packed, seal_record(end, block.encryption) if block.encryption else end))


def decode_record(key: bytes, value: bytes, keys: RestKeys = NO_KEYS) -> BlockRecord:
    """The record that `encode_record` wrote.

    Raises:
        MissingKeyError: its key is not among `keys`.
        RecordDamagedError: `encode_record` cannot have written it: for example, its length does not fit its number of
            parts.
    """
    if len(key) != NAMESPACE_BYTES + KEY_BYTES:
        raise RecordDamagedError(
            f"the index has a key of {len(key)} bytes ({key[:32].hex()}), not of {NAMESPACE_BYTES + KEY_BYTES}: the "
            "record is damaged; remove it"
        )
    depth, flags, parent, parts, rest = _split(value)
    if flags & ENCRYPTED:
        rest = open_record(rest, keys)
    tokens = rest[ERRORS_BYTES if flags & HAS_ERRORS else 0 :]
    stored = tuple(part if part.nbytes else None for part in parts)
    errors = _ERRORS.unpack_from(rest) if flags & HAS_ERRORS and any(stored) else None  # they were of dropped parts
    return BlockRecord(
        key[:NAMESPACE_BYTES],
        key[NAMESPACE_BYTES:],
        parent if flags & HAS_PARENT else b"",
        tokens,
        stored,
        depth,
        errors,
    )


def check_record(key: bytes, value: bytes) -> None:
    """As `decode_record`, for records whose key may be missing.

    Raises:
        RecordDamagedError: as `decode_record`.
    """
    if len(key) != NAMESPACE_BYTES + KEY_BYTES:
        raise RecordDamagedError(f"the index has a key of {len(key)} bytes ({key[:32].hex()})")
    _split(value)


def without_parts(value: bytes, parts: Collection[int]) -> bytes:
    """The record without the parts with these numbers; unknown numbers are ignored.

    Raises:
        RecordDamagedError: as `decode_record`.
    """
    count = len(_split(value)[3])
    changed = bytearray(value)
    for part in set(parts).intersection(range(count)):
        _PART.pack_into(changed, _HEADER.size + part * _PART.size, 0, 0, 0)
    return bytes(changed)


def record_slots(value: bytes) -> list[tuple[int, int]]:
    """(slot, stored bytes) of the parts that are on disk.

    Raises:
        RecordDamagedError: as `decode_record`.
    """
    return [(part.slot, part.nbytes) for part in _split(value)[3] if part.nbytes]


def _is_clear(part: Span | CodedPart | DiskPart | None) -> bool:
    """Whether it is written in clear."""
    return isinstance(part, Span) or (isinstance(part, CodedPart) and not part.key_id)


def _size_word(part: DiskPart) -> int:
    return part.nbytes | CODED | part.key_id << KEY_SHIFT if part.coded else part.nbytes


def _part(slot: int, size: int, checksum: int) -> DiskPart:
    if size & CODED:
        return DiskPart(slot, size & CODED_BYTES, checksum, True, size >> KEY_SHIFT & KEY_IDS)
    return DiskPart(slot, size, checksum)


def _split(value: bytes) -> tuple[int, int, bytes, list[DiskPart], bytes]:
    """Depth, flags, parent, parts (those not on disk have 0 bytes), the end.

    Raises:
        RecordDamagedError: the value contradicts itself.
    """
    if len(value) < _HEADER.size:
        raise _damaged(value, f"the header alone has {_HEADER.size}")
    depth, count, flags, parent = _HEADER.unpack_from(value)
    end = _HEADER.size + count * _PART.size
    if not count or end > len(value):
        raise _damaged(value, f"{count} parts end at byte {end}")
    if len(value) % TOKEN_BYTES:
        raise _damaged(value, f"its tokens have {TOKEN_BYTES} each")
    if flags & ~FLAGS:
        raise _damaged(value, f"its flags are {flags:#x}, of which only {FLAGS:#x} are known")
    if end + end_bytes(flags) > len(value):
        raise _damaged(value, f"its end begins at byte {end}")
    parts = [_part(*fields) for fields in _PART.iter_unpack(value[_HEADER.size : end])]
    if any(part.slot > _LARGEST or part.nbytes > _LARGEST_PART for part in parts):
        raise _damaged(value, "a slot or a size is larger than any disk")
    if any((part.slot or part.checksum or part.coded) and not part.nbytes for part in parts):
        raise _damaged(value, "a part of 0 bytes has a slot")
    return depth, flags, parent, parts, value[end:]


def end_bytes(flags: int) -> int:
    """The least bytes of the end of a record with these flags."""
    return (ERRORS_BYTES if flags & HAS_ERRORS else 0) + (RECORD_SEAL_BYTES if flags & ENCRYPTED else 0)


def _damaged(value: bytes, why: str) -> RecordDamagedError:
    return RecordDamagedError(
        f"an index record of {len(value)} bytes is damaged ({why}); remove the block, it will be computed again"
    )
