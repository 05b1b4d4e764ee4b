"""`prefixd plan`: predicts how a machine would serve a trace, before you buy it."""

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
from prefixd.cli.commands.config import Assignments, ConfigFile, parse_assignments
from prefixd.cli.failures import WrongUsage, examples

if TYPE_CHECKING:
    from prefixd.planner.curve import Curve
    from prefixd.planner.machine.calibration import Calibration
    from prefixd.planner.machine.planned_codecs import PlannedCodec
    from prefixd.planner.planned_models import PlannedModel
    from prefixd.planner.sweep import Point, TracePlan
    from prefixd.planner.virtual_daemon import Plan

EXAMPLES = examples(
    "prefixd plan --trace conversation.jsonl --model llama-3-8b --gpu 40GiB --cpu 256GiB --disk 4TiB",
    "prefixd plan --trace conversation.jsonl --model llama-3-8b --gpu 40GiB --cpu 64GiB,256GiB --disk 0,1TiB,4TiB "
    "--sweep --out plan.json --plot plan.png",
    "prefixd plan --trace conversation.jsonl --model llama-3-8b --gpu 40GiB --cpu 64GiB --disk 1TiB --codec int8",
    "prefixd plan --trace million.jsonl --model llama-3-8b --gpu 40GiB --cpu 256GiB --timed 20000",
)

MACHINE = "Machine"
DAEMON = "Daemon"
_NO_CONFIGURED_MODEL: dict[str, Any] = {
    "worker.embedded": True,
    "worker.model": None,
    "worker.more_models": [],
    "worker.draft_model": None,
}
"""Settings that replace the configured model, which is that of the real daemon, by the planned one."""
_DEFAULTS = {"worker.max_running": 64, "worker.max_step_tokens": 2048, "worker.block_tokens": 512}
_SWEEP_FACTORS = (0.25, 0.5, 1.0, 2.0)


def _fixed_size() -> dict[str, Any]:
    """Settings that give the planned GPU tier the size of --gpu, even if the real daemon's grows by itself."""
    from prefixd.settings.tiers import GpuSettings

    names = ("least_bytes", "most_bytes", "reserve_bytes", "idle_s")
    return {f"gpu.{name}": getattr(GpuSettings(), name) for name in names}


def _option(name: str, panel: str | None, metavar: str, help: str) -> Any:
    return typer.Option(name, metavar=metavar, rich_help_panel=panel, show_default=False, help=help)


def _count(name: str, help: str) -> Any:
    return typer.Option(name, min=1, rich_help_panel=DAEMON, show_default=False, help=help)


@dataclass(frozen=True, slots=True)
class MachineOptions:
    """The planned machine: a model, the sizes of the tiers, and the GPU."""

    model: Annotated[
        str,
        _option(
            "--model",
            MACHINE,
            "NAME",
            "A known name such as llama-3-8b, or a directory with a Hugging Face config.json.",
        ),
    ]
    gpu: Annotated[str, _option("--gpu", MACHINE, "SIZE", "Size of the GPU tier: the GPU memory for keys and values.")]
    cpu: Annotated[
        str, _option("--cpu", MACHINE, "SIZES", "Size of the CPU tier; with --sweep, sizes separated by commas.")
    ]
    disk: Annotated[
        str,
        _option("--disk", MACHINE, "SIZES", "Size of the disk tier, 0: none; with --sweep, sizes separated by commas."),
    ] = "0"
    hardware: Annotated[
        str, typer.Option(metavar="NAME", rich_help_panel=MACHINE, help="a100, h100, h200, or a JSON file.")
    ] = "h100"
    codec: Annotated[
        str | None,
        _option(
            "--codec",
            MACHINE,
            "NAMES",
            "How the disk tier stores blocks, beside exact: lossless, int8, k8v4; several are separated by commas.",
        ),
    ] = None
    calibration: Annotated[
        Path | None,
        _option(
            "--calibration", MACHINE, "FILE", "File of `prefixd doctor --calibrate`: its figures replace --hardware."
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """Settings of the planned daemon; None: as configured."""

    policy: Annotated[
        str | None,
        _option(
            "--policy",
            DAEMON,
            "POLICIES",
            "Order of the queue: fcfs, fpf, relaxed-fpf, lpm, shortest-ready, deadline; with --sweep, names separated "
            "by commas.",
        ),
    ] = None
    eviction: Annotated[
        str | None,
        _option(
            "--eviction",
            DAEMON,
            "POLICIES",
            "Eviction policy: lru, fifo, random, lfu, s3-fifo, weighing; with --sweep, names separated by commas.",
        ),
    ] = None
    look_ahead: Annotated[
        str | None,
        _option(
            "--look-ahead",
            DAEMON,
            "COUNT",
            "Number of waiting requests for which the daemon loads prefixes before their turn, or auto.",
        ),
    ] = None
    max_running: Annotated[
        int | None, _count("--max-running", "Most requests that the GPU computes at once; 64 unless configured.")
    ] = None
    max_step_tokens: Annotated[
        int | None, _count("--max-step-tokens", "Most tokens of prompts in one pass; 2048 unless configured.")
    ] = None
    block_tokens: Annotated[
        int | None,
        _count(
            "--block-tokens",
            "Tokens of a block; 512 unless configured. The trace names blocks of 512, so smaller blocks find no more.",
        ),
    ] = None

    def counts(self) -> dict[str, str | int]:
        """Returns the given settings that are numbers."""
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
        float, typer.Option(min=1e-6, help="Send the requests this many times as fast as recorded.")
    ] = 1.0,
    limit: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Use only the first N requests of the trace.")
    ] = None,
    timed: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=False,
            help="Run only the first N requests in virtual time; the miss-ratio curve covers all requests.",
        ),
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Plan several machines, and tell how much memory and disk is enough.")
    ] = False,
    curve: Annotated[
        bool,
        typer.Option(
            help="Also compute the miss-ratio curve of one tier by its size, for each eviction policy and the optimum."
        ),
    ] = True,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Processes to use; by default one for each core."),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", show_default=False, help="Write the figures to this file, as JSON."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON; errors too.")] = False,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", show_default=False, help="Draw the figures to this file.")
    ] = None,
) -> None:
    """Predict hits, waiting times, throughput and disk writes of a daemon for a trace, without running one.

    The daemon's own index, policies, prefetcher, dispatcher and cost model run in virtual time. The tiers hold no bytes
    and the GPU computes nothing. The command prints its assumptions about the machine; `prefixd doctor --calibrate`
    measures a machine instead.

    The command takes up to 20 ms for a request in virtual time; --timed N runs only the first N. The miss-ratio curve
    covers all requests; for a long trace the command estimates it from a sample of the blocks, in minutes for a million
    requests.

    With --sweep, --cpu, --disk, --policy and --eviction may be lists; a single size stands for a quarter of it, half of
    it, the size itself, and twice the size.

    With --codec the disk tier stores fewer bytes, and the command compares this with exact blocks; without --sweep, at
    the four sizes of the disk tier that a single one stands for.
    """
    from prefixd.cli.demo.daemon_process import ended_by_sigterm
    from prefixd.cli.demo.demo import check_writable
    from prefixd.cli.output.json_values import print_json
    from prefixd.cli.output.tables.plan_tables import print_curve, print_points
    from prefixd.planner.machine.calibration import read_calibration
    from prefixd.planner.machine.hardware import find_hardware
    from prefixd.planner.machine.pass_costs import PeakCosts
    from prefixd.planner.planned_models import find_model
    from prefixd.planner.plots import check_drawable
    from prefixd.planner.sweep import TracePlan
    from prefixd.planner.virtual_daemon import Plan
    from prefixd.planner.workload import of_trace, trace_requests
    from prefixd_swap.block_size import CUDA_CHUNK_BYTES

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
        **_NO_CONFIGURED_MODEL,
        **_fixed_size(),
        "scheduler.queue_limit": len(found),  # the queue refuses no request
        **given,
    }
    flags = {"gpu.bytes": _parse_sizes("--gpu", machine.gpu)[0], **daemon.counts()}
    variants = _make_variants(
        _parse_sizes("--cpu", machine.cpu, sweep=sweep),
        _parse_sizes("--disk", machine.disk, sweep=sweep or machine.codec is not None),
        _parse_names("--policy", daemon.policy, sweep=sweep),
        _parse_names("--eviction", daemon.eviction, sweep=sweep),
    )
    if twice := sorted(given.keys() & (flags | variants[0]).keys()):
        raise ConfigError(f"{twice[0]} is given by its flag and by --set; keep one")
    base |= flags
    chunk_bytes = 0 if measured is not None and measured.machine.endswith("(cpu)") else CUDA_CHUNK_BYTES
    settings_of = [_load_settings(config, base | variant) for variant in variants]
    codecs = _plan_codecs(machine, chosen, settings_of[0], measured)
    plans = [
        TracePlan(Plan(chosen, settings, costs, ways, request_s, chunk_bytes, codec), trace, planned, speed)
        for settings in settings_of
        for codec in codecs
    ]
    workload = of_trace(trace.name, found, speed=speed)
    settings = plans[0].plan.settings
    assumptions = [
        *_model_assumptions(chosen, [request.input_length + request.output_length for request in found]),
        *costs.assumptions(),
        *_padding_assumptions(plans[0].plan),
        *(hardware.way_assumptions() if measured is None else _calibration_assumptions(measured, chosen)),
        *_disk_assumptions(plans),
        *(codec.assumption for codec in codecs if codec.name != "exact"),
        *workload.assumptions,
        f"{settings.worker.max_running} requests run at once, passes of {settings.worker.max_step_tokens} tokens, "
        f"blocks of {settings.worker.block_tokens} tokens, scheduler.look_ahead = {settings.scheduler.look_ahead}",
    ]
    began_s = time.perf_counter()
    with ended_by_sigterm():
        points, drawn = _run_plans(plans, len(found), jobs or len(os.sched_getaffinity(0)), limit, curve=curve)
    took_s = time.perf_counter() - began_s
    arrival_s = workload.requests[-1].arrival_s
    plain = _to_plain(points, assumptions, machine.model, trace, took_s) | {"curve": drawn and drawn.to_plain()}
    if as_json:
        print_json(plain)
    else:
        print_points(points, assumptions, sweep=sweep, took_s=took_s, requests=len(found), arrival_s=arrival_s)
        if drawn is not None:
            print_curve(drawn, chosen.token_bytes)
    if json_file is not None:
        json_file.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    if plot_file is not None:
        from prefixd.planner.plots import draw_plan

        draw_plan(points, drawn, chosen.token_bytes, plot_file)


def _run_plans(
    plans: Sequence[TracePlan], requests: int, jobs: int, limit: int | None, *, curve: bool
) -> tuple[list[Point], Curve | None]:
    """Runs the plans, each of `requests` requests, and computes the curve of the first `limit` requests.

    A single plan runs in this process, beside the processes for the curve; several plans run in processes of their own,
    before the curve.
    """
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

            def curve_jobs() -> int:  # the plan has a core for itself while it runs
                return jobs if planned.is_set() else jobs - 1

            def draw() -> Curve:
                step = progress.add_bar("miss-ratio curve")
                return curve_of(trace, limit, policies, pool, step, at_once=curve_jobs)

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


def _make_variants(
    cpus: Sequence[int], disks: Sequence[int], policies: Sequence[str | None], evictions: Sequence[str | None]
) -> list[dict[str, Any]]:
    """Returns the settings of every planned machine, by dotted name."""
    names = ("cpu.bytes", "disk.bytes", "scheduler.policy", "cache.eviction")
    return [
        {name: value for name, value in zip(names, values, strict=True) if value is not None}
        for values in product(cpus, disks, policies, evictions)
    ]


def _load_settings(config: Path | None, overrides: dict[str, Any]) -> Any:
    from prefixd.base.setting_sources import gather_layers
    from prefixd.settings import Settings, dotted_names

    _, sources = gather_layers(dotted_names(), config, overrides, os.environ)
    return Settings.load(config, {name: _DEFAULTS[name] for name in _DEFAULTS.keys() - sources.keys()} | overrides)


def _parse_sizes(option: str, text: str, *, sweep: bool = False) -> list[int]:
    from prefixd.base.sizes import parse_room

    try:
        sizes = [parse_room(part) for part in text.split(",")]
    except ValueError as error:
        raise WrongUsage(f"{option} {text}: {error}") from error
    if len(sizes) > 1 and not sweep:
        raise WrongUsage(f"{option} {text}: several sizes need --sweep")
    if len(sizes) == 1 and sweep and sizes[0]:
        return [int(sizes[0] * factor) for factor in _SWEEP_FACTORS]
    return sizes


def _parse_names(option: str, text: str | None, *, sweep: bool) -> list[str | None]:
    names: list[str | None] = [None] if text is None else list(text.split(","))
    if len(names) > 1 and not sweep:
        raise WrongUsage(f"{option} {text}: several policies need --sweep")
    return names


def _plan_codecs(
    machine: MachineOptions, model: PlannedModel, settings: Any, measured: Calibration | None
) -> list[PlannedCodec]:
    """Returns exact and the codecs to compare with it; without --codec the configured one."""
    from prefixd.planner.machine.planned_codecs import EXACT, plan_codec

    if machine.codec is None:
        names = [settings.disk.codec]
    elif any(_parse_sizes("--disk", machine.disk, sweep=True)):
        names = list(dict.fromkeys([EXACT.name, *machine.codec.split(",")]))
    else:
        raise WrongUsage(f"--codec {machine.codec}: the plan has no disk tier; give one with --disk")
    return [plan_codec(name, model, settings.disk.io_threads, measured) for name in names]


def _model_assumptions(model: PlannedModel, lengths: Sequence[int]) -> list[str]:
    longer = sum(length > model.context_tokens for length in lengths)
    if not longer:
        return []
    return [
        f"{longer:,} of {len(lengths):,} requests are longer than the context of {model.name} "
        f"({model.context_tokens:,} tokens); they are planned nevertheless"
    ]


def _disk_assumptions(plans: Sequence[TracePlan]) -> list[str]:
    if all(plan.cpu_bytes or not plan.disk_bytes for plan in plans):
        return []
    return ["blocks reach the disk through the CPU tier: without one, the disk stays empty"]


def _same_model(served: str | None, planned: str) -> bool:
    """True if a daemon serves the planned model. It names a model by its directory: "Llama-3.2-1B", "embedded-v2"."""
    if served is None:
        return False
    if planned == "embedded":
        return served.startswith("embedded")
    return served.lower() == planned.lower()


def _padding_assumptions(plan: Plan) -> list[str]:
    memory, nbytes = sum(plan.strides), plan.model.token_bytes
    if memory <= nbytes:
        return []
    return [
        f"a token takes {memory / 1024:g} KiB of GPU memory, {memory / nbytes - 1:.0%} more, so that short blocks fill "
        f"chunks of memory (worker.block_padding = {plan.settings.worker.block_padding})"
    ]


def _calibration_assumptions(measured: Calibration, model: PlannedModel) -> list[str]:
    other = measured.costs is not None and not _same_model(measured.model, model.name)
    return [
        *(
            [f"the passes are those of {measured.model}, NOT of {model.name}: hits are valid, times are not"]
            if other
            else []
        ),
        f"measured on {measured.machine}: copies {measured.copy_bytes_per_s / 1e9:.3g} GB/s, disk "
        f"{measured.disk_read_bytes_per_s / 1e6:,.0f} MB/s read, "
        f"{measured.disk_write_bytes_per_s / 1e6:,.0f} MB/s written"
        + (", passes by the published figures above" if measured.costs is None else ""),
    ]


def _to_plain(points: Sequence[Point], assumptions: Sequence[str], model: str, trace: Path, took_s: float) -> Any:
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
