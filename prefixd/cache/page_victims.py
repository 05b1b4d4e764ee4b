"""Who has to go when blocks of other sizes have the room: whole pages, those whose occupants are worth least.

A page has slots of one size. Where a tier holds blocks of several sizes, room for one of them may mean that a page of
another has to be emptied (Jenga, sections 4.3 and 5.4). Here every slot in the tier gets a worth from the eviction
policy, and `swap/pages` says which single slots, or whole pages, make room at the least cost.

Of blocks that are worth the same, as those of a prompt that was used as a whole, the last goes first. A page may have a
block that others continue, which lie elsewhere. It goes all the same: with LRU they are worth no more than it, and
where its last copy goes, its row stays in the trie for as long as they do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd_swap import EvictionPolicy, Victims, round_to_slot

Choose = Callable[
    [int, int, npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.bool_]],
    Victims,
]
"""(bytes of a part, how many, slots, their worth, which may go): which of them to evict; see `swap/page_eviction`."""


def has_other_sizes(tries: Sequence[Trie], tier: int, sizes: Sequence[int]) -> bool:
    """Whether `tier` may hold slots of other sizes than those of parts of `sizes` bytes, or of several."""
    wanted = {round_to_slot(size) for size in sizes}
    held = {
        round_to_slot(nbytes)
        for trie in tries
        if np.bitwise_or.reduce(trie.any_part[: trie.rows]) & (1 << tier)
        for nbytes in trie.part_bytes
    }
    return len(wanted | held) > 1


def find_page_victims(
    tries: Sequence[Trie],
    tier: int,
    sizes: Sequence[int],
    want: int,
    policy: EvictionPolicy,
    choose: Choose,
    *,
    demotable: bool,
    spare_copies: bool = False,
) -> list[tuple[Trie, Rows]]:
    """The blocks that have to leave `tier` so that `want` blocks with parts of `sizes` bytes have room, by trie, each
    trie's children before their parents.

    Args:
        tries: all tries, by ordinal.
        tier: the tier that needs room.
        sizes: bytes of each part of a wanted block.
        want: how many blocks.
        policy: gives every block a score, lowest goes first.
        choose: the tier's own choice among slots.
        demotable: a block's last copy may go, because it will be written a tier down before.
        spare_copies: spare blocks that are in a tier above as well.
    """
    bit = np.uint8(1 << tier)
    slots, scores, depths, may, owner, rows_of = [], [], [], [], [], []
    for place, trie in enumerate(tries):
        rows = np.flatnonzero(trie.any_part[: trie.rows] & bit)
        last = trie.any_part[rows] == bit
        goes = ~trie.held(rows, tier)
        stays = (trie.keep[rows] > 0) | trie.pinned[rows]
        if demotable:
            stays &= (trie.complete[rows] & bit) == 0
        goes &= ~(last & stays)
        if spare_copies:
            goes &= (trie.any_part[rows] & np.uint8((1 << tier) - 1)) == 0
        score = policy.scores(trie.last_used[rows], trie.entered[rows, tier])
        for part in range(len(trie.part_bytes)):
            there = trie.slots[rows, tier, part] != NO_SLOT
            slots.append(trie.slots[rows[there], tier, part])
            scores.append(score[there])
            depths.append(trie.depth[rows[there]])
            may.append(goes[there])
            rows_of.append(rows[there])
            owner.append(np.full(int(np.count_nonzero(there)), place))
    if not slots:
        return []
    taken, goes, homes, of = (np.concatenate(columns) for columns in (slots, may, owner, rows_of))
    worth = _worth(np.concatenate(scores), np.concatenate(depths))
    evicted = np.zeros(len(taken), np.bool_)
    for size, parts in Counter(map(round_to_slot, sizes)).items():
        evicted[choose(size, parts * want, taken, worth, goes).positions] = True
    found = []
    for place, trie in enumerate(tries):
        rows = np.unique(of[evicted & (homes == place)])
        if len(rows):
            found.append((trie, rows[np.argsort(-trie.depth[rows], kind="stable")]))
    return found


def _worth(scores: npt.NDArray[np.float64], depths: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """[n] numbers in the order of `scores`; of equal ones the deeper block is worth less."""
    order = np.argsort(scores)
    ascending = scores[order]
    rank = np.zeros(len(scores), np.int64)
    rank[order[1:]] = np.cumsum(ascending[1:] != ascending[:-1])
    deepest = int(depths.max(initial=0))
    return (rank * (deepest + 1) + (deepest - depths)).astype(np.float64)
