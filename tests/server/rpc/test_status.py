"""A caller that goes away in the middle of a call."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import pytest

from prefixd.base.errors import ExhaustedError
from prefixd.cache import Process, TieredCache, check_integrity
from prefixd.server.rpc import door
from prefixd.server.rpc.receiving import CURRENT_CALL, Call
from prefixd.v1 import cache_pb2 as pb
from prefixd.v1 import cache_pb2_grpc


class Service:
    """Grants what it is asked for, once it may."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.taken_back: list[tuple[str, str]] = []

    @door.granting(lambda self, request, response: self.taken_back.append((request, response)))
    async def grant(self, request: str) -> str:
        await self.may.wait()
        if request == "too much":
            raise ExhaustedError("no room")
        return f"granted {request}"


async def test_what_a_caller_that_has_gone_is_granted_is_taken_back() -> None:
    service, context = Service(), object()
    gone, there = (asyncio.create_task(service.grant(name, context)) for name in ("gone", "there"))
    refused: asyncio.Task[Any] = asyncio.create_task(service.grant("too much", context))
    await asyncio.sleep(0)
    gone.cancel()
    refused.cancel()
    for task in (gone, refused):
        with pytest.raises(asyncio.CancelledError):
            await task
    service.may.set()
    assert await there == "granted there"
    await door.finish_work()
    await asyncio.sleep(0)
    assert service.taken_back == [("gone", "granted gone")]


@pytest.mark.parametrize("hang_up", ["cancel", "deadline"])
@pytest.mark.parametrize("method", ["Acquire", "Reserve"])
async def test_a_grant_that_comes_too_late_is_given_back(
    cache: TieredCache,
    cache_server: grpc.aio.Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    hang_up: str,
) -> None:
    cache_server.add_insecure_port(f"unix:{tmp_path}/s")
    await cache_server.start()
    entered, may = asyncio.Event(), asyncio.Event()
    work = getattr(cache, method.lower())

    async def slowly(*arguments: Any, **options: Any) -> Any:
        entered.set()
        await may.wait()
        return await work(*arguments, **options)

    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        stub: Any = cache_pb2_grpc.PrefixCacheStub(channel)
        events = stub.OpenSession(pb.OpenSessionRequest())
        session = (await events.read()).opened.session_id
        cache.leases.sessions[session].processes.add(Process(1))  # or it could reserve nothing
        wanted = pb.Namespace(name="n", block_tokens=1, parts=[pb.Part(group="g", nbytes=8)])
        register = pb.RegisterNamespaceRequest(session_id=session, namespace=wanted)
        named = {
            "session_id": session,
            "namespace_id": (await stub.RegisterNamespace(register)).namespace_id,
            "token_ids": bytes(8),
        }
        if method == "Acquire":
            put = [pb.PutRequest(header=pb.PutHeader(**named)), pb.PutRequest(data=bytes(16))]
            await stub.Put(iter(put))
        monkeypatch.setattr(cache, method.lower(), slowly)
        call = getattr(stub, method)(
            getattr(pb, f"{method}Request")(**named), timeout=3.0 if hang_up == "deadline" else None
        )
        await entered.wait()
        if hang_up == "cancel":
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE"):
                await call
        # A call on the same connection that comes later is answered later: by then the daemon knows that we hung up.
        await stub.Match(pb.MatchRequest(**named))
        await asyncio.sleep(0)
        may.set()
        await door.finish_work()
        await asyncio.sleep(0)
        (opened,) = cache.leases.sessions.values()
        assert not opened.grants
        check_integrity(cache)
    await cache_server.stop(None)


class _Request:
    """What a refused call must not leave behind."""


class _Refusing:
    @door.unary
    async def unary(self, request: Any) -> Any:
        await asyncio.sleep(0)
        raise ExhaustedError("no")

    @door.streaming
    async def streaming(self, request: Any) -> AsyncGenerator[Any, None]:
        await asyncio.sleep(0)
        raise ExhaustedError("no")
        yield


class _Aborting:
    async def abort(self, code: object, message: str, metadata: object) -> None:
        raise grpc.aio.AbortError(message)


@pytest.mark.parametrize("kind", ["unary", "streaming"])
async def test_a_refused_request_is_gone_at_once(kind: str) -> None:
    """A message of 16 MiB that waits for the garbage collector takes memory as long as nothing else does."""

    async def refuse() -> weakref.ref[_Request]:
        request = _Request()
        with pytest.raises(grpc.aio.AbortError):
            if kind == "unary":
                await _Refusing().unary(request, _Aborting())
            else:
                async for _ in _Refusing().streaming(request, _Aborting()):
                    pass
        return weakref.ref(request)

    gc.disable()
    try:
        gone = await asyncio.create_task(refuse())
        await asyncio.sleep(0)
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["unary", "streaming"])
async def test_a_refusal_that_waits_keeps_no_request(kind: str) -> None:
    waits, told = asyncio.Event(), asyncio.Event()

    class Waiting(Call):
        async def refusal_turn(self) -> None:
            waits.set()
            await told.wait()

    async def refuse(requests: list[_Request]) -> None:
        CURRENT_CALL.set(Waiting(None))
        with pytest.raises(grpc.aio.AbortError):
            if kind == "unary":
                await _Refusing().unary(requests.pop(), _Aborting())
            else:
                async for _ in _Refusing().streaming(requests.pop(), _Aborting()):
                    pass

    requests = [_Request()]
    gone = weakref.ref(requests[0])
    refused = asyncio.create_task(refuse(requests))
    await waits.wait()
    assert gone() is None
    told.set()
    await refused
