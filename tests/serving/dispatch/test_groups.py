"""Models with several KV groups: a request has of each group what its layers need, and no more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prefixd.cache.index.trie import CPU, GPU
from prefixd.serving.dispatch.block_recorder import StateCounters
from prefixd.serving.dispatch.options import StatePolicy
from prefixd.serving.request.request import Request
from prefixd.serving.request.states import RequestState
from prefixd.worker_protocol.protocol import Extend, Start
from prefixd_scheduler import Distance
from tests.serving.bench import Bench, Events, Expected, MakeBench
from tests.serving.fake_worker import BLOCK, MODELS
from tests.tries import match_rows

LONG = range(100, 181)  # 20 blocks and a token
K = MODELS["windows"].block_frames
FULL, WINDOW = slice(0, 1), slice(1, 3)


def start_of(bench: Bench, request: Request) -> Start:
    return next(message for message in bench.sent if isinstance(message, Start) and message.id == request.id)


def homes(start: Start, part: slice) -> list[list[int]]:
    blocks = [start.frames[at : at + K] for at in range(0, len(start.frames), K)]
    return [block[part] for block in blocks]


async def run(bench: Bench, tokens: Sequence[int], **options: int) -> Request:
    request = bench.submit(tokens, **options)
    await bench.finish(request)
    return request


async def test_a_window_gets_the_blocks_that_it_needs_and_no_others(make_bench: MakeBench) -> None:
    bench = await make_bench(K * 60, model="windows")
    await bench.cached(LONG)
    request = bench.submit(LONG)
    await bench.running(request)
    start = start_of(bench, request)
    assert start.cached_blocks == 20
    assert all(home >= 0 for (home,) in homes(start, FULL))
    assert [min(pair) >= 0 for pair in homes(start, WINDOW)] == [False] * 18 + [True] * 3
    trie = request.trie
    assert [trie.slots[row, GPU, 1] >= 0 for row in request.rows.tolist()] == [False] * 18 + [True] * 2, (
        "not brought up"
    )
    assert request.hit_tokens == [0, 20 * BLOCK, 0, 0]
    await bench.finish(request)


async def test_what_a_window_has_passed_is_free_for_others(
    make_bench: MakeBench, events: Events, expected: Expected
) -> None:
    """The prompt's window blocks alone are 42 frames: they are never there at once."""
    bench = await make_bench(MODELS["windows"].most_frames(21), cpu_slots=2, model="windows")
    assert bench.cache.tiers.frames.capacity < K * 21
    request = await run(bench, LONG, max_tokens=3)
    assert events(request) == (expected(LONG, 3), "length")
    start = start_of(bench, request)
    extends = [message for message in bench.sent if isinstance(message, Extend)]
    assert len(start.frames) < K * 21 and len(extends) > 1
    assert len(start.frames) + sum(len(message.frames) for message in extends) == K * 21


async def test_one_whose_windows_are_gone_is_computed_from_where_they_are(make_bench: MakeBench) -> None:
    bench = await make_bench(K * 40, model="windows")
    request = await run(bench, LONG, max_tokens=1)
    trie, rows = request.trie, request.found
    gone = bench.cache.placement.drop(
        trie, rows[17:], bench.cache.tiers.compute, trie.needed(20)[17:] & trie.partial_groups
    )
    assert gone > 0
    again = await run(bench, LONG, max_tokens=1)
    assert start_of(bench, again).cached_blocks == 18, "whose window is there"


async def test_a_fork_copies_nothing_that_a_window_may_have_passed(make_bench: MakeBench) -> None:
    bench = await make_bench(K * 80, model="windows")
    first, second = bench.submit(LONG, max_tokens=9), bench.submit(LONG, max_tokens=9)
    second.fork_of = first.id
    await bench.running(first)
    while second.id not in bench.runs:
        bench.step(first)
        await bench.quiet()
    assert start_of(bench, second).fork_of == -1
    await bench.finish(first, second)


# -- states -----------------------------------------------------------------------------------------------------------


def states(bench: Bench) -> StateCounters:
    return bench.dispatcher.recorder.states.counters


async def states_bench(make_bench: MakeBench, **options: object) -> Bench:
    return await make_bench(5 * 80, cpu_slots=5 * 80, model="states", **options)


async def test_the_same_prompt_resumes_from_the_state_at_its_end(
    make_bench: MakeBench, events: Events, expected: Expected
) -> None:
    bench = await states_bench(make_bench)
    first = await run(bench, LONG, max_tokens=2)
    kept = start_of(bench, first).state
    assert kept is not None and [each.blocks for each in kept.keep] == [20] and not kept.resume
    again = await run(bench, LONG, max_tokens=2)
    start = start_of(bench, again)
    assert start.cached_blocks == 20 and start.state is not None and len(start.state.resume) == 2
    assert events(again) == (expected(LONG, 2), "length")
    assert (states(bench).resumed, states(bench).resumed_tokens) == (1, 80)
    assert states(bench).kept == 1 and states(bench).kept_bytes == 2 * bench.cache.tiers.frames.frame_bytes, (
        "neither the tail, which is that state, nor the state once more"
    )


async def test_a_conversation_resumes_from_the_tail(make_bench: MakeBench, expected: Expected) -> None:
    bench = await states_bench(make_bench)
    await run(bench, LONG, max_tokens=8)
    longer = await run(bench, [*LONG, *expected(LONG, 8), 1, 2, 3])
    assert start_of(bench, longer).cached_blocks == 22, "the last token of the output is in no memory"


async def test_a_state_is_kept_where_prompts_part(make_bench: MakeBench) -> None:
    bench = await states_bench(make_bench)
    shared = list(LONG)[:42]
    for number, cached, kept in ((1, 0, [12]), (2, 0, [10, 12]), (3, 10, [12])):
        request = await run(bench, [*shared, *[number] * 8], max_tokens=1)
        start = start_of(bench, request)
        assert start.state is not None
        assert (start.cached_blocks, [each.blocks for each in start.state.keep]) == (cached, kept)


async def test_states_are_kept_every_so_many_tokens(make_bench: MakeBench) -> None:
    bench = await states_bench(make_bench, states=StatePolicy(per_prompt=3, every_tokens=16))
    start = start_of(bench, await run(bench, LONG[:75], max_tokens=1))
    assert start.state is not None and [each.blocks for each in start.state.keep] == [12, 16, 18]


async def test_who_shares_a_prompt_waits_for_its_state(make_bench: MakeBench) -> None:
    bench = await states_bench(make_bench)
    first, second = bench.submit(LONG, max_tokens=9), bench.submit(LONG, max_tokens=9)
    other = bench.submit([*list(LONG)[:42], *range(40)], max_tokens=9)
    await bench.running(first)
    await bench.running(other)
    assert second.state is RequestState.WAITING, "the other shares tokens, but no state to resume from"
    await bench.finish(first, second, other)
    assert start_of(bench, second).cached_blocks == 20


async def test_without_room_for_more_states_it_runs_all_the_same(
    make_bench: MakeBench, events: Events, expected: Expected
) -> None:
    bench = await make_bench(MODELS["states"].most_frames(21), cpu_slots=2, model="states")
    request = await run(bench, LONG, max_tokens=2)
    state = start_of(bench, request).state
    assert state is not None and not state.keep and not state.tail
    assert events(request) == (expected(LONG, 2), "length") and not states(bench).kept
    assert states(bench).without_room == 1


@pytest.mark.parametrize("mode", ["swap", "recompute"])
async def test_who_gave_way_resumes_from_his_tail(
    make_bench: MakeBench, events: Events, expected: Expected, mode: str
) -> None:
    bench = await make_bench(62, cpu_slots=300, model="states", preemption=mode, load="always")
    old, young = bench.submit(LONG[:33], max_tokens=60), bench.submit(range(300, 333), max_tokens=60)
    await bench.running(young)
    while len(bench.runs[young.id].tokens) < 33 + 12:
        bench.step(young)
        await bench.quiet()
    while {old.id, young.id} & {*bench.dispatcher.waiting, *bench.dispatcher.running}:
        bench.answer_cancels()
        bench.step()
        await bench.quiet()  # the older one gets its frames: else the younger one may end before it has to give way
    counters = bench.dispatcher.preemption.counters
    assert young.resumed and counters.preempted
    cached = [message.cached_blocks for message in bench.sent if isinstance(message, Start) and message.id == young.id]
    assert cached[0] == 0
    if mode == "swap":  # what is in no full block is computed again, and nothing else
        assert cached[-1] and counters.recomputed_tokens < BLOCK * counters.preempted
    else:
        assert cached[-1] <= 8
    for request, prompt in ((old, LONG[:33]), (young, range(300, 333))):
        assert events(request) == (expected(prompt, 60), "length")


async def test_blocks_and_states_go_down_and_come_up_with_what_they_have(make_bench: MakeBench) -> None:
    """Two prompts in turn through a tier that holds one of them."""
    bench = await make_bench(MODELS["states"].most_frames(21) + 8, cpu_slots=300, model="states")
    other = range(400, 481)
    for prompt in (LONG, other):
        await run(bench, prompt, max_tokens=1)
    again = await run(bench, LONG, max_tokens=1)
    assert start_of(bench, again).cached_blocks == 20
    trie = again.trie
    assert trie.there[again.found[-1], CPU] == trie.all_groups
    assert not (trie.there[again.found[5], CPU] & trie.part_mask[-1]), "most blocks have no state"


@pytest.mark.parametrize("per_prompt", [0, 4])
async def test_a_run_asks_for_blocks_alone_and_has_its_states_from_the_start(
    make_bench: MakeBench, per_prompt: int
) -> None:
    bench = await states_bench(make_bench, states=StatePolicy(per_prompt=per_prompt))
    request = bench.submit(range(9), max_tokens=8)
    await bench.running(request)
    assert request.run.blocks == 3 and request.most_blocks == 5
    assert request.growth_frames == 2 * bench.kv.block_frames
    await bench.finish(request)


async def test_looks_for_a_state_that_is_not_kept_do_not_walk_the_whole_document(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen requests wait for one document whose KV is there, and whose state is not."""
    bench = await states_bench(make_bench, states=StatePolicy(per_prompt=0), max_running=1)
    await run(bench, LONG, max_tokens=1)
    trie, asked = bench.cache.trie(bench.namespace), 0
    find_all = trie.find_all

    def counting(namespace: int, wanted: bytes) -> object:
        nonlocal asked
        asked += len(wanted) // 16
        return find_all(namespace, wanted)

    runs = bench.submit(range(500, 540), max_tokens=30)
    await bench.running(runs)
    waiting = [bench.submit([*LONG, number], max_tokens=1) for number in range(16)]
    await bench.quiet()
    monkeypatch.setattr(trie, "find_all", counting)
    for _ in range(20):
        bench.cache.placement.epoch += 1
        bench.step()
        await bench.quiet()
    assert all(request.id in bench.dispatcher.waiting and not len(request.rows) for request in waiting), asked
    assert asked <= 16, "each of them walks once at most"
    await bench.finish(runs, *waiting)


async def test_a_block_of_which_nothing_is_needed_and_nothing_left_is_no_load(make_bench: MakeBench) -> None:
    bench = await make_bench(K * 60, model="windows alone", policy="shortest-ready")
    await bench.cached(LONG)
    bench.cost.observe_compute(BLOCK, 1.0)
    bench.cost.observe_load(Distance.CPU, 1 << 20, 0.001)
    trie = bench.cache.trie(bench.namespace)
    request = bench.request(LONG)
    rows = match_rows(trie, bench.namespace.root, request.chain)[:10]
    assert trie.expired[rows].all()
    bench.cache.placement.drop(trie, rows, bench.cache.tiers.shared, trie.expired[rows])
    bench.dispatcher.submit(request)
    assert len(request.found) == 20 and request.queued.ready_s < 1.0
    await bench.finish(request)
    await run(bench, LONG)
    assert bench.dispatcher.loader.counters.decided == 1, "the second one found everything in the GPU tier"
