"""The parameters of a call, and their bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from prefixd.base.errors import InvalidArgumentError, UnsupportedError
from prefixd.base.sampling import BeamSearch, Sampling
from prefixd.base.tenancy.tenants import Tenant
from prefixd.cache.placement.retention import Retention
from prefixd.observability.trace_context import TraceContext
from prefixd.serving.models.served_model import ServedModel
from prefixd.serving.text.chat_template import Chat

DEFAULT_MAX_TOKENS = 16
MOST_IMAGES = 4096  # also if worker.images_per_prompt is higher: their lengths are added up on the event loop
MOST_SEQUENCES = 32
MOST_KEPT = 1 << 20  # tokens and logprobs that wait in memory for the end of a best_of
_MASK_64 = (1 << 64) - 1
_SEED_STEP = 0x9E3779B97F4A7C15  # SplitMix64's step, 2^64 / golden ratio: sequences of small seeds do not collide


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """The parameters of a call, not checked yet. Where 0 is no valid value, it means the default."""

    prompt: str | bytes | Chat
    """Text, token ids as little-endian uint32, 4 bytes each, or a chat for the model's template."""
    images: Sequence[bytes] = ()
    """The files of the prompt's images; the prompt holds a placeholder for each."""
    request_id: str = ""
    """The caller's name for the request; empty: one is chosen."""
    sampling: Sampling = Sampling()
    """For each sequence."""
    n: int = 0
    """Sequences to answer with; 0: one."""
    best_of: int = 0
    """Sequences to compute, of which the n with the highest sum of logprobs are the answer; 0: n."""
    priority: int = 0
    """Lower goes first."""
    deadline_s: float | None = None
    """Seconds from the arrival until the first token is due; None: no deadline."""
    salt: bytes = b""
    """Prompts of different salts never share a cached block."""
    model: str = ""
    """Name of the model; empty: the first."""
    tenant: Tenant | None = None
    """The caller's tenant; None: the default one. Prompts of two tenants never share a cached block."""
    read_only: bool = False
    """Use what is cached, and leave nothing in the cache."""
    message_bytes: int = 0
    """Size of the call's message."""
    waited_s: float = 0.0
    """Seconds since the call came, in which its message was received."""
    retention: Sequence[Retention] = ()
    """Requested for the prompt's blocks; checked."""
    client_id: str = ""
    """The caller's own id of the request, from the header `prefixd-request-id`; it need not be unique."""
    trace: TraceContext | None = None
    """The caller's span, from the header `traceparent`."""
    kept: bool = False
    """The caller keeps the whole output in memory until its end, so that it counts as unread until then."""
    as_long_as_fits: bool = False
    """The output may have as many tokens as the model's context and the GPU tier hold, not `sampling.max_tokens`."""

    @property
    def answers(self) -> int:
        """Sequences to answer with."""
        return self.n or 1

    @property
    def sequences(self) -> int:
        """Sequences to compute as requests of their own; a beam search is one."""
        if self.sampling.beam_search is not None:
            return 1
        return self.best_of or self.answers

    def sequence_sampling(self, index: int, seed: int, room: int) -> Sampling:
        """The sampling parameters of the sequence with this number.

        seed: the request's.  room: tokens that the model's context, and with `as_long_as_fits` the GPU tier, leave for
        the output.
        """
        asked, stop_token_ids = self.sampling, tuple(self.sampling.stop_token_ids)
        if asked.forced_tokens is not None:  # nothing is drawn
            return Sampling(
                max_tokens=len(asked.forced_ids),
                stop_token_ids=stop_token_ids,
                ignore_eos=asked.ignore_eos,
                logprobs=asked.logprobs,
                forced_tokens=asked.forced_tokens,
            )
        logprobs = asked.logprobs
        if logprobs is None and self.sequences > self.answers:
            logprobs = 0  # their sum decides which sequences are the best
        return replace(
            asked,
            max_tokens=room if self.as_long_as_fits else min(asked.max_tokens or DEFAULT_MAX_TOKENS, room),
            seed=sequence_seed(seed, index),
            stop_token_ids=stop_token_ids,
            stop=(),
            logprobs=logprobs,
        )


def sequence_seed(seed: int, index: int) -> int:
    """The seed of one of a request's sequences: (seed + index * 0x9E3779B97F4A7C15) mod 2^64.

    The first has the request's own; the others sample as a request with the derived seed would alone.
    """
    return (seed + index * _SEED_STEP) & _MASK_64


def image_bytes(params: GenerateParams) -> int:
    """Bytes of the images' files. Raises InvalidArgumentError for more than `MOST_IMAGES` images."""
    if len(params.images) > MOST_IMAGES:
        raise InvalidArgumentError(f"the request has {len(params.images)} images; send at most {MOST_IMAGES}")
    return sum(map(len, params.images))


def check_params(params: GenerateParams, model: ServedModel) -> None:
    """Checks the parameters, for any model and for this one. The time is bounded for values of any size.

    Raises InvalidArgumentError, and UnsupportedError for features that the model does not have.
    """
    if params.deadline_s is not None and not 0 < params.deadline_s < math.inf:
        raise InvalidArgumentError(
            f"deadline_s is {params.deadline_s}; send seconds above 0, or leave it out for no deadline"
        )
    sampling = params.sampling
    sampling.check()
    for token in sampling.stop_token_ids:
        if not 0 <= token < model.hello.vocab_size:
            raise InvalidArgumentError(
                f"stop token id {token} is outside the vocabulary of {model.hello.vocab_size}; "
                "take ids from the model's own tokenizer"
            )
    if sampling.stop and model.codec is None:
        raise UnsupportedError("the model has no tokenizer, so its output has no text; send stop_token_ids, not stop")
    _check_sequences(params, model)
    if sampling.beam_search is not None:
        _check_search(params, sampling.beam_search, model)
    if sampling.forced_tokens is not None:
        _check_forced(params, model)


def _check_sequences(params: GenerateParams, model: ServedModel) -> None:
    sampling = params.sampling
    for name in ("n", "best_of"):
        if not 0 <= getattr(params, name) <= MOST_SEQUENCES:
            raise InvalidArgumentError(f"{name} is {getattr(params, name)}; ask for at most {MOST_SEQUENCES} sequences")
    if params.best_of and params.best_of < params.answers:
        raise InvalidArgumentError(
            f"best_of is {params.best_of}, less than n, which is {params.answers}; raise best_of to at least n or "
            "leave it out"
        )
    tokens, logprobs = min(sampling.max_tokens or DEFAULT_MAX_TOKENS, model.hello.max_model_tokens), sampling.logprobs
    kept = params.best_of * tokens * (1 + (logprobs or 0))
    if params.best_of > params.answers and kept > MOST_KEPT:
        raise InvalidArgumentError(
            f"best_of is {params.best_of} with up to {tokens} tokens and {logprobs or 0} logprobs each: {kept} "
            f"values would wait for the end, {MOST_KEPT} may; lower best_of, max_tokens or logprobs"
        )
    if params.sequences > 1 and sampling.temperature == 0:
        name = "n" if params.answers > 1 else "best_of"
        raise InvalidArgumentError(
            f"{name} is {params.sequences} with temperature 0, which gives the same tokens each time; set a "
            f"temperature above 0, or {name} to 1"
        )


def _check_forced(params: GenerateParams, model: ServedModel) -> None:
    sampling, ids = params.sampling, params.sampling.forced_ids
    for name, value in (("n", params.answers), ("best_of", params.best_of)):
        if value > 1:
            raise InvalidArgumentError(f"{name} is {value} with forced_tokens, which are one output; leave {name} out")
    if len(ids) >= model.hello.max_model_tokens:
        raise InvalidArgumentError(
            f"forced_tokens has {len(ids)} ids, but the model takes {model.hello.max_model_tokens} with the prompt; "
            "send fewer"
        )
    if (worst := int(ids.max())) >= model.hello.vocab_size:
        raise InvalidArgumentError(
            f"forced token id {worst} is outside the model's vocabulary of {model.hello.vocab_size}; "
            "take ids from the model's own tokenizer"
        )
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else model.hello.eos_token_ids)}
    ends = np.flatnonzero(np.isin(ids[:-1], list(stops)))
    if len(ends):
        place = int(ends[0])
        raise InvalidArgumentError(
            f"forced_tokens[{place}] is {ids[place]}, at which the output would end, but {len(ids) - place - 1} more "
            "follow; set ignore_eos, leave it out of stop_token_ids, or send no more after it"
        )


def _check_search(params: GenerateParams, search: BeamSearch, model: ServedModel) -> None:
    if model.kv.state_frames:
        raise UnsupportedError(
            "this model has layers with a state, which a beam search would have to copy for every beam; "
            "leave beam_search out"
        )
    if params.answers > search.width:
        raise InvalidArgumentError(
            f"n is {params.answers}, more than the {search.width} beams; widen the search or lower n"
        )
    if params.best_of:
        raise InvalidArgumentError(
            f"best_of is {params.best_of} in a beam search, which looks for the likeliest sequences; leave best_of "
            "out, or the beam search"
        )
    ends = len({*params.sampling.stop_token_ids, *model.hello.eos_token_ids})
    if search.width * (1 + ends) > model.hello.vocab_size:
        raise InvalidArgumentError(
            f"{search.width} beams with {ends} tokens that end a sequence need a vocabulary of more than "
            f"{model.hello.vocab_size} tokens; search with fewer beams or name fewer stop_token_ids"
        )
