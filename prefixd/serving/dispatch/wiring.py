"""Makes a daemon's parts from its settings, for the daemon and for the planner's virtual one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prefixd.base.tenancy.tenants import Tenants
from prefixd.cache import TieredCache, Tiers
from prefixd.cache.coding.namespace_codings import TierCodec, coding_threads
from prefixd.cache.options import CacheOptions
from prefixd.cache.remote import RemoteOptions
from prefixd.serving.dispatch.capacity.tier_share import TierShare
from prefixd.serving.dispatch.dispatcher import Dispatcher
from prefixd.serving.dispatch.options import DispatchOptions
from prefixd.settings import Settings
from prefixd.worker_protocol.protocol import ToWorker
from prefixd_scheduler import CostModel, RequestQueue, create_policy
from prefixd_swap import CopyEngine, create_eviction_policy


def make_cache(
    settings: Settings, tiers: Tiers, engine: CopyEngine, clock: Callable[[], float], tenants: Tenants | None = None
) -> TieredCache:
    """The cache over `tiers`, empty. Raises as `TieredCache`."""
    return TieredCache(
        tiers,
        engine,
        create_eviction_policy(settings.cache.eviction, settings.cache.seed),
        clock,
        cache_options(settings),
        tenants=tenants,
    )


def cache_options(settings: Settings) -> CacheOptions:
    """The cache's options from the daemon's settings."""
    return CacheOptions(
        default_ttl_s=settings.server.lease_ttl_s,
        max_ttl_s=settings.server.max_lease_ttl_s,
        max_sessions=settings.server.max_sessions,
        max_grants=settings.server.max_grants,
        namespace_bytes=settings.server.namespace_bytes,
        write_back=settings.cache.write_back,
        scrub_bytes_per_s=settings.disk.scrub_bytes_per_s,
        scrub_every_s=settings.disk.scrub_every_s,
        write_queue_bytes=settings.disk.write_queue_bytes,
        prefetch_bytes=settings.transfers.prefetch_bytes,
        reserved_bytes=settings.transfers.reserved_bytes,
        admit_uses=settings.disk.admit_uses,
        disk_codec=TierCodec(
            settings.disk.codec, settings.disk.codec_error, threads=coding_threads(settings.disk.io_threads)
        ),
        share_after=settings.cache.share_after,
        remote=RemoteOptions(
            share=settings.remote.share,
            lookup_s=settings.remote.lookup_s,
            absent_s=settings.remote.absent_s,
            known_s=settings.remote.known_s,
            known_blocks=settings.remote.known_blocks,
            codec=TierCodec(settings.remote.codec, settings.remote.codec_error),
        ),
    )


def make_dispatcher(
    settings: Settings,
    cache: TieredCache,
    send: Callable[[ToWorker], None],
    clock: Callable[[], float],
    share: TierShare | None = None,
) -> Dispatcher:
    """The dispatcher of one model, with a queue and a cost model of its own."""
    scheduler = settings.scheduler
    policy = create_policy(scheduler.policy, scheduler.starvation_bound_s)
    queue = RequestQueue(policy, scheduler.queue_limit, partial(getattr, cache.tenants, "calling"))
    return Dispatcher(cache, queue, CostModel(), send, clock, DispatchOptions.of(settings), share)
