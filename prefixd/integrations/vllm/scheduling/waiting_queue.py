"""vLLM's interface of a waiting queue, over a `PrefixOrder`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue

from prefixd.integrations.engine.waiting.ordering import PrefixOrder


class PolicyRequestQueue(RequestQueue):
    """Passes vLLM's changes of its waiting queue to a `PrefixOrder`: O(log n) a change.

    Args:
        order: keeps the requests.
    """

    def __init__(self, order: PrefixOrder[Any]) -> None:
        self.order = order

    def add_request(self, request: Any) -> None:
        self.order.add(request)

    def pop_request(self) -> Any:
        return self.order.take()

    def peek_request(self) -> Any:
        return self.order.first()

    def prepend_request(self, request: Any) -> None:
        """Puts a preempted request before all others, and one that vLLM passed over at its former position."""
        self.order.put_back(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """As `prepend_request` for each, so that the last one is in front, as in vLLM's own queue."""
        for request in requests:
            self.order.put_back(request)

    def remove_request(self, request: Any) -> None:
        """Removes a request. Raises ValueError for one that does not wait, as vLLM's own queue does."""
        if not self.order.remove(request):
            raise ValueError(f"the request {request.request_id} does not wait")

    def remove_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.order.remove(request)

    def __bool__(self) -> bool:
        return len(self.order) > 0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.order)
