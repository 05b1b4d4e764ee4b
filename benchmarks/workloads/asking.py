"""One request over the network API, and its result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from prefixd.client import AsyncClient, Finished, Sampling, ServerError, Tier, Tokens

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """A finished request.

    output: its tokens. likeliest: what the model says: the tokens that it found likeliest, which are the output unless
    that was forced. ttft_s: the client's: from sending the request, queue included, to its first token. gpu_tokens and
    so on: prompt tokens that were not computed, by the tier they came from. possible_tokens: those that a cache
    without a limit would have had, see `SeenBlocks`.
    """

    prompt_tokens: int
    output: tuple[int, ...]
    likeliest: tuple[int, ...]
    ttft_s: float
    gpu_tokens: int
    cpu_tokens: int
    disk_tokens: int
    possible_tokens: int

    @property
    def hit_tokens(self) -> int:
        return self.gpu_tokens + self.cpu_tokens + self.disk_tokens


async def ask(
    client: AsyncClient,
    prompt: Sequence[int],
    *,
    possible_tokens: int = 0,
    answer: Sequence[int] | None = None,
    answer_tokens: int = 0,
) -> Asked:
    """Sends a prompt; the output is `answer` (forced), or the `answer_tokens` tokens that the model chooses greedily.

    Raises ClientError.
    """
    sent = time.monotonic()
    ttft_s = 0.0
    output: list[int] = []
    likeliest: list[int] = []
    events = client.generate(
        prompt,
        sampling=Sampling(
            forced_tokens=answer,
            max_tokens=answer_tokens if answer is None else 0,
            logprobs=None if answer is None else 1,
            ignore_eos=True,
        ),
    )
    async for event in events:
        if isinstance(event, Tokens):
            ttft_s = ttft_s or time.monotonic() - sent
            output += event.token_ids
            likeliest += event.token_ids if answer is None else [next(iter(each.top)) for each in event.logprobs]
        elif isinstance(event, Finished):
            hits = event.hit_tokens
            return Asked(
                prompt_tokens=len(prompt),
                output=tuple(output),
                likeliest=tuple(likeliest),
                ttft_s=ttft_s,
                gpu_tokens=hits[Tier.GPU],
                cpu_tokens=hits[Tier.CPU],
                disk_tokens=hits[Tier.DISK],
                possible_tokens=possible_tokens,
            )
    raise ServerError("the daemon ended a request without its last event; see its log")


async def generated_tokens(client: AsyncClient, prompt: Sequence[int], sampling: Sampling, **options: Any) -> list[int]:
    """Returns the whole answer; `options` are those of `AsyncClient.generate`. Raises ClientError."""
    async with aclosing(client.generate(prompt, sampling=sampling, **options)) as events:
        return [token async for event in events if isinstance(event, Tokens) for token in event.token_ids]


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs all coroutines at once; returns their results. The first failure ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]
