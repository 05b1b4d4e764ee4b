"""The events of a request, for its caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from prefixd.worker_protocol.protocol import BeamResult, TokenLogprobs

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens that were sampled, and the logprobs of each if they were asked for."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a request; `beams` are what a beam search has found, the best sequence first."""

    reason: FinishReason
    beams: Sequence[BeamResult] = ()


Event = NewTokens | Ended | Exception


class EventSink(Protocol):
    """Takes a request's events: a queue of its own, or one that several requests share."""

    def put_nowait(self, event: Event, /) -> None: ...
