"""Pins: prefixes that are never evicted, also after a restart if there is a disk tier.

A pin is made in this order, so that a crash never leaves a pin without its blocks:

    rows marked in the trie  ->  blocks written to disk  ->  pins in the disk tier's index  ->  the operator's answer

After a restart the rows of the pins in the index are marked again. The index drops a block's pin in the transaction
that drops the block, and keeps it where the block is written again. A long prefix is pinned in the index in several
transactions, from its first block on: a crash between two of them leaves a shorter prefix pinned.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping

from prefixd.base.errors import ExhaustedError, PreconditionError
from prefixd.base.long_work.steps import do_in_slices
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.moving.mover import Mover
from prefixd.cache.namespaces import Namespace
from prefixd.cache.sessions.durability import Durability
from prefixd_swap.tiers import StoreTier


class Pins:
    """Pins and unpins prefixes for operators.

    Args:
        mover: makes pins durable.
        durability: makes blocks durable.
    """

    def __init__(self, mover: Mover, durability: Durability) -> None:
        self._mover = mover
        self._placement = mover.placement
        self._durability = durability
        self._lock = asyncio.Lock()  # one change at a time: an unpin waits until the pin is durable

    async def pin(self, trie: Trie, path: Rows) -> str:
        """Pins the blocks of a prefix, from the first on; returns why the pin does not survive a restart, or "".

        The caller must not await anything between finding `path` and this call.

        Raises:
            ExhaustedError: its tenant may hold no more; nothing is pinned.
        """
        with self._placement.holds.hold("pin", trie, path):
            async with self._lock:
                self._mover.use.check_pin(trie, path)
                trie.pinned[path] = True
                await do_in_slices(self._mover.use.count_pinned(self._mover.tries))
                self._placement.touch(trie, path)  # expired bytes that the prefix needs are wanted again
                if self._mover.tiers.durable is None:
                    return "there is no disk tier; set disk.bytes"
                try:
                    await self._durability.persist(trie, path)
                except (ExhaustedError, PreconditionError) as error:
                    return str(error)
                return "" if await self._mover.disk.metadata.pin(trie, path, True) else self._why_not_durable()

    async def unpin(self, trie: Trie, path: Rows) -> tuple[int, str]:
        """Unpins blocks; returns how many were pinned, and why they are pinned again after a restart, or "".

        The caller must not await anything between finding `path` and this call.
        """
        with self._placement.holds.hold("unpin", trie, path):
            async with self._lock:
                pinned = path[trie.pinned[path]]
                trie.pinned[pinned] = False
                await do_in_slices(self._mover.use.count_pinned(self._mover.tries))
                durable = self._mover.tiers.durable is None or await self._mover.disk.metadata.pin(
                    trie, pinned[::-1], False
                )
        self._placement.sweep(trie, path)
        self._mover.changed.set()  # there may be room on disk now for blocks that wait
        return len(pinned), "" if durable else self._why_not_durable()

    def _why_not_durable(self) -> str:
        trouble = self._mover.tiers.troubles.of_tier(self._mover.tiers.require_durable())
        return trouble or "the disk tier lost some of the blocks meanwhile; pin what is left"


def restore_pins(store: StoreTier, known: Mapping[bytes, Namespace], trie_of: Callable[[Namespace], Trie]) -> int:
    """Marks the blocks that were pinned before the start; returns their number.

    Raises:
        StorageError: the store's index cannot be read.
    """
    keys: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for namespace, key in store.pins():
        keys[namespace].append(key)
    blocks = 0
    for identity in keys.keys() & known.keys():
        trie = trie_of(known[identity])
        rows = trie.find_all(known[identity].ordinal, b"".join(keys[identity]))
        rows = rows[rows >= 0]
        trie.pinned[rows] = True
        blocks += len(rows)
    return blocks
