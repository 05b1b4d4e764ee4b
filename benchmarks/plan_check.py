"""Whether a plan comes true: workloads on a real daemon, and what `prefixd plan` says of them beforehand."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import harness
from prefixd.client import AsyncClient
from prefixd.planner.calibrate import measure_machine, measure_passes
from prefixd.planner.figures import PlanFigures
from prefixd.planner.hardware import Calibration, MeasuredCosts
from prefixd.planner.models import MODELS
from prefixd.planner.virtual_daemon import Plan, simulate
from prefixd.planner.workload import of_text_analysis
from prefixd.settings import Settings
from prefixd.workloads.daemon_process import DaemonProcess
from prefixd.workloads.figures import Figures
from prefixd.workloads.runner import Silence, run_config
from prefixd.workloads.text_analysis import CONFIGS, TextAnalysis, TierSizes, config_overrides

DESCRIPTION = """\
Measures this machine as `prefixd doctor --calibrate` does: its disk, its copies, and the passes of the model that comes
with prefixd on a daemon without a cache. From that the planner predicts the text analysis workload, with each policy
of the queue; then the same requests go to a real daemon. The benchmark fails when the prediction of the share of
prompt tokens that are found, or of the requests a second, is off by more than --tolerance of what was measured."""


def calibrated(directory: Path) -> Calibration:
    """This machine, with passes of the embedded model. Raises DaemonFailed, ClientError."""

    async def measure(address: str) -> Calibration:
        measured = await measure_machine(directory / "disk", "cpu")
        async with AsyncClient(address, name="calibration", memory="streamed") as client:
            return await measure_passes(measured, client)

    settings = {"worker.embedded": True, "cache.enabled": False}
    with DaemonProcess(settings, directory=directory / "daemon") as daemon:
        return asyncio.run(measure(daemon.address))


def predicted(config: str, workload: TextAnalysis, tiers: TierSizes, machine: Calibration) -> PlanFigures:
    """What the planner says of one of CONFIGS, after the warm-up. Raises ConfigError."""
    overrides = {
        "worker.embedded": True,
        "scheduler.queue_limit": max(4096, workload.requests),
        **tiers.overrides(workload),
        **config_overrides(config),
    }
    costs = machine.costs
    assert isinstance(costs, MeasuredCosts), "passes were measured"
    plan = Plan(
        MODELS["embedded"], Settings.load(Path(os.devnull), overrides, {}), costs, machine.ways, machine.request_s
    )
    warm_up, requests = of_text_analysis(workload)
    return simulate(plan, [requests] if config == "no-cache" else [warm_up, requests])[-1]


def compare(config: str, plan: PlanFigures, real: Figures, workload: TextAnalysis) -> dict[str, Any]:
    """The two figures of both, and by how much the plan is off."""
    tokens = workload.requests * (workload.prefix_tokens + workload.body_tokens)
    hits = real.hit_tokens
    measured = (hits.gpu + hits.cpu + hits.disk) / tokens
    return {
        "workload": f"text analysis, {config}",
        "hit_rate": measured,
        "predicted_hit_rate": plan.hit_rate,
        "hit_rate_off": _off(plan.hit_rate, measured),
        "requests_per_s": real.requests_per_s,
        "predicted_requests_per_s": plan.requests_per_s,
        "requests_per_s_off": _off(plan.requests_per_s, real.requests_per_s),
        "hits": {tier: getattr(hits, tier) / tokens for tier in plan.hits},
        "predicted_hits": plan.hits,
    }


def _off(said: float, measured: float) -> float:
    return 0.0 if said == measured else said / measured - 1 if measured else float("inf")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser("plan_check", DESCRIPTION)
    numbers = [
        ("--prefixes", 48, "different prefixes"),
        ("--gpu-prefixes", 8, "prefixes that fit into the GPU tier"),
        ("--cpu-prefixes", 16, "prefixes that fit into the CPU tier"),
        ("--disk-prefixes", 48, "prefixes that fit into the disk tier"),
        ("--requests", 192, "requests, each with a randomly chosen prefix"),
        ("--prefix-tokens", 512, "length of a prefix"),
        ("--body-tokens", 32, "length of a body"),
    ]
    for flag, default, text in numbers:
        parser.add_argument(flag, type=harness.positive, default=default, metavar="N", help=f"{text} ({default})")
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="which to run (all)")
    parser.add_argument("--tolerance", type=float, default=0.15, help="how far a prediction may be off (0.15)")
    parser.add_argument("--seed", type=int, default=0, help="of prefixes, bodies and choices (0)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Raises BenchmarkError when a prediction is off by too much, after the result is written."""
    options = _options(arguments)
    workload = TextAnalysis(
        prefixes=options.prefixes,
        requests=options.requests,
        prefix_tokens=options.prefix_tokens,
        body_tokens=options.body_tokens,
        seed=options.seed,
    )
    tiers = TierSizes(
        gpu_prefixes=options.gpu_prefixes, cpu_prefixes=options.cpu_prefixes, disk_prefixes=options.disk_prefixes
    )
    with tempfile.TemporaryDirectory(prefix="prefixd-") as directory:
        machine = calibrated(Path(directory))
        rows = []
        for config in options.configs:
            plan = predicted(config, workload, tiers, machine)
            warm_up = config != "no-cache"
            real = run_config(config, workload, tiers, Path(directory) / config, warm_up=warm_up, progress=Silence())
            row = compare(config, plan, real, workload)
            rows.append(row)
            print(
                f"{config:12} hit rate {row['hit_rate']:6.1%}, predicted {row['predicted_hit_rate']:6.1%} "
                f"({row['hit_rate_off']:+.1%})   requests/s {row['requests_per_s']:7.2f}, predicted "
                f"{row['predicted_requests_per_s']:7.2f} ({row['requests_per_s_off']:+.1%})",
                flush=True,
            )
    worst = max(abs(row[key]) for row in rows for key in ("hit_rate_off", "requests_per_s_off"))
    result = {"worst_off": worst, "tolerance": options.tolerance, "machine": vars_of(machine), "workloads": rows}
    harness.finish("plan_check", result, options.json)
    if worst > options.tolerance:
        raise harness.BenchmarkError(f"a prediction is off by {worst:.1%}, more than {options.tolerance:.0%}")


def vars_of(machine: Calibration) -> dict[str, Any]:
    """The calibration as JSON types, without the machine's name."""
    plain: dict[str, Any] = json.loads(replace(machine, machine="this machine").to_json())
    return plain


if __name__ == "__main__":
    harness.run(main)
