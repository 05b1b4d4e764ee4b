"""A dispatcher on a real cache in tiny memory, and a worker of which the test is the engine."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import xxhash

from prefixd.cache import Namespace, NamespaceSpec, PartSpec, TieredCache, Tiers, check_integrity
from prefixd.server.dispatcher import Dispatcher
from prefixd.server.request import Ended, NewTokens, Request
from prefixd.server.tier_resize import TierResize
from prefixd.server.worker_process import WorkerProcess
from prefixd.worker.protocol import Cancel, Done, Extend, Sampling, Start, Step, ToWorker, Update
from prefixd_scheduler import CostModel, QueuedRequest, RequestQueue, create_policy
from prefixd_swap import (
    CopyEngine,
    CpuArena,
    FrameId,
    FramePool,
    KvGeometry,
    NewFrames,
    SlabStore,
    Span,
    create_copy_engine,
    create_eviction_policy,
    create_memory,
)

BLOCK = 4
GEOMETRY = KvGeometry(layers=1, kv_heads=1, head_dim=128, dtype="float32", block_tokens=BLOCK, layout="token")


class Gate(CopyEngine):
    """A copy engine that waits while it is shut."""

    def __init__(self) -> None:
        self._engine = create_copy_engine("cpu")
        self.open = asyncio.Event()
        self.open.set()
        self.waiting = 0

    async def copy(self, pairs: Sequence[tuple[Span, Span]]) -> None:
        self.waiting += 1
        await self.open.wait()
        self.waiting -= 1
        await self._engine.copy(pairs)

    def close(self) -> None:
        self._engine.close()


@dataclass
class FakeRun:
    """A request as the worker sees it."""

    start: Start
    tokens: list[int]
    frames: list[int]
    computed: int
    generated: int


@dataclass
class Bench:
    """One dispatcher, one cache, one worker that computes when it is told to, and a clock that stands still."""

    cache: TieredCache
    engine: Gate
    namespace: Namespace
    now: float = 0.0
    sent: list[ToWorker] = field(default_factory=list)
    runs: dict[int, FakeRun] = field(default_factory=dict)
    dispatcher: Dispatcher = field(init=False)
    cost: CostModel = field(default_factory=CostModel)
    _ids: Any = field(default_factory=lambda: itertools.count(1))

    def begin(self, policy: str = "fcfs", queue_limit: int = 100, ready: bool = True, **options: Any) -> None:
        """Starts the dispatcher."""
        self.dispatcher = Dispatcher(
            self.cache,
            RequestQueue(create_policy(policy), queue_limit),
            self.cost,
            self._take,
            lambda: self.now,
            **{"max_running": 4, "look_ahead": 8, **options},
        )
        self.dispatcher.start()
        if ready:
            self.dispatcher.on_ready()

    # -- the worker ---------------------------------------------------------------------------------------------------

    def _take(self, message: ToWorker) -> None:
        self.sent.append(message)
        if isinstance(message, Start):
            tokens = np.frombuffer(message.tokens, "<u4").tolist()
            for block in range(message.cached_blocks):  # never another prompt's bytes, whatever moved meanwhile
                assert self._frame(message.frames[block]).tobytes() == contents(tokens[: (block + 1) * BLOCK])
            computed = message.cached_blocks * BLOCK
            assert computed < len(tokens)
            self.runs[message.id] = FakeRun(message, tokens, list(message.frames), computed, message.generated)
            held = [frame for run in self.runs.values() for frame in run.frames[run.start.cached_blocks :]]
            assert len(set(held)) == len(held), "two requests fill one frame"
        elif isinstance(message, Extend) and message.id in self.runs:
            self.runs[message.id].frames += message.frames

    def _frame(self, frame: int) -> np.ndarray[Any, Any]:
        span = self.cache.tiers.frames.span(FrameId(frame))
        return span_bytes(span)

    def step(self, *requests: Request) -> None:
        """A forward pass over these requests (all that run): whole prompts, then a token each, as far as frames go."""
        updates, done, computed = [], [], 0
        for run in [self.runs[r.id] for r in requests] or list(self.runs.values()):
            reach = min(len(run.tokens), len(run.frames) * BLOCK)
            for block in range(run.computed // BLOCK, reach // BLOCK):
                self._frame(run.frames[block])[:] = np.frombuffer(contents(run.tokens[: (block + 1) * BLOCK]), np.uint8)
            computed += reach - run.computed
            news = []
            if reach == len(run.tokens) > run.computed:
                news = [next_token(run.tokens)]
                run.generated += 1
            if run.computed != reach:
                updates.append(Update(run.start.id, news, reach // BLOCK))
            run.computed = reach
            run.tokens += news
            if run.generated >= run.start.sampling.max_tokens:
                done.append(run.start.id)
        self.dispatcher.on_step(Step(updates, computed, 0.001))
        for number in done:
            del self.runs[number]
            self.dispatcher.on_done(Done(number, "length"))

    def answer_cancels(self) -> None:
        """The worker lets go of what it was told to cancel."""
        for message in list(self.sent):
            if isinstance(message, Cancel):
                self.sent.remove(message)
                if self.runs.pop(message.id, None):
                    self.dispatcher.on_done(Done(message.id, "cancelled"))

    def die(self, gave_up: bool = False) -> None:
        self.runs.clear()
        self.dispatcher.on_death("signal 9", gave_up)

    # -- callers -----------------------------------------------------------------------------------------------------

    def request(self, tokens: Sequence[int], max_tokens: int = 2, priority: int = 0) -> Request:
        """A request, not submitted."""
        number = next(self._ids)
        chain = self.cache.chain(self.namespace, np.asarray(tokens, "<u4").tobytes())
        return Request(
            id=number,
            name=f"r{number}",
            namespace=self.namespace,
            trie=self.cache.trie(self.namespace),
            chain=chain,
            prompt_tokens=len(tokens),
            sampling=Sampling(max_tokens=max_tokens),
            queued=QueuedRequest(number, self.now, len(tokens), priority=priority),
        )

    def submit(self, tokens: Sequence[int], **options: Any) -> Request:
        request = self.request(tokens, **options)
        self.dispatcher.submit(request)
        return request

    async def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "not within 60 s"
            await asyncio.sleep(0.001)

    async def quiet(self) -> None:
        """Lets the dispatcher do all it can do now."""
        for _ in range(3):
            await self.cache.mover.quiesce()
            for _ in range(20):
                await asyncio.sleep(0)

    async def running(self, request: Request) -> FakeRun:
        await self.until(lambda: request.id in self.runs)
        return self.runs[request.id]

    async def finish(self, *requests: Request) -> None:
        """Computes until these have ended."""
        deadline = time.monotonic() + 60
        while any(r.id in self.dispatcher.waiting or r.id in self.dispatcher.running for r in requests):
            assert time.monotonic() < deadline, "not within 60 s"
            self.answer_cancels()
            self.step()
            await asyncio.sleep(0.001)

    async def cached(self, tokens: Sequence[int]) -> None:
        """Puts the full blocks of a prompt into the CPU tier, with the bytes the worker would have computed."""
        session = self.cache.leases.open("test", 0, self.now)
        chain = self.cache.chain(self.namespace, np.asarray(tokens, "<u4").tobytes())
        reservation = await self.cache.reserve(session, self.namespace, chain)
        if not isinstance(reservation, int):
            for index, (offset,) in enumerate(reservation.slots, reservation.first_block):
                data = np.frombuffer(contents(list(tokens[: (index + 1) * BLOCK])), np.uint8)
                self.cache.tiers.arena.array(offset, GEOMETRY.block_bytes)[:] = data
            await self.cache.commit(reservation, len(reservation.slots))
        self.cache.leases.close(session)


class Supervisor:
    """A worker's supervisor in a resize: takes note of what a worker would be told, and lets go while `lets_go`."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.told: list[tuple[str, list[int], int]] = []
        self.lets_go = asyncio.Event()
        self.lets_go.set()
        self.changing = 0

    async def settled(self) -> bool:
        return True

    @asynccontextmanager
    async def changing_frames(self) -> AsyncGenerator[None]:
        self.changing += 1
        try:
            yield
        finally:
            self.changing -= 1

    async def grow(self, pool: FramePool, new: NewFrames) -> None:
        assert self.changing == 1
        self.told.append(("grow", list(new.frames), pool.capacity))

    async def shrink(self, frames: Sequence[FrameId]) -> None:
        assert self.changing == 1
        pool = self.bench.cache.tiers.frames
        assert pool.table.chunks(frames).size, "they are there until the worker has let go"
        self.told.append(("shrink", list(frames), pool.capacity))
        await self.lets_go.wait()

    def tier_resize(self) -> TierResize:
        """What resizes the bench's GPU tier."""
        return TierResize(self.bench.cache, cast(WorkerProcess, self), self.bench.dispatcher, lambda: self.bench.now)


def contents(tokens: Sequence[int]) -> bytes:
    """The bytes of the block that ends this prefix."""
    digest = xxhash.xxh3_128_digest(np.asarray(tokens, "<u4").tobytes())
    return digest * (GEOMETRY.block_bytes // len(digest))


def next_token(tokens: Sequence[int]) -> int:
    """What the model says after these tokens."""
    return xxhash.xxh3_64_intdigest(np.asarray(tokens, "<u4").tobytes()) % 1000


def span_bytes(span: Span) -> np.ndarray[Any, Any]:
    return np.frombuffer((ctypes.c_uint8 * span.nbytes).from_address(span.address), np.uint8)


@pytest.fixture(scope="module")
def expected() -> Callable[[Sequence[int], int], list[int]]:
    """`expected(prompt, n)`: the right answer."""

    def answer(prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(next_token(tokens))
        return tokens[len(prompt) :]

    return answer


@pytest.fixture(scope="module")
def events() -> Callable[[Request], tuple[list[int], object]]:
    """`events(request)`: the tokens it was sent so far, and how it ended (a reason or an error; None if it has not)."""

    def drain(request: Request) -> tuple[list[int], object]:
        tokens: list[int] = []
        end: object = None
        while not request.events.empty():
            event = request.events.get_nowait()
            assert end is None, "an event after the last one"
            if isinstance(event, NewTokens):
                tokens += event.token_ids
            else:
                end = event.reason if isinstance(event, Ended) else event
        return tokens, end

    return drain


@asynccontextmanager
async def open_bench(frames: int, cpu_slots: int = 64, disk: bool = False, **options: Any) -> AsyncIterator[Bench]:
    """A bench with so many GPU frames and CPU slots; at the end nothing may be held and all has to add up."""
    memory = create_memory("cpu", GEOMETRY.block_bytes)
    frame_pool = FramePool(memory, GEOMETRY, frames)
    arena = CpuArena(cpu_slots * GEOMETRY.block_bytes)
    folder = tempfile.TemporaryDirectory(prefix="prefixd-")
    store = SlabStore.open(Path(folder.name) / "blocks", 8 << 20) if disk else None
    engine = Gate()
    bench: Bench
    cache = TieredCache(
        Tiers.local(arena, store, frame_pool),
        engine,
        create_eviction_policy("lru", 0),
        lambda: bench.now,
        write_back=False,
    )
    spec = NamespaceSpec("model", BLOCK, (PartSpec("attention", 0, GEOMETRY.block_bytes),))
    bench = Bench(cache, engine, cache.register(spec))
    bench.begin(**options)
    try:
        yield bench
    finally:
        engine.open.set()
        await bench.dispatcher.stop()
        bench.dispatcher.abandon()
        await cache.close()
        folder.cleanup()
    check_integrity(cache)
    bench.dispatcher.queue.check_integrity()
    for trie in cache.tries:
        assert not trie.holds[: trie.rows].any()
        assert not trie.keep[: trie.rows].any()
    assert not any(tier.in_flight for tier in cache.tiers.memories)
    frame_pool.close()
    memory.close()
    arena.close()
    if store is not None:
        store.close()
    engine.close()


@pytest.fixture
async def make_bench() -> AsyncIterator[Callable[..., Awaitable[Bench]]]:
    """`await make_bench(frames, ...)`: see `open_bench`."""
    async with AsyncExitStack() as stack:
        yield lambda *sizes, **options: stack.enter_async_context(open_bench(*sizes, **options))


@pytest.fixture(scope="module")
def bench_of() -> Callable[..., AbstractAsyncContextManager[Bench]]:
    """The same for tests that open many, each in a loop of its own."""
    return open_bench
