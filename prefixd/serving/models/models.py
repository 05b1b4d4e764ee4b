"""The models beside the cache: a worker and a dispatcher each, and one GPU tier for all of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from prefixd.base.errors import ConfigError
from prefixd.cache import TieredCache
from prefixd.serving.dispatch.capacity.tier_share import TierShare
from prefixd.serving.models.elastic_tier import ElasticTier
from prefixd.serving.models.embedded_model import ensure_embedded_model
from prefixd.serving.models.gpu_memory import GpuMemory
from prefixd.serving.models.model_host import ModelHost
from prefixd.serving.models.tier_resize import TierResize
from prefixd.settings import Settings
from prefixd.settings.model_folder import model_name


class Models:
    """Starts and ends the models that the settings name.

    A model's name is its directory's, or the one by which it was downloaded.

    Args:
        settings: the daemon's.
        device: "cpu" or "cuda:N".
        cache: gets the GPU tier when all workers have sent their Hello.
        clock: seconds.

    Attributes:
        hosts: by name, in the order of the settings; the first is the default model.
        elastic: changes the GPU tier's size with the load; None if its size is fixed.

    Raises ConfigError for a directory that is not there, and for two of one name.
    """

    def __init__(self, settings: Settings, device: str, cache: TieredCache, clock: Callable[[], float]) -> None:
        self._cache = cache
        directories = _directories(settings)
        self.gpu = GpuMemory(settings, device, cache, directories)
        share = TierShare()
        self.hosts = {
            name: ModelHost(
                name, directory, settings, device, cache, clock, self.gpu, share, part=_part(name, directories)
            )
            for name, directory in directories.items()
        }
        self.tier_resize = TierResize(
            cache,
            [host.worker for host in self.hosts.values()],
            [host.dispatcher for host in self.hosts.values()],
            clock,
        )
        self.elastic = None
        if settings.gpu.elastic:
            dispatchers = [host.dispatcher for host in self.hosts.values()]
            self.elastic = ElasticTier(cache, self.tier_resize, share, dispatchers, clock, self.gpu.device_bytes)

    def start(self) -> list[asyncio.Task[None]]:
        """Starts the workers and the dispatchers; returns the tasks that run them."""
        tasks = [task for host in self.hosts.values() for task in host.start()]
        return tasks if self.elastic is None else [*tasks, self.elastic.start(self.gpu.elastic_pool())]

    async def stop(self) -> None:
        """Ends the workers and gives the GPU tier's memory back."""
        hosts = list(self.hosts.values())
        self.tier_resize.interrupt()
        if self.elastic is not None:
            self.elastic.interrupt()
        for host in hosts:
            host.stop_tokenizing()
        for host in hosts:
            await host.dispatcher.stop()
        ending = [asyncio.create_task(host.worker.stop()) for host in hosts]
        await asyncio.sleep(0)  # each worker is marked as stopping before the tier that it waits for fails
        self.gpu.stop_making()
        await asyncio.gather(*ending)
        if self.elastic is not None:
            await self.elastic.stop()
        await self.tier_resize.stop()
        for host in hosts:
            await host.stop_loading()
            host.dispatcher.abandon()
        await self._cache.write_back.stop()
        if self._cache.mover.remote is not None:
            await self._cache.mover.remote.stop()
        await self._cache.mover.quiesce()
        await self.gpu.close()

    async def end_loading(self) -> None:
        """The daemon ends: stops the models that still load, which may take minutes."""
        await asyncio.gather(*(host.end_if_loading() for host in self.hosts.values()))

    async def idle(self) -> None:
        """Waits until no request waits or runs, in any model."""
        for host in self.hosts.values():
            await host.dispatcher.idle()

    @property
    def first(self) -> ModelHost:
        """The model of requests that name none."""
        return next(iter(self.hosts.values()))

    @property
    def finished(self) -> int:
        """Requests that have ended, in all models."""
        return sum(host.dispatcher.counters.finished for host in self.hosts.values())

    @property
    def serves(self) -> bool:
        """Whether there is a model whose worker was not given up."""
        return any(not host.worker.failure for host in self.hosts.values())


def _directories(settings: Settings) -> dict[str, Path]:
    worker = settings.worker
    found: dict[str, Path] = {}
    for setting, directory in (
        ("worker.model", worker.model or _embedded()),
        *(("worker.more_models", more) for more in worker.more_models),
    ):
        if worker.more_models and not directory.is_dir():
            raise ConfigError(f"{setting} = {directory} is no directory; name one with a Hugging Face model")
        for name, other in found.items():
            if directory.samefile(other):
                raise ConfigError(f"{setting} = {directory} is the model {other} once more; name each model once")
            if name == model_name(directory):
                raise ConfigError(
                    f"{setting} = {directory} has the name of {other}, and requests choose a model by its directory's "
                    "name; rename one, or name a symbolic link to it"
                )
        found[model_name(directory)] = directory
    return found


def _embedded() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return ensure_embedded_model(Path(home).expanduser() / "prefixd")
    except OSError as error:
        raise ConfigError(f"the embedded model cannot be written ({error}); set XDG_CACHE_HOME") from error


def _part(name: str, names: dict[str, Path]) -> str:
    """A worker's name in troubles."""
    return "worker" if len(names) == 1 else f"worker of {name}"
