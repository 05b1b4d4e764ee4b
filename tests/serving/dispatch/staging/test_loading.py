"""A cached prefix is loaded, computed again, or both at once; a load that falls behind is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from prefixd.cache.moving import mover
from prefixd.cache.placement.retention import Retention
from prefixd.serving.loading import piece_load, tail_load
from prefixd.serving.request.states import RequestState
from prefixd.worker_protocol.protocol import Arrived, Cancel, Extend, Start
from prefixd_scheduler import Distance
from prefixd_swap.transfers import Urgency
from tests.serving.bench import Bench, Expected, MakeBench
from tests.serving.fake_worker import BLOCK, GEOMETRY
from tests.tries import forget_blocks, match_rows
from tests.waiting import until

BLOCKS = 16
PROMPT = [*range(100, 100 + BLOCKS * BLOCK), 7]


@pytest.fixture(autouse=True)
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(piece_load, "_PIECE_S", 1e-9)
        patch.setattr(tail_load, "_LEAST_TOKENS", BLOCK)
        yield


def pace(bench: Bench, *, block_s: float, token_s: float = 1.0, latency_s: float = 0.0) -> None:
    """What loading a block, and computing a token, has taken so far."""
    for blocks in (1, 4, 16):
        for distance in (Distance.CPU, Distance.DISK):
            bench.cost.observe_load(distance, blocks * GEOMETRY.block_bytes, latency_s + blocks * block_s)
        bench.cost.observe_compute(blocks * BLOCK, blocks * BLOCK * token_s)


async def begun(bench: Bench, **options: Any) -> Any:
    """The prompt's request, running, with nothing arrived yet."""
    await bench.cached(PROMPT)
    pace(bench, block_s=float(BLOCK))
    bench.engine.open.clear()
    request = bench.submit(PROMPT, **{"max_tokens": 3, **options})
    await bench.running(request)
    await until(lambda: bench.engine.waiting)
    return request


async def test_the_front_is_computed_while_the_back_is_loaded(
    make_bench: MakeBench, expected: Expected, events: Any
) -> None:
    bench = await make_bench(24)
    request = await begun(bench)
    trie = bench.cache.trie(bench.namespace)
    wish = request.retention = await bench.cache.grant_retention(
        bench.namespace, request.chain, BLOCKS, 1, [Retention(priority=5)]
    )
    start = next(message for message in bench.sent if isinstance(message, Start))
    assert (start.cached_blocks, len(start.frames)) == (0, 2)
    bench.step()
    await until(lambda: any(isinstance(message, Extend) for message in bench.sent))
    bench.engine.open.set()
    await bench.quiet()
    await bench.finish(request)
    arrived = next(message for message in bench.sent if isinstance(message, Arrived))
    assert 2 < arrived.first < BLOCKS
    assert arrived.first + len(arrived.frames) == BLOCKS
    assert events(request) == (expected(PROMPT, 3), "length")
    assert request.hit_tokens == [0, len(arrived.frames) * BLOCK, 0, 0]
    assert bench.cache.counters.hit_tokens == request.hit_tokens
    counters = bench.dispatcher.loader.counters
    assert (counters.decided, counters.beside, counters.abandoned, counters.regret.judged) == (1, 1, 0, 1)
    rows = trie.nodes(bench.namespace.root, request.chain)
    assert trie.priorities(rows, bench.now).tolist() == [5] * BLOCKS, "both halves are retained"
    wish.end()


@pytest.mark.parametrize("steps", range(0, 12, 3))
async def test_what_moves_when_the_request_ends_is_let_go(make_bench: MakeBench, steps: int) -> None:
    bench = await make_bench(24)
    request = await begun(bench)
    for _ in range(steps):
        bench.step()
        await until(lambda: request.state is RequestState.RUNNING)
    bench.dispatcher.cancel(request)
    bench.answer_cancels()
    assert request.state is RequestState.ENDED
    bench.engine.open.set()
    await bench.quiet()
    assert bench.dispatcher.context.budget.taken == 0


async def test_the_worker_dies_in_the_middle(make_bench: MakeBench, expected: Expected, events: Any) -> None:
    bench = await make_bench(24)
    request = await begun(bench)
    bench.step()
    bench.die()
    bench.engine.open.set()
    bench.dispatcher.on_ready()
    await bench.finish(request)
    assert events(request) == (expected(PROMPT, 3), "length")


async def test_frames_are_short(make_bench: MakeBench, expected: Expected, events: Any) -> None:
    """Two requests of which one alone fits: they load beside computing, and one gives way."""
    bench = await make_bench(BLOCKS + 4)
    request = await begun(bench)
    other = bench.submit([*range(500, 500 + 3 * BLOCK), 8], max_tokens=3)
    await bench.quiet_but_for_copies()
    bench.step()
    bench.engine.open.set()
    await bench.finish(request, other)
    assert events(request) == (expected(PROMPT, 3), "length")
    assert events(other)[1] == "length"
    assert not any(isinstance(message, Cancel) and message.id == request.id for message in bench.sent)


async def test_a_load_that_hangs_is_given_up_and_its_back_computed(
    make_bench: MakeBench, expected: Expected, events: Any
) -> None:
    """The run computes up to what moves, waits as long as the load may be late, and computes the rest."""
    bench = await make_bench(2 * BLOCKS + 4)
    request = await begun(bench)
    tail = request.tail
    for _ in range(BLOCKS):
        if request.run.computed_tokens >= tail.limit * BLOCK:
            break
        bench.step()
        await bench.quiet_but_for_copies()
    assert 0 < tail.limit < BLOCKS
    bench.now += 1000.0
    bench.dispatcher.wake()
    await bench.finish(request)
    assert events(request) == (expected(PROMPT, 3), "length")
    assert not any(isinstance(message, Arrived) for message in bench.sent)
    assert bench.dispatcher.loader.counters.abandoned == 1
    bench.engine.open.set()
    await bench.quiet()


async def test_what_was_given_up_would_have_taken_longer(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short loads have shown a latency only. If the first long one counted as what it had taken when it was given up,
    the next one would be given up as well."""
    monkeypatch.setattr(piece_load, "_PIECE_S", 1e9)  # in one piece
    bench = await make_bench(2 * BLOCKS + 4)
    await bench.cached(PROMPT)
    for blocks in (1, 2):
        bench.cost.observe_load(Distance.CPU, blocks * GEOMETRY.block_bytes, 0.1)
        bench.cost.observe_compute(blocks * BLOCK, blocks * 0.1)
    bench.engine.open.clear()
    request = bench.submit(PROMPT, max_tokens=1)
    await until(lambda: bench.engine.waiting)
    assert request.state is RequestState.STAGING
    bench.now += (waited_s := 0.3)
    await bench.running(request)
    assert bench.dispatcher.loader.counters.abandoned == 1
    estimate_s = bench.cost.load_s(BLOCKS * GEOMETRY.block_bytes, Distance.CPU)
    assert estimate_s is not None and estimate_s > 1.5 * waited_s
    await bench.finish(request)
    bench.engine.open.set()
    await bench.quiet()


@pytest.mark.parametrize("pieces", range(0, 16, 5))
@pytest.mark.slow
async def test_a_load_from_the_front_is_given_up_and_what_came_is_used(
    make_bench: MakeBench, expected: Expected, events: Any, pieces: int
) -> None:
    bench = await make_bench(2 * BLOCKS + 4)
    await bench.cached(PROMPT)
    pace(bench, block_s=0.1)
    bench.engine.pass_on = pieces
    bench.engine.open.clear()
    request = bench.submit(PROMPT, max_tokens=3)
    await until(lambda: bench.engine.waiting)
    assert request.state is RequestState.STAGING
    loader = bench.dispatcher.loader
    await until(lambda: loader._loads[request.id].arrived == pieces)
    bench.now += 1000.0
    run = await bench.running(request)
    assert run.start.cached_blocks == pieces
    assert loader.counters.abandoned == 1
    await bench.finish(request)
    assert events(request) == (expected(PROMPT, 3), "length")
    bench.engine.open.set()
    await bench.quiet()


@pytest.mark.parametrize(("compute_s", "left_s"), [(0.1, 0.1 + 0.05), (10.0, 0.1 + 1.0)])
async def test_a_piece_may_be_late_by_half_of_its_time_or_by_a_tenth_of_computing_the_rest(
    make_bench: MakeBench, compute_s: float, left_s: float
) -> None:
    bench = await make_bench(2 * BLOCKS + 4)
    await bench.cached(PROMPT)
    pace(bench, block_s=0.1)
    bench.engine.open.clear()
    request = bench.submit(PROMPT, max_tokens=3)
    await until(lambda: bench.engine.waiting)
    load = bench.dispatcher.loader._loads[request.id]
    assert load.behind_in_s(compute_s) == pytest.approx(left_s)
    bench.engine.open.set()
    await bench.finish(request)


async def test_a_damaged_block_in_the_middle_ends_the_load_before_it(make_bench: MakeBench) -> None:
    bench = await make_bench(24)
    request = await begun(bench)
    tail = request.tail
    tail._load.failed = True  # as when a piece came in part
    bench.dispatcher.wake()
    await until(lambda: request.tail is None or tail.limit == tail.end_block)
    bench.engine.open.set()
    await bench.finish(request)
    assert request.state is RequestState.ENDED


@pytest.mark.parametrize(("mode", "cached"), [("always", BLOCKS), ("never", 0)])
async def test_the_setting_decides(make_bench: MakeBench, mode: str, cached: int) -> None:
    bench = await make_bench(24, load=mode)
    await bench.cached(PROMPT)
    pace(bench, block_s=float(BLOCK))
    run = await bench.running(bench.submit(PROMPT))
    assert run.start.cached_blocks == cached


async def test_what_is_to_be_loaded_stays_in_the_trie_until_the_request_runs(
    make_bench: MakeBench, expected: Expected, events: Any
) -> None:
    """Somebody drops the blocks while it waits for a place."""
    bench = await make_bench(24)
    await bench.cached(PROMPT)
    pace(bench, block_s=float(BLOCK))
    request = bench.submit(PROMPT, max_tokens=3)
    while request.state is not RequestState.READY:
        await asyncio.sleep(0)
    assert request.beside is not None
    trie = bench.cache.trie(bench.namespace)
    await forget_blocks(bench.cache.mover, trie, match_rows(trie, bench.namespace.root, request.chain)[::-1].tolist())
    await bench.finish(request)
    assert events(request) == (expected(PROMPT, 3), "length")


@pytest.mark.parametrize("requests", [1, 4, 8])
async def test_a_movement_that_several_wait_for_is_learned_once(make_bench: MakeBench, requests: int) -> None:
    bench = await make_bench(64, load="always", max_running=8)
    await bench.cached(PROMPT)
    bench.engine.open.clear()
    for number in range(requests):
        bench.submit([*PROMPT[:-1], 50 + number], max_tokens=1)
    await bench.quiet_but_for_copies()
    assert len(bench.dispatcher.loader._loads) == requests
    assert bench.dispatcher.loader._queued_bytes() == BLOCKS * GEOMETRY.block_bytes
    bench.now += 16.0
    bench.engine.open.set()
    await bench.quiet()
    assert bench.cost.load_s(BLOCKS * GEOMETRY.block_bytes, Distance.CPU) == pytest.approx(16.0, rel=0.01)
    assert not bench.dispatcher.loader.claims._claimed


async def test_a_load_whose_request_was_cancelled_teaches_nothing(make_bench: MakeBench) -> None:
    bench = await make_bench(24)
    before: float | None = None
    for number in range(4):
        prompt = [*range(1000 * number + 100, 1000 * number + 100 + BLOCKS * BLOCK), 7]
        await bench.cached(prompt)
        if before is None:
            pace(bench, block_s=float(BLOCK))
            before = bench.cost.load_s(BLOCKS * GEOMETRY.block_bytes, Distance.CPU)
        bench.engine.open.clear()
        request = bench.submit(prompt, max_tokens=3)
        await until(lambda: bench.engine.waiting)
        bench.now += 0.001
        bench.dispatcher.cancel(request)
        bench.answer_cancels()
        bench.engine.open.set()
        await bench.quiet()
    assert bench.cost.load_s(BLOCKS * GEOMETRY.block_bytes, Distance.CPU) == before
    assert not bench.dispatcher.loader.claims._claimed


async def test_what_a_request_that_was_interrupted_loads_beside_is_no_second_hit(make_bench: MakeBench) -> None:
    bench = await make_bench(24)
    request = await begun(bench)
    bench.step()
    await until(lambda: any(isinstance(message, Extend) for message in bench.sent))
    bench.engine.open.set()
    await until(lambda: any(isinstance(message, Arrived) for message in bench.sent))
    hits = list(bench.cache.counters.hit_tokens)
    bench.die()
    trie = bench.cache.trie(bench.namespace)
    tier = bench.cache.tiers.compute
    await until(lambda: request.state is not RequestState.RUNNING)
    rows = match_rows(trie, bench.namespace.root, request.chain)[::-1]
    bench.cache.placement.drop(trie, rows, tier)
    for _ in range(5):
        pace(bench, block_s=float(BLOCK))
    bench.engine.open.clear()
    bench.dispatcher.on_ready()
    await bench.running(request)
    assert request.tail is not None, "a part is loaded beside it again"
    await until(lambda: bench.engine.waiting)
    bench.engine.open.set()
    await bench.quiet()
    await bench.finish(request)
    assert sum(isinstance(message, Arrived) for message in bench.sent) == 2
    assert bench.cache.counters.hit_tokens == hits == request.hit_tokens
    assert sum(hits) <= bench.cache.counters.asked_tokens


async def test_what_a_run_that_records_nothing_has_passed_over_is_held_to_its_end(make_bench: MakeBench) -> None:
    bench = await make_bench(24)
    request = await begun(bench, max_tokens=9, read_only=True)
    bench.step()
    await until(lambda: any(isinstance(message, Extend) for message in bench.sent))
    bench.engine.open.set()
    while not request.generated:
        await bench.quiet()
        bench.step()
    (arrived,) = (message for message in bench.sent if isinstance(message, Arrived))
    trie = bench.cache.trie(bench.namespace)
    passed = match_rows(trie, bench.namespace.root, request.chain)[arrived.first :]
    assert len(passed) and trie.held(passed, bench.cache.tiers.compute.level).all()
    await bench.finish(request)


async def test_a_tier_from_which_nothing_was_loaded_yet_is_not_far_away(make_bench: MakeBench) -> None:
    bench = await make_bench(64, policy="shortest-ready", max_running=1, look_ahead=0)
    await bench.cached(PROMPT)
    bench.cost.observe_compute(64, 64.0)
    await bench.running(bench.submit(range(5), max_tokens=3))
    cold = bench.submit(range(1000, 1000 + len(PROMPT)))
    cached = bench.submit(PROMPT)
    assert cached.queued.ready_s < cold.queued.ready_s
    assert [queued.id for queued in bench.dispatcher.queue.window(2, bench.now)] == [cached.id, cold.id]
    await bench.finish(cached, cold)


async def test_a_load_that_somebody_waits_for_stays_urgent_to_its_end(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One piece of 16 blocks, which move two at a time."""
    monkeypatch.setattr(piece_load, "_PIECES", 1)
    monkeypatch.setattr(mover, "COPIED_AT_ONCE", 2)
    bench = await make_bench(64, max_running=1, load="always")
    await bench.cached(PROMPT)
    busy = bench.submit(range(5), max_tokens=3)
    await bench.running(busy)
    bench.engine.open.clear()
    request = bench.submit(PROMPT)
    await until(lambda: bench.engine.waiting)
    bench.dispatcher.cancel(busy)
    bench.answer_cancels()
    urgencies: set[Urgency] = set()
    while request.id not in bench.runs:
        await bench.quiet_but_for_copies()
        urgencies |= {movement.urgency for movement in bench.cache.mover._moving.values()}
        bench.engine.open.set()
        await asyncio.sleep(0)
        bench.engine.open.clear()
    bench.engine.open.set()
    assert urgencies == {Urgency.DEMAND}
    await bench.finish(request)
