"""Whether the kernel for pages moves the right bytes on this GPU, asked once before it moves any that count."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from prefixd_swap.copies.page_runs import NO_BLOCK, PackedPages, PageRun
from prefixd_swap.errors import DeviceError
from prefixd_swap.vmem.backends.cuda_driver import CudaDevice
from prefixd_swap.vmem.base import VirtualMemory

Move = Callable[[PackedPages], None]

_PAGES, _BLOCKS = 9, 2
_PAGE_BYTES = (20 << 10, 6004, 1501)  # elements of 16, 4 and 1 bytes, in rounds of four and a rest


def check_kernel(cuda: CudaDevice, memory: VirtualMemory, gather: Move, scatter: Move) -> None:
    """Packs and unpacks pages of known bytes by every variant of the kernel, in two runs of different sizes.

    The caller's thread has the context. Raises DeviceError when a byte is wrong, with the variant.
    """
    random = np.random.default_rng(0)
    cache = memory.reserve(memory.chunk_bytes)
    chunks = memory.create(1)
    cache.map(0, chunks)
    try:
        for page_bytes in _PAGE_BYTES:
            _check(cuda, cache.base, page_bytes, random, gather, scatter)
    finally:
        cache.discard()
        memory.destroy(chunks)


def _check(
    cuda: CudaDevice, base: int, page_bytes: int, random: np.random.Generator, gather: Move, scatter: Move
) -> None:
    sizes = (page_bytes, page_bytes - 16)
    runs = [PageRun(base, page_bytes, sizes[0]), PageRun(base + _PAGES * page_bytes, page_bytes, sizes[1])]
    before, after = (random.integers(0, 256, (2, _PAGES, page_bytes), np.uint8) for _ in range(2))
    ids = random.permutation(_PAGES)[:6].reshape(3, _BLOCKS)
    arena = np.zeros((3, _BLOCKS * sum(sizes)), np.uint8)
    packed = PackedPages(runs, ids, arena.ctypes.data + arena.shape[1] * np.arange(3))
    wanted = [np.concatenate([before[run, row, :size].ravel() for run, size in enumerate(sizes)]) for row in ids]
    _copy(cuda, "cuMemcpyHtoDAsync", base, before.ctypes.data, before.nbytes)
    gather(packed)
    right = np.array_equal(arena, np.stack(wanted))
    _copy(cuda, "cuMemcpyHtoDAsync", base, after.ctypes.data, after.nbytes)
    packed.ids[1, 0] = NO_BLOCK
    scatter(packed)
    seen = np.empty_like(after)
    _copy(cuda, "cuMemcpyDtoHAsync", seen.ctypes.data, base, seen.nbytes)
    for run, size in enumerate(sizes):
        moved = packed.ids[packed.ids != NO_BLOCK]
        after[run, moved, :size] = before[run, moved, :size]
    if not right or not np.array_equal(seen, after):
        raise DeviceError(
            f"the kernel that packs pages gives wrong bytes on {cuda.name} (elements of {packed.element()} bytes); "
            "report the GPU and its driver's version"
        )


def _copy(cuda: CudaDevice, call: str, to: int, at: int, nbytes: int) -> None:
    cuda.call(call, to, at, nbytes, 0)
    cuda.call("cuStreamSynchronize", 0)
