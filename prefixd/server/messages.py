"""A message that cannot be read is its sender's mistake: INVALID_ARGUMENT.

Left to itself gRPC answers UNKNOWN and puts a traceback into the daemon's log for every one.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from prefixd.errors import InvalidArgumentError, PrefixdError
from prefixd.pacer import call_arrived
from prefixd.server.access_check import check_peer
from prefixd.server.receiving import first_message, later_message, set_message_bytes, stream
from prefixd.server.rpc import Context, abort
from prefixd.server.wire import check_fields

_MOST_BYTES = {
    "grpc.health.v1.Health": 1 << 10,
    "grpc.reflection.v1alpha.ServerReflection": 1 << 16,
    "prefixd.v1.PrefixCache/OpenSession": 1 << 16,
    "prefixd.v1.PrefixCache/WatchBlocks": 1 << 10,
}
"""Of a message, by service or method: those that anybody may call, and those whose calls last. Others: 16 MiB."""


class ServiceTable:
    """Takes services as a gRPC server does, and adds them to several servers, with unreadable messages answered."""

    def __init__(self, servers: Sequence[grpc.aio.Server]) -> None:
        self._servers = servers

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Passed over: what generated code adds here it also adds as registered methods, which take precedence."""

    def add_registered_method_handlers(
        self, service_name: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Adds the methods of a service, by name."""
        most = {name: _MOST_BYTES.get(service_name, _MOST_BYTES.get(f"{service_name}/{name}")) for name in handlers}
        answered = {name: _answering(handler, most[name]) for name, handler in handlers.items()}
        for server in self._servers:
            server.add_registered_method_handlers(service_name, answered)


@dataclass(frozen=True, slots=True)
class _Unreadable:
    reason: str

    def error(self) -> InvalidArgumentError:
        return InvalidArgumentError(f"the message cannot be read ({self.reason}); send what proto/prefixd/v1 describes")


def _answering(handler: grpc.RpcMethodHandler[Any, Any], most_bytes: int | None) -> grpc.RpcMethodHandler[Any, Any]:
    """`handler` for requests that may be `_Unreadable`, as those of more bytes are."""
    parse = handler.request_deserializer
    if parse is None:
        return handler

    descriptor = getattr(getattr(parse, "__self__", None), "DESCRIPTOR", None)  # generated: `FromString` of a class

    def read(message: bytes) -> Any:
        call_arrived()
        set_message_bytes(len(message))
        if most_bytes is not None and len(message) > most_bytes:
            return _Unreadable(f"it has {len(message)} bytes, of {most_bytes} at most")
        try:
            if descriptor is not None:
                check_fields(message, descriptor)
            return parse(message)
        except InvalidArgumentError as error:
            return _Unreadable(str(error))
        except DecodeError as error:
            return _Unreadable(str(error))

    several = handler.request_streaming
    kind = f"{'stream' if several else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    behaviour = getattr(handler, kind)
    around = _around_generator if inspect.isasyncgenfunction(behaviour) else _around_coroutine
    # Also where there is one message we read it, and not gRPC: it would wait for it for ever.
    make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    served: grpc.RpcMethodHandler[Any, Any] = make(
        around(behaviour, _all_messages, stream) if several else around(behaviour, _only_message, nullcontext),
        request_deserializer=read,
        response_serializer=handler.response_serializer,
    )
    return served


_Behaviour = Callable[..., Any]
_Requests = Callable[[Context], Awaitable[Any]]
"""What a handler is called with: the message, or all of them one after the other."""
_Place = Callable[[], AbstractAsyncContextManager[None]]


# gRPC's own iterator of requests is never begun: it keeps the last message until the garbage collector comes.
def _around_coroutine(behaviour: _Behaviour, requests: _Requests, place: _Place) -> _Behaviour:
    async def handle(_: object, context: Context) -> Any:
        try:
            await check_peer(context)
            async with place():
                return await behaviour(await requests(context), context)
        except PrefixdError as error:
            await abort(context, error)

    return handle


def _around_generator(behaviour: _Behaviour, requests: _Requests, place: _Place) -> _Behaviour:
    async def handle(_: object, context: Context) -> AsyncGenerator[Any, None]:
        try:
            await check_peer(context)
            async with place(), aclosing(behaviour(await requests(context), context)) as responses:
                async for response in responses:
                    yield response
        except PrefixdError as error:
            await abort(context, error)

    return handle


async def _only_message(context: Context) -> Any:
    request = await first_message(partial(_read, context))
    if request is None:
        raise InvalidArgumentError("the call has no message; send one")
    return _readable(request)


async def _all_messages(context: Context) -> AsyncIterator[Any]:
    read = partial(_read, context)

    async def messages() -> AsyncIterator[Any]:
        message = await first_message(read)
        while message is not None:
            yield _readable(message)
            del message
            message = await later_message(read)

    return messages()


async def _read(context: Context) -> Any:
    message = await context.read()
    return None if message is grpc.aio.EOF else message


def _readable(request: Any) -> Any:
    """A message. Raises InvalidArgumentError where it cannot be read."""
    if isinstance(request, _Unreadable):
        raise request.error()
    return request
