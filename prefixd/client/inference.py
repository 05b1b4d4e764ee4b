"""Text generation: what a request says and the events that answer it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from prefixd.client.errors import ServerError
from prefixd.client.spec import Tier
from prefixd.client.tokens import TokenIds, token_bytes
from prefixd.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. The k-th depends on (seed, k) and the logits alone."""

    max_tokens: int = 16
    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    seed: int | None = None
    """None: chosen by the daemon."""
    stop_token_ids: Sequence[int] = ()
    """Generation ends when one of these is sampled; it is not part of the output."""
    ignore_eos: bool = False

    def to_proto(self) -> inference_pb2.SamplingParams:
        """The message that Generate takes."""
        return inference_pb2.SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
        )


class FinishReason(StrEnum):
    """Why generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Accepted:
    """Always the first event."""

    request_id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Newly sampled tokens, and the text that became complete with them."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Always the last event. `hit_tokens` are the prompt tokens not computed, by the tier they were in.

    `queue_s` and `ttft_s` are seconds from the arrival in the daemon to the hand-over to the worker and to the first
    token; `resumed` is how often the request was taken up again after a preemption or a worker's death.
    """

    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    hit_tokens: dict[Tier, int]
    queue_s: float
    ttft_s: float
    resumed: int


GenerateEvent: TypeAlias = Accepted | Tokens | Finished


def generate_request(
    prompt: str | TokenIds, sampling: Sampling, request_id: str, priority: int, salt: bytes
) -> inference_pb2.GenerateRequest:
    """The message for a prompt given as text or as token ids."""
    request = inference_pb2.GenerateRequest(
        request_id=request_id, sampling=sampling.to_proto(), priority=priority, salt=salt
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids = token_bytes(prompt)
    return request


def event_from_proto(response: inference_pb2.GenerateResponse) -> GenerateEvent:
    """The event in the client's words. Raises `ServerError` for one this version does not know."""
    match response.WhichOneof("event"):
        case "accepted":
            return Accepted(response.accepted.request_id, response.accepted.prompt_tokens)
        case "tokens":
            return Tokens(tuple(response.tokens.token_ids), response.tokens.text)
        case "finished":
            finished = response.finished
            hits = finished.hit_tokens
            return Finished(
                reason=_reason(finished.reason),
                prompt_tokens=finished.prompt_tokens,
                output_tokens=finished.output_tokens,
                hit_tokens={Tier.GPU: hits.gpu, Tier.CPU: hits.cpu, Tier.DISK: hits.disk},
                queue_s=finished.queue_s,
                ttft_s=finished.ttft_s,
                resumed=finished.resumed,
            )
        case unknown:
            raise ServerError(f"the daemon sent an event this client does not know: {unknown}")


def _reason(value: inference_pb2.FinishReason) -> FinishReason:
    try:
        return FinishReason(inference_pb2.FinishReason.Name(value).removeprefix("FINISH_REASON_").lower())
    except ValueError as error:
        raise ServerError(f"the daemon gave a reason to finish that this client does not know: {value}") from error
