"""Text generation: the message of a request, and the events of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TypeAlias

from prefixd.base.sampling import BeamSearch, Sampling
from prefixd.base.tiers import Tier
from prefixd.client.errors import InvalidArgumentError, ServerError
from prefixd.client.messages import TokenIds, message, token_bytes
from prefixd.client.spec import Retention, check_salt, retention_to_proto
from prefixd.v1 import inference_pb2


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
    retention_refused: str = ""
    """Why the prompt's blocks are cached without the requested priorities; empty if they have them."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities: of the sampled token, and of the most likely tokens by id, best first."""

    logprob: float
    top: dict[int, float]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Newly sampled tokens of a sequence, and the text that became complete with them.

    `logprobs` has one entry for each token if the request asks for them. Text that was held back until the end comes
    in an event without tokens.
    """

    token_ids: tuple[int, ...]
    text: str
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """The last event of one of several sequences; a request for one sequence has only `Finished`.

    `cumulative_logprob` is the sum of the tokens' logprobs; None if the request asks neither for logprobs nor for
    `best_of`. In a beam search it is the score: the sum divided by the length to the power of `length_penalty`.
    """

    index: int
    reason: FinishReason
    output_tokens: int
    cumulative_logprob: float | None


@dataclass(frozen=True, slots=True)
class Finished:
    """Always the last event.

    Attributes:
        reason: of several sequences: CANCELLED if one was cancelled, else LENGTH if one reached its length, else STOP.
        prompt_tokens: tokens of the prompt.
        output_tokens: all computed tokens of the output, of all sequences.
        hit_tokens: prompt tokens that were not computed, by the tier in which they were.
        queue_s: seconds from the call's arrival in the daemon (before it waits for the model or tokenizes) until the
            request was handed to the worker.
        ttft_s: seconds from the call's arrival until the first token.
        resumed: how often the request returned to the queue: after a preemption, after a worker's death, or because the
            worker had no memory for it while others ran.
        cumulative_logprob: of a single sequence, as in `SequenceFinished`.
        encoded_images: images with embeddings that were computed; the embeddings of the others were cached.
    """

    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    hit_tokens: dict[Tier, int]
    queue_s: float
    ttft_s: float
    resumed: int
    cumulative_logprob: float | None = None
    encoded_images: int = 0


GenerateEvent: TypeAlias = Accepted | Tokens | SequenceFinished | Finished


def generate_request(
    prompt: str | TokenIds,
    sampling: Sampling,
    *,
    salt: bytes = b"",
    retention: Sequence[Retention] = (),
    **fields: object,
) -> inference_pb2.GenerateRequest:
    """Returns the message for a prompt given as text or as token ids; `fields` are further fields of the message.

    Raises `InvalidArgumentError` for a value that a field cannot hold.
    """
    check_salt(salt)
    if not isinstance(sampling, Sampling):
        raise InvalidArgumentError(f"sampling is {sampling!r}; it must be a Sampling, as Sampling(max_tokens=64)")
    text, ids = (prompt, None) if isinstance(prompt, str) else (None, _token_ids(prompt))
    return message(
        inference_pb2.GenerateRequest,
        text=text,
        token_ids=ids,
        sampling=_sampling_to_proto(sampling),
        beam_search=_beam_search_to_proto(sampling.beam_search),
        salt=salt,
        retention=retention_to_proto(retention),
        **fields,
    )


def _sampling_to_proto(sampling: Sampling) -> inference_pb2.SamplingParams:
    values = {name: getattr(sampling, name) for name in inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name}
    forced = sampling.forced_tokens
    values["forced_tokens"] = None if forced is None else _token_ids(forced)
    values["stop"] = sampling.stop_strings
    return message(inference_pb2.SamplingParams, **values)


def _beam_search_to_proto(search: BeamSearch | None) -> inference_pb2.BeamSearch | None:
    if search is None:
        return None
    if not isinstance(search, BeamSearch):
        raise InvalidArgumentError(f"beam_search is {search!r}; it must be a BeamSearch, as BeamSearch(width=4)")
    return message(inference_pb2.BeamSearch, **asdict(search))


def _token_ids(tokens: TokenIds | bytes) -> inference_pb2.TokenIds:
    return inference_pb2.TokenIds(ids=tokens if isinstance(tokens, bytes) else token_bytes(tokens))


def event_from_proto(response: inference_pb2.GenerateResponse) -> GenerateEvent:
    """Returns the event of a message. Raises `ServerError` for an event that this version does not know."""
    match response.WhichOneof("event"):
        case "accepted":
            accepted = response.accepted
            return Accepted(accepted.request_id, accepted.prompt_tokens, accepted.retention_refused)
        case "tokens":
            tokens = response.tokens
            return Tokens(tuple(tokens.token_ids), tokens.text, tokens.index, tuple(map(_logprobs, tokens.logprobs)))
        case "sequence_finished":
            ended = response.sequence_finished
            return SequenceFinished(
                index=ended.index,
                reason=_reason(ended.reason),
                output_tokens=ended.output_tokens,
                cumulative_logprob=_cumulative_logprob(ended),
            )
        case "finished":
            finished = response.finished
            hits = finished.hit_tokens
            return Finished(
                reason=_reason(finished.reason),
                prompt_tokens=finished.prompt_tokens,
                output_tokens=finished.output_tokens,
                hit_tokens={Tier.GPU: hits.gpu, Tier.CPU: hits.cpu, Tier.DISK: hits.disk, Tier.REMOTE: hits.remote},
                queue_s=finished.queue_s,
                ttft_s=finished.ttft_s,
                resumed=finished.resumed,
                cumulative_logprob=_cumulative_logprob(finished),
                encoded_images=finished.encoded_images,
            )
        case unknown:
            raise ServerError(f"the daemon sent an event this client does not know: {unknown}")


def _logprobs(logprobs: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(logprobs.logprob, dict(zip(logprobs.top_ids, logprobs.top_logprobs, strict=False)))


def _cumulative_logprob(ended: inference_pb2.SequenceFinished | inference_pb2.Finished) -> float | None:
    return ended.cumulative_logprob if ended.HasField("cumulative_logprob") else None


def _reason(value: inference_pb2.FinishReason) -> FinishReason:
    try:
        return FinishReason(inference_pb2.FinishReason.Name(value).removeprefix("FINISH_REASON_").lower())
    except ValueError as error:
        raise ServerError(f"the daemon gave a reason to finish that this client does not know: {value}") from error
