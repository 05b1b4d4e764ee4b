"""`prefixd demo`: shows the cache's effect on a real daemon, in a few minutes and without a GPU."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixd.base.extras import require
from prefixd.base.tiers import QUOTA_TIERS
from prefixd.cli.failures import CommandFailed, WrongUsage, examples

if TYPE_CHECKING:
    from prefixd.cli.output.progress import RichProgress
    from prefixd.workloads.latency_figures import Figures
    from prefixd.workloads.text_analysis import TextAnalysis, TierSizes

EXAMPLES = examples("prefixd demo", "prefixd demo --prefixes 8 --requests 24 --json | jq '.configs[].requests_per_s'")

RESTARTED = "restarted"


def demo_command(
    prefixes: Annotated[int, typer.Option(min=2, help="Different prefixes (prompt templates).")] = 16,
    requests: Annotated[int, typer.Option(min=1, help="Requests, each with a random one of the prefixes.")] = 128,
    prefix_tokens: Annotated[int, typer.Option(min=16, help="Length of a prefix.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of prefixes, bodies and choices.")] = 0,
    json_file: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", show_default=False, help="Also write the figures to this file, as JSON."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON; errors too.")] = False,
) -> None:
    """Start a daemon with a small random model, show how much faster the cache makes it, and restart it.

    The demo sends the same requests without a cache, then with the three tiers and each policy of the queue, each
    time to a new daemon. The GPU tier holds an eighth of the prefixes, the CPU tier a quarter, the disk all. Then it
    restarts the last daemon and sends the requests again.
    """
    require("worker", "prefixd demo")
    from prefixd.cli.demo.daemon_process import ended_by_sigterm
    from prefixd.cli.demo.policy_verdict import expected_s, minutes
    from prefixd.cli.output.json_values import print_json
    from prefixd.workloads.text_analysis import TextAnalysis, TierSizes

    if json_file is not None:
        check_writable(json_file)
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise CommandFailed(f"the demo needs a folder for its daemons: {error}; set TMPDIR to one") from error
    workload = TextAnalysis(prefixes=prefixes, requests=requests, prefix_tokens=prefix_tokens, seed=seed)
    tiers = TierSizes(gpu_prefixes=max(2, prefixes // 8), cpu_prefixes=max(2, prefixes // 4), disk_prefixes=prefixes)
    typer.echo(
        f"The demo runs the same {requests} requests five times, each on a daemon of its own: up to about "
        f"{minutes(expected_s(workload))} on two cores.",
        err=True,
    )
    with ended_by_sigterm():
        figures = _demo(workload, tiers)
    if as_json:
        print_json(_to_plain(figures))
    else:
        _print_result(figures, workload, tiers)
    if json_file is not None:
        json_file.write_text(json.dumps(_to_plain(figures), indent=2) + "\n", encoding="utf-8")


def _demo(workload: TextAnalysis, tiers: TierSizes) -> list[Figures]:
    from rich.console import Console

    from prefixd.cli.output.progress import RichProgress

    with (
        tempfile.TemporaryDirectory(prefix="prefixd-demo-") as directory,
        RichProgress(Console(stderr=True)) as progress,
    ):
        return _run_all(workload, tiers, Path(directory), progress)


def _run_all(workload: TextAnalysis, tiers: TierSizes, directory: Path, progress: RichProgress) -> list[Figures]:
    from prefixd.cli.demo.policy_verdict import left_s, minutes
    from prefixd.cli.demo.runner import daemon_for, measure, run_config
    from prefixd.workloads.text_analysis import CONFIGS, serving_of

    *others, last = CONFIGS
    figures: list[Figures] = []
    for config in others:
        began_s = time.monotonic()
        figures.append(run_config(config, workload, tiers, directory / config, progress=progress))
        if len(figures) == 1:  # without a cache, the longest run
            left = minutes(left_s(time.monotonic() - began_s))
            progress.say(f"{config}: {figures[0].requests_per_s:.1f} requests/s; about {left} to go")
    progress.begin(f"{last}: starting a daemon", 0)
    with daemon_for(serving_of(last), workload, tiers, directory / last) as daemon:
        figures.append(measure(last, daemon, workload, progress=progress))
        progress.begin(f"{last}: restarting the daemon", 0)
        daemon.restart()
        figures.append(measure(RESTARTED, daemon, workload, progress=progress))
    return figures


def _print_result(figures: Sequence[Figures], workload: TextAnalysis, tiers: TierSizes) -> None:
    from prefixd.cli.demo.policy_verdict import why_policy_won
    from prefixd.cli.output.tables import grid

    out = grid.console()
    out.print(
        f"{workload.requests} requests, each one of {workload.prefixes} prefixes of {workload.prefix_tokens} "
        f"tokens and {workload.body_tokens} tokens of its own. "
        f"Room for {tiers.gpu_prefixes} prefixes in the GPU tier, "
        f"{tiers.cpu_prefixes} in the CPU tier, {tiers.disk_prefixes} on disk."
    )
    baseline, restarted = figures[0], figures[-1]
    tokens = tuple(f"tokens\nfrom\n{tier}" for tier in QUOTA_TIERS)
    numbers = ("requests\nper\nsecond", "times\nas\nfast", "first\ntoken\np50", "first\ntoken\np95", *tokens)
    made = grid.table("", *numbers, right=numbers)
    for run in figures:
        hits = run.hit_tokens
        made.add_row(
            run.name,
            f"{run.requests_per_s:.1f}",
            f"{run.requests_per_s / baseline.requests_per_s:.1f}",
            f"{run.ttft_s.p50:.2f} s",
            f"{run.ttft_s.p95:.2f} s",
            *(f"{count:,}" if count else "-" for count in (hits.gpu, hits.cpu, hits.disk)),
        )
    out.print(made)
    different = [run.name for run in figures if run.output_digest != baseline.output_digest]
    if different:
        out.print(f"[red]The answers differ from those without a cache: {', '.join(different)}[/]")
    else:
        out.print("[green]All answers are the same, token for token.[/]")
    out.print(why_policy_won([run for run in figures if run.name not in (baseline.name, RESTARTED)]), markup=False)
    out.print(
        f"After the restart {1 - restarted.miss_rate:.0%} of the prefix tokens came from the blocks that were left on "
        "disk."
    )
    out.print("Tokens from a tier were not computed again. Each cache was empty at first, except after the restart.")
    out.print(
        "\nNext, in two terminals:\n"
        "  prefixd serve --embedded\n"
        '  prefixd generate "Once upon a time" && prefixd stats && prefixd ls',
        markup=False,
    )


def _to_plain(figures: Sequence[Figures]) -> dict[str, Any]:
    return {
        "same_answers": len({run.output_digest for run in figures}) == 1,
        "configs": [run.to_plain() for run in figures],
    }


def check_writable(path: Path) -> None:
    """Raises WrongUsage before the run, which takes minutes, if the file could not be written after it."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise WrongUsage(f"cannot write to {path}; choose another file in a directory that exists")
