"""A stand-in for the daemon whose failures can be ordered, and the real daemon as a process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from prefixd.base.errors import PrefixdError, SessionEndedError
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import NamespaceSpec, PartSpec
from prefixd.server.rpc.door import Door, ServiceTable
from prefixd.server.rpc.sockets.memory_listener import MemoryListener
from prefixd.server.rpc.status import abort
from prefixd.v1 import cache_pb2 as pb
from prefixd.v1 import cache_pb2_grpc

ARENA_BYTES = 1 << 20


class StandIn(cache_pb2_grpc.PrefixCacheServicer):
    """Grants every prompt one lease or reservation of all its blocks, from the start of its arena."""

    def __init__(self, folder: Path, guard: Door | None = None) -> None:
        self.address = f"unix:{folder}/s"
        self.fd = os.memfd_create("stand-in")
        os.ftruncate(self.fd, ARENA_BYTES)
        self.failures: dict[str, tuple[grpc.StatusCode, str]] = {}
        self.aborts: dict[str, PrefixdError] = {}
        """By method, what the daemon itself answers."""
        self.restarts: dict[str, int] = {}
        """By method, how many of its next calls meet a daemon that was restarted since their session was opened."""
        self.sessions: dict[str, asyncio.Event] = {}
        self.opened = 0
        self.released: list[str] = []
        self.registered: list[str] = []
        self.hang: set[str] = set()
        self.gates: dict[str, asyncio.Event] = {}
        self.persisted = 0
        self.nothing_to_reserve = False
        self.entered: list[str] = []
        self.tier: Any = pb.TIER_CPU
        self.ttl_s = 60.0
        self.get_data: list[bytes] = []
        self.get_blocks = 0
        self.refuse_after_data = False
        self.put_data = b""
        self._door = MemoryListener(folder / "m", self.fd, ARENA_BYTES, self.sessions.__contains__)
        self._guard = guard
        self._server: grpc.aio.Server | None = None
        self._spec: pb.Namespace = pb.Namespace()

    async def start(self) -> None:
        await self._door.start()
        self._server = grpc.aio.server()
        behind: Any = self._server if self._guard is None else ServiceTable([(self._server, self._guard)])
        cache_pb2_grpc.add_PrefixCacheServicer_to_server(self, behind)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
        await self._door.close()
        self.sessions.clear()

    def end_sessions(self) -> None:
        for ended in self.sessions.values():
            ended.set()

    async def _enter(self, method: str, context: Any, session_id: str = "") -> None:
        """The beginning of a call; one in a session that is not open ends here, as in the daemon."""
        self.entered.append(method)
        if method in self.hang:
            await asyncio.Event().wait()
        if method in self.gates:
            # As in the daemon, the work goes on when its caller has gone.
            await asyncio.shield(asyncio.ensure_future(self.gates[method].wait()))
        if self.restarts.get(method):
            self.restarts[method] -= 1
            await abort(context, SessionEndedError("session stand-in is not open"))
        if method in self.aborts:
            await abort(context, self.aborts[method])
        if method in self.failures:
            await context.abort(*self.failures[method])
        if session_id and session_id not in self.sessions:
            await abort(context, SessionEndedError(f"session {session_id} is not open"))

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Any) -> AsyncIterator[pb.SessionEvent]:
        await self._enter("OpenSession", context)
        self.opened += 1
        session_id = f"session-{self.opened}"
        self.sessions[session_id] = asyncio.Event()
        opened = pb.SessionOpened(
            session_id=session_id,
            memory_socket=str(self._door.path),
            arena_bytes=ARENA_BYTES,
            default_ttl_s=60,
            max_ttl_s=60,
        )
        try:
            yield pb.SessionEvent(opened=opened)
            await self.sessions[session_id].wait()
        finally:
            self.sessions.pop(session_id, None)

    async def RegisterNamespace(
        self, request: pb.RegisterNamespaceRequest, context: Any
    ) -> pb.RegisterNamespaceResponse:
        await self._enter("RegisterNamespace", context, request.session_id)
        self._spec = request.namespace
        self.registered.append(request.namespace.name)
        return pb.RegisterNamespaceResponse(namespace_id=b"12345678")

    async def Match(self, request: pb.MatchRequest, context: Any) -> pb.MatchResponse:
        await self._enter("Match", context, request.session_id)
        return pb.MatchResponse(blocks=1, runs=[pb.TierRun(tier=self.tier, blocks=1)])

    def _blocks(self, token_ids: bytes) -> tuple[int, list[int]]:
        blocks = len(token_ids) // 4 // self._spec.block_tokens
        sizes = [part.nbytes for part in self._spec.parts] * blocks
        return blocks, [sum(sizes[:index]) for index in range(len(sizes))]

    async def Acquire(self, request: pb.AcquireRequest, context: Any) -> pb.AcquireResponse:
        await self._enter("Acquire", context, request.session_id)
        blocks, offsets = self._blocks(request.token_ids)
        return pb.AcquireResponse(lease_id="lease", blocks=blocks, offsets=offsets, ttl_s=self.ttl_s)

    async def Reserve(self, request: pb.ReserveRequest, context: Any) -> pb.ReserveResponse:
        await self._enter("Reserve", context, request.session_id)
        if self.nothing_to_reserve:
            return pb.ReserveResponse()
        blocks, offsets = self._blocks(request.token_ids)
        return pb.ReserveResponse(reservation_id="reservation", blocks=blocks, offsets=offsets, ttl_s=self.ttl_s)

    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitResponse:
        await self._enter("Commit", context, request.session_id)
        return pb.CommitResponse(committed=request.blocks)

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        await self._enter("Release", context, request.session_id)
        self.released.append(request.lease_id)
        return pb.ReleaseResponse()

    async def Renew(self, request: pb.RenewRequest, context: Any) -> pb.RenewResponse:
        await self._enter("Renew", context, request.session_id)
        return pb.RenewResponse(ttl_s=request.ttl_s or 60.0)

    async def Persist(self, request: pb.PersistRequest, context: Any) -> pb.PersistResponse:
        await self._enter("Persist", context)
        return pb.PersistResponse(blocks=self.persisted)

    async def Prefetch(self, request: pb.PrefetchRequest, context: Any) -> pb.PrefetchResponse:
        await self._enter("Prefetch", context)
        return pb.PrefetchResponse(blocks=1)

    async def Retain(self, request: pb.RetainRequest, context: Any) -> pb.RetainResponse:
        await self._enter("Retain", context)
        return pb.RetainResponse(blocks=1)

    async def Put(self, requests: AsyncIterator[pb.PutRequest], context: Any) -> pb.PutResponse:
        await self._enter("Put", context)
        await context.send_initial_metadata((("prefixd-agreed", "1"),))
        first, *rest = [request async for request in requests]
        self.put_data = b"".join(request.data for request in rest)
        return pb.PutResponse(committed=self._blocks(first.header.token_ids)[0] - first.header.first_block)

    async def Get(self, request: pb.GetRequest, context: Any) -> AsyncIterator[pb.GetResponse]:
        await self._enter("Get", context)
        yield pb.GetResponse(header=pb.GetHeader(blocks=self.get_blocks))
        for data in self.get_data:
            yield pb.GetResponse(data=data)
        if self.refuse_after_data:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "not any more")


@pytest.fixture
async def stand_in(folder: Path) -> AsyncIterator[StandIn]:
    server = StandIn(folder)
    await server.start()
    yield server
    await server.stop()
    os.close(server.fd)


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """The real daemon, without a disk; shared by a module's tests, which use namespaces of their own."""
    with DaemonProcess({"cpu.bytes": "64MiB", "disk.bytes": 0}) as running:
        yield running


@pytest.fixture
def spec(request: pytest.FixtureRequest) -> NamespaceSpec:
    """Two tokens a block, two parts, named for the test."""
    return NamespaceSpec(request.node.name, 2, (PartSpec("full", 0, 96), PartSpec("window", 0, 32)))
