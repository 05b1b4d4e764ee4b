"""A dispatcher on a real cache in tiny memory, and a worker of which the test is the engine."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import xxhash

from prefixd.cache import Namespace, NamespaceSpec, TieredCache, Tiers, check_integrity
from prefixd.cache.options import CacheOptions
from prefixd.serving.dispatch.dispatcher import Dispatcher
from prefixd.serving.images.prompt_images import PromptLayout
from prefixd.serving.kv_shape import KvShape
from prefixd.serving.models.tier_resize import TierResize
from prefixd.serving.models.worker_process import WorkerProcess
from prefixd.serving.request.request import Ended, NewTokens, Request
from prefixd.worker_protocol.protocol import (
    Arrived,
    Cancel,
    Done,
    Extend,
    FullAttention,
    GroupShape,
    KeptState,
    RecurrentState,
    Sampling,
    SlidingWindow,
    Start,
    Step,
    ToWorker,
    Update,
)
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
from prefixd_swap.tiers import PagedGpuTier

BLOCK = 4
GEOMETRY = KvGeometry(layers=1, kv_heads=1, head_dim=128, dtype="float32", block_tokens=BLOCK, layout="token")
PLACEHOLDER = 7
"""The token id that stands for an image."""
STEP = 12
"""Most tokens of a request that the worker computes at a time, if the model has windows or states."""

_FULL = GroupShape("full", FullAttention(), 2, 1)
_WINDOW = GroupShape("window", SlidingWindow(7), 2, 2)
_STATE = GroupShape("state", RecurrentState(), 3, 2)
MODELS = {
    "plain": KvShape((GroupShape("attention", FullAttention(), 1, 1),), BLOCK),
    "windows": KvShape((_FULL, _WINDOW), BLOCK, window_margin=2, step_tokens=STEP),
    "windows alone": KvShape((_WINDOW,), BLOCK, step_tokens=STEP),
    "states": KvShape((_FULL, _WINDOW, _STATE), BLOCK, step_tokens=STEP),
    "pages": KvShape((_FULL, _WINDOW, _STATE), BLOCK, step_tokens=STEP, whole_pages=True),
}


class Gate(CopyEngine):
    """A copy engine that waits while it is shut."""

    def __init__(self) -> None:
        self._engine = create_copy_engine("cpu")
        self.open = asyncio.Event()
        self.open.set()
        self.waiting = 0
        self.pass_on = 0
        """So many copies go on though it is shut."""

    async def copy(self, pairs: Sequence[tuple[Span, Span]]) -> None:
        if not self.open.is_set() and self.pass_on:
            self.pass_on -= 1
        else:
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
    keep: list[KeptState] = field(default_factory=list)
    tail_blocks: int = 0
    arrived: range = range(0)

    def compute(self, reach: int) -> None:
        """It has computed so many tokens, and passes over the blocks that arrived behind them."""
        self.computed = reach
        if self.arrived and reach >= self.arrived.start * BLOCK:
            self.computed = max(reach, self.arrived.stop * BLOCK)


@dataclass
class Bench:
    """One dispatcher, one cache, one worker that computes when it is told to, and a clock that stands still."""

    cache: TieredCache
    engine: Gate
    namespace: Namespace
    kv: KvShape = MODELS["plain"]
    now: float = 0.0
    sent: list[ToWorker] = field(default_factory=list)
    runs: dict[int, FakeRun] = field(default_factory=dict)
    dispatcher: Dispatcher = field(init=False)
    cost: CostModel = field(default_factory=CostModel)
    embedded: set[bytes] = field(default_factory=set)
    token_s: float = 0.0
    """What the worker says that computing a token took."""
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
            tokens = seen_tokens(message)
            computed = message.cached_blocks * BLOCK
            assert computed < len(tokens)
            assert not any(image.first < computed < image.first + image.tokens for image in message.images)
            run = FakeRun(message, tokens, list(message.frames), computed, message.generated)
            self._check_read(run)  # never another prompt's bytes, whatever moved meanwhile
            if message.state is not None:
                self._resume(run)
            self.runs[message.id] = run
            self._check_owned()
        elif isinstance(message, Extend) and message.id in self.runs:
            assert len(message.frames) % len(self.kv.block_widths) == 0
            self.runs[message.id].frames += message.frames
            self._check_owned()
        elif isinstance(message, Arrived) and message.id in self.runs:
            run = self.runs[message.id]
            assert message.frames and message.first == self._blocks(run) and not run.arrived
            run.frames += message.frames
            run.arrived = range(message.first, self._blocks(run))
            assert run.arrived.stop * BLOCK < len(run.tokens)
            for block in run.arrived:
                assert self._part(self._homes(run, block)[0], 0).tobytes() == self._filling(
                    run.tokens[: (block + 1) * BLOCK], 0
                )
            run.compute(run.computed)

    def _homes(self, run: FakeRun, block: int) -> list[int]:
        """The frames of a block, -1 where the worker may not look any more."""
        slots = len(self.kv.block_widths)
        homes = run.frames[block * slots : (block + 1) * slots]
        for first, last, passed in self.kv.passed(run.computed):
            if block < passed:
                homes[first:last] = [-1] * (last - first)
        return homes

    def _blocks(self, run: FakeRun) -> int:
        return len(run.frames) // len(self.kv.block_widths)

    def _check_read(self, run: FakeRun) -> None:
        """What the next token needs is there: the bytes of exactly these tokens."""
        needed = self.cache.trie(self.namespace).needed(run.computed // BLOCK)
        passed = {part: blocks for first, last, blocks in self.kv.passed(run.computed) for part in range(first, last)}
        for block in range(run.computed // BLOCK):
            for part, home in enumerate(self._homes(run, block)):
                if block >= passed[part] and needed[block] & self.cache.trie(self.namespace).part_mask[part]:
                    assert self._part(home, part).tobytes() == self._filling(run.tokens[: (block + 1) * BLOCK], part)

    def _check_owned(self) -> None:
        """No frame that a run fills, or keeps a state in, is another's."""
        held = []
        for run in self.runs.values():
            for block in set(range(run.start.cached_blocks, self._blocks(run))) - set(run.arrived):
                held += [home for home in self._homes(run, block) if home >= 0]
            if (state := run.start.state) is not None:
                held += [*state.own, *state.tail, *(frame for kept in run.keep for frame in kept.frames)]
        assert len(set(held)) == len(held), "two requests fill one frame"

    def _resume(self, run: FakeRun) -> None:
        state, size = run.start.state, len(self.kv.state_widths)
        assert state is not None and len(state.own) == size and len(state.resume) == (size if run.computed else 0)
        for part, frame in enumerate(state.resume, len(self.kv.block_widths)):
            assert self._part(frame, part).tobytes() == self._filling(run.tokens[: run.computed], part)
        blocks = [kept.blocks for kept in state.keep]
        assert blocks == sorted(set(blocks)) and all(run.computed < BLOCK * n <= len(run.tokens) - 1 for n in blocks)
        run.keep = list(state.keep)

    def _keep(self, tokens: Sequence[int], frames: Sequence[int]) -> None:
        """Copies the state after these tokens."""
        for part, frame in enumerate(frames, len(self.kv.block_widths)):
            self._part(frame, part)[:] = np.frombuffer(self._filling(tokens, part), np.uint8)

    def _width(self, part: int) -> int:
        return (*self.kv.block_widths, *self.kv.state_widths)[part]

    def _filling(self, tokens: Sequence[int], part: int) -> bytes:
        return contents(tokens, part) * self._width(part)

    def _part(self, first: int, part: int) -> np.ndarray[Any, Any]:
        """The bytes of a part, in its frames side by side."""
        frames = range(first, first + self._width(part))
        span = self.cache.tiers.frames.span(FrameId(frames[0]))
        self.cache.tiers.frames.span(FrameId(frames[-1]))
        return span_bytes(replace(span, nbytes=len(frames) * span.nbytes))

    def step(self, *requests: Request) -> None:
        """A forward pass over these requests (all that run): whole prompts, then a token each, as far as frames go."""
        updates, done, computed = [], [], 0
        for run in [self.runs[r.id] for r in requests] or list(self.runs.values()):
            reach = min(len(run.tokens), self._blocks(run) * BLOCK)
            if run.arrived and run.computed < run.arrived.start * BLOCK:
                reach = min(reach, run.arrived.start * BLOCK)
            if self.kv.step_tokens:
                reach = min(reach, run.computed + self.kv.step_tokens)
            self._check_read(run)
            for block in range(run.computed // BLOCK, reach // BLOCK):
                for part, home in enumerate(self._homes(run, block)):
                    filling = self._filling(run.tokens[: (block + 1) * BLOCK], part)
                    self._part(home, part)[:] = np.frombuffer(filling, np.uint8)
            computed += reach - run.computed
            news, kept = [], []
            if run.start.state is not None:
                kept = [each.blocks for each in run.keep if each.blocks * BLOCK <= reach]
                for each in run.keep[: len(kept)]:
                    self._keep(run.tokens[: each.blocks * BLOCK], each.frames)
                run.keep = run.keep[len(kept) :]
                if run.start.state.tail and reach // BLOCK > max(run.computed // BLOCK, run.start.cached_blocks):
                    run.tail_blocks = reach // BLOCK
                    self._keep(run.tokens[: run.tail_blocks * BLOCK], run.start.state.tail)
            if reach == len(run.tokens) > run.computed:
                news = [next_token(run.tokens)]
                run.generated += 1
            if run.computed != reach:
                run.compute(reach)
                updates.append(Update(run.start.id, news, run.computed // BLOCK, kept=kept))
            run.tokens += news
            if run.generated >= run.start.sampling.max_tokens:
                done.append(run.start.id)
        self.dispatcher.on_step(Step(updates, computed, max(0.001, computed * self.token_s)))
        for number in done:
            run = self.runs.pop(number)
            self.dispatcher.on_done(
                Done(number, "length", tail_blocks=run.tail_blocks, encoded_images=self._embed(run.start))
            )

    def _embed(self, start: Start) -> int:
        """How many images of a run were not known and not cached."""
        computed = start.cached_blocks * BLOCK
        new = {image.digest for image in start.images if image.first >= computed} - self.embedded
        self.embedded |= new
        return len(new)

    def answer_cancels(self) -> None:
        """The worker lets go of what it was told to cancel."""
        for message in list(self.sent):
            if isinstance(message, Cancel):
                self.sent.remove(message)
                if run := self.runs.pop(message.id, None):
                    self.dispatcher.on_done(Done(message.id, "cancelled", tail_blocks=run.tail_blocks))

    def die(self, gave_up: bool = False) -> None:
        self.runs.clear()
        self.dispatcher.on_death("signal 9", gave_up)

    # -- callers -----------------------------------------------------------------------------------------------------

    def request(
        self,
        tokens: Sequence[int],
        max_tokens: int = 2,
        priority: int = 0,
        layout: PromptLayout | None = None,
        tenant: str | None = None,
        read_only: bool = False,
    ) -> Request:
        """A request, not submitted. `layout` has its images, and `tokens` their placeholders."""
        number = next(self._ids)
        ids = np.asarray(tokens, "<u4").tobytes() if layout is None else layout.identity
        chain = self.cache.chain(self.namespace, ids)
        return Request(
            id=number,
            name=f"r{number}",
            namespace=self.namespace,
            trie=self.cache.trie(self.namespace),
            chain=chain,
            prompt_tokens=len(tokens),
            sampling=Sampling(max_tokens=max_tokens),
            queued=QueuedRequest(number, self.now, len(tokens), priority=priority, tenant=tenant),
            kv=self.kv,
            images=None if layout is None else layout.of_request(),
            read_only=read_only,
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

    async def quiet_but_for_copies(self) -> None:
        """As `quiet`, while the engine is shut."""
        for _ in range(40):
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
        session = self.cache.leases.open("test", 0, self.now, self.cache.tenants.default)
        chain = self.cache.chain(self.namespace, np.asarray(tokens, "<u4").tobytes())
        try:
            reservation = await self.cache.reserve(session, self.namespace, chain)
            if not isinstance(reservation, int):
                for index, offsets in enumerate(reservation.slots.tolist(), reservation.first_block):
                    for part, offset in enumerate(offsets):
                        data = np.frombuffer(self._filling(list(tokens[: (index + 1) * BLOCK]), part), np.uint8)
                        self.cache.tiers.arena.array(offset, len(data))[:] = data
                await self.cache.commit(reservation, len(reservation.slots))
        finally:
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
        bench = self.bench
        return TierResize(bench.cache, [cast(WorkerProcess, self)], [bench.dispatcher], lambda: bench.now)


def seen_tokens(start: Start) -> list[int]:
    """What the model sees: tokens, and of images their content where the placeholders are."""
    tokens = np.frombuffer(start.tokens, "<u4").astype(np.int64)
    for image in start.images:
        assert (tokens[image.first : image.first + image.tokens] == PLACEHOLDER).all()
        content = xxhash.xxh3_64_intdigest(image.digest) % 1_000_000
        tokens[image.first : image.first + image.tokens] = 10_000_000 + content * 1_000 + np.arange(image.tokens)
    seen: list[int] = (tokens % (1 << 32)).tolist()
    return seen


def contents(tokens: Sequence[int], part: int = 0) -> bytes:
    """The bytes of a part of the block that ends this prefix, or of the state after it."""
    digest = xxhash.xxh3_128_digest(np.asarray(tokens, "<u4").tobytes(), seed=part)
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
async def open_bench(
    frames: int,
    cpu_slots: int = 64,
    disk: bool = False,
    model: str = "plain",
    share_after: int = 0,
    **options: Any,
) -> AsyncIterator[Bench]:
    """A bench with so many GPU frames and CPU slots; at the end nothing may be held and all has to add up."""
    kv = MODELS[model]
    memory = create_memory("cpu", GEOMETRY.block_bytes)
    frame_pool = FramePool(memory, GEOMETRY.block_bytes, frames)
    arena = CpuArena(cpu_slots * GEOMETRY.block_bytes)
    folder = tempfile.TemporaryDirectory(prefix="prefixd-")
    store = SlabStore.open(Path(folder.name) / "blocks", 8 << 20) if disk else None
    engine = Gate()
    bench: Bench
    tiers = Tiers.local(arena, store, frame_pool)
    if kv.whole_pages:
        tiers.compute = PagedGpuTier(frame_pool, {*kv.block_widths, *kv.state_widths})
    cache = TieredCache(
        tiers,
        engine,
        create_eviction_policy("lru", 0),
        lambda: bench.now,
        CacheOptions(write_back=False, reserved_bytes=1 << 40, share_after=share_after),
    )
    spec = NamespaceSpec("model", BLOCK, kv.parts(GEOMETRY.block_bytes))
    bench = Bench(cache, engine, cache.register(spec), kv)
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
