"""The daemon's end of a worker's socket. It sends messages, and descriptors of the GPU tier's memory beside them."""

from __future__ import annotations

import asyncio
import logging
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from prefixd.worker_protocol.framing import encode
from prefixd.worker_protocol.protocol import Grow, Memory, Shrink, ToWorker
from prefixd_swap import Export, FrameId, FramePool, NewFrames, SwapError, send_export

log = logging.getLogger(__name__)


class WorkerChannel:
    """Sends messages to the present worker. A message that is sent while there is none is lost.

    Attributes:
        last_error: why the present worker did not take the tier's memory; empty if it did.
        has_frames: whether the present worker was handed the tier's memory.
    """

    def __init__(self) -> None:
        self.last_error = ""
        self.has_frames = False
        self._writer: asyncio.StreamWriter | None = None
        self._socket: socket.socket | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._held_back: list[ToWorker] | None = None  # while descriptors are sent beside the stream
        self._shrunk: asyncio.Future[None] | None = None

    async def open(self, end: socket.socket, threads: ThreadPoolExecutor) -> None:
        """Begins to write to the worker that has the other end of the socket `end`; `threads` send the descriptors."""
        self.last_error = ""
        self._writer = await _writer(end.dup())
        self._socket, self._threads = end, threads

    def close(self) -> None:
        """Ends the connection. The owner of the socket closes its other descriptor."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def worker_gone(self) -> None:
        """The worker's process has ended, and its mappings with it."""
        self._socket, self.has_frames = None, False
        self.shrunk()

    def send(self, message: ToWorker) -> None:
        """Sends a message, behind descriptors that are being sent."""
        if self._held_back is not None:
            self._held_back.append(message)
        elif self._writer is not None:
            self._writer.write(encode(message))

    # -- the GPU tier's memory ------------------------------------------------------------------------------------

    async def hand_over(self, pool: FramePool) -> None:
        """Gives the worker the GPU tier. If the worker ends meanwhile, its last message is read later."""
        export = pool.memory.export()
        self.has_frames = True
        await self._send_with_descriptors(describe_memory(pool, export), export)

    async def grow(self, pool: FramePool, new: NewFrames) -> bool:
        """Gives the worker more frames; False if it did not take them. Without frames, it gets all of them later."""
        if not self.has_frames:
            return True
        export = pool.memory.export_run(range(int(new.chunks[0]), int(new.chunks[-1]) + 1))
        numbers = np.array(new.frames, np.int64)
        message = Grow(export.meta, export.count, numbers.tobytes(), new.chunks.tobytes())
        return await self._send_with_descriptors(message, export)

    async def shrink(self, frames: list[FrameId]) -> None:
        """Has the worker unmap withdrawn frames; returns when it has (`shrunk`), or is gone."""
        if not self.has_frames:
            return
        self._shrunk = asyncio.get_running_loop().create_future()
        self.send(Shrink(np.array(frames, np.int64).tobytes()))
        try:
            await self._shrunk
        finally:
            self._shrunk = None

    def shrunk(self) -> None:
        """The worker has unmapped the withdrawn frames."""
        if self._shrunk is not None and not self._shrunk.done():
            self._shrunk.set_result(None)

    async def _send_with_descriptors(self, message: ToWorker, export: Export) -> bool:
        """Sends a message and the descriptors that follow it; other messages wait. Returns whether the worker took
        them."""
        self.send(message)
        self._held_back = []
        try:
            if self._writer is not None:
                await self._writer.drain()
            if export.count and self._socket is not None:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._threads, send_export, self._socket, export)
        except (OSError, SwapError) as error:
            log.debug("the worker did not take the GPU tier's memory: %s", error)
            self.last_error = self.last_error or str(error)
            return False
        finally:
            waiting, self._held_back = self._held_back, None
            for each in waiting:
                self.send(each)
        return True


def describe_memory(pool: FramePool, export: Export) -> Memory:
    """The message that announces a pool's memory to a worker."""
    frames = pool.table.frames()
    chunks = pool.table.chunks(frames)
    return Memory(export.meta, export.count, frames.tobytes(), chunks.tobytes(), pool.most, pool.frame_bytes)


async def _writer(end: socket.socket) -> asyncio.StreamWriter:
    """A writer on a descriptor of its own, so that after a failed write the worker's last message can still be read."""
    _, writer = await asyncio.open_unix_connection(sock=end)
    if isinstance(writer.transport, asyncio.Transport):
        writer.transport.pause_reading()  # the other descriptor is read
    # drain() then waits until everything is sent: descriptors go beside the stream and must not overtake it.
    writer.transport.set_write_buffer_limits(high=0)
    return writer
