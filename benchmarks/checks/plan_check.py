"""Whether a plan comes true: workloads on a real daemon, and what `prefixd plan` says of them beforehand.

Measures this machine as `prefixd doctor --calibrate` does: its disk, its copies, and the passes of the model that comes
with prefixd on a daemon without a cache. From that the planner predicts the text analysis workload, with each policy
of the queue, and conversations that grow turn by turn, without a cache and with all tiers; then the same requests go to
a real daemon. The benchmark fails when the prediction of the share of prompt tokens that are found, or of the requests
a second, is off by more than --tolerance of what was measured. A plan is of a GPU, whose time the daemon's work takes
none of: the worker, which computes on a CPU here, leaves a core to the daemon (--threads). Of the rounds of a workload
the median counts, of the plan's as of the daemon's.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import harness
from benchmarks.common.options import chosen, from_options, number, option, seed
from benchmarks.text_analysis_parts.measuring import worker_threads
from benchmarks.text_analysis_parts.planned_rounds import of_text_analysis
from benchmarks.ways_of_serving import way_figures as serving
from benchmarks.ways_of_serving.run_progress import Silence
from benchmarks.ways_of_serving.ways import NO_CACHE, TIERS, Room, Way
from benchmarks.workloads.conversations import Conversation, Statistics, distinct_tokens, fitting, generate
from benchmarks.workloads.talk import talk
from prefixd.base.codec_names import CODEC_NAMES
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.cli.demo.runner import ask_each_once, measure, settings_for
from prefixd.client import AsyncClient
from prefixd.planner.machine.calibrate import measure_machine, measure_passes
from prefixd.planner.machine.calibration import Calibration
from prefixd.planner.machine.pass_costs import MeasuredCosts
from prefixd.planner.machine.planned_codecs import plan_codec
from prefixd.planner.plan_figures import PlanFigures
from prefixd.planner.planned_models import MODELS
from prefixd.planner.virtual_daemon import Plan, simulate
from prefixd.planner.workload import PlannedRequest, Workload, own_tokens
from prefixd.settings import Settings
from prefixd.workloads.latency_figures import Figures
from prefixd.workloads.text_analysis import CONFIGS, TextAnalysis, TierSizes, serving_of

_CHAT_SCALE = 1 / 8
_THINK_SCALE = 0.02


def calibrated(directory: Path, threads: int) -> Calibration:
    """This machine, with passes of the embedded model on so many threads. Raises DaemonFailed, ClientError."""

    async def measure(address: str) -> Calibration:
        measured = await measure_machine(directory / "disk", "cpu")
        async with AsyncClient(address, name="calibration", memory="streamed") as client:
            return await measure_passes(measured, client)

    settings = {"worker.embedded": True, "worker.threads": threads, "cache.enabled": False}
    with DaemonProcess(settings, directory=directory / "daemon") as daemon:
        return asyncio.run(measure(daemon.address))


def plan_of(overrides: Mapping[str, Any], machine: Calibration) -> Plan:
    """The machine with a daemon of these settings; its disk tier has the codec that they say. Raises ConfigError."""
    costs = machine.costs
    assert isinstance(costs, MeasuredCosts), "passes were measured"
    settings = Settings.load(Path(os.devnull), overrides, {})
    model, tokens = MODELS["embedded"], settings.worker.block_tokens
    codec = plan_codec(settings.disk.codec, model, settings.disk.io_threads, machine, block_tokens=tokens)
    return Plan(model, settings, costs, machine.ways, machine.request_s, codec=codec)


def rounds(config: str, workload: TextAnalysis) -> TextAnalysis:
    """Without a cache every round is like the first one."""
    return replace(workload, repeats=1) if config == "no-cache" else workload


def predicted(
    config: str, workload: TextAnalysis, tiers: TierSizes, machine: Calibration, codec: str
) -> list[PlanFigures]:
    """What the planner says of the rounds of one of CONFIGS, after the warm-up. Raises ConfigError."""
    plan = plan_of(settings_for(serving_of(config), workload, tiers) | {"disk.codec": codec}, machine)
    warm_up, *asked = of_text_analysis(rounds(config, workload))
    return simulate(plan, asked if config == "no-cache" else [warm_up, *asked])[-len(asked) :]


def measured_text_analysis(
    config: str, workload: TextAnalysis, tiers: TierSizes, threads: int, directory: Path, codec: str
) -> list[Figures]:
    """The rounds of one of CONFIGS on a real daemon, after the warm-up where there is a cache. Raises DaemonFailed."""
    settings = settings_for(serving_of(config), workload, tiers) | {"worker.threads": threads, "disk.codec": codec}
    with DaemonProcess(settings, directory=directory) as daemon:
        if config != "no-cache":
            ask_each_once(config, daemon, workload, progress=Silence())
        repeats = range(rounds(config, workload).repeats)
        return [measure(config, daemon, workload, repeat=repeat, progress=Silence()) for repeat in repeats]


def of_conversations(conversations: Sequence[Conversation]) -> Workload:
    """Conversations that all begin at once; each turn comes as long after the answer before as the user thinks."""
    requests: list[PlannedRequest] = []
    for conversation in conversations:
        said, after = list(conversation.system), None
        for turn in conversation.turns:
            said += turn.user
            answer = own_tokens(len(requests), 0, turn.answer_tokens)
            prompt = partial(np.array, tuple(said), np.uint32)
            requests.append(PlannedRequest(turn.think_s, prompt, len(said), turn.answer_tokens, tuple(answer), after))
            after = len(requests) - 1
            said += answer
    return Workload("chat", requests)


def chats(count: int, machine: Calibration, threads: int, codec: str, seed: int) -> Iterator[dict[str, Any]]:
    """Conversations as `benchmarks.chat` holds them, without a cache and with all tiers: plan and daemon. Raises
    ConfigError, DaemonFailed."""
    conversations = fitting(generate(count, Statistics(), scale=_CHAT_SCALE, time_scale=_THINK_SCALE, seed=seed), 8191)
    lengths = [each.tokens for each in conversations]
    room = Room(
        longest=max(lengths),
        usual=sum(lengths) // len(lengths),
        all_tokens=distinct_tokens(conversations),
        running=4,
        gpu_share=0.0,
        cpu_share=0.3,
    )
    policy = Settings().scheduler.policy
    for way in (Way(NO_CACHE, "fcfs", ""), Way(f"{policy} {TIERS[-1]}", policy, TIERS[-1])):
        settings = room.settings(way, len(conversations)) | {"disk.codec": codec}
        plans = simulate(plan_of(settings, machine), [of_conversations(conversations)])
        with DaemonProcess(settings | {"worker.threads": threads}) as daemon:
            talking = talk(daemon.address, conversations, len(conversations), Silence(), way.name)
            asked, elapsed_s = asyncio.run(talking)
        real = serving.summarise(way, asked, elapsed_s)
        hits = {tier: getattr(real.hit_tokens, tier) / real.prompt_tokens for tier in plans[0].hits}
        yield compare(f"chat, {way.name}", plans, [(hits, real.requests_per_s)])


def text_analysis_hits(real: Figures, workload: TextAnalysis) -> dict[str, float]:
    """By tier, the share of the prompt tokens that were found there."""
    tokens = workload.requests * (workload.prefix_tokens + workload.body_tokens)
    return {tier: getattr(real.hit_tokens, tier) / tokens for tier in ("gpu", "cpu", "disk")}


def text_analyses(
    configs: Sequence[str],
    workload: TextAnalysis,
    tiers: TierSizes,
    machine: Calibration,
    threads: int,
    codec: str,
    folder: Path,
) -> Iterator[dict[str, Any]]:
    """The text analysis workload with each of CONFIGS: plan and daemon. Raises ConfigError, DaemonFailed."""
    for config in configs:
        plans = predicted(config, workload, tiers, machine, codec)
        real = measured_text_analysis(config, workload, tiers, threads, folder / config, codec)
        measured = [(text_analysis_hits(figures, workload), figures.requests_per_s) for figures in real]
        yield compare(f"text analysis, {config}", plans, measured)


def compare(
    name: str, plans: Sequence[PlanFigures], measured: Sequence[tuple[Mapping[str, float], float]]
) -> dict[str, Any]:
    """The two figures of both, each the median of its rounds, and by how much the plan is off.

    Args:
        name: of the workload.
        plans: of each round.
        measured: of each round the hit rate of each tier, and the requests a second.
    """
    hit_rate = median(sum(hits.values()) for hits, _ in measured)
    requests_per_s = median(rate for _, rate in measured)
    predicted_hit_rate = median(plan.hit_rate for plan in plans)
    predicted_requests_per_s = median(plan.requests_per_s for plan in plans)
    return {
        "workload": name,
        "hit_rate": hit_rate,
        "predicted_hit_rate": predicted_hit_rate,
        "hit_rate_off": _off(predicted_hit_rate, hit_rate),
        "requests_per_s": requests_per_s,
        "predicted_requests_per_s": predicted_requests_per_s,
        "requests_per_s_off": _off(predicted_requests_per_s, requests_per_s),
        "rounds": [
            {"hits": dict(hits), "requests_per_s": rate, "predicted_requests_per_s": plan.requests_per_s}
            for (hits, rate), plan in zip(measured, plans, strict=True)
        ],
    }


def _off(said: float, measured: float) -> float:
    return 0.0 if said == measured else said / measured - 1 if measured else float("inf")


def vars_of(machine: Calibration) -> dict[str, Any]:
    """The calibration as JSON types, without the machine's name."""
    plain: dict[str, Any] = json.loads(replace(machine, machine="this machine").to_json())
    return plain


@harness.benchmark(
    "checks.plan_check",
    __doc__,
    option("--prefixes", 48, "different prefixes"),
    option("--gpu-prefixes", 8, "prefixes that fit into the GPU tier"),
    option("--cpu-prefixes", 16, "prefixes that fit into the CPU tier"),
    option("--disk-prefixes", 48, "prefixes that fit into the disk tier"),
    option("--requests", 192, "requests of a round, each with a randomly chosen prefix"),
    option("--rounds", 5, "the first one comes while the daemon still writes what the warm-up has computed"),
    option("--prefix-tokens", 512, "length of a prefix"),
    option("--body-tokens", 32, "length of a body"),
    option("--conversations", 12, "conversations held at once"),
    option("--codec", "exact", "how the disk tier stores blocks, of daemon and plan", str, choices=CODEC_NAMES),
    option("--threads", worker_threads(), "threads of the worker"),
    chosen("--configs", CONFIGS, "which to run"),
    option("--tolerance", 0.15, "how far a prediction may be off", number(0.0, 1e6)),
    seed("of prefixes, bodies and choices"),
)
def main(options: harness.Options) -> harness.Outcome:
    """Predictions beside what was measured; broken: one that is off by too much."""
    workload = from_options(TextAnalysis, options, repeats=options.rounds)
    tiers = from_options(TierSizes, options)
    with tempfile.TemporaryDirectory(prefix="prefixd-") as directory:
        machine = calibrated(Path(directory), options.threads)
        rows = []
        codec = options.codec
        asked = text_analyses(options.configs, workload, tiers, machine, options.threads, codec, Path(directory))
        talked = chats(options.conversations, machine, options.threads, codec, options.seed)
        for row in itertools.chain(asked, talked):
            rows.append(row)
            print(
                f"{row['workload']:32} hit rate {row['hit_rate']:6.1%}, predicted {row['predicted_hit_rate']:6.1%} "
                f"({row['hit_rate_off']:+.1%})   requests/s {row['requests_per_s']:7.2f}, predicted "
                f"{row['predicted_requests_per_s']:7.2f} ({row['requests_per_s_off']:+.1%})",
                flush=True,
            )
    worst = max(abs(row[key]) for row in rows for key in ("hit_rate_off", "requests_per_s_off"))
    result = {
        "codec": codec,
        "worst_off": worst,
        "tolerance": options.tolerance,
        "machine": vars_of(machine),
        "workloads": rows,
    }
    too_far = worst > options.tolerance
    broken = [f"a prediction is off by {worst:.1%}, more than {options.tolerance:.0%}"] if too_far else []
    return harness.Outcome(result, broken)


if __name__ == "__main__":
    harness.run(main)
