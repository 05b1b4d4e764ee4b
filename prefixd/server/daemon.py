"""The daemon: everything put together, started and ended in order."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from prefixd.base import heap
from prefixd.base.clocks import boot_id, elapsed_s
from prefixd.base.errors import ConfigError, UnavailableError
from prefixd.base.tenants import Tenants
from prefixd.cache import Tiers, Troubles
from prefixd.process.limits import LOCK, raise_descriptor_limit, watch_descriptors, watch_memory_lock
from prefixd.process.signals import DaemonSignals
from prefixd.server.access.audit import AuditLog
from prefixd.server.access.socket_access import make_private, private_umask
from prefixd.server.access.tickets import LocalProcess, Tickets
from prefixd.server.figures.metrics_server import MetricsServer
from prefixd.server.figures.snapshot import Snapshot
from prefixd.server.figures.tenant_figures import RequestFigures, TenantFigures
from prefixd.server.kv_events import KVEvents
from prefixd.server.remote_store import open_remote
from prefixd.server.rpc import status
from prefixd.server.rpc.health import Health
from prefixd.server.rpc.listeners import Listeners, local_door
from prefixd.server.rpc.memory_listener import MemoryListener
from prefixd.server.rpc.processes import ProcessWatch
from prefixd.server.services.admin_service import AdminService
from prefixd.server.services.cache_service import PrefixCacheService
from prefixd.server.services.inference_service import InferenceService
from prefixd.server.set_aside import SetAsideCheck
from prefixd.server.settings_reload import SettingsReload
from prefixd.serving.dispatch.wiring import make_cache
from prefixd.serving.generation import Generation
from prefixd.serving.models.models import Models
from prefixd.settings import Settings
from prefixd.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc, inference_pb2, inference_pb2_grpc
from prefixd_swap import (
    MAX_SLABS,
    CpuArena,
    FileOps,
    HostPin,
    ShrinkError,
    SlabStore,
    SwapError,
    create_copy_engine,
)

log = logging.getLogger(__name__)

_EXPIRY_S = 0.25
TIER_HEALTH = "prefixd.tier."
"""Before a tier's name (`prefixd.tier.disk`): the health service that says whether the tier is well."""
MODEL_HEALTH = "prefixd.model."
"""Before a model's name, where there are several: whether its worker serves, or will when it has started."""
_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_SERVICES = (
    cache_pb2.DESCRIPTOR.services_by_name["PrefixCache"].full_name,
    _INFERENCE,
    admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the daemon listens, and how long that took since it opened its tiers."""

    socket: Path
    tcp: str | None
    metrics_port: int | None
    opening_s: float


async def serve(
    settings: Settings,
    *,
    ready: Callable[[Endpoints], None] | None = None,
    ops: FileOps | None = None,
    read_settings: Callable[[], Settings] | None = None,
) -> int:
    """Runs the daemon until SIGTERM, SIGINT or a drain with shutdown; returns the exit status.

    The status is 1 when the daemon ended itself because one of its background tasks failed, else 0.

    Args:
        settings: checked settings.
        ready: called once, when calls are taken (the model may still be loading; requests for it wait).
        ops: the disk tier's file calls, to have them fail in a test.
        read_settings: reads the settings again, for SIGHUP; runs in a thread. None: as they are.

    Raises:
        ConfigError: a directory, socket or size that the daemon cannot start with.
    """
    async with AsyncExitStack() as stack:
        daemon = Daemon(settings, ops, read_settings)
        stack.callback(daemon.signals.ignore)  # after all else: until then a second signal ends the process
        endpoints = await daemon.start(stack)
        heap.exempt_from_collection()
        heap.reuse_large_arrays()
        if ready is not None:
            ready(endpoints)
        await daemon.ended.wait()
        if daemon.models is not None:
            await daemon.models.end_loading()
        await daemon.drain()
    return 1 if daemon.failed else 0


class Daemon:
    """One daemon's parts. `start` enters into a stack what has to be undone.

    Args:
        settings: checked settings.
        ops: the disk tier's file calls, to have them fail in a test.
        read_settings: see `serve`.
    """

    def __init__(
        self, settings: Settings, ops: FileOps | None = None, read_settings: Callable[[], Settings] | None = None
    ) -> None:
        self.settings = settings
        self._read_settings = read_settings
        self._ops = ops
        self.draining = asyncio.Event()
        self.ended = asyncio.Event()
        self.failed = False
        self._drained: asyncio.Task[tuple[int, int]] | None = None
        self._before_drain = (0, 0)  # blocks written to disk and requests finished when the first drain began
        self.signals = DaemonSignals(self._on_signal)
        self._health = Health()
        self.models: Models | None = None
        self.doors: Listeners | None = None

    async def start(self, stack: AsyncExitStack) -> Endpoints:
        """Starts everything, innermost first."""
        settings = self.settings
        clock = elapsed_s
        device = resolve_device(settings) if settings.worker.enabled else "cpu"
        settings = settings.on_device(device)
        tenants = Tenants(settings.quotas)
        tickets = Tickets(elapsed_s, boot_id())
        audit = AuditLog(settings.server.audit_log)
        stack.callback(audit.close)
        doors = self.doors = Listeners(settings, tenants, tickets, audit)
        if doors.tokens is not None:
            stack.callback(doors.tokens.close)
            await doors.tokens.load()
        stack.callback(private_umask())
        stack.callback(_lock_directory(settings.data_dir))
        tickets.load_key(settings.data_dir)
        heap.keep_large_arrays_apart()
        began_s = clock()
        troubles = Troubles(clock)
        troubles.listeners.append(self._on_troubles)
        slabs = settings.disk.bytes and MAX_SLABS
        raise_descriptor_limit(settings.server.max_sessions, slabs, troubles)
        arena = _open_arena(settings, device, troubles, stack)
        store = _open_store(settings, self._ops, stack)
        try:
            tiers = Tiers.local(
                arena,
                store,
                urgency=settings.transfers.urgency,
                io_threads=settings.disk.io_threads,
                remote=None if settings.remote.url is None else partial(open_remote, settings.remote, arena),
                troubles=troubles,
                clock=clock,
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
            self.cache = cache = make_cache(settings, tiers, engine, clock, tenants)
            restored = cache.restore()
        except SwapError as error:
            raise ConfigError(f"the cache cannot be opened: {error}") from error
        if restored:
            log.info("%d blocks are back from disk", restored)
        if store is not None:
            set_aside = SetAsideCheck(store, troubles, cache.mover.lost)
            try:
                set_aside.start()
            except SwapError as error:
                raise ConfigError(f"disk.path = {settings.disk_path}: {error}") from error
            cache.mover.lost.update(store.recovery.lost)
            watching = asyncio.create_task(set_aside.watch(), name="set-aside")
            stack.callback(watching.cancel)
            self._watch(watching)
        self._watch(cache.write_back.start())
        self._watch(None if cache.common is None else cache.common.start())
        self._watch(cache.scrubber.start())
        if tiers.durable is not None:
            self._watch(cache.mover.start_probing())
        if cache.mover.remote is not None:
            for task in cache.mover.remote.start():
                self._watch(task)
        stack.push_async_callback(cache.close)
        stack.push_async_callback(status.settle)
        events = None
        if settings.events.endpoint is not None:
            events = KVEvents(cache, settings.events)
            stack.push_async_callback(events.stop)
            self._watch(events.start())
        trimming = asyncio.create_task(cache.namespace_room.trim(), name="namespaces")
        stack.callback(trimming.cancel)
        self._watch(trimming)
        expiry = asyncio.create_task(self._expire(), name="expiry")
        stack.callback(expiry.cancel)
        self._watch(expiry)
        if doors.tokens is not None:
            reading = asyncio.create_task(doors.tokens.watch(troubles), name="tokens")
            stack.callback(reading.cancel)
            self._watch(reading)
        descriptors = asyncio.create_task(watch_descriptors(troubles), name="descriptors")
        stack.callback(descriptors.cancel)
        self._watch(descriptors)
        if arena is not None and LOCK in troubles:
            lock = asyncio.create_task(watch_memory_lock(arena, troubles), name="memory-lock")
            stack.callback(lock.cancel)
            self._watch(lock)

        self.models = models = Models(settings, device, cache, clock) if settings.worker.enabled else None
        if models is not None:
            for task in models.start():
                self._watch(task)
            stack.push_async_callback(models.stop)

        hosts = models.hosts if models is not None else {}
        generation = Generation(cache, hosts, self.draining, clock, self.settings.worker.images_bytes)
        figures = TenantFigures(
            cache,
            doors.limits.calls,
            lambda: {each: RequestFigures(*generation.requests_of(each)) for each in cache.tenants},
            gpu=models is not None,
        )
        snapshot = Snapshot(
            cache,
            self.draining,
            clock,
            clock(),
            hosts,
            figures,
            events,
        )
        path = settings.server.socket
        doors.access.make_directory(path.parent)
        _refuse_taken(path)
        door_path = local_door(path)
        watch = ProcessWatch(cache, doors.identities.of_user)
        stack.callback(watch.close)
        door = MemoryListener(
            door_path,
            -1 if arena is None else arena.fd,
            0 if arena is None else arena.capacity_bytes,
            lambda s: s in cache.leases.sessions,
            doors.access,
            watch.visit,
            may_map=doors.identities.may_map,
            ticket=lambda uid, pid: tickets.issue(LocalProcess(uid, pid)),
        )
        await door.start()
        stack.push_async_callback(door.close)
        service = PrefixCacheService(cache, door_path if arena is not None else None, self.draining)
        cache_pb2_grpc.add_PrefixCacheServicer_to_server(service, doors.services)
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(generation), doors.services)
        admin_pb2_grpc.add_AdminServicer_to_server(
            AdminService(
                cache,
                snapshot,
                self._drain_on_request,
                models.tier_resize if models is not None else None,
                tenants=figures,
                audit=audit,
            ),
            doors.services,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, doors.services)
        named = [*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
            reflection.aio.ReflectionServicer(named), doors.services
        )
        # Until now nobody was served, and `prefixd` ended at once with a signal.
        self._loop = asyncio.get_running_loop()
        self.signals.install()
        tcp = await doors.open()
        stack.push_async_callback(cache.write_back.flush, again=True)  # what clients committed while the daemon drained
        stack.push_async_callback(doors.close, 1.0)
        stack.callback(service.close)
        self._set_health()
        metrics_port = None
        if settings.server.metrics_port is not None:
            try:
                metrics = MetricsServer(snapshot.take, doors.identities.refuse_scraper)
                stack.push_async_callback(metrics.close)
                metrics_port = await metrics.start(settings.server.metrics_port)
            except SwapError as error:
                raise ConfigError(f"server.metrics_port = {settings.server.metrics_port}: {error}") from error
            except OSError as error:
                port = settings.server.metrics_port
                raise ConfigError(
                    f"server.metrics_port = {port} cannot be used ({error.strerror}); choose another"
                ) from error
        reload = SettingsReload(self.settings, self._read_settings, doors, cache, troubles, audit)
        self.signals.take_hangups(lambda: self._loop.call_soon_threadsafe(reload.begin))
        stack.callback(self.signals.ignore_hangups)
        return Endpoints(path, tcp, metrics_port, clock() - began_s)

    async def drain(self) -> tuple[int, int]:
        """Takes no new work, finishes what runs, writes back; the same drain for everyone who asks meanwhile.

        Returns how many blocks were written to disk, and how many requests finished, since the first drain began.
        """
        if self._drained is None or self._drained.done():
            self._drained = asyncio.create_task(self._drain(), name="drain")
        return await asyncio.shield(self._drained)

    async def _drain(self) -> tuple[int, int]:
        models, again = self.models, self.draining.is_set()
        if not again:
            self._before_drain = (self.cache.write_back.written, 0 if models is None else models.finished)
        self.draining.set()
        self._set_health()
        patience_s = 0.0 if self.failed else self.settings.server.drain_timeout_s
        if models is not None:
            try:
                await asyncio.wait_for(models.idle(), patience_s)
            except TimeoutError:
                seconds = self.settings.server.drain_timeout_s
                log.warning("requests still run after %g s; they are ended", seconds)
                error = UnavailableError(f"the daemon drained for {seconds:g} s and ended the request; send it again")
                await asyncio.gather(*(host.dispatcher.end_all(error) for host in models.hosts.values()))
        try:
            await asyncio.wait_for(self.cache.mover.idle(), patience_s)  # commits most of all
        except TimeoutError:
            log.warning("calls that store or lease blocks still run after %g s; they are ended", patience_s)
        await self.cache.write_back.flush(again=again)
        before_written, before_finished = self._before_drain
        written = self.cache.write_back.written - before_written
        finished = 0 if models is None else models.finished - before_finished
        log.info("drained: %d requests finished, %d blocks written to disk", finished, written)
        return written, finished

    async def _drain_on_request(self, shutdown: bool) -> tuple[int, int]:
        result = await self.drain()
        if shutdown:
            self.ended.set()
        return result

    def _watch(self, task: asyncio.Task[None] | None) -> None:
        """Ends the daemon when a background task fails: without it, it would take calls and never answer."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                log.critical("task %s failed; the daemon ends", task.get_name(), exc_info=task.exception())
                self.failed = True
                self.ended.set()

        if task is not None:
            task.add_done_callback(ended)

    def _on_signal(self) -> None:
        """Within the signal handler, which interrupts anything: what is to be done is left to the event loop."""
        self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        log.info("ending: what runs is finished first; a second signal ends at once")
        self.ended.set()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_S)
            await self.cache.retained.sweep()
            self.cache.namespace_room.look()
            expired = self.cache.leases.expire(self.cache.clock())
            if expired:
                log.warning("%d leases or reservations ended because their time was up", expired)

    def _set_health(self) -> None:
        """The daemon's, its services' and its tiers' health.

        A tier that is out or shrunk does not serve, nor does Inference without a worker, while the rest does: whoever
        sends requests elsewhere then must not take the cache away from its other clients.
        """
        draining = self.draining.is_set()
        models = self.models
        well = {service: not draining for service in ("", *_SERVICES)}
        well[_INFERENCE] &= models is None or models.serves
        if models is not None and len(models.hosts) > 1:
            well |= {
                f"{MODEL_HEALTH}{name}": not (draining or host.worker.failure) for name, host in models.hosts.items()
            }
        for tier in self.cache.tiers.existing:
            well[f"{TIER_HEALTH}{tier.name}"] = not self.cache.tiers.trouble(tier) and not draining
        for service, serves in well.items():
            status = health_pb2.HealthCheckResponse
            self._health.set(service, status.SERVING if serves else status.NOT_SERVING)

    def _on_troubles(self) -> None:
        if hasattr(self, "cache"):
            self._set_health()


def resolve_device(settings: Settings) -> str:
    """The device that `gpu.device` means here."""
    wanted = settings.gpu.device
    if wanted == "cpu" or (wanted == "auto" and not _has_cuda_driver()):
        return "cpu"
    import torch

    available = torch.cuda.is_available()
    if wanted == "auto":
        return "cuda:0" if available else "cpu"
    if not available:
        raise ConfigError(f"gpu.device = {wanted}, but torch sees no CUDA device here; use auto or cpu")
    return wanted if ":" in wanted else f"{wanted}:0"


def _has_cuda_driver() -> bool:
    """Where there is none, torch is not asked: loading it takes two seconds of CPU time and 250 MiB."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _lock_directory(directory: Path) -> Callable[[], None]:
    """Makes the data directory and locks it; returns how to unlock it."""
    make_private("data_dir", directory)
    try:
        fd = os.open(directory / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"data_dir = {directory} is not writable ({error.strerror}); choose another") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(fd, 32).decode(errors="replace").strip()
        os.close(fd)
        raise ConfigError(
            f"data_dir = {directory} is in use by another daemon (pid {holder or 'unknown'}); stop it or choose another"
        ) from None
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return lambda: os.close(fd)


def _refuse_taken(path: Path) -> None:
    """Removes the socket file of a daemon that is gone; ConfigError when somebody listens there."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"server.socket = {path} is a file, no socket; remove it or choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise ConfigError(f"server.socket = {path} cannot be reached ({error.strerror}); remove it") from error
    raise ConfigError(f"server.socket = {path} is in use by another process; stop it or choose another path")


def _open_arena(settings: Settings, device: str, troubles: Troubles, stack: AsyncExitStack) -> CpuArena | None:
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


def _open_store(settings: Settings, ops: FileOps | None, stack: AsyncExitStack) -> SlabStore | None:
    if not settings.disk.bytes:
        return None
    path = settings.disk_path
    make_private("disk.path", path)
    try:
        store = SlabStore.open(
            path,
            settings.disk.bytes,
            io=settings.disk.io,
            io_threads=settings.disk.io_threads,
            ops=ops,
            shrink=settings.disk.shrink,
        )
    except ShrinkError as error:
        raise ConfigError(
            f"disk.bytes = {settings.disk.bytes}: {error} in disk.path = {path}; raise disk.bytes, or set "
            "disk.shrink = true to lose these blocks"
        ) from error
    except SwapError as error:
        raise ConfigError(f"disk.path = {path}: {error}") from error
    stack.callback(store.close)
    return store
