"""Connects the dispatchers of a daemon's models, which give out the frames of one tier.

A frame that one model's request has is not free for another model. So each dispatcher counts the frames of all models,
and is woken when some may have become free. Two rules keep every request going:

- **Running requests have one rank, whatever their model.** Where one lacks a frame, the last in rank gives way
  (`preemption.py`), so two models that each have a part of the frames that they need do not wait for each other.
- **A model whose next request lacks frames joins a line.** The others hand no new request over until it is their turn,
  so the frames of a run that ends go to the model that has lacked them for longest, not to a busy model's next request.

They also note how large the tier has to be for their next requests to run (`need`), for a tier that may grow. It says
whether it can (`short`, `refused_s`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from prefixd.serving.request.request import Request


class Sharer(Protocol):
    """A model's dispatcher, as the others see it."""

    running: dict[int, Request]
    waiting: dict[int, Request]

    @property
    def taken_frames(self) -> int:
        """Frames that its requests have and keep."""

    @property
    def moving(self) -> bool:
        """Whether blocks of its preempted requests are on their way out of the tier."""

    def take_back(self, request: Request) -> None:
        """Has its worker give up a running request's frames, to run again later."""

    def run_ended(self) -> None:
        """A run of any model has ended: preempted requests may run again."""

    async def unstage_all(self) -> None:
        """Ends the holds of waiting requests."""

    def wake(self) -> None:
        """Has it look at its requests: frames may have become free, or it is first in line."""


class TierShare:
    """The dispatchers that share a tier. A single dispatcher is always first in line.

    Attributes:
        on_need: called when requests lack frames.
        short: a tier that may grow has fewer frames than requests need, and cannot grow now: those that fit pass those
            that do not (`capacity/passed.py`).
        refused_s: since when it is short because the device gives no memory; None: for another reason, such as a worker
            that is about to take that memory for its model.
    """

    def __init__(self) -> None:
        self._members: list[Sharer] = []
        self._line: list[Sharer] = []
        self._turns = 0
        self._needs: dict[Sharer, int] = {}
        self._begins: dict[Sharer, int] = {}
        self.on_need: Callable[[], None] = lambda: None
        self.short = False
        self.refused_s: float | None = None

    def join(self, member: Sharer) -> None:
        """Adds a model's dispatcher."""
        self._members.append(member)

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
    def turns(self) -> int:
        """How many requests of all models were handed over."""
        return self._turns

    @property
    def needed_frames(self) -> int:
        """Frames of the tier with which the next requests that lack some could run; 0: none lacks any."""
        return max((frames for member, frames in self._needs.items() if member.waiting), default=0)

    @property
    def begins_frames(self) -> int:
        """Frames of the tier with which requests can run that others have passed while it was too small; 0: none."""
        return max((frames for member, frames in self._begins.items() if member.waiting), default=0)

    def need(self, member: Sharer, frames: int, begins: int = 0) -> None:
        """Notes with how many frames of the tier the next requests of a model could run; 0: they lack none. `begins`:
        with how many its passed requests can, which the tier has now."""
        self._needs[member], self._begins[member] = frames, begins
        if frames:
            self.on_need()

    @property
    def taken_frames(self) -> int:
        """Frames that requests of all models have and keep."""
        return sum(member.taken_frames for member in self._members)

    @property
    def moving(self) -> bool:
        """Whether blocks of preempted requests of any model are on their way out of the tier."""
        return any(member.moving for member in self._members)

    def running(self) -> list[Request]:
        """The running requests of all models, in the order in which they were handed over."""
        running = [request for member in self._members for request in member.running.values()]
        return sorted(running, key=lambda request: request.turn)

    def take_back(self, request: Request) -> None:
        """Preempts a running request of any model."""
        for member in self._members:
            if member.running.get(request.id) is request:
                member.take_back(request)

    def run_ended(self) -> None:
        """A run has ended: preempted requests may run again."""
        for member in self._members:
            member.run_ended()

    async def unstage_others(self, but: Sharer) -> None:
        """A running request lacks frames: ends the holds of waiting requests of other models."""
        for other in self._others(but):
            await other.unstage_all()

    # -- the line -----------------------------------------------------------------------------------------------

    def may_hand_over(self, member: Sharer) -> bool:
        """Whether no other model stands before this one in line."""
        return not self._line or self._line[0] is member

    def wait(self, member: Sharer) -> None:
        """Puts a model whose next request lacks frames into the line."""
        if member not in self._line:
            self._line.append(member)

    async def clear(self, member: Sharer) -> None:
        """The next request of a model lacks frames: if it is first in line, other models' waiting requests lose their
        holds."""
        if self.may_hand_over(member):
            await self.unstage_others(member)

    def leave(self, member: Sharer) -> None:
        """Takes a model out of the line: it lacks no frames now, or has no worker."""
        if member in self._line:
            self._line.remove(member)
            for other in self._others(member):
                other.wake()

    def _others(self, but: Sharer) -> Iterable[Sharer]:
        return [member for member in self._members if member is not but]
