"""The dispatcher when all goes well: the order, the look-ahead and its budget, prefixes shared and recomputed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from prefixd.cache.index.trie import CPU, DISK, GPU
from prefixd.cache.placement.retention import Retention
from prefixd.serving.request.states import RequestState
from prefixd.worker_protocol.protocol import Expect, Start, Step, Update
from prefixd_scheduler import Distance, QueueFullError
from tests.serving.bench import Bench, Events, Expected, MakeBench
from tests.waiting import until

WAITING, STAGING, READY = RequestState.WAITING, RequestState.STAGING, RequestState.READY
COLD = range(100, 117)  # 4 blocks of 4 tokens, and one that has to be computed
WARM = range(200, 217)


def started(bench: Bench) -> list[int]:
    return [message.id for message in bench.sent if isinstance(message, Start)]


async def test_an_answer_from_end_to_end(make_bench: MakeBench, events: Events, expected: Expected) -> None:
    bench = await make_bench(16)
    request = bench.submit(COLD, max_tokens=11)
    run = await bench.running(request)
    assert (run.start.cached_blocks, len(run.start.frames)) == (0, 5)
    await bench.finish(request)
    assert events(request) == (expected(COLD, 11), "length")
    assert (bench.dispatcher.counters.finished, request.generated) == (1, 11)
    # 17 + 11 tokens, the last of them never computed: 6 full blocks, of which the prompt's 4 are asked for.
    again = bench.submit(COLD, max_tokens=1)
    assert (await bench.running(again)).start.cached_blocks == 4
    assert again.hit_tokens == [16, 0, 0, 0]
    await bench.finish(again)
    assert bench.cache.counters.hit_tokens == [16, 0, 0, 0]
    assert bench.cache.counters.asked_tokens == 34


async def test_what_a_request_finds_and_computes_of_its_prompt_is_retained(make_bench: MakeBench) -> None:
    bench = await make_bench(16)
    trie = bench.cache.trie(bench.namespace)
    await bench.cached(COLD[:9])  # two blocks
    request = bench.request(COLD, max_tokens=9)
    wishes = [Retention(0, 12, 7), Retention(12, 0, -2)]
    with await bench.cache.grant_retention(bench.namespace, request.chain, 4, 1, wishes) as wish:
        request.retention = wish
        bench.dispatcher.submit(request)
        await bench.finish(request)
    rows = trie.nodes(bench.namespace.root, request.chain)
    assert trie.priorities(rows, bench.now).tolist() == [7, 7, 7, -2, 0, 0], "the output's blocks have none"
    assert bench.cache.retained.claimed.total() == 0


async def test_a_step_brings_several_tokens_of_a_request_where_a_draft_proposed_them(make_bench: MakeBench) -> None:
    """What was proposed says nothing of how long a prompt takes to compute."""
    bench = await make_bench(16)
    request = bench.submit(range(100, 103), max_tokens=9)
    await bench.running(request)
    step = Step([Update(request.id, [7, 8, 9], 0)], 5, 0.5, proposed_tokens=4, accepted_tokens=2, read_at_once=1)
    for _ in range(2):
        bench.dispatcher.on_step(step)
    assert bench.cost.compute_s(100) is None
    assert (request.generated, request.run.computed_tokens) == (6, 8)
    dispatcher = bench.dispatcher
    counters = dispatcher.counters
    assert (counters.passes, counters.read_at_once) == (2, 2)
    assert (counters.proposed_tokens, counters.accepted_tokens) == (8, 4)
    bench.dispatcher.on_step(Step([Update(request.id, [1], 0)], 5, 0.5))
    assert bench.cost.compute_s(100) == pytest.approx(10.0)


async def test_a_crowd_that_lacks_one_prefix_has_it_computed_once_and_hides_nobody(make_bench: MakeBench) -> None:
    bench = await make_bench(64, max_running=2, look_ahead=2)
    crowd = [bench.submit([*COLD[:16], 300 + number], max_tokens=1) for number in range(40)]
    other = bench.submit(WARM, max_tokens=1)
    await bench.running(crowd[0])
    await bench.running(other)  # though forty came before it
    assert started(bench) == [crowd[0].id, other.id]
    bench.step(crowd[0])
    await bench.running(crowd[1])
    assert bench.runs[crowd[1].id].start.cached_blocks == 4
    for request in [*crowd, other]:
        await bench.finish(request)
    computed = [message.cached_blocks for message in bench.sent if isinstance(message, Start)]
    assert sorted(computed) == [0, 0] + [4] * 39


@pytest.mark.parametrize(
    ("policy", "cold_s", "warm_s", "now_s", "warm_first"),
    [
        ("fcfs", 1, 2, 10, False),
        ("fpf", 1, 2, 10, True),
        ("fpf", 1, 90, 100, True),
        ("relaxed-fpf", 1, 2, 10, True),  # (10 - 2) * 4 > (10 - 1) * 1
        ("relaxed-fpf", 1, 90, 100, False),  # (100 - 90) * 4 < (100 - 1) * 1
    ],
)
async def test_policies_decide_who_is_next(
    make_bench: MakeBench, policy: str, cold_s: float, warm_s: float, now_s: float, warm_first: bool
) -> None:
    bench = await make_bench(32, policy=policy, max_running=1)
    before = bench.submit(WARM, max_tokens=1)
    await bench.running(before)
    await bench.finish(before)
    busy = bench.submit(range(5), max_tokens=3)
    await bench.running(busy)
    bench.now = cold_s
    cold = bench.submit(COLD)
    bench.now = warm_s
    warm = bench.submit(WARM)
    assert (cold.queued.weight, warm.queued.weight) == (1.0, 4.0)
    bench.now = now_s
    await bench.finish(busy, cold, warm)
    order = [warm.id, cold.id] if warm_first else [cold.id, warm.id]
    assert started(bench)[2:] == order


async def test_a_lower_priority_number_goes_first(make_bench: MakeBench) -> None:
    bench = await make_bench(32, max_running=1)
    busy = bench.submit(range(5))
    await bench.running(busy)
    later, urgent = bench.submit(COLD, priority=5), bench.submit(WARM, priority=-5)
    await bench.finish(busy, later, urgent)
    assert started(bench) == [busy.id, urgent.id, later.id]


async def test_the_look_ahead_brings_up_what_there_are_frames_for(make_bench: MakeBench) -> None:
    bench = await make_bench(16, max_running=1)
    prompts = [range(1000 * k, 1000 * k + 17) for k in range(1, 5)]
    for prompt in prompts:
        await bench.cached(prompt)
    busy = bench.submit(range(13))  # 4 of the 16 frames
    await bench.running(busy)
    waiting = [bench.submit(prompt) for prompt in prompts]
    await bench.quiet()
    # 4 frames for a prefix and one for what is computed: twelve frames are enough for two.
    assert [request.state for request in waiting] == [READY, READY, WAITING, WAITING]
    trie = bench.cache.trie(bench.namespace)
    for request, up in zip(waiting, (True, True, False, False), strict=True):
        assert all(trie.has(row, GPU) for row in request.rows) is up
        assert (trie.holds[request.rows, GPU] == int(up)).all()
    assert [request.queued.weight for request in waiting] == [3.0] * 4
    await bench.finish(busy, *waiting)
    assert [request.hit_tokens for request in waiting] == [[0, 16, 0, 0]] * 4


async def test_a_worker_that_maps_ahead_is_told_once_what_the_next_request_will_want(make_bench: MakeBench) -> None:
    bench = await make_bench(32, max_running=1)
    bench.kv = replace(bench.kv, mapped_ahead=True)
    await bench.cached(WARM)
    busy = bench.submit(range(5), max_tokens=4)
    await bench.running(busy)
    waiting = bench.submit(WARM)
    await until(lambda: waiting.state is READY)
    for _ in range(2):
        await bench.quiet()
        bench.step()
    told = [message.frames for message in bench.sent if isinstance(message, Expect)]
    await bench.finish(busy, waiting)
    starts = {message.id: message.frames for message in bench.sent if isinstance(message, Start)}
    assert told == [starts[waiting.id][:4]]


async def test_who_leaves_the_window_loses_its_hold_but_not_its_blocks(make_bench: MakeBench) -> None:
    bench = await make_bench(32, max_running=1, look_ahead=1)
    await bench.cached(WARM)
    busy = bench.submit(range(5))
    await bench.running(busy)
    staged = bench.submit(WARM)
    await until(lambda: staged.state is READY)
    urgent = bench.submit(COLD, priority=-1)
    await until(lambda: staged.state is WAITING)
    trie = bench.cache.trie(bench.namespace)
    rows = staged.rows
    assert len(rows) == 4
    assert not trie.holds[rows, GPU].any()
    assert (trie.nearest[rows] == GPU).all()
    await bench.finish(busy, urgent, staged)
    assert staged.hit_tokens == [0, 16, 0, 0], "where they were when it arrived"


async def test_a_request_uses_its_prefix_once_however_often_it_is_staged(make_bench: MakeBench) -> None:
    bench = await make_bench(32, max_running=1, look_ahead=1)
    await bench.cached(WARM)
    await bench.running(bench.submit(range(5), max_tokens=3))

    async def waits() -> set[int]:
        bench.now += 10.0
        request = bench.submit(WARM)
        await until(lambda: request.state is READY)
        for _ in range(3):
            bench.now += 5.0
            urgent = bench.submit(range(1000, 1005), priority=-1)
            await until(lambda: request.state is WAITING)
            bench.dispatcher.cancel(urgent)
            await until(lambda: request.state is READY)
        uses = set(request.trie.uses[request.rows].tolist())
        assert set(request.trie.last_used[request.rows].tolist()) == {bench.now}
        bench.dispatcher.cancel(request)
        return uses

    assert [await waits(), await waits()] == [{1}, {2}]


async def test_a_copy_under_way_keeps_its_frames_when_its_request_leaves_the_window(make_bench: MakeBench) -> None:
    bench = await make_bench(6, max_running=1, look_ahead=0)
    await bench.cached(WARM)
    await bench.cached(COLD)
    bench.engine.open.clear()
    slow = bench.submit(WARM, priority=1)
    await until(lambda: bench.engine.waiting)
    urgent = bench.submit(COLD, priority=0)
    for _ in range(20):  # the dispatcher looks; `quiet` would wait for the copy
        await asyncio.sleep(0)
    assert (slow.state, urgent.state) == (STAGING, WAITING), "there are two frames left, and it needs five"
    bench.engine.open.set()
    run = await bench.running(urgent)
    assert (run.start.cached_blocks, urgent.setbacks) == (4, 0)
    await bench.finish(slow, urgent)
    assert slow.setbacks == 0


async def test_no_look_ahead_stages_nothing_ahead(make_bench: MakeBench) -> None:
    bench = await make_bench(32, max_running=1, look_ahead=0)
    await bench.cached(WARM)
    busy = bench.submit(range(5))
    await bench.running(busy)
    waiting = bench.submit(WARM)
    await bench.quiet()
    assert waiting.state is WAITING
    await bench.finish(busy, waiting)
    assert waiting.hit_tokens == [0, 16, 0, 0]


async def test_what_another_computes_is_waited_for(make_bench: MakeBench, events: Events, expected: Expected) -> None:
    bench = await make_bench(32)
    first = bench.submit(COLD)
    await bench.running(first)
    same, longer, other = bench.submit(COLD), bench.submit([*COLD[:8], *WARM]), bench.submit(WARM)
    await bench.running(other)
    await bench.quiet()
    assert started(bench) == [first.id, other.id]
    bench.step()  # the prompts' blocks are there
    await bench.running(longer)
    assert [(await bench.running(request)).start.cached_blocks for request in (same, longer)] == [4, 2]
    await bench.finish(first, same, longer, other)
    assert events(same) == (expected(COLD, 2), "length")
    assert [request.hit_tokens for request in (same, longer)] == [[16, 0, 0, 0], [8, 0, 0, 0]]


async def test_frames_of_a_shared_prefix_are_counted_once(make_bench: MakeBench) -> None:
    """8 shared blocks and 2 of its own each: 4 requests run in 16 frames, which hold one and a half of them alone."""
    bench = await make_bench(16)
    shared = list(range(32))
    first = bench.submit([*shared, 1], max_tokens=1)
    await bench.running(first)
    await bench.finish(first)
    requests = []
    for k in range(4):  # the later ones come when the earlier ones run already
        requests.append(bench.submit([*shared, 50 + k, 51, 52, 53, 54]))
        assert (await bench.running(requests[-1])).start.cached_blocks == 8
    assert len(bench.runs) == 4
    await bench.finish(*requests)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("tier", [CPU, DISK])
async def test_a_prefix_that_is_slower_to_load_is_computed(
    make_bench: MakeBench, events: Events, expected: Expected, recompute: bool, tier: int
) -> None:
    bench = await make_bench(16, disk=True, load="auto" if recompute else "always")
    await bench.cached(WARM)
    if tier == DISK:
        trie = bench.cache.trie(bench.namespace)
        await bench.cache.write_back.flush()
        slots = await bench.cache.mover.slots.allocate(bench.cache.tiers.shared, trie.part_bytes, 64)  # all of the tier
        for taken in slots:
            bench.cache.tiers.shared.free(taken)
    bench.cost.observe_compute(10_000, 0.001)
    bench.cost.observe_load(Distance(tier), 4096, 10.0)
    request = bench.submit(WARM)
    assert request.queued.weight == Distance(tier).weight
    run = await bench.running(request)
    found = [0, 0, 0, 0]
    found[tier] = 0 if recompute else 16
    assert run.start.cached_blocks == (0 if recompute else 4)
    assert request.hit_tokens == found
    await bench.finish(request)
    assert events(request) == (expected(WARM, 2), "length")


async def test_without_caching_nothing_is_found_or_kept(make_bench: MakeBench) -> None:
    bench = await make_bench(16, caching=False)
    await bench.cached(WARM)
    requests = [bench.submit(WARM), bench.submit(WARM)]
    for request in requests:
        assert (await bench.running(request)).start.cached_blocks == 0
    await bench.finish(*requests)
    assert bench.cache.tiers.frames.free_count == 16
    assert bench.cache.counters.hit_tokens == [0, 0, 0, 0]


async def test_the_queue_has_a_limit_that_interrupted_requests_do_not_count_for(make_bench: MakeBench) -> None:
    bench = await make_bench(16, max_running=1, queue_limit=2)
    busy = bench.submit(range(5))
    await bench.running(busy)
    waiting = [bench.submit(COLD), bench.submit(WARM)]
    refused = bench.request(range(9))
    with pytest.raises(QueueFullError, match="2"):
        bench.dispatcher.submit(refused)
    assert refused.id not in bench.dispatcher.waiting
    bench.die()
    assert len(bench.dispatcher.queue) == 3
    bench.dispatcher.queue.check_integrity()
    bench.dispatcher.on_ready()
    await bench.finish(busy, *waiting)


@pytest.mark.slow
async def test_many_requests_in_little_memory(make_bench: MakeBench, events: Events, expected: Expected) -> None:
    """A hundred prompts with shared beginnings through 24 frames, 16 slots and a disk: all of it right."""
    bench = await make_bench(24, cpu_slots=16, disk=True, policy="relaxed-fpf")
    rng = np.random.default_rng(11)
    trunks = [rng.integers(0, 1000, 24).tolist() for _ in range(6)]
    requests = []
    for number in range(100):
        trunk = trunks[rng.integers(6)]
        prompt = [*trunk[: int(rng.integers(1, 25))], *rng.integers(0, 1000, int(rng.integers(1, 9))).tolist()]
        requests.append((prompt, int(rng.integers(1, 20)), None))
        bench.now = number
        requests[-1] = (prompt, requests[-1][1], bench.submit(prompt, max_tokens=requests[-1][1]))
        if number % 3 == 0:
            bench.step()
            await bench.quiet()
    await bench.finish(*(request for _, _, request in requests))
    for prompt, count, request in requests:
        assert events(request) == (expected(prompt, count), "length")
    assert bench.cache.tiers.counters[bench.cache.tiers.compute.level].evicted > 0
    assert sum(bench.cache.counters.hit_tokens) > 0


async def test_the_time_between_tokens_is_measured_once_a_step_and_not_for_first_tokens(make_bench: MakeBench) -> None:
    bench = await make_bench(32)
    between_s = bench.cache.measurements.timings.between_tokens_s
    first, second = bench.submit(COLD, max_tokens=6), bench.submit(COLD[:9], max_tokens=3)
    await bench.finish(first)
    await bench.finish(second)
    assert sum(between_s.counts) == 5 + 2
    await bench.finish(bench.submit(COLD[:5], max_tokens=1))
    assert sum(between_s.counts) == 5 + 2
