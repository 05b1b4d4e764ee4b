"""How a model's requests are dispatched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prefixd.settings import Settings

LoadMode = Literal["auto", "always", "never"]
PreemptionMode = Literal["auto", "swap", "recompute"]


@dataclass(frozen=True, slots=True)
class StatePolicy:
    """How many states are kept of a model with recurrent layers.

    Attributes:
        per_prompt: the most states of a prompt; 0 keeps none, nor the tail.
        every_tokens: besides, one after each multiple of this many tokens of the prompt, the last ones first; 0: none.
    """

    per_prompt: int = 4
    every_tokens: int = 0


EVERY_BLOCK = StatePolicy(per_prompt=1 << 30, every_tokens=1)
"""Keeps the states of all blocks of a prompt."""


@dataclass(frozen=True, slots=True)
class DispatchOptions:
    """The settings of a dispatcher and of its parts.

    Attributes:
        max_running: requests that the worker computes at once.
        look_ahead: requests ahead of their turn of which the prefixes are brought up; None for as many as loads take
            time.
        load: what is loaded of a cached prefix (`settings.SchedulerSettings.load`).
        preemption: where the KV of a preempted request goes (`preemption.py`).
        caching: False neither finds nor keeps anything.
        states: which states are kept of a model that has any.
    """

    max_running: int
    look_ahead: int | None
    load: LoadMode = "auto"
    preemption: PreemptionMode = "auto"
    caching: bool = True
    states: StatePolicy = StatePolicy()

    @classmethod
    def of(cls, settings: Settings) -> DispatchOptions:
        """The options that the daemon's settings ask for."""
        scheduler, worker = settings.scheduler, settings.worker
        states = EVERY_BLOCK
        if worker.groups == "by_rule":
            states = StatePolicy(worker.states_per_prompt, worker.state_every_tokens)
        return cls(
            max_running=worker.max_running,
            look_ahead=None if scheduler.look_ahead == "auto" else scheduler.look_ahead,
            load=scheduler.load,
            preemption=scheduler.preemption,
            caching=settings.cache.enabled,
            states=states,
        )
