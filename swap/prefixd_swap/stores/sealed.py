"""Sealed objects: the format of a block's part in a store that others can read and write.

    head      magic, version, flags, identity, nonce, tag, checksum     HEAD_BYTES
    payload   the part's bytes, or what a codec has made of them (a flag says so)

Payload and checksum are encrypted if that is configured. The identity is the part's number, the payload's length, the
block's depth and length, its namespace, its geometry, and a keyed hash of its token ids. The ids
themselves are not stored: a reader of the store must not learn the prompt.

AES-256-GCM with a key for each object authenticates everything, so without the secret an object can be neither altered,
nor moved to another name, nor forged. The checksum inside is the payload's. That of a part's bytes was computed when
they were known to be right, so it finds bytes that were altered in memory before they were sealed; a coded object has
such a checksum itself.
"""

from __future__ import annotations

import hashlib
import os
import struct

import numpy as np
import xxhash

from prefixd_swap.errors import AlteredObjectError, ForeignObjectError, StaleObjectError
from prefixd_swap.sealing.aes_gcm import NONCE_BYTES, TAG_BYTES, decrypt, encrypt
from prefixd_swap.sealing.derived_keys import object_key
from prefixd_swap.stores.names import BlockIdentity, TenantKeys, object_name

_MAGIC = b"prefixd\x00"
_VERSION = 1
_ENCRYPTED = 1
_CODED = 2
KIND = struct.Struct("<8sHH")  # magic, version, flags
IDENTITY = struct.Struct("<HxxIIxxxxQ8s8s16s")  # part, tokens, depth, bytes, namespace, geometry, hash of the tokens
CHECKSUM_BYTES = 8
NONCE_AT = KIND.size + IDENTITY.size
TAG_AT = NONCE_AT + NONCE_BYTES
CHECKSUM_AT = TAG_AT + TAG_BYTES
HEAD_BYTES = CHECKSUM_AT + CHECKSUM_BYTES


class Seal:
    """Seals parts of blocks, and opens and verifies them.

    Args:
        secret: all names and keys are derived from it; `LEAST_SECRET_BYTES` or more.
        encryption_key: encrypts the payload, with keys derived from it; None: the payload is authenticated only.
    """

    def __init__(self, secret: bytes, encryption_key: bytes | None = None) -> None:
        self.encrypt = encryption_key is not None
        self._secret = secret
        self._encryption_key = encryption_key

    head_bytes = HEAD_BYTES

    def keys(self, salt: bytes) -> TenantKeys:
        """The keys of the tenant with `salt`."""
        return TenantKeys.derive(self._secret, self._encryption_key, salt)

    def close(
        self,
        block: BlockIdentity,
        part: int,
        payload: memoryview,
        checksum: int | None,
        *,
        label: bytes = b"",
        coded: bool = False,
    ) -> tuple[bytes, memoryview]:
        """The head and the payload of an object. Without encryption the payload is the caller's memory itself.

        Args:
            block, part: whose it is.
            payload: the part's bytes, or what a codec has made of them.
            checksum: xxh3_64 of the payload if known.
            label: see `object_name`.
            coded: whether a codec has made the payload; only with a label.

        Raises:
            ValueError: a coded payload without a label: a reader would take it for the part's bytes.
        """
        if coded and not label:
            raise ValueError(f"part {part} is coded, but has no label that says how; give one")
        if checksum is None:
            checksum = xxhash.xxh3_64_intdigest(payload)
        nonce, known = os.urandom(NONCE_BYTES), bytearray(checksum.to_bytes(CHECKSUM_BYTES, "little"))
        fields = self._kind(coded) + _identity(block, part, payload.nbytes) + nonce
        if self.encrypt:
            hidden = np.empty(payload.nbytes, np.uint8).data  # not zeroed first
            tag = encrypt(_key(block, part, label), nonce, [fields], [(known, known), (payload, hidden)])
            payload = hidden
        else:
            tag = encrypt(_key(block, part, label), nonce, [fields, known, payload], [])
        return fields + tag + known, payload

    def open(
        self, block: BlockIdentity, part: int, head: memoryview, payload: memoryview, *, label: bytes = b""
    ) -> int:
        """Verifies an object, decrypts its payload in place, and returns xxh3_64 of it; `is_coded` says what it is.

        Only an object with a `label` may be coded.

        Raises:
            ForeignObjectError: it was not written by prefixd, or belongs to another block.
            StaleObjectError: it has another version, or its encryption differs from this daemon's.
            AlteredObjectError: its bytes are not the bytes that were sealed. The payload is garbage.
        """
        magic, version, flags = KIND.unpack_from(head)
        if magic != _MAGIC:
            raise ForeignObjectError("the object was not written by prefixd")
        if head[: KIND.size] != self._kind(bool(label) and is_coded(head)):
            raise StaleObjectError(
                f"the object has version {version} and flags {flags}; this daemon reads version {_VERSION} and "
                f"flags {self._flags} (1: encrypted), and {self._flags | _CODED} where it has asked for coded objects"
            )
        if head[KIND.size : NONCE_AT] != _identity(block, part, payload.nbytes):
            raise ForeignObjectError("the object says that it is another block's")
        nonce, tag = bytes(head[NONCE_AT:TAG_AT]), bytes(head[TAG_AT:CHECKSUM_AT])
        known, fields = bytearray(head[CHECKSUM_AT:]), head[:TAG_AT]
        if self.encrypt:
            authentic = decrypt(_key(block, part, label), nonce, tag, [fields], [(known, known), (payload, payload)])
        else:
            authentic = decrypt(_key(block, part, label), nonce, tag, [fields, known, payload], [])
        if not authentic:
            raise AlteredObjectError("the object was altered, or sealed with another secret")
        checksum = int.from_bytes(known, "little")
        if xxhash.xxh3_64_intdigest(payload) != checksum:
            raise AlteredObjectError("the object's bytes were altered before they were sealed")
        return checksum

    @property
    def _flags(self) -> int:
        return _ENCRYPTED if self.encrypt else 0

    def _kind(self, coded: bool) -> bytes:
        return KIND.pack(_MAGIC, _VERSION, self._flags | (_CODED if coded else 0))


def is_coded(head: memoryview) -> bool:
    """Whether a head says that a codec has made the payload. It is certain only once the object was opened."""
    return bool(KIND.unpack_from(head)[2] & _CODED)


def stated_bytes(head: memoryview) -> int | None:
    """The length of the payload by its head; None if prefixd has not written it. As uncertain as `is_coded`."""
    if KIND.unpack_from(head)[0] != _MAGIC:
        return None
    nbytes: int = IDENTITY.unpack_from(head, KIND.size)[3]
    return nbytes


def _identity(block: BlockIdentity, part: int, nbytes: int) -> bytes:
    tokens = hashlib.blake2b(block.digest + block.tokens, key=block.keys.naming, digest_size=16).digest()
    count = len(block.tokens) // 4
    return IDENTITY.pack(part, count, block.depth, nbytes, block.namespace, block.geometry, tokens)


def _key(block: BlockIdentity, part: int, label: bytes) -> bytes:
    return object_key(block.keys.sealing, object_name(block.digest, part, label))
