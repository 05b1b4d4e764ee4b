"""The gRPC channel: addresses, time limits, and failures turned into client errors."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import grpc

from prefixd.base.clocks import elapsed_s
from prefixd.base.setting_sources import default_socket
from prefixd.client.connecting.credentials import Credentials, Ticket
from prefixd.client.connecting.default_socket import check_default_socket
from prefixd.client.connecting.forks import forked_from
from prefixd.client.connecting.trace_headers import trace_headers
from prefixd.client.errors import (
    CallTimeout,
    ClientClosed,
    ClientError,
    InvalidArgumentError,
    ServerUnavailable,
    from_rpc_error,
)
from prefixd.v1.admin_pb2_grpc import AdminStub
from prefixd.v1.cache_pb2_grpc import PrefixCacheStub
from prefixd.v1.inference_pb2_grpc import InferenceStub

T = TypeVar("T")

_AGREED = "prefixd-agreed"
_LOST_REASONS = ("Internal error from Core", "Locally cancelled by application!")
"""Texts of gRPC's asyncio client in place of a status that arrived while it was sending."""
_MAX_BACKOFF_S = 1.0
_LATE_S = 60.0  # time for the answer to a call for a grant after its caller has given up
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # The default window of 64 KiB makes a long answer wait for a round trip every 64 KiB.
    ("grpc.http2.lookahead_bytes", 8 << 20),
    ("grpc.http2.max_frame_size", 1 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name, this is the time limit of one attempt: a daemon that is loading a model answers late.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", int(_MAX_BACKOFF_S * 1000)),
    # Otherwise channels of one process share connections and backoff.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]
_HOST = re.compile(r"[^\[\]:/\s]+|\[[^\[\]/\s]+\]")  # gpu-1, 10.0.0.7, [::1]


def default_address() -> str:
    """The address of a daemon with default settings; `PREFIXD_SERVER__SOCKET` changes it for daemon and clients."""
    configured = os.environ.get("PREFIXD_SERVER__SOCKET")
    if configured:
        return f"unix:{Path(configured).expanduser()}"
    return f"unix:{default_socket()}"


def parse_address(address: str | None) -> str:
    """`unix:/path`, a bare `/path`, `host:port` or None (the default socket) as a gRPC target.

    Raises `InvalidArgumentError` for anything else.
    """
    if address is None:
        return default_address()
    try:
        address.encode()
    except UnicodeEncodeError as error:  # Python decodes bytes of a path that are not UTF-8 into surrogates
        raise InvalidArgumentError(
            f"{address!r} is no address: gRPC takes a socket's path in UTF-8 alone; start Python with PYTHONUTF8=1, or "
            "choose a path in ASCII"
        ) from error
    if address.startswith("/"):
        return f"unix:{address}"
    if address.startswith("unix:") and address != "unix:":
        return address
    host, colon, port = address.rpartition(":")
    if not colon or _HOST.fullmatch(host) is None or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidArgumentError(f"{address!r} is no address: give unix:/path/to.sock or host:port")
    return address


class Connection:
    """One channel with the three services. It reconnects by itself and turns failures into `ClientError`."""

    def __init__(self, address: str | None, timeout_s: float, credentials: Credentials = Credentials()) -> None:  # noqa: B008
        self.address = parse_address(address)
        self.timeout_s = timeout_s
        self._late: set[asyncio.Task[None]] = set()
        self._closed = False
        self._pid = os.getpid()
        self.tickets_refused = 0
        """Refused tickets that were replaced: the number of times that a daemon with another key replaced the last."""
        self._default = default_socket() if self.address == f"unix:{default_socket()}" else None
        self._channel = credentials.channel(self.address, _OPTIONS)
        local = self.address.startswith("unix:")
        self._ticket = Ticket(self.address.removeprefix("unix:"), elapsed_s) if local else None
        base: Any = _ChannelWithMetadata(self._channel, self._ticket or credentials)
        self.cache: Any = PrefixCacheStub(base)
        self.inference: Any = InferenceStub(base)
        self.admin: Any = AdminStub(base)

    async def call(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        """Sends one request; returns the answer."""
        return await self._run_call(
            lambda: method(request, timeout=self.timeout_s if timeout_s is None else timeout_s), _result
        )

    async def upload(self, method: Any, first: Any, rest: Iterable[Any]) -> Any:
        """Sends a stream: `first` and, once the daemon has agreed to it, `rest`; returns the answer.

        A status that arrives while we send is lost: gRPC's asyncio client reports an internal error instead. A daemon
        that has agreed fails the call only if the session or the daemon ends: then `ServerUnavailable` is raised.
        """

        def begin() -> Any:
            async def messages() -> AsyncGenerator[Any, None]:
                yield first
                if not any(name == _AGREED for name, _ in await call.initial_metadata()):
                    await call.code()
                    return
                for message in rest:
                    yield message

            call = method(messages(), timeout=self.timeout_s)
            return call

        async def finish(call: Any) -> Any:
            try:
                return await call
            except grpc.aio.AioRpcError as error:
                if error.details() in _LOST_REASONS:
                    raise ServerUnavailable(
                        f"the daemon at {self.address} ended the call while it was sent bytes; ask again"
                    ) from error
                raise

        return await self._run_call(begin, finish)

    async def call_for_grant(
        self, method: Any, request: Any, give_back: Callable[[Any], Awaitable[None]], more_s: float = 0.0
    ) -> Any:
        """As `call`, for an answer that grants a lease, a reservation or a claim, `more_s` later than others may.

        If the caller is cancelled or out of time, the call goes on, and `give_back` is called with its answer. Without
        that the grant would last until it expires.
        """
        limit_s = self.timeout_s + more_s
        call = asyncio.ensure_future(self.call(method, request, limit_s + _LATE_S))
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(call)
        except (TimeoutError, asyncio.CancelledError) as error:
            late = asyncio.create_task(_give_back_late(call, give_back))
            self._late.add(late)
            late.add_done_callback(self._late.discard)
            if isinstance(error, TimeoutError):
                raise CallTimeout(f"no answer from the daemon at {self.address} within {limit_s:g} s") from error
            raise

    async def stream(self, method: Any, request: Any, timeout_s: float | None = None) -> AsyncGenerator[Any, None]:
        """Sends one request; yields the messages of the answer. Closing the iterator cancels the call."""
        call, message = await self.begin(method, request, timeout_s)
        try:
            while message is not grpc.aio.EOF:
                yield message
                message = await call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self.address) from error
        finally:
            call.cancel()

    async def begin(self, method: Any, request: Any, timeout_s: float | None = None) -> tuple[Any, Any]:
        """Sends one request; returns the call, which answers with a stream, and its first message or `grpc.aio.EOF`."""

        async def first(call: Any) -> tuple[Any, Any]:
            try:
                return call, await call.read()
            except BaseException:
                call.cancel()
                raise

        return await self._run_call(lambda: method(request, timeout=timeout_s), first)

    async def _run_call(self, begin: Callable[[], Any], finish: Callable[[Any], Awaitable[T]]) -> T:
        """Starts a call with `begin`; returns the result of `finish`. All calls run through this method.

        A daemon refuses a ticket that was signed with another key: it has replaced the daemon that signed it. It has
        read nothing of the call then, so this method fetches another ticket and starts the call once more.
        """
        if os.getpid() != self._pid:
            raise forked_from(self._pid)
        for again in (True, False):
            await self._prepare_call()
            ticket = self._ticket
            sent = () if ticket is None else ticket.metadata
            try:
                return await finish(begin())
            except grpc.aio.AioRpcError as error:
                refused = error.code() is grpc.StatusCode.UNAUTHENTICATED
                if again and refused and ticket is not None and await ticket.replace(sent):
                    self.tickets_refused += 1
                    continue
                raise from_rpc_error(error, self.address) from error
        raise AssertionError("both attempts end by themselves")

    async def _prepare_call(self) -> None:
        """Checks the owner of the default socket, fetches a ticket if one is needed, and waits for the channel's next
        attempt after a failed connection.

        Without the wait, the first call after a daemon's restart would fail without an attempt, or with an attempt that
        began before the daemon was back. Raises `ClientClosed` if the connection is closed meanwhile.
        """
        if self._default is not None:
            check_default_socket(self._default)
        if (ticket := self._ticket) is not None and elapsed_s() >= ticket.fresh_until_s:
            await ticket.fetch()
        waiting = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.CONNECTING)
        state = self._channel.get_state(try_to_connect=True)
        with suppress(TimeoutError, grpc.aio.UsageError):  # UsageError: the channel was closed
            async with asyncio.timeout(_MAX_BACKOFF_S + 0.2):
                while state in waiting:
                    await self._channel.wait_for_state_change(state)
                    state = self._channel.get_state(try_to_connect=True)
        if self._closed:
            raise ClientClosed("the client was closed during the call")

    async def close(self) -> None:
        """Ends every call and the channel."""
        self._closed = True
        for late in self._late:
            late.cancel()
        await self._channel.close(None)


class _ChannelWithMetadata:
    """The part of a channel that stubs use; adds the metadata of `source` and the caller's span to each call."""

    def __init__(self, channel: grpc.aio.Channel, source: Ticket | Credentials) -> None:
        self._channel = channel
        self._source = source

    def __getattr__(self, kind: str) -> Any:
        make = getattr(self._channel, kind)  # unary_unary and the like

        def method(*arguments: Any, **options: Any) -> Any:
            call = make(*arguments, **options)
            return lambda request, **how: call(request, metadata=(*self._source.metadata, *trace_headers()), **how)

        return method


async def _result(call: Any) -> Any:
    return await call


async def _give_back_late(call: asyncio.Future[Any], give_back: Callable[[Any], Awaitable[None]]) -> None:
    with suppress(ClientError):  # nothing was granted, or the grant has ended with its session
        await give_back(await call)
