"""Options of a dispatcher, from the daemon's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prefixd.settings import Settings

LoadMode = Literal["auto", "always", "never"]
LayerwiseMode = Literal["auto", "always", "never"]
PreemptionMode = Literal["auto", "swap", "recompute"]


@dataclass(frozen=True, slots=True)
class StatePolicy:
    """How many states of a model with recurrent layers are kept.

    Attributes:
        per_prompt: the most states of a prompt; 0 keeps none, not even the tail.
        every_tokens: keeps a state after each multiple of this many tokens of the prompt, the last ones first; 0: none.
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
        look_ahead: number of waiting requests whose prefixes are brought up ahead of their turns; None: measured
            (`LookAhead`).
        load: which part of a cached prefix is loaded (`settings.SchedulerSettings.load`).
        preemption: where the KV of a preempted request goes (`preemption.py`).
        caching: False neither finds nor keeps anything.
        states: which states are kept, for a model with states.
        keep_embeddings: False embeds the images of each prompt anew.
        layerwise: whether prefixes come layer by layer (`settings.WorkerSettings.layerwise_loads`).
    """

    max_running: int
    look_ahead: int | None
    load: LoadMode = "auto"
    preemption: PreemptionMode = "auto"
    caching: bool = True
    states: StatePolicy = StatePolicy()
    keep_embeddings: bool = True
    layerwise: LayerwiseMode = "auto"

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
            keep_embeddings=worker.keep_embeddings,
            layerwise=worker.layerwise_loads,
        )
