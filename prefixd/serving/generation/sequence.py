"""One of the sequences that a request asks for: its tokens become text, until something ends it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prefixd.serving.generation.events import SequenceFinished, Tokens
from prefixd.serving.generation.stop_strings import StopSearch, StopStrings
from prefixd.serving.request.events import Ended, FinishReason, NewTokens
from prefixd.serving.request.request import Request
from prefixd.serving.text.tokenization import TextStream
from prefixd.worker_protocol.protocol import BeamResult, TokenLogprobs

_TOLD_TOGETHER = 256  # tokens, decoded in about 2 ms


class SequenceOutput:
    """A sequence's output as its caller is to see it.

    Args:
        index: its number.
        request: what the dispatcher runs.
        text: decodes its tokens; None without a tokenizer.
        stops: strings that end it; only with `text`.
        tell_logprobs: the caller is to see them.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        text: TextStream | None,
        stops: StopStrings | None,
        *,
        tell_logprobs: bool,
    ) -> None:
        self.index = index
        self.request = request
        self.output_tokens = 0
        self.ended = False
        """Nothing follows, whatever else the worker says of it."""
        self.reason: FinishReason = "cancelled"
        """Why it ended."""
        self._text = text
        self._search = StopSearch(stops) if stops is not None else None
        self._tell_logprobs = tell_logprobs
        self._silent = frozenset(request.sampling.stop_token_ids)
        self._sum = 0.0
        self._score: float | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of its tokens' logprobs, or the score of a beam; None if the worker was not asked for them."""
        return self._score if self.request.sampling.logprobs is None else self._sum

    def found(self, beam: BeamResult) -> Iterator[Tokens]:
        """What the caller is told of a sequence that a beam search has found; then it has ended.

        It comes in pieces, so that a long one does not hold the event loop until all of it is decoded.
        """
        self._score = beam.score
        for first in range(0, len(beam.tokens), _TOLD_TOGETHER):
            tokens = self.accept(NewTokens(beam.tokens[first : first + _TOLD_TOGETHER]))
            if tokens is not None:
                yield tokens
        rest = self.accept(Ended(beam.reason))
        if rest is not None:
            yield rest

    def accept(self, event: NewTokens | Ended) -> Tokens | None:
        """What the caller is told of an event, if anything. It has ended with a stop string, or with `Ended`."""
        if isinstance(event, Ended):
            text = self._rest()
            self._end("stop" if self._stopped else event.reason)
            return Tokens([], text, self.index) if text else None
        if self._search is None:
            return self._told(event.token_ids, self._decode(event.token_ids), event.logprobs)
        text = ""
        for count, token in enumerate(event.token_ids, 1):
            text += self._search.feed(self._decode([token]))
            if self._stopped:
                self._end("stop")
                return self._told(event.token_ids[:count], text, event.logprobs[:count])
        return self._told(event.token_ids, text, event.logprobs)

    def finished(self, index: int) -> SequenceFinished:
        """Its last event, under the number that its caller knows it by."""
        return SequenceFinished(index, self.reason, self.output_tokens, self.cumulative_logprob)

    @property
    def _stopped(self) -> bool:
        return self._search is not None and self._search.found

    def _end(self, reason: FinishReason) -> None:
        self.ended, self.reason = True, reason

    def _told(self, token_ids: list[int], text: str, logprobs: Sequence[TokenLogprobs]) -> Tokens:
        self.output_tokens += len(token_ids)
        self._sum += sum(each.chosen for each in logprobs)
        return Tokens(token_ids, text, self.index, logprobs if self._tell_logprobs else ())

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._text is None:
            return ""
        return self._text.feed([token for token in token_ids if token not in self._silent])

    def _rest(self) -> str:
        """The text that was held back: half a character, or the beginning of a stop string."""
        text = self._text.end() if self._text is not None else ""
        if self._search is None:
            return text
        text = self._search.feed(text)
        return text if self._search.found else text + self._search.end()
