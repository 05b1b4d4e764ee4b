"""Encrypted objects: the format of a part, or of another value, that is encrypted at rest.

    head       magic, version, flags, key id, salt      authenticated
    tag        of AES-256-GCM
    checksum   xxh3_64 of the bytes                     encrypted
    bytes      a part's own, or what a codec has made   encrypted

The object's AES key and nonce are derived from the key with this id, 16 random bytes, and the object's identity: so no
AES key encrypts two objects, and an object opens only as the part of the block that it was made for. The checksum is of
bytes that were known to be right, so it finds bytes that were altered in memory before; in clear it would tell which
blocks have the same bytes.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from prefixd_swap.errors import ChecksumError, EncodingError
from prefixd_swap.sealing.aes_gcm import NONCE_BYTES, TAG_BYTES, Bytes, decrypt, encrypt
from prefixd_swap.sealing.derived_keys import KEY_BYTES, object_key
from prefixd_swap.sealing.rest_keys import RestKey, RestKeys

UInt8s = npt.NDArray[np.uint8]

_MAGIC = b"prefixd\x02"
_VERSION = 1
_CODED = 1
_SALT_BYTES = 16
_CHECKSUM_BYTES = 8
_HEAD = struct.Struct(f"<8sBBxxI{_SALT_BYTES}s")  # magic, version, flags, key id, salt
_CHECKSUM_AT = _HEAD.size + TAG_BYTES
_BYTES_AT = _CHECKSUM_AT + _CHECKSUM_BYTES
SEAL_BYTES = _BYTES_AT
"""Bytes that an object has more than its content."""
_PART = struct.Struct("<8s16sH")


@dataclass(frozen=True, slots=True)
class SealedHead:
    """What an object says of itself. It is certain only once the object was opened.

    Attributes:
        key_id: the id of its key.
        coded: whether its content is what a codec has made, and not a part's own bytes.
        nbytes: bytes of the content.
    """

    key_id: int
    coded: bool
    nbytes: int


def part_identity(namespace: bytes, key: bytes, part: int) -> bytes:
    """The identity of a block's part: namespace (8 bytes), block key (16 bytes), number of the part."""
    return _PART.pack(namespace, key, part)


def is_sealed(stored: UInt8s | bytes) -> bool:
    """Whether stored bytes begin as an encrypted object does."""
    return bytes(stored[: len(_MAGIC)]) == _MAGIC


def sealed_key(stored: UInt8s | bytes) -> int:
    """The id of the key that encrypts an object; 0 for bytes that do not begin as an object does."""
    if not is_sealed(stored) or len(stored) < SEAL_BYTES:
        return 0
    key_id: int = _HEAD.unpack_from(bytes(stored[: _HEAD.size]))[3]
    return key_id


def seal(data: UInt8s, key: RestKey, identity: bytes, *, coded: bool = False, checksum: int | None = None) -> UInt8s:
    """An object with `data`, encrypted; SEAL_BYTES larger.

    Args:
        data: the content, in contiguous memory.
        key: encrypts it.
        identity: whose object it is, see `part_identity`; opening needs the same.
        coded: whether `data` is what a codec has made.
        checksum: xxh3_64 of `data`, computed when its bytes were known to be right; None: it is computed now.
    """
    known = (xxhash.xxh3_64_intdigest(data.data) if checksum is None else checksum).to_bytes(_CHECKSUM_BYTES, "little")
    stored = np.empty(SEAL_BYTES + data.nbytes, np.uint8)
    head = _HEAD.pack(_MAGIC, _VERSION, _CODED if coded else 0, key.id, os.urandom(_SALT_BYTES))
    memory = stored.data
    memory[: _HEAD.size] = head
    hidden: list[tuple[Bytes, Bytes]] = [(known, memory[_CHECKSUM_AT:_BYTES_AT]), (data.data, memory[_BYTES_AT:])]
    memory[_HEAD.size : _CHECKSUM_AT] = encrypt(*_key_and_nonce(key, identity, head), [head], hidden)
    return stored


def read_head(stored: UInt8s) -> SealedHead:
    """What an object says of itself.

    Raises:
        EncodingError: it is no encrypted object, or of another version.
    """
    if stored.nbytes < SEAL_BYTES:
        raise EncodingError(f"an encrypted object has {SEAL_BYTES} bytes or more, and this one {stored.nbytes}")
    magic, version, flags, key_id, _ = _HEAD.unpack_from(stored.data)
    if magic != _MAGIC:
        raise EncodingError(f"an encrypted object begins with {_MAGIC!r}, and this one with {magic!r}")
    if version != _VERSION or flags & ~_CODED:
        raise EncodingError(
            f"the encrypted object has version {version} and flags {flags}; this prefixd reads version {_VERSION} and "
            f"flags up to {_CODED}"
        )
    return SealedHead(key_id, bool(flags & _CODED), stored.nbytes - SEAL_BYTES)


def open_sealed(stored: UInt8s, keys: RestKeys, identity: bytes, into: UInt8s) -> int:
    """Decrypts an object's content to the start of `into`; returns xxh3_64 of the content.

    Args:
        stored: the object, in contiguous memory.
        keys: have its key.
        identity: whose object it is to be.
        into: contiguous memory with at least as many bytes as the content.

    Raises:
        EncodingError: as `read_head`; or `into` is too small.
        MissingKeyError: its key is not among `keys`.
        ChecksumError: it was altered, or is another part's; `into` has garbage.
    """
    head = read_head(stored)
    if into.nbytes < head.nbytes:
        raise EncodingError(f"the content of an encrypted object has {head.nbytes} bytes, and its memory {into.nbytes}")
    key, memory, known = keys.find(head.key_id), stored.data, bytearray(_CHECKSUM_BYTES)
    fields, tag = bytes(memory[: _HEAD.size]), bytes(memory[_HEAD.size : _CHECKSUM_AT])
    key_and_nonce, content = _key_and_nonce(key, identity, fields), into.data[: head.nbytes]
    hidden: list[tuple[Bytes, Bytes]] = [(memory[_CHECKSUM_AT:_BYTES_AT], known), (memory[_BYTES_AT:], content)]
    if not decrypt(*key_and_nonce, tag, [fields], hidden):
        raise ChecksumError("an encrypted object was altered, or is another block's; the block will be computed again")
    checksum = int.from_bytes(known, "little")
    if xxhash.xxh3_64_intdigest(content) != checksum:
        raise ChecksumError("the bytes of an encrypted object were altered before; the block will be computed again")
    return checksum


def _key_and_nonce(key: RestKey, identity: bytes, head: bytes) -> tuple[bytes, bytes]:
    derived = object_key(key.objects, identity, salt=head[-_SALT_BYTES:], nbytes=KEY_BYTES + NONCE_BYTES)
    return derived[:KEY_BYTES], derived[KEY_BYTES:]
