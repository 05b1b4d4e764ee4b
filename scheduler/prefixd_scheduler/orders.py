"""Waiting requests in the order of a policy, kept up to date while they come, move and go.

A request's *standing* are the values that its place depends on, without the time. The order changes only when a
standing changes, and the first requests of 10,000 are found without looking at the others.

Orders contain each other: `ByTenant` (`fair_share`) has an order for each tenant, `ByPriority` one for each class,
`OverdueFirst` puts some before those of another.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator
from itertools import chain, takewhile
from typing import Generic, TypeAlias, TypeVar

from prefixd_scheduler.distance import WEIGHT_CLASSES
from prefixd_scheduler.errors import IntegrityError
from prefixd_scheduler.request import QueuedRequest

Arrival: TypeAlias = tuple[float, int]
"""When a request arrived, and its id: `(12.5, 7)`."""

Key: TypeAlias = tuple[float, ...]
"""The values that a policy ranks by, the lowest first; all keys of one policy have the same length."""

S = TypeVar("S")
K = TypeVar("K", int, tuple[float, ...])
"""A number or a tuple of numbers, which `bisect` can compare."""

_CHUNK = 512


class SortedKeys(Generic[K]):
    """Different keys in ascending order.

    The keys lie in short sorted lists, one after the other, so that a change moves at most `2 * _CHUNK` keys in memory
    and compares O(log n). Example with chunks of 2: `[[1, 3], [4, 7], [9]]`.
    """

    __slots__ = ("_chunks", "_lasts")

    def __init__(self) -> None:
        self._chunks: list[list[K]] = []
        self._lasts: list[K] = []  # the last key of each chunk

    def add(self, key: K) -> None:
        """Puts a key that is not there into its place."""
        if not self._chunks:
            self._chunks.append([key])
            self._lasts.append(key)
            return
        at = min(bisect_left(self._lasts, key), len(self._chunks) - 1)
        chunk = self._chunks[at]
        insort(chunk, key)
        if len(chunk) > 2 * _CHUNK:
            self._chunks[at : at + 1] = [chunk[:_CHUNK], chunk[_CHUNK:]]
            self._lasts.insert(at, chunk[_CHUNK - 1])
            at += 1
        self._lasts[at] = self._chunks[at][-1]

    def remove(self, key: K) -> None:
        """Takes a key out. Raises IntegrityError if it is not there: its owner has changed it meanwhile, a defect."""
        at = bisect_left(self._lasts, key)
        chunk = self._chunks[at] if at < len(self._chunks) else []
        place = bisect_left(chunk, key)
        if place == len(chunk) or chunk[place] != key:
            raise IntegrityError(f"the key {key} is not where the order has it; it was changed while it was kept there")
        del chunk[place]
        if chunk:
            self._lasts[at] = chunk[-1]
        else:
            del self._chunks[at], self._lasts[at]

    @property
    def first(self) -> K:
        """The lowest key. Raises IndexError when there is none."""
        return self._chunks[0][0]

    def __iter__(self) -> Iterator[K]:
        """The keys, ascending. Do not add or remove meanwhile."""
        for chunk in self._chunks:
            yield from chunk

    def __len__(self) -> int:
        return sum(map(len, self._chunks))

    def __bool__(self) -> bool:
        return bool(self._chunks)


class Order(ABC):
    """Waiting requests in the order of one policy."""

    @abstractmethod
    def put(self, request: QueuedRequest) -> None:
        """Adds a request, or moves one that is there to its present place."""

    @abstractmethod
    def remove(self, request_id: int) -> None:
        """Takes out a request that is there."""

    @abstractmethod
    def ids(self, now_s: float) -> Iterator[int]:
        """The ids of the requests, the first to run first. Do not put or remove meanwhile."""

    @abstractmethod
    def __len__(self) -> int:
        """How many requests are there."""


class _ByStanding(Order, Generic[S]):
    """Moves a request only when its standing changes. `S` is the type of a standing."""

    def __init__(self) -> None:
        self._standings: dict[int, S] = {}

    def put(self, request: QueuedRequest) -> None:
        standing = self._standing(request)
        before = self._standings.get(request.id)
        if before == standing:
            return
        if before is not None:
            self._leave(before)
        self._standings[request.id] = standing
        self._enter(standing)

    def remove(self, request_id: int) -> None:
        self._leave(self._standings.pop(request_id))

    def __len__(self) -> int:
        return len(self._standings)

    @abstractmethod
    def _standing(self, request: QueuedRequest) -> S:
        """The values that the request's place depends on."""

    @abstractmethod
    def _enter(self, standing: S) -> None: ...

    @abstractmethod
    def _leave(self, standing: S) -> None: ...


Group: TypeAlias = tuple[Key, bool, Hashable]
"""(key, whether it has several members, what they have in common or the id of its only member)."""


class KeyedOrder(_ByStanding[tuple[Group, Arrival]]):
    """By (key, arrival of the oldest member of the group); members of a group by arrival, one after the other.

    A change costs O(log n), the first w requests O(w).

    Args:
        key: of a request.
        group: equal for requests of one key that run one after the other; None for a request without a group.
    """

    def __init__(self, key: Callable[[QueuedRequest], Key], group: Callable[[QueuedRequest], Hashable | None]) -> None:
        super().__init__()
        self._key = key
        self._group = group
        self._members: dict[Group, SortedKeys[Key]] = {}
        self._heads: SortedKeys[Key] = SortedKeys()  # a group each, by its oldest member
        self._group_of_head: dict[int, Group] = {}

    def ids(self, now_s: float) -> Iterator[int]:
        for *_, oldest in self._heads:
            for _, request_id in self._members[self._group_of_head[int(oldest)]]:
                yield int(request_id)

    def _standing(self, request: QueuedRequest) -> tuple[Group, Arrival]:
        common = self._group(request)
        group = (self._key(request), common is not None, request.id if common is None else common)
        return group, (request.arrival_s, request.id)

    def _enter(self, standing: tuple[Group, Arrival]) -> None:
        group, arrival = standing
        members = self._members.setdefault(group, SortedKeys())
        head = members.first if members else None
        members.add(arrival)
        if members.first != head:
            if head is not None:
                self._remove_head(group, head)
            self._add_head(group, arrival)

    def _leave(self, standing: tuple[Group, Arrival]) -> None:
        group, arrival = standing
        members = self._members[group]
        was_head = members.first == arrival
        members.remove(arrival)
        if was_head:
            self._remove_head(group, arrival)
            if members:
                self._add_head(group, members.first)
            else:
                del self._members[group]

    def _add_head(self, group: Group, arrival: Key) -> None:
        self._heads.add((*group[0], *arrival))
        self._group_of_head[int(arrival[1])] = group

    def _remove_head(self, group: Group, arrival: Key) -> None:
        self._heads.remove((*group[0], *arrival))
        del self._group_of_head[int(arrival[1])]


class WeightedAgeOrder(_ByStanding[tuple[float, Arrival]]):
    """By (-age * weight, arrival, id), where only the age depends on the time.

    Among requests of one weight the time changes nothing: the older has the higher product, and equal products (also
    by rounding, which is monotone) go by arrival. So each of the `WEIGHT_CLASSES` is kept by arrival, and the seven are
    merged at the time that is asked for. A change costs O(log n), the first w requests O(w).
    """

    def __init__(self) -> None:
        super().__init__()
        self._classes: dict[float, SortedKeys[Key]] = {weight: SortedKeys() for weight in WEIGHT_CLASSES}

    def ids(self, now_s: float) -> Iterator[int]:
        ranked = (_weighted(members, weight, now_s) for weight, members in self._classes.items() if members)
        return (request_id for _, _, request_id in heapq.merge(*ranked))

    def _standing(self, request: QueuedRequest) -> tuple[float, Arrival]:
        return request.weight, (request.arrival_s, request.id)

    def _enter(self, standing: tuple[float, Arrival]) -> None:
        self._classes[standing[0]].add(standing[1])

    def _leave(self, standing: tuple[float, Arrival]) -> None:
        self._classes[standing[0]].remove(standing[1])


class OverdueFirst(Order):
    """First the requests that have waited for `bound_s` seconds, by arrival; then the others in another order.

    A change costs O(log n) besides the other order's, the first w requests O(w) besides.
    """

    def __init__(self, order: Order, bound_s: float) -> None:
        self._order = order
        self._bound_s = bound_s
        self._arrivals: SortedKeys[Key] = SortedKeys()
        self._arrival_of: dict[int, Arrival] = {}

    def put(self, request: QueuedRequest) -> None:
        if request.id not in self._arrival_of:
            arrival = self._arrival_of[request.id] = (request.arrival_s, request.id)
            self._arrivals.add(arrival)
        self._order.put(request)

    def remove(self, request_id: int) -> None:
        self._arrivals.remove(self._arrival_of.pop(request_id))
        self._order.remove(request_id)

    def ids(self, now_s: float) -> Iterator[int]:
        overdue: set[int] = set()
        for _, number in takewhile(lambda arrival: now_s - arrival[0] >= self._bound_s, self._arrivals):
            request_id = int(number)
            overdue.add(request_id)
            yield request_id
        for request_id in self._order.ids(now_s):
            if request_id not in overdue:
                yield request_id

    def __len__(self) -> int:
        return len(self._order)


class ByPriority(Order):
    """An order for each priority, the lowest number first."""

    def __init__(self, order: Callable[[], Order]) -> None:
        self._new = order
        self._classes: dict[int, Order] = {}
        self._priorities: SortedKeys[int] = SortedKeys()
        self._priority_of: dict[int, int] = {}

    def put(self, request: QueuedRequest) -> None:
        if (before := self._priority_of.get(request.id, request.priority)) != request.priority:
            self._leave(request.id, before)
        if request.priority not in self._classes:
            self._classes[request.priority] = self._new()
            self._priorities.add(request.priority)
        self._priority_of[request.id] = request.priority
        self._classes[request.priority].put(request)

    def remove(self, request_id: int) -> None:
        self._leave(request_id, self._priority_of.pop(request_id))

    def ids(self, now_s: float) -> Iterator[int]:
        return chain.from_iterable(self._classes[priority].ids(now_s) for priority in self._priorities)

    def __len__(self) -> int:
        return len(self._priority_of)

    def _leave(self, request_id: int, priority: int) -> None:
        self._classes[priority].remove(request_id)
        if not len(self._classes[priority]):
            del self._classes[priority]
            self._priorities.remove(priority)


def _weighted(members: SortedKeys[Key], weight: float, now_s: float) -> Iterator[tuple[float, float, int]]:
    """The ranks of requests of one weight, ascending."""
    for arrival_s, request_id in members:
        yield weighted_age(arrival_s, weight, now_s), arrival_s, int(request_id)


def weighted_age(arrival_s: float, weight: float, now_s: float) -> float:
    """The negative of equation 4's product, so that the highest product comes first.

    Clamped: the negative age of a request that is stamped after `now_s` was read would turn the order around.
    """
    return -max(0.0, now_s - arrival_s) * weight
