"""How near `prefixd what-if` is to a full replay, and what it costs.

Accuracy: a trace (Mooncake's conversations, or a made-up one where that is missing) is replayed in full
against a tier of ten sizes, from a quarter to eight times of --blocks, under each of --policies. Beside
it the ghosts of one tier of --blocks watch the trace, in the memory that they have by default. Each size
has to be within two points of the replay, for each of several hashes.

Cost: clients ask a daemon for prompts as fast as they can, with its default settings; first they only
look them up, then prompts grow and are stored too. The ghosts may take 1% of the CPU time of the event
loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import harness
from benchmarks.common.options import number, option
from benchmarks.what_if_parts.accuracy import TraceReplay, compare, conversations
from benchmarks.what_if_parts.ghost_cost import share_of_loop
from prefixd.cache.ghosts.ghost_tier import FACTORS, GhostTier
from prefixd.settings import CacheSettings
from prefixd.workloads.mooncake import read_trace

_DEFAULT_TRACE = Path(__file__).resolve().parents[2] / "shared" / "traces" / "mooncake_conversation.jsonl"
_TRACE_HELP = "the trace (shared/traces/mooncake_conversation.jsonl beside the repository, else a made-up one)"
_TIERS = 2  # of a daemon, which share the memory


@harness.benchmark(
    "what_if",
    __doc__,
    option("--trace", None, _TRACE_HELP, Path, metavar="FILE", shown=False),
    option("--requests", 12_000, "its first N requests"),
    option("--blocks", 10_000, "blocks of 512 tokens of the tier"),
    option("--policies", "lru,weighing", "eviction policies of the daemon, separated by commas", str, metavar="NAMES"),
    option("--seeds", 3, "runs of the ghosts for each policy, with other hashes"),
    option("--seconds", 20.0, "load for each cost", number(1, 3600), metavar="S"),
    option("--prompt-blocks", 1000, "blocks of 16 tokens of a prompt of the load"),
    option("--most-share", 0.01, "the most of the event loop's CPU time", number(0, 1), metavar="SHARE"),
    harness.PLOT,
)
def main(options: harness.Options) -> harness.Outcome:
    """The worst error and the largest share. Raises BenchmarkError for an empty trace."""
    file = options.trace or (_DEFAULT_TRACE if _DEFAULT_TRACE.exists() else None)
    requests = conversations(options.requests) if file is None else list(read_trace(file, options.requests))
    if not requests:
        raise harness.BenchmarkError(f"{file} is empty")
    replay, policies = TraceReplay(requests), options.policies.split(",")
    compared = []
    with harness.progress("replays", len(policies) * (len(FACTORS) + options.seeds)) as step:
        for policy in policies:
            sample = CacheSettings().ghosts_bytes // _TIERS // GhostTier.bytes_a_block(policy)
            compared.append(compare(replay, policy, options.blocks, sample, options.seeds, step))
    costs = {
        "lookups": share_of_loop(options.seconds, options.prompt_blocks, stores=False),
        "stores": share_of_loop(options.seconds, options.prompt_blocks, stores=True),
    }
    result: dict[str, Any] = {
        "trace": "conversations, made up" if file is None else file.name,
        "trace_blocks": replay.asked,
        "different_blocks": replay.blocks,
        "sizes": len(FACTORS),
        "worst_error_points": max(each["worst_error_points"] for each in compared),
        "worst_share": max(cost["share"] for cost in costs.values()),
        "policies": compared,
        "cost": costs,
    }
    tables = [harness.Table(each["sizes"], list(each["sizes"][0])) for each in compared]

    def draw(axes: Any) -> None:
        for each in compared:
            sizes = [size["factor"] for size in each["sizes"]]
            rates = [100 * size["replayed"] for size in each["sizes"]]
            spread = [size["worst_error_points"] for size in each["sizes"]]
            axes.errorbar(sizes, rates, yerr=spread, marker="o", capsize=3, label=each["policy"])
        axes.set(
            xlabel="size of the tier, times the present one", ylabel="blocks found, %", xscale="log", ylim=(0, None)
        )
        axes.set_title("full replays; bars: the worst error of the ghosts", fontsize=10)
        axes.legend(fontsize="small")

    return harness.Outcome(
        result,
        harness.missed(result, most={"worst_error_points": 2.0, "worst_share": options.most_share}),
        tables,
        draw,
    )


if __name__ == "__main__":
    harness.run(main)
