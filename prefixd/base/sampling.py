"""Sampling parameters of a request and their ranges: one type from the client to the worker.

SDK and command line make it, `SamplingParams` of `proto/prefixd/v1/inference.proto` carries it to the daemon, the
daemon adds a seed and a length, and `worker_protocol` carries it to the worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefixd.base.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MOST_LOGPROBS = 20
"""Most alternatives to a token with logprobs in an answer."""
MOST_TOP_K = (1 << 32) - 1
"""As a uint32 of gRPC holds it. JSON has larger integers, and the worker's messages take 64 bits at most."""
MOST_BEAMS = 16
MOST_STOP_TOKENS = 1024
MOST_STOP_STRINGS = 16
LONGEST_STOP_STRING = 256  # characters
REPETITION_PENALTIES = (0.01, 100.0)
OUTPUT_PENALTIES = (-2.0, 2.0)
LENGTH_PENALTIES = (-10.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearch:
    """Search for the likeliest sequences, with the rules of transformers' `generate`, instead of sampling."""

    width: int
    """Beams that are continued in each step, 1 to 16."""
    length_penalty: float = 1.0
    """A sequence's score is its sum of logprobs divided by its length to this power, -10 to 10: above 0 favours long
    sequences."""
    early_stopping: bool = False
    """End as soon as `width` sequences have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of a sequence are chosen, and when it ends. The k-th depends on (seed, k) and the logits only.

    The penalties change the logits first, then the temperature does. Then `top_k`, `top_p` and `min_p` filter the
    tokens one after the other.
    """

    max_tokens: int = 0
    """Most tokens of the output; 0: 16, or all of `forced_tokens`."""
    temperature: float = 0.0
    """0, and any value below 1e-5: greedy."""
    top_k: int = 0
    """Sample among this many most likely tokens, and those exactly as likely as the last of them; 0: off."""
    top_p: float = 1.0
    """Sample among the fewest tokens that together have this probability; 0 or 1: off."""
    min_p: float = 0.0
    """Sample among tokens with at least this share of the most likely token's probability; 0: off."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens of prompt and output, and multiplies the negative ones, 0.01 to 100; more
    than 1 makes repetition less likely; 0 or 1: off."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens of the output, -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens of the output, once for each time the token occurs there, -2 to 2."""
    seed: int | None = None
    """None: chosen by the daemon."""
    stop_token_ids: Sequence[int] = ()
    """The output ends when one of these is sampled; it is the last token id and is not part of the text."""
    stop: str | Sequence[str] = ()
    """The output ends when its text contains this string, or one of these strings, and is cut before it."""
    ignore_eos: bool = False
    """Do not end at the model's end-of-sequence tokens."""
    logprobs: int | None = None
    """Report each token's logprob, and those of this many most likely ones, at most 20, in the model's own
    distribution: before penalties, temperature and filters. None: off."""
    forced_tokens: Sequence[int] | bytes | None = None
    """The output, as ids or as little-endian uint32, for scoring and replay: keys, values and logprobs are computed as
    if the model had chosen it. Excludes stop strings, a second sequence and beam search."""
    beam_search: BeamSearch | None = None
    """Search instead of sampling; excludes temperature, filters, penalties, logprobs and stop strings."""

    @property
    def beams(self) -> int:
        """Beams of the search; 0: tokens are sampled."""
        return 0 if self.beam_search is None else self.beam_search.width

    @property
    def stop_strings(self) -> Sequence[str]:
        """`stop` as a sequence."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def forced_ids(self) -> npt.NDArray[np.uint32]:
        """`forced_tokens` as an array; empty if there are none."""
        tokens = b"" if self.forced_tokens is None else self.forced_tokens
        import numpy as np  # not at the top, since `prefixd --help` does not need it

        return np.frombuffer(tokens, "<u4") if isinstance(tokens, bytes) else np.asarray(tokens, "<u4")

    @property
    def penalised(self) -> bool:
        """True if a penalty makes the logits depend on earlier tokens."""
        return self.repetition_penalty not in (0, 1) or self.presence_penalty != 0 or self.frequency_penalty != 0

    def check(self) -> None:
        """Raises InvalidArgumentError if a value is out of its range for every model, in constant time."""
        if self.temperature < 0 or not math.isfinite(self.temperature):
            raise InvalidArgumentError(f"temperature is {self.temperature}; it must be 0 (greedy) or positive")
        if not 0 <= self.top_k <= MOST_TOP_K:
            raise InvalidArgumentError(f"top_k is {self.top_k}; it must be 0 (off) or positive, at most {MOST_TOP_K}")
        for name in ("top_p", "min_p"):
            self._check_range(name, (0, 1))
        if self.repetition_penalty != 0:
            self._check_range(
                "repetition_penalty", REPETITION_PENALTIES, ", where 1 is off and more makes repetition less likely"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            self._check_range(name, OUTPUT_PENALTIES, ", where 0 is off")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise InvalidArgumentError(
                f"logprobs is {self.logprobs}; ask for at most {MOST_LOGPROBS} tokens beside the chosen one"
            )
        self._check_stops()
        if self.beam_search is not None:
            self._check_search(self.beam_search)
        if self.forced_tokens is not None:
            self._check_forced(self.forced_tokens)

    def _check_range(self, name: str, bounds: tuple[float, float], meaning: str = "") -> None:
        (least, most), value = bounds, getattr(self, name)
        if not least <= value <= most:
            raise InvalidArgumentError(f"{name} is {value}; it must be between {least:g} and {most:g}{meaning}")

    def _check_stops(self) -> None:
        tokens, strings = self.stop_token_ids, self.stop_strings
        if len(tokens) > MOST_STOP_TOKENS:
            raise InvalidArgumentError(f"stop_token_ids has {len(tokens)} ids; send at most {MOST_STOP_TOKENS}")
        if len(strings) > MOST_STOP_STRINGS:
            raise InvalidArgumentError(f"stop has {len(strings)} strings; send at most {MOST_STOP_STRINGS}")
        for string in strings:
            if not string:
                raise InvalidArgumentError("a stop string is empty; send at least one character, or leave it out")
            if len(string) > LONGEST_STOP_STRING:
                raise InvalidArgumentError(
                    f"a stop string has {len(string)} characters; send at most {LONGEST_STOP_STRING}"
                )

    def _check_search(self, search: BeamSearch) -> None:
        if not 1 <= search.width <= MOST_BEAMS:
            raise InvalidArgumentError(f"beam_search.width is {search.width}; it must be between 1 and {MOST_BEAMS}")
        least, most = LENGTH_PENALTIES
        if not least <= search.length_penalty <= most:
            raise InvalidArgumentError(
                f"beam_search.length_penalty is {search.length_penalty}; it must be between {least:g} and {most:g}"
            )
        for name, off in _OFF_IN_A_SEARCH.items():
            value = list(self.stop_strings) if name == "stop" else getattr(self, name)
            if value not in off:
                raise InvalidArgumentError(
                    f"{name} is {value} in a beam search, which looks for the likeliest sequences; leave out {name} or "
                    "the beam search"
                )

    def _check_forced(self, forced: Sequence[int] | bytes) -> None:
        if self.beam_search is not None:
            raise InvalidArgumentError("forced_tokens and beam_search exclude each other; leave one of them out")
        if strings := self.stop_strings:
            raise InvalidArgumentError(
                f"stop has {len(strings)} strings, but forced_tokens are the whole output; leave stop out"
            )
        if not len(forced) or (isinstance(forced, bytes) and len(forced) % 4):
            raise InvalidArgumentError(
                f"forced_tokens has {len(forced)} bytes; send little-endian uint32, 4 bytes each, at least one"
            )
        count = len(forced) // 4 if isinstance(forced, bytes) else len(forced)
        if 0 < self.max_tokens < count:
            raise InvalidArgumentError(
                f"max_tokens is {self.max_tokens}, but forced_tokens has {count} ids; leave max_tokens out or send "
                "fewer ids"
            )


_OFF_IN_A_SEARCH: dict[str, tuple[object, ...]] = {
    "temperature": (0,),
    "top_k": (0,),
    "top_p": (0, 1),
    "min_p": (0,),
    "repetition_penalty": (0, 1),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logprobs": (None,),
    "stop": ([],),
}
