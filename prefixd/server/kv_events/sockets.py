"""ZMQ sockets on the event loop: opened, read when there is something, never waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from prefixd.base.errors import ConfigError

Socket = zmq.Socket[bytes]


def open_socket(socket: Socket, name: str, endpoint: str, *, connect: bool = False) -> None:
    """Binds or connects `socket`; ConfigError, about the setting `name`, when that cannot be."""
    try:
        if connect:
            socket.connect(endpoint)
        else:
            socket.bind(endpoint)
    except zmq.ZMQError as error:
        what = "connected to" if connect else "listened at"
        raise ConfigError(
            f"{name} = {endpoint} cannot be {what} ({error.strerror}); choose another, or end what uses it"
        ) from error


def receive(socket: Socket) -> list[bytes] | None:
    """The next message, or None when there is none yet."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def on_readable(socket: Socket, read: Callable[[], None]) -> Callable[[], None]:
    """Has `read` called when there may be something to read; returns how to end that.

    `read` takes all there is. Sending may take the signal, so it has to be called after that, too.
    """
    loop = asyncio.get_running_loop()
    descriptor = int(socket.getsockopt(zmq.FD))
    loop.add_reader(descriptor, read)
    first = loop.call_soon(read)  # the descriptor tells of news alone

    def end() -> None:
        first.cancel()
        loop.remove_reader(descriptor)

    return end
