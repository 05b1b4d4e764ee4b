"""`Admin` over gRPC; the contract is in `proto/prefixd/v1/admin.proto`."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import numpy as np

from prefixd.cache import DISK, Namespace, TieredCache, Trie
from prefixd.cache.index.trie import TIERS, Rows
from prefixd.cache.integrity import audit
from prefixd.cache.scrubber import ScrubProgress
from prefixd.errors import InvalidArgumentError, NotFoundError, PreconditionError
from prefixd.server.rpc import streaming, unary
from prefixd.server.snapshot import Snapshot
from prefixd.v1 import admin_pb2 as pb
from prefixd.v1 import admin_pb2_grpc, cache_pb2

log = logging.getLogger(__name__)

_LIST_LIMIT = 100
_KEY_DIGITS = 32
_SHORTEST_KEY = 4
_PROGRESS_S = 0.1


class AdminService(admin_pb2_grpc.AdminServicer):
    """What an operator asks and does.

    Args:
        cache: the cache.
        snapshot: the figures of `Stats`.
        drain: takes no new work, finishes what runs, writes back; with True ends the daemon afterwards.
            Returns (blocks written, requests finished).
    """

    def __init__(
        self,
        cache: TieredCache,
        snapshot: Snapshot,
        drain: Callable[[bool], Awaitable[tuple[int, int]]],
    ) -> None:
        self._cache = cache
        self._snapshot = snapshot
        self._drain = drain

    @unary
    async def Stats(self, request: pb.StatsRequest) -> pb.StatsResponse:
        """All figures."""
        return await self._snapshot.take()

    @unary
    async def ListPrefixes(self, request: pb.ListPrefixesRequest) -> pb.ListPrefixesResponse:
        """The leaves of the trie, most recently used first."""
        cache = self._cache
        only = cache.namespaces.get(request.namespace_id).ordinal if request.namespace_id else None
        leaves: list[tuple[float, Trie, int]] = []
        for trie in cache.tries:
            rows = trie.used_rows()
            rows = rows[(trie.children[rows] == 0) & (trie.nearest[rows] < TIERS)]
            if only is not None:
                rows = rows[trie.namespace[rows] == only]
            leaves += [
                (used, trie, row) for used, row in zip(trie.last_used[rows].tolist(), rows.tolist(), strict=True)
            ]
        leaves.sort(key=lambda leaf: -leaf[0])
        shown = leaves[: request.limit or _LIST_LIMIT]
        return pb.ListPrefixesResponse(prefixes=[self._info(trie, row) for _, trie, row in shown], total=len(leaves))

    @unary
    async def Inspect(self, request: pb.InspectRequest) -> pb.InspectResponse:
        """One prefix, block by block."""
        trie, row = self._find(request.key)
        blocks = [
            pb.BlockInfo(
                index=index,
                key=trie.key(block).hex(),
                tiers=[cache_pb2.Tier.Name(tier + 1) for tier in range(TIERS) if trie.has(block, tier)],
                children=int(trie.children[block]),
                pinned=bool(trie.pinned[block]),
                held=int(trie.holds[block].sum()),
                nbytes=sum(trie.part_bytes),
                token_ids=trie.tokens[block].tolist(),
            )
            for index, block in enumerate(trie.path(row).tolist())
        ]
        return pb.InspectResponse(prefix=self._info(trie, row), blocks=blocks)

    @unary
    async def Pin(self, request: pb.PinRequest) -> pb.PinResponse:
        """Keeps a prefix."""
        trie, row = self._find(request.key)
        path = trie.path(row)
        trie.pinned[path] = True
        return pb.PinResponse(blocks=len(path))

    @unary
    async def Unpin(self, request: pb.UnpinRequest) -> pb.UnpinResponse:
        """Lets a prefix go again."""
        trie, row = self._find(request.key)
        path = trie.path(row)
        pinned = int(trie.pinned[path].sum())
        trie.pinned[path] = False
        self._cache.mover.placement.sweep(trie, path)
        return pb.UnpinResponse(blocks=pinned)

    @unary
    async def Evict(self, request: pb.EvictRequest) -> pb.EvictResponse:
        """Drops a prefix and what continues it, a namespace, or everything."""
        what = request.WhichOneof("what")
        await self._cache.mover.wait_for_checksums()  # what was just committed is held for a moment
        doomed: list[tuple[Trie, list[int]]] = []
        if what == "key":
            trie, row = self._find(request.key)
            if trie.pinned[row] or trie.keep[row]:
                why = "pinned; unpin it first" if trie.pinned[row] else "in use; try again when its leases have ended"
                raise PreconditionError(f"prefix {request.key} is {why}")
            doomed.append((trie, trie.subtree(np.array([row]))))
        elif what == "namespace_id":
            namespace = self._cache.namespaces.get(request.namespace_id)
            trie = self._cache.trie(namespace)
            rows = trie.used_rows()
            doomed.append((trie, _shallow_first(trie, rows[trie.namespace[rows] == namespace.ordinal])))
        elif what == "all" and request.all:
            doomed += [(trie, _shallow_first(trie, trie.used_rows())) for trie in self._cache.tries]
        else:
            raise InvalidArgumentError("nothing to evict was named; send a key, a namespace_id or all = true")
        evicted = 0
        for trie, found in doomed:
            evicted += await self._cache.mover.forget(trie, found[::-1])
        return pb.EvictResponse(evicted_blocks=evicted, kept_blocks=sum(len(found) for _, found in doomed) - evicted)

    @unary
    async def Flush(self, request: pb.FlushRequest) -> pb.FlushResponse:
        """Writes what is not on disk to disk. A tier that cannot grow, or cannot be read, still takes blocks."""
        tiers = self._cache.tiers
        disk = tiers.disk
        if disk is None:
            raise PreconditionError("there is no disk tier to flush to; start the daemon with disk.bytes above 0")
        before = disk.used_bytes
        blocks = await self._cache.write_back.flush()
        if not tiers.disk_takes:
            raise PreconditionError(f"the disk tier is out of service: {tiers.trouble[DISK]}")
        return pb.FlushResponse(blocks=blocks, nbytes=max(disk.used_bytes - before, 0))

    @unary
    async def Drain(self, request: pb.DrainRequest) -> pb.DrainResponse:
        """Takes no new work, finishes what runs, writes back."""
        written, finished = await self._drain(request.shutdown)
        return pb.DrainResponse(written_blocks=written, finished_requests=finished)

    @streaming
    async def Verify(self, request: pb.VerifyRequest) -> AsyncGenerator[pb.VerifyProgress, None]:
        """Checks every block on disk."""
        cache = self._cache
        if cache.tiers.disk is None:
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

    @unary
    async def CheckIntegrity(self, request: pb.CheckIntegrityRequest) -> pb.CheckIntegrityResponse:
        """Accounts for everything."""
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
        )

    def _find(self, key: str) -> tuple[Trie, int]:
        """The prefix whose last block's key is, or begins with, `key`."""
        digits = key.lower()
        if len(digits) < _SHORTEST_KEY or len(digits) > _KEY_DIGITS or digits.strip("0123456789abcdef"):
            raise InvalidArgumentError(
                f"key {key!r} is not {_SHORTEST_KEY} to {_KEY_DIGITS} hex digits; `prefixd ls` shows the keys"
            )
        found = [(trie, row) for trie in self._cache.tries for row in trie.find_by_digits(digits).tolist()]
        if not found:
            raise NotFoundError(f"no prefix has the key {key}; `prefixd ls` shows what there is")
        if len(found) > 1:
            raise InvalidArgumentError(f"{len(found)} prefixes have keys that begin with {key}; give more digits")
        return found[0]

    def _info(self, trie: Trie, row: int) -> pb.PrefixInfo:
        path = trie.path(row)
        namespace: Namespace = self._cache.namespaces.at(int(trie.namespace[row]))
        gpu, cpu, disk = (int((trie.nearest[path] == tier).sum()) for tier in range(TIERS))
        return pb.PrefixInfo(
            key=trie.key(row).hex(),
            namespace_id=namespace.id,
            namespace_name=namespace.spec.name,
            blocks=len(path),
            tokens=len(path) * trie.block_tokens,
            nbytes=len(path) * sum(trie.part_bytes),
            gpu_blocks=gpu,
            cpu_blocks=cpu,
            disk_blocks=disk,
            idle_s=max(self._cache.clock() - float(trie.last_used[row]), 0.0),
            pinned=bool(trie.pinned[row]),
            held=int(trie.holds[path].sum(axis=1).max()),
        )


def _progress(progress: ScrubProgress) -> pb.VerifyProgress:
    """The progress as a message; what it tells as found is not told again."""
    found, progress.damaged = progress.damaged, []
    return pb.VerifyProgress(
        checked_blocks=progress.checked_blocks,
        total_blocks=progress.total_blocks,
        checked_bytes=progress.checked_bytes,
        damaged_blocks=progress.damaged_blocks,
        dropped_blocks=progress.dropped_blocks,
        damaged=[
            pb.DamagedBlock(key=damage.identity[1].hex(), namespace_id=damage.identity[0], reason=str(damage.error))
            for damage in found
        ],
    )


def _shallow_first(trie: Trie, rows: Rows) -> list[int]:
    ordered: list[int] = rows[np.argsort(trie.depth[rows], kind="stable")].tolist()
    return ordered
