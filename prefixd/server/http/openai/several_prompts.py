"""Runs the prompts of one request together, and makes one stream of their events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeAlias

from prefixd.serving.generation import (
    Accepted,
    Finished,
    GenerateParams,
    Generation,
    GenerationEvent,
    SequenceFinished,
    Tokens,
)

_AHEAD = 64
"""Events between the prompts and whoever reads them. More wait in the prompts' own bounded queues."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request used, over all its prompts."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0

    def plus(self, finished: Finished) -> Usage:
        """With another prompt's."""
        return Usage(
            self.prompt_tokens + finished.prompt_tokens,
            self.output_tokens + finished.output_tokens,
            self.cached_tokens + min(sum(finished.hit_tokens), finished.prompt_tokens),
        )


AnswerEvent: TypeAlias = Accepted | Tokens | SequenceFinished | Usage


async def run_prompts(generation: Generation, prompts: Sequence[GenerateParams]) -> AsyncGenerator[AnswerEvent, None]:
    """Runs prompts of the same number of answers: `Accepted` once all are queued, then the events of all, and `Usage`.

    The n answers of prompt k have the numbers k*n to k*n + n-1, and each ends with `SequenceFinished`. `Accepted` has
    the tokens of all prompts. When one prompt fails, all end. Raises as `Generation.run`.
    """
    answers, usage = prompts[0].answers, Usage()
    accepted: list[Accepted] = []
    async with aclosing(_events(generation, prompts)) as events:
        async for place, event in events:
            first = place * answers
            if isinstance(event, Accepted):
                accepted.append(event)
                if len(accepted) == len(prompts):
                    yield replace(accepted[0], prompt_tokens=sum(each.prompt_tokens for each in accepted))
            elif isinstance(event, Finished):
                usage = usage.plus(event)
                if answers == 1:
                    yield SequenceFinished(first, event.reason, event.output_tokens, event.cumulative_logprob)
            else:
                yield replace(event, index=first + event.index) if first else event
    yield usage


async def _events(
    generation: Generation, prompts: Sequence[GenerateParams]
) -> AsyncGenerator[tuple[int, GenerationEvent], None]:
    if len(prompts) == 1:
        async with aclosing(generation.run(prompts[0])) as events:
            async for event in events:
                yield 0, event
        return
    merged: asyncio.Queue[tuple[int, GenerationEvent | None]] = asyncio.Queue(_AHEAD)
    begin = asyncio.Event()

    async def run(place: int, params: GenerateParams) -> None:
        try:
            async with aclosing(generation.run(params)) as events:
                async for event in events:
                    await merged.put((place, event))
                    await begin.wait()  # for the others to be accepted: what is refused is refused before any output
        except Exception:
            await merged.put((place, None))
            raise

    tasks = [asyncio.create_task(run(place, params)) for place, params in enumerate(prompts)]
    accepted = finished = 0
    try:
        while finished < len(prompts):
            place, found = await merged.get()
            if found is None:
                await tasks[place]  # raises its error
            else:
                accepted += isinstance(found, Accepted)
                finished += isinstance(found, Finished)
                if accepted == len(prompts):
                    begin.set()
                yield place, found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
