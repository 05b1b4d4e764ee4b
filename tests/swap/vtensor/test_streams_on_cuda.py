"""The manager while a GPU's kernels still run: the stand-in has none, so only a GPU runs this."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from prefixd_swap.group_shape import KvGeometry
from prefixd_swap.vmem import FramePool, VirtualMemory, create_memory
from prefixd_swap.vtensor import VirtualTensorManager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]
SLEEP_CYCLES = 500_000_000  # some 0.3 s


@pytest.fixture
def cuda() -> Iterator[VirtualMemory]:
    with create_memory("cuda") as memory:
        yield memory
        torch.cuda.synchronize()


@pytest.mark.parametrize("layout", ["token", "layer"])
def test_addresses_and_frames_come_back_when_the_stream_is_done_with_them(cuda: VirtualMemory, layout: str) -> None:
    geometry = KvGeometry(2, 2, cuda.chunk_bytes // 64, "float32", block_tokens=4, layout=layout)
    pool = FramePool(cuda, geometry.block_bytes, 4)
    manager = VirtualTensorManager(cuda, pool.table, geometry, requests=1, max_tokens=8)
    first, second = pool.allocate(2), pool.allocate(2)
    assert first is not None and second is not None
    tensor = manager.create()
    manager.extend(tensor, first)
    torch.cuda._sleep(SLEEP_CYCLES)
    tensor.kv[:8] = 3
    done: list[bool] = []
    stream = torch.cuda.current_stream().cuda_stream
    manager.release(tensor, streams=[stream], on_released=lambda: done.append(True))
    assert not done and manager.releasing_count == 1
    assert manager.poll() == 1, "the kernel has not written yet"
    assert manager.poll(wait=True) == 0 and done
    again = manager.create()
    manager.extend(again, second)
    again.kv[:8] = 4
    torch.cuda.synchronize()
    numbers = pool._window.tensor((4, geometry.block_bytes // 4), torch.float32)
    assert [int(numbers[frame, 0]) for frame in (*first, *second)] == [3, 3, 4, 4]
    assert [int(numbers[frame, -1]) for frame in (*first, *second)] == [3, 3, 4, 4]
    manager.check_integrity()
    manager.close()
    pool.close()
