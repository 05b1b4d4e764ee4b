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
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Timer
from typing import Any

from benchmarks.common import harness
from benchmarks.common.options import option
from benchmarks.stand_ins.throttled import DiskRate, ThrottledDaemon
from benchmarks.ways_of_serving.ttft import (
    first_token,
    gpu_bytes,
    in_turn,
    prompt_of,
    quartiles,
    settings,
    start,
    whole_blocks,
)
from prefixd.client import Client, Tier
from prefixd.workloads.text_analysis import BLOCK_BYTES, BLOCK_TOKENS

MODES = ("auto", "always", "never")
WORST_REGRET = 0.10
LEAST_WINS = 1
WORST_ABANDONED = 1.2
_SHORT_S = 0.25
_MORE_REPEATS = 3
"""Where all take less than so long, so many times as many repeats: a tenth of that is less than the noise."""
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
    """A daemon and its prompts. `block_bytes`: of a block, which are half with numbers of 16 bits."""

    def __init__(self, client: Client, daemon: ThrottledDaemon, gpu_bytes: int, block_bytes: int = BLOCK_BYTES) -> None:
        self.daemon = daemon
        self._client = client
        self._gpu_bytes = gpu_bytes
        self._block_bytes = block_bytes

    def first_token_s(self, prompt: Sequence[int]) -> float:
        """Seconds from sending the prompt to its first token. Raises BenchmarkError for blocks that are not on disk."""
        first_s, ended = first_token(self._client, prompt)
        if left := ended.hit_tokens[Tier.GPU]:
            raise harness.BenchmarkError(f"{left} of {len(prompt)} tokens were on the GPU tier still, and none may")
        return first_s

    def leave_on_disk(self) -> None:
        """Has all that is cached be on disk only.

        The smallest GPU tier has two blocks, and a prompt of one block with its first token takes both. Nothing of such
        a prompt is ever loaded, since its last token has to be computed.
        """
        self._client.flush()
        self._client.resize_tier(Tier.GPU, 2 * self._block_bytes)
        self.first_token_s([0] * BLOCK_TOKENS)
        self._client.resize_tier(Tier.GPU, self._gpu_bytes)

    def from_disk_s(self, prompt: Sequence[int]) -> float:
        """As `first_token_s`, of a prompt that was on disk only."""
        self.leave_on_disk()
        return self.first_token_s(prompt)


def _interleaved(subjects: Mapping[str, Subject], tokens: int, repeats: int) -> dict[str, list[float]]:
    prompt = prompt_of(tokens, 0)
    return in_turn(list(subjects), repeats, lambda mode, _: subjects[mode].from_disk_s(prompt))


def measure_disk(
    subjects: Mapping[str, Subject],
    rate: DiskRate,
    lengths: Sequence[int],
    repeats: int,
    warm_up: int,
    unseen: int,
    step: Callable[[], None],
) -> list[Point]:
    """A point for each length, on daemons that have learned what this disk takes, and no other, by the subjects' names;
    `unseen` is a seed of prompts that none of them has on disk."""
    for subject in subjects.values():
        subject.daemon.throttle(rate)
        for tokens in lengths:
            subject.first_token_s(prompt_of(tokens, 0))  # on disk since the first daemon of this mode
            subject.first_token_s(prompt_of(tokens, unseen))  # computed
        subject.leave_on_disk()
    for _ in range(warm_up):
        for tokens in lengths:
            _interleaved(subjects, tokens, 1)
    points = []
    for tokens in lengths:
        times = _interleaved(subjects, tokens, repeats)
        if max(statistics.median(each) for each in times.values()) < _SHORT_S:
            more = _interleaved(subjects, tokens, (_MORE_REPEATS - 1) * repeats)
            times = {mode: each + more[mode] for mode, each in times.items()}
        mb_per_s = (rate.bytes_per_s or 0.0) / 1e6
        points.append(Point(mb_per_s, 1000 * rate.latency_s, tokens, *quartiles(times)))
        step()
    return points


def measure_abandoned(subject: Subject, rate: DiskRate, tokens: int, computed_s: float, repeats: int) -> float:
    """The median of the time from the moment in which the disk turns slow, over that of computing the prompt."""
    prompt, ratios = prompt_of(tokens, 0), []
    load_s = tokens // BLOCK_TOKENS * BLOCK_BYTES / (rate.bytes_per_s or 1e9)
    for _ in range(repeats):
        subject.daemon.throttle(rate)
        for _ in range(2):
            subject.from_disk_s(prompt)
        subject.leave_on_disk()
        slow_s: list[float] = []

        def turn_slow(slow_s: list[float] = slow_s) -> None:
            subject.daemon.throttle(_SLOW)
            slow_s.append(time.monotonic())

        began_s = time.monotonic()
        timer = Timer(load_s / 3, turn_slow)
        timer.start()
        first_s = subject.first_token_s(prompt)
        timer.cancel()
        timer.join()
        if slow_s and began_s + first_s > slow_s[0]:
            ratios.append((began_s + first_s - slow_s[0]) / computed_s)
        subject.daemon.throttle(DiskRate())
    if not ratios:
        raise harness.BenchmarkError("every load had ended before its disk turned slow; take a slower --abandoned-disk")
    return statistics.median(ratios)


@contextmanager
def running(folder: Path, lengths: Sequence[int]) -> Iterator[dict[str, Subject]]:
    """A fresh daemon for each mode; what they have on disk stays for the next ones."""
    longest = max(lengths)
    disk_bytes = max(1 << 30, 4 * len(lengths) * longest // BLOCK_TOKENS * BLOCK_BYTES)
    disk = {"disk.bytes": disk_bytes, "disk.scrub_bytes_per_s": 0}
    daemons = {
        mode: ThrottledDaemon(settings(longest) | disk | {"scheduler.load": mode}, directory=folder / mode)
        for mode in MODES
    }
    for daemon in daemons.values():
        daemon.throttle(DiskRate())
    with ExitStack() as stack:
        clients = start(daemons, stack)
        yield {mode: Subject(client, daemons[mode], gpu_bytes(longest)) for mode, client in clients.items()}


def measure(options: argparse.Namespace, folder: Path, step: Callable[[], None]) -> dict[str, Any]:
    """All disks and lengths, and the load that is abandoned."""
    points: list[Point] = []
    for number, rate in enumerate(options.disks, 1):
        with running(folder, options.tokens) as subjects:
            points += measure_disk(subjects, rate, options.tokens, options.repeats, options.warm_up, number, step)
    with running(folder, options.tokens) as subjects:
        tokens = max(options.tokens)
        computed_s = statistics.median(subjects["never"].first_token_s(prompt_of(tokens, 1000 + n)) for n in range(3))
        subjects["auto"].first_token_s(prompt_of(tokens, 1000))
        ratio = measure_abandoned(subjects["auto"], options.abandoned_disk, tokens, computed_s, options.repeats)
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


def disks(text: str) -> list[DiskRate]:
    """Speeds of disks, such as 200:5,50:0; an argparse type."""
    return [_disk(each) for each in text.split(",")]


@harness.benchmark(
    "load_or_recompute",
    __doc__,
    option("--disks", disks(_FAST_TO_SLOW), f"MB/s:ms,... ({_FAST_TO_SLOW})", disks, shown=False),
    option("--tokens", [64, 256, 1024, 4096], "(64,256,1024,4096)", whole_blocks, shown=False),
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
