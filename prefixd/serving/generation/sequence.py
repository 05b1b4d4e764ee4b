"""Turns the tokens of a call's sequences into text, ends them at stop strings, and makes the events of the call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace

from prefixd.serving.dispatch.dispatcher import Dispatcher
from prefixd.serving.generation.events import Finished, SequenceFinished, Tokens
from prefixd.serving.generation.inbox import Inbox
from prefixd.serving.generation.stop_strings import StopSearch, StopStrings
from prefixd.serving.request.request import Request
from prefixd.serving.request.request_events import Ended, FinishReason, NewTokens
from prefixd.serving.text.tokenization import TextStream
from prefixd.worker_protocol.protocol import BeamResult, TokenLogprobs

_DECODED_TOGETHER = 256  # tokens, decoded in about 2 ms


class SequenceOutput:
    """A sequence's output, as its caller sees it.

    Args:
        index: its number.
        request: the dispatcher's request.
        text: decodes its tokens; None without a tokenizer.
        stops: strings that end it; only with `text`.
        show_logprobs: whether the caller gets logprobs.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        text: TextStream | None,
        stops: StopStrings | None,
        *,
        show_logprobs: bool,
    ) -> None:
        self.index = index
        self.request = request
        self.output_tokens = 0
        self.ended = False
        """Whether it has ended; further tokens from the worker are ignored."""
        self.reason: FinishReason = "cancelled"
        """Why it ended."""
        self._text = text
        self._search = StopSearch(stops) if stops is not None else None
        self._show_logprobs = show_logprobs
        self._silent = frozenset(request.sampling.stop_token_ids)
        self._sum = 0.0
        self._score: float | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of its tokens' logprobs, or the score of a beam; None if the worker was not asked for them."""
        return self._score if self.request.sampling.logprobs is None else self._sum

    def accept_beam(self, beam: BeamResult) -> Iterator[Tokens]:
        """The events for a sequence that a beam search has found, which ends with them.

        They come in pieces, so that decoding a long sequence does not hold the event loop.
        """
        self._score = beam.score
        for first in range(0, len(beam.tokens), _DECODED_TOGETHER):
            tokens = self.accept(NewTokens(beam.tokens[first : first + _DECODED_TOGETHER]))
            if tokens is not None:
                yield tokens
        rest = self.accept(Ended(beam.reason))
        if rest is not None:
            yield rest

    def accept(self, event: NewTokens | Ended) -> Tokens | None:
        """The event for the caller, if any. The sequence ends with a stop string, or with `Ended`."""
        if isinstance(event, Ended):
            text = self._flush_text()
            self._end("stop" if self._stopped else event.reason)
            return Tokens([], text, self.index) if text else None
        if self._search is None:
            return self._make_tokens(event.token_ids, self._decode(event.token_ids), event.logprobs)
        text = ""
        for count, token in enumerate(event.token_ids, 1):
            text += self._search.feed(self._decode([token]))
            if self._stopped:
                self._end("stop")
                return self._make_tokens(event.token_ids[:count], text, event.logprobs[:count])
        return self._make_tokens(event.token_ids, text, event.logprobs)

    def finished(self, index: int) -> SequenceFinished:
        """Its last event. `index`: its number for the caller."""
        return SequenceFinished(index, self.reason, self.output_tokens, self.cumulative_logprob)

    @property
    def _stopped(self) -> bool:
        return self._search is not None and self._search.found

    def _end(self, reason: FinishReason) -> None:
        self.ended, self.reason = True, reason

    def _make_tokens(self, token_ids: list[int], text: str, logprobs: Sequence[TokenLogprobs]) -> Tokens:
        self.output_tokens += len(token_ids)
        self._sum += sum(each.chosen for each in logprobs)
        return Tokens(token_ids, text, self.index, logprobs if self._show_logprobs else ())

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._text is None:
            return ""
        return self._text.feed([token for token in token_ids if token not in self._silent])

    def _flush_text(self) -> str:
        """The text that was held back: half a character, or the beginning of a stop string."""
        text = self._text.end() if self._text is not None else ""
        if self._search is None:
            return text
        text = self._search.feed(text)
        return text if self._search.found else text + self._search.end()


async def sampled_events(
    dispatcher: Dispatcher, going: dict[int, SequenceOutput], inbox: Inbox, answers: int
) -> AsyncGenerator[Tokens | SequenceFinished, None]:
    """The events of the sequences `going`. Each is taken out of `going` when it ends.

    answers: number of sequences to answer with; if there are more, no event comes before the best are known.
    """
    several, streamed = len(going) > 1, len(going) == answers
    ended: list[SequenceOutput] = []
    kept: dict[int, list[Tokens]] = {index: [] for index in going}
    while going:
        index, event = await inbox.get()
        sequence = going.get(index)
        if sequence is None:
            continue  # a stop string ended it, and the worker has not heard of it yet
        if isinstance(event, Exception):
            del going[index]
            raise event
        tokens = sequence.accept(event)
        if sequence.ended:
            del going[index]
            ended.append(sequence)
            if isinstance(event, NewTokens):
                dispatcher.cancel(sequence.request)
        if tokens is not None and streamed:
            yield tokens
        elif tokens is not None:
            kept[index].append(tokens)
        if sequence.ended and several and streamed:
            yield sequence.finished(index)
    if streamed:
        return
    ended.sort(key=lambda sequence: (-(sequence.cumulative_logprob or 0.0), sequence.index))
    for place, sequence in enumerate(ended[:answers]):
        for tokens in kept[sequence.index]:
            yield replace(tokens, index=place)
        yield sequence.finished(place)


async def beam_events(
    going: dict[int, SequenceOutput], inbox: Inbox
) -> AsyncGenerator[Tokens | SequenceFinished, None]:
    """The events of the sequences `going`, which a beam search finds: all at its end, the best sequence first."""
    _, event = await inbox.get()
    if isinstance(event, Exception):
        going.clear()
        raise event
    sequences = list(going.values())
    going.clear()
    assert isinstance(event, Ended), "a search has no event before its end"
    for sequence, beam in zip(sequences, event.beams, strict=False):
        for tokens in sequence.accept_beam(beam):
            yield tokens
        if len(sequences) > 1:
            yield sequence.finished(sequence.index)


def finished_event(sequences: Sequence[SequenceOutput], now_s: float) -> Finished:
    """The last event of a call. All its sequences have ended."""
    requests = list(dict.fromkeys(sequence.request for sequence in sequences))  # a search's sequences share one
    gpu, cpu, disk, remote = requests[0].hit_tokens or (0, 0, 0, 0)
    arrival_s = requests[0].queued.arrival_s
    handed_over = [request.handed_over_s for request in requests if request.handed_over_s is not None]
    first_tokens = [request.first_token_s for request in requests if request.first_token_s is not None]
    return Finished(
        reason=_overall_reason([sequence.reason for sequence in sequences]),
        prompt_tokens=requests[0].prompt_tokens,
        output_tokens=sum(sequence.output_tokens for sequence in sequences),
        hit_tokens=(gpu, cpu, disk, remote),
        queue_s=min(handed_over, default=now_s) - arrival_s,
        ttft_s=min(first_tokens, default=arrival_s) - arrival_s,
        resumed=sum(request.resumed for request in requests),
        cumulative_logprob=sequences[0].cumulative_logprob if len(sequences) == 1 else None,
        encoded_images=sum(request.encoded_images for request in requests),
    )


def _overall_reason(reasons: list[FinishReason]) -> FinishReason:
    """The reason of a call, from those of its sequences (`Finished.reason`)."""
    if "cancelled" in reasons:
        return "cancelled"
    return "length" if "length" in reasons else "stop"
