"""The daemon's frames in the worker. Frames are added and removed while requests run."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from prefixd.worker_protocol.protocol import Grow, Memory, Shrink, Shrunk
from prefixd_swap.vmem import FrameId, FrameTable, VirtualMemory, recv_export


class Forgets(Protocol):
    """A memory that has frames mapped."""

    def forget(self, frames: Sequence[int]) -> None:
        """As `KvMemory.forget`."""
        ...


class SharedFrames:
    """The memory that the daemon has handed over, frame by frame.

    Args:
        memory: attached.
        frame_chunks: chunks of a frame.
        message: which frames there are now.
    """

    def __init__(self, memory: VirtualMemory, frame_chunks: int, message: Memory) -> None:
        self.memory = memory
        self.table = FrameTable(frame_chunks)
        self.table.add(_frames(message.frames), _numbers(message.chunks))

    def grow(self, message: Grow, end: socket.socket) -> None:
        """Attach further frames; their descriptors are next on the socket.

        Raises TransferError when they do not come, MemoryMisuseError for frames that are here already.
        """
        self.memory.adopt(message.meta, recv_export(end, message.fds))
        self.table.add(_frames(message.frames), _numbers(message.chunks))

    def shrink(self, message: Shrink, *memories: Forgets) -> Shrunk:
        """Unmap frames that no request has from all memories, and close their handles."""
        frames = [frame for frame in _frames(message.frames) if self.table.exists(frame)]  # it may ask twice
        for memory in memories:
            memory.forget(frames)
        for chunks in _runs(sorted(self.table.remove(frames).tolist())):
            self.memory.drop(chunks)
        return Shrunk(message.frames)


def _numbers(encoded: bytes) -> list[int]:
    numbers: list[int] = np.frombuffer(encoded, "<i8").tolist()
    return numbers


def _frames(encoded: bytes) -> list[FrameId]:
    return [FrameId(frame) for frame in _numbers(encoded)]


def _runs(ordered: Sequence[int]) -> Iterator[range]:
    """Ascending numbers as runs of consecutive ones."""
    start = 0
    for stop in range(1, len(ordered) + 1):
        if stop == len(ordered) or ordered[stop] != ordered[stop - 1] + 1:
            yield range(ordered[start], ordered[stop - 1] + 1)
            start = stop
