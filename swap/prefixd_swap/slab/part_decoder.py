"""Decrypts and decodes what is stored of a part in place of its bytes."""

from __future__ import annotations

import threading

import numpy as np

from prefixd_swap.codecs.coding import Decoded, decode_object
from prefixd_swap.errors import EncodingError
from prefixd_swap.sealing.rest_keys import RestKeys
from prefixd_swap.sealing.sealed_objects import UInt8s, is_sealed, open_sealed, read_head

_KEPT_BYTES = 16 << 20  # of a buffer that a thread keeps


class PartDecoder:
    """Any thread may call it.

    Args:
        keys: decrypt parts.
    """

    def __init__(self, keys: RestKeys) -> None:
        self._keys = keys
        self._local = _Local()

    def decode(self, stored: UInt8s, into: UInt8s, identity: bytes) -> Decoded:
        """Decodes to `into`, which has the part's bytes.

        Args:
            stored: the part as it is stored.
            into: garbage after an error.
            identity: under which it was encrypted, see `part_identity`.

        Raises:
            EncodingError: it is neither coded nor encrypted, or another part's.
            ChecksumError: it was altered, or encrypted for another block.
            MissingKeyError: its key was not given.
        """
        if not is_sealed(stored):
            return decode_object(stored, into)
        head = read_head(stored)
        if head.coded:
            opened = self._buffer(head.nbytes)
            open_sealed(stored, self._keys, identity, opened)
            return decode_object(opened, into)
        if head.nbytes != into.size:
            raise EncodingError(f"an encrypted part has {head.nbytes} bytes, and its block's has {into.size}")
        return Decoded(open_sealed(stored, self._keys, identity, into), "exact", False, None)

    def _buffer(self, nbytes: int) -> UInt8s:
        """Memory that the calling thread keeps, up to `_KEPT_BYTES`."""
        if self._local.buffer.size >= nbytes:
            return self._local.buffer[:nbytes]
        fresh = np.empty(nbytes, np.uint8)
        if nbytes <= _KEPT_BYTES:
            self._local.buffer = fresh
        return fresh


class _Local(threading.local):
    def __init__(self) -> None:
        self.buffer: UInt8s = np.empty(0, np.uint8)
