"""Objects that an attacker without the secret can make up if it may read and write the store.

The attacker sees names and objects, knows how both are made, and has a secret of its own.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import xxhash

from benchmarks.checks.damaged_store.stored_objects import BlockId, StoredObject
from prefixd_swap.sealing.aes_gcm import TAG_BYTES
from prefixd_swap.stores.base import NAME_BYTES
from prefixd_swap.stores.names import DIGEST_BYTES, BlockIdentity
from prefixd_swap.stores.sealed import CHECKSUM_AT, HEAD_BYTES, IDENTITY, KIND, NONCE_AT, TAG_AT, Seal

KINDS = (
    "other secret",  # a block of its own, sealed correctly with its own secret
    "other secret, right nonce",  # the same, with the right object's nonce
    "right head",  # the right head and tag, other bytes
    "right head and checksum",  # and the checksum of those bytes
    "no tag",
    "random tag",
    "random",
    "replayed",  # another block's object, as it is
    "replayed, renamed",  # and its head says that it is this block's
    "other tenant",  # the same tokens' object in a namespace with another salt
    "other tenant, renamed",
    "other part",
    "other part, renamed",
    "other flags",  # sealed, or encrypted, as it is not configured
    "longer",
)


class Forger:
    """Makes objects up.

    Args:
        objects: all objects of the store.
        rng: makes its choices.
    """

    def __init__(self, objects: Mapping[BlockId, Sequence[StoredObject]], rng: random.Random) -> None:
        self._objects = objects
        self._rng = rng
        self._seals = {False: Seal(b"a secret of my own"), True: Seal(b"a secret of my own", b"a key of my own..")}
        self._by_tokens: dict[bytes, list[StoredObject]] = {}
        for (_, tokens), parts in objects.items():
            self._by_tokens.setdefault(tokens, []).extend(parts)
        self._by_size: dict[int, list[StoredObject]] = {}
        for parts in objects.values():
            for each in parts:
                self._by_size.setdefault(len(each.data), []).append(each)

    def forge(self, kind: str, target: StoredObject) -> bytes | None:
        """Returns an object to put under the target's name; None if no object of this kind can be made."""
        data, rng = bytearray(target.data), self._rng
        payload = rng.randbytes(len(data) - HEAD_BYTES)
        encrypted = bool(KIND.unpack_from(data)[2])
        if kind == "other secret":
            return self._sealed(target, payload, encrypted)
        if kind == "other flags":
            return self._sealed(target, payload, not encrypted)
        if kind == "other secret, right nonce":
            forged = bytearray(self._sealed(target, payload, encrypted))
            forged[NONCE_AT:TAG_AT] = data[NONCE_AT:TAG_AT]
            return bytes(forged)
        if kind == "right head":
            return bytes(data[:HEAD_BYTES]) + payload
        if kind == "right head and checksum":
            return bytes(data[:CHECKSUM_AT]) + xxhash.xxh3_64_intdigest(payload).to_bytes(8, "little") + payload
        if kind in ("no tag", "random tag"):
            data[TAG_AT:CHECKSUM_AT] = bytes(TAG_BYTES) if kind == "no tag" else rng.randbytes(TAG_BYTES)
            return bytes(data)
        if kind == "random":
            return rng.randbytes(len(data))
        if kind == "longer":
            return bytes(data) + b"\0"
        other = self._other(kind, target)
        if other is None:
            return None
        return _renamed(other, target) if kind.endswith("renamed") else other.data

    def _sealed(self, target: StoredObject, payload: bytes, encrypted: bool) -> bytes:
        # The attacker does not know the tokens and has to guess them; here it guesses right.
        part, count, depth, _, namespace, geometry, _ = IDENTITY.unpack_from(target.data, KIND.size)
        tokens = target.block[1][-4 * count :]
        digest = target.name[-NAME_BYTES:][:DIGEST_BYTES]
        seal = self._seals[encrypted]
        block = BlockIdentity(seal.keys(b""), digest, namespace, geometry, depth, tokens)
        head, hidden = seal.close(block, part, memoryview(payload), None)
        return head + bytes(hidden)

    def _other(self, kind: str, target: StoredObject) -> StoredObject | None:
        size = len(target.data)
        if kind.startswith("replayed"):
            found = [each for each in self._by_size[size] if each.block != target.block]
        elif kind.startswith("other tenant"):
            found = [each for each in self._by_tokens[target.block[1]] if each.block[0] != target.block[0]]
        else:
            found = [each for each in self._objects[target.block] if each.part != target.part]
        return self._rng.choice(found) if found else None


def _renamed(other: StoredObject, target: StoredObject) -> bytes:
    """The other's bytes, nonce, tag and checksum, with a head that says it is the target's."""
    return target.data[:NONCE_AT] + other.data[NONCE_AT:]
