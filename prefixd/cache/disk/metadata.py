"""Keeps namespaces and pins in the index of the durable tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import cast

import msgspec
import numpy as np

from prefixd.base.rules.rules import to_fields
from prefixd.cache.disk.records import DiskRecords
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.namespaces import NamespaceRegistry
from prefixd.cache.placement.movement import to_the_end
from prefixd.cache.placement.placement import Placement
from prefixd_swap import StorageError
from prefixd_swap.sealing.rest_keys import RestKey
from prefixd_swap.tiers import StoreTier

_PINNED_AT_ONCE = 1 << 13


class DiskMetadata:
    """Keeps namespaces and pins in the index.

    Args:
        placement: records where blocks are.
        namespaces: all known namespaces.
        records: names blocks on disk.
        still: a context in which the store does not change.
        failed: called with an error.
    """

    def __init__(
        self,
        placement: Placement,
        namespaces: NamespaceRegistry,
        records: DiskRecords,
        still: Callable[[], AbstractAsyncContextManager[None]],
        failed: Callable[[StorageError], None],
    ) -> None:
        self._tiers = placement.tiers
        self._store = cast("StoreTier", placement.tiers.durable)  # without one, nothing is kept
        self._namespaces = namespaces
        self._records = records
        self._still = still
        self._failed = failed
        self.saved: set[bytes] = set()
        """Ids of namespaces that the index has."""

    async def save_namespaces(self, trie: Trie, rows: Rows) -> None:
        """Makes the blocks' namespaces durable, before their first block. The caller has the lock."""
        for ordinal in np.unique(trie.namespace[rows]).tolist():
            namespace = self._namespaces.at(ordinal)
            if namespace.id not in self.saved:
                spec = msgspec.msgpack.encode(namespace.spec, enc_hook=to_fields)
                await self._store.put_namespace(namespace.id, spec, self._store.keys.key_for(namespace.spec.tenant))
                self.saved.add(namespace.id)

    def encryption(self) -> dict[bytes, RestKey | None]:
        """The keys of all namespaces that the index has; None: in clear."""
        keys, names = self._store.keys, self._namespaces
        return {each: keys.key_for(names.get(each).spec.tenant) for each in self.saved if each in names}

    async def forget_namespaces(self, ids: Sequence[bytes]) -> None:
        """Removes namespaces from the index, except those registered again. After a failure the next start tries
        again."""
        async with self._still():
            gone = [identity for identity in ids if identity in self.saved and identity not in self._namespaces]
            if gone and self._tiers.writes:
                self.saved.difference_update(gone)
                try:
                    await to_the_end(self._store.remove_namespaces(gone))
                except StorageError as error:
                    self._failed(error)

    async def pin(self, trie: Trie, rows: Rows, pinned: bool) -> bool:
        """Makes blocks' pins, or their end, durable. Returns whether that succeeded for all of them.

        A pinned block that is not on disk yet becomes durable with its pin when it is written.
        """
        return await to_the_end(self._pin_all(trie, rows, pinned))

    async def _pin_all(self, trie: Trie, rows: Rows, pinned: bool) -> bool:
        durable = 0
        for start in range(0, len(rows), _PINNED_AT_ONCE):  # parents first, so that a crash leaves a prefix
            async with self._still():
                if not self._store.writable:
                    break
                try:
                    durable += await self.pin_locked(trie, rows[start : start + _PINNED_AT_ONCE], pinned)
                except StorageError as error:
                    self._failed(error)
                    break
        return durable == len(rows)

    async def pin_locked(self, trie: Trie, rows: Rows, pinned: bool) -> int:
        """As `pin`, for a caller that has the lock; returns the number of `rows` in the wanted state."""
        stored = self._records.stored(trie, rows)
        done = await self._store.pin(self._records.identities(trie, stored), pinned) if len(stored) else 0
        return done if pinned else len(rows)  # a block that is not on disk has no pin there
