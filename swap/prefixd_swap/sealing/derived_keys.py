"""Keys that are derived from a secret: one for each purpose, and one for each object. Does not need `cryptography`."""

from __future__ import annotations

import hashlib
import hmac

LEAST_SECRET_BYTES = 16
KEY_BYTES = 32


def derive_key(secret: bytes, purpose: bytes) -> bytes:
    """The key of 32 bytes for a purpose, such as b"prefixd names" and a tenant's salt (HMAC-SHA256)."""
    return hmac.digest(secret, purpose, "sha256")


def object_key(key: bytes, name: bytes, *, salt: bytes = b"", nbytes: int = KEY_BYTES) -> bytes:
    """The object's own key, of `nbytes` bytes (keyed BLAKE2b, [RFC 7693](https://www.rfc-editor.org/rfc/rfc7693)).

    With a key of its own for each object no AES key encrypts too much, and the name is authenticated.

    Args:
        key: of `derive_key`.
        name: names the object; up to any length.
        salt: at most 16 bytes; random ones make another key of the same name.
        nbytes: at most 64.
    """
    return hashlib.blake2b(name, key=key, salt=salt, digest_size=nbytes).digest()
