"""A whole daemon, from gRPC to the GPU: first tokens by tier, text analysis, and tokens a second without settings."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.rig.asked_daemon import Asked, Clocked, asked_daemon
from benchmarks.gpu_parts.rig.device import CHUNK_BYTES, Device
from benchmarks.gpu_parts.rig.model import random_tokens, saved_model
from benchmarks.gpu_parts.rig.part import Budget, Part, Unavailable
from benchmarks.gpu_parts.rig.prediction import Prediction, point_figure
from prefixd.workloads.text_analysis import TextAnalysis

_LENGTH, _SMALL_LENGTH, _NEW_TOKENS = 8192, 128, 64
_PROMPTS, _GPU_PROMPTS, _CPU_PROMPTS = 12, 3, 3  # of the tiers' sizes; the rest is on disk alone
_TEXT_ANALYSIS = TextAnalysis(prefixes=24, requests=384, prefix_tokens=2048, outstanding=64)
_SMALL_TEXT_ANALYSIS = TextAnalysis(prefixes=4, requests=8, prefix_tokens=64, outstanding=4)
_LAYERWISE, _SMALL_LAYERWISE = ("auto", "never"), ("always",)
_FEWER = 4  # so many times fewer requests without a cache
_RATE_REQUESTS, _RATE_CONTEXT, _RATE_OUTPUT = (1, 64), 1024, 128


def measure(device: Device, budget: Budget) -> Mapping[str, Any]:
    """With a 1B-sized model: milliseconds to a first token by tier, and text analysis with a cache and without.

    tiers: every prompt has 8,192 tokens and 64 more, and is sent alone: new (none), again at once (gpu), and when all
    have been sent once more, the last ones first, so that the tiers below have the others. A sample counts for the tier
    that had most of its tokens, by the daemon's own answer; median and most. other_first_tokens: of how many it was
    another than from the GPU tier. On a GPU passes with and without a graph sum in other orders, so it may be.
    layerwise: `worker.layerwise_loads` of the daemon: by default, and "never", where prefixes come in whole blocks.
    loaded_s and layerwise_loads: of each daemon; the second are requests that began before their last layers had come.

    text_analysis: 24 prefixes, more than the GPU tier holds; requests with a random one each, 64 at a time; and the
    same where none finds or leaves anything in the cache.

    scheduler.load is "always": a small model computes 8,192 tokens sooner than many disks read them.
    """
    length = _LENGTH if device.measures else _SMALL_LENGTH
    workload = _TEXT_ANALYSIS if device.measures else _SMALL_TEXT_ANALYSIS
    with saved_model(device, "1b") as (folder, described):
        prompt_bytes = (length + 2 * _NEW_TOKENS) * described["token_bytes"]
        settings = {
            "gpu.bytes": _GPU_PROMPTS * prompt_bytes
            + 2 * CHUNK_BYTES * (workload.outstanding if device.measures else 1),
            "cpu.bytes": _CPU_PROMPTS * prompt_bytes + prompt_bytes // 2,
            "worker.cuda_graphs_seconds": 6,
            "scheduler.load": "always",
        }

        async def run() -> dict[str, Any]:
            answer: dict[str, Any] = {
                "loaded_s": [],
                "layerwise_loads": [],
                "points": [],
                "other_first_tokens": 0,
                "text_analysis": {},
            }
            for number, layerwise in enumerate(_LAYERWISE if device.measures else _SMALL_LAYERWISE):
                if not budget.allows(what := f"layer by layer: {layerwise}"):
                    continue
                with budget.attempt(what):
                    given = {**settings, "worker.layerwise_loads": layerwise}
                    async with asked_daemon(device, folder, given) as daemon:
                        answer["loaded_s"].append(daemon.loaded_s)
                        points, other = await _by_tier(daemon, length, budget)
                        answer["points"] += [{"layerwise": layerwise, **point} for point in points]
                        answer["other_first_tokens"] += other
                        scheduler = (await daemon.client.stats()).scheduler
                        answer["layerwise_loads"].append(scheduler.layerwise_loads)
                        if number == 0 and budget.allows("text analysis"):
                            answer["text_analysis"] = await _text_analysis(daemon, workload)
            return answer

        return {"model": described, "prompt_tokens": length + _NEW_TOKENS, "settings": settings, **asyncio.run(run())}


async def _by_tier(daemon: Asked, length: int, budget: Budget) -> tuple[list[dict[str, Any]], int]:
    """Points, and how many first tokens were others than from the GPU tier."""
    prompts = [random_tokens(number, length + _NEW_TOKENS) for number in range(_PROMPTS)]
    samples: dict[str, list[float]] = {"none": [], "gpu": [], "cpu": [], "disk": []}
    first_tokens: list[int] = []
    other = 0
    for prompt in prompts:
        samples["none"].append((await daemon.ask(prompt, 1)).wait_ms)
        again = await daemon.ask(prompt, 1)
        samples[_tier_of(again)].append(again.wait_ms)
        first_tokens.append(again.tokens[0])
    await daemon.client.flush(timeout_s=60.0)
    for prompt, token in zip(reversed(prompts), reversed(first_tokens), strict=True):
        if not budget.allows("a prompt from the tiers below"):
            break
        found = await daemon.ask(prompt, 1)
        other += found.tokens[0] != token
        samples[_tier_of(found)].append(found.wait_ms)
    points = [
        {
            "tier": tier,
            "samples": len(waits),
            "first_token_ms": round(statistics.median(waits), 2),
            "most_ms": round(max(waits), 2),
        }
        for tier, waits in samples.items()
        if waits
    ]
    return points, other


def _tier_of(answer: Clocked) -> str:
    """The tier that had most of the prompt's tokens; "none" if none had any."""
    tier, tokens = max(answer.hit_tokens.items(), key=lambda each: each[1])
    return tier.label if tokens else "none"


async def _text_analysis(daemon: Asked, workload: TextAnalysis) -> dict[str, float]:
    output, outstanding = workload.output_tokens, workload.outstanding
    prompts = workload.prompts()
    await daemon.ask_all(workload.warm_up_prompts(), output, outstanding)

    async def rate(some: Sequence[Sequence[int]], cached: bool) -> float:
        begin = time.monotonic()
        await daemon.ask_all(some, output, outstanding, cached=cached)
        return round(len(some) / (time.monotonic() - begin), 1)

    without = await rate(prompts[: len(prompts) // _FEWER], cached=False)
    return {"cached_requests_per_s": await rate(prompts, cached=True), "requests_per_s": without}


def measure_8b(device: Device, budget: Budget) -> Mapping[str, Any]:
    """With an 8B-sized model and no setting but that: tokens a second, by requests at a time, while all decode.

    Prompts have 1,024 tokens of their own. Every point is run twice: in its first run graphs are captured, and in its
    second the prompts are cached. first_token_ms: median and longest.
    """
    if not device.measures:
        raise Unavailable("it differs from the part daemon in its model, which is one for a GPU, and in what it asks")
    with saved_model(device) as (folder, described):
        answer = asyncio.run(_rates(device, folder, budget))
    return {"model": described, "context_tokens": _RATE_CONTEXT, "output_tokens": _RATE_OUTPUT, **answer}


async def _rates(device: Device, folder: Path, budget: Budget) -> dict[str, Any]:
    points: list[dict[str, Any]] = []
    async with asked_daemon(device, folder, {}) as daemon:
        for count in _RATE_REQUESTS:
            if not budget.allows(f"{count} requests"):
                continue
            prompts = [random_tokens(1000 * count + number, _RATE_CONTEXT) for number in range(count)]
            for run in ("first", "again"):
                clocked = await daemon.ask_all(prompts, _RATE_OUTPUT, count)
                points.append({"requests": count, "run": run, **rate_of(clocked)})
        worker = (await daemon.client.stats()).worker
    graphs = worker.cuda_graphs_reason or worker.cuda_graphs
    return {"loaded_s": daemon.loaded_s, "graphs": graphs, "points": points}


def rate_of(clocked: Sequence[Clocked]) -> dict[str, Any]:
    """Tokens a second while all requests decode, and the waits for a first token: the median and the longest."""
    started, ended = max(each.times_s[0] for each in clocked), min(each.times_s[-1] for each in clocked)
    sampled = sum(started < at <= ended for each in clocked for at in each.times_s)
    waits = sorted(each.wait_ms for each in clocked)
    return {
        "tokens_per_s": round(sampled / (ended - started), 1) if sampled else 0.0,
        "first_token_ms": [round(statistics.median(waits), 1), round(waits[-1], 1)],
    }


def _more_with_a_cache(answer: Mapping[str, Any]) -> float | None:
    """Requests a second of text analysis, with a cache over without."""
    rates = answer.get("text_analysis") or {}
    return round(rates["cached_requests_per_s"] / rates["requests_per_s"], 2) if rates else None


def _first(tier: str) -> Callable[[Mapping[str, Any]], float | None]:
    return point_figure("first_token_ms", tier=tier, layerwise=_LAYERWISE[0])


def _whole_blocks_ratio(answer: Mapping[str, Any]) -> float | None:
    """The first token from CPU memory by default over that in whole blocks."""
    times = [point_figure("first_token_ms", tier="cpu", layerwise=mode)(answer) for mode in _LAYERWISE]
    return None if times[0] is None or not times[1] else round(times[0] / times[1], 3)


PREDICTIONS = (
    Prediction("1B over gRPC, first token behind 8,192 tokens on the GPU", "4 to 8 ms", _first("gpu"), at_most=12.0),
    Prediction(
        "1B over gRPC, first token behind 8,192 tokens in CPU memory", "12 to 20 ms", _first("cpu"), at_most=30.0
    ),
    Prediction(
        "1B over gRPC, first token behind 8,192 tokens on a disk of 1.7 GB/s",
        "150 to 250 ms",
        _first("disk"),
        at_most=400,
    ),
    Prediction("1B over gRPC, first token of 8,256 tokens, none cached", "50 to 120 ms", _first("none"), at_most=250.0),
    Prediction(
        "1B over gRPC, first token from CPU memory, layer by layer where that pays over whole blocks",
        "0.7 to 1.0 times",
        _whole_blocks_ratio,
        at_most=1.1,
    ),
    Prediction(
        "1B over gRPC, requests a second of text analysis with a cache over without",
        "4 to 8 times",
        _more_with_a_cache,
        at_least=2.5,
    ),
)
PREDICTIONS_8B = (
    Prediction(
        "a daemon with no setting but its model, 64 requests of 1,024 tokens",
        "4,000 tokens/s or more",
        point_figure("tokens_per_s", requests=64, run="again"),
        at_least=3500.0,
    ),
)

PART = Part("daemon", 65, measure, predictions=PREDICTIONS)
PART_8B = Part("daemon_8b", 60, measure_8b, predictions=PREDICTIONS_8B)
