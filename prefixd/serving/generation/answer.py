"""What a caller is told of its sequences: the events of each, and the last one of the call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from prefixd.serving.dispatch.dispatcher import Dispatcher
from prefixd.serving.generation.events import Finished, SequenceFinished, Tokens
from prefixd.serving.generation.inbox import Inbox
from prefixd.serving.generation.sequence import SequenceOutput
from prefixd.serving.request.events import Ended, FinishReason, NewTokens


async def answer(
    dispatcher: Dispatcher, going: dict[int, SequenceOutput], inbox: Inbox, answers: int
) -> AsyncGenerator[Tokens | SequenceFinished, None]:
    """The events of the sequences `going`, each of which is taken out of it when it ends.

    answers: how many are wanted; if there are more, nothing is told before the best are known.
    """
    several, streamed = len(going) > 1, len(going) == answers
    ended: list[SequenceOutput] = []
    kept: dict[int, list[Tokens]] = {index: [] for index in going}
    while going:
        index, event = await inbox.get()
        sequence = going.get(index)
        if sequence is None:
            continue  # a stop string ended it, and the worker comes to know
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


async def found_by_search(
    going: dict[int, SequenceOutput], inbox: Inbox
) -> AsyncGenerator[Tokens | SequenceFinished, None]:
    """The events of the sequences `going` that a beam search finds, all at its end, the best sequence first."""
    _, event = await inbox.get()
    if isinstance(event, Exception):
        going.clear()
        raise event
    sequences = list(going.values())
    going.clear()
    assert isinstance(event, Ended), "a search tells nothing before its end"
    for sequence, beam in zip(sequences, event.beams, strict=False):
        for tokens in sequence.found(beam):
            yield tokens
        if len(sequences) > 1:
            yield sequence.finished(sequence.index)


def finished_event(sequences: Sequence[SequenceOutput], now_s: float) -> Finished:
    """The last event of a call, of its sequences, all of which have ended."""
    requests = list(dict.fromkeys(sequence.request for sequence in sequences))  # a search's sequences share one
    gpu, cpu, disk, remote = requests[0].hit_tokens or (0, 0, 0, 0)
    arrival_s = requests[0].queued.arrival_s
    handed_over = [request.handed_over_s for request in requests if request.handed_over_s is not None]
    first_tokens = [request.first_token_s for request in requests if request.first_token_s is not None]
    return Finished(
        reason=_strongest([sequence.reason for sequence in sequences]),
        prompt_tokens=requests[0].prompt_tokens,
        output_tokens=sum(sequence.output_tokens for sequence in sequences),
        hit_tokens=(gpu, cpu, disk, remote),
        queue_s=min(handed_over, default=now_s) - arrival_s,
        ttft_s=min(first_tokens, default=arrival_s) - arrival_s,
        resumed=sum(request.resumed for request in requests),
        cumulative_logprob=sequences[0].cumulative_logprob if len(sequences) == 1 else None,
        encoded_images=sum(request.encoded_images for request in requests),
    )


def _strongest(reasons: list[FinishReason]) -> FinishReason:
    """The reason that says most about sequences that have all ended."""
    if "cancelled" in reasons:
        return "cancelled"
    return "length" if "length" in reasons else "stop"
