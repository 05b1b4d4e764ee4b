"""A request as the queue sees it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from prefixd_scheduler.distance import Distance
from prefixd_scheduler.errors import InvalidValueError


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One waiting request. `distance`, `cached_tokens` and `prefix` change as blocks move; while the request is in a
    `RequestQueue`, change them only with `RequestQueue.update`, which moves the request in the order.

    Attributes:
        id: unique among all requests of a queue; of two that arrive at the same instant the lower runs first.
        arrival_s: when the request was first submitted, on the clock whose readings are passed as `now_s`.
            A request that is queued again after an interruption keeps it.
        prompt_tokens: length of the prompt.
        cached_tokens: how many of them, from the first on, are cached in some tier.
        distance: the farthest tier among the cached blocks it needs; `NONE` when nothing is cached.
        priority: classes of urgency; a lower class runs before every higher one.
        prefix: equal for requests that need the same cached prefix, such as the key of its last block; None
            when the request shares nothing.

    Raises:
        InvalidValueError: a count is negative or more is cached than the prompt has.
    """

    id: int
    arrival_s: float
    prompt_tokens: int
    cached_tokens: int = 0
    distance: Distance = Distance.NONE
    priority: int = 0
    prefix: Hashable | None = None

    def __post_init__(self) -> None:
        check_counts(self.id, self.cached_tokens, self.prompt_tokens)


def check_counts(request_id: int, cached_tokens: int, prompt_tokens: int) -> None:
    """Raises InvalidValueError unless 0 <= cached_tokens <= prompt_tokens."""
    if not 0 <= cached_tokens <= prompt_tokens:
        raise InvalidValueError(
            f"request {request_id} has {cached_tokens} cached of {prompt_tokens} prompt tokens; "
            "pass 0 <= cached_tokens <= prompt_tokens"
        )
