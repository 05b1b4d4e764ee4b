"""Ends requests before they are done: cancelled ones, and all of them when the worker or the daemon ends."""

from __future__ import annotations

from itertools import islice

from prefixd.base.errors import PrefixdError
from prefixd.serving.dispatch.context import DispatchContext
from prefixd.serving.dispatch.staging.prefetcher import Prefetcher
from prefixd.serving.request.request import Request
from prefixd.serving.request.request_events import Ended, Event
from prefixd.serving.request.states import RequestState
from prefixd.worker_protocol.protocol import Cancel

_ENDED_AT_ONCE = 256  # waiting requests, in one callback


class Endings:
    """Ends requests that wait or run.

    Args:
        context: the dispatcher's.
        prefetcher: stages waiting requests.
    """

    def __init__(self, context: DispatchContext, prefetcher: Prefetcher) -> None:
        self._requests = context.requests
        self._send = context.send
        self._prefetcher = prefetcher

    def cancel(self, request: Request) -> None:
        """Ends a request that waits or runs; does nothing if it has ended already."""
        if request.id in self._requests.waiting:
            self.end_waiting(request, Ended("cancelled"))
        elif request.on_worker:
            self.end_run(request, Ended("cancelled"))
        self._requests.wake()

    def end_waiting(self, request: Request, event: Event) -> None:
        """Ends a request that waits; its caller gets `event`."""
        self._requests.leave(request)
        self._prefetcher.withdraw(request, event)

    def end_run(self, request: Request, event: Event) -> None:
        """Has the worker end a request; its caller gets `event`, or the event of an earlier call."""
        if request.state is RequestState.CANCELLING:
            return
        told = request.state is RequestState.PREEMPTING or request.id in self._requests.interrupted
        request.cancel(event)
        if not told:
            self._send(Cancel(request.id))

    def end_some_waiting(self, error: PrefixdError) -> bool:
        """Ends up to 256 waiting requests; returns whether more wait."""
        for request in list(islice(self._requests.waiting.values(), _ENDED_AT_ONCE)):
            self.end_waiting(request, error)
        self._requests.wake()
        return bool(self._requests.waiting)
