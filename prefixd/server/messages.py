"""A message that cannot be read is its sender's mistake: INVALID_ARGUMENT.

Left to itself gRPC answers UNKNOWN and puts a traceback into the daemon's log for every one.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from prefixd.errors import InvalidArgumentError, PrefixdError
from prefixd.pacer import call_arrived
from prefixd.server.access_check import check_certificate
from prefixd.server.receiving import first_message, set_message_bytes
from prefixd.server.rpc import Context, abort
from prefixd.server.wire import check_fields


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
        set_message_bytes(len(message))
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
        around(behaviour, _all_messages if several else _only_message),
        request_deserializer=read,
        response_serializer=handler.response_serializer,
    )
    return served


_Behaviour = Callable[..., Any]
_Read = Callable[[AsyncIterator[Any]], Awaitable[Any]]


def _around_coroutine(behaviour: _Behaviour, messages: _Read) -> _Behaviour:
    async def handle(requests: AsyncIterator[Any], context: Context) -> Any:
        try:
            await check_certificate(context)
            return await behaviour(await messages(requests), context)
        except PrefixdError as error:
            await abort(context, error)

    return handle


def _around_generator(behaviour: _Behaviour, messages: _Read) -> _Behaviour:
    async def handle(requests: AsyncIterator[Any], context: Context) -> AsyncGenerator[Any, None]:
        try:
            await check_certificate(context)
            async with aclosing(behaviour(await messages(requests), context)) as responses:
                async for response in responses:
                    yield response
        except PrefixdError as error:
            await abort(context, error)

    return handle


async def _only_message(requests: AsyncIterator[Any]) -> Any:
    request = await first_message(requests)
    if request is None:
        raise InvalidArgumentError("the call has no message; send one")
    return _readable(request)


async def _all_messages(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async def generate() -> AsyncIterator[Any]:
        first = await first_message(requests)
        if first is not None:
            yield _readable(first)
        async for request in requests:
            yield _readable(request)

    return generate()


def _readable(request: Any) -> Any:
    """A message. Raises InvalidArgumentError where it cannot be read."""
    if isinstance(request, _Unreadable):
        raise request.error()
    return request
