"""Encrypted ends of index records: the token ids of blocks, which are the prompts.

    key id u32, nonce 12 bytes, encrypted bytes

AES-256 in counter mode: the counter's block is the nonce and a number, which counts the record's blocks from 0. With
random nonces of 96 bits a key serves 2^32 records. All rows of an index are decrypted by a few calls, as the blocks of
all counters are one array. Records are not authenticated: objects are, and a prompt's token ids are compared.
"""

from __future__ import annotations

import os
import struct

import numpy as np
import numpy.typing as npt

from prefixd_swap.errors import EncodingError
from prefixd_swap.sealing.rest_keys import RestKey, RestKeys

UInt8s = npt.NDArray[np.uint8]
UInt32s = npt.NDArray[np.uint32]

_NONCE_BYTES = 12
_BLOCK_BYTES = 16
_HEAD = struct.Struct(f"<I{_NONCE_BYTES}s")
RECORD_SEAL_BYTES = _HEAD.size
"""Bytes that the encrypted end of a record has more than its content."""
_BYTES_AT_ONCE = 256 << 10  # of counters: they stay in the processor's cache


def seal_record(end: bytes, key: RestKey) -> bytes:
    """The end of a record, encrypted; RECORD_SEAL_BYTES larger."""
    nonce = os.urandom(_NONCE_BYTES)
    return _HEAD.pack(key.id, nonce) + _in_counter_mode(end, key, nonce)


def open_record(sealed: bytes, keys: RestKeys) -> bytes:
    """The end of a record that `seal_record` has encrypted.

    Raises:
        EncodingError: it is too short.
        MissingKeyError: its key is not among `keys`.
    """
    if len(sealed) < RECORD_SEAL_BYTES:
        raise EncodingError(f"the encrypted end of a record has {RECORD_SEAL_BYTES} bytes or more, not {len(sealed)}")
    key_id, nonce = _HEAD.unpack_from(sealed)
    return _in_counter_mode(sealed[RECORD_SEAL_BYTES:], keys.find(key_id), nonce)


def record_keys(sealed: UInt8s) -> UInt32s:
    """Key ids of encrypted ends of one length; [m, bytes] to [m]."""
    ids: UInt32s = np.ascontiguousarray(sealed[:, :4]).view("<u4")[:, 0]
    return ids


def open_records(sealed: UInt8s, keys: RestKeys) -> UInt8s:
    """As `open_record`, m of one length; [m, bytes] to [m, bytes - RECORD_SEAL_BYTES]."""
    if sealed.shape[1] < RECORD_SEAL_BYTES:
        raise EncodingError(f"encrypted ends of records have {RECORD_SEAL_BYTES} bytes or more, not {sealed.shape[1]}")
    opened = np.empty((len(sealed), sealed.shape[1] - RECORD_SEAL_BYTES), np.uint8)
    ids = record_keys(sealed)
    kinds = np.unique(ids).tolist()
    for key_id in kinds:
        if len(kinds) == 1:
            _decrypt(sealed, keys.find(key_id), opened)
        else:
            chosen = np.flatnonzero(ids == key_id)
            some = np.empty((len(chosen), opened.shape[1]), np.uint8)
            _decrypt(sealed[chosen], keys.find(key_id), some)
            opened[chosen] = some
    return opened


def _decrypt(sealed: UInt8s, key: RestKey, opened: UInt8s) -> None:
    """Decrypts rows of one key."""
    count, nbytes = opened.shape
    blocks = -(-nbytes // _BLOCK_BYTES)
    if not nbytes:
        return
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import ECB

    encryption, step = Cipher(AES(key.records), ECB()).encryptor(), max(1, _BYTES_AT_ONCE // (blocks * _BLOCK_BYTES))
    memory = np.empty(min(step, count) * blocks * _BLOCK_BYTES + _BLOCK_BYTES - 1, np.uint8)  # more: `update_into`
    numbers = np.arange(blocks, dtype=">u8").view(np.uint64)
    for start in range(0, count, step):
        some = sealed[start : start + step]
        stream = memory[: len(some) * blocks * _BLOCK_BYTES]
        counters = stream.view(np.uint64).reshape(len(some), blocks, 2)
        nonces = np.zeros((len(some), 2), np.uint64)
        nonces.view(np.uint8)[:, :_NONCE_BYTES] = some[:, RECORD_SEAL_BYTES - _NONCE_BYTES : RECORD_SEAL_BYTES]
        counters[:, :, 0] = nonces[:, :1]
        counters[:, :, 1] = nonces[:, 1:] | numbers
        encryption.update_into(stream.data, memory.data)
        hidden, key_stream = some[:, RECORD_SEAL_BYTES:], stream.reshape(len(some), -1)[:, :nbytes]
        np.bitwise_xor(hidden, key_stream, out=opened[start : start + step])


def _in_counter_mode(data: bytes, key: RestKey, nonce: bytes) -> bytes:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import CTR

    cipher = Cipher(AES(key.records), CTR(nonce + bytes(_BLOCK_BYTES - _NONCE_BYTES)))
    return cipher.encryptor().update(data)
