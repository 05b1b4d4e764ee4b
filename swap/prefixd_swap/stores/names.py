"""Names of objects in a shared store: a keyed hash of a whole prefix, chained block by block.

Block keys will not do outside of a host: XXH3 can be inverted, so whoever may store blocks could make up two prompts
with one key. BLAKE2b is collision-resistant, and keyed: who reads the store's names learns nothing of the prompts, and
who lacks the secret can name no object.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from prefixd_swap.stores.base import NAME_BYTES

DIGEST_BYTES = 30
"""Of a prefix; the name of a part's object is this and two bytes for the part's number."""

LEAST_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class TenantKeys:
    """What one tenant's objects are named and sealed with: made from the daemon's secrets and the tenant's salt.

    Attributes:
        naming: 32 bytes; keys the names.
        sealing: 32 bytes; from it each object's AES key is made.
    """

    naming: bytes
    sealing: bytes

    @classmethod
    def derive(cls, secret: bytes, encryption_key: bytes | None, salt: bytes) -> TenantKeys:
        """The keys of the tenant with `salt`.

        Where there is an `encryption_key`, names are made from it, too: hosts that have another one, or none, do not
        read what these write, and do not write over it.
        """
        if encryption_key is not None:
            secret = hmac.digest(secret, b"prefixd encrypted" + encryption_key, "sha256")
        return cls(
            hmac.digest(secret, b"prefixd names" + salt, "sha256"),
            hmac.digest(secret, b"prefixd seals" + salt, "sha256"),
        )

    def root(self, identity: bytes) -> bytes:
        """The digest before a namespace's first blocks; `identity` says all that has to be equal for its bytes to be
        usable."""
        return hashlib.blake2b(identity, key=self.naming, digest_size=DIGEST_BYTES).digest()

    def chain(self, before: bytes, blocks: Iterable[bytes]) -> list[bytes]:
        """The digests of blocks that follow each other, the first of which continues the prefix `before`; 0.5 us each.

        Args:
            before: a digest.
            blocks: of each the token ids, little-endian uint32.
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
    """Which block an object belongs to: what it has to say about itself.

    Attributes:
        keys: the tenant's.
        digest: of the whole prefix, which names the block.
        namespace: its id, 8 bytes.
        geometry: 8 bytes, a digest of what a block looks like.
        depth: blocks before it.
        tokens: the block's token ids, little-endian uint32.
    """

    keys: TenantKeys
    digest: bytes
    namespace: bytes
    geometry: bytes
    depth: int
    tokens: bytes


def object_name(digest: bytes, part: int) -> bytes:
    """The name of the object that has a block's part."""
    return digest + part.to_bytes(NAME_BYTES - DIGEST_BYTES, "little")
