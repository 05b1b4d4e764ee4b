"""What the tests of memory and copies share.

Every test that takes `device` runs on host memory and on CUDA. Where there is no GPU, `test_cuda_stand_in.py`
runs the CUDA half once more in a process whose driver is the stand-in; it sets PREFIXD_TEST_STAND_IN there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from prefixd_swap.group_shape import KvGeometry, Layout
from prefixd_swap.vmem import VirtualMemory, create_memory
from prefixd_swap.vmem.backends.cuda_driver import open_device

HOST_CHUNK_BYTES = 64 << 10


def _cuda_usable() -> bool:
    # With the stand-in, torch must not be asked: a CUDA build of it would call a driver that is not one.
    return "PREFIXD_TEST_STAND_IN" in os.environ or torch.cuda.is_available()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The name of the device to test on."""
    name: str = request.param
    if name == "cuda" and not _cuda_usable():
        pytest.skip("no CUDA GPU on this machine; test_cuda_stand_in.py runs this against the stand-in driver")
    return name


@pytest.fixture
def chunk_bytes(device: str) -> int | None:
    """A small chunk on the host, the device's own on CUDA."""
    return HOST_CHUNK_BYTES if device == "cpu" else None


@pytest.fixture
def memory(device: str, chunk_bytes: int | None) -> Iterator[VirtualMemory]:
    """A fresh memory that must account for every mapping when the test ends."""
    with create_memory(device, chunk_bytes) as created:
        yield created
        if created.device != "cpu":
            torch.cuda.synchronize()  # what the test queued last may still use what is unmapped now
        created.check_integrity()


@pytest.fixture(params=["token", "layer"])
def geometry(request: pytest.FixtureRequest, memory: VirtualMemory) -> KvGeometry:
    """Blocks of four tokens and two chunks, in both layouts."""
    return geometry_for(memory, request.param)


def geometry_for(memory: VirtualMemory, layout: Layout) -> KvGeometry:
    """Two layers and two heads of a size that makes a layer's piece of a block one chunk."""
    return KvGeometry(2, 2, memory.chunk_bytes // 64, "float32", block_tokens=4, layout=layout)


def used_bytes(memory: VirtualMemory) -> int:
    """How much memory the device, or the memory's file, has given out."""
    if memory.on_device:
        free, total = open_device(0).call("cuMemGetInfo")
        return int(total - free)
    fd = memory.export().open(0)
    try:
        return os.fstat(fd).st_blocks * 512
    finally:
        os.close(fd)


@pytest.fixture
def settle(memory: VirtualMemory) -> Callable[[], None]:
    """Waits for what torch has submitted; call it before unmapping."""
    return (lambda: None) if memory.device == "cpu" else torch.cuda.synchronize


@pytest.fixture(params=["at once", "in the background"])
def background(request: pytest.FixtureRequest) -> Iterator[ThreadPoolExecutor | None]:
    if request.param == "at once":
        yield None
        return
    with ThreadPoolExecutor(1) as executor:
        yield executor
