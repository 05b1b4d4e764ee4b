"""One model beside the cache: its worker process, its dispatcher, its tokenizer and its namespace."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from prefixd.base.errors import ConfigError, ExhaustedError, UnavailableError
from prefixd.base.long_work.steps import in_thread
from prefixd.base.model_fingerprint import fingerprint, fingerprint_of_both
from prefixd.base.sampling import MOST_BEAMS
from prefixd.cache import Namespace, NamespaceSpec, TieredCache
from prefixd.images.identity import LEAST_BLOCK_TOKENS
from prefixd.images.image_files import ImageLimits
from prefixd.images.token_counts import FixedCount
from prefixd.serving.dispatch.capacity.tier_share import TierShare
from prefixd.serving.dispatch.wiring import make_dispatcher
from prefixd.serving.images.image_decoder import ImageDecoder
from prefixd.serving.images.image_kv import image_namespace
from prefixd.serving.images.image_reader import ImageReader
from prefixd.serving.images.pixel_store import PixelStore
from prefixd.serving.kv_shape import KvShape
from prefixd.serving.models.gpu_memory import GpuMemory
from prefixd.serving.models.served_model import ServedModel
from prefixd.serving.models.worker_process import WorkerProcess, WorkerState
from prefixd.serving.request.kv_needs import KvNeeds
from prefixd.serving.text.tokenization import TextCodec
from prefixd.serving.text.tokenizer_threads import TokenizerThreads, step_back
from prefixd.settings import Settings
from prefixd.worker_protocol.protocol import Done, Hello
from prefixd.worker_protocol.worker_settings import WorkerSettings
from prefixd_swap import FramePool, SwapError, started_threads

log = logging.getLogger(__name__)


class ModelHost:
    """Runs a model directory's worker.

    Args:
        name: by which requests choose the model.
        directory: of the model.
        settings: the daemon's.
        device: "cpu" or "cuda:N".
        cache: gets the GPU tier when the workers of all models have sent their Hello.
        clock: seconds.
        gpu: makes that tier.
        share: connects the dispatchers of all models.
        part: the worker's name in troubles.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        settings: Settings,
        device: str,
        cache: TieredCache,
        clock: Callable[[], float],
        gpu: GpuMemory,
        share: TierShare,
        *,
        part: str,
    ) -> None:
        self.name = name
        self.directory = directory
        self._settings = settings
        self._cache = cache
        self._gpu = gpu
        self._hello: Hello | None = None
        self._model: asyncio.Task[ServedModel] | None = None
        self.namespace_name = ""  # until the model is there
        self._namespaces: list[Namespace] = []
        """Namespaces without an owner, kept so that the tries of this model's blocks are not dropped."""
        try:
            self._text = TokenizerThreads(tenants=lambda: cache.tenants.calling)
            self._images = started_threads(1, "prefixd-images", step_back)
        except SwapError as error:
            raise ConfigError(f"prompts cannot be tokenized, nor their images checked: {error}") from error
        worker = settings.worker
        limits = ImageLimits(worker.images_per_prompt, worker.image_bytes, worker.image_pixels, worker.image_seconds)
        self._pixels = PixelStore()
        self._decoder = ImageDecoder(self.directory, limits, self._pixels, self._images)
        self.worker = WorkerProcess(
            WorkerSettings(
                model=os.fspath(self.directory),
                dtype=worker.dtype,
                device=device,
                block_tokens=worker.block_tokens,
                block_padding=worker.block_padding,
                layout=worker.layout,
                chunk_bytes=settings.gpu.chunk_bytes or 0,
                max_step_tokens=worker.max_step_tokens,
                # Twice as many as run at once: ended ones keep their mappings for requests that come back. And a beam
                # search that is wider than the limit, of which only one runs at a time.
                max_sequences=2 * worker.max_running + MOST_BEAMS,
                attention=worker.attention,
                attention_costs="" if worker.attention_costs is None else os.fspath(worker.attention_costs),
                kv=worker.kv,
                groups=worker.groups,
                images_per_prompt=worker.images_per_prompt,
                draft_model="" if worker.draft_model is None else os.fspath(worker.draft_model),
                draft_tokens=worker.draft_tokens,
                cuda_graphs=worker.cuda_graphs,
                async_scheduling=worker.async_scheduling,
                prompt_graphs=worker.prompt_graphs,
                cuda_graphs_seconds=worker.cuda_graphs_seconds,
                operators=worker.operators,
                threads=worker.threads,
                pixels_fd=self._pixels.fd,
            ),
            worker.restart_limit,
            on_hello=self._on_hello,
            on_ready=lambda: self.dispatcher.on_ready(),
            on_step=lambda step: self.dispatcher.on_step(step),
            on_done=self._on_done,
            on_death=self._on_death,
            troubles=cache.tiers.troubles,
            part=part,
            step_seconds=worker.step_seconds,
        )
        self.dispatcher = make_dispatcher(settings, cache, self.worker.send, clock, share)

    @property
    def context_tokens(self) -> int | None:
        """Tokens that the model takes, prompt and output together; None before its worker has told them."""
        return None if self._hello is None else self._hello.max_model_tokens

    def start(self) -> list[asyncio.Task[None]]:
        """Starts the worker and the dispatcher; returns the tasks that run them."""
        self._model = asyncio.create_task(self._load(), name="model")
        return [self.worker.start(), self.dispatcher.start()]

    def stop_tokenizing(self) -> None:
        """Stops tokenizing texts and decoding images."""
        self._text.close()
        self._decoder.close()
        self._images.shutdown(wait=False, cancel_futures=True)

    async def stop_loading(self) -> None:
        """Ends the calls that wait for the model, and the process that decodes its images."""
        self._decoder.close()
        if self._model is not None:
            self._model.cancel()
            await asyncio.gather(self._model, return_exceptions=True)
        await self._decoder.stop()
        # Its thread may still write into the pixels' memory. After a close, another file could get the descriptor.
        end = partial(self._images.shutdown, cancel_futures=True)
        try:
            await in_thread(end)
        except ExhaustedError:
            end()
        self._pixels.close()

    async def end_if_loading(self) -> None:
        """The daemon ends: if the worker still loads, kills it and fails the requests that wait for it."""
        if self.worker.state is WorkerState.STARTING:
            await self.stop_loading()
            await self.dispatcher.stop()
            await self.worker.stop()

    @property
    def codec(self) -> TextCodec | None:
        """The model's tokenizer; None until the model has been read, and for a model without one."""
        if self._model is None or not self._model.done() or self._model.cancelled() or self._model.exception():
            return None
        return self._model.result().codec

    async def model(self) -> ServedModel:
        """Waits for the model, with the frames that its tier may have.

        Raises UnavailableError when its worker was given up, or when the daemon ends first.
        """
        if self._model is None:
            raise UnavailableError("the model is not being loaded; start the daemon's worker first")
        try:
            model = await asyncio.shield(self._model)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # not the caller was cancelled, but the loading
                raise UnavailableError("the daemon is ending; send the request again when it is back") from None
            raise
        except ConfigError as error:  # the operator has to mend it, not the caller
            raise UnavailableError(f"the model cannot be served: {error}") from error
        if self.worker.failure:
            raise UnavailableError(f"the worker was given up: {self.worker.failure}")
        return replace(model, frames=self._cache.tiers.frames.attainable)

    @property
    def loaded(self) -> ServedModel | None:
        """The model, as it was when it was loaded; None before that, and if it cannot be served."""
        task = self._model
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    async def _load(self) -> ServedModel:
        draft, data_dir = self._settings.worker.draft_model, self._settings.data_dir
        try:
            if draft is None:
                name = await self._text.load(fingerprint, self.directory, data_dir)
            else:
                name = await self._text.load(fingerprint_of_both, self.directory, draft, data_dir)
        except OSError as error:
            either = "" if draft is None else f" or {str(draft)!r}"
            raise ConfigError(f"model directory {str(self.directory)!r}{either} cannot be read ({error})") from error
        codec: TextCodec | None = None
        try:
            codec = await self._text.load(TextCodec, self.directory)
        except ConfigError as error:
            log.warning("prompts have to be token ids: %s", error)
        if not await self.worker.settled():
            raise UnavailableError(f"the worker was given up: {self.worker.failure}")
        if self._hello is None:
            raise UnavailableError("the worker became ready without describing its model")
        hello = self._hello.in_frames(self._cache.tiers.frames.frame_bytes)
        images = None if hello.images is None else await self._read_image_processor(hello)
        kv = self._shape(hello)
        namespace = NamespaceSpec(  # blocks on disk of other settings are in other namespaces, and are evicted in time
            name=name,
            block_tokens=hello.block_tokens,
            parts=kv.parts(hello.frame_bytes),
            dtype=hello.dtype,
            layout=hello.layout,
            worker=True,
        )
        of_images = image_namespace(namespace, hello)
        self.namespace_name = namespace.name
        self._namespaces = [self._cache.unlisted(spec) for spec in (namespace, of_images) if spec is not None]
        frames = self._cache.tiers.frames.attainable
        return ServedModel(hello, kv, namespace, codec, self._text, frames, images, of_images)

    async def _read_image_processor(self, hello: Hello) -> ImageReader:
        """Starts the image decoder of a model that reads images. Raises ConfigError."""
        worker = self._settings.worker
        processor = await self._decoder.start()
        fixed = processor.counts.count if isinstance(processor.counts, FixedCount) else 0
        if hello.images is not None and hello.images.both_ways and fixed > worker.max_step_tokens:
            raise ConfigError(
                f"worker.max_step_tokens = {worker.max_step_tokens} is below the {fixed} tokens of an image, which the "
                f"model computes in one step; raise it to {fixed} or more"
            )
        return ImageReader(hello, processor, self._decoder.limits, worker.max_step_tokens, self._decoder, self._images)

    async def _on_hello(self, hello: Hello) -> FramePool:
        """Waits for the GPU tier, which the workers of all models share."""
        if hello.images is not None and hello.block_tokens < LEAST_BLOCK_TOKENS:
            raise ConfigError(
                f"worker.block_tokens = {hello.block_tokens}: the model reads images, and blocks of fewer than "
                f"{LEAST_BLOCK_TOKENS} tokens cannot tell them apart; raise it to {LEAST_BLOCK_TOKENS} or more"
            )
        pool = await self._gpu.frames_for(self.name, hello)
        if self._hello is None:
            shape = self._shape(hello.in_frames(pool.frame_bytes))
            self.dispatcher.least_frames = shape.least_frames
            self.dispatcher.recorder.needs = KvNeeds(shape, pool.frame_bytes)
            self._hello = hello
            if why := hello.block_tokens_reason:
                log.warning("blocks of %s are not as worker.block_tokens asks: %s", self.name, why)
        return pool

    def _shape(self, hello: Hello) -> KvShape:
        return KvShape.of(hello, self._settings.worker.max_step_tokens)

    def _on_done(self, done: Done) -> None:
        self.worker.proven()
        self.dispatcher.on_done(done)

    def _on_death(self, why: str, gave_up: bool) -> None:
        if gave_up:
            self._gpu.leave_out(self.name)
        self.dispatcher.on_death(why, gave_up)
