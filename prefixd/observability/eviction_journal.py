"""The journal of evictions: which blocks lost their last copy, when, why, and for whom.

A block is one entry of a ring, and each removal, of any number of blocks, one entry of a second one:

    blocks     key (16 bytes) | number of its removal     the last 2^20, 24 bytes each
    removals   time, tier, cause                          the last 2^15

The memory of the first ring is touched as it fills. Entering m blocks takes a few numpy calls, whatever m is; finding
blocks scans the ring in slices and is done only when somebody asks (`prefixd why`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from prefixd.base.long_work.pacer import give_way
from prefixd.observability.actor import current_actor

KEPT_BLOCKS = 1 << 20
KEPT_REMOVALS = 1 << 15
_SCANNED_AT_ONCE = 1 << 16
_KEY_BYTES = 16

Keys = npt.NDArray[np.uint8]
"""[m, 16]: block keys, which name the namespace and the whole prefix."""


class Reason(StrEnum):
    """Why blocks left the cache."""

    ROOM = "room"
    """A tier was full and somebody needed room in it."""
    QUOTA = "quota"
    """A tenant was at its most of a tier, so that its own blocks made room."""
    OPERATOR = "operator"
    """`prefixd evict`."""
    NAMESPACES = "namespaces"
    """Its namespace was forgotten: the memory of namespaces was full."""
    DAMAGED = "damaged"
    """Its bytes could not be read, or their checksum was wrong."""
    REFUSED = "refused"
    """A model computed no finite logits with it."""
    PREEMPTION = "preemption"
    """A running request gave its memory to others."""
    RESIZE = "resize"
    """The GPU tier shrank."""
    SHARED = "shared"
    """The shared store does not have it any more."""
    OTHER = "other"
    """None of these."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why blocks leave, and for whom.

    Attributes:
        reason: why.
        tenant: the tenant that gets the room; empty for none in particular.
        by: who acted: the id of a request, or a task of the daemon such as `write-back`; empty if unknown.
    """

    reason: Reason = Reason.OTHER
    tenant: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class Removal:
    """One removal.

    Attributes:
        at_s: when, on the cache's clock.
        tier: the tier that had the last copies, by its level.
        cause: why.
    """

    at_s: float
    tier: int
    cause: Cause


_FOR_ROOM = (Reason.ROOM, Reason.QUOTA)
_NEEDS_ROOM = (*_FOR_ROOM, Reason.RESIZE)
_UNKNOWN = Cause()
_CAUSE: ContextVar[Cause] = ContextVar("cause", default=_UNKNOWN)


@contextmanager
def because(reason: Reason, tenant: str = "") -> Iterator[None]:
    """A context in which blocks leave for this reason; tasks that begin inside have it too.

    Room that is made a tier further down, so that blocks can leave this one, is made for the same reason and tenant.
    """
    if reason in _FOR_ROOM and _CAUSE.get().reason in _NEEDS_ROOM:
        yield
        return
    before = _CAUSE.set(Cause(reason, tenant, current_actor()))
    try:
        yield
    finally:
        _CAUSE.reset(before)


class EvictionJournal:
    """Remembers which blocks left the cache. Used from the event loop alone.

    Args:
        kept: number of blocks that are remembered, the last ones; 0: none.
    """

    def __init__(self, kept: int = KEPT_BLOCKS) -> None:
        self.kept = kept
        self._keys = np.empty((0, _KEY_BYTES), np.uint8)
        self._removal_of = np.empty(0, np.int64)
        self._entered = 0  # blocks since the start
        self._removals: deque[Removal] = deque(maxlen=KEPT_REMOVALS)
        self._begun = 0  # removals since the start

    def __len__(self) -> int:
        return min(self._entered, self.kept)

    def enter(self, keys: Keys, tier: int, now_s: float) -> None:
        """Enters m blocks that have just lost their last copy, which was in `tier`, for the reason of the context."""
        if not self.kept or not len(keys):
            return
        if not len(self._keys):
            self._keys = np.empty((self.kept, _KEY_BYTES), np.uint8)
            self._removal_of = np.empty(self.kept, np.int64)
        keys = keys[-self.kept :]
        self._removals.append(Removal(now_s, tier, _CAUSE.get()))
        at = self._entered % self.kept
        first = min(len(keys), self.kept - at)
        self._keys[at : at + first], self._keys[: len(keys) - first] = keys[:first], keys[first:]
        self._removal_of[at : at + first] = self._removal_of[: len(keys) - first] = self._begun
        self._entered += len(keys)
        self._begun += 1

    async def find(self, keys: Keys, before_s: float) -> list[Removal | None]:
        """The last removal of each of these blocks at or before a time; None if there is none, or none is remembered.

        Other tasks run between two slices of the scan.
        """
        found: list[Removal | None] = [None] * len(keys)
        left = {key.tobytes(): place for place, key in enumerate(keys)}
        async for places in self._newest_first(keys, self._begun_until(before_s)):
            for place in places.tolist():
                key = self._keys[place].tobytes()
                removal = self._removal(int(self._removal_of[place]))
                if key in left and removal is not None:
                    found[left.pop(key)] = removal
            if not left:
                break
        return found

    async def _newest_first(self, keys: Keys, end_removal: int) -> AsyncIterator[npt.NDArray[np.int64]]:
        """The places in the ring of removals of these keys before number `end_removal`, slice by slice from the newest.

        Of each slice only a key's last one: a block that comes and goes may fill the whole ring.
        """
        wanted = np.ascontiguousarray(keys).view(np.uint64)
        may_be = np.zeros(1 << 16, np.bool_)  # by the first 16 bits: five times as fast as `np.isin`
        may_be[np.ascontiguousarray(keys).view(np.uint16)[:, 0]] = True
        end, oldest = self._entered, self._entered - len(self)
        while end > oldest:
            start = max(oldest, end - _SCANNED_AT_ONCE, (end - 1) // self.kept * self.kept)
            part = slice(start % self.kept, start % self.kept + end - start)
            halves = self._keys[part].view(np.uint64)
            early = self._removal_of[part] < end_removal
            hits = np.flatnonzero(early & may_be.take(self._keys[part].view(np.uint16)[:, 0]))[::-1]
            hits = hits[np.isin(halves[hits, 0], wanted[:, 0])]
            found = halves[hits]
            same = [(found[:, 0] == first) & (found[:, 1] == second) for first, second in wanted if len(found)]
            yield part.start + hits[[int(each.argmax()) for each in same if each.any()]]
            end = start
            await give_way()

    def _begun_until(self, time_s: float) -> int:
        """The number of the first removal after this time: they are in the order of their times."""
        known = bisect_right(self._removals, time_s, key=lambda removal: removal.at_s)
        return self._begun - len(self._removals) + known

    def _removal(self, number: int) -> Removal | None:
        """The removal with this number; None if it is forgotten."""
        place = number - (self._begun - len(self._removals))
        return self._removals[place] if place >= 0 else None
