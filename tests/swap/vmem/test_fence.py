from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from prefixd_swap.copies.copy_engine import CudaCopyEngine, StreamMark
from prefixd_swap.errors import DeviceError, MemoryMisuseError
from prefixd_swap.spans import Span
from prefixd_swap.vmem import VirtualMemory, create_memory
from prefixd_swap.vmem.backends.cuda_driver import STAND_IN_NAME, CudaDevice, open_device


def span_of(array: np.ndarray[Any, Any]) -> Span:
    return Span(array.ctypes.data, array.nbytes)


def test_without_streams_work_runs_at_once(memory: VirtualMemory) -> None:
    fence = memory.fence()
    ran: list[int] = []
    fence.retire([], lambda: ran.append(1))
    assert ran == [1] and fence.poll() == 0


# Only CUDA has streams.
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
class TestOnStreams:
    """A copy is slow enough (see the stand-in) that work which does not wait for it is seen to be early."""

    COPIES = 40

    @pytest.fixture
    def cuda(self, memory: VirtualMemory) -> CudaDevice:
        return open_device(0)

    @pytest.fixture
    def events(self, cuda: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> set[int]:
        """The events that are there, of those created from now on."""
        there: set[int] = set()
        call = cuda.call

        def watch(name: str, *arguments: Any) -> Any:
            result = call(name, *arguments)
            if name == "cuEventCreate":
                there.add(int(result))
            elif name == "cuEventDestroy":
                there.remove(int(arguments[0]))
            return result

        monkeypatch.setattr(cuda, "call", watch)
        return there

    @pytest.fixture
    def stream(self, cuda: CudaDevice) -> Iterator[Any]:
        cuda.use_context()
        created = cuda.call("cuStreamCreate", cuda.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        yield created
        cuda.use_context()
        cuda.call("cuStreamDestroy", created)

    @pytest.fixture
    def busy(self, memory: VirtualMemory, cuda: CudaDevice, stream: Any) -> np.ndarray[Any, Any]:
        """Start copies from the host to mapped chunks and back; returns where the last one arrives."""
        size = memory.chunk_bytes
        self.mapped = memory.reserve(size)
        self.mapped.map(0, memory.create(1))
        self.host = mmap.mmap(-1, 2 * size)
        view = np.frombuffer(self.host, np.uint8)
        view[:size] = 5
        for _ in range(self.COPIES):
            cuda.call("cuMemcpyHtoDAsync", self.mapped.base, view.ctypes.data, size, stream)
        cuda.call("cuMemcpyDtoHAsync", view.ctypes.data + size, self.mapped.base, size, stream)
        return view[size:]

    def test_unmapping_waits_for_the_stream(
        self, memory: VirtualMemory, cuda: CudaDevice, stream: Any, busy: np.ndarray[Any, Any]
    ) -> None:
        for _ in range(2000):  # they take half a second, however small: the stand-in waits at each
            cuda.call("cuMemcpyHtoDAsync", self.mapped.base, busy.ctypes.data, 4096, stream)
        fence = memory.fence()
        arrived: list[bool] = []

        def unmap() -> None:
            arrived.append(bool((busy == 5).all()))
            self.mapped.unmap(0, memory.chunk_bytes)

        fence.retire([stream], unmap)
        left = fence.poll()
        if cuda.name == STAND_IN_NAME:  # a real GPU may be faster than this test
            assert left == 1 and not arrived
        assert fence.poll(wait=True) == 0
        assert arrived == [True], "the copies that used the range ended before it was unmapped"
        cuda.call("cuStreamSynchronize", stream)
        memory.check_integrity()

    def test_events_are_reused_and_every_stream_counts(
        self, memory: VirtualMemory, cuda: CudaDevice, stream: Any, busy: np.ndarray[Any, Any]
    ) -> None:
        fence = memory.fence()
        ran: list[str] = []
        fence.retire([0, stream], lambda: ran.append("both"))
        fence.retire([0], lambda: ran.append("default"))
        fence.poll(wait=True)
        assert sorted(ran) == ["both", "default"]
        assert (busy == 5).all()
        fence.retire([stream], lambda: ran.append("again"))
        assert fence.poll(wait=True) == 0 and ran[-1] == "again"

    def test_a_fresh_thread_can_poll(self, memory: VirtualMemory, stream: Any, busy: np.ndarray[Any, Any]) -> None:
        fence = memory.fence()
        ran: list[int] = []
        fence.retire([stream], lambda: ran.append(1))
        thread = threading.Thread(target=fence.poll, args=[True])
        thread.start()
        thread.join()
        assert ran == [1]

    def test_closing_runs_what_waits_and_gives_every_event_back(
        self, memory: VirtualMemory, stream: Any, events: set[int], busy: np.ndarray[Any, Any]
    ) -> None:
        fence = memory.fence()
        ran: list[bool] = []
        fence.retire([0, stream], lambda: ran.append(bool((busy == 5).all())))
        fence.retire([stream], lambda: fence.retire([stream], lambda: ran.append(True)))
        assert len(events) == 3
        # A fresh thread has no context, and the driver refuses to destroy an event without one.
        with ThreadPoolExecutor(1) as fresh:
            fresh.submit(fence.close).result()
        assert ran == [True, True] and not events
        fence.close()
        with pytest.raises(MemoryMisuseError, match="fence is closed"):
            fence.retire([stream], lambda: None)

    def test_a_memory_closes_its_fences(
        self, device: str, cuda: CudaDevice, stream: Any, events: set[int], chunk_bytes: int | None
    ) -> None:
        memory = create_memory(device, chunk_bytes)
        mapped = memory.reserve(memory.chunk_bytes)
        mapped.map(0, memory.create(1))
        host = np.zeros(memory.chunk_bytes, np.uint8)
        cuda.call("cuMemcpyDtoHAsync", host.ctypes.data, mapped.base, host.nbytes, stream)
        memory.fence().retire([stream], lambda: mapped.unmap(0, memory.chunk_bytes))
        assert len(events) == 1
        memory.close()
        assert not events
        cuda.call("cuStreamSynchronize", stream)

    def test_a_piece_of_work_that_fails_leaves_the_others_waiting(self, memory: VirtualMemory, stream: Any) -> None:
        fence = memory.fence()
        ran: list[str] = []

        def fail() -> None:
            raise ValueError("this piece")

        for work in (lambda: ran.append("before"), fail, lambda: ran.append("after")):
            fence.retire([stream], work)
        with pytest.raises(ValueError, match="this piece"):
            fence.poll(wait=True)
        assert ran == ["before"]
        assert fence.poll(wait=True) == 0 and ran == ["before", "after"]

    def test_a_mark_and_an_engine_give_their_events_back_in_any_thread(
        self, memory: VirtualMemory, stream: Any, events: set[int], busy: np.ndarray[Any, Any]
    ) -> None:
        marks = [StreamMark(0, stream)]
        marks[0].wait()
        assert (busy == 5).all() and len(events) == 1
        engine = CudaCopyEngine(0, threads=1)
        target = np.zeros(memory.chunk_bytes, np.uint8)
        asyncio.run(engine.copy([(span_of(target), self.mapped.span(0, memory.chunk_bytes))]))
        assert (target == 5).all() and len(events) == 2
        with ThreadPoolExecutor(1) as fresh:
            fresh.submit(marks.clear).result()
            assert len(events) == 1
            fresh.submit(engine.close).result()
        assert not events

    def test_what_was_current_in_a_thread_is_so_after_an_event_was_destroyed(
        self, memory: VirtualMemory, cuda: CudaDevice
    ) -> None:
        event = cuda.create_event()
        with ThreadPoolExecutor(1) as fresh:
            fresh.submit(cuda.destroy_event, event).result()
            with pytest.raises(DeviceError, match="INVALID_CONTEXT"):
                fresh.submit(cuda.call, "cuMemGetInfo").result()
