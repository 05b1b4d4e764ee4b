"""Whatever happens, every request is in one state, its holds and frames are accounted for, and it is told its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.base.errors import ExhaustedError, PreconditionError
from prefixd.cache import check_integrity
from prefixd.serving.loading import piece_load, tail_load
from prefixd.serving.models import elastic_tier, tier_resize
from prefixd.serving.models.elastic_size import Bounds
from prefixd.serving.models.elastic_tier import ElasticTier
from prefixd.serving.request.request import Request
from prefixd.serving.request.states import RequestState
from prefixd.worker_protocol.protocol import Done
from prefixd_scheduler import Distance
from prefixd_swap import DeviceError, FramePool
from tests.serving.bench import Bench, Events, Expected, Supervisor
from tests.serving.fake_worker import BLOCK, MODELS
from tests.slow import slow_but
from tests.tries import forget_blocks, match_rows
from tests.waiting import until

S = RequestState
COUNTED = (S.STAGING, S.RUNNING, S.STARVED, S.PREEMPTING, S.CANCELLING, S.WITHDRAWN)
NUMBERS = st.integers(0, 99)
HAPPENINGS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 17), st.integers(1, 24)),
        st.tuples(st.just("arrive"), st.integers(0, 17), st.integers(1, 24)),
        st.tuples(st.just("step"), NUMBERS, NUMBERS),
        st.tuples(st.just("turns"), st.integers(1, 4), st.none()),
        st.tuples(st.just("turns"), st.integers(10, 30), st.none()),
        st.tuples(st.just("cancel"), NUMBERS, st.none()),
        st.tuples(st.just("answer"), st.none(), st.none()),
        st.tuples(st.just("no memory"), NUMBERS, st.none()),
        st.tuples(st.just("fail"), NUMBERS, st.none()),
        st.tuples(st.just("gate"), st.booleans(), st.none()),
        st.tuples(st.just("loads fail"), st.booleans(), st.none()),
        st.tuples(st.just("die"), st.none(), st.none()),
        st.tuples(st.just("ready"), st.none(), st.none()),
        st.tuples(st.just("forget"), st.integers(0, 5), st.none()),
        st.tuples(st.just("cache"), st.integers(0, 5), st.none()),
        st.tuples(st.just("pace"), st.integers(0, 3), st.none()),
        st.tuples(st.just("resize"), st.integers(2, 24), st.booleans()),
    ),
    max_size=60,
)


@pytest.fixture(scope="module", autouse=True)
def small_slices() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier_resize, "_SLICE_FRAMES", 4)
        patch.setattr(tier_resize, "_RETRY_S", 0.0)
        patch.setattr(elastic_tier, "_RETRY_S", 0.0)
        patch.setattr(elastic_tier, "LOOK_S", 0.0002)
        patch.setattr(elastic_tier, "in_thread", at_once)
        patch.setattr(piece_load, "_PIECE_S", 1e-9)
        patch.setattr(piece_load.PieceLoad, "_observe", lambda *_: None)  # "pace" says what a load takes
        patch.setattr(tail_load, "_LEAST_TOKENS", 1)
        yield


async def at_once(work: Callable[[], Any]) -> Any:
    """Instead of a thread, which would look when all has happened."""
    return work()


def prompt(number: int) -> list[int]:
    """Prompts 0 to 2 share their first 2 blocks, 3 to 5 theirs; all have 4 full blocks and a token."""
    return [number // 3, *range(7), number, *range(8)]


class Operator:
    """Resizes the tier while all that happens; the frames that the pool has addresses for are its most.

    An elastic tier does it by itself, and the operator only takes memory of its device, or gives it back.
    """

    def __init__(self, bench: Bench, elastic: bool) -> None:
        self.pool = bench.cache.tiers.frames
        self.supervisor = Supervisor(bench)
        self.tier_resize = self.supervisor.tier_resize()
        self.task: asyncio.Task[None] | None = None
        self.others = self.pool.most // 2
        self.elastic = None
        if elastic:
            share, dispatcher = bench.dispatcher.context.share, bench.dispatcher
            self.elastic = ElasticTier(
                bench.cache, self.tier_resize, share, [dispatcher], lambda: bench.now, self._device_bytes
            )
            self.elastic.start(self._made(max(bench.kv.least_frames, dispatcher.least_frames)))

    def _device_bytes(self, pool: FramePool) -> tuple[int, int]:
        free = pool.most + pool.most // 4 - pool.capacity - self.others
        return free * pool.frame_bytes, 2 * pool.most * pool.frame_bytes

    async def _made(self, least: int) -> tuple[FramePool, Bounds]:
        async for _ in self.tier_resize.resize(least * self.pool.frame_bytes, 1.0):
            pass
        self.pool.let_grow(self.pool.most)
        return self.pool, Bounds(least, self.pool.most, reserve=self.pool.most // 4, idle_s=1.0)

    def resize(self, frames: int, hang_up: bool) -> None:
        """Begins a resize, or where one is under way and its caller does, hangs up."""
        if self.elastic is not None:
            self.others = self.pool.most - min(frames, self.pool.most)
        elif self.task is None or self.task.done():
            self.task = asyncio.create_task(self._resize(min(frames, self.pool.most)))
        elif hang_up:
            self.task.cancel()

    async def _resize(self, frames: int) -> None:
        with suppress(PreconditionError):  # the last slice of one whose caller hung up
            async with aclosing(self.tier_resize.resize(frames * self.pool.frame_bytes, 1e9)) as steps:
                async for _ in steps:
                    pass

    async def ended(self) -> None:
        if self.elastic is not None:
            await self.elastic.stop()
        if self.task is not None:
            await asyncio.wait({self.task})
        await self.tier_resize.stop()


async def happen(bench: Bench, operator: Operator, requests: list[Request], what: str, first: Any, second: Any) -> None:
    dispatcher = bench.dispatcher
    if what == "arrive" and len(requests) < 12:
        requests.append(bench.submit(prompt(first % 6), max_tokens=second, priority=first // 6))
    elif what == "step" and bench.runs:
        chosen = list(bench.runs)[first % len(bench.runs)]
        bench.step(*(r for r in requests if r.id in bench.runs and (r.id == chosen or second % 2)))
    elif what == "turns":
        for _ in range(first):
            await asyncio.sleep(0)
    elif what == "cancel" and requests:
        dispatcher.cancel(requests[first % len(requests)])
    elif what == "answer":
        bench.answer_cancels()
    elif what in ("no memory", "fail") and bench.runs:
        number = list(bench.runs)[first % len(bench.runs)]
        tail = bench.runs.pop(number).tail_blocks
        reason = "no_memory" if what == "no memory" else "error"
        dispatcher.on_done(Done(number, reason, "as the test says", tail_blocks=tail))
    elif what == "gate":
        bench.engine.open.set() if first else bench.engine.open.clear()
    elif what == "loads fail" and bench.kv.layers is not None:
        pool = bench.cache.tiers.frames
        bench.engine.error_into = range(pool.first_address, pool.first_address + pool.most * pool.frame_bytes)
        bench.engine.error = DeviceError("as the test says") if first else None
    elif what == "die":
        bench.die()
        operator.supervisor.load(coming_bytes=4 * operator.pool.frame_bytes)
    elif what == "ready":
        operator.supervisor.become_ready()
        dispatcher.on_ready()
    elif what == "forget":
        trie = bench.cache.trie(bench.namespace)
        rows = match_rows(trie, bench.namespace.root, bench.request(prompt(first)).chain)
        await forget_blocks(bench.cache.mover, trie, rows[::-1].tolist())
    elif what == "pace":  # loading a block takes as long as computing so many tokens
        nbytes = sum(bench.cache.trie(bench.namespace).part_bytes)
        bench.token_s = 0.1
        for blocks in (1, 8):
            bench.cost.observe_compute(BLOCK * blocks, bench.token_s * BLOCK * blocks)
            bench.cost.observe_load(Distance.CPU, nbytes * blocks, 0.2 * first * blocks)
    elif what == "resize":
        operator.resize(max(bench.dispatcher.least_frames, first * bench.kv.block_frames), second)
    elif what == "cache" and bench.engine.open.is_set():
        with suppress(ExhaustedError):  # the CPU tier holds the beginning of that prompt and no more
            await bench.cached(prompt(first))


def check(bench: Bench, requests: list[Request]) -> None:
    dispatcher = bench.dispatcher
    trie = bench.cache.trie(bench.namespace)
    parts: set[tuple[int, int]] = set()
    own: list[int] = []
    for request in requests:
        waits = request.state in (S.WAITING, S.STAGING, S.READY)
        assert (request.id in dispatcher.waiting, request.id in dispatcher.queue) == (waits, waits)
        assert not request.on_worker or request.id in dispatcher.running
        if request.state in COUNTED:
            wanted = [trie.all_groups] * len(request.rows) if request.wanted is None else request.wanted.tolist()
            for row, mask in zip(request.rows.tolist(), wanted, strict=True):
                parts.update((row, part) for part, group in enumerate(trie.part_mask.tolist()) if mask & group)
            own += request.footprint.own
            if request.tail is not None:
                parts.update((row, 0) for row in request.tail.held.tolist())
    assert len(set(own)) == len(own)
    widths = (*bench.kv.block_widths, *bench.kv.state_widths)
    frames = sum(widths[part] for _, part in parts) + bench.cache.tiers.gpu.frames_of(own)
    assert dispatcher.context.budget.taken == frames
    dispatcher.queue.check_integrity(bench.now)
    check_integrity(bench.cache)


@pytest.mark.parametrize("model", slow_but(["windows"], ["layers", "windows", "windows alone", "states", "pages"]))
@settings(max_examples=100)
@given(
    happenings=HAPPENINGS,
    frames=st.integers(12, 24),
    cpu_slots=st.integers(1, 24),
    policy=st.sampled_from(["fcfs", "fpf", "relaxed-fpf"]),
    mode=st.sampled_from(["auto", "swap", "recompute"]),
    paced=st.booleans(),
    elastic=st.booleans(),
)
def test_nothing_is_lost_whatever_happens(
    bench_of: Callable[..., Any],
    events: Events,
    expected: Expected,
    happenings: list[tuple[str, Any, Any]],
    model: str,
    frames: int,
    cpu_slots: int,
    policy: str,
    mode: str,
    paced: bool,
    elastic: bool,
) -> None:
    async def scenario() -> None:
        options = {"policy": policy, "preemption": mode, "max_running": 3, "look_ahead": 2}
        if model == "layers":  # they come beside nothing else
            options |= {"layerwise": "always", "load": "always"}
        parts = MODELS[model].block_frames + MODELS[model].state_frames
        async with bench_of(parts * frames, parts * cpu_slots, model=model, **options) as bench:
            requests: list[Request] = []
            operator = Operator(bench, elastic and model != "pages")
            if operator.elastic is not None:
                await until(lambda: operator.elastic.figures is not None)
            before: list[tuple[str, Any, Any]] = []
            if paced:  # both at once, or layer by layer
                before = [
                    ("cache", 0, None),
                    ("pace", 2, None),
                    ("gate", False, None),
                    ("arrive", 0, 5),
                    ("turns", 9, None),
                ]
                if model == "layers":
                    bench.engine.pass_on = cpu_slots % 4
                    before.append(("loads fail", frames % 2, None))
            for what, first, second in [*before, *happenings]:
                bench.now += 0.5
                await happen(bench, operator, requests, what, first, second)
                check(bench, requests)
            bench.engine.open.set()
            bench.engine.error = None
            operator.others = 0
            bench.now += 20.0
            operator.supervisor.become_ready()
            bench.dispatcher.on_ready()
            await bench.finish(*requests)
            await asyncio.wait_for(operator.ended(), 60)
            await bench.quiet()  # a copy for a request that was withdrawn may have moved on
            check(bench, requests)
            assert bench.dispatcher.context.budget.taken == 0
            for request in requests:
                assert request.state is S.ENDED
                tokens, end = events(request)
                assert end in ("length", "cancelled") or isinstance(end, Exception)
                right = expected(prompt_of(request), request.sampling.max_tokens)
                assert tokens == right if end == "length" else tokens == right[: len(tokens)]

    asyncio.run(scenario())


def prompt_of(request: Request) -> list[int]:
    """The tokens that the request came with."""
    tokens = request.chain.token_ids[: 4 * request.prompt_tokens]
    return [int.from_bytes(tokens[at : at + 4], "little") for at in range(0, len(tokens), 4)]
