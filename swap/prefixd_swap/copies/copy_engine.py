"""Copies of raw memory in threads and on CUDA streams, so that the event loop runs meanwhile."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd_swap.copies.address_columns import AddressColumns, Pair
from prefixd_swap.copies.pinning import pieces
from prefixd_swap.copies.row_columns import RowColumns
from prefixd_swap.copies.strided_copies import Rows, StridedCopies
from prefixd_swap.errors import MemoryMisuseError, SwapError
from prefixd_swap.threads import started_threads, wait_all
from prefixd_swap.vmem.backends.cuda_driver import CudaDevice, cuda_ordinal, open_device, register_host, unregister_host

__all__ = [
    "CopyEngine",
    "CudaCopyEngine",
    "HostCopyEngine",
    "StreamMark",
    "create_copy_engine",
    "register_host",
    "unregister_host",
]

_SLICE_BYTES = 4 << 20
_TASK_BYTES = 512 << 10


class CopyEngine(ABC):
    """Copies (destination, source) pairs of equal size that do not overlap."""

    @abstractmethod
    async def copy(self, pairs: Sequence[Pair]) -> None:
        """Copy all `pairs` and return when the bytes are there. Pairs may be copied in any order.

        When this returns or raises, also by cancellation, the engine does not touch the memory any more. Before the
        call, the bytes of the sources must be complete; on the device no other stream may still write them.

        Raises MemoryMisuseError for pairs of different size or on the wrong side, DeviceError when the driver fails.
        """

    async def copy_columns(self, columns: AddressColumns) -> None:
        """As `copy`, of copies of one direction."""
        await self.copy(columns.pairs())

    async def copy_rows(self, copies: Sequence[RowColumns]) -> None:
        """As `copy`, of rows of one direction; row by row, unless an engine has a better way."""
        flat = [rows.flat() for rows in copies]
        if flat:
            to, at, nbytes = (
                np.concatenate(each) for each in zip(*((f.to, f.at, f.nbytes) for f in flat), strict=True)
            )
            await self.copy_columns(AddressColumns(to, at, nbytes, flat[0].to_device, flat[0].from_device))

    @abstractmethod
    def close(self) -> None:
        """Wait for copies under way and end the engine's threads. Can be called twice."""


class HostCopyEngine(CopyEngine):
    """Copies host memory on `threads` threads with `memmove`, which releases the GIL.

    Raises OutOfMemoryError when the system gives no threads.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or min(4, os.cpu_count() or 1)
        self._pool = started_threads(self._threads, "prefixd-copy")
        self._closed = False

    async def copy(self, pairs: Sequence[Pair]) -> None:
        _check(pairs)
        self._check_usable(any(to.on_device or at.on_device for to, at in pairs))
        await self.copy_columns(AddressColumns.of(pairs))

    async def copy_columns(self, columns: AddressColumns) -> None:
        self._check_usable(columns.to_device or columns.from_device)
        tasks = _share(columns.joined(), self._threads)
        await wait_all([self._pool.submit(_move, task) for task in tasks])

    async def copy_rows(self, copies: Sequence[RowColumns]) -> None:
        """The event loop lists copies alone; the threads copy their rows."""
        self._check_usable(any(each.to_device or each.from_device for each in copies))
        listed = [(to, at, each) for each in copies for to, at in zip(each.to.tolist(), each.at.tolist(), strict=True)]
        step = max(1, -(-len(listed) // self._threads))
        tasks = [listed[first : first + step] for first in range(0, len(listed), step)]
        await wait_all([self._pool.submit(_move_rows, task) for task in tasks])

    def _check_usable(self, on_device: bool) -> None:
        if self._closed:
            raise MemoryMisuseError("this copy engine is closed; create another")
        if on_device:
            raise MemoryMisuseError("a host copy engine cannot reach device memory; use CudaCopyEngine")

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown()


class CudaCopyEngine(CopyEngine):
    """Copies between host and GPU on its own streams, one a direction, and host to host like `HostCopyEngine`.

    Host memory should be pinned (`register_host`): pageable memory is correct too, but slow.
    Raises DeviceError without a usable GPU, OutOfMemoryError when the system gives no threads.
    """

    def __init__(self, ordinal: int = 0, threads: int | None = None) -> None:
        self._cuda = open_device(ordinal)
        self._cuda.use_context()
        self._host = HostCopyEngine(threads)
        self._lanes: list[_Lane] = []
        self._closed = False
        try:
            for call in ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync"):
                self._lanes.append(_Lane(self._cuda, call))
        except SwapError:
            self.close()
            raise

    async def copy(self, pairs: Sequence[Pair]) -> None:
        if self._closed:
            raise MemoryMisuseError("this copy engine is closed; create another")
        _check(pairs)
        sides: dict[tuple[bool, bool], list[Pair]] = {}
        for destination, source in pairs:
            sides.setdefault((destination.on_device, source.on_device), []).append((destination, source))
        await wait_all([future for some in sides.values() for future in self._submit(AddressColumns.of(some))])

    async def copy_columns(self, columns: AddressColumns) -> None:
        if self._closed:
            raise MemoryMisuseError("this copy engine is closed; create another")
        await wait_all(self._submit(columns))

    async def copy_rows(self, copies: Sequence[RowColumns]) -> None:
        """On CUDA one call of the driver for all rows of a copy (`cuMemcpy2DAsync`)."""
        sides = {(rows.to_device, rows.from_device) for rows in copies}
        if sides == {(False, False)}:
            await self._host.copy_rows(copies)
            return
        if len(sides) != 1 or not sides <= {(True, False), (False, True)}:
            await super().copy_rows(copies)
            return
        if self._closed:
            raise MemoryMisuseError("this copy engine is closed; create another")
        await wait_all([self._lane(*sides.pop()).submit_rows(copies)])

    def close(self) -> None:
        """Wait for copies under way, end the threads and destroy the streams. Can be called twice."""
        if self._closed:
            return
        self._closed = True
        self._host.close()
        for lane in self._lanes:
            lane.close()

    def _submit(self, columns: AddressColumns) -> list[Future[None]]:
        sides = (columns.to_device, columns.from_device)
        joined = columns.joined()
        if sides == (False, False):
            return [self._host._pool.submit(_move, task) for task in _share(joined, self._host._threads)]
        return [self._lane(*sides).submit(joined)]

    def _lane(self, to_device: bool, from_device: bool) -> _Lane:
        return self._lanes[[(True, False), (False, True), (True, True)].index((to_device, from_device))]


class StreamMark:
    """A position in a CUDA stream: after all work that was submitted before this object was made.

    `stream` is a handle, such as `torch.cuda.current_stream().cuda_stream`. Any thread may call `wait`, for example
    before it copies what the stream writes. Raises DeviceError.
    """

    def __init__(self, ordinal: int, stream: int) -> None:
        self._event: Any = None
        self._cuda = open_device(ordinal)
        self._cuda.use_context()
        self._event = self._cuda.create_event()
        self._cuda.call("cuEventRecord", self._event, stream)

    def wait(self) -> None:
        """Returns when the stream has reached the position."""
        self._cuda.use_context()
        self._cuda.call("cuEventSynchronize", self._event)

    def hold(self, stream: int) -> None:
        """Makes `stream` wait for the position before it runs what is submitted from now on; returns at once."""
        with self._cuda.context():
            self._cuda.call("cuStreamWaitEvent", stream, self._event, 0)

    def __del__(self) -> None:
        # Any thread may drop the last reference; at the end of the process the driver may be gone already.
        if self._event is not None:
            with suppress(SwapError):
                self._cuda.destroy_event(self._event)


def create_copy_engine(device: str, threads: int | None = None) -> CopyEngine:
    """The engine for a GPU tier on `device` ("cpu", "cuda", "cuda:N"). Raises DeviceError, OutOfMemoryError."""
    ordinal = cuda_ordinal(device)
    return HostCopyEngine(threads) if ordinal is None else CudaCopyEngine(ordinal, threads)


class _Lane:
    """One direction: a stream, and two threads that submit to it and wait for their own event.

    With two threads the next copies are submitted while the last ones run.
    """

    def __init__(self, cuda: CudaDevice, call: str) -> None:
        self._cuda = cuda
        self._call = call
        self._submitting = threading.Lock()
        self._events: list[Any] = []
        # A new thread has no context, so each one gets it before its first copy.
        self._pool = started_threads(2, f"prefixd-{call}", cuda.use_context)
        try:
            self._stream = cuda.call("cuStreamCreate", cuda.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        except SwapError:
            self._pool.shutdown()
            raise
        self._strided = StridedCopies(cuda, self._stream, to_device=call == "cuMemcpyHtoDAsync")

    def submit(self, columns: AddressColumns) -> Future[None]:
        return self._pool.submit(self._run, partial(self._copy_columns, columns))

    def submit_rows(self, copies: Sequence[RowColumns]) -> Future[None]:
        return self._pool.submit(self._run, partial(self._copy_rows, copies))

    def close(self) -> None:
        self._pool.shutdown()
        with self._cuda.context():
            self._cuda.call("cuStreamSynchronize", self._stream)
            while self._events:
                self._cuda.destroy_event(self._events.pop())
            self._cuda.call("cuStreamDestroy", self._stream)

    def _copy_columns(self, columns: AddressColumns) -> None:
        for to, at, whole in columns.rows():
            for offset, nbytes in pieces(at if columns.to_device else to, whole):
                self._cuda.call(self._call, to + offset, at + offset, nbytes, self._stream)

    def _copy_rows(self, copies: Sequence[RowColumns]) -> None:
        for each in itertools.chain.from_iterable(columns.joined() for columns in copies):
            for to, at in zip(each.to.tolist(), each.at.tolist(), strict=True):
                pitches = each.to_pitch, each.from_pitch
                host, device, host_pitch, device_pitch = (
                    (at, to, *reversed(pitches)) if each.to_device else (to, at, *pitches)
                )
                self._strided.submit(Rows(host, device, each.width, each.rows, host_pitch, device_pitch))

    def _run(self, copy: Callable[[], None]) -> None:
        with self._submitting:
            event = self._events.pop() if self._events else self._cuda.create_event()
            try:
                copy()
                self._cuda.call("cuEventRecord", event, self._stream)
            except SwapError:
                # Some copies may be under way; the caller may free the memory as soon as this raises.
                self._cuda.api.cuStreamSynchronize(self._stream)
                self._events.append(event)
                raise
        self._cuda.call("cuEventSynchronize", event)
        with self._submitting:
            self._events.append(event)


def _check(pairs: Iterable[Pair]) -> None:
    for destination, source in pairs:
        if destination.nbytes != source.nbytes:
            raise MemoryMisuseError(
                f"cannot copy {source.nbytes} bytes over {destination.nbytes} bytes; sizes must match"
            )


def _share(columns: AddressColumns, threads: int) -> list[list[tuple[int, int, int]]]:
    """Cut copies into (destination, source, nbytes) and group them into about `threads` tasks of equal size."""
    goal = max(_TASK_BYTES, -(-int(columns.nbytes.sum()) // threads))
    tasks: list[list[tuple[int, int, int]]] = []
    room = 0
    for to, at, whole in columns.rows():
        done = 0
        while done < whole:
            if room <= 0:
                tasks.append([])
                room = goal
            nbytes = min(whole - done, room, _SLICE_BYTES)
            tasks[-1].append((to + done, at + done, nbytes))
            done += nbytes
            room -= nbytes
    return tasks


def _move_rows(task: list[tuple[int, int, RowColumns]]) -> None:
    for to, at, each in task:
        _rows_at(to, each, each.to_pitch)[:] = _rows_at(at, each, each.from_pitch)


def _rows_at(address: int, columns: RowColumns, pitch: int) -> npt.NDArray[np.uint8]:
    """The rows of one copy, ``[rows, width]``, at an address."""
    buffer = (ctypes.c_uint8 * ((columns.rows - 1) * pitch + columns.width)).from_address(address)
    return np.ndarray((columns.rows, columns.width), np.uint8, memoryview(buffer), strides=(pitch, 1))


def _move(task: list[tuple[int, int, int]]) -> None:
    for destination, source, nbytes in task:
        ctypes.memmove(destination, source, nbytes)
