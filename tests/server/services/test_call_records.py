"""An engine's calls leave records: what was found in which tier, and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest

from prefixd.base.tenancy.tenants import Role
from prefixd.cache import TieredCache
from prefixd.observability.request_log import RequestLog
from prefixd.observability.request_record import Kind, RequestRecord
from prefixd.server.access.identities import Caller
from prefixd.server.rpc.receiving import current_call
from prefixd.server.rpc.request_headers import read_headers
from prefixd.server.services.cache_service import PrefixCacheService
from prefixd.v1 import cache_pb2 as pb
from prefixd.v1 import cache_pb2_grpc
from tests.daemons import AnybodyCalls


class Named(AnybodyCalls):
    """Reads the headers as the door does."""

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await super().intercept_service(continuation, handler_call_details)
        current_call().headers = read_headers(handler_call_details.invocation_metadata)
        return handler


@pytest.fixture
async def log(cache: TieredCache) -> RequestLog:
    return RequestLog(cache.clock)


@pytest.fixture
async def stub(cache: TieredCache, log: RequestLog) -> AsyncIterator[cache_pb2_grpc.PrefixCacheStub]:
    server = grpc.aio.server(interceptors=[Named(Caller(cache.tenants.default, Role.CLIENT, "test", "unix"))])
    cache_pb2_grpc.add_PrefixCacheServicer_to_server(PrefixCacheService(cache, None, asyncio.Event(), log), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield cache_pb2_grpc.PrefixCacheStub(channel)
    await server.stop(None)


async def test_a_lookup_and_a_store_are_found_by_the_engines_id(
    stub: cache_pb2_grpc.PrefixCacheStub, log: RequestLog
) -> None:
    events = stub.OpenSession(pb.OpenSessionRequest(client_name="t"))
    session = (await events.read()).opened.session_id
    wanted = pb.Namespace(name="m", block_tokens=4, parts=[pb.Part(group="kv", nbytes=64)])
    named = {"session_id": session}
    registered = await stub.RegisterNamespace(pb.RegisterNamespaceRequest(namespace=wanted, **named))
    tokens = np.arange(18, dtype="<u4").tobytes()
    named |= {"namespace_id": registered.namespace_id, "token_ids": tokens}
    header = (("prefixd-request-id", "chat-7"),)
    missed = await stub.Acquire(pb.AcquireRequest(**named), metadata=header)
    assert missed.blocks == 0
    await stub.Put(iter([pb.PutRequest(header=pb.PutHeader(**named)), pb.PutRequest(data=bytes(256))]), metadata=header)
    found = await stub.Acquire(pb.AcquireRequest(**named), metadata=header)
    assert found.blocks == 4
    read = stub.Get(pb.GetRequest(**named))
    assert [message async for message in read]
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Commit(pb.CommitRequest(session_id=session, reservation_id="none"))
    miss, put, hit = log.find("chat-7")
    assert (miss.kind, miss.method, miss.outcome, miss.blocks) == (Kind.LOOKUP, "Acquire", "ok", 0)
    assert (miss.prompt_tokens, miss.found_tokens, miss.hit_tokens) == (18, [0, 0, 0, 0], [0, 0, 0, 0])
    assert (put.kind, put.method, put.blocks) == (Kind.STORE, "Put", 4)
    assert (hit.found_tokens, hit.hit_tokens, hit.blocks) == ([0, 16, 0, 0], [0, 16, 0, 0], 4)
    assert [stage.name.value for stage in hit.stages] == ["receive", "match"], "nothing had to be loaded"
    (get,) = (record for record in log.last(9) if record.method == "Get")
    assert [stage.name.value for stage in get.stages] == ["receive", "match", "send"]
    assert (get.model, get.tenant, get.client_id) == ("m", "default", "")
    ended: list[RequestRecord] = log.last(9)
    assert len(ended) == 4, "a commit of nothing is a mistake of the call, and no use of the cache"
    events.cancel()
