"""A prefix comes layer by layer: the request runs while later layers are on their way."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from prefixd.cache import check_integrity
from prefixd.cache.index.trie import GPU, Rows
from prefixd.serving.dispatch import hand_over
from prefixd.serving.dispatch.staging import load_planner
from prefixd.serving.request.request import Request
from prefixd.serving.request.states import RequestState
from prefixd.worker_protocol.protocol import Cancel, Layers, Start
from prefixd_scheduler import Distance
from prefixd_swap import DeviceError, FrameId
from tests.serving.bench import Bench, Events, Expected, MakeBench
from tests.serving.fake_worker import BLOCK, LAYERS, contents, span_bytes
from tests.waiting import WAIT_S, until

BLOCKS = 6
PROMPT = [*range(100, 100 + BLOCKS * BLOCK), 7, 8, 9]
S = RequestState


def told(bench: Bench, request: Request) -> list[int]:
    """The numbers of layers that the worker was told of."""
    return [message.layers for message in bench.sent if isinstance(message, Layers) and message.id == request.id]


def starts(bench: Bench, request: Request) -> list[bool]:
    """Of each of its runs, whether layers were on their way when it began."""
    return [message.loading for message in bench.sent if isinstance(message, Start) and message.id == request.id]


def rows_of(bench: Bench) -> Rows:
    trie = bench.cache.trie(bench.namespace)
    return np.array(trie.nodes(bench.namespace.root, bench.request(PROMPT).chain, BLOCKS))


async def begun(make_bench: MakeBench, slabs: int = 1, **options: Any) -> tuple[Bench, Request]:
    """A bench, and the prompt's request in a run to which so many slabs of its prefix have come."""
    bench: Bench = await make_bench(16, model="layers", layerwise="always", **options)
    await bench.cached(PROMPT)
    bench.engine.open.clear()
    bench.engine.pass_on = slabs
    request = bench.submit(PROMPT, max_tokens=3)
    await bench.running(request)
    await until(lambda: max(told(bench, request), default=0) == slabs and bench.engine.waiting)
    return bench, request


async def test_the_run_begins_before_the_last_layers_have_come(
    make_bench: MakeBench, events: Events, expected: Expected
) -> None:
    bench, request = await begun(make_bench)
    trie, rows = bench.cache.trie(bench.namespace), rows_of(bench)
    assert (starts(bench, request), told(bench, request)) == ([True], [1])
    assert request.state is S.RUNNING and not trie.there[rows, GPU].any(), "nobody else finds them"
    check_integrity(bench.cache)
    bench.engine.open.set()
    await until(lambda: told(bench, request)[-1] == LAYERS)
    assert trie.there[rows, GPU].all() and told(bench, request) == sorted(set(told(bench, request)))
    frames = bench.runs[request.id].frames
    assert trie.slots[rows, GPU, 0].tolist() == frames[:BLOCKS]
    await bench.finish(request)
    assert events(request) == (expected(PROMPT, 3), "length")
    assert request.hit_tokens == [0, BLOCKS * BLOCK, 0, 0]
    assert bench.dispatcher.counters.layerwise_loads == 1
    check_integrity(bench.cache)
    again = bench.submit(PROMPT, max_tokens=3)
    await bench.finish(again)
    assert (starts(bench, again), events(again)) == ([False], (expected(PROMPT, 3), "length"))


async def test_a_pass_that_waits_says_nothing_of_computing(make_bench: MakeBench) -> None:
    bench, request = await begun(make_bench)
    bench.token_s = 1.0
    bench.engine.open.set()
    await until(lambda: not bench.runs[request.id].loading)
    bench.step()
    assert bench.cost.compute_s(100) is None
    other = bench.submit([*range(500, 520)], max_tokens=2)
    await bench.running(other)
    bench.step()
    assert bench.cost.compute_s(100) is not None
    assert bench.cost.load_s(1 << 20, Distance.CPU) is not None, "the load was observed"
    await bench.finish(request, other)


@pytest.mark.parametrize("slabs", [0, 1, 3])
async def test_a_copy_fails_in_the_middle(
    make_bench: MakeBench, events: Events, expected: Expected, slabs: int
) -> None:
    """The worker lets go of the frames before anybody else gets them, and the request runs again."""
    bench, request = await begun(make_bench, slabs)
    frames = bench.runs[request.id].frames[:BLOCKS]
    bench.engine.error = DeviceError("the copy failed, as the test says")
    bench.engine.open.set()
    await until(lambda: request.state is S.PREEMPTING)
    bench.engine.error = None
    await bench.quiet()
    assert any(isinstance(message, Cancel) and message.id == request.id for message in bench.sent)
    assert set(frames) <= bench.cache.tiers.compute.in_flight.keys() & request.footprint.own
    assert max(told(bench, request), default=0) == slabs
    check_integrity(bench.cache)
    await bench.finish(request)
    assert starts(bench, request) == [True, False]
    assert events(request) == (expected(PROMPT, 3), "length")
    assert bench.dispatcher.preemption.counters.preempted == 0
    await bench.quiet()
    check_integrity(bench.cache)
    assert bench.dispatcher.context.budget.taken == 0


async def test_a_copy_fails_while_the_run_is_about_to_begin(
    make_bench: MakeBench, events: Events, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for its first frames meanwhile, and is staged again."""
    bench: Bench = await make_bench(16, model="layers", layerwise="always")
    await bench.cached(PROMPT)
    bench.engine.open.clear()
    bench.engine.error = DeviceError("the copy failed, as the test says")
    waiting, go_on, take = asyncio.Event(), asyncio.Event(), hand_over.take_first_frames

    async def wait(*arguments: Any) -> Any:
        waiting.set()
        await go_on.wait()
        return await take(*arguments)

    monkeypatch.setattr(hand_over, "take_first_frames", wait)
    request = bench.submit(PROMPT, max_tokens=3)
    await asyncio.wait_for(waiting.wait(), WAIT_S)
    assert request.state is S.READY
    bench.engine.open.set()
    await until(lambda: request.state is not S.READY)
    bench.engine.error = None
    go_on.set()
    await bench.finish(request)
    assert starts(bench, request) == [False] and told(bench, request) == []
    assert events(request) == (expected(PROMPT, 3), "length")
    check_integrity(bench.cache)


@pytest.mark.parametrize("slabs", [0, 2])
async def test_a_request_is_cancelled_while_its_layers_come(make_bench: MakeBench, events: Events, slabs: int) -> None:
    bench, request = await begun(make_bench, slabs)
    bench.dispatcher.cancel(request)
    bench.answer_cancels()
    assert request.state is S.ENDED and events(request) == ([], "cancelled")
    check_integrity(bench.cache)
    bench.engine.open.set()
    await bench.quiet()
    assert max(told(bench, request), default=0) == slabs, "no worker is told of a request that has ended"
    assert bench.dispatcher.context.budget.taken == 0 and not bench.cache.tiers.compute.in_flight


async def test_a_copy_fails_for_which_nobody_waits(make_bench: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    """Its request has been cancelled. The daemon's log says so; otherwise asyncio logs an error nobody has read."""
    bench, request = await begun(make_bench)
    bench.dispatcher.cancel(request)
    bench.answer_cancels()
    await bench.quiet_but_for_copies()
    bench.engine.error = DeviceError("the copy failed, as the test says")
    bench.engine.open.set()
    await bench.quiet()
    assert "blocks that nobody waits for could not be moved: the copy failed, as the test says" in caplog.text
    assert not bench.cache.tiers.compute.in_flight


async def test_the_worker_dies_while_layers_come(make_bench: MakeBench, events: Events, expected: Expected) -> None:
    bench, request = await begun(make_bench)
    bench.die()
    bench.dispatcher.on_ready()
    await bench.quiet_but_for_copies()
    bench.engine.open.set()
    await bench.finish(request)
    assert events(request) == (expected(PROMPT, 3), "length")
    await bench.quiet()
    check_integrity(bench.cache)


async def test_a_block_is_computed_while_its_layers_come(
    make_bench: MakeBench, events: Events, expected: Expected
) -> None:
    """The trie has it in another frame then, and the run keeps the frame that it reads."""
    bench, request = await begun(make_bench)
    (other,) = await bench.cache.mover.slots.take_frames(1) or []
    span_bytes(bench.cache.tiers.frames.span(FrameId(other)))[:] = np.frombuffer(contents(PROMPT[:BLOCK]), np.uint8)
    chain = request.chain
    _, taken = bench.cache.record(bench.namespace, bench.namespace.root, chain, 0, [other], 1)
    assert taken.all()
    mine = bench.runs[request.id].frames[0]
    bench.engine.open.set()
    await until(lambda: not bench.runs[request.id].loading)
    assert bench.cache.trie(bench.namespace).slots[rows_of(bench)[0], GPU, 0] == other != mine
    assert request.footprint.own >= {mine}
    await bench.quiet()
    check_integrity(bench.cache)
    await bench.finish(request)
    assert events(request) == (expected(PROMPT, 3), "length")
    assert bench.cache.tiers.compute.used_bytes == (BLOCKS + 1) * bench.cache.tiers.frames.frame_bytes


async def test_another_request_waits_for_the_same_blocks(
    make_bench: MakeBench, events: Events, expected: Expected
) -> None:
    bench, request = await begun(make_bench)
    other = bench.submit([*PROMPT, 8], max_tokens=2)
    await bench.quiet_but_for_copies()
    assert other.state is S.STAGING
    bench.engine.open.set()
    await bench.finish(request, other)
    assert starts(bench, other) == [False]
    assert events(request) == (expected(PROMPT, 3), "length")
    assert events(other) == (expected([*PROMPT, 8], 2), "length")


@pytest.mark.parametrize(
    ("options", "model"), [({"layerwise": "never"}, "layers"), ({}, "layers"), ({"layerwise": "always"}, "plain")]
)
async def test_a_prefix_comes_whole(make_bench: MakeBench, options: dict[str, str], model: str) -> None:
    """As the setting says; on a CPU by default; for a model whose blocks have no known layers."""
    bench = await make_bench(16, model=model, **options)
    await bench.cached(PROMPT)
    request = bench.submit(PROMPT, max_tokens=2)
    await bench.finish(request)
    assert starts(bench, request) == [False] and bench.dispatcher.counters.layerwise_loads == 0


async def test_a_prefix_of_as_many_blocks_as_are_listed_at_once_comes_layer_by_layer(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_planner, "MOST_LAYER_BLOCKS", BLOCKS)
    bench, request = await begun(make_bench)
    assert starts(bench, request) == [True]
    bench.engine.open.set()
    await bench.finish(request)


async def test_a_prefix_of_more_blocks_than_are_listed_at_once_comes_whole(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_planner, "MOST_LAYER_BLOCKS", BLOCKS - 1)
    bench = await make_bench(16, model="layers", layerwise="always")
    await bench.cached(PROMPT)
    request = bench.submit(PROMPT, max_tokens=3)
    await bench.finish(request)
    assert starts(bench, request) == [False]


async def test_beside_other_requests_a_prefix_comes_whole(make_bench: MakeBench) -> None:
    bench = await make_bench(24, model="layers", layerwise="always")
    first = bench.submit([*range(500, 510)], max_tokens=9)
    await bench.running(first)
    await bench.cached(PROMPT)
    request = bench.submit(PROMPT, max_tokens=2)
    await bench.finish(request)
    assert starts(bench, request) == [False]
    await bench.finish(first)
