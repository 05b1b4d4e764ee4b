"""Chooses whole pages to evict if blocks of other sizes take the room: the pages whose blocks are worth least.

A page has slots of one size. If a tier holds blocks of several sizes, a page of one size may have to be emptied to make
room for another size (Jenga, sections 4.3 and 5.4). Each slot in the tier gets a worth from the eviction policy, and
`swap/pages` chooses the single slots, or whole pages, that make room at the least cost.

Blocks of a prompt that was used as a whole are worth the same; the last block goes first. A page may contain a block
with children in other pages. It is evicted too: with LRU its children are worth no more, and if its last copy is
dropped, its row stays in the trie as long as they do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd.base.long_work.pacer import Pacer
from prefixd.base.long_work.steps import in_thread
from prefixd.cache.index.scan import SCANNED_AT_ONCE, slices
from prefixd.cache.index.trie import DISK, NO_SLOT, Rows, Trie
from prefixd.cache.moving.victims import Limits, Search, no_limits
from prefixd.cache.placement.tenant_use import Losses
from prefixd_swap import Victims, round_to_slot
from prefixd_swap.pages.page_eviction import Allow

_ATTEMPTS = 3
_BARE_AT_ONCE = 256
"""Records without bytes that are dropped in one call, for each slice: some milliseconds on the event loop."""

Choose = Callable[
    [int, int, npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.bool_], Allow | None],
    Victims,
]
"""(bytes of a part, how many, slots, their worth, which may go, whether they may go together): which of them to evict;
see `swap/page_eviction`."""


def has_other_sizes(tries: Sequence[Trie], tier: int, sizes: Sequence[int]) -> bool:
    """Whether `tier` may hold slots of several sizes, including those for parts of `sizes` bytes."""
    wanted = {round_to_slot(size) for size in sizes}
    held = {
        round_to_slot(nbytes)
        for trie in tries
        if np.bitwise_or.reduce(trie.any_part[: trie.rows]) & (1 << tier)
        for nbytes in trie.part_bytes
    }
    return len(wanted | held) > 1 or (tier == DISK and any(trie.has_coded for trie in tries))


async def find_page_victims(
    tries: Sequence[Trie],
    search: Search,
    sizes: Sequence[int],
    want: int,
    choose: Choose,
    for_thread: Callable[[], Choose] | None = None,
    limits: Limits = no_limits,
    singly: bool = True,
) -> list[tuple[Trie, Rows]]:
    """The blocks that must leave a tier to make room for `want` blocks with parts of `sizes` bytes, by trie, children
    before their parents.

    The first ones are blocks without children that have only a record without bytes in the tier: they free no room, so
    no other search would choose them. A trie may occur twice.

    Large tables are read in slices, and the choice is made in a thread; others change the tries meanwhile. So the
    victims are checked at the end, and chosen again if some may not be evicted any more. The returned blocks may be
    evicted at that moment; after some attempts they may be fewer than wanted.

    Args:
        tries: all tries, by ordinal.
        search: which blocks are candidates.
        sizes: bytes of each part of a wanted block.
        want: how many blocks.
        choose: the tier's own choice among slots.
        for_thread: returns a choice among the slots as of now for use in a thread; `choose` by default.
        limits: what each tenant may lose.
        singly: whether `choose` chooses slots of the wanted size one by one.

    Raises:
        ExhaustedError: no thread can be started.
    """

    def pick(slots: _Slots, choose: Choose) -> list[tuple[Trie, Rows, Rows, Rows]]:
        return slots.pick(Counter(map(round_to_slot, sizes)), want, choose, singly)

    for attempts_left in reversed(range(_ATTEMPTS)):
        slots = await _read_slots(tries, search, limits())
        if not len(slots.slots):
            chosen = []
        elif slots.interrupted:
            chosen = await in_thread(partial(pick, slots, choose if for_thread is None else for_thread()))
        else:
            chosen = pick(slots, choose)
        found, all_may_go = _still_going(chosen, search, limits())
        if all_may_go or not attempts_left:
            break
    bare = [(trie, rows[_is_bare(trie, rows, search.tier) & _may_go(search, trie, rows)]) for trie, rows in slots.bare]
    return [(trie, rows) for trie, rows in (*bare, *found) if len(rows)]


def _still_going(
    chosen: Sequence[tuple[Trie, Rows, Rows, Rows]], search: Search, losses: Losses | None
) -> tuple[list[tuple[Trie, Rows]], bool]:
    """The chosen rows (with parts and slots) that may be evicted now, children before parents; whether that is all."""
    found, all_may_go = [], True
    for trie, rows, parts, slots in chosen:
        fine = _may_go(search, trie, rows) & (trie.slots[rows, search.tier, parts] == slots)
        going = np.unique(rows[fine])
        if losses is not None and not losses.take(trie, going):  # other evictions have used it up meanwhile
            going = np.array([row for row in going.tolist() if losses.take(trie, np.array([row]))], np.int64)
            fine &= np.isin(rows, going)
        all_may_go &= bool(fine.all())
        found.append((trie, going[np.argsort(-trie.depth[going], kind="stable")]))
    return found, all_may_go


def _is_bare(trie: Trie, rows: Rows, tier: int) -> npt.NDArray[np.bool_]:
    """[len(rows)]: which blocks have a record without bytes in `tier`, and no children."""
    is_bare: npt.NDArray[np.bool_] = (trie.any_part[rows] & np.uint8(1 << tier)) != 0
    is_bare &= (trie.children[rows] == 0) & (trie.slots[rows, tier] == NO_SLOT).all(axis=1)
    return is_bare


def _may_go(search: Search, trie: Trie, rows: Rows) -> npt.NDArray[np.bool_]:
    """[len(rows)]: which blocks may lose their copy in the tier."""
    tier = search.tier
    last = trie.last_copies(rows, tier)
    goes: npt.NDArray[np.bool_] = ~trie.held(rows, tier)
    stays = (trie.keep[rows] > 0) | trie.pinned[rows]
    if search.demotable:
        stays &= trie.wanted(rows, tier) == 0
    goes &= ~(last & stays)
    goes &= (trie.any_part[rows] & np.uint8(search.spared)) == 0
    return goes


@dataclass(frozen=True, slots=True)
class _Slots:
    """The n allocated slots of a tier and their blocks, as a snapshot that a thread may read."""

    interrupted: bool
    """Whether others could change the tries while they were read."""
    tries: list[Trie]
    bare: list[tuple[Trie, Rows]]
    """The blocks with only a record in the tier, see `_is_bare`."""
    left: npt.NDArray[np.int64] | None
    """By owner, bytes that may go; None: all."""
    slots: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    depths: npt.NDArray[np.int32]
    may_go: npt.NDArray[np.bool_]
    rows: Rows
    parts: Rows
    places: Rows
    """Of each row, the position of its trie in `tries`."""
    priorities: npt.NDArray[np.int8]
    sizes: npt.NDArray[np.int64]
    owners: Rows
    row_bytes: npt.NDArray[np.int64]
    """All bytes of the slot's block in the tier; set, as the owners, only if there are limits."""

    def pick(
        self, sizes: Mapping[int, int], want: int, choose: Choose, singly: bool
    ) -> list[tuple[Trie, Rows, Rows, Rows]]:
        """Chooses the slots to free for `want` blocks; `sizes` is the number of parts by size.

        Returns, by trie, the rows, parts and slots.
        """
        worth = _worth(self.scores, self.depths, self.priorities)
        evicted = np.zeros(len(self.slots), np.bool_)
        for size, parts in sizes.items():
            evicted[self._pick_size(size, parts * want, choose, worth, evicted, singly)] = True
        found = []
        for place, trie in enumerate(self.tries):
            mine = np.flatnonzero(evicted & (self.places == place))
            if len(mine):
                found.append((trie, self.rows[mine], self.parts[mine], self.slots[mine]))
        return found

    def _pick_size(
        self,
        size: int,
        count: int,
        choose: Choose,
        worth: npt.NDArray[np.float64],
        evicted: npt.NDArray[np.bool_],
        singly: bool,
    ) -> npt.NDArray[np.int64]:
        """The positions of slots to evict for `count` slots of one size, besides those `evicted`."""
        chosen = np.empty(0, np.int64)
        levels = np.unique(self.priorities[self.may_go]).tolist()
        for level in levels:  # evict from a higher priority only if the lower ones do not free enough
            may_go = self.may_go & (self.priorities <= level) if len(levels) > 1 else self.may_go
            allow = None
            if self.left is not None:
                allow = _Allowance(self, self.left, evicted)
                may_go = self._affordable(size, worth, may_go, allow.left) if singly else may_go
            victims = choose(size, count, self.slots, worth, may_go, allow)
            chosen = victims.positions
            if victims.slots >= count:
                break
        return chosen

    def _affordable(
        self, size: int, worth: npt.NDArray[np.float64], may_go: npt.NDArray[np.bool_], left: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """[n]: `may_go` without the slots of this size beyond those of least worth that their owner may lose.

        So the choice does not ask for them one by one.
        """
        may_go = may_go.copy()
        alone = np.flatnonzero(may_go & (self.sizes == size))
        for owner in np.unique(self.owners[alone]).tolist():
            mine = alone[self.owners[alone] == owner]
            most = int(left[owner]) // size
            if most < len(mine):
                may_go[mine[np.argsort(worth[mine], kind="stable")][max(most, 0) :]] = False
        return may_go


class _Allowance:
    """Decides, one call after the other, whether slots may be evicted within the limits of their owners.

    Args:
        slots: all slots.
        left: by owner, bytes that may go.
        evicted: slots that are evicted already.
    """

    def __init__(self, slots: _Slots, left: npt.NDArray[np.int64], evicted: npt.NDArray[np.bool_]) -> None:
        self.left = left.copy()
        whose = slots.rows * len(slots.tries) + slots.places
        _, first, self._block = np.unique(whose, return_index=True, return_inverse=True)  # by slot, its block
        self._owner, self._nbytes = slots.owners[first], slots.row_bytes[first]
        self._gone = np.zeros(len(first), np.bool_)
        self(np.flatnonzero(evicted))

    def __call__(self, positions: npt.NDArray[np.int64]) -> bool:
        """Whether the blocks of these slots may be evicted; counts them as evicted if so."""
        blocks = np.unique(self._block[positions])
        blocks = blocks[~self._gone[blocks]]
        owners = self._owner[blocks]
        nbytes = np.bincount(owners, weights=self._nbytes[blocks], minlength=len(self.left)).astype(np.int64)
        if (nbytes > self.left)[owners].any():
            return False
        self.left -= nbytes
        self._gone[blocks] = True
        return True


async def _read_slots(tries: Sequence[Trie], search: Search, losses: Losses | None) -> _Slots:
    """Reads the allocated slots of a tier in slices."""
    tier = search.tier
    bit, pacer, scanned = np.uint8(1 << tier), Pacer(SCANNED_AT_ONCE), 0
    nothing = np.empty(0, np.int64)
    pieces: list[tuple[npt.NDArray[Any], ...]] = [
        (
            *(nothing, np.empty(0), np.empty(0, np.int32), np.empty(0, np.bool_), nothing, nothing, nothing),
            *(np.empty(0, np.int8), nothing, nothing, nothing),
        )
    ]
    bare: list[tuple[Trie, Rows]] = []
    for place, trie in enumerate(tries):
        for scan in slices(trie.rows):
            rows = scan.start + np.flatnonzero(trie.any_part[scan] & bit)
            goes, depths = _may_go(search, trie, rows), trie.depth[rows]
            owners = row_bytes = np.zeros(len(rows), np.int64)
            if losses is not None:
                owners, row_bytes = losses.owners(trie, rows), losses.bytes_of(trie, rows)
                goes &= row_bytes <= losses.left[owners]
            bare.append((trie, rows[_is_bare(trie, rows, tier)][:_BARE_AT_ONCE]))
            scores = search.policy.scores(trie, rows, tier)
            priorities = trie.priorities(rows, search.now_s) if trie.has_priorities else np.zeros(len(rows), np.int8)
            coded = trie.stored_slots_bytes(rows) if trie.has_coded and tier == DISK else None
            for part in range(len(trie.part_bytes)):
                slots = trie.slots[rows, tier, part]
                at = np.flatnonzero(slots != NO_SLOT)
                whose = np.full(len(at), part), np.full(len(at), place)
                size = np.full(len(at), round_to_slot(trie.part_bytes[part]))
                if coded is not None:
                    size = coded[at, part]
                pieces.append(
                    (
                        *(slots[at], scores[at], depths[at], goes[at], rows[at], *whose),
                        *(priorities[at], size, owners[at], row_bytes[at]),
                    )
                )
            scanned += scan.stop - scan.start
            await pacer.worked(scan.stop - scan.start)
    interrupted = scanned >= SCANNED_AT_ONCE

    def joined() -> _Slots:
        columns = map(np.concatenate, zip(*pieces, strict=True))
        return _Slots(interrupted, list(tries), bare, None if losses is None else losses.left, *columns)

    return await in_thread(joined) if interrupted else joined()


def _worth(
    scores: npt.NDArray[np.float64], depths: npt.NDArray[np.int32], priorities: npt.NDArray[np.int8]
) -> npt.NDArray[np.float64]:
    """[n] numbers that order slots by priority, then score, then depth: the deeper block is worth less."""
    order = np.lexsort((scores, priorities)) if priorities.any() else np.argsort(scores)
    ascending, levels = scores[order], priorities[order]
    rank = np.zeros(len(scores), np.int64)
    rank[order[1:]] = np.cumsum((ascending[1:] != ascending[:-1]) | (levels[1:] != levels[:-1]))
    deepest = int(depths.max(initial=0))
    return (rank * (deepest + 1) + (deepest - depths)).astype(np.float64)
