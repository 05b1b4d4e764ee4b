"""Holds keep blocks, or their bytes in a tier, from being evicted.

A hold is an object with an owner. It ends when its scope is left (`with holds.hold(...)`) or when its owner ends it,
and `check_integrity` compares the trie's counters with the holds that exist, by owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import TracebackType

import numpy as np

from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.placement.tenant_use import HeldBytes
from prefixd.cache.rules import GroupMask
from prefixd_swap.tiers import Tier


class Hold:
    """Keeps blocks, and their bytes in a tier, until `end`.

    Attributes:
        owner: name of the holder: `lease 12-ab`, `request 7`, `write-back`.
        trie: the blocks' trie.
        rows: [m] different blocks.
        tier: where the bytes stay; None: only the blocks stay, wherever their bytes are.
        wanted: [m] KV groups whose bytes stay; None for all of them.
        counted: the tier in which the bytes count as held by their tenant, if the holder keeps them for as long as it
            likes. None for a hold that ends soon by itself.
    """

    __slots__ = ("_held_bytes", "_holds", "counted", "owner", "rows", "tier", "trie", "wanted")

    def __init__(
        self,
        holds: Holds,
        owner: str,
        trie: Trie,
        rows: Rows,
        tier: Tier | None,
        wanted: GroupMask | None,
        counted: Tier | None,
    ) -> None:
        self._holds: Holds | None = holds
        self.owner = owner
        self.trie = trie
        self.rows = rows
        self.tier = tier
        self.wanted = wanted
        self.counted = counted
        self._held_bytes = holds.held_bytes
        self._change(rows, wanted, begin=True)

    @property
    def ended(self) -> bool:
        """Whether `end` was called."""
        return self._holds is None

    def extend(self, rows: Rows, wanted: GroupMask | None = None) -> None:
        """Holds more blocks, added at the end, and their `wanted` KV groups; all by default.

        Raises:
            RuntimeError: the hold has ended: a defect of its owner.
        """
        if self._holds is None:
            raise RuntimeError(f"the hold of {self.owner} cannot be extended: it has ended")
        self._change(rows, wanted, begin=True)
        if self.wanted is not None or wanted is not None:
            self.wanted = np.concatenate((self._groups(self.rows, self.wanted), self._groups(rows, wanted)))
        self.rows = np.concatenate((self.rows, rows))

    def count_in(self, tier: Tier) -> None:
        """Counts the bytes from now on as held by their tenant in a tier."""
        if self._holds is not None and self.counted is None:
            self.counted = tier
            self._held_bytes.change(self.trie, tier, self.rows, self.wanted, begin=True)

    def release(self, blocks: slice, groups: int) -> GroupMask:
        """Releases the bytes of `groups`, a mask, of some blocks, but keeps the blocks.

        Returns, for each of these blocks, the groups that were held until now.
        """
        if self._holds is None or self.tier is None:
            return np.zeros(0, np.uint8)
        rows, wanted = self.rows[blocks], self._groups(self.rows, self.wanted).copy()
        released: GroupMask = wanted[blocks] & np.uint8(groups)
        wanted[blocks] &= ~np.uint8(groups)
        self.trie.release(rows, self.tier.level, released)
        if self.counted is not None:
            self._held_bytes.change(self.trie, self.counted, rows, released, begin=False)
        self.wanted = wanted  # another array: an audit may read the old one
        return released

    def shrink(self, blocks: int) -> None:
        """Keeps the first `blocks` blocks and releases the others."""
        if self._holds is None or blocks >= len(self.rows):
            return
        rows, wanted = self.rows[blocks:], None if self.wanted is None else self.wanted[blocks:]
        self.rows = self.rows[:blocks]
        self.wanted = None if self.wanted is None else self.wanted[:blocks]
        self._change(rows, wanted, begin=False)
        self._holds.swept(self.trie, rows, self.tier)

    def end(self) -> None:
        """Releases everything. A second call does nothing."""
        holds, self._holds = self._holds, None
        if holds is not None:
            self._change(self.rows, self.wanted, begin=False)
            holds.live.discard(self)
            holds.swept(self.trie, self.rows, self.tier)

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _groups(self, rows: Rows, wanted: GroupMask | None) -> GroupMask:
        return np.full(len(rows), self.trie.all_groups, np.uint8) if wanted is None else wanted

    def _change(self, rows: Rows, wanted: GroupMask | None, *, begin: bool) -> None:
        if self.tier is None:
            (self.trie.retain if begin else self.trie.unretain)(rows)
        elif begin:
            self.trie.hold(rows, self.tier.level, wanted)
        else:
            self.trie.unhold(rows, self.tier.level, wanted)
        if self.counted is not None:
            self._held_bytes.change(self.trie, self.counted, rows, wanted, begin=begin)


class Holds:
    """All holds of a cache.

    Args:
        swept: called with released blocks and the tier in which they were held; forgets those without bytes that have
            no other hold.
        held_bytes: counts the bytes that tenants hold.
    """

    def __init__(self, swept: Callable[[Trie, Rows, Tier | None], None], held_bytes: HeldBytes) -> None:
        self.live: set[Hold] = set()
        self.swept = swept
        self.held_bytes = held_bytes

    def hold(
        self,
        owner: str,
        trie: Trie,
        rows: Rows,
        tier: Tier | None = None,
        wanted: GroupMask | None = None,
        *,
        counted: Tier | None = None,
    ) -> Hold:
        """Begins a hold; the arguments are the attributes of `Hold`.

        Bytes that are still being copied are held from the moment they arrive.
        """
        hold = Hold(self, owner, trie, rows, tier, wanted, counted)
        self.live.add(hold)
        return hold

    def __iter__(self) -> Iterator[Hold]:
        return iter(self.live)

    def blocks_by_owner(self) -> Counter[str]:
        """The number of blocks that each owner holds."""
        blocks: Counter[str] = Counter()
        for hold in self.live:
            blocks[hold.owner] += len(hold.rows)
        return blocks
