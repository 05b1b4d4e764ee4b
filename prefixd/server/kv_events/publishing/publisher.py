"""Sends batches of KV events to all subscribers.

No call here waits. ZMQ has a queue for each subscriber; a subscriber that falls behind by more than the queue holds
misses batches, notices it by the sequence numbers, and can ask for them again (`Replay`). Other subscribers miss none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from prefixd.server.kv_events.event_messages import Event, KVEventBatch
from prefixd.server.kv_events.publishing.event_replay import Replay
from prefixd.server.kv_events.publishing.sockets import Socket, on_readable, open_socket, receive
from prefixd.settings import EventSettings

log = logging.getLogger(__name__)

_DATA_PARALLEL_RANK = 0  # as an engine without data parallelism sends
_LINGER_MS = 200  # at the end, ZMQ has this long to send what is in its queues
_CLOSE_S = 2.0
_LOG_EVERY_S = 60.0


@dataclass(slots=True)
class EventCounters:
    """Counts since the start of the daemon."""

    events: int = 0
    batches: int = 0
    overruns: int = 0
    """Times that a full queue made a subscriber miss batches; counted once until it has caught up."""
    subscriptions: int = 0
    """Subscriptions that are in force now."""


class Publisher:
    """Publishes batches, numbered from 0 on across all topics. Used from the event loop only.

    Args:
        settings: the sockets; `endpoint` is set.
        subscribed: called when a subscriber has subscribed.
        clock: seconds since 1970.

    Raises:
        ConfigError: a socket cannot be opened.
    """

    def __init__(
        self, settings: EventSettings, subscribed: Callable[[], None], clock: Callable[[], float] = time.time
    ) -> None:
        self.counters = EventCounters()
        self._queue_batches = settings.queue_batches
        self._subscribed = subscribed
        self._clock = clock
        self._encoder = msgspec.msgpack.Encoder()
        self._next = 0
        self._overrun_s = -_LOG_EVERY_S
        self._context: zmq.Context[Socket] = zmq.Context()
        self._replay: Replay | None = None
        try:
            # XPUB is PUB that also reports subscriptions, and (NODROP) a queue that is full.
            self._socket: Socket = self._context.socket(zmq.XPUB)
            self._socket.setsockopt(zmq.SNDHWM, settings.queue_batches)
            self._socket.setsockopt(zmq.XPUB_VERBOSER, 1)
            self._socket.setsockopt(zmq.XPUB_NODROP, 1)
            open_socket(self._socket, "events.endpoint", str(settings.endpoint), connect=settings.connect)
            if settings.replay_endpoint is not None:
                self._replay = Replay(self._context, settings.replay_endpoint, settings)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._stop_reading = on_readable(self._socket, self._read_subscriptions)

    def publish(self, topic: bytes, events: Sequence[Event]) -> None:
        """Sends one batch. Never waits: a subscriber whose queue is full misses it."""
        payload = self._encoder.encode(KVEventBatch(self._clock(), list(events), _DATA_PARALLEL_RANK))
        frames = (topic, self._next.to_bytes(8, "big"), payload)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._note_overrun()
            self._socket.setsockopt(zmq.XPUB_NODROP, 0)
            self._socket.send_multipart(frames, zmq.NOBLOCK)
            self._socket.setsockopt(zmq.XPUB_NODROP, 1)
        if self._replay is not None:
            self._replay.keep(topic, payload)
        self._next += 1
        self.counters.batches += 1
        self.counters.events += len(events)
        self._read_subscriptions()

    def close(self) -> None:
        """Closes the sockets; ZMQ has 0.2 s to send what is queued.

        ZMQ's context has been seen to wait longer than its sockets' linger: after 2 s `close` returns without it.
        """
        self._stop_reading()
        if self._replay is not None:
            self._replay.close()
        ending = threading.Thread(
            target=self._context.destroy, kwargs={"linger": _LINGER_MS}, name="kv-events-end", daemon=True
        )
        ending.start()
        ending.join(_CLOSE_S)
        if ending.is_alive():
            log.warning("the sockets of the KV events are not closed after %g s; unsent batches are lost", _CLOSE_S)

    def _read_subscriptions(self) -> None:
        while (message := receive(self._socket)) is not None:
            kind = message[0][:1]
            if kind == b"\x01":
                self.counters.subscriptions += 1
                self._subscribed()
            elif kind == b"\x00":
                self.counters.subscriptions -= 1

    def _note_overrun(self) -> None:
        self.counters.overruns += 1
        now = time.monotonic()
        if now - self._overrun_s >= _LOG_EVERY_S:
            log.warning(
                "a subscriber of the KV events is more than %d batches behind and misses some; let it ask "
                "events.replay_endpoint for them, or raise events.queue_batches",
                self._queue_batches,
            )
        self._overrun_s = now
