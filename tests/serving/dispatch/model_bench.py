"""A dispatcher, a cache with three tiers and the engine of a real model, in one process."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from prefixd.base.sampling import Sampling
from prefixd.cache import NamespaceSpec, TieredCache, Trie
from prefixd.cache.index.trie import Rows
from prefixd.cache.options import CacheOptions
from prefixd.serving.dispatch.dispatcher import Dispatcher
from prefixd.serving.dispatch.options import DispatchOptions
from prefixd.serving.images.image_kv import ImageKv, image_namespace
from prefixd.serving.images.prompt_images import PromptLayout
from prefixd.serving.kv_shape import KvShape
from prefixd.serving.request.request import Request
from prefixd.serving.request.request_events import Ended, NewTokens
from prefixd.worker.engine import Engine
from prefixd.worker.memory.make_kv import make_embeddings, make_kv
from prefixd.worker.model import CausalModel
from prefixd.worker_protocol.protocol import Cancel, Done, Extend, PromptImage, Start, Step, ToWorker
from prefixd_scheduler import CostModel, QueuedRequest, RequestQueue, create_policy
from prefixd_swap import FramePool
from prefixd_swap.tiers import PagedGpuTier
from tests.rig import OpenCache

STEP_TOKENS = 64


class ModelBench:
    """Runs requests on a model as a daemon and its worker do, without their processes.

    Args:
        model: loaded.
        cache: its GPU tier is `pool`.
        pool: frames of the model's size.
    """

    def __init__(self, model: CausalModel, cache: TieredCache, pool: FramePool) -> None:
        self.model, self.cache, self.pool = model, cache, pool
        hello = self.hello = model.spec.hello()
        self.kv = KvShape.of(hello, STEP_TOKENS)
        parts = self.kv.parts(hello.frame_bytes)
        self.namespace = cache.register(NamespaceSpec("model", hello.block_tokens, parts, b"", hello.dtype))
        self.dispatcher = Dispatcher(
            cache,
            RequestQueue(create_policy("fcfs"), 100),
            CostModel(),
            self._messages_append,
            time.monotonic,
            DispatchOptions(max_running=8, look_ahead=8, load="always", preemption="swap"),
        )
        self.paused = False
        self._messages: list[ToWorker] = []
        self._ids = itertools.count(1)
        self._start_worker()

    @property
    def trie(self) -> Trie:
        """Where its blocks are."""
        return self.cache.trie(self.namespace)

    def _messages_append(self, message: ToWorker) -> None:
        self._messages.append(message)

    def _start_worker(self) -> None:
        spec, pool = self.model.spec, self.pool
        self._memory = make_kv(spec, pool.memory, pool.table, requests=80, frames=pool.capacity)
        self._embeddings = make_embeddings(spec, pool.memory, pool.table, self._memory, requests=80)
        self.engine = Engine(self.model, self._memory, STEP_TOKENS, time.monotonic, embeddings=self._embeddings)

    def _end_worker(self) -> None:
        self.engine.close()
        memories = [self._memory] if self._embeddings is None else [self._memory, self._embeddings.memory]
        for memory in memories:
            memory.poll(wait=True)
            memory.end()

    async def work(self) -> None:
        """Is the worker until it is cancelled."""
        self.dispatcher.start()
        self.dispatcher.on_ready()
        try:
            while True:
                if not self.paused:
                    self.pass_once()
                await asyncio.sleep(0 if self._messages or self.engine.runnable else 0.001)
        finally:
            self._end_worker()

    def pass_once(self) -> None:
        """Takes the daemon's messages and computes a forward pass."""
        messages, self._messages[:] = list(self._messages), []
        for message in messages:
            if isinstance(message, Start):
                self._tell(self.engine.start(message))
            elif isinstance(message, Extend):
                self._tell(self.engine.extend(message))
            elif isinstance(message, Cancel):
                self._tell(self.engine.cancel(message))
        self._tell(self.engine.step() if self.engine.runnable else self.engine.flush())

    def _tell(self, answers: Sequence[Step | Done]) -> None:
        for answer in answers:
            if isinstance(answer, Step):
                self.dispatcher.on_step(answer)
            else:
                self.dispatcher.on_done(answer)

    def die(self) -> None:
        """The worker dies, and another one takes its place."""
        self._end_worker()
        self._messages.clear()
        self.dispatcher.on_death("signal 9", False)
        self._start_worker()
        self.dispatcher.on_ready()

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        images: Sequence[PromptImage] = (),
        read_only: bool = False,
        **sampling: Any,
    ) -> Request:
        """Queues a greedy request."""
        number, ids = next(self._ids), np.asarray(prompt, "<u4").tobytes()
        layout = image_kv = None
        if images:
            cross, of_images = self.model.spec.image_frames > 0, image_namespace(self.namespace.spec, self.hello)
            layout = PromptLayout(ids, list(images), self.trie.block_tokens, cross=cross)
            assert of_images is not None
            image_kv = ImageKv.of(self.cache, self.cache.register(of_images), images, self.hello)
        request = Request(
            id=number,
            name=f"r{number}",
            namespace=self.namespace,
            trie=self.trie,
            chain=self.cache.chain(self.namespace, ids if layout is None else layout.identity),
            prompt_tokens=len(prompt),
            sampling=Sampling(max_tokens=max_tokens, ignore_eos=True, **sampling),
            queued=QueuedRequest(number, time.monotonic(), len(prompt)),
            kv=self.kv,
            images=None if layout is None else layout.of_request(),
            image_kv=image_kv,
            read_only=read_only,
        )
        self.dispatcher.submit(request)
        return request

    async def tokens_of(self, request: Request) -> list[int]:
        """Waits for its end."""
        tokens: list[int] = []
        async with asyncio.timeout(60):
            while True:
                event = await request.events.get()  # type: ignore[attr-defined]
                if isinstance(event, NewTokens):
                    tokens += event.token_ids
                else:
                    assert isinstance(event, Ended) and event.reason == "length", event
                    return tokens

    async def generate(
        self, prompt: Sequence[int], max_tokens: int, images: Sequence[PromptImage] = ()
    ) -> tuple[list[int], tuple[int, ...]]:
        """One request alone: its tokens, and the prompt's tokens that were found in each tier."""
        request = self.submit(prompt, max_tokens, images)
        tokens = await self.tokens_of(request)
        await self.cache.mover.quiesce()
        return tokens, tuple(request.hit_tokens or ())

    async def clear_gpu_tier(self) -> None:
        """Has every block leave the GPU tier for the CPU tier."""
        frames = await self.cache.mover.slots.take_frames(self.pool.capacity)
        assert frames
        self.cache.tiers.compute.free(frames)

    async def take_block(self) -> list[int]:
        """The slots of a block, evicting what may go; none if there is no room."""
        return await self.cache.mover.slots.take_frames(1, self.kv.block_widths) or []

    def path(self, prompt: Sequence[int]) -> Rows:
        """The rows of a prompt's full blocks but those of its last token."""
        chain = self.cache.chain(self.namespace, np.asarray(prompt, "<u4").tobytes())
        return self.trie.nodes(self.namespace.root, chain, (len(prompt) - 1) // self.trie.block_tokens)


@asynccontextmanager
async def open_model_bench(model: CausalModel, folder: Path, frames: int) -> AsyncIterator[ModelBench]:
    """A bench with so many frames, 16 MiB in the CPU tier and 64 MiB on disk; another one on the same folder finds what
    this one has written."""
    groups = model.spec.groups
    opened = OpenCache(
        folder,
        cpu_bytes=16 << 20,
        disk_bytes=64 << 20,
        frames=frames,
        frame_bytes=groups.frame_bytes,
        chunk_bytes=groups.chunk_bytes,
        compute=PagedGpuTier if groups.whole_pages else None,
        clock=time.monotonic,
        options=CacheOptions(write_back=False),
    )
    cache = opened.cache
    cache.restore()
    assert opened.pool is not None
    bench = ModelBench(model, cache, opened.pool)
    work = asyncio.create_task(bench.work())
    try:
        yield bench
    finally:
        await bench.dispatcher.stop()
        await cache.write_back.flush()
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        bench.dispatcher.abandon()
        await opened.close()
    assert not any(trie.holds[: trie.rows].any() for trie in cache.tries)
