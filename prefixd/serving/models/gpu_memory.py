"""The GPU tier's memory, which all models of a daemon share: frames have one size, and any frame serves any model.

Each model's worker reports the frame size that suits its model. The tier's frame is the greatest common divisor of
these sizes, so that a block of each model takes a whole number of frames: Jenga's compatible page (section 6.1).
Eviction in the one tier moves memory between the models: a busy model takes frames, and blocks that have not been used
for longest are evicted.

```
Hello of a    Hello of b                          Hello of a's next worker
     |             |                                        |
     +-- waits ----+--> made, or a model refused            +--> the same tier
     |
     +-- its worker dies: the Hello is withdrawn; the next worker's is waited for, unless the worker was given up
```
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
from collections.abc import Collection, Mapping

from prefixd.base.errors import ConfigError, UnavailableError
from prefixd.cache import TieredCache
from prefixd.serving.kv_shape import KvShape
from prefixd.serving.models.elastic_size import Bounds
from prefixd.settings import Settings
from prefixd.settings.tiers import GpuSettings
from prefixd.worker_protocol.protocol import Hello
from prefixd_swap import FramePool, SwapError, VirtualMemory, create_memory, started_threads
from prefixd_swap.tiers import CpuTier, GpuTier, PagedGpuTier

log = logging.getLogger(__name__)

SHARE = 0.9
"""Share of the memory that is free after the weights. The rest is a reserve: estimates are inexact, and other processes
may use the device."""

_RESERVE_SHARE = 20


def automatic_bytes(memory: VirtualMemory, hellos: Collection[Hello], untouched_bytes: int, setting: str) -> int:
    """The tier's size, or its most, for "auto" on this device now; below 0 if not even the models fit.

    Args:
        memory: on the device, which is asked for its free memory.
        hellos: estimates of the models' memory; their weights are not loaded yet.
        untouched_bytes: reserved memory of the same device that has not been touched yet.
        setting: gpu.bytes or gpu.most_bytes.
    """
    free = memory.available_bytes()
    weights, working = (sum(getattr(hello, name) for hello in hellos) for name in ("weights_bytes", "working_bytes"))
    nbytes = int((free - untouched_bytes - weights - working) * SHARE)
    log.info(
        "%s = auto: %d bytes, %d%% of what is left of %d free on %s after %d for the weights, %d to work with "
        "and %d for the CPU tier",
        *(setting, nbytes, round(SHARE * 100), free, memory.device, weights, working, untouched_bytes),
    )
    return nbytes


def most_frames(memory: VirtualMemory, frame_bytes: int, frames: int) -> int:
    """The most frames that the tier can ever have, for which addresses are reserved: as many as the device holds.

    If the process's addresses are limited (`ulimit -v`), no more than at the start, to save addresses.
    """
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return frames
    return max(frames, memory.total_bytes() // frame_bytes)


def reserve_bytes(gpu: GpuSettings, memory: VirtualMemory) -> int:
    """Free memory of the device that a tier which grows leaves for others."""
    return memory.total_bytes() // _RESERVE_SHARE if gpu.reserve_bytes is None else gpu.reserve_bytes


def least_frames(gpu: GpuSettings, memory: VirtualMemory, frame_bytes: int, smallest: int, most: int) -> int:
    """The least frames of a tier that grows to `most` frames; `smallest`: what the smallest request of any model needs.

    Raises ConfigError if gpu.least_bytes, gpu.most_bytes and gpu.reserve_bytes do not fit together on this device.
    """
    total, reserve, device = memory.total_bytes(), reserve_bytes(gpu, memory), memory.device
    least = max((gpu.least_bytes or 0) // frame_bytes, smallest)
    if isinstance(gpu.most_bytes, int) and gpu.most_bytes > total:
        raise ConfigError(
            f"gpu.most_bytes = {gpu.most_bytes}, and {device} has {total} bytes in all; lower it, or set it to auto"
        )
    if least > most:
        raise ConfigError(
            f"gpu.least_bytes = {gpu.least_bytes} is above the most that the tier may have on {device} now, "
            f"{most * frame_bytes} (gpu.most_bytes = {gpu.most_bytes or 'auto'}); lower it, or free memory there"
        )
    if least * frame_bytes + reserve > total:
        setting = "a twentieth of the device" if gpu.reserve_bytes is None else f"gpu.reserve_bytes = {reserve}"
        raise ConfigError(
            f"{setting} is to stay free, and the tier has {least * frame_bytes} bytes at least, but {device} has "
            f"{total} in all, so the tier could never grow; lower gpu.reserve_bytes or gpu.least_bytes"
        )
    if gpu.least_bytes is not None and gpu.least_bytes < smallest * frame_bytes:
        log.info(
            "gpu.least_bytes = %d holds no request; the tier has %d at least", gpu.least_bytes, smallest * frame_bytes
        )
    return least


class _TooSmallError(Exception):
    """The tier cannot hold the smallest request of a model."""

    def __init__(self, model: str, why: str) -> None:
        super().__init__(why)
        self.model = model


class GpuMemory:
    """Makes the GPU tier when every model's worker has sent its Hello, and ends it.

    Args:
        settings: the daemon's.
        device: "cpu" or "cuda:N".
        cache: gets the tier.
        models: the names of all models.

    Raises ConfigError when there is no thread to make the tier in.
    """

    def __init__(self, settings: Settings, device: str, cache: TieredCache, models: Collection[str]) -> None:
        self._settings = settings
        self._device = device
        self._cache = cache
        self._missing = set(models)
        self._hellos: dict[str, Hello] = {}
        self._refused: dict[str, ConfigError] = {}  # their smallest request does not fit the tier
        try:
            self._threads = started_threads(1, "prefixd-gpu-memory")  # not a worker's thread, which ends with it
        except SwapError as error:
            raise ConfigError(f"the GPU tier cannot be made: {error}") from error
        self._memory: VirtualMemory | None = None
        self._making: asyncio.Task[None] | None = None
        self._made: asyncio.Future[FramePool] | None = None
        self._stopping = False

    async def frames_for(self, model: str, hello: Hello) -> FramePool:
        """Waits until all models are known and the tier is made. Cancelled when the model's worker ends first.

        The tier is made in a thread: 51,200 chunks take up to ten seconds, and the daemon serves its clients meanwhile.

        Raises ConfigError if the tier cannot be made or is too small for this model, or if the Hello differs from that
        of the worker before; UnavailableError if the daemon ends first.
        """
        made = self._awaited
        if model in self._missing:
            self._hellos[model] = hello
            self._missing.remove(model)
            self._make_if_known()
            if self._missing:
                log.info(
                    "model %s waits for the frames that it shares with %s", model, ", ".join(sorted(self._missing))
                )
        elif self._hellos.get(model, hello) != hello:
            raise ConfigError("the model changed while the daemon ran; restart the daemon")
        try:
            await asyncio.wait({made})
        except asyncio.CancelledError:
            if self._making is None:
                del self._hellos[model]
                self._missing.add(model)
            raise
        if model in self._refused:
            raise self._refused[model]
        return made.result()

    async def elastic_pool(self) -> tuple[FramePool, Bounds]:
        """Waits until the tier is made; returns its frames and the bounds of its size. Raises as `frames_for`."""
        made = self._awaited
        await asyncio.wait({made})
        pool = made.result()
        gpu = self._settings.gpu
        reserve = -(-reserve_bytes(gpu, pool.memory) // pool.frame_bytes)
        return pool, Bounds(pool.capacity, pool.attainable, reserve, gpu.idle_s)

    def device_bytes(self, pool: FramePool) -> tuple[int, int]:
        """Free bytes of the device, without those that the CPU tier was promised and has not touched, and all its
        bytes. Asks the system, so call it in a thread."""
        memory = pool.memory
        return memory.available_bytes() - self._untouched_bytes(memory), memory.total_bytes()

    def leave_out(self, model: str) -> None:
        """A model's worker was given up: the others stop waiting for it."""
        if model in self._missing:
            self._missing.remove(model)
            self._make_if_known()

    def stop_making(self) -> None:
        """The daemon ends: stops making the tier, and fails the calls that wait for it."""
        self._stopping = True
        if self._memory is not None:
            self._memory.stop_creating()
        if self._making is None and not self._awaited.done():
            self._awaited.set_exception(UnavailableError("the daemon is ending"))
            self._awaited.exception()  # read here, since no call may wait for it

    async def close(self) -> None:
        """Gives the memory back. The workers have ended, and nothing uses the tier."""
        if self._making is not None:
            await asyncio.wait({self._making})
        if isinstance(self._cache.tiers.compute, GpuTier):
            pool = self._cache.tiers.frames
            self._cache.tiers.end_compute()
            pool.close()
        self._forget_memory()
        self._threads.shutdown()

    # -- inside -------------------------------------------------------------------------------------------------

    @property
    def _awaited(self) -> asyncio.Future[FramePool]:
        if self._made is None:
            self._made = asyncio.get_running_loop().create_future()
        return self._made

    def _make_if_known(self) -> None:
        if not self._missing and self._hellos and self._making is None and not self._stopping:
            self._making = asyncio.create_task(self._make(), name="gpu-memory")

    async def _make(self) -> None:
        made = self._awaited
        try:
            pool = await self._pool()
        except Exception as error:
            self._forget_memory()
            if isinstance(error, SwapError):
                gpu = self._settings.gpu
                asked = f"gpu.least_bytes = {gpu.least_bytes or 0}" if gpu.elastic else f"{gpu.bytes} bytes"
                error = ConfigError(f"the GPU tier of {asked} cannot be made: {error}")
            made.set_exception(error)
            made.exception()  # read here, since each refused model gets its own error
        else:
            self._cache.tiers.set_compute(self._tier(pool))
            made.set_result(pool)

    def _forget_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _tier(self, pool: FramePool) -> GpuTier:
        """The tier over the frames: with pages if a part takes several frames side by side."""
        shapes = [KvShape.of(hello.in_frames(pool.frame_bytes), 0) for hello in self._hellos.values()]
        widths = {width for shape in shapes for width in shape.all_widths}
        if max(widths) == 1:
            return GpuTier(pool)
        tier = PagedGpuTier(pool, widths, jenga_order=self._settings.worker.page_order == "jenga")
        log.info(
            "parts of %s frames share large pages of %d bytes",
            *(", ".join(map(str, sorted(widths))), tier.large_page_bytes),
        )
        return tier

    async def _pool(self) -> FramePool:
        """The frames of all models whose smallest request fits; the others are refused."""
        while True:
            try:
                return await self._pool_of(self._hellos)
            except _TooSmallError as error:
                self._refused[error.model] = ConfigError(str(error))
                del self._hellos[error.model]
                if not self._hellos:
                    raise self._refused[error.model] from None
                log.warning("model %s is left out of the GPU tier: %s", error.model, error)
                self._forget_memory()

    async def _pool_of(self, models: Mapping[str, Hello]) -> FramePool:
        """Raises _TooSmallError for the largest model of those that do not fit."""
        gpu, hellos, loop = self._settings.gpu, models.values(), asyncio.get_running_loop()
        setting, asked = ("gpu.most_bytes", gpu.most_bytes or "auto") if gpu.elastic else ("gpu.bytes", gpu.bytes)
        frame_bytes = common_frame_bytes(hellos)
        chunk_bytes = math.gcd(*(hello.chunk_bytes for hello in hellos))
        memory = self._memory = await loop.run_in_executor(self._threads, create_memory, self._device, chunk_bytes)
        if self._stopping:
            memory.stop_creating()
        nbytes = asked
        if asked == "auto":
            nbytes = await loop.run_in_executor(self._threads, self._automatic_bytes, memory, hellos, setting)
        assert isinstance(nbytes, int)
        frames = nbytes // frame_bytes
        shapes = {model: KvShape.of(hello.in_frames(frame_bytes), 0) for model, hello in models.items()}
        too_large = [model for model, shape in shapes.items() if shape.least_frames > frames]
        if too_large:
            # Without the largest the others have more memory, since its weights are not loaded either.
            model = max(
                too_large,
                key=lambda each: (
                    shapes[each].least_frames * frame_bytes + models[each].weights_bytes + models[each].working_bytes
                ),
            )
            least = shapes[model].least_frames
            need, automatic = least * frame_bytes, asked == "auto"
            remedy = f"raise {setting} to {need}"
            if automatic:
                remedy = f"free memory on {memory.device}, where its weights take {models[model].weights_bytes} bytes,"
            raise _TooSmallError(
                model,
                f"{setting} = {asked}{f', {nbytes} bytes,' if automatic else ''} holds {max(frames, 0)} frames of "
                f"{frame_bytes} bytes, and a request of {model} needs at least {least}, {need} bytes; {remedy} or "
                "lower worker.block_tokens",
            )
        if len(models) > 1:
            takes = ", ".join(f"{shape.block_frames + shape.state_frames}" for shape in shapes.values())
            log.info("%d models share frames of %d bytes; a block takes %s of them", len(models), frame_bytes, takes)
        most, first = most_frames(memory, frame_bytes, frames), frames
        if gpu.elastic:
            smallest = max(shape.least_frames for shape in shapes.values())
            first = least_frames(gpu, memory, frame_bytes, smallest, frames)
        pool = await loop.run_in_executor(self._threads, FramePool, memory, frame_bytes, first, most)
        if gpu.elastic:
            pool.let_grow(frames)
        return pool

    def _automatic_bytes(self, memory: VirtualMemory, hellos: Collection[Hello], setting: str) -> int:
        return automatic_bytes(memory, hellos, self._untouched_bytes(memory), setting)

    def _untouched_bytes(self, memory: VirtualMemory) -> int:
        shared = self._cache.tiers.shared
        return shared.arena.untouched_bytes() if isinstance(shared, CpuTier) and not memory.on_device else 0


def common_frame_bytes(hellos: Collection[Hello]) -> int:
    """The largest frame of which those of all models are made: a whole number of the largest chunks they share."""
    return math.gcd(*(hello.frame_bytes for hello in hellos))
