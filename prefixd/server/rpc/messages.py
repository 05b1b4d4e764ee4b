"""A message that cannot be read is its sender's mistake: INVALID_ARGUMENT.

Left to itself gRPC answers UNKNOWN and puts a traceback into the daemon's log for every one.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from prefixd.base.errors import InvalidArgumentError, PrefixdError
from prefixd.base.pacer import call_arrived
from prefixd.server.access.access_check import check_peer
from prefixd.server.rpc.receiving import first_message, later_message, set_message_bytes, stream
from prefixd.server.rpc.rpc import Context, abort

LARGE_BYTES = 1 << 16
"""Messages up to here are not looked at: whatever is in them is parsed in a millisecond or two."""
FIELDS = 1 << 14
"""Fields, at all depths: some milliseconds to count. A namespace of 1,024 parts with rules has half of them."""
PACKED_BYTES = 1 << 16
"""Bytes of a list of numbers."""
TEXT_BYTES = 4 << 20
"""Bytes of a text: a prompt of a million tokens."""
BYTES = 8 << 20
"""Of a field of bytes: token ids of a prompt of two million tokens, an image."""
DATA_BYTES = 1 << 20
"""Of a piece of a stream."""
UNKNOWN_BYTES = 1 << 16
"""Of all fields that this version does not know."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SKIPPED = {_FIXED64: 8, _FIXED32: 4}

_Shape = dict[int, Descriptor | int]
"""By number, the fields that are messages (their kinds); the most bytes of each of the others."""


def check_fields(raw: bytes, kind: Descriptor) -> None:
    """Raises InvalidArgumentError for a message of this kind that has too many fields, or too much in one of them.

    15 MiB of empty fields take half a second to parse, on the event loop, and some hundred MiB of memory; 15 MiB of
    text or bytes 30 milliseconds. What is long in an honest message is bytes, and of these together only images are
    very long.

    Several fields of one kind and number count together, at all depths: what is parsed at last is one list of them.
    One that is torn or malformed is left to the parser.
    """
    if len(raw) > LARGE_BYTES:
        with suppress(IndexError):  # it is torn
            _Count(len(raw)).count(raw, 0, len(raw), kind)


class _Count:
    """What has been found of one message of so many bytes."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._left = FIELDS
        self._unknown = 0
        self._bytes: dict[tuple[str, int], int] = {}

    def count(self, raw: bytes, at: int, end: int, kind: Descriptor) -> None:
        """Counts the fields of a message of this kind. Raises IndexError where it is torn or malformed."""
        shape = _shape(kind)
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise InvalidArgumentError(
                    f"the {kind.name} of {self._nbytes} bytes has more than {FIELDS} fields; send fewer, in several "
                    "calls"
                )
            tag = raw[at]
            at += 1
            if tag > 127:
                tag, at = _varint(raw, at - 1)
            wire = tag & 7
            if wire == _VARINT:
                if raw[at] > 127:
                    _, at = _varint(raw, at)
                else:
                    at += 1
            elif wire == _BYTES:
                length = raw[at]
                at += 1
                if length > 127:
                    length, at = _varint(raw, at - 1)
                inner = shape.get(tag >> 3)
                if isinstance(inner, Descriptor):
                    self.count(raw, at, min(at + length, end), inner)
                elif inner is None:
                    self._add_unknown(kind, length)
                elif length <= end - at:
                    self._add(kind, tag >> 3, length, inner)
                at += length
            else:
                at += _SKIPPED.get(wire, 0)

    def _add_unknown(self, kind: Descriptor, nbytes: int) -> None:
        self._unknown += nbytes
        if self._unknown > UNKNOWN_BYTES:
            raise InvalidArgumentError(
                f"the {kind.name} of {self._nbytes} bytes has more than {UNKNOWN_BYTES} in fields that this version "
                "does not know; leave them out"
            )

    def _add(self, kind: Descriptor, number: int, nbytes: int, most: int) -> None:
        total = self._bytes[kind.full_name, number] = self._bytes.get((kind.full_name, number), 0) + nbytes
        field = kind.fields_by_number[number]
        if total > most and not (field.type == FieldDescriptor.TYPE_BYTES and field.is_repeated and nbytes <= most):
            raise InvalidArgumentError(f"{kind.name}.{field.name} has {total} bytes; send at most {most}")


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place behind it. Raises IndexError for one that is too long to be any."""
    value = shift = 0
    while shift < 70:
        byte = raw[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
    raise IndexError


_shapes: dict[str, _Shape] = {}


def _shape(kind: Descriptor) -> _Shape:
    """What to look at in a message of this kind."""
    known = _shapes.get(kind.full_name)
    if known is None:
        known = _shapes[kind.full_name] = {}
        for field in kind.fields:
            if field.message_type is not None:
                known[field.number] = field.message_type
            elif field.type == FieldDescriptor.TYPE_STRING:
                known[field.number] = TEXT_BYTES
            elif field.type == FieldDescriptor.TYPE_BYTES:
                known[field.number] = DATA_BYTES if field.name == "data" else BYTES
            else:
                known[field.number] = PACKED_BYTES
    return known


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
