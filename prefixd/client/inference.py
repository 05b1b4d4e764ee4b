"""Text generation: what a request says and the events that answer it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from prefixd.client.errors import InvalidArgumentError, ServerError
from prefixd.client.messages import message
from prefixd.client.spec import Retention, Tier, check_salt, retention_to_proto
from prefixd.client.tokens import TokenIds, token_bytes
from prefixd.v1 import inference_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen. The k-th depends on (seed, k) and the logits alone."""

    max_tokens: int | None = None
    """Of each sequence; None: 16, or all of `forced_tokens`."""
    temperature: float = 0.0
    """0: greedy."""
    top_k: int = 0
    """Sample among so many most likely tokens; 0: off."""
    top_p: float = 1.0
    """Sample among the fewest tokens that together have this probability; 0 or 1: off."""
    min_p: float = 0.0
    """Sample among tokens that are at least so likely in proportion to the most likely one; 0: off."""
    repetition_penalty: float = 1.0
    """For tokens of prompt and output, 0.01 to 100; more than 1 makes repetition less likely, 0 or 1: off."""
    presence_penalty: float = 0.0
    """For tokens of the output, -2 to 2."""
    frequency_penalty: float = 0.0
    """For tokens of the output, each time they are there, -2 to 2."""
    seed: int | None = None
    """None: chosen by the daemon."""
    stop_token_ids: Sequence[int] = ()
    """Generation ends when one of these is sampled; it is the last of the token ids and no part of the text."""
    stop: str | Sequence[str] = ()
    """Generation ends when the text has this string, or one of these; it is not part of the text."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """Tell each token's logprob, and those of so many most likely ones, in the model's own distribution."""
    forced_tokens: TokenIds | None = None
    """The output, for scoring and replay: keys, values and logprobs are computed as if the model had chosen it."""

    def to_proto(self) -> inference_pb2.SamplingParams:
        """The message that Generate takes. Raises `InvalidArgumentError` for a value that does not fit into it."""
        return message(
            inference_pb2.SamplingParams,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            stop_token_ids=self.stop_token_ids,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            forced_tokens=None
            if self.forced_tokens is None
            else inference_pb2.TokenIds(ids=token_bytes(self.forced_tokens)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearch:
    """Search for the likeliest sequences, with the rules of transformers' `generate`, instead of sampling."""

    width: int
    """Beams that are continued in each step, 1 to 16."""
    length_penalty: float = 1.0
    """A score is the sum of the logprobs divided by the length to this power."""
    early_stopping: bool = False
    """End as soon as `width` sequences have ended."""

    def to_proto(self) -> inference_pb2.BeamSearch:
        """The message that Generate takes. Raises `InvalidArgumentError` for a value that does not fit into it."""
        return message(
            inference_pb2.BeamSearch,
            width=self.width,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
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
    retention_refused: str = ""
    """Why the prompt's blocks are cached without the priorities that were wished for; empty if they have them."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities: of the sampled token, and of the most likely ones by id, best first."""

    logprob: float
    top: dict[int, float]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Newly sampled tokens of a sequence, and the text that became complete with them.

    `logprobs` has one entry a token if the request asks for them. Text that was held back to the end comes without
    tokens.
    """

    token_ids: tuple[int, ...]
    text: str
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """The last event of one of several sequences; a request for one has `Finished` alone.

    `cumulative_logprob` is the sum of its tokens' logprobs; None unless they were asked for, or `best_of` was. Of a
    beam search it is the score: that sum, divided by the length to the power of `length_penalty`.
    """

    index: int
    reason: FinishReason
    output_tokens: int
    cumulative_logprob: float | None


@dataclass(frozen=True, slots=True)
class Finished:
    """Always the last event. `hit_tokens` are the prompt tokens not computed, by the tier they were in.

    `queue_s` and `ttft_s` are seconds from the call's arrival in the daemon, before it waits for the model or
    tokenizes, to the hand-over to the worker and to the first token; `resumed` is how often the request was put back
    into the queue: after a preemption, after a worker's death, or because the worker had no memory for it while others
    ran. Of several sequences `reason` is CANCELLED if one was
    cancelled, else LENGTH if one came to its length, else STOP, and `output_tokens` counts all that were computed.
    `cumulative_logprob` is that of a single sequence, as in `SequenceFinished`. `encoded_images` embeddings of its
    images were computed; those of the others were known.
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
    images: Sequence[bytes] = (),
    n: int = 1,
    best_of: int | None = None,
    beam_search: BeamSearch | None = None,
    request_id: str = "",
    priority: int = 0,
    deadline_s: float | None = None,
    salt: bytes = b"",
    model: str = "",
    retention: Sequence[Retention] = (),
    read_only: bool = False,
) -> inference_pb2.GenerateRequest:
    """The message for a prompt given as text or as token ids.

    Raises `InvalidArgumentError` for a value that does not fit into it.
    """
    check_salt(salt)
    if beam_search is not None and not isinstance(beam_search, BeamSearch):
        raise InvalidArgumentError(f"beam_search is {beam_search!r}; it must be a BeamSearch, as BeamSearch(width=4)")
    text, ids = (prompt, None) if isinstance(prompt, str) else (None, token_bytes(prompt))
    return message(
        inference_pb2.GenerateRequest,
        request_id=request_id,
        text=text,
        token_ids=None if ids is None else inference_pb2.TokenIds(ids=ids),
        sampling=sampling.to_proto(),
        priority=priority,
        deadline_s=deadline_s,
        salt=salt,
        images=images,
        model=model,
        n=n,
        best_of=best_of,
        beam_search=beam_search.to_proto() if beam_search is not None else None,
        retention=retention_to_proto(retention),
        read_only=read_only,
    )


def event_from_proto(response: inference_pb2.GenerateResponse) -> GenerateEvent:
    """The event in the client's words. Raises `ServerError` for one this version does not know."""
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
                cumulative_logprob=_sum(ended),
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
                cumulative_logprob=_sum(finished),
                encoded_images=finished.encoded_images,
            )
        case unknown:
            raise ServerError(f"the daemon sent an event this client does not know: {unknown}")


def _logprobs(logprobs: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(logprobs.logprob, dict(zip(logprobs.top_ids, logprobs.top_logprobs, strict=False)))


def _sum(ended: inference_pb2.SequenceFinished | inference_pb2.Finished) -> float | None:
    return ended.cumulative_logprob if ended.HasField("cumulative_logprob") else None


def _reason(value: inference_pb2.FinishReason) -> FinishReason:
    try:
        return FinishReason(inference_pb2.FinishReason.Name(value).removeprefix("FINISH_REASON_").lower())
    except ValueError as error:
        raise ServerError(f"the daemon gave a reason to finish that this client does not know: {value}") from error
