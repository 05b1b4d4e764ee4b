"""Sends the text analysis workload to a daemon and measures it. The demo and the benchmark share this."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from prefixd.cli.demo.daemon_process import DaemonFailed, DaemonProcess
from prefixd.workloads.latency_figures import Figures, RequestResult, summarise
from prefixd.workloads.text_analysis import FIRST_TOKEN, Serving, TextAnalysis, TierSizes, serving_of

if TYPE_CHECKING:
    from prefixd.client import AsyncClient


class Progress(Protocol):
    """Who is told how far a run is."""

    def begin(self, text: str, total: int) -> None:
        """A new stretch of `total` requests begins (0: not counted in requests)."""

    def advance(self) -> None:
        """One more request is done."""


def settings_for(serving: Serving, workload: TextAnalysis, tiers: TierSizes) -> dict[str, Any]:
    """The settings, by dotted name, of a daemon with the embedded model that serves `workload` so."""
    return {
        "worker.embedded": True,
        "scheduler.queue_limit": max(4096, workload.requests),
        **serving.overrides(workload, tiers),
    }


def daemon_for(serving: Serving, workload: TextAnalysis, tiers: TierSizes, directory: Path) -> DaemonProcess:
    """A daemon (not started) with the embedded model, set up for `serving`."""
    return DaemonProcess(settings_for(serving, workload, tiers), directory=directory)


def run_config(
    config: str, workload: TextAnalysis, tiers: TierSizes, directory: Path, *, warm_up: bool = False, progress: Progress
) -> Figures:
    """One of CONFIGS on a fresh daemon in the empty `directory`; with `warm_up` after each prefix was asked for once.

    Raises:
        DaemonFailed: it did not start, or a request failed.
    """
    progress.begin(f"{config}: starting a daemon", 0)
    with daemon_for(serving_of(config), workload, tiers, directory) as daemon:
        warm_up_s = ask_each_once(config, daemon, workload, progress=progress) if warm_up else None
        return measure(config, daemon, workload, warm_up_s=warm_up_s, progress=progress)


def ask_each_once(name: str, daemon: DaemonProcess, workload: TextAnalysis, *, progress: Progress) -> float:
    """Asks for each prefix once, so that what follows finds full tiers; how many seconds that took.

    Raises:
        DaemonFailed: a request failed.
    """
    progress.begin(f"{name}: each prefix once", workload.prefixes)
    _, elapsed_s = _run(daemon, workload, workload.warm_up_prompts(), workload.outstanding, progress)
    return elapsed_s


def measure(
    name: str,
    daemon: DaemonProcess,
    workload: TextAnalysis,
    *,
    repeat: int = 0,
    one_by_one: bool = False,
    warm_up_s: float | None = None,
    progress: Progress,
) -> Figures:
    """Sends the requests to a started daemon.

    Args:
        name: of the figures.
        daemon: has started.
        workload: which requests.
        repeat: which of the workload's repeats.
        one_by_one: each when the one before it has been answered, which measures latency; else `outstanding` at a time,
            and the daemon's queue orders them.
        warm_up_s: what `ask_each_once` took of this daemon; None without one.
        progress: who is told.

    Raises:
        DaemonFailed: a request failed.
    """
    prompts = workload.prompts(repeat)
    progress.begin(f"{name}: {len(prompts)} requests{' one by one' if one_by_one else ''}", len(prompts))
    results, elapsed_s = _run(daemon, workload, prompts, 1 if one_by_one else workload.outstanding, progress)
    return summarise(
        name,
        results,
        elapsed_s=elapsed_s,
        warm_up_requests=0 if warm_up_s is None else workload.prefixes,
        warm_up_s=warm_up_s or 0.0,
        prefix_tokens=workload.prefix_tokens,
    )


def _run(
    daemon: DaemonProcess,
    workload: TextAnalysis,
    prompts: Sequence[Sequence[int]],
    outstanding: int,
    progress: Progress,
) -> tuple[list[RequestResult], float]:
    from prefixd.client import ClientError

    try:
        return asyncio.run(send_requests(daemon.address, workload, prompts, outstanding, progress.advance))
    except ClientError as error:
        raise DaemonFailed(f"the daemon failed: {error}{daemon.last_words()}") from error


async def send_requests(
    address: str,
    workload: TextAnalysis,
    prompts: Sequence[Sequence[int]],
    outstanding: int,
    finished: Callable[[], None],
) -> tuple[list[RequestResult], float]:
    """The results of all requests in their order, and the seconds that they took together. Raises ClientError."""
    from prefixd.client import AsyncClient

    async with AsyncClient(address, name="text analysis", memory="streamed") as client:
        # Waits until the model is loaded. Less than a block: nothing of it is cached.
        await _send(client, [FIRST_TOKEN], 1)
        began = time.monotonic()
        results = await _send_all(client, workload.output_tokens, prompts, outstanding, finished)
        return results, time.monotonic() - began


async def _send_all(
    client: AsyncClient,
    output_tokens: int,
    prompts: Sequence[Sequence[int]],
    outstanding: int,
    finished: Callable[[], None],
) -> list[RequestResult]:
    places = asyncio.Semaphore(outstanding)

    async def send(prompt: Sequence[int]) -> RequestResult:
        async with places:
            result = await _send(client, prompt, output_tokens)
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
    from prefixd.client import Finished, Sampling, ServerError, Tier, Tokens

    sent = time.monotonic()
    ttft_s = 0.0
    output: list[int] = []
    async for event in client.generate(prompt, sampling=Sampling(max_tokens=output_tokens, ignore_eos=True)):
        if isinstance(event, Tokens):
            ttft_s = ttft_s or time.monotonic() - sent
            output += event.token_ids
        elif isinstance(event, Finished):
            hits = event.hit_tokens
            return RequestResult(tuple(output), ttft_s, hits[Tier.GPU], hits[Tier.CPU], hits[Tier.DISK])
    raise ServerError("the daemon ended a request without its last event; see its log")
