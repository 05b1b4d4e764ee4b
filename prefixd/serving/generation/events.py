"""The events of a call: `Accepted`, then `Tokens` and `SequenceFinished`, then `Finished`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixd.serving.request.request_events import FinishReason
from prefixd.worker_protocol.protocol import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first event: the request is queued."""

    request_id: str
    prompt_tokens: int
    retention_refused: str = ""
    """Why the prompt's blocks are cached without the requested retention; empty if they have it."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens that were sampled, and text."""

    token_ids: list[int]
    """Empty for text that was held back until the end of a sequence."""
    text: str
    """The text that became complete with them: no half characters, no part of a stop string, none of stop tokens."""
    index: int = 0
    """The sequence's number."""
    logprobs: Sequence[TokenLogprobs] = ()
    """Of each token, if they were asked for."""


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """The last event of one of several sequences; a single one has `Finished` alone."""

    index: int
    reason: FinishReason
    output_tokens: int
    cumulative_logprob: float | None
    """Sum of the logprobs of its tokens; None unless they were asked for or needed to choose among sequences."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event, with what the request used."""

    reason: FinishReason
    """Of several sequences: cancelled if one was, else length if one came to its length, else stop."""
    prompt_tokens: int
    output_tokens: int
    """Of all sequences, those that were not among the best included."""
    hit_tokens: tuple[int, int, int, int]
    """Prompt tokens that were found, by their tier when the first sequence was queued: GPU, CPU, disk, remote."""
    queue_s: float
    """From the call's arrival to the first hand-over of a sequence to the worker."""
    ttft_s: float
    """From the call's arrival to the first token of a sequence; 0 without one."""
    resumed: int
    """How often a sequence was put back into the queue: preempted, or its worker died or had no memory for it."""
    cumulative_logprob: float | None = None
    """Of a single sequence, as in `SequenceFinished`."""
    encoded_images: int = 0
    """Number of its images whose embeddings were computed; those of the others were cached."""


GenerationEvent = Accepted | Tokens | SequenceFinished | Finished
