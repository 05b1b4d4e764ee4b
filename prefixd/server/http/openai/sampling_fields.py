"""Fields that requests for chats and for completions share, and how they become `Sampling`.

Names and defaults are those of OpenAI's API; the fields that OpenAI does not have are vLLM's. As in vLLM's server,
fields that nobody knows are ignored. Fields that would change the answer, and that prefixd does not have, are refused
unless they have the value that changes nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from prefixd.base.errors import InvalidArgumentError
from prefixd.base.sampling import Sampling

LONGEST_FIELD = 64 << 10
"""Most bytes of a field beside prompt and messages, so that reading it takes less than a millisecond."""
_LONGEST_SALT = 1024
_PRIORITIES = (-(1 << 31), (1 << 31) - 1)
_FLAG_OFF = (None, False)
_NONE: tuple[object, ...] = (None, [], {})


class FieldError(InvalidArgumentError):
    """A field has a wrong value.

    Attributes:
        param: its name.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class StreamOptions(msgspec.Struct):
    """What a stream has besides the output."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """The shared fields. The values of `Raw` fields are JSON, read only if they are short."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Raw | UnsetType = UNSET
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Raw | UnsetType = UNSET
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    logit_bias: Raw | UnsetType = UNSET
    response_format: Raw | UnsetType = UNSET
    echo: Raw | UnsetType = UNSET
    use_beam_search: Raw | UnsetType = UNSET
    min_tokens: Raw | UnsetType = UNSET
    include_stop_str_in_output: Raw | UnsetType = UNSET
    skip_special_tokens: Raw | UnsetType = UNSET
    truncate_prompt_tokens: Raw | UnsetType = UNSET
    prompt_logprobs: Raw | UnsetType = UNSET
    allowed_token_ids: Raw | UnsetType = UNSET
    bad_words: Raw | UnsetType = UNSET
    logprob_token_ids: Raw | UnsetType = UNSET
    structured_outputs: Raw | UnsetType = UNSET
    guided_json: Raw | UnsetType = UNSET
    guided_regex: Raw | UnsetType = UNSET
    guided_choice: Raw | UnsetType = UNSET
    guided_grammar: Raw | UnsetType = UNSET
    return_token_ids: Raw | UnsetType = UNSET
    return_tokens_as_token_ids: Raw | UnsetType = UNSET
    kv_transfer_params: Raw | UnsetType = UNSET

    refused: ClassVar[dict[str, tuple[object, ...]]] = {
        "logit_bias": _NONE,
        "response_format": (None, {"type": "text"}),
        "echo": _FLAG_OFF,
        "use_beam_search": _FLAG_OFF,
        "min_tokens": (None, 0),
        "include_stop_str_in_output": _FLAG_OFF,
        "skip_special_tokens": (None, True),
        "truncate_prompt_tokens": (None,),
        "prompt_logprobs": (None,),
        "allowed_token_ids": _NONE,
        "bad_words": _NONE,
        "logprob_token_ids": _NONE,
        "structured_outputs": (None,),
        "guided_json": (None,),
        "guided_regex": (None,),
        "guided_choice": (None,),
        "guided_grammar": (None,),
        "return_token_ids": _FLAG_OFF,
        "return_tokens_as_token_ids": _FLAG_OFF,
        "kv_transfer_params": _NONE,
    }
    """Fields that prefixd does not have, with the values that change nothing."""

    @property
    def answers(self) -> int:
        """Sequences to answer with, for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def salt(self) -> bytes:
        """Prompts of different salts never share a cached block."""
        return (self.cache_salt or "").encode()

    def check(self) -> None:
        """Raises FieldError for a field that prefixd does not have, and for values that `GenerateParams` would take for
        a default."""
        for name, allowed in self.refused.items():
            if read_field(name, getattr(self, name), Any) not in allowed:
                raise FieldError(name, f"prefixd does not support {name}; leave it out")
        if self.answers < 1:
            raise FieldError("n", f"n is {self.n}; ask for at least one answer")
        if self.priority is not None and not _PRIORITIES[0] <= self.priority <= _PRIORITIES[1]:
            raise FieldError("priority", f"priority is {self.priority}; send a number of 32 bits")
        if len(self.salt) > _LONGEST_SALT:
            raise FieldError("cache_salt", f"cache_salt has {len(self.salt)} bytes; send at most {_LONGEST_SALT}")

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> Sampling:
        """How each sequence is sampled. `max_tokens`: None for the default. Raises FieldError."""
        if max_tokens is not None and max_tokens < 1:
            raise FieldError("max_tokens", f"max_tokens is {max_tokens}; ask for at least one token")
        stop = read_field("stop", self.stop, str | list[str] | None)
        return Sampling(
            max_tokens=max_tokens or 0,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=0 if self.top_k in (None, -1) else self.top_k,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=self.seed,
            stop_token_ids=read_field("stop_token_ids", self.stop_token_ids, list[int] | None) or (),
            stop=() if stop is None else stop,
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
        )


def read_field(name: str, raw: Raw | UnsetType, kind: Any) -> Any:
    """The value of a field; None if the request does not have it. Raises FieldError if it is too long or wrong."""
    if raw is UNSET:
        return None
    nbytes = len(memoryview(raw))
    if nbytes > LONGEST_FIELD:
        raise FieldError(name, f"{name} has {nbytes} bytes; send at most {LONGEST_FIELD}")
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FieldError(name, f"{name} cannot be read: {error}") from error
