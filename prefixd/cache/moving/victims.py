"""Chooses the blocks to evict from a tier, by the eviction policy over all tries, leaves first.

The tables are scanned in slices, and others change the tries between two slices. So the candidates are checked and
scored again at the end, and the victims chosen, in one turn of the event loop. The result is correct when it is
returned, and stays so until the caller awaits something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from prefixd.base.long_work.pacer import Pacer, give_way
from prefixd.cache.index.scan import SCANNED_AT_ONCE, LowestRows, Scores, slices
from prefixd.cache.index.trie import LOCAL_TIERS, NO_SLOT, REMOTE, TIERS, Rows, Trie, lasting_copies
from prefixd.cache.placement.tenant_use import Losses
from prefixd.cache.rules import GroupMask
from prefixd_swap import EvictionPolicy, choose_victims

# A row of any trie as one number: the trie's ordinal above the row.
_ROW_BITS = 40
_ROW_MASK = (1 << _ROW_BITS) - 1

Limits = Callable[[], Losses | None]
"""Returns what each tenant may lose as of now; None: everything."""


def no_limits() -> None:
    """Limits under which each tenant may lose all its blocks."""


_SPARE = 64  # candidates beyond twice the wanted number, since some may not be evicted any more at the end


async def find_expired(
    tries: Sequence[Trie], tier: int, want: int, *, likely: bool = False, limits: Limits = no_limits
) -> list[tuple[Trie, Rows, GroupMask]]:
    """Up to `want` blocks of each trie with bytes in `tier` that only shorter prefixes need and that are not held, the
    least recently used first, and the groups of each that may go.

    Args:
        tries: all tries, by ordinal.
        tier: where.
        want: how many of each trie.
        likely: include bytes that likely prefixes need, if a longer prefix does not need them.
        limits: what each tenant may lose.
    """
    groups_that_go = _unheld if likely else _expired
    pacer = Pacer(SCANNED_AT_ONCE)
    lowest: list[tuple[Trie, LowestRows]] = []
    losses = limits()
    for trie in tries:
        if not trie.has_rules:
            continue
        lowest.append((trie, LowestRows(2 * want + _SPARE)))
        for part in slices(trie.rows):
            bytes_here = trie.there[part, tier]
            rows = part.start + np.flatnonzero(bytes_here if likely else trie.expired[part] & bytes_here)
            rows = rows[groups_that_go(trie, rows, tier) != 0]
            if losses is not None:
                rows = rows[losses.left[losses.owners(trie, rows)] > 0]
            lowest[-1][1].offer(rows, trie.last_used[rows], rows)
            await pacer.worked(part.stop - part.start)
    found, losses = [], limits()
    for trie, candidates in lowest:
        rows = candidates.ascending()
        groups = groups_that_go(trie, rows, tier)
        rows, groups = rows[groups != 0][:want], groups[groups != 0][:want]
        if losses is not None:
            goes = losses.first(trie, rows, groups)
            rows, groups = rows[goes], groups[goes]
        if len(rows):
            found.append((trie, rows, groups))
    return found


def _expired(trie: Trie, rows: Rows, tier: int) -> GroupMask:
    """[len(rows)]: the groups of each block with bytes in `tier` that only shorter prefixes need and are not held."""
    return _without_held(trie, rows, tier, trie.expired[rows] & trie.there[rows, tier])


def _unheld(trie: Trie, rows: Rows, tier: int) -> GroupMask:
    """[len(rows)]: the groups of each block with bytes in `tier` that longer prefixes do not need and are not held."""
    groups = np.where(trie.pinned[rows], np.uint8(0), trie.there[rows, tier] & np.uint8(trie.partial_groups))
    return _without_held(trie, rows, tier, groups)


def _without_held(trie: Trie, rows: Rows, tier: int, groups: GroupMask) -> GroupMask:
    for group in trie.groups:
        groups &= ~np.where(trie.holds[rows, tier, group.bit] > 0, np.uint8(group.mask), np.uint8(0))
    return groups


async def can_free(
    tries: Sequence[Trie],
    tier: int,
    slots: int,
    *,
    demotable: bool,
    weigh: Callable[[int], int] = lambda nbytes: 1,
    losses: Losses | None = None,
) -> bool:
    """Whether evictions can free `slots` in `tier`. `weigh` is the weight of a part by its bytes: by default 1, with
    `losses` the bytes of its slot.

    An estimate, since others change the tries between two slices of the scan. The scan ends when it has found enough.
    """
    bit, pacer = np.uint8(1 << tier), Pacer(SCANNED_AT_ONCE)
    left = None if losses is None else np.maximum(losses.left, 0)
    for trie in list(tries):
        weights = np.array([weigh(nbytes) for nbytes in trie.part_bytes], np.int64)
        for part in slices(trie.rows):
            if slots <= 0:
                return True
            rows = part.start + np.flatnonzero(trie.any_part[part] & bit)
            goes = ~trie.held(rows, tier)
            if not demotable:
                goes &= (trie.any_part[rows] != bit) | ((trie.keep[rows] == 0) & ~trie.pinned[rows])
            freed = np.zeros(len(rows), np.int64)
            freed[goes] = (trie.slots[rows[goes], tier] != NO_SLOT) @ weights
            if trie.has_rules:
                groups = _unheld(trie, rows[~goes], tier)
                freed[~goes] = ((groups[:, None] & trie.part_mask) != 0) @ weights
            if losses is None or left is None:
                slots -= int(freed.sum())
            else:
                by_owner = np.bincount(losses.owners(trie, rows), weights=freed, minlength=len(left)).astype(np.int64)
                slots -= int(np.minimum(by_owner, left).sum())
                left -= np.minimum(by_owner, left)
            await pacer.worked(part.stop - part.start)
    return slots <= 0


@dataclass(frozen=True, slots=True)
class Search:
    """Which blocks of a tier are candidates, and in which order they go.

    Attributes:
        tier: the level of the tier that needs room.
        policy: gives every block a score; the lowest goes first.
        demotable: a block's last copy may go too, since it is written a tier down before.
        spare_copies: exclude blocks that are in a tier above as well.
        now_s: the time, for priorities; blocks of lower priority go first.
    """

    tier: int
    policy: EvictionPolicy
    demotable: bool
    spare_copies: bool = False
    now_s: float = 0.0

    @property
    def spared(self) -> int:
        """The tiers, a bit each, with copies that exclude a block."""
        return (1 << self.tier) - 1 if self.spare_copies else 0

    def find(self, trie: Trie, among: Rows | slice, losses: Losses | None) -> tuple[Rows, Scores]:
        """The rows in `among` that may be evicted, and their scores."""
        rows = trie.evictable(self.tier, demotable=self.demotable, among=among)
        rows = rows[(trie.any_part[rows] & np.uint8(self.spared)) == 0]
        if losses is not None:
            rows = rows[losses.may_go(trie, rows)]
        return rows, self.policy.scores(trie, rows, self.tier)


async def find_victims(
    tries: Sequence[Trie], search: Search, want: int, limits: Limits = no_limits
) -> list[tuple[Trie, Rows]]:
    """The `want` blocks that the policy evicts from a tier first, by trie, each trie's leaves before their parents.

    Blocks of a lower priority go before all others.

    Args:
        tries: all tries, by ordinal.
        search: which blocks are candidates.
        want: how many, at most some thousand. Fewer are returned if no more may go, if the best candidates belong to
            tenants that may lose no more, or if other evictions have freed enough meanwhile.
        limits: what each tenant may lose.
    """
    if want <= 0:
        return []
    pacer = Pacer(SCANNED_AT_ONCE)
    while True:
        lowest = _LowestByPriority(2 * want + _SPARE, search.now_s)
        losses = limits()
        for trie in list(tries):
            for part in slices(trie.rows):
                rows, scores = search.find(trie, part, losses)
                lowest.offer(trie, rows, scores)
                await pacer.worked(part.stop - part.start)
        candidates = lowest.ascending()
        await give_way()
        losses = limits()
        if losses is not None and losses.wanted is not None and losses.wanted <= 0:  # other evictions have freed enough
            return []
        chosen = _Choice(search, tries, losses, lowest.has_priorities).choose(want, candidates)
        if len(chosen) or not len(candidates):  # else all candidates were taken meanwhile: scan again
            return [
                (trie, chosen[mine] & _ROW_MASK)
                for trie in tries
                if (mine := chosen >> _ROW_BITS == trie.ordinal).any()
            ]


class _LowestByPriority:
    """As `LowestRows`, for several tries; blocks of lower priority come first.

    Args:
        keep: how many.
        now_s: the time, for priorities.
    """

    def __init__(self, keep: int, now_s: float) -> None:
        self._keep = keep
        self._now_s = now_s
        self._lowest = {0: LowestRows(keep)}
        self.has_priorities = False

    def offer(self, trie: Trie, rows: Rows, scores: Scores) -> None:
        """Takes in m rows, with one score each."""
        ids = rows | (trie.ordinal << _ROW_BITS)
        if not trie.has_priorities:
            self._lowest[0].offer(ids, scores, ids)
            return
        self.has_priorities = True
        priorities = trie.priorities(rows, self._now_s)
        for priority in np.unique(priorities).tolist():
            lowest, mine = self._lowest.setdefault(priority, LowestRows(self._keep)), priorities == priority
            lowest.offer(ids[mine], scores[mine], ids[mine])

    def ascending(self) -> Rows:
        """The identities (row and trie ordinal), by priority, score and number."""
        ordered = [self._lowest[priority].ascending() for priority in sorted(self._lowest)]
        return np.concatenate(ordered)[: self._keep]


class _Choice:
    """Chooses among candidates, and the parents that become leaves, in one turn of the event loop.

    A block is one number here: the trie's ordinal above the row.

    Args:
        search: which blocks are candidates.
        tries: all tries, by ordinal.
        losses: what each tenant may lose.
        has_priorities: whether any block has a priority.
    """

    def __init__(self, search: Search, tries: Sequence[Trie], losses: Losses | None, has_priorities: bool) -> None:
        self._search = search
        self._tries = tries
        self._losses = losses
        self._views = [_Columns(trie, search.tier) for trie in tries]
        self._gone: dict[int, int] = {}  # children that leave this tier as victims, by parent
        self._vanished: dict[int, int] = {}  # children that had no other copy and are not demoted
        self._priorities: dict[int, int] | None = {} if has_priorities else None
        self._costs: dict[int, tuple[int, int]] = {}  # the owner's ordinal, and bytes
        self._left = [] if losses is None else losses.left.tolist()
        self._wanted = None if losses is None else losses.wanted

    def choose(self, want: int, candidates: Rows) -> Rows:
        """Chooses up to `want` blocks, children before parents."""
        ids: list[Rows] = [np.empty(0, np.int64)]
        scores: list[Scores] = [np.empty(0, np.float64)]
        for trie in self._tries:
            mine = np.sort(candidates[candidates >> _ROW_BITS == trie.ordinal] & _ROW_MASK)
            rows, its_scores = self._search.find(trie, mine, self._losses)
            ids.append(rows | (trie.ordinal << _ROW_BITS))
            scores.append(its_scores)
            if self._priorities is not None:
                priorities = trie.priorities(rows, self._search.now_s).tolist()
                self._priorities.update(zip(ids[-1].tolist(), priorities, strict=True))
            if self._losses is not None:
                self._costs.update(_costs(trie, rows, self._losses))
        chosen = choose_victims(
            *(want, np.concatenate(ids), np.concatenate(scores), self._reveal),
            rank=None if self._priorities is None else self._rank,
            allow=None if self._losses is None else self._allow,
        )
        return np.array(chosen, np.int64)

    def _reveal(self, identity: int) -> tuple[int, float] | None:
        """The parent that may be evicted after this block, and its score."""
        search, ordinal, row = self._search, identity >> _ROW_BITS, identity & _ROW_MASK
        trie, columns = self._tries[ordinal], self._views[ordinal]
        bit, leaves = 1 << search.tier, 1
        vanishes = columns.any_part[row] == bit and not (search.demotable and columns.wanted(row))
        while True:
            parent = columns.parent[row]
            if parent < 0:
                return None
            up = parent | (ordinal << _ROW_BITS)
            self._gone[up] = self._gone.get(up, 0) + leaves
            self._vanished[up] = self._vanished.get(up, 0) + vanishes
            protected = columns.keep[parent] or columns.pinned[parent] or columns.children[parent] > self._vanished[up]
            some = columns.any_part[parent]
            if some or protected:
                break
            row, leaves = parent, 0  # it has no copy, so it is removed with the last of its children
        if self._gone[up] < columns.tier_children[parent] or not some & bit or columns.is_held(parent):
            return None
        if some & search.spared:
            return None
        may_stay = not columns.is_last(parent) or (search.demotable and columns.wanted(parent))
        if protected if not may_stay else not leaves:  # one that may stay was revealed by the last child with a copy
            return None
        return up, search.policy.score(trie, parent, search.tier)

    def _rank(self, identity: int) -> int:
        """The block's priority."""
        priorities = {} if self._priorities is None else self._priorities
        if identity not in priorities:
            trie, row = self._tries[identity >> _ROW_BITS], np.array([identity & _ROW_MASK])
            priorities[identity] = int(trie.priorities(row, self._search.now_s)[0])
        return priorities[identity]

    def _allow(self, identity: int) -> bool:
        """Whether its owner may lose the block; counts it as lost if so."""
        if self._wanted is not None and self._wanted <= 0:
            return False
        if identity not in self._costs and self._losses is not None:
            self._costs[identity] = self._losses.cost(self._tries[identity >> _ROW_BITS], identity & _ROW_MASK)
        owner, nbytes = self._costs[identity]
        if nbytes > self._left[owner]:
            return False
        self._left[owner] -= nbytes
        if self._wanted is not None:
            self._wanted -= nbytes
        return True


def _costs(trie: Trie, rows: Rows, losses: Losses) -> Iterator[tuple[int, tuple[int, int]]]:
    """The identity of each row with its owner and the bytes of the block in the tier."""
    costs = zip(losses.owners(trie, rows).tolist(), losses.bytes_of(trie, rows).tolist(), strict=True)
    return zip((rows | (trie.ordinal << _ROW_BITS)).tolist(), costs, strict=True)


class _Columns:
    """A trie's columns as memoryviews: access by row takes a third of numpy's time.

    Valid for one turn of the event loop, since columns grow.
    """

    __slots__ = (
        *("any_part", "children", "keep", "parent", "pinned", "tier_children"),
        *("_elsewhere", "_expired", "_holds", "_lasting", "_other_tiers", "_remote", "_there"),
    )

    def __init__(self, trie: Trie, tier: int) -> None:
        self.any_part = trie.any_part.data
        self.children = trie.children.data
        self.keep = trie.keep.data
        self.parent = trie.parent.data
        self.pinned = trie.pinned.data
        self.tier_children = trie.tier_children[:, tier].data
        self._there = trie.there[:, tier].data
        self._expired = trie.expired.data
        self._lasting = lasting_copies(tier)
        self._elsewhere = [trie.there[:, other].data for other in range(TIERS) if other not in (tier, REMOTE)]
        self._remote = trie.there[:, REMOTE].data
        self._holds = [trie.holds[:, tier, group].data for group in range(trie.holds.shape[2])]
        self._other_tiers = LOCAL_TIERS & ~(1 << tier)

    def is_held(self, row: int) -> bool:
        """Whether any KV group of the block is held in the tier."""
        return any(holds[row] for holds in self._holds)

    def wanted(self, row: int) -> int:
        """`Trie.wanted` for one row."""
        return self._there[row] & ~self._expired[row]

    def is_last(self, row: int) -> bool:
        """`Trie.last_copies` for one row."""
        if self.pinned[row] and not self._lasting:
            return True
        lacking = self.wanted(row)
        for there in self._elsewhere:
            lacking &= ~there[row]
        others = self._other_tiers
        if not self.pinned[row]:
            lacking &= ~self._remote[row]
            others |= 1 << REMOTE
        return bool(lacking) or not self.any_part[row] & others
