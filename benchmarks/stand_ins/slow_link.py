"""A TCP proxy that is as slow as a network: latency and bandwidth, in both directions, in a thread of its own.

    with SlowLink("127.0.0.1", server_port, latency_s=0.025, bytes_per_s=1.25e9) as link:
        ...  # connect to 127.0.0.1, link.port

All connections share the bandwidth of a direction, as on one network card. Latency does not limit the rate: bytes under
way are kept, as in a long cable.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any

_READ_BYTES = 64 << 10
_CABLE_BYTES = 32 << 20  # under way in one direction of one connection, at most


class SlowLink:
    """Forwards connections to a server.

    Args:
        host: the server's.
        port: the server's.
        latency_s: seconds from one end to the other; a round trip takes twice that.
        bytes_per_s: of all connections together in one direction.

    Raises:
        ValueError: a latency below 0 or a rate of 0 or less.
    """

    def __init__(self, host: str, port: int, *, latency_s: float = 0.0, bytes_per_s: float = math.inf) -> None:
        if not (latency_s >= 0 and bytes_per_s > 0):
            raise ValueError(
                f"latency_s is {latency_s}, bytes_per_s {bytes_per_s}; set 0 or more, and more than 0 (inf: no limit)"
            )
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.port = 0
        """Where it listens on 127.0.0.1, within the `with` block."""
        self.forwarded_bytes = [0, 0]
        """Bytes that have passed to the server, and from it."""
        self._server_at = (host, port)
        self._free_s = [0.0, 0.0]  # when the bytes so far have passed, of each direction
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="slow-link", daemon=True)
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._failure: OSError | None = None

    def __enter__(self) -> SlowLink:
        """Starts to listen. Raises OSError: no socket can be had."""
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._started.set()
            self._loop.close()

    async def _serve(self) -> None:
        connections: set[asyncio.Task[None]] = set()

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            if task is not None:
                connections.add(task)
                task.add_done_callback(connections.discard)
            with suppress(asyncio.CancelledError):  # cut by __exit__; asyncio would log it
                await self._join(reader, writer)

        try:
            server = await asyncio.start_server(accepted, "127.0.0.1", 0, limit=_READ_BYTES)
        except OSError as error:
            self._failure = error
            return
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        server.close()
        await _cancel(connections)
        await asyncio.sleep(0)  # transports that were aborted close their sockets

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards both directions until both have ended, or one has failed."""
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._server_at, limit=_READ_BYTES)
        except OSError:
            writer.transport.abort()
            return
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        ways = {
            asyncio.ensure_future(self._forward(0, reader, far_writer)),
            asyncio.ensure_future(self._forward(1, far_reader, writer)),
        }
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await _cancel(ways)
            writer.transport.abort()
            far_writer.transport.abort()

    async def _forward(self, way: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cable: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_CABLE_BYTES // _READ_BYTES)
        arriving = asyncio.ensure_future(self._arrive(way, cable, writer))
        try:
            while True:
                data = await reader.read(_READ_BYTES)
                now_s = self._loop.time()
                self._free_s[way] = max(self._free_s[way], now_s) + len(data) / self.bytes_per_s
                await _put_or_end(cable, (self._free_s[way] + self.latency_s, data), arriving)
                if not data:
                    await arriving
                    return
                if self._free_s[way] - now_s > 0.01:  # data that is not read yet waits at the sender
                    await asyncio.sleep(self._free_s[way] - now_s)
        finally:
            await _cancel({arriving})

    async def _arrive(self, way: int, cable: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            arrives_s, data = await cable.get()
            if (left_s := arrives_s - self._loop.time()) > 0:
                await asyncio.sleep(left_s)
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            self.forwarded_bytes[way] += len(data)
            await writer.drain()


async def _put_or_end(
    cable: asyncio.Queue[tuple[float, bytes]], item: tuple[float, bytes], arriving: asyncio.Future[None]
) -> None:
    """Raises the error that ended `arriving`: the far end is gone, so nothing would empty the cable."""
    putting: Coroutine[Any, Any, None] = cable.put(item)
    task = asyncio.ensure_future(putting)
    try:
        await asyncio.wait({task, arriving}, return_when=asyncio.FIRST_COMPLETED)
        if arriving.done():
            arriving.result()
    finally:
        if not task.done():
            task.cancel()


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    for task in list(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
