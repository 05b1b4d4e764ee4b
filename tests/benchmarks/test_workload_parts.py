"""What chat and tree_search share: what is possible, and which ways of serving are compared."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import chat, tree_search
from benchmarks.common.options import number
from benchmarks.tree_parts.grow import Grown, Plan
from benchmarks.tree_parts.programs import PROGRAMS
from benchmarks.ways_of_serving.way_figures import same_answers, summarise
from benchmarks.ways_of_serving.ways import COMPARED, TIERS, WAYS, Room, Way, chosen_ways
from benchmarks.workloads.asking import Asked
from benchmarks.workloads.seen_blocks import SeenBlocks
from prefixd.settings import Settings
from prefixd_scheduler import POLICIES

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@given(st.lists(st.tuples(TOKENS, TOKENS), max_size=8))
def test_what_is_possible_is_what_a_set_of_block_prefixes_has(requests: list[tuple[list[int], list[int]]]) -> None:
    blocks, seen = SeenBlocks(2), set[tuple[int, ...]]()
    for prompt, output in requests:
        hits = 0
        while hits + 2 < len(prompt) and tuple(prompt[: hits + 2]) in seen:
            hits += 2
        assert blocks.prompt(prompt) == hits
        blocks.answered(prompt, output)
        known = [*prompt, *output[:-1]]
        seen.update(tuple(known[:length]) for length in range(2, len(known) + 1, 2))
        assert len(blocks) == len(seen)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for option in WAYS:
        option.add_to(parser)
    return parser.parse_args(words)


def test_each_policy_with_all_tiers_and_the_default_one_with_fewer() -> None:
    default = Settings().scheduler.policy
    assert default in COMPARED
    assert [way.name for way in chosen_ways(options("--policies", *POLICIES))] == [
        "no-cache",
        f"{default} gpu",
        f"{default} gpu+cpu",
        *(f"{policy} gpu+cpu+disk" for policy in POLICIES),
    ]
    few = chosen_ways(options("--policies", "fpf", "--tiers", "gpu+cpu", "gpu"))
    assert [(way.name, way.complete) for way in few] == [
        ("no-cache", False),
        ("fpf gpu", False),
        ("fpf gpu+cpu", False),
    ]


def test_a_way_without_a_tier_gives_it_no_bytes_and_the_disk_holds_everything() -> None:
    room = Room(longest=100, usual=50, all_tokens=1600, running=2, gpu_share=0.5, cpu_share=0.25)
    block = 16 * 16 << 10
    sizes = {
        tiers: [room.settings(Way("", "fpf", tiers), 1)[f"{tier}.bytes"] // block for tier in ("gpu", "cpu", "disk")]
        for tiers in ("", *TIERS)
    }
    assert sizes == {"": [64, 0, 0], "gpu": [64, 0, 0], "gpu+cpu": [64, 25, 0], "gpu+cpu+disk": [64, 25, 189]}
    assert not room.settings(Way("", "fcfs", ""), 1)["cache.enabled"]


def asked(output: tuple[int, ...], ttft_s: float, hits: tuple[int, int, int], possible: int) -> Asked:
    return Asked(100, (7, 7), output, ttft_s, *hits, possible)


def test_figures() -> None:
    way = Way("fpf gpu+cpu", "fpf", "gpu+cpu")
    run = summarise(way, [asked((1,), 0.3, (16, 0, 0), 32), asked((2,), 0.1, (0, 32, 16), 48)], 4.0)
    assert (run.requests_per_s, run.ttft_s.p50, run.ttft_s.p95) == (0.5, 0.1, 0.3)
    assert (run.hit_rate, run.hit_share, run.possible_tokens) == (0.32, 0.8, 80)
    other = summarise(way, [asked((1,), 0.3, (0, 0, 0), 0), asked((3,), 0.1, (0, 0, 0), 0)], 4.0)
    assert other.hit_share == 1.0 and not same_answers([run, other]) and same_answers([run, run])


def test_a_chat_that_falls_short_is_told() -> None:
    ways = [Way("no-cache", "fcfs", ""), Way("fpf gpu", "fpf", "gpu"), Way("fpf all", "fpf", TIERS[-1])]
    answers = [[asked((1,), 0.4, (0, 0, 0), 32)], [asked((1,), 0.4, (0, 0, 0), 32)], [asked((1,), 0.2, (0, 0, 32), 32)]]
    runs = [summarise(way, each, 1.0) for way, each in zip(ways, answers, strict=True)]
    assert chat.shortcomings(ways, runs, 1.0, 2.0) == [], "fewer tiers may find less"
    (late,) = chat.shortcomings(ways, runs, 1.0, 2.1)
    assert late.startswith("fpf all: the median time to the first token is 2.00 times better")
    few = summarise(ways[2], [asked((1,), 0.2, (0, 0, 16), 32)], 1.0)
    assert chat.shortcomings(ways, [*runs[:2], few], 0.6, 2.0) == ["fpf all: hit_share is 0.500, below 0.6"]
    other = summarise(ways[1], [asked((2,), 0.4, (0, 0, 0), 32)], 1.0)
    assert chat.shortcomings(ways, [runs[0], other, runs[2]], 1.0, 2.0) == ["the answers differ: see output_digest"]


def test_a_tree_search_that_falls_short_is_told() -> None:
    ways = [Way("no-cache", "fcfs", ""), Way("fpf all", "fpf", TIERS[-1])]
    plan = Plan(programs=PROGRAMS[:1], width=1, candidates=1, attempts=1, sites=1, seed=0)
    found, lost = Grown(repaired=[PROGRAMS[0].name]), Grown()
    runs = [summarise(way, [asked((1,), 0.2, (0, 0, hits), 32)], 1.0) for way, hits in zip(ways, (0, 80), strict=True)]
    assert tree_search.shortcomings(ways, runs, [found, found], plan, 0.8) == []
    assert tree_search.shortcomings(ways, runs, [found, found], plan, 0.9) == ["fpf all: hit_rate is 0.800, below 0.9"]
    (not_repaired,) = tree_search.shortcomings(ways, runs, [lost, found], plan, 0.8)
    assert not_repaired == f"no-cache: not repaired: {PROGRAMS[0].name}"
    other = summarise(ways[0], [asked((2,), 0.2, (0, 0, 0), 32)], 1.0)
    (differ,) = tree_search.shortcomings(ways, [other, runs[1]], [found, found], plan, 0.8)
    assert differ == "the answers differ: see output_digest"


@pytest.mark.parametrize("text", ["nan", "-1", "1.5", "x"])
def test_a_number_out_of_its_range_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        number(0.0, 1.0)(text)
