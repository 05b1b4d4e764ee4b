"""Opens the tiers and the cache over them, and restores the blocks that are on disk."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from functools import partial

from prefixd.base.clocks import elapsed_s
from prefixd.base.errors import ConfigError
from prefixd.base.tenancy.tenants import Tenants
from prefixd.cache import TieredCache, Tiers, Troubles
from prefixd.process.process_limits import LOCK
from prefixd.server.access.disk_keys import read_disk_keys
from prefixd.server.access.socket_access import close_to_others, make_own
from prefixd.server.startup.remote_store import open_remote
from prefixd.serving.dispatch.wiring import make_cache
from prefixd.settings import Settings
from prefixd_swap import (
    CpuArena,
    FileOps,
    HostPin,
    MissingDriveError,
    ShrinkError,
    SlabStore,
    SwapError,
    create_copy_engine,
)
from prefixd_swap.errors import MissingKeyError

log = logging.getLogger(__name__)


def open_cache(
    settings: Settings,
    device: str,
    arena: CpuArena | None,
    store: SlabStore | None,
    tenants: Tenants,
    troubles: Troubles,
    stack: AsyncExitStack,
) -> TieredCache:
    """Opens the cache over the arena and the disk tier's store; prompts can match the blocks on disk from then on.

    The caller closes the cache, before `stack` closes the tiers.

    Raises:
        ConfigError: the tiers or the cache cannot be opened with these settings.
    """
    try:
        tiers = Tiers.local(
            arena,
            store,
            urgency=settings.transfers.urgency,
            io_threads=settings.disk.io_threads,
            remote=None if settings.remote.url is None else partial(open_remote, settings.remote, arena),
            troubles=troubles,
            clock=elapsed_s,
        )
    except SwapError as error:
        raise ConfigError(f"disk.io_threads = {settings.disk.io_threads}: {error}") from error
    stack.push_async_callback(tiers.close)
    try:
        engine = create_copy_engine(device)
    except SwapError as error:
        raise ConfigError(f"gpu.device = {settings.gpu.device}: {error}") from error
    stack.callback(engine.close)
    try:
        cache = make_cache(settings, tiers, engine, elapsed_s, tenants)
        restored = cache.restore()
    except SwapError as error:
        raise ConfigError(f"the cache cannot be opened: {error}") from error
    if restored:
        log.info("%d blocks were restored from disk", restored)
    return cache


def open_arena(settings: Settings, device: str, troubles: Troubles, stack: AsyncExitStack) -> CpuArena | None:
    """Opens the CPU tier's memory, and locks and pins it if settings and device need that; None without a CPU tier.

    Raises:
        ConfigError: the machine does not have this much memory.
    """
    if not settings.cpu.bytes:
        return None
    try:
        arena = CpuArena(settings.cpu.bytes, populate=settings.cpu.populate)
    except SwapError as error:
        raise ConfigError(f"cpu.bytes = {settings.cpu.bytes}: {error}") from error
    stack.callback(arena.close)
    if settings.cpu.lock:
        try:
            arena.lock()
        except SwapError as error:
            troubles.begin(LOCK, str(error))
    if device != "cpu":
        address = arena.span(0, arena.capacity_bytes).address
        ordinal = int(device.partition(":")[2])
        loop = asyncio.get_running_loop()

        def failed(why: str) -> None:
            line = f"of the CPU tier {why}; raise RLIMIT_MEMLOCK (`ulimit -l`, LimitMEMLOCK= of systemd)"
            loop.call_soon_threadsafe(troubles.begin, "memory pinning", line)

        stack.callback(HostPin(address, arena.capacity_bytes, ordinal, failed).close)
    return arena


def open_store(settings: Settings, ops: FileOps | None, stack: AsyncExitStack) -> SlabStore | None:
    """Opens the disk tier's store; None without a disk tier.

    Raises:
        ConfigError: the directory cannot be used, has more blocks than `disk.bytes` allows, or blocks that are
            encrypted with keys that no key file has.
    """
    if not settings.disk.bytes:
        return None
    path = settings.disk_path
    for name, each in settings.disk_paths.items():
        make_own(name, each)
    try:
        store = SlabStore.open(
            path,
            settings.disk.bytes,
            io=settings.disk.io,
            io_threads=settings.disk.io_threads,
            ops=ops,
            shrink=settings.disk.shrink,
            more_paths=settings.disk.more_paths,
            drop_missing=settings.disk.drop_missing,
            keys=read_disk_keys(settings),
        )
    except MissingDriveError as error:
        raise ConfigError(
            f"disk.more_paths: {error}; mount its drive and name it in disk.more_paths, or set disk.drop_missing = "
            "true to start without it and lose these blocks"
        ) from error
    except ShrinkError as error:
        raise ConfigError(
            f"disk.bytes = {settings.disk.bytes}: {error} in disk.path = {path}; raise disk.bytes, or set "
            "disk.shrink = true to lose these blocks"
        ) from error
    except MissingKeyError as error:
        raise ConfigError(
            f"disk.path = {path}: {error}; key files are disk.encryption_key_file and tenants.NAME.encryption_key_file"
        ) from error
    except SwapError as error:
        raise ConfigError(f"disk.path = {path}: {error}") from error
    stack.callback(store.close)
    for name, each in settings.disk_paths.items():  # a directory that is not the store's was refused, as it was
        close_to_others(name, each)
    return store
