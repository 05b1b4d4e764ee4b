"""Sends the text analysis workload to a daemon and measures it, for the demo and the benchmark."""

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
    """Shows how far a run is."""

    def begin(self, text: str, total: int) -> None:
        """Begins a new part of `total` requests (0: not counted in requests)."""

    def advance(self) -> None:
        """Counts one more finished request."""


def settings_for(serving: Serving, workload: TextAnalysis, tiers: TierSizes) -> dict[str, Any]:
    """Returns the settings, by dotted name, of a daemon with the embedded model for `serving` and `workload`."""
    return {
        "worker.embedded": True,
        "scheduler.queue_limit": max(4096, workload.requests),
        **serving.overrides(workload, tiers),
    }


def daemon_for(serving: Serving, workload: TextAnalysis, tiers: TierSizes, directory: Path) -> DaemonProcess:
    """Returns a daemon, not yet started, with the embedded model and the settings for `serving`."""
    return DaemonProcess(settings_for(serving, workload, tiers), directory=directory)


def run_config(
    config: str, workload: TextAnalysis, tiers: TierSizes, directory: Path, *, warm_up: bool = False, progress: Progress
) -> Figures:
    """Measures one of CONFIGS on a new daemon in the empty `directory`; with `warm_up`, sends each prefix once before.

    Raises:
        DaemonFailed: the daemon did not start, or a request failed.
    """
    progress.begin(f"{config}: starting a daemon", 0)
    with daemon_for(serving_of(config), workload, tiers, directory) as daemon:
        warm_up_s = ask_each_once(config, daemon, workload, progress=progress) if warm_up else None
        return measure(config, daemon, workload, warm_up_s=warm_up_s, progress=progress)


def ask_each_once(name: str, daemon: DaemonProcess, workload: TextAnalysis, *, progress: Progress) -> float:
    """Sends each prefix once, so that later requests find full tiers; returns the seconds that this took.

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
    """Sends the requests to a started daemon and returns their figures.

    Args:
        name: name of the figures.
        daemon: a started daemon.
        workload: the requests.
        repeat: index of the workload's repeat.
        one_by_one: send each request after the answer to the one before, which measures latency; otherwise
            `outstanding` at a time, and the daemon's queue orders them.
        warm_up_s: the result of `ask_each_once` for this daemon; None without a warm-up.
        progress: shows the progress.

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
    """Returns the results of all requests in their order, and the seconds for all. Raises ClientError."""
    from prefixd.client import AsyncClient

    async with AsyncClient(address, name="text analysis", memory="streamed") as client:
        # Waits until the model is loaded. The prompt is shorter than a block, so that the daemon caches nothing.
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
    slots = asyncio.Semaphore(outstanding)

    async def send(prompt: Sequence[int]) -> RequestResult:
        async with slots:
            result = await _send(client, prompt, output_tokens)
        finished()
        return result

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(prompt)) for prompt in prompts]
    except ExceptionGroup as errors:
        # The first failure has cancelled the other requests.
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
    raise ServerError("the daemon ended a request without the event Finished; see its log")
