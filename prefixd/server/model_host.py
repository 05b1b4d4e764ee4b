"""The model beside the cache: worker process, GPU tier and dispatcher."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from prefixd.cache import NamespaceSpec, TieredCache
from prefixd.embedded_model import ensure_embedded_model
from prefixd.errors import ConfigError, UnavailableError
from prefixd.model_fingerprint import fingerprint
from prefixd.server.dispatcher import Dispatcher
from prefixd.server.gpu_tier_size import automatic_bytes, most_frames
from prefixd.server.kv_shape import KvShape
from prefixd.server.served_model import ServedModel
from prefixd.server.state_keeping import StatePolicy
from prefixd.server.tier_resize import TierResize
from prefixd.server.tokenization import TextCodec
from prefixd.server.tokenizer_threads import TokenizerThreads
from prefixd.server.worker_process import WorkerProcess
from prefixd.settings import Settings
from prefixd.worker.protocol import MOST_BEAMS, Done, Hello
from prefixd.worker.settings import WorkerSettings
from prefixd_scheduler import CostModel, RequestQueue, create_policy
from prefixd_swap import FramePool, SwapError, VirtualMemory, create_memory
from prefixd_swap.tiers import CpuTier, GpuTier

log = logging.getLogger(__name__)


class ModelHost:
    """Runs a model directory's worker and owns its GPU tier.

    Args:
        settings: the daemon's.
        device: "cpu" or "cuda:N".
        cache: gets the GPU tier when the worker has said what a block looks like.
        clock: seconds.
    """

    def __init__(self, settings: Settings, device: str, cache: TieredCache, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._device = device
        self._cache = cache
        self._memory: VirtualMemory | None = None
        self._hello: Hello | None = None
        self._stopping = False
        self._model: asyncio.Task[ServedModel] | None = None
        self.directory = self._find_model()
        try:
            self._text = TokenizerThreads()
        except SwapError as error:
            raise ConfigError(f"prompts cannot be tokenized: {error}") from error
        worker = settings.worker
        self.worker = WorkerProcess(
            WorkerSettings(
                model=os.fspath(self.directory),
                dtype=worker.dtype,
                device=device,
                block_tokens=worker.block_tokens,
                layout=worker.layout,
                chunk_bytes=settings.gpu.chunk_bytes or 0,
                max_step_tokens=worker.max_step_tokens,
                # Twice as many as run: some have ended, and keep their mappings for those who come back. A search that
                # takes more places than there are runs alone.
                max_sequences=2 * worker.max_running + MOST_BEAMS,
                kv=worker.kv,
                groups=worker.groups,
                cuda_graphs=worker.cuda_graphs,
                threads=worker.threads,
            ),
            worker.restart_limit,
            on_hello=self._on_hello,
            on_ready=lambda: self.dispatcher.on_ready(),
            on_step=lambda step: self.dispatcher.on_step(step),
            on_done=self._on_done,
            on_death=lambda why, gave_up: self.dispatcher.on_death(why, gave_up),
            troubles=cache.tiers.troubles,
        )
        self.dispatcher = Dispatcher(
            cache,
            RequestQueue(create_policy(settings.scheduler.policy), settings.scheduler.queue_limit),
            CostModel(),
            self.worker.send,
            clock,
            max_running=worker.max_running,
            look_ahead=settings.scheduler.look_ahead,
            recompute_if_slower=settings.scheduler.recompute_if_slower,
            preemption=settings.scheduler.preemption,
            caching=settings.cache.enabled,
            states=StatePolicy(worker.states_per_prompt, worker.state_every_tokens),
        )
        self.tier_resize = TierResize(cache, self.worker, self.dispatcher, clock)

    def start(self) -> list[asyncio.Task[None]]:
        """Starts the worker and the dispatcher; returns the tasks that run them."""
        self._model = asyncio.create_task(self._load(), name="model")
        return [self.worker.start(), self.dispatcher.start()]

    async def stop(self) -> None:
        """Ends the worker and gives the GPU tier's memory back."""
        self._text.close()
        self._stopping = True
        self.tier_resize.interrupt()
        await self.dispatcher.stop()
        if self._memory is not None:
            self._memory.stop_creating()
        await self.worker.stop()
        await self.tier_resize.stop()
        if self._model is not None:
            self._model.cancel()
            await asyncio.gather(self._model, return_exceptions=True)
        self.dispatcher.abandon()
        await self._cache.write_back.stop()
        await self._cache.mover.quiesce()
        if self._hello is not None:
            pool = self._cache.tiers.frames
            self._cache.tiers.end_compute()
            pool.close()
        if self._memory is not None:
            self._memory.close()

    async def model(self) -> ServedModel:
        """Waits for the model, with the tier's present size. Raises UnavailableError when its worker was given up."""
        if self._model is None:
            raise UnavailableError("the model is not being loaded; start the daemon's worker first")
        try:
            model = await asyncio.shield(self._model)
        except ConfigError as error:  # the operator's mistake, not the caller's
            raise UnavailableError(f"the model cannot be served: {error}") from error
        if self.worker.failure:
            raise UnavailableError(f"the worker was given up: {self.worker.failure}")
        return replace(model, frames=self._cache.tiers.frames.lasting)

    def _find_model(self) -> Path:
        settings = self._settings
        if settings.worker.model is not None:
            return settings.worker.model
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        try:
            return ensure_embedded_model(Path(home).expanduser() / "prefixd")
        except OSError as error:
            raise ConfigError(f"the embedded model cannot be written ({error}); set XDG_CACHE_HOME") from error

    async def _load(self) -> ServedModel:
        try:
            name = await self._text.load(fingerprint, self.directory, self._settings.data_dir)
        except OSError as error:
            raise ConfigError(f"model directory {str(self.directory)!r} cannot be read ({error})") from error
        codec: TextCodec | None = None
        try:
            codec = await self._text.load(TextCodec, self.directory)
        except ConfigError as error:
            log.warning("prompts have to be token ids: %s", error)
        if not await self.worker.settled():
            raise UnavailableError(f"the worker was given up: {self.worker.failure}")
        hello = self._hello
        if hello is None:
            raise UnavailableError("the worker became ready without describing its model")
        kv = self._shape(hello)
        namespace = NamespaceSpec(
            name=name,
            block_tokens=hello.block_tokens,
            parts=kv.parts(hello.frame_bytes),
            dtype=hello.dtype,
            layout=hello.layout,
        ).named_by_geometry  # what other settings have left on disk is another namespace's, and is evicted in its turn
        return ServedModel(hello, kv, namespace, codec, self._text, self._cache.tiers.frames.capacity)

    async def _on_hello(self, hello: Hello, threads: ThreadPoolExecutor) -> FramePool:
        """Makes the GPU tier for the first worker; its successors get the same one.

        In a thread: 51,200 chunks take up to ten seconds, and the daemon serves its clients meanwhile.
        """
        if self._hello is not None:
            if self._hello != hello:
                raise ConfigError("the model changed while the daemon ran; restart the daemon")
            return self._cache.tiers.frames
        asked = self._settings.gpu.bytes
        try:
            loop = asyncio.get_running_loop()
            self._memory = await loop.run_in_executor(threads, create_memory, self._device, hello.chunk_bytes)
            if self._stopping:
                self._memory.stop_creating()
            if asked == "auto":
                nbytes = await loop.run_in_executor(threads, self._automatic_bytes, self._memory, hello)
            else:
                nbytes = asked
            frames = nbytes // hello.frame_bytes
            least = self._shape(hello).least_frames
            if frames < least:
                self._memory.close()
                self._memory = None
                raise ConfigError(
                    f"gpu.bytes = {asked}{f', {nbytes} bytes,' if asked == 'auto' else ''} holds {max(frames, 0)} "
                    f"frames of {hello.frame_bytes} bytes; a request needs at least {least}: raise gpu.bytes to "
                    f"{least * hello.frame_bytes} or lower worker.block_tokens"
                )
            most = most_frames(self._memory, hello.frame_bytes, frames)
            pool = await loop.run_in_executor(threads, FramePool, self._memory, hello.frame_bytes, frames, most)
        except SwapError as error:
            if self._memory is not None:
                self._memory.close()
                self._memory = None
            raise ConfigError(f"the GPU tier of {asked} bytes cannot be made: {error}") from error
        self._cache.tiers.compute = GpuTier(pool)
        self.dispatcher.least_frames = least
        self._hello = hello
        if hello.block_tokens_reason:
            log.warning("blocks are not of the size that worker.block_tokens asks for: %s", hello.block_tokens_reason)
        return pool

    def _shape(self, hello: Hello) -> KvShape:
        return KvShape.of(hello, self._settings.worker.max_step_tokens)

    def _automatic_bytes(self, memory: VirtualMemory, hello: Hello) -> int:
        shared = self._cache.tiers.shared
        untouched = shared.arena.untouched_bytes() if isinstance(shared, CpuTier) and not memory.on_device else 0
        return automatic_bytes(memory, hello, untouched)

    def _on_done(self, done: Done) -> None:
        self.worker.proven()
        self.dispatcher.on_done(done)
