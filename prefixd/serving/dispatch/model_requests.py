"""The requests that one model's dispatcher has: those that wait, those that run, and those that lost their worker."""

from __future__ import annotations

import asyncio

from prefixd.serving.request.request import Request
from prefixd_scheduler import RequestQueue


class Requests:
    """A dispatcher's requests by id, and the event that has the dispatcher look at them.

    ```
    queue + waiting --start--> running --worker died--> interrupted
          ^                       |                          |
          +-------- enter --------+--------------------------+
    ```

    Args:
        queue: the order of those that wait.

    Attributes:
        waiting: requests in the queue.
        running: requests that the worker has.
        interrupted: requests of a worker that died; each is about to be put back or ended.
        ready: there is a worker that takes requests.
    """

    def __init__(self, queue: RequestQueue) -> None:
        self.queue = queue
        self.waiting: dict[int, Request] = {}
        self.running: dict[int, Request] = {}
        self.interrupted: dict[int, Request] = {}
        self.ready = False
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def taking(self) -> bool:
        """Whether there is a worker to give requests to. It may die during any await."""
        return self.ready and not self.interrupted

    @property
    def begun(self) -> list[Request]:
        """Requests that have a run."""
        return [*self.running.values(), *self.interrupted.values()]

    def begun_frames(self) -> int:
        """The most frames that a request may come to that has run: it can end with that many."""
        begun = self.begun + [request for request in self.waiting.values() if request.handed_over_s is not None]
        return max((request.most_frames for request in begun), default=0)

    def of_tenant(self, tenant: str) -> tuple[int, int]:
        """How many of a tenant's requests (sequences) wait, and how many run."""
        return self.queue.waiting_of(tenant), sum(each.queued.tenant == tenant for each in self.running.values())

    def enter(self, request: Request) -> None:
        """Adds a request that is in the queue now to those that wait."""
        self.waiting[request.id] = request
        self.wake()

    def start(self, request: Request) -> None:
        """Moves a request from the queue to those that run; its tenant is charged for the prompt."""
        self.queue.serve(request.id)
        del self.waiting[request.id]
        self.running[request.id] = request

    def leave(self, request: Request) -> None:
        """Takes a request that waits out of the queue."""
        self.queue.remove(request.id)
        del self.waiting[request.id]

    def interrupt(self) -> None:
        """Moves all that run to those that lost their worker."""
        self.interrupted.update(self.running)
        self.running.clear()

    # -- waking the dispatcher --------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Has the dispatcher look at its requests: something may have changed."""
        if self.waiting or self.running or self.interrupted:
            self._idle.clear()
        else:
            self._idle.set()
        self._changed.set()

    async def wait_for_change(self) -> bool:
        """Waits until `wake` has been called since the last return; returns `taking`."""
        await self._changed.wait()
        self._changed.clear()
        return self.ready and not self.interrupted

    async def wait_idle(self) -> None:
        """Returns when no request waits or runs."""
        await self._idle.wait()
