"""How much of the GPU tier is spare, and how much of the rest no layer needs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefixd.base.rules.rules import RecurrentState, SlidingWindow
from prefixd.cache.index.trie import GPU
from prefixd.serving.dispatch.options import EVERY_BLOCK
from prefixd.serving.request.kv_needs import KvNeeds, Unused
from prefixd.serving.request.states import RequestState
from prefixd.worker_protocol.protocol import Need
from tests.serving.bench import Bench, MakeBench
from tests.serving.fake_worker import BLOCK, GEOMETRY, MODELS
from tests.waiting import until

FRAME = GEOMETRY.block_bytes
LONG = range(100, 181)  # 20 blocks and a token
WINDOW = SlidingWindow(7)  # it needs two blocks before the next token
PADDING = 100
FULL_NEEDS = (Need(0, None, FRAME),)
NEEDS = {
    "windows": (*FULL_NEEDS, Need(1, WINDOW, 2 * FRAME)),
    "states": (*FULL_NEEDS, Need(1, WINDOW, 2 * FRAME), Need(2, RecurrentState(), 2 * FRAME - PADDING)),
    "plain": FULL_NEEDS,
}
ONE = (Need(0, None, FRAME // 4), Need(0, WINDOW, 3 * FRAME // 4))
"""Of `plain`, whose one group keeps everything: three of four layers have a window."""


async def bench_with(make_bench: MakeBench, model: str, needs: tuple[Need, ...]) -> Bench:
    bench = await make_bench(400, model=model)
    bench.kv = replace(MODELS[model], needs=needs)
    bench.dispatcher.recorder.needs = KvNeeds(bench.kv, FRAME)
    return bench


def cached(bench: Bench) -> Unused:
    trie = bench.cache.trie(bench.namespace)
    return bench.dispatcher.recorder.needs.of_cached(trie, slice(0, trie.rows))


def running(bench: Bench) -> int:
    return bench.dispatcher.recorder.needs.of_running(bench.dispatcher.running.values())


async def test_what_a_window_has_left_is_spare_when_nobody_holds_it(make_bench: MakeBench) -> None:
    bench = await bench_with(make_bench, "windows", NEEDS["windows"])
    request = bench.submit(LONG, max_tokens=4)
    await bench.finish(request)
    used = bench.cache.tiers.compute.used_bytes
    trie, rows = request.trie, request.found
    there = int((trie.slots[rows, GPU] >= 0).sum()) * FRAME
    assert used == there == len(rows) * 3 * FRAME
    ends = {18, 19, 20}  # the windows before block 20, where the prompt ends, and before block 21
    assert len(rows) == 21 and cached(bench) == Unused(spare=(21 - len(ends)) * 2 * FRAME, unneeded=0)


async def test_what_a_run_holds_beyond_its_window_is_not_needed(make_bench: MakeBench) -> None:
    bench = await bench_with(make_bench, "windows", NEEDS["windows"])
    request = bench.submit(LONG, max_tokens=4)
    await bench.running(request)
    while len(request.rows) < 20:
        bench.step()
        await bench.quiet()
    trie, computed = request.trie, request.run.computed_tokens
    passed = (computed - 6 - bench.kv.window_margin) // BLOCK
    held = [bool(trie.holds[row, GPU, 1]) for row in request.rows.tolist()]
    assert held == [block >= passed for block in range(20)]
    assert cached(bench).unneeded == (18 - passed) * 2 * FRAME
    assert cached(bench).spare == passed * 2 * FRAME
    await bench.finish(request)


async def test_one_rule_for_all_keeps_what_no_layer_needs(make_bench: MakeBench) -> None:
    """Two prompts share 10 blocks: where they branch, and at both ends, two blocks are needed whole."""
    bench = await bench_with(make_bench, "plain", ONE)
    other = [*LONG[: 10 * BLOCK], *range(500, 541)]
    for prompt in (LONG, other):
        request = bench.submit(prompt, max_tokens=1)
        await bench.finish(request)
        assert len(request.found) == 20
    needed = {8, 9} | {18, 19} | {28, 29}
    assert cached(bench) == Unused(spare=0, unneeded=(30 - len(needed)) * 3 * FRAME // 4)


async def test_a_block_ahead_of_the_last_known_token_is_not_needed(make_bench: MakeBench) -> None:
    bench = await bench_with(make_bench, "plain", NEEDS["plain"])
    request = bench.submit(LONG, max_tokens=8)
    await bench.running(request)
    assert running(bench) == 0, "a block that is filled in part is needed"
    bench.step()
    await until(lambda: request.state is RequestState.RUNNING and request.run.blocks == 22)
    assert (request.chain.tokens, running(bench)) == (82, FRAME)
    await bench.finish(request)
    assert (running(bench), cached(bench)) == (0, Unused())


async def test_the_padding_of_states_is_not_needed(make_bench: MakeBench) -> None:
    bench = await bench_with(make_bench, "states", NEEDS["states"])
    request = bench.submit(LONG, max_tokens=8)
    await bench.running(request)
    states = 3  # its own, the one to keep at the prompt's end, and the tail
    assert running(bench) == states * PADDING
    await bench.finish(request)
    kept = bench.dispatcher.recorder.states.counters.kept
    assert kept == 2 and cached(bench).unneeded == kept * PADDING


async def test_the_baseline_keeps_a_state_after_each_block_of_a_prompt(make_bench: MakeBench) -> None:
    bench = await make_bench(400, model="states", states=EVERY_BLOCK)
    request = bench.submit(LONG, max_tokens=1)
    await bench.running(request)
    assert request.run.states is not None and list(request.run.states.keep) == list(range(1, 21))
    await bench.finish(request)
    assert bench.dispatcher.recorder.states.counters.kept == 20
    again = bench.submit([*LONG[: 11 * BLOCK], 1, 2, 3], max_tokens=1)
    await bench.finish(again)
    assert again.hit_tokens == [11 * BLOCK, 0, 0, 0], "it resumes inside the other prompt"


async def test_nothing_is_counted_before_a_worker_has_filled_a_block(make_bench: MakeBench) -> None:
    bench = await bench_with(make_bench, "windows", NEEDS["windows"])
    await bench.cached(LONG)
    assert (cached(bench), running(bench)) == (Unused(), 0)


@pytest.mark.parametrize("model", sorted(NEEDS))
def test_a_shape_without_needs_counts_no_padding(model: str) -> None:
    assert KvNeeds(MODELS[model], FRAME)._padding(-1) == 0
