"""One HTTP connection: uvicorn's protocol, with a time limit for everything that its peer may leave undone.

    accepted ----- head_s ------> request's head complete ----> answering ----> answered
    (TLS handshake included)            ^                                           |
                                        +---- keep_alive_s, then closed ------------+

While an answer is sent, bytes that the peer does not read within `send_s` end the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

_quiet = logging.getLogger(f"{__name__}.peers")
_quiet.setLevel(logging.CRITICAL)  # uvicorn warns of each request that is no HTTP; `RequestBounds` logs failures


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The limits of one port.

    Attributes:
        connections: the most open connections. If there are more, the oldest that waits for a request is closed, or
            else the oldest whose refusal waits.
        head_bytes: the most bytes of a request's head.
        head_s: seconds from the connection, TLS included, to the end of the first request's head.
        keep_alive_s: seconds that a connection may stay open without a request after an answer.
        send_s: seconds after which a peer that does not read its answer is cut off.
        body_bytes: the most bytes of a request's body.
        bodies_bytes: the most bytes of the bodies of all requests at once.
        body_s: seconds that a request's body may take to arrive, once the handler reads it.
    """

    connections: int = 32
    head_bytes: int = 16 << 10
    head_s: float = 5.0
    keep_alive_s: float = 75.0
    send_s: float = 10.0
    body_bytes: int = 1 << 20
    bodies_bytes: int = 16 << 20
    body_s: float = 30.0


class HttpConnection(H11Protocol):
    """One connection of a port.

    Args:
        config: uvicorn's, loaded.
        limits: the port's.
        on_end: called once, when the connection has ended.
    """

    def __init__(self, config: Config, limits: HttpLimits, on_end: Callable[[HttpConnection], None]) -> None:
        super().__init__(config, ServerState(), {})
        self.tasks: set[asyncio.Task[Any]] = set()
        """The tasks that answer this connection's requests."""
        self.connected = False
        """True once the TLS handshake is over, or at once if there is none."""
        self.logger = _quiet
        self.access_log = False
        self.conn = _Parser(h11.SERVER, limits.head_bytes)
        self._limits = limits
        self._on_end = on_end
        self._head: asyncio.TimerHandle | None = self.loop.call_later(limits.head_s, self.abort)
        self._send: asyncio.TimerHandle | None = None
        self._accepting: asyncio.Task[object] | None = None
        self.refusing = False
        """True while the answer of a request is a refusal that waits for its turn."""

    @property
    def answering(self) -> bool:
        """True from the end of a request's head to the end of its answer."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def accept(self, accepting: asyncio.Task[object]) -> None:
        """Notes the task that connects the socket, with the TLS handshake where the port has TLS."""
        self._accepting = accepting
        accepting.add_done_callback(self._accepted)

    def abort(self) -> None:
        """Closes the connection at once, and drops unsent data."""
        if self.connected:
            self.transport.abort()
        elif self._accepting is not None:
            self._accepting.cancel()

    # -- asyncio's protocol ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to read; tells requests which names the peer's certificate has."""
        super().connection_made(transport)
        self.connected = True
        # `pause_writing` is then called as soon as there is anything that the kernel does not take. A TLS transport
        # takes a mark of 0 for one that is always reached.
        transport.set_write_buffer_limits(high=1 if self.scheme == "https" else 0, low=0)
        names = _names(transport.get_extra_info("peercert"))
        self.app_state = {"certificate_names": names, "note_refusal": self._note_refusal}

    def connection_lost(self, error: Exception | None) -> None:
        """Cancels the answers and the time limits."""
        super().connection_lost(error)
        self._unset_keepalive_if_required()
        for task in self.tasks:
            task.cancel()
        self._end()

    def data_received(self, data: bytes) -> None:
        """Reads requests; bytes that follow an error are dropped."""
        if not self.transport.is_closing():
            super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answers a GET whose sender has closed its sending side. For others this end means that the peer left: work
        for it, which may take long, must end."""
        if not self.answering or self.scope["method"] not in ("GET", "HEAD"):
            return False
        self.cycle.keep_alive = False
        return self.scheme == "http"

    def pause_writing(self) -> None:
        """The peer does not read as fast as the answer is sent; it has `send_s` to catch up."""
        super().pause_writing()
        if self._send is None:
            self._send = self.loop.call_later(self._limits.send_s, self.abort)

    def resume_writing(self) -> None:
        """The kernel has taken everything."""
        super().resume_writing()
        if self._send is not None:
            self._send.cancel()
            self._send = None

    # -- uvicorn's protocol ---------------------------------------------------------------------------------------

    def handle_events(self) -> None:
        """Handles what has arrived; the time limit of the head ends with the head."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and self.answering:
            self._cancel_head()

    def on_response_complete(self) -> None:
        """Waits for the next request. The rest of a body that the handler did not read must arrive soon."""
        self._cancel_head()
        self.refusing = False
        idle = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        wait_s = self._limits.head_s + (self._limits.keep_alive_s if idle else 0.0)
        self._head = self.loop.call_later(wait_s, self.abort)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no HTTP, or has too large a head."""
        if self.conn.our_state is not h11.IDLE:  # in the middle of an answer
            self.transport.abort()
            return
        status = cast(_Parser, self.conn).hint
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        page = f"{STATUS_PHRASES[status].decode()}: {msg}\n".encode()
        events: list[Any] = [
            h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
            h11.Data(data=page),
            h11.EndOfMessage(),
        ]
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _accepted(self, accepting: asyncio.Task[object]) -> None:
        if accepting.cancelled() or accepting.exception() is not None:  # a handshake that failed, for instance
            self._end()

    def _note_refusal(self) -> None:
        self.refusing = True

    def _cancel_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _end(self) -> None:
        self._cancel_head()
        if self._send is not None:
            self._send.cancel()
        self._on_end(self)


class _Parser(h11.Connection):
    """h11's parser; remembers the status that fits the last error."""

    hint = 400

    def next_event(self) -> Any:
        try:
            return super().next_event()
        except h11.RemoteProtocolError as error:
            self.hint = error.error_status_hint
            raise


def _names(certificate: dict[str, Any] | None) -> tuple[str, ...]:
    """Returns the names in a verified certificate: the subject's common name and the alternative names."""
    if not certificate:
        return ()
    common = [value for part in certificate.get("subject", ()) for name, value in part if name == "commonName"]
    return (*common, *(str(value) for _, value in certificate.get("subjectAltName", ())))
