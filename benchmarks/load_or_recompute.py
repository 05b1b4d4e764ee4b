"""Time to first token of a cached prompt: load the prefix, compute it again, or whatever the daemon chooses.

Three daemons with the embedded model, each with a worker of its own, differ in scheduler.load alone: auto, always,
never. Their disks are throttled alike. A prompt's prefix is on disk only; the prompt is sent to each of them in turn,
again and again, three times as often where that takes less than 250 ms, and the medians of its times to first token
are compared. Before that, each has computed and loaded prefixes of all lengths a few times, so that auto knows what
that takes.

worst_regret is how much longer auto takes than the better of the other two, at the worst point; at most 0.1.
both_at_once_wins counts the points at which auto takes less than both, its upper quartile below their lower ones; at
least 1. abandoned_ratio: a disk drops to 1 MB/s in the middle of a load; the time from then to the first token over
the time of computing the prompt; at most 1.2.

Example: python -m benchmarks.load_or_recompute --json benchmarks/results/load_or_recompute.json
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.common import harness
from benchmarks.common.options import option, positive
from benchmarks.common.throttled import DiskRate, ThrottledDaemon
from prefixd.client import AsyncClient, Finished, Sampling, Tier, Tokens

T = TypeVar("T")

MODES = ("auto", "always", "never")
WORST_REGRET = 0.10
LEAST_WINS = 1
WORST_ABANDONED = 1.2
BLOCK_TOKENS = 16
BLOCK_BYTES = 256 << 10  # of the embedded model
_BODY_TOKENS = 8  # less than a block: what a request computes besides never grows the prefix
_SHORT_MS = 250.0
_MORE_REPEATS = 3
"""Where all three take less than so long, so many times as many repeats: a tenth of that is less than the noise."""
_SLOW = DiskRate(bytes_per_s=1e6)
_FAST_TO_SLOW = "2000:0,2000:50,500:5,200:0,100:0,50:10,20:0,20:50"


@dataclass(frozen=True, slots=True)
class Point:
    """Medians and quartiles, in ms, at one disk and one length."""

    mb_per_s: float
    latency_ms: float
    tokens: int
    ttft_ms: dict[str, float]
    lower_ms: dict[str, float]
    upper_ms: dict[str, float]

    @property
    def regret(self) -> float:
        """How much longer auto takes than the better of the others, as a share."""
        return max(0.0, self.ttft_ms["auto"] / min(self.ttft_ms["always"], self.ttft_ms["never"]) - 1)

    @property
    def wins(self) -> bool:
        """Whether auto takes less than both by more than the noise."""
        return self.upper_ms["auto"] < min(self.lower_ms["always"], self.lower_ms["never"])


class Subject:
    """A daemon and its prompts."""

    def __init__(self, mode: str, client: AsyncClient, daemon: ThrottledDaemon, gpu_bytes: int) -> None:
        self.mode = mode
        self.daemon = daemon
        self._client = client
        self._gpu_bytes = gpu_bytes

    async def first_token_s(self, prompt: Sequence[int]) -> float:
        """Seconds from sending the prompt to its first token. Raises BenchmarkError for blocks that are not on disk."""
        began_s = time.monotonic()
        first_s = 0.0
        async for event in self._client.generate(prompt, sampling=Sampling(max_tokens=1, ignore_eos=True)):
            if isinstance(event, Tokens) and not first_s:
                first_s = time.monotonic() - began_s
            if isinstance(event, Finished) and (left := event.hit_tokens[Tier.GPU]):
                raise harness.BenchmarkError(f"{left} of {len(prompt)} tokens were on the GPU tier still, and none may")
        return first_s

    async def leave_on_disk(self) -> None:
        """Has all that is cached be on disk only.

        The smallest GPU tier has two blocks, and a prompt of one block with its first token takes both. Nothing of such
        a prompt is ever loaded, since its last token has to be computed.
        """
        await self._client.flush()
        await self._client.resize_tier(Tier.GPU, 2 * BLOCK_BYTES)
        await self.first_token_s([0] * BLOCK_TOKENS)
        await self._client.resize_tier(Tier.GPU, self._gpu_bytes)


def prompt_of(tokens: int, seed: int) -> list[int]:
    """A prefix of so many tokens, and a body."""
    made: list[int] = np.random.default_rng([tokens, seed]).integers(0, 256, tokens + _BODY_TOKENS).tolist()
    return made


async def _interleaved(subjects: Sequence[Subject], prompt: Sequence[int], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {subject.mode: [] for subject in subjects}
    for repeat in range(repeats):
        for turn in range(len(subjects)):
            subject = subjects[(repeat + turn) % len(subjects)]
            await subject.leave_on_disk()
            times[subject.mode].append(1000 * await subject.first_token_s(prompt))
    return times


async def measure_disk(
    subjects: Sequence[Subject],
    rate: DiskRate,
    lengths: Sequence[int],
    repeats: int,
    warm_up: int,
    unseen: int,
    step: Callable[[], None],
) -> list[Point]:
    """A point for each length, on daemons that have learned what this disk takes, and no other; `unseen` is a seed of
    prompts that none of them has on disk."""
    for subject in subjects:
        subject.daemon.throttle(rate)
        for tokens in lengths:
            await subject.first_token_s(prompt_of(tokens, 0))  # on disk since the first daemon of this mode
            await subject.first_token_s(prompt_of(tokens, unseen))  # computed
        await subject.leave_on_disk()
    for _ in range(warm_up):
        for tokens in lengths:
            await _interleaved(subjects, prompt_of(tokens, 0), 1)
    points = []
    for tokens in lengths:
        times = await _interleaved(subjects, prompt_of(tokens, 0), repeats)
        if max(np.median(each) for each in times.values()) < _SHORT_MS:
            more = await _interleaved(subjects, prompt_of(tokens, 0), (_MORE_REPEATS - 1) * repeats)
            times = {mode: each + more[mode] for mode, each in times.items()}
        quartiles = {mode: np.percentile(each, (25, 50, 75)).tolist() for mode, each in times.items()}
        lower, median, upper = ({mode: round(q[n], 2) for mode, q in quartiles.items()} for n in range(3))
        mb_per_s = (rate.bytes_per_s or 0.0) / 1e6
        points.append(Point(mb_per_s, 1000 * rate.latency_s, tokens, median, lower, upper))
        step()
    return points


async def measure_abandoned(subject: Subject, rate: DiskRate, tokens: int, computed_ms: float, repeats: int) -> float:
    """The median of the time from the moment in which the disk turns slow, over that of computing the prompt."""
    loop, prompt, ratios = asyncio.get_running_loop(), prompt_of(tokens, 0), []
    load_s = tokens // BLOCK_TOKENS * BLOCK_BYTES / (rate.bytes_per_s or 1e9)
    for _ in range(repeats):
        subject.daemon.throttle(rate)
        for _ in range(2):
            await subject.leave_on_disk()
            await subject.first_token_s(prompt)
        await subject.leave_on_disk()
        slow_s: list[float] = []

        def turn_slow(slow_s: list[float] = slow_s) -> None:
            subject.daemon.throttle(_SLOW)
            slow_s.append(time.monotonic())

        began_s = time.monotonic()
        timer = loop.call_later(load_s / 3, turn_slow)
        first_s = await subject.first_token_s(prompt)
        timer.cancel()
        if slow_s and began_s + first_s > slow_s[0]:
            ratios.append(1000 * (began_s + first_s - slow_s[0]) / computed_ms)
        subject.daemon.throttle(DiskRate())
    if not ratios:
        raise harness.BenchmarkError("every load had ended before its disk turned slow; take a slower --abandoned-disk")
    return statistics.median(ratios)


def _settings(mode: str, gpu_bytes: int, disk_bytes: int) -> Mapping[str, object]:
    return {
        "worker.embedded": True,
        "worker.threads": 1,
        "worker.block_tokens": BLOCK_TOKENS,
        "gpu.device": "cpu",
        "gpu.bytes": gpu_bytes,
        "cpu.bytes": 0,
        "disk.bytes": disk_bytes,
        "disk.scrub_bytes_per_s": 0,
        "scheduler.load": mode,
    }


async def with_daemons(folder: Path, lengths: Sequence[int], work: Callable[[Sequence[Subject]], Awaitable[T]]) -> T:
    """`work` with a fresh daemon for each mode; what they have on disk stays for the next ones."""
    blocks = max(lengths) // BLOCK_TOKENS
    gpu_bytes = 2 * (blocks + 4) * BLOCK_BYTES
    disk_bytes = max(1 << 30, 4 * len(lengths) * blocks * BLOCK_BYTES)
    with ExitStack() as daemons:
        running = []
        for mode in MODES:
            daemon = ThrottledDaemon(_settings(mode, gpu_bytes, disk_bytes), directory=folder / mode)
            daemon.throttle(DiskRate())
            daemon.launch()
            daemons.callback(daemon.stop)
            running.append((mode, daemon))
        for _, daemon in running:
            daemon.wait_until_ready()
        async with AsyncExitStack() as clients:
            subjects = []
            for mode, daemon in running:
                client = await clients.enter_async_context(AsyncClient(daemon.address, name=mode, memory="streamed"))
                subjects.append(Subject(mode, client, daemon, gpu_bytes))
            return await work(subjects)


def measure(options: argparse.Namespace, folder: Path, step: Callable[[], None]) -> dict[str, Any]:
    """All disks and lengths, and the load that is abandoned."""
    points: list[Point] = []
    for number, rate in enumerate(options.disks, 1):

        async def disk(subjects: Sequence[Subject], rate: DiskRate = rate, number: int = number) -> list[Point]:
            return await measure_disk(subjects, rate, options.tokens, options.repeats, options.warm_up, number, step)

        points += asyncio.run(with_daemons(folder, options.tokens, disk))

    async def abandoned(subjects: Sequence[Subject]) -> float:
        auto, never = subjects[0], subjects[2]
        tokens = max(options.tokens)
        computed = [await never.first_token_s(prompt_of(tokens, 1000 + n)) for n in range(3)]
        await auto.first_token_s(prompt_of(tokens, 1000))
        computed_ms = 1000 * statistics.median(computed)
        return await measure_abandoned(auto, options.abandoned_disk, tokens, computed_ms, options.repeats)

    ratio = asyncio.run(with_daemons(folder, options.tokens, abandoned))
    step()
    return summary(points, ratio)


def summary(points: Sequence[Point], abandoned_ratio: float) -> dict[str, Any]:
    """The result."""
    worst = max(points, key=lambda point: point.regret)
    return {
        "worst_regret": round(worst.regret, 3),
        "worst_point": f"{worst.mb_per_s:g} MB/s, {worst.latency_ms:g} ms, {worst.tokens} tokens",
        "both_at_once_wins": sum(point.wins for point in points),
        "abandoned_ratio": round(abandoned_ratio, 3),
        "points": [{**asdict(point), "regret": round(point.regret, 3), "wins": point.wins} for point in points],
    }


def violations(result: Mapping[str, Any]) -> list[str]:
    """What is not as it has to be."""
    most = {"worst_regret": WORST_REGRET, "abandoned_ratio": WORST_ABANDONED}
    return harness.missed(result, most=most, least={"both_at_once_wins": LEAST_WINS})


def _disk(text: str) -> DiskRate:
    try:
        rate, latency = (float(part) for part in text.split(":"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no MB/s:ms, such as 200:5") from error
    if not (0 < rate < math.inf and 0 <= latency < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r}: MB/s have to be positive, ms 0 or more")
    return DiskRate(rate * 1e6, latency / 1000)


def _disks(text: str) -> list[DiskRate]:
    return [_disk(each) for each in text.split(",")]


def _lengths(text: str) -> list[int]:
    lengths = [positive(each) for each in text.split(",")]
    if wrong := [each for each in lengths if each % BLOCK_TOKENS]:
        raise argparse.ArgumentTypeError(f"{wrong[0]} tokens are not whole blocks of {BLOCK_TOKENS}")
    return lengths


@harness.benchmark(
    "load_or_recompute",
    __doc__,
    option("--disks", _disks(_FAST_TO_SLOW), f"MB/s:ms,... ({_FAST_TO_SLOW})", _disks, shown=False),
    option("--tokens", [64, 256, 1024, 4096], "(64,256,1024,4096)", _lengths, shown=False),
    option("--abandoned-disk", _disk("200:0"), "before it turns slow (200:0)", _disk, shown=False),
    option("--repeats", 5, "of each measurement; more of short ones"),
    option("--warm-up", 3, "rounds that are not measured"),
    unrecorded=("disks", "tokens", "abandoned_disk", "warm_up"),
)
def main(options: harness.Options) -> harness.Outcome:
    """What was measured, and what must hold of it."""
    with (
        tempfile.TemporaryDirectory(prefix="prefixd-") as folder,
        harness.progress("points", len(options.disks) * len(options.tokens) + 1) as step,
    ):
        result = measure(options, Path(folder), step)
    columns = ("mb_per_s", "latency_ms", "tokens", *(f"ttft_ms.{mode}" for mode in MODES), "regret", "wins")
    return harness.Outcome(result, violations(result), [harness.Table(result["points"], columns)])


if __name__ == "__main__":
    harness.run(main)
