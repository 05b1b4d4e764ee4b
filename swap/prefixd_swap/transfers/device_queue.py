"""Chooses the piece that a device starts next. Pure: time is passed in, and nothing is started here.

The rules, for one device (a disk with its read and its write path, a direction of the GPU's copies):

1. At most `in_flight` pieces are under way on the device, and at most the path's own limit on each path.
2. The waiting transfer of the highest urgency comes first; among equals the one that is due first.
3. While a DEMAND transfer waits or is under way, nothing else starts. A piece that is under way is not interrupted: a
   DEMAND piece waits for the end of at most one piece, and does not wait while one of the `reserved` slots is free,
   which only DEMAND uses.
4. Nothing starves. A transfer that has waited for its next piece for `patience_s` may be let through against rules 2
   and 3: one piece at a time, the longest waiting first, and after a piece that took d seconds none for
   max(patience_s, (1 / share - 1) * d) seconds. So each of n waiting transfers starts a piece about every
   n * max(patience_s, d / share) seconds, and they take at most `share` of one slot's time from DEMAND. DEMAND needs
   no such rule: among equals a transfer is due `LATEST_DUE_S` after its submission at the latest.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.transfers.pieces import Urgency

LATEST_DUE_S = 10.0
"""Seconds after which a transfer without a deadline, or with a later one, comes before newer ones of its urgency."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The limits of one device."""

    in_flight: int
    """Pieces under way at once."""
    reserved: int = 1
    """Slots of `in_flight` that only DEMAND uses; 0 if `in_flight` is 1."""
    patience_s: float = 0.1
    """Seconds that a transfer waits before one of its pieces is let through."""
    share: float = 1 / 8
    """The most of one slot's time that pieces take which are let through; above 0, at most 1."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            MemoryMisuseError: only DEMAND could ever start, or a value is out of its range.
        """
        if self.in_flight < 1 or not 0 <= self.reserved < self.in_flight:
            raise MemoryMisuseError(
                f"a device with {self.in_flight} pieces in flight cannot reserve {self.reserved} for demand; reserve "
                "at least 0 and fewer than are in flight"
            )
        if not (0 <= self.patience_s < math.inf and 0 < self.share <= 1):
            raise MemoryMisuseError(
                f"patience_s {self.patience_s} and share {self.share} are not possible; give at least 0 s, and a share "
                "above 0 and up to 1"
            )


@dataclass(eq=False, slots=True)
class Waiter:
    """A transfer as the queue sees it."""

    path: str
    urgency: Urgency
    due_s: float
    number: int
    """Order of submission."""
    in_flight: int = 0
    """Pieces under way; the queue counts them."""
    waiting: bool = False
    """Whether it waits to start a piece; the queue keeps it."""
    since_s: float = 0.0
    """Time since which it waits for its next piece."""
    entry: int = 0
    """Number of its valid entry in its path's heap; older entries are out of date."""


@dataclass(slots=True)
class _Path:
    in_flight_limit: int
    background_limit: int
    in_flight: int = 0
    background: int = 0
    """Pieces under way that are not DEMAND."""
    heap: list[tuple[tuple[int, float, int], int, Waiter]] = field(default_factory=list)
    """(order, entry, transfer); out of date where the entry is not the transfer's."""
    patient: OrderedDict[int, Waiter] = field(default_factory=OrderedDict)
    """Waiting transfers that are not DEMAND, by number, the longest waiting first."""

    def head(self) -> Waiter | None:
        """The waiting transfer that comes first."""
        while self.heap:
            _, entry, waiter = self.heap[0]
            if waiter.waiting and waiter.entry == entry:
                return waiter
            heapq.heappop(self.heap)
        return None


class DeviceQueue:
    """The transfers that wait for one device."""

    def __init__(self, limits: DeviceLimits, *, urgency: bool = True) -> None:
        """`urgency=False` keeps only rule 1: one queue, first in, first out."""
        self.limits = limits
        self._urgency = urgency
        self._paths: dict[str, _Path] = {}
        self._in_flight = 0
        self._demand_waiting = 0
        self._demand_in_flight = 0
        self._turn: Waiter | None = None  # the transfer whose piece was let through and is under way
        self._turn_began_s = 0.0
        self._next_turn_s = -math.inf

    def add_path(self, name: str, in_flight: int) -> None:
        """Adds a path with at most `in_flight` pieces under way; some slots stay free for DEMAND, as on the device.

        Raises:
            MemoryMisuseError: nothing could ever start on the path.
        """
        if in_flight < 1:
            raise MemoryMisuseError(f"path {name!r} with {in_flight} pieces in flight moves nothing; give at least 1")
        background = max(1, in_flight - self.limits.reserved) if self._urgency else in_flight
        self._paths[name] = _Path(in_flight, background)

    # -- waiting --------------------------------------------------------------------------------------------------

    def add(self, waiter: Waiter, now_s: float) -> None:
        """Adds a transfer that waits for its next piece."""
        waiter.waiting = True
        waiter.since_s = now_s
        path = self._paths[waiter.path]
        if waiter.urgency is Urgency.DEMAND:
            self._demand_waiting += 1
        else:
            path.patient[waiter.number] = waiter
        self._push(path, waiter)

    def remove(self, waiter: Waiter) -> None:
        """Removes a transfer, if it waits."""
        if not waiter.waiting:
            return
        waiter.waiting = False
        if waiter.urgency is Urgency.DEMAND:
            self._demand_waiting -= 1
        else:
            del self._paths[waiter.path].patient[waiter.number]

    def raise_to(self, waiter: Waiter, urgency: Urgency) -> None:
        """Gives a transfer and its pieces under way a higher urgency."""
        path = self._paths[waiter.path]
        if urgency is Urgency.DEMAND:
            path.background -= waiter.in_flight
            self._demand_in_flight += waiter.in_flight
            if waiter.waiting:
                del path.patient[waiter.number]
                self._demand_waiting += 1
        waiter.urgency = urgency
        if waiter.waiting:
            self._push(path, waiter)

    def _push(self, path: _Path, waiter: Waiter) -> None:
        # `head` removes entries that are out of date; here they are removed when they are most of the heap.
        if len(path.heap) > 64 and len(path.heap) > 4 * (len(path.patient) + self._demand_waiting):
            path.heap = [item for item in path.heap if item[2].waiting and item[2].entry == item[1]]
            heapq.heapify(path.heap)
        waiter.entry += 1
        heapq.heappush(path.heap, (self._order(waiter), waiter.entry, waiter))

    def _order(self, waiter: Waiter) -> tuple[int, float, int]:
        return (waiter.urgency, waiter.due_s, waiter.number) if self._urgency else (0, 0.0, waiter.number)

    # -- starting -------------------------------------------------------------------------------------------------

    def choose(self, now_s: float) -> tuple[Waiter, bool] | None:
        """The transfer to start a piece of now, and whether rule 4 lets it through; None when none may start."""
        if self._in_flight >= self.limits.in_flight:
            return None
        regular = self._regular()
        if self._urgency and self._turn is None and now_s >= self._next_turn_s:
            longest = self._longest_waiting()
            if longest is not None and longest is not regular and now_s - longest.since_s >= self.limits.patience_s:
                return longest, True
        return None if regular is None else (regular, False)

    def started(self, waiter: Waiter, let_through: bool, now_s: float) -> None:
        """Counts a piece that has just started; its transfer goes on waiting for the next one."""
        path = self._paths[waiter.path]
        self._in_flight += 1
        path.in_flight += 1
        waiter.in_flight += 1
        waiter.since_s = now_s
        if waiter.urgency is Urgency.DEMAND:
            self._demand_in_flight += 1
        else:
            path.background += 1
            path.patient.move_to_end(waiter.number)
        if let_through:
            self._turn, self._turn_began_s = waiter, now_s

    def ended(self, waiter: Waiter, let_through: bool, now_s: float) -> None:
        """Counts the end of a piece."""
        path = self._paths[waiter.path]
        self._in_flight -= 1
        path.in_flight -= 1
        waiter.in_flight -= 1
        if waiter.urgency is Urgency.DEMAND:
            self._demand_in_flight -= 1
        else:
            path.background -= 1
        if let_through:
            took_s = now_s - self._turn_began_s
            self._turn = None
            self._next_turn_s = now_s + max(self.limits.patience_s, (1 / self.limits.share - 1) * took_s)

    def _regular(self) -> Waiter | None:
        """The transfer that comes first by rules 1 to 3; None when none may start."""
        heads = (path.head() for path in self._paths.values() if path.in_flight < path.in_flight_limit)
        first = min(filter(None, heads), key=self._order, default=None)
        if first is None or not self._urgency or first.urgency is Urgency.DEMAND:
            return first
        if self._demand_waiting or self._demand_in_flight or not self._background_may_start():
            return None
        heads = (path.head() for path in self._background_paths())
        return min(filter(None, heads), key=self._order, default=None)

    def _longest_waiting(self) -> Waiter | None:
        if not self._background_may_start():
            return None
        first = (next(iter(path.patient.values())) for path in self._background_paths() if path.patient)
        return min(first, key=lambda waiter: (waiter.since_s, waiter.number), default=None)

    def _background_may_start(self) -> bool:
        background = self._in_flight - self._demand_in_flight
        return background < self.limits.in_flight - self.limits.reserved

    def _background_paths(self) -> Iterable[_Path]:
        return (
            path
            for path in self._paths.values()
            if path.in_flight < path.in_flight_limit and path.background < path.background_limit
        )
