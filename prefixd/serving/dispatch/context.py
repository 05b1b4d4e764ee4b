"""What the parts of one model's dispatcher share: its requests, and what it knows of other models' dispatchers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prefixd.base.pacer import SLICE_ROWS, Pacer
from prefixd.cache import TieredCache
from prefixd.serving.dispatch.options import DispatchOptions
from prefixd.serving.frame_budget import FrameBudget
from prefixd.serving.request.request import Request
from prefixd.worker_protocol.protocol import ToWorker
from prefixd_scheduler import CostModel, LookAhead, RequestQueue


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


class Sharer(Protocol):
    """A model's dispatcher, as the others see it."""

    running: dict[int, Request]

    @property
    def moving(self) -> bool:
        """Whether blocks of its preempted requests are on their way out of the tier."""

    def take_back(self, request: Request) -> None:
        """Has its worker give up a running request's frames, to run again later."""

    def run_ended(self) -> None:
        """A run has ended, of whichever model: who was preempted may run again."""

    async def unstage_all(self) -> None:
        """Lets go of what waiting requests hold."""

    def wake(self) -> None:
        """Frames may have become free, or its turn has come."""


class TierShare:
    """The dispatchers that give out the frames of one tier. One alone is always first in line.

    Frames that one model's requests have are not there for another's, so each dispatcher counts all of them, and hears
    when some may have become free. Two rules keep every request going:

    - **Running requests have one rank, whatever their model.** Where one lacks a frame, the last in rank gives way
      (`preemption.py`), so two models that have each a part of what they need do not wait for each other.
    - **A model whose next request lacks frames joins a line.** Others hand no new request over until it is their turn,
      so what ends gives its frames to the model that has lacked them for longest, not to a busy model's next request.
    """

    def __init__(self) -> None:
        self._members: list[Sharer] = []
        self._line: list[Sharer] = []
        self._turns = 0
        self._budgets: list[FrameBudget] = []

    def join(self, member: Sharer, budgets: Iterable[FrameBudget] = ()) -> None:
        """Adds a model's dispatcher, and what counts the frames that its requests have and keep."""
        self._members.append(member)
        self._budgets += budgets

    @property
    def members(self) -> int:
        """How many dispatchers there are."""
        return len(self._members)

    @property
    def shared(self) -> bool:
        """Whether there are several models."""
        return len(self._members) > 1

    def next_turn(self) -> int:
        """Numbers the requests of all models in the order in which they are handed over."""
        self._turns += 1
        return self._turns

    @property
    def taken_frames(self) -> int:
        """Frames that requests of all models have and keep."""
        return sum(budget.taken for budget in self._budgets)

    @property
    def moving(self) -> bool:
        """Whether blocks of preempted requests of any model are on their way out of the tier."""
        return any(member.moving for member in self._members)

    def running(self) -> list[Request]:
        """All that run, in the order in which they were handed over."""
        running = [request for member in self._members for request in member.running.values()]
        return sorted(running, key=lambda request: request.turn)

    def take_back(self, request: Request) -> None:
        """Preempts a running request of whichever model."""
        for member in self._members:
            if member.running.get(request.id) is request:
                member.take_back(request)

    def run_ended(self) -> None:
        """A run has ended: who was preempted may run again."""
        for member in self._members:
            member.run_ended()

    async def unstage_others(self, but: Sharer) -> None:
        """A running request lacks frames: what requests of other models hold ahead of their turn goes."""
        for other in self._others(but):
            await other.unstage_all()

    # -- the line -----------------------------------------------------------------------------------------------

    def may_hand_over(self, member: Sharer) -> bool:
        """Whether no other model is before this one in line."""
        return not self._line or self._line[0] is member

    def wait(self, member: Sharer) -> None:
        """The next request of a model lacks frames."""
        if member not in self._line:
            self._line.append(member)

    async def clear(self, member: Sharer) -> None:
        """Who is first in line lacks frames: what others only hold ahead of their turn goes."""
        if self.may_hand_over(member):
            await self.unstage_others(member)

    def leave(self, member: Sharer) -> None:
        """A model lacks no frames now, or has no worker."""
        if member in self._line:
            self._line.remove(member)
            for other in self._others(member):
                other.wake()

    def _others(self, but: Sharer) -> Iterable[Sharer]:
        return [member for member in self._members if member is not but]


@dataclass(slots=True)
class DispatchCounters:
    """What happened since the start.

    Attributes:
        finished: requests that ended by themselves.
        resumed: runs that were ended and are repeated.
        asked_images: images of prompts that were handed over.
        encoded_images: embeddings that the worker has computed of them.
        found_images: images of which the keys and values for cross-attention were found in a tier.
        passes: forward passes of the model.
        proposed_tokens: tokens that its draft proposed.
        accepted_tokens: those of them that the model chose, too.
    """

    finished: int = 0
    resumed: int = 0
    asked_images: int = 0
    encoded_images: int = 0
    found_images: int = 0
    passes: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(eq=False)
class DispatchContext:
    """What the parts of one model's dispatcher share.

    Attributes:
        cache: the cache; its GPU tier is set before the first request is handed over.
        requests: the model's requests.
        cost: learns what loading and computing cost.
        send: gives a message to the worker.
        clock: seconds.
        options: the settings.
        share: the dispatchers of all models, which take frames of one tier.
        member: this dispatcher, as the others see it.
        look_ahead: says when a request's turn comes.
        budget: counts the frames that requests have and keep.
        image_budget: counts those of images that are in no block of a prompt.
        pacer: lets other tasks run during a dispatch.
    """

    cache: TieredCache
    requests: Requests
    cost: CostModel
    send: Callable[[ToWorker], None]
    clock: Callable[[], float]
    options: DispatchOptions
    share: TierShare
    member: Sharer
    counters: DispatchCounters = field(default_factory=DispatchCounters)

    def __post_init__(self) -> None:
        self.look_ahead = LookAhead(self.cost, self.clock, self.options.look_ahead)
        self.budget, self.image_budget = FrameBudget(self._frames_of_parts), FrameBudget(self._frames_of_parts)
        self.pacer = Pacer(SLICE_ROWS)
        self.wake = self.requests.wake

    @property
    def caching(self) -> bool:
        """Whether anything is found in the cache or kept there."""
        return self.options.caching

    def _frames_of_parts(self, sizes: Sequence[int]) -> int:
        tier = self.cache.tiers.gpu
        return tier.footprint(sizes) // tier.frame_bytes
