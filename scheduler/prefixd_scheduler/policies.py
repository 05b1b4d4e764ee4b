"""Policies: the order in which waiting requests run.

Priority classes come first in every policy: a request of a lower `priority` number runs before all of a higher one. So
every promise below holds among requests of one class and of one tenant. Between tenants the queue decides by the
service that each has received (`fair_share`): "the first in order is handed over at least every s seconds" refers to a
tenant's own requests. While T tenants wait, each gets at least a T-th of the service.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import ClassVar, TypeAlias

from prefixd_scheduler.errors import InvalidValueError, UnknownPolicyError
from prefixd_scheduler.orders import ByPriority, Key, KeyedOrder, Order, OverdueFirst, WeightedAgeOrder, weighted_age
from prefixd_scheduler.request import QueuedRequest

Rank: TypeAlias = tuple[float, ...]


class Policy(ABC):
    """Ranks requests by a key, the lowest first, and requests of one key by arrival.

    A policy keeps no state: the order follows from the requests and the time. Most are a `key` and perhaps a `group`.

    **Starvation.** A policy that `may_starve` passes a request over for as long as better ones keep coming. With a
    `starvation_bound_s` of B, a request that has waited for B seconds goes before all that have not, by arrival.
    Therefore, if at most L requests wait at a time and the first in order is handed over at least every s seconds,

        a request waits at most B + L * s.

    Proof: at the age of B only requests that came before it can go before it, at most L - 1 of them, and no later one
    passes it any more. Each older request that is interrupted is put back in front of it, and adds one.

    Args:
        starvation_bound_s: B; None: no bound.

    Raises:
        InvalidValueError: the bound is not above 0, or the policy cannot starve a request.
    """

    name: ClassVar[str]
    may_starve: ClassVar[bool] = True
    needs_estimate: ClassVar[bool] = False
    """Whether it ranks by `QueuedRequest.ready_s`."""
    by_deadline: ClassVar[bool] = False
    """Whether it ranks by `QueuedRequest.deadline_s`."""

    def __init__(self, starvation_bound_s: float | None = None) -> None:
        if starvation_bound_s is not None:
            if not (math.isfinite(starvation_bound_s) and starvation_bound_s > 0):
                raise InvalidValueError(f"the starvation bound is {starvation_bound_s}; give seconds above 0")
            if not self.may_starve:
                raise InvalidValueError(f"{self.name} never starves a request; leave the starvation bound out")
        self.starvation_bound_s = starvation_bound_s

    def first_of(self, request: QueuedRequest) -> Rank:
        """A rank among requests that lack the same block, of which the lowest stands in the order for all
        (`RequestQueue`): by priority, by deadline if the policy ranks by it, and by arrival. With a bound the deadline
        does not count here: a request that has waited long must not stand behind a later one."""
        due_s = request.deadline_s if self.by_deadline and self.starvation_bound_s is None else 0.0
        return request.priority, due_s, request.arrival_s, request.id

    @abstractmethod
    def key(self, request: QueuedRequest) -> Key:
        """The key of a request; the lowest runs first."""

    def group(self, request: QueuedRequest) -> Hashable | None:
        """Equal for requests of one key that run one after the other; None for a request without a group."""
        return None

    def ranks(self, requests: Sequence[QueuedRequest], now_s: float) -> list[Rank]:
        """The rank of each request, in the order given; the lowest runs first.

        Every rank ends with the request's id, so no two are equal and the order is total. This looks at every request.
        A queue, of which few requests change between two looks, uses `order`.
        """
        oldest: dict[Hashable, tuple[float, int]] = {}
        groups: list[Hashable] = []
        for r in requests:
            common = self.group(r)
            group = (r.priority, self.key(r), common is not None, r.id if common is None else common)
            groups.append(group)
            oldest[group] = min(oldest.get(group, (math.inf, 0)), (r.arrival_s, r.id))
        ranks: list[Rank] = []
        for r, known in zip(requests, groups, strict=True):
            if self.starvation_bound_s is not None and now_s - r.arrival_s >= self.starvation_bound_s:
                ranks.append((r.priority, 0, r.arrival_s, r.id))
            else:
                ranks.append((r.priority, 1, *self.key(r), *oldest[known], r.arrival_s, r.id))
        return ranks

    def order(self) -> Order:
        """An empty structure that keeps requests in the order of their ranks while they come, move and go."""
        return ByPriority(self._order)

    def _order(self) -> Order:
        """The order of one priority."""
        order = KeyedOrder(self.key, self.group)
        return order if self.starvation_bound_s is None else OverdueFirst(order, self.starvation_bound_s)


class Fcfs(Policy):
    """First come, first served, wherever the prefix is."""

    name = "fcfs"
    may_starve = False

    def key(self, request: QueuedRequest) -> Key:
        return ()


class FastestPrefixFirst(Policy):
    """The nearest prompt first (`prompt_weight`), no matter how much later its request came (paper, section V.F.1).

    **It may starve**: while requests with nearer prompts keep arriving as fast as they are served, one whose
    prompt is farther, or not cached, waits forever. It gains throughput, the more the longer the queue is. If waiting
    time matters, use Relaxed-FPF, or a bound.

    Among requests of one weight, those that share a `prefix` run one after the other, so that promoting it
    is paid once and it is not evicted between them. Such groups are ordered by their oldest request, their
    members by arrival.
    """

    name = "fpf"

    def key(self, request: QueuedRequest) -> Key:
        return (-request.weight,)

    def group(self, request: QueuedRequest) -> Hashable | None:
        return request.prefix


class RelaxedFastestPrefixFirst(Policy):
    """The highest `(now - arrival) * (4 - N)` first, 4 - N being the prompt's weight (paper, section V.F.2, equation
    4).

    Age counts four times for a prompt on the GPU, three times on the CPU, twice on disk, 1.5 times in a shared store
    and once if it is not cached; of a prompt in several places, their mean over its tokens (`prompt_weight`), without
    a header that all prompts share (`Header`). Equal products run in order of arrival.

    **It does not starve.** Take a request r of age a. Weights are from 1 to 4: its product is at least a, and that of
    a request of age b at most 4b, so *a request younger than a/4 never passes r*, wherever the blocks are and however
    they move. Therefore, if at most L requests wait at a time and the first in order is handed over at least every
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
    may_starve = False

    def key(self, request: QueuedRequest) -> Key:
        """Its weight; the age, by which it is multiplied, changes with the time."""
        return (request.weight,)

    def ranks(self, requests: Sequence[QueuedRequest], now_s: float) -> list[Rank]:
        return [(r.priority, weighted_age(r.arrival_s, r.weight, now_s), r.arrival_s, r.id) for r in requests]

    def _order(self) -> Order:
        return WeightedAgeOrder()


class LongestPrefixMatch(Policy):
    """Most cached tokens first, wherever they are, those that share them one after the other (SGLang's default)."""

    name = "lpm"

    def key(self, request: QueuedRequest) -> Key:
        return (-request.cached_tokens,)

    def group(self, request: QueuedRequest) -> Hashable | None:
        return request.prefix


class ShortestTimeToReady(Policy):
    """The request first that can have its first token soonest, by the times of loading and computing together.

    Other policies count blocks on the GPU, or tokens in any tier; this one also counts the time of computing the rest.
    As shortest job first, it minimizes the mean wait and may starve.
    """

    name = "shortest-ready"
    needs_estimate = True

    def key(self, request: QueuedRequest) -> Key:
        return (request.ready_s,)

    def group(self, request: QueuedRequest) -> Hashable | None:
        return request.prefix


class EarliestDeadlineFirst(Policy):
    """The earliest deadline first; those without one after all that have one.

    If all deadlines can be met in some order, they are met in this one, for requests that are not interrupted and take
    the same time each. Requests without a deadline may starve.
    """

    name = "deadline"
    by_deadline = True

    def key(self, request: QueuedRequest) -> Key:
        return (request.deadline_s,)


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Fcfs,
        FastestPrefixFirst,
        RelaxedFastestPrefixFirst,
        LongestPrefixMatch,
        ShortestTimeToReady,
        EarliestDeadlineFirst,
    )
}


def create_policy(name: str, starvation_bound_s: float | None = None) -> Policy:
    """The policy of that name, one of POLICIES; see `Policy` for the bound.

    Raises:
        UnknownPolicyError: there is none of that name.
        InvalidValueError: the bound is not above 0, or the policy cannot starve a request.
    """
    if name not in POLICIES:
        raise UnknownPolicyError(f"no policy is called {name!r}; choose one of {', '.join(POLICIES)}")
    return POLICIES[name](starvation_bound_s)
