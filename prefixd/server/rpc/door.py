"""The door: every call passes it before its method, and this file calls every check.

    1. the caller: by a local credential, a token, a certificate, or none of them (`Identities`)
    2. whether the caller's role is enough, and whether its tenant may have one more call (`CallLimits`)
    3. its message, when its turn has come (`CallersCall`), in a size that can be parsed (`check_fields`)
    4. the method (`unary`, `granting`, `streaming`); an error becomes the call's status (`abort`)

Nothing of a call is read before step 3. A message that cannot be parsed is its sender's mistake and gets
INVALID_ARGUMENT; gRPC itself would answer UNKNOWN and log a traceback for each.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, nullcontext
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError

from prefixd.base.errors import ExhaustedError, InvalidArgumentError, PrefixdError
from prefixd.base.tenancy.tenants import Role
from prefixd.server.access.audit import AuditLog
from prefixd.server.access.identities import Caller, Identities, UnknownCallerError
from prefixd.server.rpc.anonymous import AnonymousCall
from prefixd.server.rpc.call_limits import OPEN_SERVICES, CallLimits
from prefixd.server.rpc.message_size import LARGE_BYTES, check_fields
from prefixd.server.rpc.receiving import CURRENT_CALL, Call, first_message, later_message
from prefixd.server.rpc.request_headers import read_headers
from prefixd.server.rpc.status import Context, abort

log = logging.getLogger(__name__)

_ADMIN_SERVICES = ("/prefixd.v1.Admin/",)
_MOST_BYTES = {
    "grpc.health.v1.Health": 1 << 10,
    "grpc.reflection.v1alpha.ServerReflection": 1 << 16,
    "prefixd.v1.PrefixCache/OpenSession": 1 << 16,
    "prefixd.v1.PrefixCache/WatchBlocks": 1 << 10,
}
"""Most bytes of a message, by service or method: of services that are open to every caller, and of calls that last.
Other messages may have 16 MiB."""

_METHOD_CHARACTERS = 100  # of a method's name in the audit log
_CERTIFICATE_NAMES = ("x509_common_name", "x509_subject_alternative_name")

Request = TypeVar("Request")
Response = TypeVar("Response")
Metadata = Sequence[tuple[str, str | bytes]]
Handler = Any  # grpc.RpcMethodHandler, which is generic to the type checker alone

_working: set[asyncio.Task[Any]] = set()


class ServiceTable:
    """Adds services to several gRPC servers, behind the door of each; generated code takes it for a server."""

    def __init__(self, servers: Sequence[tuple[grpc.aio.Server, Door]]) -> None:
        self._servers = servers
        for server, door in servers:
            server.add_generic_rpc_handlers((_UnknownMethods(door),))

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Ignored: generated code also adds these methods as registered ones, which take precedence."""

    def add_registered_method_handlers(self, service_name: str, handlers: Mapping[str, Handler]) -> None:
        """Adds the methods of a service to every server."""
        for server, door in self._servers:
            behind = {name: door.behind(f"/{service_name}/{name}", handler) for name, handler in handlers.items()}
            server.add_registered_method_handlers(service_name, behind)


class Door:
    """Lets a call through to its method if the caller is known and has the role that the service needs.

    Health is open to everyone, also to anonymous callers (`AnonymousCalls`); Admin needs the role admin; everything
    else the role client or admin.

    Args:
        identities: tells callers' tenants and roles.
        limits: the limits of all doors together.
        audit: logs callers that are let in or refused.
        name: `unix` or `tcp`.
    """

    def __init__(self, identities: Identities, limits: CallLimits, audit: AuditLog, name: str) -> None:
        self._identities = identities
        self._limits = limits
        self._audit = audit
        self._name = name

    def behind(self, method: str, handler: Handler) -> Handler:
        """Returns the handler of a method with the door in front of it."""
        several, streams = handler.request_streaming, handler.response_streaming
        kind = f"{'stream' if several else 'unary'}_{'stream' if streams else 'unary'}"
        behaviour: Callable[[Any, Context], Any] = getattr(handler, kind)
        parse = _parser(method, handler)
        served: Callable[[object, Context], Any]
        if inspect.isasyncgenfunction(behaviour):

            async def served(_: object, context: Context) -> AsyncGenerator[Any, None]:
                try:
                    call = await self.admit(method, context)
                    async with call.stream() if several else nullcontext():
                        # No variable holds the message here: it would keep the memory while a refusal waits.
                        responses = behaviour(
                            _all_messages(call, context, parse)
                            if several
                            else parse(await first_message(call, context.read)),
                            context,
                        )
                        async with aclosing(responses):
                            async for response in responses:
                                yield response
                except PrefixdError as error:
                    await abort(context, error)

        elif several:

            async def served(_: object, context: Context) -> Any:
                try:
                    call = await self.admit(method, context)
                    async with call.stream():
                        return await behaviour(_all_messages(call, context, parse), context)
                except PrefixdError as error:
                    await abort(context, error)

        else:

            async def served(_: object, context: Context) -> Any:
                try:
                    call = await self.admit(method, context)
                    return await behaviour(parse(await first_message(call, context.read)), context)
                except PrefixdError as error:
                    await abort(context, error)

        # We read the message of a unary call, too: gRPC would wait for it without a time limit. gRPC's own iterator of
        # requests is never started: it keeps the last message until the garbage collector runs.
        make = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
        made: Handler = make(served, response_serializer=handler.response_serializer)
        return made

    async def admit(self, method: str, context: Context) -> Call:
        """Lets a call in and sets `CURRENT_CALL` to it, or ends it with a refusal."""
        open_to_all = method.startswith(OPEN_SERVICES)
        metadata = context.invocation_metadata() or ()  # gRPC makes it anew each time
        try:
            caller = self._identify_caller(context, metadata)
        except UnknownCallerError as error:
            if not open_to_all:
                await self._refuse_unknown(method, str(error), context)
            return self._admit_anonymous(context)
        needed = Role.ADMIN if method.startswith(_ADMIN_SERVICES) else Role.CLIENT
        if caller.role is not Role.ADMIN and caller.role is not needed and not open_to_all:
            await self._tell_refused(caller, method, f"the role {needed} is needed")
            service = "Admin" if needed is Role.ADMIN else "this service"
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{service} needs the role {needed}, and {caller.name} has the role {caller.role}; use a token or a "
                "certificate with that role, or be the daemon's user or one of server.admin_uids at its unix socket",
            )
        task = asyncio.current_task()
        assert task is not None
        try:
            call = self._limits.begin(method, caller, task)
        except ExhaustedError as error:
            await self._tell_refused(caller, method, str(error))
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        call.headers = read_headers(metadata)
        CURRENT_CALL.set(call)
        if self._audit.enabled:
            self._audit.log_let_in(caller)
        return call

    def _identify_caller(self, context: Context, metadata: Metadata) -> Caller:
        """Returns the caller. Raises UnknownCallerError."""
        given = [_text(value) for name, value in metadata if name == "authorization"]
        if len(given) > 1:
            raise UnknownCallerError("the token is not known here: several were sent")
        if self._name == "unix":
            return self._identities.of_local(given[0] if given else "")
        if given:
            return self._identities.of_token(given[0])
        presented: Mapping[str, Sequence[bytes]] = context.auth_context()
        names = [_text(value) for field in _CERTIFICATE_NAMES for value in presented.get(field, ())]
        return self._identities.of_certificate(names, _host(context))

    def _admit_anonymous(self, context: Context) -> Call:
        """Raises ExhaustedError."""
        anonymous, host, task = self._limits.anonymous, _host(context), asyncio.current_task()
        assert task is not None
        call = AnonymousCall(anonymous, host, functools.partial(self._limits.refusals.turn, None))
        CURRENT_CALL.set(call)
        anonymous.begin(host, task)
        return call

    async def _tell_refused(self, caller: Caller, method: str, why: str) -> None:
        """Waits until a caller may be told of a refusal, and logs it."""
        if await self._limits.refusals.turn(caller.tenant):
            self._audit.log_refused(caller, method[:_METHOD_CHARACTERS], why)

    async def _refuse_unknown(self, method: str, why: str, context: Context) -> NoReturn:
        """Ends the call of an unknown caller, and logs its address."""
        if await self._limits.refusals.turn(None):
            peer = context.peer() if self._name == "tcp" else ""
            name = method[:_METHOD_CHARACTERS]
            self._audit.log_refused(None, name, why, door=self._name, peer=peer)
            log.info("refused %s%s: %s", name, f" from {peer}" if peer else "", why)
        remedy = (
            "; send `authorization: Bearer TOKEN`, with a token from the daemon's server.tokens "
            "(the prefixd command: --token-file, PREFIXD_TOKEN)"
        )
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{why}{remedy if self._name == 'tcp' else ''}")
        raise AssertionError("abort does not return")


class _UnknownMethods(grpc.GenericRpcHandler):
    """Refuses methods that no service has, after the same checks as any other call."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler:
        method = _text(handler_call_details.method)

        async def refuse(_: object, context: Context) -> None:
            try:
                await self._door.admit(method, context)
            except PrefixdError as error:
                await abort(context, error)
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

        made: Handler = grpc.stream_stream_rpc_method_handler(refuse)  # type: ignore[arg-type, unused-ignore]
        return made


# -- methods -------------------------------------------------------------------------------------------------------


def unary(
    method: Callable[[Any, Request], Coroutine[Any, Any, Response]],
) -> Callable[[Any, Request, Context], Awaitable[Response]]:
    """Turns `async def f(self, request) -> response` into a handler.

    The work runs as a task of its own: a caller that hangs up must not leave a copy writing into slots that have been
    released.
    """
    return granting(lambda self, request, response: None)(method)


def granting(
    take_back: Callable[[Any, Any, Any], None],
) -> Callable[
    [Callable[[Any, Request], Coroutine[Any, Any, Response]]], Callable[[Any, Request, Context], Awaitable[Response]]
]:
    """Like `unary`, for a method that grants the caller something, such as a lease.

    When the caller has hung up (cancelled, out of time) before the response could be sent, `take_back(self, request,
    response)` is called with the response: the caller will never learn of the grant.
    """

    def decorate(
        method: Callable[[Any, Request], Coroutine[Any, Any, Response]],
    ) -> Callable[[Any, Request, Context], Awaitable[Response]]:
        @functools.wraps(method)
        async def handler(self: Any, request: Request, context: Context) -> Response:
            try:
                return await deliver(method(self, request), lambda response: take_back(self, request, response))
            except Exception as error:
                del request  # its memory is freed before the refusal, which may wait
                await abort(context, error)

        return handler

    return decorate


def streaming(
    method: Callable[[Any, Any], AsyncGenerator[Response, None]],
) -> Callable[[Any, Any, Context], AsyncGenerator[Response, None]]:
    """Turns `async def f(self, request) -> AsyncGenerator[response]` into a handler. The work ends with the call."""

    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: Context) -> AsyncGenerator[Response, None]:
        try:
            async with aclosing(method(self, request)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            del request  # a refusal may wait
            await abort(context, error)

    return handler


async def deliver(work: Coroutine[Any, Any, Response], take_back: Callable[[Response], None]) -> Response:
    """Returns the result of `work` to a handler; `take_back` gets the result if the caller has hung up by then."""
    task = outlive(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: _take_back_result(done, take_back))
        raise
    finally:
        del task  # its error refers to this frame, which would keep the request until the garbage collector runs


def outlive(work: Coroutine[Any, Any, Response]) -> asyncio.Task[Response]:
    """Starts work that goes on when its caller has hung up; `finish_work` waits for it."""
    task = asyncio.ensure_future(work)
    _working.add(task)
    task.add_done_callback(_forget_work)
    return task


async def finish_work() -> None:
    """Waits for the work of calls that their callers have left."""
    while _working:
        await asyncio.gather(*_working, return_exceptions=True)


def _take_back_result(task: asyncio.Task[Response], take_back: Callable[[Response], None]) -> None:
    if not task.cancelled() and task.exception() is None:
        take_back(task.result())


def _forget_work(task: asyncio.Task[Any]) -> None:
    _working.discard(task)
    if not task.cancelled():
        task.exception()  # the caller has got it or has hung up


# -- messages ------------------------------------------------------------------------------------------------------


def _parser(method: str, handler: Handler) -> Callable[[bytes | None], Any]:
    """Returns the parser of a method's messages. It raises InvalidArgumentError if there is no message, or if it cannot
    read the message."""
    parse: Callable[[bytes], Any] = handler.request_deserializer or bytes
    descriptor = getattr(getattr(parse, "__self__", None), "DESCRIPTOR", None)  # generated: `FromString` of a class
    most_bytes = _MOST_BYTES.get(method[1:], _MOST_BYTES.get(method[1:].partition("/")[0]))

    def read(message: bytes | None) -> Any:
        if message is None:
            raise InvalidArgumentError("the call has no message; send one")
        try:
            if most_bytes is not None and len(message) > most_bytes:
                raise InvalidArgumentError(f"it has {len(message)} bytes, of {most_bytes} at most")
            if descriptor is not None and len(message) > LARGE_BYTES:
                check_fields(message, descriptor)
            return parse(message)
        except (InvalidArgumentError, DecodeError) as error:
            raise InvalidArgumentError(
                f"the message cannot be read ({error}); send what proto/prefixd/v1 describes"
            ) from None

    return read


async def _all_messages(call: Call, context: Context, parse: Callable[[bytes | None], Any]) -> AsyncGenerator[Any]:
    message: Any = await first_message(call, context.read)
    while message is not None:
        message = parse(message)  # the bytes are not kept beside it
        yield message
        del message
        message = await later_message(call, context.read)


def _host(context: Context) -> str:
    """Returns the address that a call comes from: `ipv4:127.0.0.1`, or `unix:` and a path."""
    peer: str = context.peer()
    return peer if peer.startswith("unix:") else peer.rpartition(":")[0]


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("ascii", "replace")
