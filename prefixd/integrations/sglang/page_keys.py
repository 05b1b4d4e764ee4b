"""Converts SGLang's page keys to digests of 32 bytes. A key is SHA-256 over the key of the page before and the page's
tokens, in 64 hexadecimal digits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from prefixd.integrations.engine.pages_by_key.chains import KEY_BYTES

_HEX = 2 * KEY_BYTES


def digests_of(keys: Sequence[str]) -> bytes:
    """The digests of `keys`, 32 bytes each, one after the other.

    A key of another form is hashed, since it names a page too. Raises TypeError for a key that is no string.
    """
    text = "".join(keys)
    if len(text) == _HEX * len(keys) and all(len(key) == _HEX for key in keys):
        try:
            # Compared with the text: `fromhex` skips spaces, and another spelling of a key is another key.
            if (digests := bytes.fromhex(text)).hex() == text:
                return digests
        except ValueError:
            pass
    return b"".join(_digest(key) for key in keys)


def _digest(key: str) -> bytes:
    if len(key) == _HEX:
        try:
            if (digest := bytes.fromhex(key)).hex() == key:
                return digest
        except ValueError:
            pass
    return hashlib.sha256(b"prefixd key " + key.encode("utf-8", "surrogatepass")).digest()
