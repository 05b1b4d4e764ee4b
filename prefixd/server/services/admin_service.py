"""`Admin` over gRPC; the contract is in `proto/prefixd/v1/admin.proto`."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict

from prefixd.base.errors import InvalidArgumentError, PreconditionError, UnsupportedError
from prefixd.base.long_work.pacer import Pacer
from prefixd.base.tiers import Tier
from prefixd.cache import TieredCache
from prefixd.cache.audit.integrity import audit
from prefixd.cache.background.forgetting import FoundBlocks, find_namespaces, find_subtree, forget, with_images
from prefixd.cache.background.scrubber import ScrubProgress
from prefixd.observability.eviction_journal import Reason
from prefixd.server.access.audit import AuditLog
from prefixd.server.access.disk_keys import key_file_setting
from prefixd.server.figures.snapshot import Snapshot
from prefixd.server.figures.tenant_figures import TenantFigures
from prefixd.server.prefixes.prefix_info import inspect_prefix
from prefixd.server.prefixes.prefix_keys import find_prefix
from prefixd.server.prefixes.prefix_pages import list_prefixes
from prefixd.server.prefixes.prompt_lookup import PromptLookup
from prefixd.server.prefixes.warm_answers import WarmAnswers
from prefixd.server.request_records.trace_recording import TraceRecording
from prefixd.server.request_records.why_answers import WhyAnswers
from prefixd.server.rpc.door import streaming, unary
from prefixd.server.rpc.receiving import current_caller
from prefixd.serving.models.tier_resize import TierResize
from prefixd.v1 import admin_pb2 as pb
from prefixd.v1 import admin_pb2_grpc, cache_pb2
from prefixd_swap import StorageError
from prefixd_swap.sealing.rest_keys import key_name

log = logging.getLogger(__name__)

_PROGRESS_S = 0.1
_HOLDERS = 100
_WAIT_S = 60.0  # of a resize, by default


class AdminService(admin_pb2_grpc.AdminServicer):
    """The calls of operators.

    Args:
        cache: the cache.
        snapshot: the figures of `Stats`.
        drain: drains the daemon; with True it ends the daemon afterwards. Returns (blocks written, requests finished).
        undrain: makes it take new work again; returns False if it was not drained. Raises PreconditionError.
        prompts: finds prompts, and reads blocks as text.
        tier_resize: resizes the GPU tier; None in a sidecar, which has none.
        tenants: figures and quotas of tenants.
        audit: logs what operators change.
        why: explains requests.
    """

    def __init__(
        self,
        cache: TieredCache,
        snapshot: Snapshot,
        drain: Callable[[bool], Awaitable[tuple[int, int]]],
        undrain: Callable[[], bool],
        prompts: PromptLookup,
        tier_resize: TierResize | None = None,
        *,
        tenants: TenantFigures,
        audit: AuditLog,
        why: WhyAnswers,
    ) -> None:
        self._why = why
        self._tenants = tenants
        self._audit = audit
        self._cache = cache
        self._snapshot = snapshot
        self._drain = drain
        self._undrain = undrain
        self._prompts = prompts
        self._tier_resize = tier_resize
        self._recording = TraceRecording(cache)
        self._warming = WarmAnswers(cache)

    @unary
    async def Stats(self, request: pb.StatsRequest) -> pb.StatsResponse:
        """Returns all figures."""
        return await self._snapshot.take(request.last_s)

    @unary
    async def ListPrefixes(self, request: pb.ListPrefixesRequest) -> pb.ListPrefixesResponse:
        """Lists the ends of cached prefixes in the order that is asked for."""
        answer = await list_prefixes(self._cache, request)
        self._prompts.add_models(answer.prefixes)
        return answer

    @unary
    async def Inspect(self, request: pb.InspectRequest) -> pb.InspectResponse:
        """Describes one prefix, block by block."""
        answer = await inspect_prefix(self._cache, request)
        self._prompts.add_models([answer.prefix])
        if request.text:
            await self._prompts.add_text(answer)
        return answer

    @unary
    async def FindPrefix(self, request: pb.FindPrefixRequest) -> pb.FindPrefixResponse:
        """Finds the longest cached prefix of a prompt."""
        return await self._prompts.find(request)

    @unary
    async def Warm(self, request: pb.WarmRequest) -> pb.WarmResponse:
        """Brings a prefix to CPU memory."""
        return await self._warming.warm(request)

    @unary
    async def Pin(self, request: pb.PinRequest) -> pb.PinResponse:
        """Keeps a prefix, across restarts if there is a disk tier."""
        prefix = await find_prefix(self._cache, request.key)
        path = await prefix.path(Pacer())
        reason = await self._cache.pins.pin(prefix.trie, path)
        self._told("pinned", what=request.key, blocks=len(path))
        return pb.PinResponse(blocks=len(path), durable=not reason, reason=reason)

    @unary
    async def Unpin(self, request: pb.UnpinRequest) -> pb.UnpinResponse:
        """Undoes `Pin`."""
        prefix = await find_prefix(self._cache, request.key)
        path = await prefix.path(Pacer())
        pinned, reason = await self._cache.pins.unpin(prefix.trie, path)
        self._told("unpinned", what=request.key, blocks=pinned)
        return pb.UnpinResponse(blocks=pinned, durable=not reason, reason=reason)

    @streaming
    async def Evict(self, request: pb.EvictRequest) -> AsyncGenerator[pb.EvictResponse, None]:
        """Drops a prefix with the blocks behind it, a namespace with its images, or everything."""
        cache = self._cache
        if request.shared and cache.mover.remote is None:
            raise PreconditionError("there is no shared store to delete from; leave shared out, or set remote.url")
        await cache.mover.checksums.wait_for_all()  # blocks that were just committed are held for a moment
        found = await self._to_evict(request)
        answer = pb.EvictResponse(total_blocks=sum(map(len, found)))
        told_s = cache.clock()
        try:
            for blocks in found:
                forgetting = forget(cache.mover, blocks, shared=request.shared, reason=Reason.OPERATOR)
                async with aclosing(forgetting) as steps:
                    async for evicted, kept in steps:
                        answer.evicted_blocks += evicted
                        answer.kept_blocks += kept
                        if cache.clock() - told_s >= _PROGRESS_S:
                            told_s = cache.clock()
                            yield answer
            answer.done = True
        finally:
            if answer.done or answer.evicted_blocks:  # a call that its caller ends early has dropped blocks too
                what = request.key or request.namespace_id.hex() or "all"
                self._told("evicted", what=what, shared=request.shared, blocks=answer.evicted_blocks)
        yield answer

    async def _to_evict(self, request: pb.EvictRequest) -> list[FoundBlocks]:
        what, cache = request.WhichOneof("what"), self._cache
        if what == "key":
            prefix = await find_prefix(cache, request.key)
            trie, row = prefix.trie, prefix.row
            if trie.pinned[row] or trie.keep[row]:
                why = "pinned; unpin it first" if trie.pinned[row] else "in use; try again when its leases have ended"
                raise PreconditionError(f"prefix {request.key} is {why}")
            return [await find_subtree(trie, row)]
        if what == "namespace_id":
            namespaces = await with_images(cache.namespaces, cache.namespaces.get(request.namespace_id))
            return [await find_namespaces(cache.trie(each), (each.ordinal,)) for each in namespaces]
        if what == "all" and request.all:
            return [await find_namespaces(trie, None) for trie in list(cache.tries)]
        raise InvalidArgumentError("nothing to evict was named; send a key, a namespace_id or all = true")

    @unary
    async def Flush(self, request: pb.FlushRequest) -> pb.FlushResponse:
        """Writes all blocks that are not on disk. A tier that cannot grow, or cannot be read, still takes blocks."""
        tiers = self._cache.tiers
        disk = tiers.durable
        if disk is None:
            raise PreconditionError("there is no disk tier to flush to; start the daemon with disk.bytes above 0")
        writes = self._cache.mover.disk.writes
        before = writes.written_bytes
        blocks = await self._cache.write_back.flush()
        if not disk.writable:
            raise PreconditionError(f"the disk tier is out of service: {tiers.troubles.of_tier(disk)}")
        placement = self._cache.placement
        return pb.FlushResponse(
            blocks=blocks,
            nbytes=writes.written_bytes - before,
            left_blocks=placement.queued_blocks,
            left_bytes=placement.queued_bytes_of.total(),
        )

    @unary
    async def Drain(self, request: pb.DrainRequest) -> pb.DrainResponse:
        """Drains the daemon: it takes no new work, finishes running work and writes back."""
        self._told("drained", shutdown=request.shutdown)
        written, finished = await self._drain(request.shutdown)
        return pb.DrainResponse(written_blocks=written, finished_requests=finished)

    @unary
    async def Undrain(self, request: pb.UndrainRequest) -> pb.UndrainResponse:
        """Makes the daemon take new work again."""
        was_draining = self._undrain()
        self._told("undrained")
        return pb.UndrainResponse(was_draining=was_draining)

    @streaming
    async def Verify(self, request: pb.VerifyRequest) -> AsyncGenerator[pb.VerifyProgress, None]:
        """Checks every block on disk."""
        cache = self._cache
        if cache.tiers.durable is None:
            raise PreconditionError("there is no disk tier to verify; start the daemon with disk.bytes above 0")
        told_s = cache.clock()
        async with aclosing(cache.scrubber.verify()) as steps:
            async for progress in steps:
                if cache.clock() - told_s >= _PROGRESS_S:
                    told_s = cache.clock()
                    yield _progress(progress)
        last = _progress(progress)
        last.done = True
        yield last

    @streaming
    async def ResizeTier(self, request: pb.ResizeTierRequest) -> AsyncGenerator[pb.ResizeTierResponse, None]:
        """Changes the size of the GPU tier."""
        if request.tier == cache_pb2.TIER_UNSPECIFIED:
            raise InvalidArgumentError("no tier was named; send tier = TIER_GPU")
        if request.tier != Tier.GPU.wire:
            name = cache_pb2.Tier.Name(request.tier) if request.tier in cache_pb2.Tier.values() else request.tier
            raise UnsupportedError(
                f"tier {name} cannot be resized while the daemon runs; only TIER_GPU can. Change cpu.bytes or "
                "disk.bytes and start the daemon again"
            )
        if self._tier_resize is None:
            raise UnsupportedError("this daemon has no model, hence no gpu tier; set worker.model or worker.embedded")
        if not 0 <= request.wait_s < math.inf:
            raise InvalidArgumentError(f"wait_s = {request.wait_s:g}; give a number of seconds, or 0 for {_WAIT_S:g}")
        if self._snapshot.draining.is_set():
            raise PreconditionError("the daemon drains; resize the gpu tier after `prefixd undrain` or its next start")
        progress = None
        try:
            async with aclosing(self._tier_resize.resize(request.nbytes, request.wait_s or _WAIT_S)) as steps:
                async for progress in steps:
                    yield pb.ResizeTierResponse(**asdict(progress))
        finally:
            if progress is not None:  # None: it was refused. A call that its caller ends early has changed the tier
                self._told("resized", what="gpu", nbytes=progress.nbytes)

    @unary
    async def Why(self, request: pb.WhyRequest) -> pb.WhyResponse:
        """Explains requests: where their time went, and why."""
        return await self._why.answer(request)

    @unary
    async def ListTenants(self, request: pb.ListTenantsRequest) -> pb.ListTenantsResponse:
        """Returns all tenants with their use and quotas."""
        return pb.ListTenantsResponse(tenants=self._tenants.take())

    @unary
    async def SetTenant(self, request: pb.SetTenantRequest) -> pb.TenantStats:
        """Changes a tenant's quota."""
        stats = self._tenants.set_quota(request)
        self._told("quota set", what=request.name, **_limits_set(request))
        return stats

    def _told(self, event: str, **what: str | float | None) -> None:
        self._audit.log_event(event, current_caller(), **what)

    @unary
    async def WhatIf(self, request: pb.WhatIfRequest) -> pb.WhatIfResponse:
        """Returns what tiers of other sizes and other policies would have found."""
        if self._snapshot.ghosts is None:
            raise UnsupportedError("this daemon estimates nothing")
        return self._snapshot.ghosts.answer(request.tenant)

    @streaming
    async def RecordTrace(self, request: pb.RecordTraceRequest) -> AsyncGenerator[pb.RecordedRequests, None]:
        """Sends hashes of the prompts that come."""
        requests = 0
        async with aclosing(self._recording.record(request.duration_s)) as messages:
            try:
                async for message in messages:
                    requests += len(message.requests)
                    yield message
            finally:
                self._told("recorded", requests=requests)

    @unary
    async def CheckIntegrity(self, request: pb.CheckIntegrityRequest) -> pb.CheckIntegrityResponse:
        """Checks that all slots, leases and reservations add up."""
        found = await audit(self._cache)
        if found.violations:
            log.error("the daemon's accounting contradicts itself: %s", "; ".join(found.violations))
        return pb.CheckIntegrityResponse(
            violations=found.violations,
            blocks=found.blocks,
            slots=found.slots,
            sessions=found.sessions,
            leases=found.leases,
            reservations=found.reservations,
            troubles=self._snapshot.troubles(),
            holders=[
                pb.Holder(owner=owner, blocks=blocks)
                for owner, blocks in self._cache.holds.blocks_by_owner().most_common(_HOLDERS)
            ],
            disk_keys=await self._disk_keys(),
        )

    async def _disk_keys(self) -> list[pb.DiskKey]:
        """Which keys encrypt the blocks on disk; empty without key files."""
        if (disk := self._cache.tiers.durable) is None or disk.keys.empty:
            return []
        try:
            used = await disk.encryption()
        except StorageError as error:
            log.error("which keys encrypt the blocks on disk cannot be read: %s", error)
            return []
        encrypting = disk.keys.encrypting()
        return [
            pb.DiskKey(
                key=key_name(key_id) if key_id else "",
                blocks=used.records[key_id],
                nbytes=used.bytes[key_id],
                encrypts=key_id in encrypting,
                settings=map(key_file_setting, disk.keys.holders(key_id)),
            )
            for key_id in sorted({*used.records, *used.bytes, *used.namespaces, *encrypting})
            if key_id or used.records[0]
        ]


def _limits_set(request: pb.SetTenantRequest) -> dict[str, float | None]:
    """Returns the limits that a request sets, by their names in the settings; None: the limit is removed."""
    limits: dict[str, float | None] = {}
    for tier in request.quota.tiers:
        for field, value in tier.ListFields():
            if field.name != "tier":
                limits[f"{Tier.from_wire(tier.tier).label}_{field.name.removesuffix('_bytes')}"] = value
    limits |= {field.name: value for field, value in request.quota.ListFields() if field.name != "tiers"}
    return limits | dict.fromkeys(request.unlimited)


def _progress(progress: ScrubProgress) -> pb.VerifyProgress:
    """Returns the progress as a message, and removes the damage that it reports from `progress`."""
    found, progress.damaged = progress.damaged, []
    return pb.VerifyProgress(
        checked_blocks=progress.checked_blocks,
        total_blocks=progress.total_blocks,
        checked_bytes=progress.checked_bytes,
        damaged_blocks=progress.damaged_blocks,
        altered_blocks=progress.altered_blocks,
        dropped_blocks=progress.dropped_blocks,
        damaged=[
            pb.DamagedBlock(key=damage.identity[1].hex(), namespace_id=damage.identity[0], reason=str(damage.error))
            for damage in found
        ],
    )
