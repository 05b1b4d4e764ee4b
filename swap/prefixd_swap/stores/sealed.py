"""Sealed objects: a part of a block as it lies in a store that others can write to.

    head      magic, version, flags, what the object is (below), nonce, tag      HEAD_BYTES
              the block's token ids                                              4 bytes a token
    payload   the part's bytes; encrypted where that is configured

AES-256-GCM with a key of the object's own authenticates all of it, so who lacks the secret can neither alter an object,
nor move it to another name, nor make one up. The checksum inside was taken when the bytes were known to be right: bytes
that were altered in memory before they were sealed are found when they come up.
"""

from __future__ import annotations

import hashlib
import os
import struct

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from prefixd_swap.errors import AlteredObjectError, ForeignObjectError, StaleObjectError
from prefixd_swap.stores.names import BlockIdentity, TenantKeys, object_name

_MAGIC = b"prefixd\x00"
_VERSION = 1
_ENCRYPTED = 1
_HEAD = struct.Struct("<8sHHHxxIIQQ8s8s")  # see `_fields`
_NONCE_BYTES, _TAG_BYTES = 12, 16
HEAD_BYTES = _HEAD.size + _NONCE_BYTES + _TAG_BYTES


class Seal:
    """Seals parts of blocks, and opens and verifies them.

    Args:
        secret: from which all names and keys are made, `LEAST_SECRET_BYTES` or more.
        encryption_key: where it is given, the payload is encrypted, with keys made from it; otherwise it is
            authenticated only.
    """

    def __init__(self, secret: bytes, encryption_key: bytes | None = None) -> None:
        self.encrypt = encryption_key is not None
        self._secret = secret
        self._encryption_key = encryption_key

    def keys(self, salt: bytes) -> TenantKeys:
        """The keys of the tenant with `salt`."""
        return TenantKeys.derive(self._secret, self._encryption_key, salt)

    @staticmethod
    def head_bytes(block: BlockIdentity) -> int:
        """How long the head of each of a block's objects is."""
        return HEAD_BYTES + len(block.tokens)

    def close(
        self, block: BlockIdentity, part: int, payload: memoryview, checksum: int | None
    ) -> tuple[bytes, memoryview]:
        """The head and the payload of an object. `checksum` is xxh3_64 of the payload where it is known.

        The payload is the caller's memory itself unless it is encrypted.
        """
        if checksum is None:
            checksum = xxhash.xxh3_64_intdigest(payload)
        nonce = os.urandom(_NONCE_BYTES)
        fields = self._fields(block, part, payload.nbytes, checksum) + nonce
        sealing = Cipher(AES(_key(block, part)), GCM(nonce)).encryptor()
        sealing.authenticate_additional_data(fields + block.tokens)
        if self.encrypt:
            hidden = memoryview(bytearray(payload.nbytes))
            sealing.update_into(payload, hidden)
            payload = hidden
        else:
            sealing.authenticate_additional_data(payload)
        sealing.finalize()
        return fields + sealing.tag + block.tokens, payload

    def open(self, block: BlockIdentity, part: int, head: memoryview, payload: memoryview) -> int:
        """Verifies an object, decrypts its payload in place, and returns xxh3_64 of the bytes.

        Raises:
            ForeignObjectError: it is not prefixd's, or another block's.
            StaleObjectError: another version of prefixd, or one that (does not) encrypt, has written it.
            AlteredObjectError: its bytes are not those that were sealed. The payload is garbage.
        """
        magic, version, flags, *_, checksum, _, _ = _HEAD.unpack_from(head)
        if magic != _MAGIC:
            raise ForeignObjectError("the object was not written by prefixd")
        if version != _VERSION or flags != (_ENCRYPTED if self.encrypt else 0):
            raise StaleObjectError(
                f"the object has version {version} and flags {flags}; this daemon reads version {_VERSION} and "
                f"flags {_ENCRYPTED if self.encrypt else 0} (1: encrypted)"
            )
        fields = bytes(head[: _HEAD.size])
        nonce, tag = head[_HEAD.size : _HEAD.size + _NONCE_BYTES], head[_HEAD.size + _NONCE_BYTES : HEAD_BYTES]
        if fields != self._fields(block, part, payload.nbytes, checksum) or head[HEAD_BYTES:] != block.tokens:
            raise ForeignObjectError("the object says that it is another block's")
        opening = Cipher(AES(_key(block, part)), GCM(bytes(nonce), bytes(tag))).decryptor()
        opening.authenticate_additional_data(fields + bytes(nonce) + block.tokens)
        if self.encrypt:
            opening.update_into(payload, payload)
        else:
            opening.authenticate_additional_data(payload)
        try:
            opening.finalize()
        except InvalidTag:
            raise AlteredObjectError("the object is not what was sealed with this daemon's secret") from None
        if xxhash.xxh3_64_intdigest(payload) != checksum:
            raise AlteredObjectError("the object's bytes were altered before they were sealed")
        return int(checksum)

    def _fields(self, block: BlockIdentity, part: int, nbytes: int, checksum: int) -> bytes:
        flags, tokens = _ENCRYPTED if self.encrypt else 0, len(block.tokens) // 4
        return _HEAD.pack(
            _MAGIC, _VERSION, flags, part, tokens, block.depth, nbytes, checksum, block.namespace, block.geometry
        )


def _key(block: BlockIdentity, part: int) -> bytes:
    """Of the object's own, so that no number of objects uses one key too often, and the name is authenticated."""
    return hashlib.blake2b(object_name(block.digest, part), key=block.keys.sealing, digest_size=32).digest()
