"""`prefixd plan`: what a machine would do with a trace, before it is bought."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from prefixd.base.errors import ConfigError
from prefixd.base.sizes import as_size
from prefixd.base.tiers import QUOTA_TIERS
from prefixd.cli.commands.config import Assignments, ConfigFile, parse_assignments
from prefixd.cli.failures import WrongUsage, examples

if TYPE_CHECKING:
    from prefixd.planner.curve import Curve
    from prefixd.planner.hardware import Calibration
    from prefixd.planner.planned_models import PlannedModel
    from prefixd.planner.sweep import Point, TracePlan

EXAMPLES = examples(
    "prefixd plan --trace conversation.jsonl --model llama-3-8b --gpu 40GiB --cpu 256GiB --disk 4TiB",
    "prefixd plan --trace conversation.jsonl --model llama-3-8b --gpu 40GiB --cpu 64GiB,256GiB --disk 0,1TiB,4TiB "
    "--sweep --json plan.json --plot plan.png",
    "prefixd plan --trace million.jsonl --model llama-3-8b --gpu 40GiB --cpu 256GiB --timed 20000",
)

MACHINE = "Machine"
DAEMON = "Daemon"
_IN_PLACE: dict[str, Any] = {
    "worker.embedded": True,
    "worker.model": None,
    "worker.more_models": [],
    "worker.draft_model": None,
}
"""Of the planned model; what is configured names the model of the daemon."""
_DEFAULTS = {"worker.max_running": 64, "worker.max_step_tokens": 2048, "worker.block_tokens": 512}
_FACTORS = (0.25, 0.5, 1.0, 2.0)


def _option(name: str, panel: str | None, metavar: str, help: str) -> Any:
    return typer.Option(name, metavar=metavar, rich_help_panel=panel, show_default=False, help=help)


def _count(name: str, help: str) -> Any:
    return typer.Option(name, min=1, rich_help_panel=DAEMON, show_default=False, help=help)


@dataclass(frozen=True, slots=True)
class MachineOptions:
    """What is planned for: a model, the memory of a machine, and its GPU."""

    model: Annotated[
        str,
        _option(
            "--model",
            MACHINE,
            "NAME",
            "A known name such as llama-3-8b, or a directory with a Hugging Face config.json.",
        ),
    ]
    gpu: Annotated[str, _option("--gpu", MACHINE, "SIZE", "GPU tier: GPU memory that is left for keys and values.")]
    cpu: Annotated[str, _option("--cpu", MACHINE, "SIZES", "CPU tier; with --sweep sizes joined by commas.")]
    disk: Annotated[str, _option("--disk", MACHINE, "SIZES", "Disk tier, 0: none; as --cpu.")] = "0"
    hardware: Annotated[
        str, typer.Option(metavar="NAME", rich_help_panel=MACHINE, help="a100, h100, h200, or a JSON file.")
    ] = "h100"
    calibration: Annotated[
        Path | None,
        _option("--calibration", MACHINE, "FILE", "What `prefixd doctor --calibrate` measured, instead of --hardware."),
    ] = None


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """How its daemon works; None: as configured."""

    policy: Annotated[
        str | None,
        _option(
            "--policy",
            DAEMON,
            "POLICIES",
            "Order of the queue: fcfs, fpf, relaxed-fpf, lpm, shortest-ready, deadline; with --sweep joined by commas.",
        ),
    ] = None
    eviction: Annotated[
        str | None,
        _option(
            "--eviction",
            DAEMON,
            "POLICIES",
            "Eviction policy: lru, fifo, random, lfu, s3-fifo, weighing; with --sweep joined by commas.",
        ),
    ] = None
    look_ahead: Annotated[
        str | None,
        _option(
            "--look-ahead",
            DAEMON,
            "COUNT",
            "How many waiting requests get their prefixes loaded before their turn, or auto.",
        ),
    ] = None
    max_running: Annotated[
        int | None, _count("--max-running", "Requests that the GPU computes at once; 64 unless configured.")
    ] = None
    max_step_tokens: Annotated[
        int | None, _count("--max-step-tokens", "Most tokens of prompts in a pass; 2048 unless configured.")
    ] = None
    block_tokens: Annotated[
        int | None,
        _count(
            "--block-tokens",
            "Tokens of a block; 512 unless configured. The trace names blocks of 512, so smaller ones find no more.",
        ),
    ] = None

    def counts(self) -> dict[str, str | int]:
        """The settings that are numbers, as far as they are given."""
        counts = {
            "scheduler.look_ahead": self.look_ahead,
            "worker.max_running": self.max_running,
            "worker.max_step_tokens": self.max_step_tokens,
            "worker.block_tokens": self.block_tokens,
        }
        return {name: value for name, value in counts.items() if value is not None}


def plan_command(
    trace: Annotated[
        Path, _option("--trace", None, "FILE", "Requests: a JSON object a line, in the format of Mooncake's traces.")
    ],
    machine: MachineOptions,
    daemon: DaemonOptions = DaemonOptions(),
    config: ConfigFile = None,
    assignments: Assignments = None,
    speed: Annotated[
        float, typer.Option(min=1e-6, help="Play the trace this many times as fast as it was recorded.")
    ] = 1.0,
    limit: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Use only the first N requests of the trace.")
    ] = None,
    timed: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=False,
            help="Play only the first N requests in virtual time; the miss-ratio curve is of all.",
        ),
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Plan several machines, and say how much memory and disk is enough.")
    ] = False,
    curve: Annotated[
        bool,
        typer.Option(
            help="Also compute the miss-ratio curve: one tier, by size, under every eviction policy and the optimum."
        ),
    ] = True,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Processes to use; by default as many as there are cores."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", show_default=False, help="Write the figures to this file.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", show_default=False, help="Draw them to this file.")
    ] = None,
) -> None:
    """Predict hits, waiting times, throughput and disk writes of a daemon for a trace, without running one.

    The daemon's own index, policies, prefetcher, dispatcher and cost model run in virtual time. The tiers hold no bytes
    and the GPU computes nothing. The command prints what it assumes of the machine; `prefixd doctor --calibrate`
    measures one instead.

    Virtual time takes up to 20 ms a request; --timed N plays only the first N. The miss-ratio curve is of all requests;
    of a long trace it is estimated from a sample of the blocks, in minutes for a million requests.

    With --sweep the sizes of --cpu and --disk, and the names of --policy and --eviction, may be lists; a single size is
    tried at a quarter, half, once and twice.
    """
    from prefixd.cli.demo.daemon_process import ended_by_sigterm
    from prefixd.cli.demo.demo import check_writable
    from prefixd.planner.hardware import PeakCosts, find_hardware, read_calibration
    from prefixd.planner.planned_models import find_model
    from prefixd.planner.plots import check_drawable
    from prefixd.planner.sweep import TracePlan
    from prefixd.planner.virtual_daemon import Plan
    from prefixd.planner.workload import of_trace, trace_requests

    for file in (json_file, plot_file):
        if file is not None:
            check_writable(file)
    if plot_file is not None:
        check_drawable(plot_file)
    chosen = find_model(machine.model)
    hardware = find_hardware(machine.hardware)
    measured = None if machine.calibration is None else read_calibration(machine.calibration)
    planned = limit if timed is None else timed if limit is None else min(timed, limit)
    found = trace_requests(trace, planned)
    costs = PeakCosts(hardware, chosen) if measured is None or measured.costs is None else measured.costs
    ways, request_s = (hardware.ways, 0.0) if measured is None else (measured.ways, measured.request_s)
    given = parse_assignments(assignments)
    base = {
        **_IN_PLACE,
        "scheduler.queue_limit": len(found),  # nobody is turned away
        **given,
    }
    flags = {"gpu.bytes": _sizes("--gpu", machine.gpu)[0], **daemon.counts()}
    varied = _varied(
        _sizes("--cpu", machine.cpu, sweep=sweep),
        _sizes("--disk", machine.disk, sweep=sweep),
        _names("--policy", daemon.policy, sweep=sweep),
        _names("--eviction", daemon.eviction, sweep=sweep),
    )
    if twice := sorted(given.keys() & (flags | varied[0]).keys()):
        raise ConfigError(f"{twice[0]} is given by its flag and by --set; keep one")
    base |= flags
    plans = [
        TracePlan(Plan(chosen, _settings(config, base | one), costs, ways, request_s), trace, planned, speed)
        for one in varied
    ]
    workload = of_trace(trace.name, found, speed=speed)
    settings = plans[0].plan.settings
    assumptions = [
        *_of_model(chosen, [request.input_length + request.output_length for request in found]),
        *costs.assumptions(),
        *(hardware.way_assumptions() if measured is None else _of_calibration(measured, chosen)),
        *_of_disks(plans),
        *workload.assumptions,
        f"{settings.worker.max_running} requests run at once, passes of {settings.worker.max_step_tokens} tokens, "
        f"blocks of {settings.worker.block_tokens} tokens, scheduler.look_ahead = {settings.scheduler.look_ahead}",
    ]
    began_s = time.perf_counter()
    with ended_by_sigterm():
        points, drawn = _run(plans, len(found), jobs or len(os.sched_getaffinity(0)), limit, curve=curve)
    took_s = time.perf_counter() - began_s
    arrival_s = workload.requests[-1].arrival_s
    _print(points, assumptions, sweep=sweep, took_s=took_s, requests=len(found), arrival_s=arrival_s)
    if drawn is not None:
        _print_curve(drawn, chosen.token_bytes)
    if json_file is not None:
        plain = _plain(points, assumptions, machine.model, trace, took_s) | {"curve": drawn and drawn.to_plain()}
        json_file.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    if plot_file is not None:
        from prefixd.planner.plots import draw_plan

        draw_plan(points, drawn, chosen.token_bytes, plot_file)


def _run(
    plans: Sequence[TracePlan], requests: int, jobs: int, limit: int | None, *, curve: bool
) -> tuple[list[Point], Curve | None]:
    """Every plan of so many requests, and the curve of all that `limit` leaves meanwhile, in processes of their own; a
    single plan in this one."""
    from concurrent.futures import ThreadPoolExecutor

    from rich.console import Console

    from prefixd.cli.output.progress import RichProgress
    from prefixd.planner.sweep import curve_of, processes, sweep
    from prefixd.settings import CacheSettings

    trace = plans[0].trace
    policies = get_args(CacheSettings.model_fields["eviction"].annotation)
    with RichProgress(Console(stderr=True)) as progress, ThreadPoolExecutor(1) as beside, processes(jobs) as pool:
        if len(plans) == 1:
            progress.begin(f"{requests:,} requests in virtual time", requests)
            planned = Event()

            def others() -> int:  # while it runs, the plan has a core for itself
                return jobs if planned.is_set() else jobs - 1

            def draw() -> Curve:
                shown = progress.add_bar("miss-ratio curve")
                return curve_of(trace, limit, policies, pool, shown, at_once=others)

            drawn = beside.submit(draw) if curve and jobs > 1 else None
            points = [(plans[0], plans[0].run(progress.advance))]
            planned.set()
            if drawn is not None:
                return points, drawn.result()
            return points, draw() if curve else None
        progress.begin(f"{len(plans)} machines in virtual time", len(plans))
        points = sweep(plans, pool, progress.advance)
        if not curve:
            return points, None
        return points, curve_of(trace, limit, policies, pool, progress.add_bar("miss-ratio curve"))


def _varied(
    cpus: Sequence[int], disks: Sequence[int], policies: Sequence[str | None], evictions: Sequence[str | None]
) -> list[dict[str, Any]]:
    """The settings of every machine, by dotted name."""
    varied = []
    for cpu, disk, policy, eviction in product(cpus, disks, policies, evictions):
        one: dict[str, Any] = {"cpu.bytes": cpu, "disk.bytes": disk}
        if policy is not None:
            one["scheduler.policy"] = policy
        if eviction is not None:
            one["cache.eviction"] = eviction
        varied.append(one)
    return varied


def _settings(config: Path | None, overrides: dict[str, Any]) -> Any:
    from prefixd.base.setting_sources import gather_layers
    from prefixd.settings import Settings, dotted_names

    _, sources = gather_layers(dotted_names(), config, overrides, os.environ)
    return Settings.load(config, {name: _DEFAULTS[name] for name in _DEFAULTS.keys() - sources.keys()} | overrides)


def _sizes(option: str, text: str, *, sweep: bool = False) -> list[int]:
    from prefixd.base.sizes import parse_room

    try:
        sizes = [parse_room(part) for part in text.split(",")]
    except ValueError as error:
        raise WrongUsage(f"{option} {text}: {error}") from error
    if len(sizes) > 1 and not sweep:
        raise WrongUsage(f"{option} {text}: several sizes need --sweep")
    if len(sizes) == 1 and sweep and sizes[0]:
        return [int(sizes[0] * factor) for factor in _FACTORS]
    return sizes


def _names(option: str, text: str | None, *, sweep: bool) -> list[str | None]:
    names: list[str | None] = [None] if text is None else list(text.split(","))
    if len(names) > 1 and not sweep:
        raise WrongUsage(f"{option} {text}: several policies need --sweep")
    return names


def _of_model(model: PlannedModel, lengths: Sequence[int]) -> list[str]:
    longer = sum(length > model.context_tokens for length in lengths)
    if not longer:
        return []
    return [
        f"{longer:,} of {len(lengths):,} requests are longer than the {model.context_tokens:,} tokens that "
        f"{model.name} was made for; they are planned all the same"
    ]


def _of_disks(plans: Sequence[TracePlan]) -> list[str]:
    if all(plan.cpu_bytes or not plan.disk_bytes for plan in plans):
        return []
    return ["blocks reach the disk through the CPU tier: without one, the disk stays empty"]


def _same_model(served: str | None, planned: str) -> bool:
    """Whether a planned model is the one that a daemon serves: it is named there by its directory, such as
    "Llama-3.2-1B" or "embedded-v1"."""
    if served is None:
        return False
    if planned == "embedded":
        return served.startswith("embedded")
    return served.lower() == planned.lower()


def _of_calibration(measured: Calibration, model: PlannedModel) -> list[str]:
    other = measured.costs is not None and not _same_model(measured.model, model.name)
    return [
        *([f"the passes are those of {measured.model}, NOT of {model.name}: hits hold, times do not"] if other else []),
        f"measured on {measured.machine}: copies {measured.copy_bytes_per_s / 1e9:.3g} GB/s, disk "
        f"{measured.disk_read_bytes_per_s / 1e6:,.0f} MB/s read, "
        f"{measured.disk_write_bytes_per_s / 1e6:,.0f} MB/s written"
        + (", passes by the published figures above" if measured.costs is None else ""),
    ]


def _print(
    points: Sequence[Point],
    assumptions: Sequence[str],
    *,
    sweep: bool,
    took_s: float,
    requests: int,
    arrival_s: float,
) -> None:
    from prefixd.cli.output import grid
    from prefixd.planner.sweep import ENOUGH, MEMORY_PRICE, enough, soonest

    out = grid.console()
    out.print("Assumed:")
    for line in assumptions:
        out.print(f"  {line}", markup=False)
    numbers = ("hits", *QUOTA_TIERS, "first\np50", "token\np95", "requests\nper s", "to disk", "evicted")
    made = grid.table("cpu tier", "disk tier", "policy", "eviction", *numbers, right=numbers)
    best = enough(points)
    for plan, figures in points:
        settings = plan.plan.settings
        made.add_row(
            as_size(plan.cpu_bytes),
            as_size(plan.disk_bytes),
            settings.scheduler.policy,
            settings.cache.eviction,
            f"{figures.hit_rate:.1%}",
            *(f"{share:.1%}" if (share := figures.hits.get(tier)) else "-" for tier in QUOTA_TIERS),
            _wait(figures.ttft_s.p50),
            _wait(figures.ttft_s.p95),
            f"{figures.requests_per_s:.2f}",
            as_size(figures.disk_written_bytes),
            f"{sum(figures.evicted_blocks.values()):,}",
            style="bold green" if sweep and plan is best[0] else None,
        )
    out.print(made)
    out.print(
        "Hits by tier: where the tokens were when they were brought up for the request. The look-ahead may have read "
        "them from disk into the CPU tier before that."
    )
    first = points[0][1]
    if first.achievable_hit_rate is not None:
        out.print(f"A cache without limits would find {first.achievable_hit_rate:.1%} of the prompt tokens.")
    if first.refused:
        out.print(f"{first.refused:,} requests never fit the GPU tier and were refused; they count in no figure here.")
    if first.gpu_busy > _FULL and first.elapsed_s > _LATE * arrival_s > 0:
        out.print("The GPU computes all the time: requests arrive faster than it answers, and the queue grows.")
    if sweep:
        plan, figures = best
        out.print(
            f"[bold]Enough: {as_size(plan.cpu_bytes)} of CPU memory and {as_size(plan.disk_bytes)} of disk[/], "
            f"with {plan.plan.settings.scheduler.policy} and {plan.plan.settings.cache.eviction}: the cheapest that "
            f"finds {ENOUGH:.0%} of what the best finds; a byte of memory counts as {MEMORY_PRICE} of disk."
        )
        other, its = soonest(points, best)
        if its.ttft_s.p50 < _SOONER * figures.ttft_s.p50:
            out.print(
                f"With these sizes the first token comes soonest with {other.plan.settings.scheduler.policy} and "
                f"{other.plan.settings.cache.eviction}: after {grid.duration(its.ttft_s.p50)} (median) instead of "
                f"{grid.duration(figures.ttft_s.p50)}, with {its.hit_rate:.1%} found instead of "
                f"{figures.hit_rate:.1%}."
            )
    out.print(f"{requests * len(points):,} requests planned in {grid.duration(took_s)}.")


def _wait(seconds: float) -> str:
    """As `grid.duration`, below a second in ms: first tokens of a GPU come within some of them."""
    from prefixd.cli.output import grid

    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else grid.duration(seconds)


def _print_curve(curve: Curve, token_bytes: int) -> None:
    from prefixd.cli.output import grid
    from prefixd.planner.curve import OPTIMUM

    names = [name for name in curve.hit_rates if name != OPTIMUM] + [OPTIMUM]
    made = grid.table("one tier of", "blocks", *names, right=("one tier of", "blocks", *names))
    for at, size in enumerate(curve.capacities):
        rates = (f"{curve.hit_rates[name][at]:.1%}" for name in names)
        made.add_row(as_size(size * curve.block_tokens * token_bytes), f"{size:,}", *rates)
    out = grid.console()
    sampled = "" if curve.share == 1 else f", estimated from {curve.share:.2%} of them"
    out.print(f"\nBlocks found by one tier alone{sampled}, by its size; without limits {curve.most:.1%}:")
    out.print(made)


_FULL = 0.98
_SOONER = 0.9
"""A median first token that comes this much sooner under another policy is worth a line."""
_LATE = 1.1
"""When the last answer comes so many times as late as the last request, the queue has grown."""


def _plain(points: Sequence[Point], assumptions: Sequence[str], model: str, trace: Path, took_s: float) -> Any:
    from prefixd.planner.sweep import enough
    from prefixd.workloads.circumstances import circumstances

    return {
        "benchmark": "plan",
        "model": model,
        "trace": trace.name,
        "assumptions": list(assumptions),
        "points": [plan.to_plain() | figures.to_plain() for plan, figures in points],
        "enough": enough(points)[0].to_plain(),
        "planning_s": took_s,
        "circumstances": circumstances(),
    }
