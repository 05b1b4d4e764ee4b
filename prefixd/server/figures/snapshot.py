"""The daemon's figures, for `Admin.Stats` and for Prometheus."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import prefixd
from prefixd.base.pacer import SLICE_ROWS, Pacer, give_way
from prefixd.cache import Lease, PartSpec, Reservation, TieredCache, Trie
from prefixd.cache.index.trie import NO_SLOT, TIERS
from prefixd.server.figures.tenant_figures import TenantFigures
from prefixd.server.kv_events import KVEvents
from prefixd.server.rule_messages import rule_message
from prefixd.serving.dispatch.dispatcher import Dispatcher
from prefixd.serving.models.model_host import ModelHost
from prefixd.serving.models.worker_process import WorkerState
from prefixd.serving.request.kv_needs import KvNeeds, Unused
from prefixd.v1 import admin_pb2 as pb
from prefixd.v1 import cache_pb2
from prefixd_swap.tiers import GpuTier, MemoryTier, Tier

_MOST_NAMESPACES = 1000
_NAMESPACES_BYTES = 4 << 20  # a quarter of what a message may have
_NAMESPACE_WORK = 10  # pieces of work, see `Pacer`

_STATES = {
    WorkerState.STARTING: pb.WorkerStats.STATE_STARTING,
    WorkerState.READY: pb.WorkerStats.STATE_READY,
    WorkerState.FAILED: pb.WorkerStats.STATE_FAILED,
}


@dataclass(slots=True)
class Snapshot:
    """Collects all figures from where they are kept."""

    cache: TieredCache
    draining: asyncio.Event
    clock: Callable[[], float]
    started_s: float
    models: Mapping[str, ModelHost]
    tenants: TenantFigures
    events: KVEvents | None = None

    async def take(self) -> pb.StatsResponse:
        """The figures now. What is counted in the columns is up to some milliseconds old at a million blocks."""
        cache = self.cache
        counts = await _Counts.of(cache, [host.dispatcher.recorder.needs for host in self.models.values()])
        namespaces = await _namespaces(cache, counts.on_gpu)
        now = self.clock()
        leases = cache.leases
        counters = cache.counters
        return pb.StatsResponse(
            version=prefixd.__version__,
            uptime_s=now - self.started_s,
            draining=self.draining.is_set(),
            tiers=[self._tier(tier, counts) for tier in cache.tiers.existing],
            sessions=[
                pb.SessionStats(
                    session_id=session.id[:8],
                    client_name=session.client_name,
                    pid=session.pid,
                    leases=session.count(Lease),
                    reservations=session.count(Reservation),
                    age_s=now - session.opened_s,
                    tenant=session.tenant.name,
                )
                for session in leases.sessions.values()
            ],
            namespaces=namespaces,
            other_namespaces=len(cache.namespaces) - len(namespaces),
            leases=leases.count(Lease),
            reservations=leases.count(Reservation),
            worker=self._worker(),
            scheduler=self._scheduler(),
            asked_tokens=counters.asked_tokens,
            hit_tokens=sum(counters.hit_tokens),
            lost_blocks=dict(cache.mover.lost),
            scrub=self._scrub(),
            write_back=self._write_back(),
            kv_events=self._kv_events(),
            troubles=self.troubles(),
            models=[self._model(host) for host in self.models.values()],
            remote=self._remote(),
            tenants=self.tenants.take_some(),
            namespace_room=pb.NamespaceRoomStats(
                used_bytes=cache.namespaces.nbytes,
                limit_bytes=cache.namespace_room.limit_bytes,
                forgotten_namespaces=cache.namespace_room.forgotten,
                refused_namespaces=cache.namespace_room.refused,
            ),
        )

    def troubles(self) -> list[pb.Trouble]:
        """What is not as it should be, while the rest goes on."""
        now = self.clock()
        return [
            pb.Trouble(part=trouble.part, what=trouble.what, remedy=trouble.remedy, since_s=now - trouble.since_s)
            for trouble in self.cache.tiers.troubles
        ]

    def _tier(self, tier: Tier, counts: _Counts) -> pb.TierStats:
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
            in_flight = used - sum(_resident_bytes(trie, tier) for trie in self.cache.tries) - quarantined
        counters = tiers.counters(tier)
        return pb.TierStats(
            tier=f"TIER_{tier.name.upper()}",
            capacity_bytes=tier.capacity_bytes,
            used_bytes=used,
            blocks=counts.blocks[level],
            held_blocks=counts.held[level],
            in_flight_bytes=max(in_flight, 0),
            hit_tokens=self.cache.counters.hit_tokens[level],
            evicted_blocks=counters.evicted,
            demoted_blocks=counters.demoted,
            promoted_blocks=counters.promoted,
            trouble=tiers.trouble(tier),
            quarantined_bytes=quarantined,
            spare_bytes=unused.spare,
            unneeded_bytes=unused.unneeded,
            stranded_bytes=tier.stranded_bytes if isinstance(tier, GpuTier) else 0,
        )

    def _scrub(self) -> pb.ScrubStats:
        counters = self.cache.scrubber.counters
        return pb.ScrubStats(
            checked_blocks=counters.checked_blocks,
            checked_bytes=counters.checked_bytes,
            damaged_blocks=counters.damaged_blocks,
            passes=counters.passes,
        )

    def _write_back(self) -> pb.WriteBackStats:
        write_back = self.cache.write_back
        blocks, nbytes = self.cache.mover.queued
        return pb.WriteBackStats(
            queued_blocks=blocks,
            queued_bytes=nbytes,
            limit_bytes=write_back.limit_bytes or 0,
            written_blocks=write_back.written,
            written_bytes=self.cache.mover.disk.written_bytes,
            pushed_back_calls=write_back.pushed_back,
        )

    def _remote(self) -> pb.RemoteStats | None:
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
            shared_blocks=remote.sharing.written,
            bad_objects=dict(tier.bad_objects),
            failures=remote.health.failures,
            copied_bytes=tier.store.copied_bytes,
            known_blocks=remote.known.blocks,
        )

    def _kv_events(self) -> pb.KvEventStats | None:
        if self.events is None:
            return None
        counters = self.events.counters
        return pb.KvEventStats(
            events=counters.events,
            batches=counters.batches,
            overruns=counters.overruns,
            subscriptions=max(counters.subscriptions, 0),
        )

    def _model(self, host: ModelHost) -> pb.ModelStats:
        compute = self.cache.tiers.compute
        frame_bytes = compute.frame_bytes if isinstance(compute, GpuTier) else 0
        return pb.ModelStats(
            name=host.name,
            namespace=host.namespace_name,
            worker=self._worker_of(host),
            scheduler=_scheduler_of(host.dispatcher),
            held_bytes=host.dispatcher.taken_frames * frame_bytes,
        )

    def _worker(self) -> pb.WorkerStats:
        if not self.models:
            return pb.WorkerStats(state=pb.WorkerStats.STATE_NONE)
        hosts = list(self.models.values())
        stats = self._worker_of(hosts[0])
        stats.running_requests = sum(len(host.dispatcher.running) for host in hosts)
        return stats

    def _worker_of(self, host: ModelHost) -> pb.WorkerStats:
        worker, hello, kv = host.worker, host.worker.hello, host.dispatcher.kv
        frame_bytes = self.cache.tiers.frames.frame_bytes if kv.shared_blocks else 0
        return pb.WorkerStats(
            state=_STATES[worker.state],
            pid=worker.pid,
            restarts=worker.restarts,
            running_requests=len(host.dispatcher.running),
            model=worker.settings.model,
            device=worker.settings.device,
            block_tokens=hello.block_tokens if hello else 0,
            block_tokens_asked=hello.block_tokens_asked if hello else 0,
            block_tokens_reason=hello.block_tokens_reason if hello else "",
            shared_bytes=kv.shared_blocks * frame_bytes,
            mapped_blocks=kv.mapped_blocks,
            reused_blocks=kv.reused_blocks,
            copied_blocks=kv.copied_blocks,
            error=worker.failure,
            kv=worker.settings.kv,
            states=_states_of(host),
            images=_images_of(host),
            layout=worker.settings.layout,
            cuda_graphs=worker.ready.cuda_graphs,
            cuda_graphs_reason=worker.ready.cuda_graphs_reason,
            passes=host.dispatcher.passes,
            draft=_draft_of(host),
        )

    def _scheduler(self) -> pb.SchedulerStats:
        total = pb.SchedulerStats()
        for host in self.models.values():
            one = _scheduler_of(host.dispatcher)
            total.policy = one.policy
            for name in _SUMMED:
                setattr(total, name, getattr(total, name) + getattr(one, name))
        return total


_SUMMED = [field.name for field in pb.SchedulerStats.DESCRIPTOR.fields if field.name != "policy"]


def _states_of(host: ModelHost) -> pb.StateStats | None:
    hello = host.worker.hello
    if hello is None or not hello.state_frames:
        return None
    counters = host.dispatcher.states.counters
    return pb.StateStats(
        kept_states=counters.kept,
        kept_bytes=counters.kept_bytes,
        resumed_runs=counters.resumed,
        resumed_tokens=counters.resumed_tokens,
        runs_without_room=counters.without_room,
    )


def _images_of(host: ModelHost) -> pb.ImageStats | None:
    hello, dispatcher = host.worker.hello, host.dispatcher
    if hello is None or hello.images is None:
        return None
    return pb.ImageStats(
        asked_images=dispatcher.asked_images,
        encoded_images=dispatcher.encoded_images,
        found_images=dispatcher.found_images,
    )


def _draft_of(host: ModelHost) -> pb.DraftStats | None:
    settings, dispatcher = host.worker.settings, host.dispatcher
    if not settings.draft_model:
        return None
    return pb.DraftStats(
        model=settings.draft_model,
        draft_tokens=settings.draft_tokens,
        proposed_tokens=dispatcher.proposed_tokens,
        accepted_tokens=dispatcher.accepted_tokens,
    )


def _scheduler_of(dispatcher: Dispatcher) -> pb.SchedulerStats:
    preempted, loads = dispatcher.preemption.counters, dispatcher.loader.counters
    return pb.SchedulerStats(
        policy=dispatcher.queue.policy.name,
        waiting_requests=len(dispatcher.waiting),
        finished_requests=dispatcher.finished,
        preempted_requests=preempted.preempted,
        resumed_requests=dispatcher.resumed,
        swapped_requests=preempted.swapped,
        recomputed_requests=preempted.recomputed,
        swapped_blocks=preempted.swapped_blocks,
        recomputed_tokens=preempted.recomputed_tokens,
        load_decisions=loads.decided,
        cut_loads=loads.cut,
        split_loads=loads.beside,
        abandoned_loads=loads.abandoned,
        load_spent_s=loads.regret.spent_s,
        load_regret_s=loads.regret.lost_s,
    )


@dataclass(slots=True)
class _Counts:
    """Blocks, counted in the columns of all tries."""

    blocks: list[int]
    """By tier."""
    held: list[int]
    """Those of them that somebody holds there, by tier."""
    unused: Unused
    """Of the GPU tier's cached blocks."""
    on_gpu: Counter[int]
    """Those in the GPU tier, by their namespace's ordinal."""

    @classmethod
    async def of(cls, cache: TieredCache, needs: Sequence[KvNeeds]) -> Self:
        """Counts a slice of rows at a time, so that the event loop is not held."""
        blocks, held, unused = [0] * TIERS, [0] * TIERS, Unused()
        on_gpu, compute = Counter[int](), cache.tiers.compute.level
        for trie in list(cache.tries):
            for start in range(0, trie.rows, SLICE_ROWS):
                if start:
                    await give_way()
                rows = slice(start, min(start + SLICE_ROWS, trie.rows))
                for tier in range(TIERS):
                    here = (trie.any_part[rows] & np.uint8(1 << tier)) != 0
                    blocks[tier] += int(np.count_nonzero(here))
                    held[tier] += int(np.count_nonzero(trie.held(rows, tier) & here))
                # Models of one shape share a trie, and need the same of its blocks.
                if (counting := next((each for each in needs if each.counts(trie)), None)) is not None:
                    here_unused = counting.of_cached(trie, rows)
                    unused.spare += here_unused.spare
                    unused.unneeded += here_unused.unneeded
                here = (trie.any_part[rows] & np.uint8(1 << compute)) != 0
                counted = np.unique(trie.namespace[rows][here], return_counts=True)
                on_gpu.update(dict(zip(*(column.tolist() for column in counted), strict=True)))
        return cls(blocks, held, unused, on_gpu)


async def _namespaces(cache: TieredCache, on_gpu: Mapping[int, int]) -> list[pb.NamespaceStats]:
    """Those with most blocks, as many as one answer may tell of."""
    blocks = {namespace: cache.trie(namespace).blocks_of(namespace.ordinal) for namespace in cache.namespaces}
    found: list[pb.NamespaceStats] = []
    left, pacer = _NAMESPACES_BYTES, Pacer()
    for namespace in heapq.nlargest(_MOST_NAMESPACES, blocks, key=lambda each: blocks[each]):
        spec = namespace.spec
        stats = pb.NamespaceStats(
            namespace_id=namespace.id,
            namespace=cache_pb2.Namespace(
                name=spec.name,
                dtype=spec.dtype,
                layout=spec.layout,
                block_tokens=spec.block_tokens,
                parts=[_part(part) for part in spec.parts],
            ),
            blocks=blocks[namespace],
            gpu_blocks=on_gpu[namespace.ordinal],
            tenant=spec.tenant,
            worker=spec.worker,
        )
        left -= stats.ByteSize()
        if left < 0:
            break
        found.append(stats)
        await pacer.worked(_NAMESPACE_WORK + len(spec.parts))
    return found


def _resident_bytes(trie: Trie, tier: MemoryTier) -> int:
    """Bytes of the tier's slots that blocks of `trie` have. At once: slots change hands between two callbacks."""
    sizes = np.array([tier.footprint((size,)) for size in trie.part_bytes], np.int64)
    there = trie.there[: trie.rows, tier.level]
    complete = int(np.count_nonzero(there == trie.all_groups))
    some = (trie.any_part[: trie.rows] & np.uint8(1 << tier.level)) != 0
    others = np.flatnonzero(some & (there != trie.all_groups))
    return complete * int(sizes.sum()) + int((trie.slots[others, tier.level] != NO_SLOT).sum(axis=0) @ sizes)


def _name(tier: int) -> str:
    return cache_pb2.Tier.Name(tier).removeprefix("TIER_").lower()


def _of_tenants(tenants: Sequence[pb.TenantStats]) -> Iterator[Metric]:
    per_tier = {
        "used_bytes": "bytes of a tier that a tenant's blocks and reservations take",
        "held_bytes": "of these, bytes that leases, reservations, requests and pins keep there",
    }
    for field, text in per_tier.items():
        family = GaugeMetricFamily(f"prefixd_tenant_{field}", text, labels=["tenant", "tier"])
        for tenant in tenants:
            for tier in tenant.tiers:
                family.add_metric([tenant.name, _name(tier.tier)], getattr(tier, field))
        yield family
    quotas = {
        "guaranteed_bytes": "bytes of a tier that a tenant is guaranteed",
        "most_bytes": "bytes of a tier that a tenant may have, where that has a limit",
    }
    for field, text in quotas.items():
        family = GaugeMetricFamily(f"prefixd_tenant_{field}", text, labels=["tenant", "tier"])
        for tenant in tenants:
            for quota in tenant.quota.tiers:
                if quota.HasField(field):
                    family.add_metric([tenant.name, _name(quota.tier)], getattr(quota, field))
        yield family
    counts = {
        "sessions": "a tenant's open sessions",
        "grants": "its leases and reservations",
        "namespaces": "its namespaces",
        "waiting_requests": "its requests in the queue",
        "running_requests": "its requests that run",
        "calls": "its calls under way",
        "retained_bytes": "bytes of its blocks with a raised priority",
    }
    for field, text in counts.items():
        family = GaugeMetricFamily(f"prefixd_tenant_{field}", text, labels=["tenant"])
        for tenant in tenants:
            family.add_metric([tenant.name], getattr(tenant, field))
        yield family
    refused = CounterMetricFamily(
        "prefixd_tenant_refused", "times that a limit was in a tenant's way", labels=["tenant", "limit"]
    )
    for tenant in tenants:
        for limit, times in tenant.refused.items():
            refused.add_metric([tenant.name, limit], times)
    yield refused


class MetricsCollector(Collector):
    """The figures that `latest` gives, as Prometheus metrics. A thread may collect them: they change no more."""

    def __init__(self, latest: Callable[[], pb.StatsResponse]) -> None:
        self._latest = latest

    def collect(self) -> Iterator[Metric]:
        stats = self._latest()
        per_tier = {
            "capacity_bytes": ("capacity of a tier", False),
            "used_bytes": ("bytes of a tier that are taken", False),
            "blocks": ("blocks with a copy in a tier", False),
            "held_blocks": ("blocks of a tier that may not move", False),
            "in_flight_bytes": ("bytes taken, but not matchable yet", False),
            "quarantined_bytes": ("bytes that a silent client may still write into", False),
            "spare_bytes": ("cached bytes of the GPU tier that only shorter prefixes need, held by nobody", False),
            "unneeded_bytes": ("bytes of the GPU tier, spare ones apart, that no layer of the model needs", False),
            "stranded_bytes": ("free bytes of the GPU tier that only pages of one size can have", False),
            "hit_tokens": ("prompt tokens found in a tier when their request came", True),
            "evicted_blocks": ("copies dropped from a tier", True),
            "demoted_blocks": ("blocks written a tier down to make room", True),
            "promoted_blocks": ("blocks brought up to a tier", True),
        }
        for field, (text, counts) in per_tier.items():
            family = (CounterMetricFamily if counts else GaugeMetricFamily)(
                f"prefixd_tier_{field}", text, labels=["tier"]
            )
            for tier in stats.tiers:
                family.add_metric([_name(tier.tier)], getattr(tier, field))
            yield family
        yield from _of_tenants(stats.tenants)
        troubles = GaugeMetricFamily("prefixd_trouble_seconds", "how long a part has been in trouble", labels=["part"])
        for each in stats.troubles:
            troubles.add_metric([each.part], each.since_s)
        yield troubles
        trouble = GaugeMetricFamily("prefixd_tier_trouble", "1 while a tier is out or shrunk", labels=["tier"])
        for tier in stats.tiers:
            trouble.add_metric([_name(tier.tier)], bool(tier.trouble))
        yield trouble
        lost = CounterMetricFamily("prefixd_lost_blocks", "blocks not written or not served", labels=["reason"])
        for reason, blocks in stats.lost_blocks.items():
            lost.add_metric([reason], blocks)
        yield lost
        scrubbed = {
            "checked_blocks": "blocks on disk whose checksums were verified, readers' own checks apart",
            "checked_bytes": "bytes of them",
            "damaged_blocks": "damaged blocks found so",
            "passes": "times the whole disk tier was gone through",
        }
        for field, text in scrubbed.items():
            yield CounterMetricFamily(f"prefixd_scrub_{field}", text, value=getattr(stats.scrub, field))
        queue = stats.write_back
        yield GaugeMetricFamily("prefixd_write_queue_blocks", "blocks to be written to disk", value=queue.queued_blocks)
        yield GaugeMetricFamily("prefixd_write_queue_bytes", "bytes to be written to disk", value=queue.queued_bytes)
        yield GaugeMetricFamily(
            "prefixd_write_queue_limit_bytes", "the most before it pushes back", value=queue.limit_bytes
        )
        yield CounterMetricFamily("prefixd_written_blocks", "blocks written to disk", value=queue.written_blocks)
        yield CounterMetricFamily("prefixd_written_bytes", "bytes of blocks written to disk", value=queue.written_bytes)
        yield CounterMetricFamily(
            "prefixd_pushed_back_calls", "calls that waited for the disk", value=queue.pushed_back_calls
        )
        room = stats.namespace_room
        yield GaugeMetricFamily("prefixd_namespace_bytes", "memory that namespaces take", value=room.used_bytes)
        yield GaugeMetricFamily("prefixd_namespace_limit_bytes", "memory that they may take", value=room.limit_bytes)
        yield CounterMetricFamily(
            "prefixd_forgotten_namespaces",
            "namespaces forgotten with their blocks to make room",
            value=room.forgotten_namespaces,
        )
        yield CounterMetricFamily(
            "prefixd_refused_namespaces",
            "registrations refused since all namespaces were in use",
            value=room.refused_namespaces,
        )
        if stats.HasField("kv_events"):
            said = stats.kv_events
            yield CounterMetricFamily("prefixd_kv_events", "KV events published", value=said.events)
            yield CounterMetricFamily("prefixd_kv_event_batches", "batches of them", value=said.batches)
            yield CounterMetricFamily(
                "prefixd_kv_event_overruns",
                "times a subscriber was too slow and missed batches",
                value=said.overruns,
            )
            yield GaugeMetricFamily(
                "prefixd_kv_event_subscriptions", "subscriptions in force", value=said.subscriptions
            )
        yield CounterMetricFamily(
            "prefixd_asked_tokens", "prompt tokens asked for, once a prompt", value=stats.asked_tokens
        )
        yield CounterMetricFamily("prefixd_hit_tokens", "those of them that were found", value=stats.hit_tokens)
        yield GaugeMetricFamily("prefixd_sessions", "open sessions", value=len(stats.sessions))
        yield GaugeMetricFamily("prefixd_leases", "leases", value=stats.leases)
        yield GaugeMetricFamily("prefixd_reservations", "reservations", value=stats.reservations)
        yield GaugeMetricFamily("prefixd_waiting_requests", "queue length", value=stats.scheduler.waiting_requests)
        yield GaugeMetricFamily("prefixd_running_requests", "requests running", value=stats.worker.running_requests)
        counted = {
            "preempted_requests": "times a running request gave its GPU memory to others",
            "swapped_requests": "of these, those whose KV went down the tiers",
            "recomputed_requests": "of these, those whose KV was dropped",
            "swapped_blocks": "blocks copied down for swapped requests",
            "recomputed_tokens": "tokens that preempted requests had computed and compute again",
            "resumed_requests": "times a request was put back: preempted, its worker died or had no memory for it",
            "load_decisions": "requests with a first token of whose cached prefix a part was not in GPU memory",
            "cut_loads": "of these, those that computed a part of it again",
            "split_loads": "of these, those that loaded a part while they computed another",
            "abandoned_loads": "loads that were given up because they had fallen behind",
        }
        for field, text in counted.items():
            yield CounterMetricFamily(f"prefixd_{field}", text, value=getattr(stats.scheduler, field))
        yield CounterMetricFamily(
            "prefixd_load_spent_seconds",
            "from the turn of requests with such a prefix to their first token",
            value=stats.scheduler.load_spent_s,
        )
        yield CounterMetricFamily(
            "prefixd_load_regret_seconds",
            "of these, what loading everything or computing everything would have saved, by estimates made afterwards",
            value=stats.scheduler.load_regret_s,
        )
        if stats.HasField("remote"):
            yield from _of_store(stats.remote)
        workers = [model.worker for model in stats.models]
        for part, (prefix, fields) in _OF_A_PART.items():
            if having := [getattr(worker, part) for worker in workers if worker.HasField(part)]:
                for field, text in fields.items():
                    yield CounterMetricFamily(prefix + field, text, value=sum(getattr(each, field) for each in having))
        if workers:
            yield GaugeMetricFamily(
                "prefixd_worker_up",
                "1 while the worker takes requests, of several models every worker; 0 while one starts, and after one "
                "was given up",
                value=all(worker.state == pb.WorkerStats.STATE_READY for worker in workers),
            )
            yield CounterMetricFamily(
                "prefixd_worker_passes", "forward passes of the models", value=sum(worker.passes for worker in workers)
            )
        yield CounterMetricFamily(
            "prefixd_worker_restarts", "worker restarts", value=sum(worker.restarts for worker in workers)
        )
        if len(stats.models) > 1:
            yield from _of_models(stats.models)


_OF_STORE = {
    "asked_prompts": "prompts that the shared store was asked about",
    "asked_objects": "objects that it was asked for",
    "found_blocks": "blocks that it had",
    "remembered_prompts": "prompts that it was not asked about because it had said no a moment ago",
    "unanswered_prompts": "prompts that went on without its answer",
    "read_bytes": "bytes read from it",
    "written_bytes": "bytes written to it",
    "shared_blocks": "blocks that this host has brought to it, or found there",
    "failures": "times that it was taken out of service",
    "copied_bytes": "bytes of its objects that were copied in this host's memory",
}


def _of_store(remote: pb.RemoteStats) -> Iterator[Metric]:
    for field, text in _OF_STORE.items():
        yield CounterMetricFamily(f"prefixd_remote_{field}", text, value=getattr(remote, field))
    yield GaugeMetricFamily("prefixd_remote_answer_seconds", "what its answers take now", value=remote.answer_s)
    yield GaugeMetricFamily(
        "prefixd_remote_known_blocks", "blocks that only it has, as far as is known", value=remote.known_blocks
    )
    bad = CounterMetricFamily(
        "prefixd_remote_bad_objects", "objects of it that were read and not used", labels=["kind"]
    )
    for kind in ("foreign", "old", "altered"):
        bad.add_metric([kind], remote.bad_objects.get(kind, 0))
    yield bad


_OF_A_PART = {
    "states": (
        "prefixd_state_",
        {
            "kept_states": "states of recurrent layers that were kept",
            "kept_bytes": "bytes of these states",
            "resumed_runs": "runs that began with a cached state",
            "resumed_tokens": "tokens that these runs did not compute",
            "runs_without_room": "runs of which no state is kept for want of GPU memory",
        },
    ),
    "images": (
        "prefixd_",
        {
            "asked_images": "images of prompts that were handed over",
            "encoded_images": "embeddings of images that were computed",
            "found_images": "images whose keys and values for cross-attention were in a tier",
        },
    ),
    "draft": (
        "prefixd_draft_",
        {
            "proposed_tokens": "tokens that the draft model proposed",
            "accepted_tokens": "those of them that the model chose, too",
        },
    ),
}
"""Counters of what only some workers have: of a field of `WorkerStats`, the metrics' prefix and their texts."""


def _of_models(models: Sequence[pb.ModelStats]) -> Iterator[Metric]:
    """Of several models, each one's figures; the ones without a label are all models'."""
    ready = pb.WorkerStats.STATE_READY
    gauges: dict[str, tuple[str, Callable[[pb.ModelStats], float]]] = {
        "worker_up": ("1 while a model's worker takes requests", lambda model: model.worker.state == ready),
        "running_requests": ("requests running", lambda model: model.worker.running_requests),
        "waiting_requests": ("queue length", lambda model: model.scheduler.waiting_requests),
        "held_bytes": ("bytes of the GPU tier that a model's requests keep", lambda model: model.held_bytes),
    }
    counters: dict[str, tuple[str, Callable[[pb.ModelStats], float]]] = {
        "finished_requests": ("requests that have ended", lambda model: model.scheduler.finished_requests),
        "preempted_requests": ("times a request gave way", lambda model: model.scheduler.preempted_requests),
        "worker_restarts": ("worker restarts", lambda model: model.worker.restarts),
        "worker_passes": ("forward passes", lambda model: model.worker.passes),
    }
    for kind, families in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, (text, value) in families.items():
            family = kind(f"prefixd_model_{name}", text, labels=["model"])
            for model in models:
                family.add_metric([model.name], value(model))
            yield family
    for part, (prefix, fields) in _OF_A_PART.items():
        having = [model for model in models if model.worker.HasField(part)]
        for field, text in fields.items() if having else ():
            each = CounterMetricFamily(prefix.replace("_", "_model_", 1) + field, text, labels=["model"])
            for model in having:
                each.add_metric([model.name], getattr(getattr(model.worker, part), field))
            yield each


def _part(part: PartSpec) -> cache_pb2.Part:
    return cache_pb2.Part(group=part.group, rank=part.rank, nbytes=part.nbytes, rule=rule_message(part.rule))
