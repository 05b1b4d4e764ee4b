"""What a caller may ask for, and the bounds of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefixd.base.errors import InvalidArgumentError, UnsupportedError
from prefixd.base.tenants import Tenant
from prefixd.cache.placement.retention import Retention
from prefixd.serving.models.served_model import ServedModel
from prefixd.worker_protocol.protocol import MOST_BEAMS, MOST_LOGPROBS, Sampling

DEFAULT_MAX_TOKENS = 16
MOST_IMAGES = 4096  # whatever worker.images_per_prompt is: their lengths are added up on the event loop
MOST_STOP_TOKENS = 1024
MOST_STOP_STRINGS = 16
LONGEST_STOP_STRING = 256  # characters
MOST_SEQUENCES = 32
MOST_KEPT = 1 << 20  # tokens and logprobs that wait in memory for the end of a best_of
_LENGTH_PENALTIES = (-10.0, 10.0)
_REPETITION_PENALTIES = (0.01, 100.0)
_OUTPUT_PENALTIES = (-2.0, 2.0)

_MASK_64 = (1 << 64) - 1
_SEED_STEP = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, SplitMix64's step: no small seed meets another's


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """What a caller asks for, not checked yet. Where 0 is no value of a parameter, it means the default."""

    prompt: str | bytes
    """Text, or token ids as little-endian uint32, 4 bytes each."""
    images: Sequence[bytes] = ()
    """The files of the prompt's images; the prompt holds a placeholder for each."""
    request_id: str = ""
    """The caller's name for the request; empty: one is chosen."""
    max_tokens: int = 0
    """Most tokens of a sequence; 0: the default, 16."""
    temperature: float = 0.0
    """0: greedy."""
    top_k: int = 0
    """Sample among so many most likely tokens; 0: off."""
    top_p: float = 0.0
    """Nucleus sampling; 0: off, as 1."""
    min_p: float = 0.0
    """Sample among tokens of at least this probability in proportion to the most likely one's; 0: off."""
    repetition_penalty: float = 0.0
    """For tokens of prompt and output; 0: off, as 1."""
    presence_penalty: float = 0.0
    """For tokens of the output; 0: off."""
    frequency_penalty: float = 0.0
    """For tokens of the output, for each time they are there; 0: off."""
    seed: int | None = None
    """The k-th token depends on (seed, k) and the logits; None: chosen."""
    stop_token_ids: Sequence[int] = ()
    """A sequence ends when one of these is sampled."""
    stop: Sequence[str] = ()
    """A sequence ends before the first of these strings in its text."""
    ignore_eos: bool = False
    """Do not end at the model's end-of-sequence tokens."""
    logprobs: int | None = None
    """Tell each token's logprob, and those of so many most likely ones; None: off."""
    n: int = 0
    """Sequences to answer with; 0: one."""
    best_of: int = 0
    """Sequences to compute, of which the n with the highest sum of logprobs are the answer; 0: n."""
    beam_width: int | None = None
    """Search with so many beams instead of sampling; None: sample."""
    length_penalty: float = 1.0
    """Of a beam search: above 0 favours long sequences."""
    forced_tokens: bytes | None = None
    """The output, as little-endian uint32, 4 bytes each; None: tokens are chosen."""
    early_stopping: bool = False
    """End a beam search as soon as as many sequences have ended as there are beams."""
    priority: int = 0
    """Lower goes first."""
    deadline_s: float | None = None
    """Seconds from the arrival until the first token is due; None: never."""
    salt: bytes = b""
    """Prompts of different salts never share a cached block."""
    model: str = ""
    """Name of the model; empty: the first."""
    tenant: Tenant | None = None
    """Whose request it is; None: the default tenant's. Prompts of two tenants never share a cached block."""
    read_only: bool = False
    """Use what is cached, and leave nothing in the cache."""
    message_bytes: int = 0
    """How large the message is by which it came."""
    waited_s: float = 0.0
    """Seconds since the call came, in which its message was received."""
    retention: Sequence[Retention] = ()
    """Wishes for the prompt's blocks; checked."""

    @property
    def answers(self) -> int:
        """Sequences to answer with."""
        return self.n or 1

    @property
    def sequences(self) -> int:
        """Sequences to compute as requests of their own; a beam search is one."""
        if self.beam_width is not None:
            return 1
        return self.best_of or self.answers

    def sampling(self, index: int, seed: int, room: int) -> Sampling:
        """How the tokens of the sequence with this number are chosen.

        seed: the request's.  room: tokens that the model's context leaves for the output.
        """
        if self.forced_tokens is not None:
            return Sampling(
                max_tokens=len(self.forced_tokens) // 4,
                stop_token_ids=tuple(self.stop_token_ids),
                ignore_eos=self.ignore_eos,
                logprobs=self.logprobs,
                forced=self.forced_tokens,
            )
        logprobs = self.logprobs
        if logprobs is None and self.sequences > self.answers:
            logprobs = 0  # their sum decides
        return Sampling(
            max_tokens=min(self.max_tokens or DEFAULT_MAX_TOKENS, room),
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p or 1.0,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty or 1.0,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=sequence_seed(seed, index),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            beams=self.beam_width or 0,
            beam_answers=self.answers if self.beam_width else 1,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        )


def sequence_seed(seed: int, index: int) -> int:
    """The seed of one of a request's sequences: (seed + index * 0x9E3779B97F4A7C15) mod 2^64.

    The first has the request's own; the others sample as a request with the derived seed would alone.
    """
    return (seed + index * _SEED_STEP) & _MASK_64


def image_bytes(params: GenerateParams) -> int:
    """Bytes of the images' files. Raises InvalidArgumentError for more images than their lengths are added up of."""
    if len(params.images) > MOST_IMAGES:
        raise InvalidArgumentError(f"the request has {len(params.images)} images; send at most {MOST_IMAGES}")
    return sum(map(len, params.images))


def check_sampling(params: GenerateParams, model: ServedModel) -> None:
    """Refuse what is out of its range, in a time that does not grow with it.

    Raises InvalidArgumentError, and UnsupportedError for stop strings without a tokenizer.
    """
    if params.temperature < 0 or not math.isfinite(params.temperature):
        raise InvalidArgumentError(f"temperature is {params.temperature}; it must be 0 (greedy) or positive")
    if params.deadline_s is not None and not 0 < params.deadline_s < math.inf:
        raise InvalidArgumentError(
            f"deadline_s is {params.deadline_s}; send seconds above 0, or leave it out for no deadline"
        )
    if params.top_k < 0:
        raise InvalidArgumentError(f"top_k is {params.top_k}; it must be 0 (off) or positive")
    for name in ("top_p", "min_p"):
        if not 0 <= getattr(params, name) <= 1:
            raise InvalidArgumentError(f"{name} is {getattr(params, name)}; it must be between 0 and 1")
    least, most = _REPETITION_PENALTIES
    if params.repetition_penalty != 0 and not least <= params.repetition_penalty <= most:
        raise InvalidArgumentError(
            f"repetition_penalty is {params.repetition_penalty}; it must be between {least:g} and {most:g}, where 1 is "
            "off and more makes repetition less likely"
        )
    least, most = _OUTPUT_PENALTIES
    for name in ("presence_penalty", "frequency_penalty"):
        if not least <= getattr(params, name) <= most:
            raise InvalidArgumentError(
                f"{name} is {getattr(params, name)}; it must be between {least:g} and {most:g}, where 0 is off"
            )
    if params.logprobs is not None and not 0 <= params.logprobs <= MOST_LOGPROBS:
        raise InvalidArgumentError(
            f"logprobs is {params.logprobs}; ask for at most {MOST_LOGPROBS} tokens beside the chosen one"
        )
    _check_stops(params, model)
    _check_sequences(params, model)
    if params.forced_tokens is not None:
        _check_forced(params, params.forced_tokens, model)


def _check_stops(params: GenerateParams, model: ServedModel) -> None:
    tokens, strings = params.stop_token_ids, params.stop
    if len(tokens) > MOST_STOP_TOKENS:
        raise InvalidArgumentError(f"stop_token_ids has {len(tokens)} ids; send at most {MOST_STOP_TOKENS}")
    for token in tokens:
        if not 0 <= token < model.hello.vocab_size:
            raise InvalidArgumentError(
                f"stop token id {token} is outside the vocabulary of {model.hello.vocab_size}; "
                "take ids from the model's own tokenizer"
            )
    if len(strings) > MOST_STOP_STRINGS:
        raise InvalidArgumentError(f"stop has {len(strings)} strings; send at most {MOST_STOP_STRINGS}")
    for string in strings:
        if not string:
            raise InvalidArgumentError("a stop string is empty; send at least one character, or leave it out")
        if len(string) > LONGEST_STOP_STRING:
            raise InvalidArgumentError(
                f"a stop string has {len(string)} characters; send at most {LONGEST_STOP_STRING}"
            )
    if strings and model.codec is None:
        raise UnsupportedError("the model has no tokenizer, so its output has no text; send stop_token_ids, not stop")


def _check_sequences(params: GenerateParams, model: ServedModel) -> None:
    for name in ("n", "best_of"):
        if not 0 <= getattr(params, name) <= MOST_SEQUENCES:
            raise InvalidArgumentError(f"{name} is {getattr(params, name)}; ask for at most {MOST_SEQUENCES} sequences")
    if params.best_of and params.best_of < params.answers:
        raise InvalidArgumentError(
            f"best_of is {params.best_of}, less than n, which is {params.answers}; raise best_of to at least n or "
            "leave it out"
        )
    tokens = min(params.max_tokens or DEFAULT_MAX_TOKENS, model.hello.max_model_tokens)
    kept = params.best_of * tokens * (1 + (params.logprobs or 0))
    if params.best_of > params.answers and kept > MOST_KEPT:
        raise InvalidArgumentError(
            f"best_of is {params.best_of} with up to {tokens} tokens and {params.logprobs or 0} logprobs each: {kept} "
            f"values would wait for the end, {MOST_KEPT} may; lower best_of, max_tokens or logprobs"
        )
    if params.beam_width is not None:
        _check_beams(params, params.beam_width, model)
    elif params.sequences > 1 and params.temperature == 0:
        name = "n" if params.answers > 1 else "best_of"
        raise InvalidArgumentError(
            f"{name} is {params.sequences} with temperature 0, which gives the same tokens each time; set a "
            f"temperature above 0, or {name} to 1"
        )


def _check_forced(params: GenerateParams, forced: bytes, model: ServedModel) -> None:
    for name, value in (("n", params.answers), ("best_of", params.best_of)):
        if value > 1:
            raise InvalidArgumentError(f"{name} is {value} with forced_tokens, which are one output; leave {name} out")
    if params.beam_width is not None:
        raise InvalidArgumentError("forced_tokens leave a beam search nothing to find; leave one of them out")
    if params.stop:
        raise InvalidArgumentError(
            f"stop has {len(params.stop)} strings with forced_tokens, which are told to their end; leave stop out"
        )
    if not forced or len(forced) % 4:
        raise InvalidArgumentError(
            f"forced_tokens has {len(forced)} bytes; send little-endian uint32, 4 bytes each, at least one"
        )
    ids = np.frombuffer(forced, "<u4")
    if len(ids) >= model.hello.max_model_tokens:
        raise InvalidArgumentError(
            f"forced_tokens has {len(ids)} ids, but the model takes {model.hello.max_model_tokens} with the prompt; "
            "send fewer"
        )
    if 0 < params.max_tokens < len(ids):
        raise InvalidArgumentError(
            f"max_tokens is {params.max_tokens}, but forced_tokens has {len(ids)} ids; leave max_tokens out or send "
            "fewer ids"
        )
    if (worst := int(ids.max())) >= model.hello.vocab_size:
        raise InvalidArgumentError(
            f"forced token id {worst} is outside the model's vocabulary of {model.hello.vocab_size}; "
            "take ids from the model's own tokenizer"
        )
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else model.hello.eos_token_ids)}
    ends = np.flatnonzero(np.isin(ids[:-1], list(stops)))
    if len(ends):
        place = int(ends[0])
        raise InvalidArgumentError(
            f"forced_tokens[{place}] is {ids[place]}, at which the output would end, but {len(ids) - place - 1} more "
            "follow; set ignore_eos, leave it out of stop_token_ids, or send no more after it"
        )


def _check_beams(params: GenerateParams, width: int, model: ServedModel) -> None:
    if model.kv.state_frames:
        raise UnsupportedError(
            "this model has layers with a state, which a beam search would have to copy for every beam; "
            "leave beam_search out"
        )
    if not 1 <= width <= MOST_BEAMS:
        raise InvalidArgumentError(f"beam_search.width is {width}; it must be between 1 and {MOST_BEAMS}")
    if params.answers > width:
        raise InvalidArgumentError(f"n is {params.answers}, more than the {width} beams; widen the search or lower n")
    least, most = _LENGTH_PENALTIES
    if not least <= params.length_penalty <= most:
        raise InvalidArgumentError(
            f"beam_search.length_penalty is {params.length_penalty}; it must be between {least:g} and {most:g}"
        )
    defaults = GenerateParams("")
    for name in (
        *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("best_of", "logprobs", "stop"),
    ):
        value = getattr(params, name)
        off = (0, 1) if name in ("top_p", "repetition_penalty") else (getattr(defaults, name),)
        if len(value) if name == "stop" else value not in off:
            raise InvalidArgumentError(
                f"{name} is {value} in a beam search, which looks for the likeliest sequences; leave {name} out, "
                "or the beam search"
            )
    ends = len({*params.stop_token_ids, *model.hello.eos_token_ids})
    if width * (1 + ends) > model.hello.vocab_size:
        raise InvalidArgumentError(
            f"{width} beams with {ends} tokens that end a sequence need a vocabulary of more than "
            f"{model.hello.vocab_size} tokens; search with fewer beams or name fewer stop_token_ids"
        )
