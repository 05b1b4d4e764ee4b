"""Sends the text analysis workload to a daemon and measures it. The demo and the benchmark share this."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from prefixd.workloads.daemon_process import DaemonFailed, DaemonProcess
from prefixd.workloads.figures import Figures, RequestResult, summarise
from prefixd.workloads.text_analysis import FIRST_TOKEN, TextAnalysis, TierSizes, config_overrides

if TYPE_CHECKING:
    from prefixd.client import AsyncClient

T = TypeVar("T")


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


def run_in_order(main: Coroutine[object, object, T]) -> T:
    """`asyncio.run` for what starts daemons: SIGTERM, like Ctrl-C, ends them before it ends this process."""

    async def cancellable() -> T:
        task = asyncio.current_task()
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await main

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError as error:
        raise SystemExit(128 + signal.SIGTERM) from error


def daemon_for(config: str, workload: TextAnalysis, tiers: TierSizes, directory: Path) -> DaemonProcess:
    """A daemon (not started) with the embedded model, set up for `config`, one of CONFIGS."""
    overrides: dict[str, Any] = {
        "worker.embedded": True,
        "scheduler.queue_limit": max(4096, workload.requests),
        **tiers.overrides(workload),
        **config_overrides(config),
    }
    return DaemonProcess(directory, overrides)


async def measure(name: str, daemon: DaemonProcess, workload: TextAnalysis, *, progress: Progress) -> Figures:
    """Streams the requests to a started daemon, `workload.outstanding` at a time; its queue orders them.

    Raises DaemonFailed.
    """
    from prefixd.client import AsyncClient, ClientError

    try:
        async with AsyncClient(daemon.address, name="text analysis", memory="streamed") as client:
            progress.begin(f"{name}: loading the model", 0)
            # Less than a block: nothing of it is cached.
            await _send(client, [FIRST_TOKEN], 1)
            progress.begin(f"{name}: {workload.requests} requests", workload.requests)
            began = time.monotonic()
            results = await _send_all(client, workload, progress.advance)
            elapsed_s = time.monotonic() - began
    except ClientError as error:
        raise DaemonFailed(f"the daemon failed: {error}{daemon.last_words()}") from error
    return summarise(name, results, elapsed_s=elapsed_s, prefix_tokens=workload.prefix_tokens)


async def run_config(
    config: str, workload: TextAnalysis, tiers: TierSizes, directory: Path, *, progress: Progress
) -> Figures:
    """One of CONFIGS on a fresh daemon in the empty `directory`. Raises DaemonFailed."""
    progress.begin(f"{config}: starting a daemon", 0)
    async with daemon_for(config, workload, tiers, directory) as daemon:
        return await measure(config, daemon, workload, progress=progress)


async def _send_all(client: AsyncClient, workload: TextAnalysis, finished: Callable[[], None]) -> list[RequestResult]:
    places = asyncio.Semaphore(workload.outstanding)

    async def send(prompt: Sequence[int]) -> RequestResult:
        async with places:
            result = await _send(client, prompt, workload.output_tokens)
        finished()
        return result

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(prompt)) for prompt in workload.prompts()]
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
