"""Programs repaired by a breadth-first search with a language server, over the network API: without a cache, with each
policy of the queue, and with fewer tiers.

LSPDojo's tree search ("Long-Term Memory", section VI) with a real language server (python-lsp-server with pyflakes):

    pip install 'prefixd[bench]'
    python -m benchmarks.tree_search --json tree_search.json

Small programs are to be written. A node of the search is a program as far as it is right; its --candidates completions
are given as forced tokens, right or with planned mistakes (undefined names, attributes that a module does not have,
broken syntax), so that no trained model is needed. The language server checks each: a program without an error is
repaired; else it is cut off at each of its errors, the wrong line and the error become a remark, and the search goes on
from all of these, --width nodes of each program a level. All requests of a level are sent at once, to the small model
that comes with prefixd, in a daemon of its own for each way of serving.

hit_rate is the share of prompt tokens from the cache; possible_tokens are those that a cache without a limit would
have had. output_digest covers what the model says: the tokens that it found likeliest. Exit status 2 unless with all
tiers hit_rate is at least --least-hit-rate with each policy, every search ends with its program, and all answers are
equal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.common import harness
from benchmarks.common.options import from_options, number, option, seed
from benchmarks.tree_parts.grow import Checker, Grown, Plan, grow
from benchmarks.tree_parts.language_server import LanguageServer, pylsp
from benchmarks.tree_parts.programs import PROGRAMS
from benchmarks.tree_parts.search import INSTRUCTIONS
from benchmarks.ways_of_serving import way_figures as serving
from benchmarks.ways_of_serving.run_progress import daemon_of
from benchmarks.ways_of_serving.way_figures import Figures
from benchmarks.ways_of_serving.ways import SHARES, WAYS, Room, Way, chosen_ways


async def measure(ways: Sequence[Way], plan: Plan, room: Room) -> tuple[list[Figures], list[Grown], int]:
    """One daemon after the other, and how many texts were checked.

    room: an estimate, for the first way; the tiers of the others are shares of what that turned out to need.
    Raises DaemonFailed, LanguageServerError.
    """
    measured, searched = list[Figures](), list[Grown]()
    waiting = len(plan.programs) * plan.width * plan.candidates
    async with LanguageServer(pylsp()) as server:
        checker = Checker(server)
        for way in ways:
            with daemon_of(way, room, waiting) as (address, progress):
                grown = await grow(address, plan, checker, progress, way.name)
            measured.append(serving.summarise(way, grown.asked, grown.elapsed_s))
            searched.append(grown)
            lengths = [each.prompt_tokens + len(each.output) for each in grown.asked]
            room = replace(
                room,
                longest=max(lengths),
                usual=sum(lengths) // len(lengths),
                all_tokens=grown.distinct_tokens,
            )
    return measured, searched, len(checker)


def longest_prompt(plan: Plan) -> int:
    """Tokens of the longest prompt that the searches can lead to; a remark takes less room than is allowed for here."""
    return len(INSTRUCTIONS) + max(
        len(program.task) + len(program.source) + 240 * plan.sites * plan.attempts for program in plan.programs
    )


def shortcomings(
    ways: Sequence[Way], measured: Sequence[Figures], searched: Sequence[Grown], plan: Plan, least_rate: float
) -> list[str]:
    """What is not as it should be, in a few words each."""
    wrong = [] if serving.same_answers(measured) else ["the answers differ: see output_digest"]
    for way, run, grown in zip(ways, measured, searched, strict=True):
        lost = sorted({program.name for program in plan.programs}.difference(grown.repaired))
        if lost:
            wrong.append(f"{run.name}: not repaired: {', '.join(lost)}")
        if way.complete and run.hit_rate < least_rate:
            wrong.append(f"{run.name}: hit_rate is {run.hit_rate:.3f}, below {least_rate:g}")
    return wrong


@harness.benchmark(
    "tree_search",
    __doc__,
    option("--programs", 3, f"programs to be written, of the {len(PROGRAMS)} that there are"),
    option("--width", 2, "nodes of a program that are completed a level"),
    option("--candidates", 3, "completions of a node"),
    option("--attempts", 2, "completions that may get the same line wrong, one after the other"),
    option("--sites", 4, "faulty lines of a program"),
    option("--running", 4, "requests computed at once"),
    seed("of the faulty lines and their mistakes"),
    *SHARES,
    option("--least-hit-rate", 0.8, "of all prompt tokens, with all tiers; less is a failure", number(0.0, 1.0)),
    *WAYS,
    unrecorded=("policies", "tiers"),
)
def main(options: harness.Options) -> harness.Outcome:
    """Every way of serving, and what is not as it should be. Raises BenchmarkError for too many programs."""
    if options.programs > len(PROGRAMS):
        raise harness.BenchmarkError(f"argument --programs: there are {len(PROGRAMS)}, not {options.programs}")
    programs = PROGRAMS[: options.programs]
    plan = from_options(Plan, options, programs=programs)
    longest = longest_prompt(plan)
    room = from_options(Room, options, longest=longest, usual=longest, all_tokens=longest)
    ways = chosen_ways(options)
    measured, searched, checked = asyncio.run(measure(ways, plan, room))
    wrong = shortcomings(ways, measured, searched, plan, options.least_hit_rate)
    result = {
        "repaired": min(len(grown.repaired) for grown in searched),
        "depth": searched[0].depth,
        "became": dict(searched[0].became),
        "checked_texts": checked,
        "distinct_tokens": searched[0].distinct_tokens,
    }
    return serving.outcome_of(result, measured, wrong)


if __name__ == "__main__":
    harness.run(main)
