"""Sends the text analysis workload to a daemon and measures it. The demo and the benchmark share this."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from prefixd.workloads.daemon_process import DaemonFailed, DaemonProcess
from prefixd.workloads.figures import Figures, RequestResult, summarise
from prefixd.workloads.text_analysis import FIRST_TOKEN, TextAnalysis, TierSizes, config_overrides

if TYPE_CHECKING:
    from prefixd.client import AsyncClient


class Progress(Protocol):
    """Who is told how far a run is."""

    def begin(self, text: str, total: int) -> None:
        """A new stretch of `total` requests begins (0: not counted in requests)."""

    def advance(self) -> None:
        """One more request is done."""


class Silence:
    """Progress that nobody watches."""

    def begin(self, text: str, total: int) -> None:
        """Says nothing."""

    def advance(self) -> None:
        """Says nothing."""


def daemon_for(config: str, workload: TextAnalysis, tiers: TierSizes, directory: Path) -> DaemonProcess:
    """A daemon (not started) with the embedded model, set up for `config`, one of CONFIGS."""
    settings: dict[str, Any] = {
        "worker.embedded": True,
        "scheduler.queue_limit": max(4096, workload.requests),
        **tiers.overrides(workload),
        **config_overrides(config),
    }
    return DaemonProcess(settings, directory=directory)


def run_config(
    config: str, workload: TextAnalysis, tiers: TierSizes, directory: Path, *, warm_up: bool = False, progress: Progress
) -> Figures:
    """One of CONFIGS on a fresh daemon in the empty `directory`. Raises DaemonFailed."""
    progress.begin(f"{config}: starting a daemon", 0)
    with daemon_for(config, workload, tiers, directory) as daemon:
        return measure(config, daemon, workload, warm_up=warm_up, progress=progress)


def measure(
    name: str, daemon: DaemonProcess, workload: TextAnalysis, *, warm_up: bool = False, progress: Progress
) -> Figures:
    """Streams the requests to a started daemon, `workload.outstanding` at a time; its queue orders them.

    With `warm_up` each prefix is asked for once before, so that the run finds full tiers. Raises DaemonFailed.
    """
    from prefixd.client import ClientError

    try:
        results, elapsed_s, warm_up_s = asyncio.run(_requests(name, daemon.address, workload, warm_up, progress))
    except ClientError as error:
        raise DaemonFailed(f"the daemon failed: {error}{daemon.last_words()}") from error
    return summarise(
        name,
        results,
        elapsed_s=elapsed_s,
        warm_up_requests=workload.prefixes if warm_up else 0,
        warm_up_s=warm_up_s,
        prefix_tokens=workload.prefix_tokens,
    )


async def _requests(
    name: str, address: str, workload: TextAnalysis, warm_up: bool, progress: Progress
) -> tuple[list[RequestResult], float, float]:
    """The results of all requests in their order, the seconds that they took together, and those of the warm-up."""
    from prefixd.client import AsyncClient

    async with AsyncClient(address, name="text analysis", memory="streamed") as client:
        progress.begin(f"{name}: loading the model", 0)
        # Less than a block: nothing of it is cached.
        await _send(client, [FIRST_TOKEN], 1)
        began = time.monotonic()
        if warm_up:
            progress.begin(f"{name}: each prefix once", workload.prefixes)
            await _send_all(client, workload, workload.warm_up_prompts(), progress.advance)
        warm = time.monotonic()
        progress.begin(f"{name}: {workload.requests} requests", workload.requests)
        results = await _send_all(client, workload, workload.prompts(), progress.advance)
        return results, time.monotonic() - warm, warm - began


async def _send_all(
    client: AsyncClient, workload: TextAnalysis, prompts: Sequence[Sequence[int]], finished: Callable[[], None]
) -> list[RequestResult]:
    places = asyncio.Semaphore(workload.outstanding)

    async def send(prompt: Sequence[int]) -> RequestResult:
        async with places:
            result = await _send(client, prompt, workload.output_tokens)
        finished()
        return result

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(prompt)) for prompt in prompts]
    except ExceptionGroup as errors:
        # The first failure ended the others; one is enough to tell.
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


async def _send(client: AsyncClient, prompt: Sequence[int], output_tokens: int) -> RequestResult:
    from prefixd.client import Finished, ServerError, Tier, Tokens

    sent = time.monotonic()
    ttft_s = 0.0
    output: list[int] = []
    async for event in client.generate(prompt, max_tokens=output_tokens, ignore_eos=True):
        if isinstance(event, Tokens):
            ttft_s = ttft_s or time.monotonic() - sent
            output += event.token_ids
        elif isinstance(event, Finished):
            hits = event.hit_tokens
            return RequestResult(tuple(output), ttft_s, hits[Tier.GPU], hits[Tier.CPU], hits[Tier.DISK])
    raise ServerError("the daemon ended a request without its last event; see its log")
