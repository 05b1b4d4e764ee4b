"""Objects of a shared store with parts of blocks: made of a part's bytes, and read back to them, verified."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import xxhash

from prefixd_swap.codecs.codec import UInt8s
from prefixd_swap.codecs.coding import Coding, code_or_lossless, decode_object
from prefixd_swap.codecs.object_header import read_header
from prefixd_swap.codecs.registry import find_codec
from prefixd_swap.errors import (
    AlteredObjectError,
    EncodingError,
    LostBytesError,
    StaleObjectError,
    UnavailableCodecError,
)
from prefixd_swap.slab.files.file_ops import host_bytes
from prefixd_swap.stores.base import Read, Write
from prefixd_swap.stores.names import BlockIdentity
from prefixd_swap.stores.sealed import Seal, is_coded, stated_bytes
from prefixd_swap.tiers.remote.remote_parts import PartRead, RemotePart, coding_label, most_error, part_object_name

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PartObject:
    """An object to write.

    Attributes:
        write: its name and bytes.
        nbytes: bytes of its payload.
        refused: why the chosen codec has not coded the part; empty: it has, or none was chosen.
    """

    write: Write
    nbytes: int
    refused: str = ""


def make_object(seal: Seal, block: BlockIdentity, part: RemotePart) -> PartObject:
    """The object of a part. A part that a lossy codec refuses for its numbers is coded without loss. What no codec
    takes is stored as it is, and so is a part whose bytes are not those of its checksum: that is found when it is read.
    """
    payload, label = host_bytes(part.span, part.span.nbytes), coding_label(part.coding)
    name, checksum, refused = part_object_name(block.digest, part.number, part.coding), part.checksum, ""
    if part.coding is not None:
        data = np.frombuffer(payload, np.uint8)
        made, refused = _code(data, part.coding, checksum)
        if made is not None:
            head, stored = seal.close(block, part.number, made.data, None, label=label, coded=True)
            return PartObject(Write(name, (memoryview(head), stored)), stored.nbytes, refused)
    head, stored = seal.close(block, part.number, payload, checksum, label=label)
    return PartObject(Write(name, (memoryview(head), stored)), stored.nbytes, refused)


def read_of_part(seal: Seal, block: BlockIdentity, part: RemotePart) -> Read:
    """Where to read a part's object into: a new head, and the part's own memory."""
    into = (memoryview(bytearray(seal.head_bytes)), host_bytes(part.span, part.span.nbytes))
    return Read(part_object_name(block.digest, part.number, part.coding), into)


def open_object(seal: Seal, block: BlockIdentity, part: RemotePart, read: Read, came: int | None) -> PartRead:
    """Verifies an object that was read, and has the part's bytes in its memory.

    Args:
        seal: the hosts'.
        block: whose object it is to be.
        part: the part, with its memory.
        read: what `read_of_part` gave.
        came: bytes of the object; None: it is not there.

    Raises:
        LostBytesError: it is not there, or is torn.
        BadObjectError: it must not be used. The memory has garbage.
    """
    head, memory = read.into
    if came is None or came < head.nbytes or came != head.nbytes + _expected(head, memory.nbytes, part.coding):
        raise LostBytesError("the store has the object no more, or one of another length")
    payload = memory[: came - head.nbytes]
    checksum = seal.open(block, part.number, head, payload, label=coding_label(part.coding))
    if part.coding is not None and is_coded(head):
        return _decode(payload, memory, part.coding)
    if payload.nbytes != memory.nbytes:
        raise AlteredObjectError(f"{payload.nbytes} bytes were sealed as a part of {memory.nbytes} bytes")
    return PartRead(checksum)


def _expected(head: memoryview, nbytes: int, coding: Coding | None) -> int:
    """Bytes that the payload must have: a coded part's own, by its head."""
    stated = None if coding is None else stated_bytes(head)
    return nbytes if stated is None else stated


def _code(data: UInt8s, coding: Coding, checksum: int | None) -> tuple[UInt8s | None, str]:
    """The coded part, None: it is stored as it is; and why the chosen codec has not coded it."""
    if checksum is not None and checksum != xxhash.xxh3_64_intdigest(data.data):
        return None, "altered_in_memory"
    try:
        made, refused = code_or_lossless(data, coding)
    except EncodingError as error:
        log.error("a block is shared as it is; this is a defect of the codec, report it: %s", error)
        return None, "encoding_failed"
    return None if made is None else made.data, "" if refused is None else refused.value


def _decode(payload: memoryview, memory: memoryview, coding: Coding) -> PartRead:
    stored = np.frombuffer(payload, np.uint8).copy()  # its memory is also where it is decoded to
    try:
        header = read_header(stored)
        codec = find_codec(header.codec)
        if codec.lossy and (codec.name != coding.codec.name or header.errors is None):
            raise StaleObjectError(f"the object is coded by {codec.name}, and {coding.codec.name} was asked for")
        if header.errors is not None and not header.errors.rms.max() <= most_error(coding):
            raise StaleObjectError(f"the object has errors up to {header.errors.rms.max():.3g}, beyond the bound")
        decoded = decode_object(stored, np.frombuffer(memory, np.uint8))
    except UnavailableCodecError as error:
        raise StaleObjectError(f"the object cannot be decoded here: {error}") from error
    except EncodingError as error:
        raise AlteredObjectError(f"the object was altered before it was sealed: {error}") from error
    return PartRead(decoded.checksum, (decoded.largest, decoded.rms) if decoded.lossy else None)
