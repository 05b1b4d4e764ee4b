"""The last batches of KV events, once more for a subscriber that missed some.

A subscriber sends an empty frame and the number of the first batch that it wants (8 bytes, big-endian). It gets what is
kept from there on, each batch as (empty frame, topic, number, payload), and at the end the number -1 with no payload.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

import zmq

from prefixd.base.pacer import give_way
from prefixd.server.kv_events.event_messages import END_OF_REPLAY
from prefixd.server.kv_events.sockets import Socket, on_readable, open_socket, receive
from prefixd.settings import EventSettings

log = logging.getLogger(__name__)

_WAITING = 64  # who asked and has to wait for others
_BURST = 16  # messages before others on the event loop get their turn
_PAUSE_S = 0.01
_PATIENCE_S = 10.0  # with one that asked and does not read


class Replay:
    """Keeps batches and serves who asks for them, one after the other.

    Args:
        context: makes the socket.
        endpoint: where it listens.
        settings: how much is kept.
    """

    def __init__(self, context: zmq.Context[Socket], endpoint: str, settings: EventSettings) -> None:
        self._settings = settings
        self._next = 0  # number of the next batch
        self._kept: deque[tuple[bytes, bytes]] = deque()  # topic and payload of the ones before it
        self._kept_bytes = 0
        self._asked: deque[tuple[bytes, int]] = deque()  # who, from which batch on
        self._serving: asyncio.Task[None] | None = None
        self._socket: Socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else what a full queue has no room for is gone unnoticed
        open_socket(self._socket, "events.replay_endpoint", endpoint)
        self._end = on_readable(self._socket, self._take_requests)

    def keep(self, topic: bytes, payload: bytes) -> None:
        """Takes the next batch, and lets go of the oldest ones above the limits."""
        self._next += 1
        self._kept.append((topic, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._settings.buffer_batches or self._kept_bytes > self._settings.buffer_bytes:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def close(self) -> None:
        """Serves nobody any more; the socket is closed by its context."""
        if self._serving is not None:
            self._serving.cancel()
        self._end()

    def _take_requests(self) -> None:
        while (request := receive(self._socket)) is not None:
            if len(request) != 3 or len(request[2]) != 8 or len(self._asked) >= _WAITING:
                log.warning("a replay of the KV events was asked for in a wrong way, or by too many; there is none")
                continue
            self._asked.append((request[0], int.from_bytes(request[2], "big")))
            if self._serving is None or self._serving.done():
                self._serving = asyncio.create_task(self._serve(), name="kv-event-replay")

    async def _serve(self) -> None:
        while self._asked:
            peer, start = self._asked.popleft()
            try:
                await self._replay(peer, start)
            except TimeoutError:
                log.warning("a replay of the KV events ended early: who asked for it does not read")
            except zmq.ZMQError as error:  # EHOSTUNREACH most of all: it has gone
                log.info("a replay of the KV events ended early: %s", error.strerror)

    async def _replay(self, peer: bytes, number: int) -> None:
        while number < self._next:
            first = self._next - len(self._kept)
            number = max(number, first)  # what was before is kept no more
            if number == self._next:
                break
            topic, payload = self._kept[number - first]
            await self._send((peer, b"", topic, number.to_bytes(8, "big"), payload))
            number += 1
            if number % _BURST == 0:
                await give_way()
        await self._send((peer, b"", b"", END_OF_REPLAY, b""))

    async def _send(self, frames: Sequence[bytes]) -> None:
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                if time.monotonic() > deadline_s:
                    raise TimeoutError from None
                await asyncio.sleep(_PAUSE_S)
            else:
                self._take_requests()
                return
