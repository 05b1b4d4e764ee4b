"""A message that cannot be read is its sender's mistake: INVALID_ARGUMENT.

Left to itself gRPC answers UNKNOWN and puts a traceback into the daemon's log for every one.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from prefixd.errors import InvalidArgumentError
from prefixd.pacer import call_arrived
from prefixd.server.access_check import check_certificate
from prefixd.server.receiving import message_received
from prefixd.server.rpc import Context, abort
from prefixd.server.wire import check_fields

_message_bytes: ContextVar[int] = ContextVar("message_bytes")


def message_bytes() -> int:
    """Bytes of the last message of the call that is being handled."""
    return _message_bytes.get(0)


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
        answered = {name: _answering(handler) for name, handler in handlers.items()}
        for server in self._servers:
            server.add_registered_method_handlers(service_name, answered)


@dataclass(frozen=True, slots=True)
class _Unreadable:
    reason: str

    def error(self) -> InvalidArgumentError:
        return InvalidArgumentError(f"the message cannot be read ({self.reason}); send what proto/prefixd/v1 describes")


def _answering(handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    """`handler` for requests that may be `_Unreadable`."""
    parse = handler.request_deserializer
    if parse is None:
        return handler

    descriptor = getattr(getattr(parse, "__self__", None), "DESCRIPTOR", None)  # generated: `FromString` of a class

    def read(message: bytes) -> Any:
        call_arrived()
        message_received(len(message))
        _message_bytes.set(len(message))
        try:
            if descriptor is not None:
                check_fields(message, descriptor)
            return parse(message)
        except InvalidArgumentError as error:
            return _Unreadable(str(error))
        except DecodeError as error:
            return _Unreadable(str(error))

    kind = "stream" if handler.request_streaming else "unary"
    kind += "_stream" if handler.response_streaming else "_unary"
    behaviour = getattr(handler, kind)
    around = _around_generator if inspect.isasyncgenfunction(behaviour) else _around_coroutine
    make: Callable[..., grpc.RpcMethodHandler[Any, Any]] = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(around(behaviour), request_deserializer=read, response_serializer=handler.response_serializer)


def _around_coroutine(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    async def handle(request: Any, context: Context) -> Any:
        try:
            await check_certificate(context)
            return await behaviour(_readable(request), context)
        except InvalidArgumentError as error:
            await abort(context, error)

    return handle


def _around_generator(behaviour: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., Any]:
    async def handle(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        try:
            await check_certificate(context)
            async with aclosing(behaviour(_readable(request), context)) as responses:
                async for response in responses:
                    yield response
        except InvalidArgumentError as error:
            await abort(context, error)

    return handle


def _readable(request: Any) -> Any:
    """A request, or an iterator of requests that raises InvalidArgumentError at one that cannot be read."""
    if isinstance(request, _Unreadable):
        raise request.error()
    return _all_readable(request) if hasattr(request, "__aiter__") else request


async def _all_readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, _Unreadable):
            raise request.error()
        yield request
