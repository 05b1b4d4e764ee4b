"""Chooses slots to evict for slots of a given size: single slots of that size, or whole pages of other sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from prefixd_swap.pages.page_size import SHARE
from prefixd_swap.pages.page_table import EMPTY, Bools, Int64s, Pages
from prefixd_swap.pages.pages import PageAllocator
from prefixd_swap.slots import round_to_slot

Worths = npt.NDArray[np.float64]

Allow = Callable[[Int64s], bool]
"""Called once for each slot or page in eviction order, with the positions of its slots; tells whether they may be
evicted together with those that it allowed before."""


@dataclass(frozen=True, slots=True)
class Victims:
    """Slots to evict."""

    positions: Int64s
    """[m] positions in the given `offsets`, ascending."""
    slots: int
    """Slots of the wanted size that this frees; fewer than wanted if no more can be evicted. After a change of the page
    size or a restart, a page may free one slot less; then choose again."""


class ChooseVictims(Protocol):
    """`choose_victims` of one tier's pages."""

    def __call__(
        self,
        nbytes: int,
        count: int,
        offsets: Int64s,
        worth: Worths,
        evictable: Bools | None = None,
        allow: Allow | None = None,
        /,
    ) -> Victims: ...


def choose_victims(
    pages: PageAllocator,
    nbytes: int,
    count: int,
    offsets: Int64s,
    worth: Worths,
    evictable: Bools | None = None,
    allow: Allow | None = None,
    *,
    pages_alone: bool = False,
) -> Victims:
    """Choose among the slots at `offsets`, so that `count` more slots for `nbytes` bytes each become free.

    A slot of the wanted size is evicted alone. A page of another size is evicted whole, if all its slots are evictable;
    its worth is the worth of its most valuable slot (Jenga, section 5.4). Slots and pages are evicted in order of
    worth, slots before pages of equal worth; if the last page frees more than was missing, chosen slots are kept after
    all. So at most `count` slots and one page are evicted (and the rests of the pages, if the wanted size leaves one).

    While free slots in pages of other sizes exceed 1/32 of the capacity, pages at most half full are evicted first:
    those sizes may never be requested again. Not if `pages_alone`.

    Example: 2 slots of 64 KiB are wanted; slots of 64 KiB are worth 5 and 9, and a page of 128 KiB with slots of 4 KiB
    is worth 7. The first slot and the page are chosen, which gives 3 slots; then the slot is kept after all.

    Args:
        offsets: int64 [n], allocated slots, each once. A page with a slot that is not given is not evicted whole.
        worth: float64 [n], finite; the lowest is evicted first. A slot that must be evicted after others has at least
            their worth.
        evictable: bool [n], the slots that may be evicted; all by default.
        allow: see `Allow`.
        pages_alone: choose whole pages alone, of the wanted size, too (Jenga's step 3).

    Raises:
        MemoryMisuseError: `nbytes` is not positive, or an offset is in no range.
    """
    slot = round_to_slot(nbytes)
    may = np.arange(len(offsets)) if evictable is None else np.flatnonzero(evictable)
    if count <= 0 or not len(may) or not pages.slots_per_page(slot):
        return Victims(np.zeros(0, np.int64), 0)
    page, worth = pages.pages_of(offsets[may]), worth[may]
    now = pages.pages()
    singles = np.flatnonzero(((now.slot_bytes == slot) & now.is_open & (not pages_alone))[page])
    if len(singles) > count and allow is None:
        singles = singles[np.argpartition(worth[singles], count - 1)[:count]]
    whole = _Whole(pages, now, slot, page, worth, pages_alone)
    worths = np.concatenate([worth[singles], whole.worth])
    gains = np.concatenate([np.ones(len(singles), np.int64), whole.gain])
    first = np.concatenate([np.ones(len(singles), np.bool_), ~whole.sparse])
    order = np.lexsort((np.arange(len(worths)), worths, first))
    if allow is not None:
        order = _allowed(order, count, gains, singles, whole, page, lambda inside: allow(may[inside]))
    reached = np.cumsum(gains[order])
    chosen = order[: int(np.searchsorted(reached, count)) + 1]
    total = int(reached[len(chosen) - 1]) if len(chosen) else 0
    taken = chosen[chosen < len(singles)]
    spare = min(max(total - count, 0), len(taken))
    kept = taken[: len(taken) - spare]
    gone = np.zeros(len(now), np.bool_)
    for number in chosen[chosen >= len(singles)].tolist():
        gone[whole.members(number - len(singles))] = True
    evicted = gone[page]
    evicted[singles[kept]] = True
    return Victims(may[evicted], total - spare)


def _allowed(
    order: Int64s, count: int, gains: Int64s, singles: Int64s, whole: _Whole, page: Int64s, allow: Allow
) -> Int64s:
    """The entries of `order` that `allow` accepts, up to `count` slots."""
    by_page = np.argsort(page, kind="stable")
    borders = np.searchsorted(page[by_page], np.arange(whole.pages + 1))
    taken, gained = [], 0
    for number in order.tolist():
        if gained >= count:
            break
        if number < len(singles):
            inside = singles[number : number + 1]
        else:
            members = whole.members(number - len(singles)).tolist()
            inside = np.concatenate([by_page[borders[each] : borders[each + 1]] for each in members])
        if allow(inside):
            taken.append(number)
            gained += int(gains[number])
    return np.array(taken, np.int64)


class _Whole:
    """m pages, and groups of short adjacent pages, that can be evicted whole."""

    def __init__(
        self,
        pages: PageAllocator,
        now: Pages,
        slot: int,
        page: Int64s,
        worth: Worths,
        pages_alone: bool,
    ) -> None:
        """`now`: the pages of `pages`; `page` and `worth`: of the evictable slots. pages_alone: of the size `slot`
        too, and none before others for being half empty."""
        may = np.bincount(page, minlength=len(now)) == now.used_slots
        top = np.full(len(now), -np.inf)
        np.maximum.at(top, page, worth)
        other = ((now.slot_bytes != slot) | pages_alone) & (now.slot_bytes != EMPTY) & now.is_open
        fits = now.nbytes // slot
        alone = np.flatnonzero(other & may & (fits > 0))
        self._groups = now.groups
        self.pages = len(now)
        self._alone = len(alone)
        groups, group_gain, group_worth = _stretches(pages, now, slot, may, top, other & (fits == 0))
        self._first = np.concatenate([alone, groups])
        self.gain = np.concatenate([fits[alone], group_gain])
        """[m] slots of the wanted size that its eviction frees."""
        self.worth = np.concatenate([top[alone], group_worth])
        """[m] worth of its most valuable slot."""
        self.sparse = np.zeros(len(self._first), np.bool_)
        """[m] whether it is at most half full and evicted first."""
        stranded = int((now.nbytes - now.used_bytes)[other].sum())
        if stranded > 2 * pages.capacity_bytes // SHARE and not pages_alone:
            self.sparse[: self._alone] = 2 * now.used_bytes[alone] <= now.nbytes[alone]

    def members(self, number: int) -> Int64s:
        """The pages of group `number`."""
        first = self._first[number]
        if number < self._alone:
            return np.array([first], np.int64)
        return np.flatnonzero(self._groups == first)


def _stretches(
    pages: PageAllocator, now: Pages, slot: int, may: Bools, top: Worths, short: Bools
) -> tuple[Int64s, Int64s, Worths]:
    """Groups of pages that are each too short for the wanted size, and become one page when all are empty.

    Returns their numbers as in `Pages.groups`, gains and worths.
    """
    nothing = np.zeros(0, np.int64)
    if not short.any():
        return nothing, nothing, np.zeros(0)
    fine = ((short & may) | (now.slot_bytes == EMPTY)) & (now.nbytes < slot)
    begins = np.flatnonzero(np.diff(now.groups, prepend=-1))
    groups = now.groups[begins]
    inside = pages.group_bytes(groups)
    good = np.logical_and.reduceat(fine, begins) & (np.add.reduceat(now.nbytes, begins) == inside)
    good &= np.logical_or.reduceat(short, begins) & (inside >= slot)
    worths = np.maximum.reduceat(top, begins)
    return groups[good], inside[good] // slot, worths[good]
