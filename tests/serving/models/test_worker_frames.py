"""Frames that come and go, between the worker's supervisor and a worker that the test is."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest

from prefixd.cache import Troubles
from prefixd.serving.models.worker_process import WorkerProcess, WorkerState
from prefixd.worker_protocol.framing import Connection, to_worker
from prefixd.worker_protocol.protocol import Cancel, Grow, Ready, Shrink, Shrunk
from prefixd.worker_protocol.worker_settings import WorkerSettings
from prefixd_swap import Export, FrameId, FramePool, NewFrames
from prefixd_swap.vmem import recv_export

MANY = 600
NEW = NewFrames([FrameId(frame) for frame in range(MANY)], np.arange(MANY))


class Pool:
    """A pool whose chunks are files with their numbers, as many descriptors as a GPU's would be."""

    def __init__(self) -> None:
        self.memory = self

    def export_run(self, chunks: range) -> Export:
        return Export(b"meta", len(chunks), self._open)

    def _open(self, index: int) -> int:
        fd = os.memfd_create("chunk")
        os.write(fd, str(index).encode())
        return fd


class Killed:
    killed = False

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
async def supervised() -> AsyncIterator[tuple[WorkerProcess, Connection[Any]]]:
    """A supervisor whose worker has been handed its memory, and the worker's end."""
    worker = WorkerProcess(
        WorkerSettings(model="/nowhere"),
        0,
        on_hello=lambda *_: pytest.fail("it has said it"),
        on_ready=lambda: worker.send(Cancel(7)),
        on_step=lambda _: None,
        on_done=lambda _: None,
        on_death=lambda *_: None,
        troubles=Troubles(time.monotonic),
    )
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, ThreadPoolExecutor(1) as threads:
        await worker._channel.open(ours, threads)
        worker._channel.has_frames = True
        worker.state = WorkerState.READY
        worker._process = cast(Any, Killed())
        end = Connection(theirs, to_worker())
        yield worker, end
        end.close()
        worker._channel.close()


async def test_messages_wait_behind_descriptors(supervised: tuple[WorkerProcess, Connection[Any]]) -> None:
    """A message between the descriptors would be taken for one of them."""
    worker, end = supervised
    async with worker.changing_frames():
        growing = asyncio.create_task(worker.grow(cast(FramePool, Pool()), NEW))
        while worker._channel._held_back is None:
            await asyncio.sleep(0)
        worker.send(Cancel(7))
        await check_new_frames_before_a_message(end)
        await growing


async def test_a_worker_that_loads_is_given_new_frames_before_its_first_request(
    supervised: tuple[WorkerProcess, Connection[Any]],
) -> None:
    """It reads nothing while it loads, so nobody waits for it then."""
    worker, end = supervised
    worker.state = WorkerState.STARTING
    async with worker.changing_frames():
        await worker.grow(cast(FramePool, Pool()), NEW)
    assert not end.poll(0.0) and not worker.may_shrink
    ready = asyncio.create_task(worker._handle(Ready()))
    await check_new_frames_before_a_message(end)
    await ready
    assert worker.may_shrink and not worker.loads


async def check_new_frames_before_a_message(end: Connection[Any]) -> None:
    def receive() -> tuple[Any, list[int], Any]:
        message = end.receive()
        numbers = []
        for fd in recv_export(end.socket, message.fds):
            numbers.append(int(os.pread(fd, 8, 0)))
            os.close(fd)
        return message, numbers, end.receive()

    message, numbers, after = await asyncio.to_thread(receive)
    assert isinstance(message, Grow) and message.frames == np.arange(MANY).tobytes()
    assert numbers == list(range(MANY)) and after == Cancel(7)


async def test_a_worker_that_takes_no_descriptors_is_ended(
    supervised: tuple[WorkerProcess, Connection[Any]],
) -> None:
    """It would wait for them for ever; its successor is handed all there are."""
    worker, end = supervised
    end.close()
    new = NewFrames([FrameId(0)], np.arange(1))
    async with worker.changing_frames():
        await asyncio.wait_for(worker.grow(cast(FramePool, Pool()), new), 60)
    assert cast(Any, worker._process).killed


async def test_shrinking_waits_for_the_answer(supervised: tuple[WorkerProcess, Connection[Any]]) -> None:
    worker, end = supervised
    async with worker.changing_frames():
        shrinking = asyncio.create_task(worker.shrink([FrameId(3)]))
        message = await asyncio.to_thread(end.receive)
        assert message == Shrink(np.array([3], np.int64).tobytes())
        await asyncio.sleep(0.01)
        assert not shrinking.done()
        await worker._handle(Shrunk(message.frames))
        await shrinking


async def test_without_a_worker_nobody_is_told(supervised: tuple[WorkerProcess, Connection[Any]]) -> None:
    worker, end = supervised
    worker._channel.has_frames = False
    async with worker.changing_frames():
        await worker.shrink([FrameId(3)])
        await worker.grow(cast(FramePool, Pool()), NewFrames([FrameId(0)], np.arange(1)))
    assert not end.poll(0.0)
