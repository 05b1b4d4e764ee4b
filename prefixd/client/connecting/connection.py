"""The gRPC channel: addresses, time limits, and failures turned into client errors."""

from __future__ import annotations

import asyncio
import os
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
"""gRPC's asyncio client says so where a status came while it sent."""
_MAX_BACKOFF_S = 1.0
_LATE_S = 60.0  # how long after its caller has given up a call for a grant may still be answered
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # The default window of 64 KiB makes a long answer wait for a round trip every 64 KiB.
    ("grpc.http2.lookahead_bytes", 8 << 20),
    ("grpc.http2.max_frame_size", 1 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name the time that one attempt may take: a daemon that is busy loading a model greets late.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", int(_MAX_BACKOFF_S * 1000)),
    # Channels of one process otherwise share connections and each other's backoff.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]


def default_address() -> str:
    """Where a daemon with default settings listens; `PREFIXD_SERVER__SOCKET` moves it for both sides."""
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
    except UnicodeEncodeError as error:  # Python decodes other bytes of a path into what no text has
        raise InvalidArgumentError(
            f"{address!r} is no address: gRPC takes a socket's path in UTF-8 alone; start Python with PYTHONUTF8=1, or "
            "choose a path in ASCII"
        ) from error
    if address.startswith("/"):
        return f"unix:{address}"
    if address.startswith("unix:") and address != "unix:":
        return address
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidArgumentError(f"{address!r} is no address: give unix:/path/to.sock or host:port")
    return address


class Connection:
    """One channel with the three services on it. It reconnects by itself; failures leave as `ClientError`."""

    def __init__(self, address: str | None, timeout_s: float, credentials: Credentials = Credentials()) -> None:  # noqa: B008
        self.address = parse_address(address)
        self.timeout_s = timeout_s
        self._late: set[asyncio.Task[None]] = set()
        self._closed = False
        self._pid = os.getpid()
        self.tickets_refused = 0
        """How often a daemon refused our ticket and gave another: as often as one with another key took its place."""
        self._default = default_socket() if self.address == f"unix:{default_socket()}" else None
        self._channel = credentials.channel(self.address, _OPTIONS)
        local = self.address.startswith("unix:")
        self._ticket = Ticket(self.address.removeprefix("unix:"), elapsed_s) if local else None
        base: Any = _ChannelWithMetadata(self._channel, credentials if self._ticket is None else self._ticket)
        self.cache: Any = PrefixCacheStub(base)
        self.inference: Any = InferenceStub(base)
        self.admin: Any = AdminStub(base)

    async def call(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        """One answer to one request."""
        return await self._admitted(
            lambda: method(request, timeout=self.timeout_s if timeout_s is None else timeout_s), _finish
        )

    async def upload(self, method: Any, first: Any, rest: Iterable[Any]) -> Any:
        """One answer to a stream: `first` and, when the daemon has agreed to it, `rest`.

        A refusal that comes while we send is lost: gRPC's asyncio client reports an internal error instead. After what
        the daemon has agreed to, it is the end of the session or of the daemon: `ServerUnavailable`.
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

        return await self._admitted(begin, finish)

    async def call_for_grant(self, method: Any, request: Any, give_back: Callable[[Any], Awaitable[None]]) -> Any:
        """As `call`, for an answer that grants something.

        For a caller that is cancelled or out of time the call goes on: what it is granted then, `give_back` gets.
        Otherwise nobody could ever end it.
        """
        call = asyncio.ensure_future(self.call(method, request, self.timeout_s + _LATE_S))
        try:
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.shield(call)
        except (TimeoutError, asyncio.CancelledError) as error:
            late = asyncio.create_task(_end_late(call, give_back))
            self._late.add(late)
            late.add_done_callback(self._late.discard)
            if isinstance(error, TimeoutError):
                raise CallTimeout(f"no answer from the daemon at {self.address} within {self.timeout_s:g} s") from error
            raise

    async def stream(self, method: Any, request: Any, timeout_s: float | None = None) -> AsyncGenerator[Any, None]:
        """The messages that answer one request; closing the iterator cancels the call."""
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
        """The call that answers one request with a stream, and its first message; `grpc.aio.EOF` for none."""

        async def first(call: Any) -> tuple[Any, Any]:
            try:
                return call, await call.read()
            except BaseException:
                call.cancel()
                raise

        return await self._admitted(lambda: method(request, timeout=timeout_s), first)

    async def _admitted(self, begin: Callable[[], Any], finish: Callable[[Any], Awaitable[T]]) -> T:
        """What `finish` makes of the call that `begin` starts. All calls go through here.

        A daemon that refuses the call's ticket has read nothing of the call. It has another key, for it took the place
        of the one that signed the ticket: another one is fetched, and the call begun once more.
        """
        if os.getpid() != self._pid:
            raise forked_from(self._pid)
        for again in (True, False):
            await self._wait_out_backoff()
            ticket = self._ticket
            shown = () if ticket is None else ticket.metadata
            try:
                return await finish(begin())
            except grpc.aio.AioRpcError as error:
                refused = error.code() is grpc.StatusCode.UNAUTHENTICATED
                if again and refused and ticket is not None and await ticket.replace(shown):
                    self.tickets_refused += 1
                    continue
                raise from_rpc_error(error, self.address) from error
        raise AssertionError("both attempts end by themselves")

    async def _wait_out_backoff(self) -> None:
        """Before a call: checks whose the default socket is, fetches a ticket where one is needed, and after a failed
        connection gives the channel its next attempt.

        Without this the first call after a daemon's restart would be refused by the channel without being
        tried, or share the fate of an attempt that began before the daemon was back. Raises `ClientClosed` where the
        connection is closed meanwhile.
        """
        if self._default is not None:
            check_default_socket(self._default)
        if (ticket := self._ticket) is not None and elapsed_s() >= ticket.fresh_until_s:
            await ticket.fetch()
        waiting = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.CONNECTING)
        state = self._channel.get_state(try_to_connect=True)
        with suppress(TimeoutError, grpc.aio.UsageError):  # the latter of a channel that is closed
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
    """The part of a channel that stubs use; each call carries the metadata that `shown` has by then."""

    def __init__(self, channel: grpc.aio.Channel, shown: Ticket | Credentials) -> None:
        self._channel = channel
        self._shown = shown

    def __getattr__(self, kind: str) -> Any:
        make = getattr(self._channel, kind)  # unary_unary and the like

        def method(*arguments: Any, **options: Any) -> Any:
            call = make(*arguments, **options)
            return lambda request, **how: call(request, metadata=self._shown.metadata, **how)

        return method


async def _finish(call: Any) -> Any:
    return await call


async def _end_late(call: asyncio.Future[Any], give_back: Callable[[Any], Awaitable[None]]) -> None:
    with suppress(ClientError):  # then nothing was granted, or it has ended with its session
        await give_back(await call)
