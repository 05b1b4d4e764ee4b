from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from prefixd_swap.vmem import VirtualMemory
from prefixd_swap.vmem.cuda_driver import STAND_IN_NAME, CudaDevice, open_device


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
