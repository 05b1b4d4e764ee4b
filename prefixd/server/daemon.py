"""The daemon: builds its parts, starts them in order and ends them in the opposite order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from prefixd.base import heap
from prefixd.base.clocks import boot_id, elapsed_s
from prefixd.base.errors import ConfigError, PreconditionError
from prefixd.base.tenancy.tenants import Tenants
from prefixd.cache import Troubles
from prefixd.cache.ghosts.ghosts import Ghosts
from prefixd.observability.request_lines import log_request
from prefixd.observability.request_log import RequestLog
from prefixd.process.process_limits import LOCK, raise_descriptor_limit, watch_descriptors, watch_memory_lock
from prefixd.process.service_manager import ServiceManager
from prefixd.process.signals import DaemonSignals
from prefixd.server.access.audit import AuditLog
from prefixd.server.access.local_credentials import LocalCredentials, LocalProcess
from prefixd.server.access.socket_access import private_umask
from prefixd.server.background_tasks import BackgroundTasks
from prefixd.server.drain_state import Draining
from prefixd.server.draining import Drain
from prefixd.server.figures.disk_wear import DiskWear
from prefixd.server.figures.figure_pages import FigurePages
from prefixd.server.figures.ghost_figures import GhostFigures
from prefixd.server.figures.history import Counters, History
from prefixd.server.figures.snapshot import Snapshot
from prefixd.server.figures.tenant_figures import TenantFigures
from prefixd.server.figures.wear_file import WearFile
from prefixd.server.health_status import SERVICES, HealthStatus
from prefixd.server.kv_events import KVEvents
from prefixd.server.prefixes.prompt_lookup import PromptLookup
from prefixd.server.request_records.why_answers import WhyAnswers
from prefixd.server.rpc.door import finish_work
from prefixd.server.rpc.health_service import Health
from prefixd.server.rpc.sockets.listeners import Listeners, local_door
from prefixd.server.rpc.sockets.memory_listener import MemoryListener
from prefixd.server.rpc.sockets.processes import ProcessWatch
from prefixd.server.services.admin_service import AdminService
from prefixd.server.services.cache_service import PrefixCacheService
from prefixd.server.services.inference_service import InferenceService
from prefixd.server.settings_reload import SettingsReload
from prefixd.server.startup.codec_warm_up import warm_up_codecs
from prefixd.server.startup.compute_device import resolve_device
from prefixd.server.startup.exclusive_use import lock_directory, remove_stale_socket
from prefixd.server.startup.set_aside_index import SetAsideCheck
from prefixd.server.startup.start_log import log_start
from prefixd.server.startup.storage import open_arena, open_cache, open_store
from prefixd.serving.generation import Generation
from prefixd.serving.models.models import Models
from prefixd.settings import Settings
from prefixd.v1 import admin_pb2_grpc, cache_pb2_grpc, inference_pb2_grpc
from prefixd_swap import MAX_SLABS, FileOps, SlabStore, SwapError

if TYPE_CHECKING:
    from prefixd.observability.span_export import SpanExport

log = logging.getLogger(__name__)

_EXPIRY_S = 0.25
_CLOSE_S = 1.0  # calls that still run when the listeners close have this long to finish


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses at which the daemon listens, and the seconds from the opening of its tiers until then.

    Attributes:
        socket: the unix socket.
        tcp: host:port of gRPC, if other hosts may call.
        metrics: URL of the operators' HTTP port, if there is one.
        http: URL of the users' HTTP port, if there is one.
        opening_s: those seconds.
    """

    socket: Path
    tcp: str | None
    metrics: str | None
    http: str | None
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
        ready: called once, when the daemon takes calls (the model may still be loading; requests for it wait).
        ops: the disk tier's file calls; a test can pass some that fail.
        read_settings: reads the settings again, for SIGHUP; runs in a thread. None: the settings never change.

    Raises:
        ConfigError: the daemon cannot start with a directory, socket or size of the settings.
    """
    async with AsyncExitStack() as stack:
        daemon = Daemon(settings, ops, read_settings)
        stack.callback(daemon.signals.ignore)  # runs last: until then a second signal ends the process
        endpoints = await daemon.start(stack)
        heap.exempt_from_collection()
        heap.reuse_large_arrays()
        if ready is not None:
            ready(endpoints)
        daemon.report_readiness()
        await daemon.ended.wait()
        daemon.service_manager.stopping("drains: finishes what runs, and writes the cache to disk")
        if daemon.models is not None:
            await daemon.models.end_loading()
        await daemon.drain.run()
    return 1 if daemon.failed else 0


class Daemon:
    """The parts of one daemon. `start` registers in a stack how to end each of them.

    Args:
        settings: checked settings.
        ops: the disk tier's file calls; a test can pass some that fail.
        read_settings: reads the settings again, for SIGHUP; runs in a thread. None: the settings never change.
    """

    def __init__(
        self, settings: Settings, ops: FileOps | None = None, read_settings: Callable[[], Settings] | None = None
    ) -> None:
        self._given = settings
        self._read_settings = read_settings
        self._ops = ops
        self._tasks = BackgroundTasks(self._fail)
        self._health = Health()
        self._draining = Draining()
        self.ended = asyncio.Event()
        self.failed = False
        self.signals = DaemonSignals(self._on_signal)
        self.service_manager = ServiceManager()
        self.models: Models | None = None

    async def start(self, stack: AsyncExitStack) -> Endpoints:
        """Starts everything, innermost first.

        Raises:
            ConfigError: as `serve`.
        """
        self._loop = asyncio.get_running_loop()
        device = resolve_device(self._given) if self._given.worker.enabled else "cpu"
        self.settings = settings = self._given.on_device(device)
        self._tenants = Tenants(settings.quotas)
        self._tenants.set_codecs(settings.codecs)
        self._credentials = LocalCredentials(elapsed_s, boot_id())
        self._audit = AuditLog(settings.server.audit_log)
        stack.callback(self._audit.close)
        self._listeners = Listeners(settings, self._tenants, self._credentials, self._audit)
        if self._listeners.tokens is not None:
            stack.callback(self._listeners.tokens.close)
            await self._listeners.tokens.load()
        stack.callback(private_umask())
        stack.callback(lock_directory(settings.data_dir))
        self._credentials.load_key(settings.data_dir)
        heap.keep_large_arrays_apart()
        began_s = elapsed_s()
        await self._start_cache(device, stack)
        self.models = models = Models(settings, device, self.cache, elapsed_s) if settings.worker.enabled else None
        if models is not None:
            self._tasks.watch(models.start())
            stack.push_async_callback(models.stop)
        self._health_status = health_status = HealthStatus(self._health, self.cache.tiers, models, self._draining)
        self._troubles.listeners.append(health_status.update)
        self.drain = Drain(self.cache, models, self._draining, self._timeout_s, health_status.update)
        self._listeners.access.make_directory(settings.server.socket.parent)
        remove_stale_socket(settings.server.socket)
        door = await self._open_memory_listener(stack)
        snapshot, service = self._add_services(door, stack)
        # Before this line a signal ends the process at once, since the daemon has taken no call.
        self.signals.install()
        tcp = await self._listeners.open()
        stack.push_async_callback(self.cache.write_back.flush)  # what clients committed during the drain
        stack.push_async_callback(self._listeners.close, _CLOSE_S)
        stack.callback(service.close)
        health_status.update()
        metrics, http = await self._open_http(snapshot, stack)
        reload = SettingsReload(
            self._given, self._read_settings, self._listeners, self.cache, self._troubles, self._audit
        )
        self._troubles.listeners.append(lambda: self.service_manager.status(self._state()))
        self._tasks.start(self.service_manager.watch(), "watchdog")

        def hang_up() -> None:
            self.service_manager.reloading()
            reload.begin(self.report_readiness)

        self.signals.take_hangups(lambda: self._loop.call_soon_threadsafe(hang_up))
        stack.callback(self.signals.ignore_hangups)
        folders = {} if models is None else {name: host.directory for name, host in models.hosts.items()}
        log_start(settings, device, self._store, folders)
        return Endpoints(settings.server.socket, tcp, metrics, http, elapsed_s() - began_s)

    async def _start_cache(self, device: str, stack: AsyncExitStack) -> None:
        """Opens the tiers and the cache, and starts their background tasks."""
        settings, clock = self.settings, elapsed_s
        self._troubles = troubles = Troubles(clock)
        raise_descriptor_limit(settings.server.max_sessions, settings.disk.bytes and MAX_SLABS, troubles)
        self._arena = arena = open_arena(settings, device, troubles, stack)
        self._store = store = open_store(settings, self._ops, stack)
        self.cache = cache = open_cache(settings, device, arena, store, self._tenants, troubles, stack)
        if store is not None:
            self._watch_set_aside(store)
        self._tasks.start_figures(warm_up_codecs(settings, store), "codecs")
        self._tasks.watch(cache.start())
        stack.push_async_callback(cache.close)
        stack.push_async_callback(finish_work)
        self._events = None
        if settings.events.endpoint is not None:
            self._events = KVEvents(cache, settings.events)
            stack.push_async_callback(self._events.stop)
            self._tasks.watch([self._events.start()])
        stack.callback(self._tasks.cancel)
        self._tasks.start(cache.namespace_room.trim(), "namespaces")
        self._tasks.start(self._expire(), "expiry")
        self._ghosts = None
        if settings.cache.ghosts and settings.cache.enabled:
            self._ghosts = Ghosts(cache, settings.cache.eviction, settings.cache.ghosts_bytes, seed=settings.cache.seed)
            self._ghosts.listen()
            self._tasks.start_figures(self._ghosts.run(), "ghosts")
        if self._listeners.tokens is not None:
            self._tasks.start(self._listeners.tokens.watch(troubles), "tokens")
        self._tasks.start(watch_descriptors(troubles), "descriptors")
        if arena is not None and LOCK in troubles:
            self._tasks.start(watch_memory_lock(arena, troubles), "memory-lock")

    def _watch_set_aside(self, store: SlabStore) -> None:
        lost = self.cache.mover.lost
        set_aside = SetAsideCheck(store, self._troubles, lost)
        try:
            set_aside.start()
        except SwapError as error:
            raise ConfigError(f"disk.path = {self.settings.disk_path}: {error}") from error
        lost.update(store.recovery.lost)
        self._tasks.start(set_aside.watch(), "set-aside")

    async def _open_memory_listener(self, stack: AsyncExitStack) -> Path:
        """Opens the socket that hands local clients the arena and their credentials; returns its path."""
        arena, sessions, identities = self._arena, self.cache.leases.sessions, self._listeners.identities
        watch = ProcessWatch(self.cache, identities.of_user)
        stack.callback(watch.close)
        path = local_door(self.settings.server.socket)
        listener = MemoryListener(
            path,
            -1 if arena is None else arena.fd,
            0 if arena is None else arena.capacity_bytes,
            lambda session: session in sessions,
            self._listeners.access,
            watch.admit,
            may_map=identities.may_map,
            ticket=lambda uid, pid: self._credentials.issue(LocalProcess(uid, pid)),
        )
        await listener.start()
        stack.push_async_callback(listener.close)
        return path

    def _export_spans(self, stack: AsyncExitStack) -> SpanExport | None:
        """Sends requests as spans where the settings ask for it."""
        tracing = self.settings.tracing
        if tracing.endpoint is None:
            return None
        from prefixd.observability.span_export import open_export  # needs the extra `otel`

        spans = open_export(tracing.endpoint, tracing.ratio)
        self.records.ended.append(spans.take)
        stack.push_async_callback(asyncio.to_thread, spans.close)
        return spans

    def _add_services(self, memory_socket: Path, stack: AsyncExitStack) -> tuple[Snapshot, PrefixCacheService]:
        """Adds all gRPC services to the listeners."""
        cache, models, draining = self.cache, self.models, self._draining
        hosts = {} if models is None else models.hosts
        self.records = RequestLog(elapsed_s, self.settings.server.request_records)
        if not self.records.kept:
            cache.placement.evictions.kept = 0
        self.records.ended += [cache.measurements.count_request, log_request]
        spans = self._export_spans(stack)
        images_bytes = self.settings.worker.images_bytes
        self._generation = generation = Generation(cache, hosts, draining, elapsed_s, images_bytes, self.records)
        figures = TenantFigures(
            cache,
            self._listeners.limits.calls,
            generation.requests_of,
            gpu=models is not None,
        )
        elastic = None if models is None else models.elastic
        started_s, history = elapsed_s(), History(Counters(cache), elapsed_s)
        self._tasks.start_figures(history.run(), "history")
        wear = None
        if cache.tiers.durable is not None:
            disk, folder, writes = self.settings.disk, self.settings.disk_path, cache.mover.disk.writes
            wear_file = WearFile(folder, disk.wear_start_bytes, lambda: writes.written_bytes)
            stack.callback(wear_file.save)
            self._tasks.start_figures(wear_file.run(), "disk wear")
            wear = DiskWear(
                folder,
                lambda: writes.written_bytes,
                history,
                lambda: elapsed_s() - started_s,
                disk.endurance_bytes,
                disk.wear_start_bytes,
                wear_file.before_bytes,
            )
        snapshot = Snapshot(
            *(cache, draining, elapsed_s, started_s, hosts, figures, self._events, elastic, history, wear)
        )
        snapshot.spans = spans
        snapshot.ghosts = GhostFigures(cache, self._ghosts, hosts)
        tier_resize = None if models is None else models.tier_resize
        self._why = why = WhyAnswers(cache, generation)
        admin = AdminService(
            cache,
            snapshot,
            self._drain_on_request,
            self._undrain,
            PromptLookup(cache, hosts),
            tier_resize,
            tenants=figures,
            audit=self._audit,
            why=why,
        )
        service = PrefixCacheService(cache, None if self._arena is None else memory_socket, draining, self.records)
        services = self._listeners.services
        cache_pb2_grpc.add_PrefixCacheServicer_to_server(service, services)
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(generation), services)
        admin_pb2_grpc.add_AdminServicer_to_server(admin, services)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, services)
        reflected = reflection.aio.ReflectionServicer([*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME])
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflected, services)
        return snapshot, service

    async def _open_http(self, snapshot: Snapshot, stack: AsyncExitStack) -> tuple[str | None, str | None]:
        """Opens the HTTP ports for which the settings ask; returns their URLs, the operators' and the users'."""
        server, listeners = self.settings.server, self._listeners
        if server.metrics is None and server.http is None:
            return None, None
        # Only now, since a daemon without an HTTP port spares their memory.
        from prefixd.server.http.http_ports import HttpPorts
        from prefixd.server.http.openai import OpenAIRoutes
        from prefixd.server.http.operator_routes import OperatorRoutes

        try:
            pages = FigurePages(snapshot.take)
        except SwapError as error:
            raise ConfigError(f"server.metrics = {server.metrics}: {error}") from error
        stack.callback(pages.close)
        operator = OperatorRoutes(pages, self.records, self._why.answer, self._health_status.not_ready)
        ports = HttpPorts(
            server, listeners.identities, listeners.limits.refusals, self._audit, operator, listeners.generations
        )
        stack.push_async_callback(ports.close, _CLOSE_S)
        generation, limits = self._generation, listeners.limits
        users = await ports.open_users(lambda callers: OpenAIRoutes(generation, callers, limits).routes())
        return await ports.open_metrics(), users

    def report_readiness(self) -> None:
        """Tells the service manager that the daemon takes calls with the settings of now."""
        self.service_manager.ready(self._state())

    def _state(self) -> str:
        """Returns one line for `systemctl status`: where the daemon listens, or which parts do not work."""
        if troubles := list(self._troubles):
            return "degraded: " + "; ".join(f"{each.part}: {each.what}" for each in troubles)
        return f"takes calls at unix:{self.settings.server.socket}"

    def _timeout_s(self) -> float:
        """Returns how long a drain waits for running requests and calls: 0 s if a background task has failed."""
        return 0.0 if self.failed else self.settings.server.drain_timeout_s

    async def _drain_on_request(self, shutdown: bool) -> tuple[int, int]:
        result = await self.drain.run()
        if shutdown:
            self.ended.set()
        return result

    def _undrain(self) -> bool:
        if self.ended.is_set():
            raise PreconditionError("the daemon is ending; start it again")
        return self.drain.undo()

    def _fail(self) -> None:
        """Ends the daemon because a background task has failed."""
        self.failed = True
        self.ended.set()

    def _on_signal(self) -> None:
        """Runs inside the signal handler, between any two instructions, so it only wakes the event loop."""
        self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        log.info("ending: running requests are finished first; a second signal ends the daemon at once")
        self.ended.set()

    async def _expire(self) -> None:
        """Ends leases, reservations and retentions when their time is up."""
        cache = self.cache
        while True:
            await asyncio.sleep(_EXPIRY_S)
            await cache.retained.sweep()
            cache.namespace_room.check_trouble()
            expired = cache.leases.expire(cache.clock())
            if expired:
                log.warning("%d leases or reservations ended because their time was up", expired)
