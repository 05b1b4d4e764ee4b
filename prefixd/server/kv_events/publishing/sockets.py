"""ZMQ sockets on the event loop, read when a message is there; no call here waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from prefixd.base.errors import ConfigError

Socket = zmq.Socket[bytes]


def open_socket(socket: Socket, name: str, endpoint: str, *, connect: bool = False) -> None:
    """Binds or connects `socket`.

    Raises:
        ConfigError: the endpoint, which the setting `name` gives, cannot be used.
    """
    try:
        if connect:
            socket.connect(endpoint)
        else:
            socket.bind(endpoint)
    except zmq.ZMQError as error:
        action = "connected to" if connect else "listened at"
        raise ConfigError(
            f"{name} = {endpoint} cannot be {action} ({error.strerror}); choose another, or end the process that "
            "uses it"
        ) from error


def receive(socket: Socket) -> list[bytes] | None:
    """Returns the frames of the next message, or None if none has arrived."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def on_readable(socket: Socket, read: Callable[[], None]) -> Callable[[], None]:
    """Calls `read` whenever messages may have arrived; returns a function that ends this.

    `read` must receive all messages that are there. The caller must also call `read` after each send: ZMQ may use up
    the descriptor's signal while it sends.
    """
    loop = asyncio.get_running_loop()
    descriptor = int(socket.getsockopt(zmq.FD))
    loop.add_reader(descriptor, read)
    first = loop.call_soon(read)  # the descriptor signals only messages that arrive from now on

    def stop() -> None:
        first.cancel()
        loop.remove_reader(descriptor)

    return stop
