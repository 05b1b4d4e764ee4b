"""Digests of prefixes, which name blocks in a shared store (`prefixd_swap/stores/names.py`)."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import xxhash

from prefixd.base.long_work.pacer import give_way
from prefixd.base.rules.rules import to_fields
from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.namespaces import Namespace, NamespaceRegistry, NamespaceSpec
from prefixd_swap.stores import BlockIdentity, TenantKeys
from prefixd_swap.tiers import RemoteTier

HASHED_AT_ONCE = 2048  # blocks: a millisecond


def root_digest(keys: TenantKeys, spec: NamespaceSpec) -> bytes:
    """The digest before a namespace's first blocks, of its whole spec."""
    return keys.root(spec.encoded())


def geometry_digest(spec: NamespaceSpec) -> bytes:
    """8 bytes: a digest of the geometry of a namespace's blocks, which objects repeat."""
    return xxhash.xxh3_64_digest(msgspec.msgpack.encode(spec.geometry, enc_hook=to_fields))


class Digests:
    """Computes digests, from the last block on whose digest the tier knows.

    Args:
        tier: knows the digests of blocks that it has.
        namespaces: all of them.
    """

    def __init__(self, tier: RemoteTier, namespaces: NamespaceRegistry) -> None:
        self._tier = tier
        self._namespaces = namespaces
        self._names_of: WeakKeyDictionary[Namespace, tuple[TenantKeys, bytes, bytes]] = WeakKeyDictionary()
        """The keys, the root digest and the geometry of each namespace."""

    async def of_prompt(
        self, trie: Trie, namespace: Namespace, chain: BlockChain, path: Rows, first: int, end: int
    ) -> list[bytes]:
        """[end - first]: the digests of blocks `first` to `end` of a prompt; `path`: the rows of its first blocks."""
        keys, before, _ = self._names(namespace)
        numbers = trie.slots[path[:first], self._tier.level].max(axis=1, initial=NO_SLOT)
        known = np.flatnonzero(numbers != NO_SLOT)
        begin = int(known[-1]) + 1 if len(known) else 0
        if begin:
            before = self._tier.digest(int(numbers[begin - 1]))
        digests: list[bytes] = []
        for start in range(begin, end, HASHED_AT_ONCE):
            if digests:
                await give_way()
                before = digests[-1]
            digests += keys.chain(before, map(chain.block, range(start, min(start + HASHED_AT_ONCE, end))))
        return digests[first - begin :]

    async def of_rows(self, trie: Trie, rows: Rows) -> list[bytes]:
        """[len(rows)]: the digests of `rows`, which the caller holds."""
        known: dict[int, bytes] = {}
        walked = 0
        for row in rows.tolist():
            missing, at = [], row
            before: bytes | None = None
            while before is None and at >= 0:
                before = known.get(at) or self._entered(trie, at)
                if before is None:
                    missing.append(at)
                    at = int(trie.parent[at])
                    walked += 1
                    if not walked % HASHED_AT_ONCE:
                        await give_way()
            keys, root, _ = self._names(self._namespaces.at(int(trie.namespace[row])))
            missing.reverse()
            for start in range(0, len(missing), HASHED_AT_ONCE):
                some = missing[start : start + HASHED_AT_ONCE]
                before = root if before is None else before
                digests = keys.chain(before, (trie.tokens[each].tobytes() for each in some))
                known.update(zip(some, digests, strict=True))
                before = digests[-1]
                if len(some) == HASHED_AT_ONCE:
                    await give_way()
            if not missing and before is not None:
                known[row] = before
        return [known[row] for row in rows.tolist()]

    def identity(self, trie: Trie, row: int, digest: bytes) -> BlockIdentity:
        """The block's identity, stored in its objects."""
        namespace = self._namespaces.at(int(trie.namespace[row]))
        keys, _, geometry = self._names(namespace)
        return BlockIdentity(keys, digest, namespace.digest, geometry, int(trie.depth[row]), trie.tokens[row].tobytes())

    def _entered(self, trie: Trie, row: int) -> bytes | None:
        number = int(trie.slots[row, self._tier.level].max())
        return None if number == NO_SLOT else self._tier.digest(number)

    def _names(self, namespace: Namespace) -> tuple[TenantKeys, bytes, bytes]:
        names = self._names_of.get(namespace)
        if names is None:
            keys = self._tier.seal.keys(namespace.spec.salt)
            names = keys, root_digest(keys, namespace.spec), geometry_digest(namespace.spec)
            self._names_of[namespace] = names
        return names
