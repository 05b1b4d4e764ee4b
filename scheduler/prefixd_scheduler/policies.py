"""In which order waiting requests run.

Priority classes come first in every policy: a request of a lower `priority` number runs before all of a
higher one, so every promise below is a promise among requests of one class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, TypeAlias

from prefixd_scheduler.errors import UnknownPolicyError
from prefixd_scheduler.orders import ArrivalOrder, NearestOrder, Order, WeightedAgeOrder, weighted_age
from prefixd_scheduler.request import QueuedRequest

Rank: TypeAlias = tuple[float, ...]


class Policy(ABC):
    """Ranks requests. A policy keeps no state: the order follows from the requests and the time."""

    name: ClassVar[str]

    @abstractmethod
    def ranks(self, requests: Sequence[QueuedRequest], now_s: float) -> list[Rank]:
        """The rank of each request, in the order given; the lowest runs first.

        Every rank ends with the request's id, so no two are equal and the order is total. This looks at every request.
        A queue, of which few requests change between two looks, uses `order`.
        """

    @abstractmethod
    def order(self) -> Order[Any]:
        """An empty structure that keeps requests in the order of their ranks while they come, move and go."""


class Fcfs(Policy):
    """First come, first served, wherever the prefix is."""

    name = "fcfs"

    def ranks(self, requests: Sequence[QueuedRequest], now_s: float) -> list[Rank]:
        return [(r.priority, r.arrival_s, r.id) for r in requests]

    def order(self) -> Order[Any]:
        return ArrivalOrder()


class FastestPrefixFirst(Policy):
    """The nearest prefix first, no matter how much later its request came (paper, section V.F.1).

    **It may starve**: while requests with nearer prefixes keep arriving as fast as they are served, one whose
    prefix is farther, or not cached, waits forever. Its gain is throughput, the more of it the longer the
    queue. Where waiting time matters, use Relaxed-FPF.

    Among requests at one distance, those that share a `prefix` run one after the other, so that promoting it
    is paid once and it is not evicted between them. Such groups are ordered by their oldest request, their
    members by arrival.
    """

    name = "fpf"

    def ranks(self, requests: Sequence[QueuedRequest], now_s: float) -> list[Rank]:
        oldest: dict[tuple[int, int, Hashable], tuple[float, int]] = {}
        for r in requests:
            if r.prefix is not None:
                group = (r.priority, r.distance, r.prefix)
                arrival = (r.arrival_s, r.id)
                if arrival < oldest.get(group, (float("inf"), 0)):
                    oldest[group] = arrival
        ranks: list[Rank] = []
        for r in requests:
            arrival = (r.arrival_s, r.id)
            leader = arrival if r.prefix is None else oldest[r.priority, r.distance, r.prefix]
            ranks.append((r.priority, r.distance, *leader, *arrival))
        return ranks

    def order(self) -> Order[Any]:
        return NearestOrder()


class RelaxedFastestPrefixFirst(Policy):
    """The highest `(now - arrival) * (4 - N)` first, N being the distance (paper, section V.F.2, equation 4).

    Age counts four times for a prefix on the GPU, three times on the CPU, twice on disk and once if it is not
    cached. Equal products run in order of arrival.

    **It does not starve.** Take a request r of age a. Its product is at least a, and that of a request of age
    b at most 4b, so *whoever is younger than a/4 never passes r*, wherever the prefixes are and however they
    move. Therefore, if at most L requests wait at a time and the first in order is handed over at least every
    s seconds,

        r waits at most 4 * L * s.

    Proof: when r's age is 3Ls, at most L - 1 others wait. Look at the next Ls seconds. When x of them have
    passed, r's age is 3Ls + x and that of a request that has come since is at most x; 4x <= 3Ls + x, so none
    of these passes r. L requests are handed over in that time, and the L - 1 others do not use them up.

    The bound asks nothing of the arrival rate: the limit of the queue suffices. (First come, first served has
    L * s.) A request put back after an interruption keeps its age and is handed over once more; if k are put
    back while r waits, read L + k for L.
    """

    name = "relaxed-fpf"

    def ranks(self, requests: Sequence[QueuedRequest], now_s: float) -> list[Rank]:
        return [(r.priority, weighted_age(r.arrival_s, 4 - r.distance, now_s), r.arrival_s, r.id) for r in requests]

    def order(self) -> Order[Any]:
        return WeightedAgeOrder()


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Fcfs, FastestPrefixFirst, RelaxedFastestPrefixFirst)
}


def create_policy(name: str) -> Policy:
    """The policy called `name`: "fcfs", "fpf" or "relaxed-fpf".

    Raises:
        UnknownPolicyError: there is none of that name.
    """
    try:
        return POLICIES[name]()
    except KeyError:
        raise UnknownPolicyError(f"no policy is called {name!r}; choose one of {', '.join(POLICIES)}") from None
