"""Multi-turn conversations over the network API: without a cache, with fewer tiers, and with each policy.

The chat benchmark of "Long-Term Memory" (section VII.B), with conversations that grow turn by turn:

    python -m benchmarks.chat --json chat.json

--users users at a time hold --conversations conversations with the small model that comes with prefixd, in a daemon of
its own for each way of serving: without a cache, with the daemon's default policy and fewer tiers, and with each of
--policies and all tiers. The conversations are generated with the statistics of ShareGPT and of Mooncake's conversation
trace (see benchmarks/workloads/conversations.py), read from ShareGPT's JSON (--sharegpt FILE), or from a trace in
Mooncake's format (--trace FILE). Texts that are read are replayed: the model is made to give the answers in them.

possible_tokens are the prompt tokens that a cache without a limit would have had: a plain set of all block prefixes.
hit_share is the share of them that were hits. output_digest covers what the model says: the tokens that it found
likeliest. Exit status 2 unless all answers are equal and, with all tiers and each policy, hit_share is at least
--least-hit-share and the median time to the first token at least --least-speedup times better than without a cache.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import harness
from benchmarks.common.options import from_options, number, option, seed
from benchmarks.ways_of_serving import way_figures as serving
from benchmarks.ways_of_serving.run_progress import daemon_of
from benchmarks.ways_of_serving.way_figures import Figures
from benchmarks.ways_of_serving.ways import SHARES, WAYS, Room, Way, chosen_ways
from benchmarks.workloads.conversations import Conversation, Statistics, distinct_tokens, fitting, generate
from benchmarks.workloads.share_gpt import read_share_gpt
from benchmarks.workloads.talk import talk
from benchmarks.workloads.traced import read_conversations

_CONTEXT = 8192  # of the model that comes with prefixd
_SCALES = {"generator": 1 / 8, "sharegpt": 1 / 16, "trace": 1 / 32}


def measure(ways: Sequence[Way], conversations: Sequence[Conversation], room: Room, users: int) -> list[Figures]:
    """One daemon after the other. Raises DaemonFailed."""
    measured = []
    for way in ways:
        with daemon_of(way, room, len(conversations)) as (address, progress):
            asked, elapsed_s = asyncio.run(talk(address, conversations, users, progress, way.name))
        measured.append(serving.summarise(way, asked, elapsed_s))
    return measured


def shortcomings(
    ways: Sequence[Way], measured: Sequence[Figures], least_share: float, least_speedup: float
) -> list[str]:
    """What is not as it should be, in a few words each."""
    wrong = [] if serving.same_answers(measured) else ["the answers differ: see output_digest"]
    plain = next(run for run in measured if not run.tiers)
    for way, run in zip(ways, measured, strict=True):
        if not way.complete:
            continue
        if run.hit_share < least_share:
            wrong.append(f"{run.name}: hit_share is {run.hit_share:.3f}, below {least_share:g}")
        if run.ttft_s.p50 * least_speedup > plain.ttft_s.p50:
            wrong.append(
                f"{run.name}: the median time to the first token is {plain.ttft_s.p50 / run.ttft_s.p50:.2f} times "
                f"better than without a cache, less than {least_speedup:g}"
            )
    return wrong


def _conversations(options: argparse.Namespace, scale: float) -> tuple[list[Conversation], int]:
    """What is said, as far as the model's context reaches, and how many conversations begin too long for it."""
    statistics = from_options(Statistics, options)
    how: dict[str, Any] = {"scale": scale, "time_scale": options.time_scale}
    count = options.conversations
    if options.sharegpt is not None and options.trace is not None:
        raise harness.BenchmarkError("give --sharegpt or --trace, not both")
    if options.sharegpt is not None:
        said = read_share_gpt(options.sharegpt, count, statistics, **how, seed=options.seed)
    elif options.trace is not None:
        said = read_conversations(options.trace, count, **how, least_turns=options.least_turns)
    else:
        said = generate(count, statistics, **how, seed=options.seed)
    fit = fitting(said, _CONTEXT - 1)
    if not fit:
        raise harness.BenchmarkError(f"no conversation fits into {_CONTEXT} tokens at --scale {scale:g}; lower it")
    return fit, len(said) - len(fit)


_STATISTICS = Statistics()


@harness.benchmark(
    "chat",
    __doc__,
    option("--sharegpt", None, "conversations in ShareGPT's JSON", Path, metavar="FILE"),
    option("--trace", None, "a trace in Mooncake's format (JSON lines)", Path, metavar="FILE"),
    option("--conversations", 12, "conversations held"),
    option("--users", 16, "conversations held at once"),
    option("--running", 2, "requests computed at once; the GPU tier has room for so many, and for --gpu-share"),
    option("--system-tokens", _STATISTICS.system_tokens, "of a system prompt, before --scale; not with --trace"),
    option("--users-per-system", _STATISTICS.users_per_system, "that share a system prompt; not with --trace"),
    option("--least-turns", 1, "leave shorter conversations of --trace out"),
    seed("of everything that is generated"),
    option("--header-tokens", 0, "that all system prompts begin with, before --scale; not with --trace"),
    option("--turns", _STATISTICS.turns, "mean turns of a generated conversation", number(1.0, 1e6)),
    option(
        "--scale",
        None,
        "of all lengths (1/8; 1/16 of ShareGPT's bytes, 1/32 of a trace's tokens)",
        number(1e-6, 1.0),
    ),
    option("--time-scale", 0.05, "of the think times between turns", number(0.0, 1e6)),
    *SHARES,
    option("--least-hit-share", 0.9, "of what is possible, with all tiers; less is a failure", number(0.0, 1.0)),
    option("--least-speedup", 2.0, "of the median first token over no cache; less is a failure", number(0.0, 1e6)),
    *WAYS,
    unrecorded=("policies", "tiers"),
)
def main(options: harness.Options) -> harness.Outcome:
    """Every way of serving, and what is not as it should be."""
    source = "sharegpt" if options.sharegpt else "trace" if options.trace else "generator"
    scale = options.scale or _SCALES[source]
    conversations, left_out = _conversations(options, scale)
    lengths = [each.tokens for each in conversations]
    room = from_options(
        Room,
        options,
        longest=max(lengths),
        usual=sum(lengths) // len(lengths),
        all_tokens=distinct_tokens(conversations),
    )
    ways = chosen_ways(options)
    measured = measure(ways, conversations, room, options.users)
    wrong = shortcomings(ways, measured, options.least_hit_share, options.least_speedup)
    result = {
        "source": source,
        "file": str(options.sharegpt or options.trace or ""),
        "scale": scale,
        "conversations": len(conversations),
        "left_out": left_out,
        "mean_turns": sum(len(each.turns) for each in conversations) / len(conversations),
        "think_s": sum(turn.think_s for each in conversations for turn in each.turns),
    }
    return serving.outcome_of(result, measured, wrong)


if __name__ == "__main__":
    harness.run(main)
