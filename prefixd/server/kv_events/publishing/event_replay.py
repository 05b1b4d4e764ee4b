"""Keeps the last batches of KV events and sends them again to a subscriber that missed some.

A subscriber sends an empty frame and the number of the first batch that it wants (8 bytes, big-endian). The daemon
sends the batches that it keeps from there on, each as (empty frame, topic, number, payload), and at the end the number
-1 without a payload.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

import zmq

from prefixd.base.long_work.pacer import give_way
from prefixd.server.kv_events.event_messages import END_OF_REPLAY
from prefixd.server.kv_events.publishing.sockets import Socket, on_readable, open_socket, receive
from prefixd.settings import EventSettings

log = logging.getLogger(__name__)

_WAITING = 64  # requests that wait; one more is refused
_BURST = 16  # messages after which other tasks of the event loop run
_PAUSE_S = 0.01
_SEND_S = 10.0  # a subscriber that reads nothing for this long gets no more of its replay


class Replay:
    """Keeps batches and answers requests for them, one request after the other.

    Args:
        context: makes the socket.
        endpoint: the address that the socket listens at.
        settings: `buffer_batches` and `buffer_bytes` limit what is kept.
    """

    def __init__(self, context: zmq.Context[Socket], endpoint: str, settings: EventSettings) -> None:
        self._settings = settings
        self._next = 0  # number of the next batch
        self._kept: deque[tuple[bytes, bytes]] = deque()  # topic and payload of the batches before it
        self._kept_bytes = 0
        self._requests: deque[tuple[bytes, int]] = deque()  # subscriber, first batch that it wants
        self._serving: asyncio.Task[None] | None = None
        self._socket: Socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else ZMQ drops a message for a full queue silently
        open_socket(self._socket, "events.replay_endpoint", endpoint)
        self._stop_reading = on_readable(self._socket, self._read_requests)

    def keep(self, topic: bytes, payload: bytes) -> None:
        """Keeps the next batch, and drops the oldest ones above the limits."""
        self._next += 1
        self._kept.append((topic, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._settings.buffer_batches or self._kept_bytes > self._settings.buffer_bytes:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def close(self) -> None:
        """Ends the replay under way and reads no more requests; the context closes the socket."""
        if self._serving is not None:
            self._serving.cancel()
        self._stop_reading()

    def _read_requests(self) -> None:
        while (request := receive(self._socket)) is not None:
            if len(request) != 3 or len(request[2]) != 8 or len(self._requests) >= _WAITING:
                log.warning(
                    "a request for a replay of the KV events is malformed, or %d wait already; it is ignored", _WAITING
                )
                continue
            self._requests.append((request[0], int.from_bytes(request[2], "big")))
            if self._serving is None or self._serving.done():
                self._serving = asyncio.create_task(self._serve(), name="kv-event-replay")

    async def _serve(self) -> None:
        while self._requests:
            peer, start = self._requests.popleft()
            try:
                await self._replay(peer, start)
            except TimeoutError:
                log.warning("a replay of the KV events ended early: its subscriber read nothing for %g s", _SEND_S)
            except zmq.ZMQError as error:  # most often EHOSTUNREACH: the subscriber has disconnected
                log.info("a replay of the KV events ended early: %s", error.strerror)

    async def _replay(self, peer: bytes, number: int) -> None:
        while number < self._next:
            first = self._next - len(self._kept)
            number = max(number, first)  # earlier batches are not kept any more
            if number == self._next:
                break
            topic, payload = self._kept[number - first]
            await self._send((peer, b"", topic, number.to_bytes(8, "big"), payload))
            number += 1
            if number % _BURST == 0:
                await give_way()
        await self._send((peer, b"", b"", END_OF_REPLAY, b""))

    async def _send(self, frames: Sequence[bytes]) -> None:
        deadline_s = time.monotonic() + _SEND_S
        while True:
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                if time.monotonic() > deadline_s:
                    raise TimeoutError from None
                await asyncio.sleep(_PAUSE_S)
            else:
                self._read_requests()
                return
