"""What the dispatchers of a daemon's models know of one another: they give out the frames of one tier.

Frames that one model's requests have are not there for another's, so each dispatcher counts all of them, and hears when
some may have become free. Two rules keep every request going:

- **Running requests have one rank, whatever their model.** Where one lacks a frame, the last in rank gives way
  (`preemption.py`), so two models that have each a part of what they need do not wait for each other.
- **A model whose next request lacks frames joins a line.** Others hand no new request over until it is their turn, so
  what ends gives its frames to the model that has lacked them for longest, not to a busy model's next request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from prefixd.serving.frame_budget import FrameBudget
from prefixd.serving.request.request import Request


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
    """The dispatchers that share a tier. One alone is always first in line."""

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
