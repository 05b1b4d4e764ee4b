"""A dispatcher on a real cache in tiny memory, and a worker of which the test is the engine."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from prefixd.base.sampling import Sampling
from prefixd.cache import NamespaceSpec
from prefixd.cache.options import CacheOptions
from prefixd.serving.dispatch.capacity.tier_share import TierShare
from prefixd.serving.dispatch.dispatcher import Dispatcher
from prefixd.serving.dispatch.options import DispatchOptions
from prefixd.serving.images.prompt_images import PromptLayout
from prefixd.serving.models.tier_resize import TierResize
from prefixd.serving.models.worker_process import WorkerProcess
from prefixd.serving.request.request import Request
from prefixd_scheduler import CostModel, QueuedRequest, RequestQueue, create_policy
from prefixd_swap import CopyEngine, FrameId, FramePool, NewFrames, Span, SwapError, create_copy_engine
from prefixd_swap.tiers import PagedGpuTier
from tests.rig import OpenCache
from tests.serving.fake_worker import BLOCK, GEOMETRY, MODELS, FakeRun, FakeWorker
from tests.waiting import WAIT_S, until

MakeBench = Callable[..., Awaitable["Bench"]]
Events = Callable[[Request], tuple[list[int], object]]
Expected = Callable[[Sequence[int], int], list[int]]


class Gate(CopyEngine):
    """A copy engine that waits while it is shut."""

    def __init__(self) -> None:
        self._engine = create_copy_engine("cpu")
        self.open = asyncio.Event()
        self.open.set()
        self.waiting = 0
        self.pass_on = 0
        """So many copies go on though it is shut."""
        self.error: SwapError | None = None
        """Copies to `error_into`, addresses, that have waited fail with it."""
        self.error_into = range(1 << 63)

    async def copy(self, pairs: Sequence[tuple[Span, Span]]) -> None:
        if not self.open.is_set() and self.pass_on:
            self.pass_on -= 1
        else:
            self.waiting += 1
            await self.open.wait()
            self.waiting -= 1
            if self.error is not None and pairs[0][0].address in self.error_into:
                raise self.error
        await self._engine.copy(pairs)

    def close(self) -> None:
        self._engine.close()


@dataclass
class Bench(FakeWorker):
    """One dispatcher, one cache, one worker that computes when it is told to, and a clock that stands still."""

    engine: Gate
    now: float = 0.0
    cost: CostModel = field(default_factory=CostModel)
    _ids: Any = field(default_factory=lambda: itertools.count(1))

    def begin(
        self,
        policy: str = "fcfs",
        queue_limit: int = 100,
        ready: bool = True,
        share: TierShare | None = None,
        **options: Any,
    ) -> None:
        """Starts the dispatcher."""
        self.dispatcher = Dispatcher(
            self.cache,
            RequestQueue(create_policy(policy), queue_limit),
            self.cost,
            self._take,
            lambda: self.now,
            DispatchOptions(**{"max_running": 4, "look_ahead": 8, **options}),
            share,
        )
        self.dispatcher.start()
        if ready:
            self.dispatcher.on_ready()

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
        await until(lambda: request.id in self.runs)
        return self.runs[request.id]

    async def finish(self, *requests: Request) -> None:
        """Computes until these have ended."""
        async with asyncio.timeout(WAIT_S):
            while any(r.id in self.dispatcher.waiting or r.id in self.dispatcher.running for r in requests):
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
    """A worker's supervisor in a resize: takes note of what a worker would be told, and lets go while `lets_go`.

    The attributes are those of `WorkerProcess`; see `load`.
    """

    part = "worker"

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.told: list[tuple[str, list[int], int]] = []
        self.lets_go = asyncio.Event()
        self.lets_go.set()
        self.changing = 0
        self.coming_bytes = 0
        self.loads = False
        self.may_shrink = True

    def load(self, coming_bytes: int = 0) -> None:
        """The worker loads its model, with the tier's frames at hand."""
        self.loads, self.may_shrink, self.coming_bytes = True, False, coming_bytes

    def become_ready(self) -> None:
        self.loads, self.may_shrink, self.coming_bytes = False, True, 0

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
        assert self.changing == 1 and self.may_shrink
        pool = self.bench.cache.tiers.frames
        assert pool.table.chunks(frames).size, "they are there until the worker has let go"
        self.told.append(("shrink", list(frames), pool.capacity))
        await self.lets_go.wait()

    def tier_resize(self) -> TierResize:
        """What resizes the bench's GPU tier."""
        bench = self.bench
        return TierResize(bench.cache, [cast(WorkerProcess, self)], [bench.dispatcher], lambda: bench.now)


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
    engine = Gate()
    bench: Bench
    with tempfile.TemporaryDirectory(prefix="prefixd-") as folder:
        opened = OpenCache(
            Path(folder, "blocks"),
            cpu_bytes=cpu_slots * GEOMETRY.block_bytes,
            disk_bytes=8 << 20 if disk else 0,
            frames=frames,
            frame_bytes=GEOMETRY.block_bytes,
            compute=partial(PagedGpuTier, widths={*kv.block_widths, *kv.state_widths}) if kv.whole_pages else None,
            engine=engine,
            clock=lambda: bench.now,
            options=CacheOptions(write_back=False, reserved_bytes=1 << 40, share_after=share_after),
        )
        cache = opened.cache
        spec = NamespaceSpec("model", BLOCK, kv.parts(GEOMETRY.block_bytes))
        bench = Bench(cache, cache.register(spec), kv, engine)
        bench.begin(**options)
        try:
            yield bench
        finally:
            engine.open.set()
            await bench.dispatcher.stop()
            bench.dispatcher.abandon()
            await opened.close()
    bench.dispatcher.queue.check_integrity()
    for trie in cache.tries:
        assert not trie.holds[: trie.rows].any()
        assert not trie.keep[: trie.rows].any()
    assert not any(tier.in_flight for tier in cache.tiers.memories)
