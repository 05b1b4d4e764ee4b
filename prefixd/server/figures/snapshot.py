"""Collects the daemon's figures for `Admin.Stats`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import prefixd
from prefixd.base.tiers import Tier
from prefixd.cache import Lease, Reservation, TieredCache
from prefixd.cache.index.trie import DISK
from prefixd.server.figures.block_counts import BlockCounts
from prefixd.server.figures.coded_counts import stored_stats
from prefixd.server.figures.disk_wear import DiskWear
from prefixd.server.figures.ghost_figures import GhostFigures
from prefixd.server.figures.history import History
from prefixd.server.figures.measured_figures import build_info, timings_figures, traffic_figures
from prefixd.server.figures.model_figures import model_figures, total_scheduler, total_worker
from prefixd.server.figures.namespace_figures import blocks_by_namespace, fill_figures, namespace_figures
from prefixd.server.figures.tenant_figures import TenantFigures
from prefixd.server.kv_events import KVEvents
from prefixd.serving.models.elastic_tier import ElasticTier
from prefixd.serving.models.model_host import ModelHost
from prefixd.serving.request.kv_needs import Unused
from prefixd.v1 import admin_pb2 as pb
from prefixd_swap.tiers import GpuTier, MemoryTier
from prefixd_swap.tiers import Tier as TierObject

if TYPE_CHECKING:
    from prefixd.observability.span_export import SpanExport


@dataclass(slots=True)
class Snapshot:
    """Collects all figures from the parts of the daemon that keep them."""

    cache: TieredCache
    draining: asyncio.Event
    clock: Callable[[], float]
    started_s: float
    models: Mapping[str, ModelHost]
    tenants: TenantFigures
    events: KVEvents | None = None
    elastic: ElasticTier | None = None
    history: History | None = None
    wear: DiskWear | None = None
    ghosts: GhostFigures | None = None
    spans: SpanExport | None = None

    async def take(self, last_s: float = 0.0) -> pb.StatsResponse:
        """Returns the figures now. Counts of blocks are up to some milliseconds old at a million blocks.

        `last_s`: above 0, also what happened in the last so many seconds; then it raises as `History.period`.
        """
        cache = self.cache
        period = self.history.period(last_s) if last_s and self.history is not None else None
        counts = await BlockCounts.of(cache, [host.dispatcher.recorder.needs for host in self.models.values()])
        counted = blocks_by_namespace(cache)
        namespaces, other_namespaces = await namespace_figures(cache, counts.on_gpu, counted)
        names = {host.namespace_name: host.name for host in self.models.values()}
        filled = await fill_figures(cache, counted, names)
        timings = await timings_figures(cache.measurements.timings)
        traffic = await traffic_figures(cache.measurements.traffic)
        now = self.clock()
        cached = cache.mover.use.cached_by_level()
        models = [model_figures(host, cache.tiers) for host in self.models.values()]
        sessions = list(cache.leases.sessions.values())
        counters = cache.counters
        return pb.StatsResponse(
            version=prefixd.__version__,
            uptime_s=now - self.started_s,
            draining=self.draining.is_set(),
            tiers=[self._tier_stats(tier, counts, cached) for tier in cache.tiers.existing],
            sessions=[
                pb.SessionStats(
                    session_id=session.id[:8],
                    client_name=session.client_name,
                    pid=session.pid,
                    leases=session.granted[Lease],
                    reservations=session.granted[Reservation],
                    age_s=now - session.opened_s,
                    tenant=session.tenant.name,
                    stored_bytes=session.stored_bytes,
                )
                for session in sessions
            ],
            namespaces=namespaces,
            other_namespaces=other_namespaces,
            leases=sum(session.granted[Lease] for session in sessions),
            reservations=sum(session.granted[Reservation] for session in sessions),
            worker=total_worker([model.worker for model in models]),
            scheduler=total_scheduler([model.scheduler for model in models]),
            asked_tokens=counters.asked_tokens,
            hit_tokens=sum(counters.hit_tokens),
            lost_blocks=dict(cache.mover.lost),
            scrub=self._scrub_stats(),
            write_back=self._write_back_stats(),
            kv_events=self._kv_event_stats(),
            troubles=self.troubles(),
            models=models,
            remote=self._remote_stats(),
            tenants=self.tenants.take_some(),
            timings=timings,
            traffic=traffic,
            cached=filled,
            disk_wear=None if self.wear is None else self.wear.figures(),
            stored=stored_stats(cache, counts.blocks[DISK], counts.coded, names),
            build=build_info(),
            period=period,
            namespace_room=pb.NamespaceRoomStats(
                used_bytes=cache.namespaces.nbytes,
                limit_bytes=cache.namespace_room.limit_bytes,
                forgotten_namespaces=cache.namespace_room.forgotten,
                refused_namespaces=cache.namespace_room.refused,
            ),
            claims=self._claim_stats(),
            ghosts=None if self.ghosts is None else self.ghosts.take(),
            spans=None if self.spans is None else pb.SpanStats(**asdict(self.spans.counts)),
        )

    def troubles(self) -> list[pb.Trouble]:
        """Returns the parts of the daemon that are degraded while the rest works."""
        now = self.clock()
        return [
            pb.Trouble(part=trouble.part, what=trouble.what, remedy=trouble.remedy, since_s=now - trouble.since_s)
            for trouble in self.cache.tiers.troubles
        ]

    def _tier_stats(self, tier: TierObject, counts: BlockCounts, cached: Sequence[int]) -> pb.TierStats:
        tiers, level, used = self.cache.tiers, tier.level, tier.used_bytes
        in_flight = quarantined = 0
        unused = Unused()
        if tier is tiers.compute:
            unused.spare = counts.unused.spare
            unused.unneeded = counts.unused.unneeded + sum(
                host.dispatcher.recorder.needs.of_running(host.dispatcher.running.values())
                for host in self.models.values()
            )
        if tier is tiers.shared:
            quarantined = self.cache.quarantine.nbytes
        if isinstance(tier, MemoryTier):
            in_flight = used - cached[level] - quarantined
        counters = tiers.counters[level]
        size = self.elastic.figures if self.elastic is not None and tier is tiers.compute else None
        return pb.TierStats(
            tier=Tier(level).wire,
            capacity_bytes=tier.capacity_bytes,
            used_bytes=used,
            blocks=counts.blocks[level],
            held_blocks=counts.held[level],
            in_flight_bytes=max(in_flight, 0),
            hit_tokens=self.cache.counters.hit_tokens[level],
            evicted_blocks=counters.evicted,
            demoted_blocks=counters.demoted,
            promoted_blocks=counters.promoted,
            trouble=tiers.troubles.of_tier(tier),
            quarantined_bytes=quarantined,
            spare_bytes=unused.spare,
            unneeded_bytes=unused.unneeded,
            stranded_bytes=tier.stranded_bytes if isinstance(tier, GpuTier) else 0,
            least_bytes=0 if size is None else size.least_bytes,
            most_bytes=0 if size is None else size.most_bytes,
            target_bytes=0 if size is None else size.target_bytes,
            resized_because="" if size is None else size.reason,
            loaded_bytes=counters.loaded_bytes,
        )

    def _scrub_stats(self) -> pb.ScrubStats:
        counters = self.cache.scrubber.counters
        return pb.ScrubStats(
            checked_blocks=counters.checked_blocks,
            checked_bytes=counters.checked_bytes,
            damaged_blocks=counters.damaged_blocks,
            passes=counters.passes,
        )

    def _write_back_stats(self) -> pb.WriteBackStats:
        write_back, writes = self.cache.write_back, self.cache.mover.disk.writes
        placement = self.cache.placement
        return pb.WriteBackStats(
            queued_blocks=placement.queued_blocks,
            queued_bytes=placement.queued_bytes_of.total(),
            limit_bytes=write_back.limit_bytes or 0,
            written_blocks=writes.written_blocks,
            written_bytes=writes.written_bytes,
            pushed_back_calls=write_back.pushed_back,
        )

    def _remote_stats(self) -> pb.RemoteStats | None:
        remote = self.cache.mover.remote
        if remote is None:
            return None
        tier, lookups = remote.tier, remote.lookups.counters
        return pb.RemoteStats(
            store=f"{tier.store.kind} {tier.store.address}",
            asked_prompts=lookups.asked,
            asked_objects=lookups.asked_objects,
            found_blocks=lookups.found_blocks,
            remembered_prompts=lookups.remembered,
            unanswered_prompts=lookups.unanswered,
            answer_s=remote.lookups.answer_s,
            read_bytes=tier.read_bytes,
            written_bytes=tier.written_bytes,
            saved_bytes=tier.saved_bytes,
            shared_blocks=remote.sharing.written,
            bad_objects=dict(tier.bad_objects),
            failures=remote.health.failures,
            copied_bytes=tier.store.copied_bytes,
            known_blocks=remote.known.blocks,
        )

    def _claim_stats(self) -> pb.ClaimStats:
        claims = self.cache.computing
        counters = claims.counters
        return pb.ClaimStats(
            open=len(claims),
            granted=counters.granted,
            waits=counters.waits,
            taken_over=counters.taken_over,
            spared_tokens=counters.spared_tokens,
        )

    def _kv_event_stats(self) -> pb.KvEventStats | None:
        if self.events is None:
            return None
        counters = self.events.counters
        return pb.KvEventStats(
            events=counters.events,
            batches=counters.batches,
            overruns=counters.overruns,
            subscriptions=max(counters.subscriptions, 0),
        )
