"""Who gives way when the GPU tier is full, where its KV goes, and when it runs again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from prefixd.base.long_work.pacer import give_way
from prefixd.cache.index.trie import CPU, GPU
from prefixd.serving.dispatch.capacity import preemption
from prefixd.serving.dispatch.capacity.preemption import PreemptionCounters
from prefixd.worker_protocol.protocol import Cancel, Done, Extend, Start
from prefixd_scheduler import Distance
from prefixd_swap import SwapError
from tests.serving.bench import Bench, Events, Expected, MakeBench
from tests.slow import slow_but
from tests.tries import forget_blocks, match_rows
from tests.waiting import until

ONE = range(100, 117)  # 5 frames to start with
TWO = range(200, 217)
THREE = range(300, 317)


def counters(bench: Bench) -> PreemptionCounters:
    return bench.dispatcher.preemption.counters


def cancels(bench: Bench) -> list[int]:
    return [message.id for message in bench.sent if isinstance(message, Cancel)]


def starts(bench: Bench) -> list[int]:
    return [message.id for message in bench.sent if isinstance(message, Start)]


def where(bench: Bench, tokens: Sequence[int]) -> list[list[bool]]:
    """Of each cached block of a prompt, whether the GPU tier and the CPU tier have it."""
    trie = bench.cache.trie(bench.namespace)
    rows = match_rows(trie, bench.namespace.root, bench.request(tokens).chain)
    return [[trie.has(row, GPU), trie.has(row, CPU)] for row in rows.tolist()]


async def pressed(bench: Bench) -> None:
    """Computes until a request has to give way."""
    while not cancels(bench):
        bench.step()
        await bench.quiet()


async def gone(bench: Bench) -> None:
    """The worker lets go of who gives way, and his blocks leave."""
    bench.answer_cancels()
    await until(lambda: not bench.dispatcher.preemption.moving)
    await bench.quiet()


# -- who --------------------------------------------------------------------------------------------------------------


async def test_the_lowest_priority_gives_way_and_of_equals_the_last(make_bench: MakeBench) -> None:
    bench = await make_bench(24)
    requests = []
    for prompt, priority in ((ONE, 5), (TWO, 7), (THREE, 7), (range(400, 417), 1)):
        requests.append(bench.submit(prompt, max_tokens=40, priority=priority))
        await bench.running(requests[-1])
    order = []
    while len(order) < 3:
        await pressed(bench)
        order += cancels(bench)
        bench.answer_cancels()
        await bench.quiet()
    assert order == [requests[2].id, requests[1].id, requests[0].id]
    await bench.finish(*requests)
    assert not requests[3].resumed


async def test_the_lowest_priority_gives_way_though_it_lacks_the_frame_itself(make_bench: MakeBench) -> None:
    bench = await make_bench(10)
    low = bench.submit(ONE, max_tokens=12, priority=1)
    await bench.running(low)
    high = bench.submit(TWO, max_tokens=12)
    await bench.running(high)
    while not cancels(bench):
        bench.step(low)
        await bench.quiet()
    assert cancels(bench) == [low.id]
    await bench.finish(low, high)


async def test_of_those_that_lack_a_frame_the_highest_priority_gets_one_first(make_bench: MakeBench) -> None:
    bench = await make_bench(11)
    low = bench.submit(ONE, max_tokens=12, priority=1)
    await bench.running(low)
    high = bench.submit(TWO, max_tokens=12)
    await bench.running(high)
    bench.step()  # both have room for less than a block now, and there is one frame
    await until(lambda: cancels(bench))
    assert [message.id for message in bench.sent if isinstance(message, Extend)] == [high.id]
    assert cancels(bench) == [low.id]
    await bench.finish(low, high)


# -- where its KV goes ------------------------------------------------------------------------------------------------


async def test_swapped_blocks_go_down_at_once_and_come_up_again(
    make_bench: MakeBench, events: Events, expected: Expected
) -> None:
    bench = await make_bench(12, preemption="swap")
    old, young = bench.submit(ONE, max_tokens=20), bench.submit(TWO, max_tokens=20)
    await bench.running(young)
    await pressed(bench)
    full = len(young.rows)
    await gone(bench)
    assert full >= 4 and where(bench, [*TWO, *expected(TWO, 20)]) == [[False, True]] * full
    assert (counters(bench).swapped, counters(bench).recomputed) == (1, 0)
    assert counters(bench).swapped_blocks == full
    bench.sent.clear()
    await bench.finish(old, young)
    (start,) = (message for message in bench.sent if isinstance(message, Start))
    assert (start.id, start.cached_blocks) == (young.id, full)
    assert counters(bench).recomputed_tokens < 4, "what was in its last block"
    for request, prompt in ((old, ONE), (young, TWO)):
        assert events(request) == (expected(prompt, 20), "length")


async def test_recomputed_blocks_are_dropped_and_nothing_is_copied(
    make_bench: MakeBench, events: Events, expected: Expected
) -> None:
    bench = await make_bench(12, disk=True, preemption="recompute")
    old, young = bench.submit(ONE, max_tokens=20), bench.submit(TWO, max_tokens=20)
    await bench.running(young)
    await pressed(bench)
    computed = young.chain.tokens - 1
    await gone(bench)
    assert where(bench, TWO) == []
    assert (counters(bench).swapped, counters(bench).recomputed) == (0, 1)
    assert bench.cache.tiers.counters[bench.cache.tiers.compute.level].demoted == 0
    await bench.finish(old, young)
    assert counters(bench).recomputed_tokens == computed
    assert not bench.cache.mover.lost, "it was computed again, not lost"
    for request, prompt in ((old, ONE), (young, TWO)):
        assert events(request) == (expected(prompt, 20), "length")


@pytest.mark.parametrize("mode", ["swap", "recompute"])
async def test_what_it_has_not_computed_or_others_hold_stays(make_bench: MakeBench, mode: str) -> None:
    """Blocks 0 and 1 were found; blocks 2 and 3 another request holds as well; the rest is its own."""
    bench = await make_bench(16, preemption=mode)
    prompt = [*range(17), 1]
    found = bench.submit(prompt[:9], max_tokens=1)
    await bench.finish(found)
    victim = bench.submit([*prompt, *THREE], max_tokens=29, priority=1)
    await bench.running(victim)
    bench.step()
    await bench.quiet()
    other = bench.submit(prompt[:17], max_tokens=30)
    await bench.running(other)
    await pressed(bench)
    await gone(bench)
    left = where(bench, [*prompt, *THREE])
    assert left[:4] == [[True, False]] * 4
    assert left[4:] == ([[False, True]] * (len(left) - 4) if mode == "swap" else [])
    assert bool(left[4:]) == (mode == "swap")
    await bench.finish(victim, other)


async def test_a_block_with_a_copy_below_is_not_computed_again(make_bench: MakeBench) -> None:
    bench = await make_bench(12, preemption="recompute")
    old, young = bench.submit(ONE, max_tokens=20), bench.submit(TWO, max_tokens=20)
    await bench.running(young)
    bench.step()
    await bench.quiet()
    trie, rows = young.trie, young.rows[:2]  # as write-back does
    assert await bench.cache.mover.bring(trie, rows, bench.cache.tiers.shared) == 2
    await pressed(bench)
    await gone(bench)
    assert where(bench, TWO) == [[False, True]] * 2
    await bench.finish(old, young)


@pytest.mark.parametrize(("load_s", "swaps"), [(0.001, True), (100.0, False)])
async def test_auto_takes_what_costs_less(
    make_bench: MakeBench, events: Events, expected: Expected, load_s: float, swaps: bool
) -> None:
    bench = await make_bench(12)
    bench.cost.observe_compute(1000, 1.0)
    bench.cost.observe_load(Distance.CPU, 1 << 20, load_s)
    old, young = bench.submit(ONE, max_tokens=20), bench.submit(TWO, max_tokens=20)
    await bench.running(young)
    bench.step()
    bench.cost.observe_compute(100_000, 100.0)  # the simulated steps took no time
    await pressed(bench)
    await gone(bench)
    assert (counters(bench).swapped, counters(bench).recomputed) == ((1, 0) if swaps else (0, 1))
    await bench.finish(old, young)
    assert events(young) == (expected(TWO, 20), "length")


async def test_the_cost_of_a_swap_is_that_of_the_blocks_without_a_copy_below(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await make_bench(12)
    old, young = bench.submit(ONE, max_tokens=20), bench.submit(TWO, max_tokens=20)
    await bench.running(young)
    bench.step()
    await bench.quiet()
    assert await bench.cache.mover.bring(young.trie, young.rows[:2], bench.cache.tiers.shared) == 2
    await pressed(bench)
    blocks, asked = len(young.rows) - 2, []
    monkeypatch.setattr(bench.cost, "swap_pays", lambda *what: asked.append(what))
    await gone(bench)
    assert asked == [(blocks * young.trie.block_tokens, blocks * young.trie.part_bytes[0], Distance.CPU)]
    assert blocks > 0
    await bench.finish(old, young)


@pytest.mark.parametrize("why", ["no tier below", "no caching"])
async def test_what_cannot_be_swapped_is_computed_again(
    make_bench: MakeBench, events: Events, expected: Expected, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    bench = await make_bench(12, preemption="swap", caching=why != "no caching")
    if why == "no tier below":
        monkeypatch.setattr(bench.cache.tiers, "below", lambda tier: None)
    old, young = bench.submit(ONE, max_tokens=20), bench.submit(TWO, max_tokens=20)
    await bench.running(young)
    await pressed(bench)
    computed = young.chain.tokens - 1
    await bench.finish(old, young)
    assert (counters(bench).swapped, counters(bench).recomputed) == (0, 1)
    assert counters(bench).recomputed_tokens == computed
    assert events(young) == (expected(TWO, 20), "length")


async def test_what_finds_no_room_below_is_computed_again(
    make_bench: MakeBench, events: Events, expected: Expected
) -> None:
    """Two slots for six blocks: the frames are free all the same, or the other request would never end."""
    bench = await make_bench(12, cpu_slots=2, preemption="swap")
    old, young = bench.submit(ONE, max_tokens=28), bench.submit(TWO, max_tokens=28)
    await bench.finish(old, young)
    assert counters(bench).swapped == 1 and counters(bench).recomputed_tokens > 4
    for request, prompt in ((old, ONE), (young, TWO)):
        assert events(request) == (expected(prompt, 28), "length")


@pytest.mark.parametrize("mode", ["swap", "recompute"])
async def test_many_blocks_go_a_slice_at_a_time_leaves_first(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Blocks that go before their slice's turn, and leave their rows to others, are not touched."""
    monkeypatch.setattr(preemption, "_MOVED_AT_ONCE", 2)
    bench = await make_bench(12, preemption=mode)
    old, young = bench.submit(ONE, max_tokens=20), bench.submit(TWO, max_tokens=20)
    await bench.running(young)
    await pressed(bench)
    bench.engine.open.clear()
    blocks = len(young.rows)
    bench.answer_cancels()
    if mode == "swap":
        await until(lambda: bench.engine.waiting)
        trie, rows = young.trie, young.found[: blocks - 2]
        assert trie.held(young.found, GPU).tolist() == [False] * (blocks - 2) + [True] * 2
        assert await forget_blocks(bench.cache.mover, trie, rows[::-1].tolist()) == 0, "they have children"
        bench.engine.open.set()
    await gone(bench)
    assert where(bench, TWO) == ([[False, True]] * 4 if mode == "swap" else [])
    bench.engine.open.set()
    await bench.finish(old, young)


async def test_rows_that_others_got_meanwhile_are_left_alone(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two slices the blocks that are left are forgotten, and another prompt's blocks get their rows."""
    monkeypatch.setattr(preemption, "_MOVED_AT_ONCE", 2)
    bench = await make_bench(12, preemption="recompute")
    old, young = bench.submit(ONE, max_tokens=20), bench.submit(TWO, max_tokens=20)
    await bench.running(young)
    await pressed(bench)
    trie, left = young.trie, young.rows[:-2][::-1].tolist()

    async def others_come() -> None:
        monkeypatch.setattr(preemption, "give_way", give_way)
        assert await forget_blocks(bench.cache.mover, trie, left) == len(left)
        await bench.cached(THREE)
        rows = match_rows(trie, bench.namespace.root, bench.request(THREE).chain)
        assert {*left} & {*rows.tolist()}, "recycled"
        assert await bench.cache.mover.bring(trie, rows, bench.cache.tiers.compute) == len(rows)

    monkeypatch.setattr(preemption, "give_way", others_come)
    await gone(bench)
    assert where(bench, THREE) == [[True, True]] * 4
    await bench.finish(old, young)


async def test_nobody_else_gives_way_while_blocks_go_down(make_bench: MakeBench) -> None:
    bench = await make_bench(17, preemption="swap")
    requests = [bench.submit(prompt, max_tokens=20) for prompt in (ONE, TWO, THREE)]
    for request in requests:
        await bench.running(request)
    await pressed(bench)
    assert cancels(bench) == [requests[2].id]
    bench.engine.open.clear()
    bench.answer_cancels()
    await until(lambda: bench.engine.waiting)
    for _ in range(30):  # the frame of its last block is soon used up; `quiet` would wait for the copy
        bench.step()
        await asyncio.sleep(0)
    assert cancels(bench) == [] and [request.resumed for request in requests] == [0, 0, 1]
    bench.engine.open.set()
    await bench.finish(*requests)


async def test_a_copy_that_fails_leaves_the_blocks_to_eviction(
    make_bench: MakeBench, events: Events, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await make_bench(12, preemption="swap")
    send_down = bench.cache.mover.send_down

    async def fail(*arguments: object) -> int:
        monkeypatch.setattr(bench.cache.mover, "send_down", send_down)
        raise SwapError("the device is gone")

    monkeypatch.setattr(bench.cache.mover, "send_down", fail)
    old, young = bench.submit(ONE, max_tokens=20), bench.submit(TWO, max_tokens=20)
    await bench.finish(old, young)
    assert counters(bench).swapped >= 1
    for request, prompt in ((old, ONE), (young, TWO)):
        assert events(request) == (expected(prompt, 20), "length")


# -- when it runs again -----------------------------------------------------------------------------------------------


async def test_a_preempted_request_waits_until_a_run_has_ended_and_so_do_those_behind_it(make_bench: MakeBench) -> None:
    bench = await make_bench(12)
    old, young = bench.submit(ONE, max_tokens=30), bench.submit(TWO, max_tokens=30)
    await bench.running(young)
    await pressed(bench)
    behind = bench.submit([1], max_tokens=1)
    bench.sent.clear()
    del bench.runs[young.id]
    bench.dispatcher.on_done(Done(young.id, "cancelled"))
    while old.generated < 28:
        bench.step()
        await bench.quiet()
        assert starts(bench) == []
    await bench.finish(old, young, behind)
    assert {*starts(bench)} == {young.id, behind.id}
    assert young.resumed == 1


async def test_who_gave_way_first_does_not_start_in_the_frames_of_who_gave_way_next(make_bench: MakeBench) -> None:
    """It would be the first in the queue, and would soon have to give way once more."""
    bench = await make_bench(17)
    last = bench.request(THREE, max_tokens=40)  # it arrives first and is handed over last
    bench.now = 1.0
    others = [bench.submit(ONE, max_tokens=40), bench.submit(TWO, max_tokens=40)]
    for request in others:
        await bench.running(request)
    bench.dispatcher.submit(last)
    await bench.running(last)
    bench.sent.clear()
    while others[0].generated < 38:
        await gone(bench)
        bench.step()
        await bench.quiet()
    assert starts(bench) == []
    assert [request.resumed for request in (*others, last)] == [0, 1, 1]
    await bench.finish(*others, last)


@pytest.mark.parametrize(("frames", "planned", "fits"), [(16, None, True), (15, None, False), (16, 15, False)])
async def test_it_runs_again_at_once_when_there_are_frames_for_all_that_may_come(
    make_bench: MakeBench, frames: int, planned: int | None, fits: bool
) -> None:
    """Three lacked frames; the second is cancelled while the third gives way. The others come to 8 blocks each."""
    bench = await make_bench(frames)
    requests = [bench.submit(prompt, max_tokens=12, priority=k) for k, prompt in enumerate((ONE, TWO, THREE))]
    for request in requests:
        await bench.running(request)
    await pressed(bench)
    assert cancels(bench) == [requests[2].id]
    bench.dispatcher.cancel(requests[1])
    second, third = cancels(bench)[::-1]
    assert (second, third) == (requests[1].id, requests[2].id)
    del bench.runs[second]
    bench.dispatcher.on_done(Done(second, "cancelled"))
    bench.cache.tiers.frames.plan(planned)  # the tier is about to shrink to so many
    bench.sent = [message for message in bench.sent if not (isinstance(message, Cancel) and message.id == second)]
    await gone(bench)  # a run ended before it was put back, none since
    assert requests[0].most_blocks == requests[2].most_blocks == 8
    if fits:
        await bench.running(requests[2])
    else:
        assert bench.dispatcher.preemption.must_wait(requests[2])
        assert requests[2].id not in bench.runs
    assert requests[0].id in bench.runs
    await bench.finish(*requests)


async def test_it_runs_again_when_another_run_has_ended_though_not_all_may_fit(make_bench: MakeBench) -> None:
    bench = await make_bench(17)
    long, short = bench.submit(ONE, max_tokens=40), bench.submit(TWO, max_tokens=8)
    await bench.running(short)
    last = bench.submit(THREE, max_tokens=40)
    await bench.running(last)
    await pressed(bench)
    assert cancels(bench) == [last.id]
    await gone(bench)
    while short.id in bench.runs:
        assert last.id not in bench.runs
        bench.step()
        await bench.quiet()
    await bench.running(last)
    assert long.id in bench.runs and long.most_blocks + last.most_blocks > 17
    await bench.finish(long, last)


@pytest.mark.parametrize("mode", slow_but(["auto"], ["swap", "recompute", "auto"]))
@pytest.mark.parametrize("policy", slow_but(["relaxed-fpf"], ["fcfs", "fpf", "relaxed-fpf"]))
async def test_many_requests_in_a_tier_too_small_for_two_all_end(
    make_bench: MakeBench, events: Events, expected: Expected, mode: str, policy: str
) -> None:
    """Each fits alone and starts beside another one, but no two of them end side by side."""
    bench = await make_bench(13, cpu_slots=24, preemption=mode, policy=policy)
    rng = np.random.default_rng(5)
    requests = []
    for number in range(16):
        prompt = rng.integers(0, 1000, int(rng.integers(5, 18))).tolist()
        priority = int(rng.integers(0, 3))
        requests.append((prompt, bench.submit(prompt, max_tokens=50 - len(prompt), priority=priority)))
        bench.now = number
    await bench.finish(*(request for _, request in requests))
    for prompt, request in requests:
        assert events(request) == (expected(prompt, 50 - len(prompt)), "length")
    given_way = [request.resumed for _, request in requests]
    assert counters(bench).preempted == sum(given_way) > 0
    # All were there from the start, so nobody gives way twice before another one ends.
    assert max(given_way) <= len(requests)
    assert counters(bench).swapped + counters(bench).recomputed == counters(bench).preempted
    assert sum(given_way) <= 3 * len(requests), "most run to their end once they run"
