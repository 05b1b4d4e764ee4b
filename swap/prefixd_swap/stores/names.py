"""Names of objects in a shared store: a keyed hash of a whole prefix, chained block by block.

Block keys are not safe outside of a host: XXH3 can be inverted, so a client that may store blocks could construct two
prompts with one key. BLAKE2b is collision-resistant, and keyed: a reader of the names learns nothing about the prompts,
and without the secret no object can be named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from prefixd_swap.sealing.derived_keys import derive_key
from prefixd_swap.stores.base import NAME_BYTES

DIGEST_BYTES = 30
"""Bytes of a prefix's digest; an object's name is the digest, or a hash of it, and two bytes with the part's number."""


@dataclass(frozen=True, slots=True)
class TenantKeys:
    """The keys that name and seal one tenant's objects, derived from the daemon's secrets and the tenant's salt.

    Attributes:
        naming: 32 bytes; the key of the names' hash.
        sealing: 32 bytes; each object's AES key is derived from it.
    """

    naming: bytes
    sealing: bytes

    @classmethod
    def derive(cls, secret: bytes, encryption_key: bytes | None, salt: bytes) -> TenantKeys:
        """The keys of the tenant with `salt`.

        With an `encryption_key` the names depend on it too: hosts with another key, or none, neither read nor overwrite
        these objects.
        """
        if encryption_key is not None:
            secret = derive_key(secret, b"prefixd encrypted" + encryption_key)
        return cls(
            derive_key(secret, b"prefixd names" + salt),
            derive_key(secret, b"prefixd seals" + salt),
        )

    def root(self, identity: bytes) -> bytes:
        """The digest before a namespace's first blocks; `identity` has everything that equal bytes depend on."""
        return hashlib.blake2b(identity, key=self.naming, digest_size=DIGEST_BYTES).digest()

    def chain(self, before: bytes, blocks: Iterable[bytes]) -> list[bytes]:
        """The digests of consecutive blocks that continue the prefix `before`; 0.5 us each.

        Args:
            before: the digest of the prefix.
            blocks: the token ids of each block, little-endian uint32.
        """
        keyed, digest = hashlib.blake2b(key=self.naming, digest_size=DIGEST_BYTES), before
        digests = []
        for tokens in blocks:
            step = keyed.copy()
            step.update(digest + tokens)
            digest = step.digest()
            digests.append(digest)
        return digests


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """The block that an object belongs to; the object's head repeats it.

    Attributes:
        keys: the tenant's keys.
        digest: the digest of the whole prefix, which names the block.
        namespace: its id, 8 bytes.
        geometry: 8 bytes, a digest of the block's geometry.
        depth: number of blocks before it.
        tokens: the block's token ids, little-endian uint32.
    """

    keys: TenantKeys
    digest: bytes
    namespace: bytes
    geometry: bytes
    depth: int
    tokens: bytes


def object_name(digest: bytes, part: int, label: bytes = b"") -> bytes:
    """The name of the object with a block's part.

    Args:
        digest: of the block's prefix.
        part: its number.
        label: how it may be coded, up to 64 bytes; empty: these are the part's own bytes. Objects of different labels
            have different names, so what is found under a name is what the reader can use and has asked for.
    """
    if label:
        digest = hashlib.blake2b(digest, key=label, digest_size=DIGEST_BYTES, person=b"prefixd coded").digest()
    return digest + part.to_bytes(NAME_BYTES - DIGEST_BYTES, "little")
