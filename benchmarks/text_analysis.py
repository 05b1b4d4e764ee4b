"""Requests a second when many share a few prefixes: without a cache, and with three tiers and each policy."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import harness
from prefixd.cli.progress import RichProgress
from prefixd.workloads.figures import Figures
from prefixd.workloads.runner import Progress, Silence, run_config
from prefixd.workloads.text_analysis import CONFIGS, TextAnalysis, TierSizes

DESCRIPTION = """\
The throughput benchmark of "Long-Term Memory" (sections VII.A and VII.C) on this machine:

    python -m benchmarks.text_analysis --prefixes 128 --gpu-prefixes 8 --cpu-prefixes 32 \\
        --disk-prefixes 128 --requests 512 --json results.json

There are more prefixes than fit into the GPU and CPU tiers. Each request is a randomly chosen prefix and a
random body. Requests are streamed into the queue, --outstanding at a time, and the daemon orders them. The same
requests go to a daemon without a cache, then to one with each policy of the queue, each with the small model that
comes with prefixd, in a process of its own and with an empty data directory. With a cache, each prefix is first
asked for once: requests_per_s is what follows, with full tiers; cold_requests_per_s counts these first requests and
their time too, and can be at most (n + k) / n times that without a cache. miss_rate is the share of the prefixes'
tokens that had to be computed after the warm-up. output_digest covers every output token: it must be the same in all of
them."""

GPU_HELP = (
    "prefixes that fit into the GPU tier; it gets more room for the requests that run at once (--running): "
    "for each the blocks of its body and output and one to grow into, 4 blocks or 1 MiB with the defaults"
)


def measure(configs: Sequence[str], workload: TextAnalysis, tiers: TierSizes) -> list[Figures]:
    """One daemon after the other; a line for each on stdout. Raises DaemonFailed."""
    figures: list[Figures] = []
    for config in configs:
        # A short path: a unix socket's name has at most 107 bytes.
        with tempfile.TemporaryDirectory(prefix="prefixd-") as directory, _progress() as progress:
            run = run_config(config, workload, tiers, Path(directory), warm_up=config != "no-cache", progress=progress)
        figures.append(run)
        hits = run.hit_tokens
        print(
            f"{run.name:12} {run.requests_per_s:7.2f} requests/s, from cold {run.cold_requests_per_s:.2f}   "
            f"first token p50 {run.ttft_s.p50:.2f} s, p95 {run.ttft_s.p95:.2f} s   "
            f"hit tokens gpu {hits.gpu}, cpu {hits.cpu}, disk {hits.disk}   miss rate {run.miss_rate:.1%}",
            flush=True,
        )
    return figures


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar where somebody looks, silence in pipes and logs."""
    if not sys.stderr.isatty():
        yield Silence()
        return
    with RichProgress(Console(stderr=True)) as progress:
        yield progress


def draw(axes: Any, figures: Sequence[Figures]) -> None:
    """Requests a second, one bar a configuration, with the share of prefix tokens that were computed."""
    bars = axes.bar([run.name for run in figures], [run.requests_per_s for run in figures], color="#4477aa")
    axes.bar_label(bars, [f"{run.miss_rate:.0%} computed" for run in figures])
    axes.set_ylabel("requests / s")
    axes.set_title("Text analysis")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser("text_analysis", DESCRIPTION)
    numbers = [
        ("--prefixes", 128, "different prefixes"),
        ("--gpu-prefixes", 8, GPU_HELP),
        ("--cpu-prefixes", 32, "prefixes that fit into the CPU tier"),
        ("--disk-prefixes", 128, "prefixes that fit into the disk tier"),
        ("--requests", 512, "requests, each with a randomly chosen prefix"),
        ("--prefix-tokens", 512, "length of a prefix"),
        ("--body-tokens", 32, "length of a body"),
        ("--output-tokens", 2, "tokens generated for a request"),
        ("--running", 8, "requests computed at once"),
        ("--outstanding", 64, "requests sent before the first of them is answered"),
    ]
    for flag, default, text in numbers:
        parser.add_argument(flag, type=harness.positive, default=default, metavar="N", help=f"{text} ({default})")
    parser.add_argument("--seed", type=int, default=0, help="of prefixes, bodies and choices (0)")
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="which to run (all)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Raises BenchmarkError when the outputs differ, after the result is written."""
    options = _options(arguments)
    workload = TextAnalysis(
        prefixes=options.prefixes,
        requests=options.requests,
        prefix_tokens=options.prefix_tokens,
        body_tokens=options.body_tokens,
        output_tokens=options.output_tokens,
        outstanding=options.outstanding,
        seed=options.seed,
    )
    tiers = TierSizes(
        gpu_prefixes=options.gpu_prefixes,
        cpu_prefixes=options.cpu_prefixes,
        disk_prefixes=options.disk_prefixes,
        running=options.running,
    )
    figures = measure(options.configs, workload, tiers)
    same = len({run.output_digest for run in figures}) == 1
    no_parameters = ("json", "plot", "configs")
    parameters = {name: value for name, value in vars(options).items() if name not in no_parameters}
    result = {**parameters, "same_answers": same, "configs": [run.to_plain() for run in figures]}
    harness.finish("text_analysis", result, options.json)
    harness.plot(options.plot, lambda axes: draw(axes, figures))
    if not same:
        raise harness.BenchmarkError("the outputs of the configurations differ: see output_digest")


if __name__ == "__main__":
    harness.run(main)
