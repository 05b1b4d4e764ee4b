"""The orders of the policies, kept up to date while requests come, move and go.

A request's *standing* is what its place depends on besides the time. The order is changed only when a standing changes,
and the first requests of 10,000 are found without looking at the others.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Generic, TypeAlias, TypeVar

from prefixd_scheduler.distance import Distance
from prefixd_scheduler.request import QueuedRequest
from prefixd_scheduler.sorted_keys import SortedKeys

Arrival: TypeAlias = tuple[float, int]
"""When a request arrived, and its id: `(12.5, 7)`."""

S = TypeVar("S")


class Order(ABC, Generic[S]):
    """Waiting requests in the order of one policy. `S` is the type of a standing."""

    def __init__(self) -> None:
        self._standings: dict[int, S] = {}

    def put(self, request: QueuedRequest) -> None:
        """Adds a request, or moves one that is there to where it belongs now."""
        standing = self._standing(request)
        before = self._standings.get(request.id)
        if before == standing:
            return
        if before is not None:
            self._leave(before)
        self._standings[request.id] = standing
        self._enter(standing)

    def remove(self, request_id: int) -> None:
        """Takes out a request that is there."""
        self._leave(self._standings.pop(request_id))

    @abstractmethod
    def ids(self, now_s: float) -> Iterator[int]:
        """The ids of the requests, the first to run first. Do not put or remove meanwhile."""

    @abstractmethod
    def _standing(self, request: QueuedRequest) -> S:
        """What the request's place depends on."""

    @abstractmethod
    def _enter(self, standing: S) -> None: ...

    @abstractmethod
    def _leave(self, standing: S) -> None: ...


class ArrivalOrder(Order[tuple[int, float, int]]):
    """(priority, arrival, id). A change costs O(log n), the first w requests O(w)."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: SortedKeys[tuple[int, float, int]] = SortedKeys()

    def ids(self, now_s: float) -> Iterator[int]:
        return (request_id for _, _, request_id in self._keys)

    def _standing(self, request: QueuedRequest) -> tuple[int, float, int]:
        return request.priority, request.arrival_s, request.id

    def _enter(self, standing: tuple[int, float, int]) -> None:
        self._keys.add(standing)

    def _leave(self, standing: tuple[int, float, int]) -> None:
        self._keys.remove(standing)


Group: TypeAlias = tuple[int, Distance, bool, Hashable]
"""(priority, distance, whether it has a prefix, its prefix or the id of its only member)."""


class NearestOrder(Order[tuple[Group, Arrival]]):
    """Groups by (priority, distance, arrival of the oldest member); members by arrival.

    A change costs O(log n), the first w requests O(w).
    """

    def __init__(self) -> None:
        super().__init__()
        self._members: dict[Group, SortedKeys[Arrival]] = {}
        self._heads: SortedKeys[tuple[int, int, float, int]] = SortedKeys()  # a group each, by its oldest member
        self._group_of_head: dict[int, Group] = {}

    def ids(self, now_s: float) -> Iterator[int]:
        for *_, oldest in self._heads:
            for _, request_id in self._members[self._group_of_head[oldest]]:
                yield request_id

    def _standing(self, request: QueuedRequest) -> tuple[Group, Arrival]:
        shared = request.prefix is not None
        group = (request.priority, request.distance, shared, request.prefix if shared else request.id)
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

    def _add_head(self, group: Group, arrival: Arrival) -> None:
        self._heads.add((group[0], group[1], *arrival))
        self._group_of_head[arrival[1]] = group

    def _remove_head(self, group: Group, arrival: Arrival) -> None:
        self._heads.remove((group[0], group[1], *arrival))
        del self._group_of_head[arrival[1]]


class WeightedAgeOrder(Order[tuple[int, Distance, Arrival]]):
    """By (priority, -age * (4 - distance), arrival, id), where only the age depends on the time.

    Among requests of one priority and distance the time changes nothing: the older has the higher product, and equal
    products (also by rounding, which is monotone) go by arrival. So each such class is kept by arrival, and the classes
    are merged at the time that is asked for. A change costs O(log n), the first w requests O(w).
    """

    def __init__(self) -> None:
        super().__init__()
        self._classes: dict[int, dict[Distance, SortedKeys[Arrival]]] = {}
        self._priorities: SortedKeys[int] = SortedKeys()

    def ids(self, now_s: float) -> Iterator[int]:
        return chain.from_iterable(self._merged(self._classes[priority], now_s) for priority in self._priorities)

    def _merged(self, classes: dict[Distance, SortedKeys[Arrival]], now_s: float) -> Iterator[int]:
        ranked = (_weighted(members, 4 - distance, now_s) for distance, members in classes.items())
        return (request_id for _, _, request_id in heapq.merge(*ranked))

    def _standing(self, request: QueuedRequest) -> tuple[int, Distance, Arrival]:
        return request.priority, request.distance, (request.arrival_s, request.id)

    def _enter(self, standing: tuple[int, Distance, Arrival]) -> None:
        priority, distance, arrival = standing
        classes = self._classes.get(priority)
        if classes is None:
            classes = self._classes[priority] = {}
            self._priorities.add(priority)
        classes.setdefault(distance, SortedKeys()).add(arrival)

    def _leave(self, standing: tuple[int, Distance, Arrival]) -> None:
        priority, distance, arrival = standing
        classes = self._classes[priority]
        classes[distance].remove(arrival)
        if not classes[distance]:
            del classes[distance]
        if not classes:
            del self._classes[priority]
            self._priorities.remove(priority)


def _weighted(members: SortedKeys[Arrival], weight: int, now_s: float) -> Iterator[tuple[float, float, int]]:
    """The ranks of requests of one distance, ascending."""
    for arrival_s, request_id in members:
        yield weighted_age(arrival_s, weight, now_s), arrival_s, request_id


def weighted_age(arrival_s: float, weight: int, now_s: float) -> float:
    """The negative of equation 4's product, so that the highest product comes first.

    Clamped: the negative age of a request that is stamped after `now_s` was read would turn the order around.
    """
    return -max(0.0, now_s - arrival_s) * weight
