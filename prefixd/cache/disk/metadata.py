"""What the index of the durable tier holds beside blocks: what namespaces stand for, and which blocks are pinned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import cast

import msgspec
import numpy as np

from prefixd.base.rules import to_fields
from prefixd.cache.disk.records import DiskRecords
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.namespaces import NamespaceRegistry
from prefixd.cache.placement.movement import to_the_end
from prefixd.cache.placement.placement import Placement
from prefixd_swap import StorageError
from prefixd_swap.tiers import StoreTier

_PINNED_AT_ONCE = 1 << 13


class DiskMetadata:
    """Keeps namespaces and pins.

    Args:
        placement: what is where.
        namespaces: what there is by now.
        records: the blocks' names on disk.
        still: nothing else changes the store within it.
        failed: told of an error.
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
        """Namespaces, by id, that the index knows."""

    async def save_namespaces(self, trie: Trie, rows: Rows) -> None:
        """Makes durable what the blocks' namespaces stand for, before the first block of each, for who has the lock."""
        for ordinal in np.unique(trie.namespace[rows]).tolist():
            namespace = self._namespaces.at(ordinal)
            if namespace.id not in self.saved:
                await self._store.put_namespace(
                    namespace.id, msgspec.msgpack.encode(namespace.spec, enc_hook=to_fields)
                )
                self.saved.add(namespace.id)

    async def forget_namespaces(self, ids: Sequence[bytes]) -> None:
        """Removes from the index what namespaces stood for, but for those that are known again. If that fails, the next
        start tries again."""
        async with self._still():
            gone = [identity for identity in ids if identity in self.saved and identity not in self._namespaces]
            if gone and self._tiers.writes:
                self.saved.difference_update(gone)
                try:
                    await to_the_end(self._store.remove_namespaces(gone))
                except StorageError as error:
                    self._failed(error)

    async def pin(self, trie: Trie, rows: Rows, pinned: bool) -> bool:
        """Makes durable that blocks are pinned, or that they are not any more; whether it is, of all of them.

        Pinned blocks that have yet to be written, or are written again, are made durable as such with that.
        """
        return await to_the_end(self._pin_all(trie, rows, pinned))

    async def _pin_all(self, trie: Trie, rows: Rows, pinned: bool) -> bool:
        durable = 0
        for start in range(0, len(rows), _PINNED_AT_ONCE):  # parents first, so that what survives a crash is a prefix
            async with self._still():
                if not self._store.takes:
                    break
                try:
                    durable += await self.pin_locked(trie, rows[start : start + _PINNED_AT_ONCE], pinned)
                except StorageError as error:
                    self._failed(error)
                    break
        return durable == len(rows)

    async def pin_locked(self, trie: Trie, rows: Rows, pinned: bool) -> int:
        """As `pin`, for who has the lock; how many of `rows` are as they should be."""
        stored = self._records.stored(trie, rows)
        done = await self._store.pin(self._records.identities(trie, stored), pinned) if len(stored) else 0
        return done if pinned else len(rows)  # what is not on disk has no pin there
