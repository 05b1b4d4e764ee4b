"""The requests of one model's dispatcher: those that wait, those that run, and those whose worker died."""

from __future__ import annotations

import asyncio

from prefixd.serving.request.request import Request
from prefixd_scheduler import RequestQueue


class Requests:
    """A dispatcher's requests by id, and the event that wakes the dispatcher.

    ```
    queue + waiting --start--> running --worker died--> interrupted
          ^                       |                          |
          +-------- enter --------+--------------------------+
    ```

    Args:
        queue: the order of the waiting requests.

    Attributes:
        waiting: requests in the queue.
        running: requests that the worker has.
        interrupted: requests of a worker that died; each will be put back or ended.
        ready: a worker accepts requests.
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
        """Whether a worker takes requests now. It may die during any await."""
        return self.ready and not self.interrupted

    @property
    def busy(self) -> bool:
        """Whether requests wait or run."""
        return bool(self.waiting or self.running or self.interrupted)

    @property
    def begun(self) -> list[Request]:
        """Requests that have a run."""
        return [*self.running.values(), *self.interrupted.values()]

    def begun_frames(self) -> int:
        """The most frames that a request which has run may need until its end."""
        begun = self.begun + [request for request in self.waiting.values() if request.handed_over_s is not None]
        return max((request.most_frames for request in begun), default=0)

    def of_tenant(self, tenant: str) -> tuple[int, int]:
        """How many of a tenant's requests (sequences) wait, and how many run."""
        return self.queue.waiting_of(tenant), sum(each.queued.tenant == tenant for each in self.running.values())

    def enter(self, request: Request) -> None:
        """Adds a request, which is in the queue already, to the waiting ones."""
        self.waiting[request.id] = request
        self.wake()

    def start(self, request: Request) -> None:
        """Moves a request from the queue to the running ones; its tenant is charged for the prompt."""
        self.queue.serve(request.id)
        del self.waiting[request.id]
        self.running[request.id] = request

    def leave(self, request: Request) -> None:
        """Takes a waiting request out of the queue."""
        self.queue.remove(request.id)
        del self.waiting[request.id]

    def interrupt(self) -> None:
        """Moves all running requests to the interrupted ones."""
        self.interrupted.update(self.running)
        self.running.clear()

    # -- waking the dispatcher --------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Has the dispatcher look at its requests again."""
        if self.busy:
            self._idle.clear()
        else:
            self._idle.set()
        self._changed.set()

    async def wait_for_change(self) -> bool:
        """Waits until `wake` has been called since the last return; returns `taking`."""
        await self._changed.wait()
        self._changed.clear()
        return self.taking

    async def wait_idle(self) -> None:
        """Returns when no request waits or runs."""
        await self._idle.wait()
