"""Resizing the GPU tier under load: no request fails, the answers stay the same, the memory goes back to the system.

A daemon runs the embedded model in host memory. Clients send requests to generate, one after the other each, from a
fixed set of prompts that share prefixes. Meanwhile the GPU tier is resized to a quarter and back, several times. Then
the prompts that were answered are run once by a daemon that is never resized, without a cache.

failed_requests must be 0, and same_tokens true: every answer is that of the other daemon. memory_off is how far the
memory that the kernel has given to the tier's file (its blocks, by fstat) is from the size asked for, as a share of
it, at its worst; it must be at most 0.1 after every resize. unfinished_resizes must be 0: resizes that ended before
the size was reached.

What is possible: the file's blocks are those of whole pages, and the tier's size is a whole number of blocks, so
memory_off is 0 but for rounding.

Example: python -m benchmarks.checks.resize --json benchmarks/results/resize.json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import harness
from benchmarks.common.options import from_options, option, size
from benchmarks.workloads.asking import generated_tokens
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import AsyncClient, ClientError, Sampling, Tier

WORST_MEMORY_OFF = 0.1
_FILE = "prefixd-gpu-tier"
_TIMEOUT_S = 120.0
_SHARED_TOKENS = 96
_VOCABULARY = 250
_SEED = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of a run."""

    rounds: int
    clients: int
    prompts: int
    max_tokens: int
    gpu_bytes: int
    pause_s: float
    """Between a resize and the next one."""

    def tokens(self, prompt: int) -> list[int]:
        """A prompt's tokens; every fourth prompt begins in the same way."""
        shared = random.Random(f"{_SEED} {prompt % 4}").choices(range(_VOCABULARY), k=_SHARED_TOKENS)
        return shared + random.Random(f"{_SEED} own {prompt}").choices(range(_VOCABULARY), k=32)

    def settings(self) -> dict[str, object]:
        return {
            "worker.embedded": True,
            "worker.threads": 1,
            "worker.max_running": self.clients,
            "gpu.bytes": self.gpu_bytes,
            "gpu.device": "cpu",
            "cpu.bytes": 2 * self.gpu_bytes,
            "disk.bytes": 0,
        }


@dataclass(frozen=True, slots=True)
class Resize:
    """One resize.

    memory_bytes: memory of the tier's file after the resize.
    """

    target_bytes: int
    nbytes: int
    memory_bytes: int
    seconds: float
    evicted_blocks: int
    demoted_blocks: int
    unfinished: str

    @property
    def memory_off(self) -> float:
        """Difference between the memory and the requested size, as a share of the size."""
        return abs(self.memory_bytes - self.target_bytes) / self.target_bytes


@dataclass(slots=True)
class Load:
    """Requests and answers of the clients."""

    requests: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)
    answers: dict[int, set[tuple[int, ...]]] = field(default_factory=dict)
    """By prompt, every different answer."""


def memory_bytes(pid: int) -> int:
    """Returns the memory of a daemon's GPU tier file. Raises BenchmarkError if it has no such file."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # a file that was closed meanwhile
            if _FILE in os.readlink(link):
                return os.stat(link).st_blocks * 512
    raise harness.BenchmarkError(f"process {pid} has no file {_FILE}; only a tier in host memory can be measured")


async def measure(plan: Plan, folder: Path, step: Callable[[], None] = lambda: None) -> tuple[Load, list[Resize]]:
    """Resizes under load.

    Args:
        plan: what to do.
        folder: empty; where the data goes.
        step: called after each resize.
    """
    load = Load()
    with DaemonProcess({**plan.settings(), "data_dir": folder / "resized"}) as daemon:
        ended = asyncio.Event()
        clients = [
            asyncio.create_task(_client(daemon.address, plan, each, load, ended)) for each in range(plan.clients)
        ]
        try:
            async with AsyncClient(daemon.address, name="benchmark resize", timeout_s=_TIMEOUT_S) as operator:
                while load.requests < plan.clients and not all(client.done() for client in clients):
                    await asyncio.sleep(plan.pause_s)
                resizes = []
                for _ in range(plan.rounds):
                    for nbytes in (plan.gpu_bytes // 4, plan.gpu_bytes):
                        resizes.append(await _resize(operator, daemon.pid, nbytes))
                        step()
                        await asyncio.sleep(plan.pause_s)
        finally:
            ended.set()
            await asyncio.gather(*clients)
    return load, resizes


async def undisturbed(plan: Plan, folder: Path, prompts: Collection[int]) -> dict[int, tuple[int, ...]]:
    """Returns the answers of a daemon that is never resized and caches nothing."""
    settings = {**plan.settings(), "data_dir": folder / "undisturbed", "cache.enabled": False}
    with DaemonProcess(settings) as daemon:
        async with AsyncClient(daemon.address, name="benchmark resize", timeout_s=_TIMEOUT_S) as client:
            answers = await asyncio.gather(*(_answer(client, plan, prompt) for prompt in prompts))
    return dict(zip(prompts, answers, strict=True))


async def _client(address: str, plan: Plan, number: int, load: Load, ended: asyncio.Event) -> None:
    """Sends one request after the other, each prompt in turn, at least one."""
    prompt = number
    async with AsyncClient(address, name=f"benchmark resize {number}", timeout_s=_TIMEOUT_S) as client:
        while True:
            prompt = (prompt + 1) % plan.prompts
            try:
                load.answers.setdefault(prompt, set()).add(await _answer(client, plan, prompt))
            except ClientError as error:
                load.failed += 1
                load.failures.append(str(error))
            load.requests += 1
            if ended.is_set():
                return


async def _answer(client: AsyncClient, plan: Plan, prompt: int) -> tuple[int, ...]:
    sampling = Sampling(max_tokens=plan.max_tokens, ignore_eos=True)
    return tuple(await generated_tokens(client, plan.tokens(prompt), sampling))


async def _resize(operator: AsyncClient, pid: int, nbytes: int) -> Resize:
    begin = time.perf_counter()
    answer = await operator.resize_tier(Tier.GPU, nbytes)
    return Resize(
        nbytes,
        answer.nbytes,
        memory_bytes(pid),
        round(time.perf_counter() - begin, 3),
        answer.evicted_blocks,
        answer.demoted_blocks,
        answer.unfinished,
    )


def summary(load: Load, resizes: Sequence[Resize], expected: Mapping[int, tuple[int, ...]]) -> dict[str, Any]:
    """The result."""
    seconds = [resize.seconds for resize in resizes]
    return {
        "requests": load.requests,
        "failed_requests": load.failed,
        "failures": load.failures[:10],
        "same_tokens": bool(load.answers) and all(seen == {expected[p]} for p, seen in load.answers.items()),
        "memory_off": round(max(resize.memory_off for resize in resizes), 4),
        "unfinished_resizes": sum(1 for resize in resizes if resize.unfinished),
        "shrink_s": max(seconds[::2]),
        "grow_s": max(seconds[1::2]),
        "resizes": [asdict(resize) for resize in resizes],
    }


def violations(result: Mapping[str, Any]) -> list[str]:
    """Returns the bounds that a result misses, in words."""
    zero, most = ("failed_requests", "unfinished_resizes"), {"memory_off": WORST_MEMORY_OFF}
    return harness.missed(result, zero=zero, true=["same_tokens"], most=most) + list(result["failures"][:1])


def make_plan(options: argparse.Namespace) -> Plan:
    """The plan of a run."""
    return from_options(Plan, options)


@harness.benchmark(
    "checks.resize",
    __doc__,
    option("--rounds", 4, "times to a quarter and back"),
    option("--clients", 6, "requests at a time"),
    option("--prompts", 16, "different prompts"),
    option("--max-tokens", 32, "tokens of an answer"),
    option("--gpu-bytes", 32 << 20, "the tier", size),
    option("--pause-s", 2.0, "seconds between two resizes", float, metavar="S"),
    option("--folder", None, "where to work (the temporary folder)", Path),
)
def main(options: harness.Options) -> harness.Outcome:
    """Resizes under load, and the same requests without."""
    plan = make_plan(options)
    with (
        tempfile.TemporaryDirectory(prefix="prefixd-resize-", dir=options.folder) as folder,
        harness.progress("resizes", 2 * plan.rounds) as step,
    ):
        load, resizes = asyncio.run(measure(plan, Path(folder), step))
        expected = asyncio.run(undisturbed(plan, Path(folder), load.answers))
    result = summary(load, resizes, expected)

    columns = ("target_bytes", "memory_bytes", "seconds", "evicted_blocks", "demoted_blocks")
    return harness.Outcome(result, violations(result), [harness.Table(result["resizes"], columns)])


if __name__ == "__main__":
    harness.run(main)
