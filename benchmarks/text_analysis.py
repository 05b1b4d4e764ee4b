"""Requests a second, and latency, when many share a few prefixes: without a cache, and with tiers, policies and
eviction ablated.

The text analysis benchmark of "Long-Term Memory" (sections VII.A and VII.C) on this machine:

    python -m benchmarks.text_analysis --prefixes 128 --gpu-prefixes 8 --cpu-prefixes 32 \\
        --disk-prefixes 128 --requests 512 --json results.json

There are more prefixes than fit into the GPU and CPU tiers. Each request is a randomly chosen prefix and a
random body. Requests are streamed into the queue, --outstanding at a time, and the daemon orders them; in the suite
`latency` each is sent when the one before it was answered. Each configuration has a daemon of its own with the small
model that comes with prefixd. With a cache, each prefix is first asked for once, and all requests are sent once:
requests_per_s is what follows, with full tiers. The daemons of a suite run side by side and are asked in turn,
--repeats times; figures are those of the repeat in the middle.

    goals     without a cache; FCFS without prefetch; FPF with it; FPF with a GPU tier for everything; FPF with a slow
              disk, and for the shortest prefixes FCFS with one. For every length of --prefix-tokens. The ratios have
              bounds: a miss ends the run with status 2.
    policies  each policy of the queue, and no cache
    header    FCFS, FPF and Relaxed-FPF where all prefixes begin with the same --header tokens and half of the requests
              bring a prefix that nobody else has. FPF and Relaxed-FPF have to have the first token as soon as FCFS at
              the median, or the run ends with status 2
    tiers     gpu, gpu+cpu, gpu+cpu+disk; with prefetch and without; FPF and FCFS
    eviction  what goes first
    latency   first tokens by tiers, one request after the other

The worker stands for a GPU: one core of the machine is left to the daemon, as no GPU spends time on the daemon's
copies (--threads). miss_rate is the share of the prefixes' tokens that had to be computed after the warm-up. Output
tokens have to be the same in all configurations. Where a request takes long, fewer are sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common import harness
from benchmarks.common.options import chosen, from_options, option, seed, size
from benchmarks.text_analysis_parts.goals import goals
from benchmarks.text_analysis_parts.measuring import Measured, measure_group, worker_threads
from benchmarks.text_analysis_parts.panels import draw, panels
from benchmarks.text_analysis_parts.suites import SUITES, groups
from benchmarks.ways_of_serving.run_progress import shown_progress
from prefixd.workloads.text_analysis import TextAnalysis, TierSizes

GPU_HELP = (
    "prefixes that fit into the GPU tier; it gets more room for the requests that run at once (--running): "
    "for each the blocks of its body and output and one to grow into, 4 blocks or 1 MiB with the defaults"
)


_SHOWN = (
    *("suite", "prefix_tokens", "name", "requests_per_s", "cold_requests_per_s", "ttft_s.p50", "ttft_s.p95"),
    *("miss_rate", "hit_tokens.gpu", "hit_tokens.cpu", "hit_tokens.disk"),
)


def measure(
    suites: Sequence[str],
    lengths: Sequence[int],
    workload: TextAnalysis,
    sizes: TierSizes,
    slow_disk: int,
    threads: int,
    header_tokens: int,
) -> list[Measured]:
    """All suites. Raises DaemonFailed."""
    measured: list[Measured] = []
    with shown_progress() as progress:
        for suite in suites:
            for cells in groups(suite, lengths, slow_disk, header_tokens):
                measured += measure_group(suite, cells, workload, sizes, threads, progress)
    return measured


def same_answers(measured: Sequence[Measured]) -> bool:
    """Whether runs of the same requests gave the same output; of fewer requests, their first ones."""
    digests: dict[tuple[object, ...], set[str]] = {}
    heads: dict[tuple[object, ...], set[str]] = {}
    for run in measured:
        for repeat, figures in enumerate(run.repeats):
            prompts = (run.cell.prefix_tokens, run.cell.header_tokens, run.cell.new, repeat)
            heads.setdefault(prompts, set()).add(figures.first_outputs_digest)
            digests.setdefault((*prompts, figures.requests), set()).add(figures.output_digest)
    return all(len(found) == 1 for found in (*digests.values(), *heads.values()))


@harness.benchmark(
    "text_analysis",
    __doc__,
    option("--prefixes", 128, "different prefixes"),
    option("--gpu-prefixes", 8, GPU_HELP),
    option("--cpu-prefixes", 32, "prefixes that fit into the CPU tier"),
    option("--disk-prefixes", 128, "prefixes that fit into the disk tier"),
    option("--requests", 512, "requests, each with a randomly chosen prefix, of the shortest prefixes"),
    option("--header", 16, "tokens that all prefixes begin with in the suite `header`; 16 are a block"),
    option("--body-tokens", 32, "length of a body"),
    option("--output-tokens", 2, "tokens generated for a request"),
    option("--running", 8, "requests computed at once"),
    option("--outstanding", 128, "requests sent before the first of them is answered"),
    option("--repeats", 3, "how often the requests are sent to each daemon"),
    option("--threads", worker_threads(), "of each worker; one core is left to the daemon: no GPU copies with it"),
    option("--prefix-tokens", [512, 2048], "lengths of prefixes, the first one for all suites", nargs="+"),
    option("--slow-disk", 50_000_000, "its bytes a second", size),
    seed("of prefixes, bodies and choices"),
    chosen("--suites", SUITES, "which to run", ["goals", "policies"]),
    harness.PLOT,
)
def main(options: harness.Options) -> harness.Outcome:
    """The suites; broken: outputs that differ, and goals that were missed."""
    lengths = sorted(set(options.prefix_tokens))
    workload = from_options(TextAnalysis, options, prefix_tokens=lengths[0])
    sizes = from_options(TierSizes, options)
    if options.header >= lengths[0]:
        raise harness.BenchmarkError(
            f"--header {options.header} leaves nothing of prefixes of {lengths[0]} tokens; give fewer"
        )
    measured = measure(options.suites, lengths, workload, sizes, options.slow_disk, options.threads, options.header)
    same, reached = same_answers(measured), goals(measured)
    compared = [run for run in measured if run.suite == "policies"] or measured
    result = {
        "prefix_tokens": lengths[0],
        "prefix_lengths": lengths,
        "same_answers": same,
        "goals_met": all(goal.met for goal in reached),
        "ratios": {f"{goal.name}, {goal.prefix_tokens} tokens": goal.value for goal in reached},
        "goals": [goal.to_plain() for goal in reached],
        "configs": [run.to_plain() for run in compared],
        "runs": [run.to_plain() for run in measured],
    }
    broken = [] if same else ["the outputs of the configurations differ: see output_digest"]
    if missed := [goal for goal in reached if not goal.met]:
        told = "; ".join(f"{g.name} at {g.prefix_tokens} tokens {g.value:.2f}, not {g.at_least:g}" for g in missed)
        broken.append(f"goals missed: {told}")

    columns = len(panels(measured))
    return harness.Outcome(
        result,
        broken,
        [
            harness.Table(result["runs"], _SHOWN),
            harness.Table(result["goals"], ("name", "prefix_tokens", "value", "at_least", "met")),
        ],
        draw=lambda axes: draw([axes] if columns == 1 else axes, measured),
        columns=columns,
    )


if __name__ == "__main__":
    harness.run(main)
