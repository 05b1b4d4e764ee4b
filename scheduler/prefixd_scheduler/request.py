"""A request as the queue sees it."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from prefixd_scheduler.distance import WEIGHT_CLASSES
from prefixd_scheduler.errors import InvalidValueError


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One waiting request. Its cached prefix changes as blocks move. While the request is in a `RequestQueue`, change
    these fields only with `RequestQueue.update`, which moves the request in the order.

    Attributes:
        id: unique among all requests of a queue; of two that arrive at the same instant the lower runs first.
        arrival_s: when its call arrived, which may be long before it is queued, on the clock whose readings are passed
            as `now_s`. A request that is queued again after an interruption keeps it.
        prompt_tokens: length of the prompt.
        cached_tokens: how many of them, from the first on, are cached in some tier.
        weight: how near its prompt is, from 4 (all on the GPU) to 1 (nothing cached); see `prompt_weight`.
        priority: classes of urgency; a lower class runs before every higher one.
        prefix: equal for requests that need the same cached prefix, such as the key of its last block; None
            when the request shares nothing.
        lacks: equal for requests that lack the same block next, behind what is cached, such as that block's key; None
            when no other can lack it.
        ready_s: estimated seconds of loading and computing until its first token; infinite while unknown.
        deadline_s: when its first token is due, on the clock of `arrival_s`; infinite for never.
        tenant: tenants are served in turn; all other fields order only requests of one tenant.

    Raises:
        InvalidValueError: a count is negative, more is cached than the prompt has, the weight is none of
            `WEIGHT_CLASSES`, or a time is not a number.
    """

    id: int
    arrival_s: float
    prompt_tokens: int
    cached_tokens: int = 0
    weight: float = 1.0
    priority: int = 0
    prefix: Hashable | None = None
    lacks: Hashable | None = None
    ready_s: float = math.inf
    deadline_s: float = math.inf
    tenant: Hashable = None

    def __post_init__(self) -> None:
        _check_cached(self.id, self.cached_tokens, self.prompt_tokens, self.weight, self.ready_s)
        if math.isnan(self.deadline_s):
            raise InvalidValueError(f"request {self.id} has the deadline {self.deadline_s}; pass seconds")

    def set_cached(
        self,
        weight: float,
        cached_tokens: int,
        prefix: Hashable | None,
        *,
        lacks: Hashable | None = None,
        ready_s: float = math.inf,
    ) -> None:
        """Records how much of the prefix is cached, and where. Call it only for a request that is not in a queue.

        Raises:
            InvalidValueError: as the constructor; nothing has changed then.
        """
        _check_cached(self.id, cached_tokens, self.prompt_tokens, weight, ready_s)
        self.weight, self.cached_tokens, self.prefix = weight, cached_tokens, prefix
        self.lacks, self.ready_s = lacks, ready_s


def _check_cached(request_id: int, cached_tokens: int, prompt_tokens: int, weight: float, ready_s: float) -> None:
    """Raises InvalidValueError unless 0 <= cached_tokens <= prompt_tokens, the weight is one of `WEIGHT_CLASSES` and
    0 <= ready_s."""
    if not 0 <= cached_tokens <= prompt_tokens:
        raise InvalidValueError(
            f"request {request_id} has {cached_tokens} cached of {prompt_tokens} prompt tokens; "
            "pass 0 <= cached_tokens <= prompt_tokens"
        )
    if weight not in WEIGHT_CLASSES:
        raise InvalidValueError(
            f"request {request_id} has the weight {weight}; pass what `prompt_weight` returns, one of {WEIGHT_CLASSES}"
        )
    if not ready_s >= 0:
        raise InvalidValueError(f"request {request_id} is ready in {ready_s} s; pass seconds of 0 or more")
