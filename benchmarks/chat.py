"""Multi-turn conversations over the network API: without a cache, with fewer tiers, and with each policy."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chat_parts.conversations import Conversation, Statistics, distinct_tokens, fitting, generate
from benchmarks.chat_parts.share_gpt import read_share_gpt
from benchmarks.chat_parts.talk import talk
from benchmarks.chat_parts.traced import read_conversations
from benchmarks.common import harness
from benchmarks.serving import figures as serving
from benchmarks.serving.daemon import daemon_of
from benchmarks.serving.figures import Figures
from benchmarks.serving.ways import Room, Way, add_options, chosen_ways

DESCRIPTION = """\
The chat benchmark of "Long-Term Memory" (section VII.B), with conversations that grow turn by turn:

    python -m benchmarks.chat --json chat.json --plot chat.svg

--users users at a time hold --conversations conversations with the small model that comes with prefixd, in a daemon of
its own for each way of serving: without a cache, with the daemon's default policy and fewer tiers, and with each of
--policies and all tiers. The conversations are generated with the statistics of ShareGPT and of Mooncake's conversation
trace (see benchmarks/chat_parts/conversations.py), read from ShareGPT's JSON (--sharegpt FILE), or from a trace in
Mooncake's format (--trace FILE). Texts that are read are replayed: the model is made to give the answers in them.

possible_tokens are the prompt tokens that a cache without a limit would have had: a plain set of all block prefixes.
hit_share is the share of them that were hits. output_digest covers what the model says: the tokens that it found
likeliest. Exit status 2 unless all answers are equal and, with all tiers and each policy, hit_share is at least
--least-hit-share and the median time to the first token at least --least-speedup times better than without a cache."""

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
    statistics = Statistics(
        turns=options.turns,
        system_tokens=options.system_tokens,
        users_per_system=options.users_per_system,
        header_tokens=options.header_tokens,
    )
    how: dict[str, Any] = {"scale": scale, "time_scale": options.time_scale}
    count = options.conversations
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


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser("chat", DESCRIPTION)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--sharegpt", type=Path, metavar="FILE", help="conversations in ShareGPT's JSON")
    source.add_argument("--trace", type=Path, metavar="FILE", help="a trace in Mooncake's format (JSON lines)")
    defaults = Statistics()
    numbers = [
        ("--conversations", 12, "conversations held"),
        ("--users", 16, "conversations held at once"),
        ("--running", 2, "requests computed at once; the GPU tier has room for so many, and for --gpu-share"),
        ("--system-tokens", defaults.system_tokens, "length of a system prompt, before --scale; not with --trace"),
        ("--users-per-system", defaults.users_per_system, "conversations that share a system prompt; not with --trace"),
        ("--least-turns", 1, "leave shorter conversations of --trace out"),
    ]
    for flag, default, text in numbers:
        parser.add_argument(flag, type=harness.positive, default=default, metavar="N", help=f"{text} ({default})")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is generated (0)")
    parser.add_argument(
        "--header-tokens",
        type=harness.positive,
        default=0,
        metavar="N",
        help="tokens that all system prompts begin with, before --scale; not with --trace (none)",
    )
    shares = [
        ("--turns", defaults.turns, 1.0, 1e6, "mean turns of a generated conversation"),
        ("--scale", None, 1e-6, 1.0, "of all lengths (1/8; 1/16 of ShareGPT's bytes, 1/32 of a trace's tokens)"),
        ("--time-scale", 0.05, 0.0, 1e6, "of the think times between turns"),
        ("--gpu-share", 0.0, 0.0, 1e3, "of everything cached that fits into the GPU tier beside what runs"),
        ("--cpu-share", 0.3, 0.0, 1e3, "of everything cached that fits into the CPU tier; the disk holds all"),
        ("--least-hit-share", 0.9, 0.0, 1.0, "of what is possible, with all tiers; less is a failure"),
        ("--least-speedup", 2.0, 0.0, 1e6, "of the median first token over no cache; less is a failure"),
    ]
    for name, value, least, most, text in shares:
        parser.add_argument(
            name,
            type=harness.number(least, most),
            default=value,
            metavar="X",
            help=text if value is None else f"{text} ({value:g})",
        )
    add_options(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Raises BenchmarkError when something is not as it should be, after the result is written."""
    options = _options(arguments)
    source = "sharegpt" if options.sharegpt else "trace" if options.trace else "generator"
    scale = options.scale or _SCALES[source]
    conversations, left_out = _conversations(options, scale)
    lengths = [each.tokens for each in conversations]
    room = Room(
        longest=max(lengths),
        usual=sum(lengths) // len(lengths),
        all_tokens=distinct_tokens(conversations),
        running=options.running,
        gpu_share=options.gpu_share,
        cpu_share=options.cpu_share,
    )
    ways = chosen_ways(options)
    measured = measure(ways, conversations, room, options.users)
    wrong = shortcomings(ways, measured, options.least_hit_share, options.least_speedup)
    no_parameters = ("json", "plot", "policies", "tiers", "sharegpt", "trace")
    result = {
        **{name: value for name, value in vars(options).items() if name not in no_parameters},
        "source": source,
        "file": str(options.sharegpt or options.trace or ""),
        "scale": scale,
        "conversations": len(conversations),
        "left_out": left_out,
        "mean_turns": sum(len(each.turns) for each in conversations) / len(conversations),
        "think_s": sum(turn.think_s for each in conversations for turn in each.turns),
        "same_answers": serving.same_answers(measured),
        "shortcomings": wrong,
        "ways": [run.to_plain() for run in measured],
    }
    harness.finish("chat", result, options.json)
    serving.print_table("chat", measured)
    harness.plot(options.plot, lambda axes: serving.draw(axes, measured), columns=3)
    if wrong:
        raise harness.BenchmarkError("; ".join(wrong))


if __name__ == "__main__":
    harness.run(main)
