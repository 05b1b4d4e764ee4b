"""The kernel that moves the pages of all layers between a KV cache and a packed buffer, in one launch.

It is CUDA C (page_moves.cu), shipped as PTX that the driver compiles when it is loaded: so no launch needs torch,
Triton, or a compiler on the machine, and the tests' stand-in for the driver runs the same source with the same
arguments.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from prefixd_swap.vmem.backends.cuda_driver import CudaDevice, open_device

_PTX = Path(__file__).with_name("page_moves.ptx")
_THREADS = 256
_THREAD_BLOCKS = 32
"""They move some 600 GB/s, ten times what PCIe does, and leave most of a GPU to the model beside them."""


class PageKernel:
    """Launches the kernel in one direction: `gather` from the cache into the buffer, or the reverse.

    One thread uses it. Raises DeviceError where the driver does not take the kernel.
    """

    def __init__(self, cuda: CudaDevice, *, gather: bool) -> None:
        self._cuda = cuda
        self._name = "gather" if gather else "scatter"
        self._functions = _functions(cuda.ordinal)
        self._arguments = np.zeros(7, np.uint64)
        self._pointers = self._arguments.ctypes.data + 8 * np.arange(7, dtype=np.uint64)

    def launch(
        self,
        stream: Any,
        element: int,
        runs: int,
        run_count: int,
        ids: int,
        places: int,
        blocks: int,
        packed: int,
        part_bytes: int,
    ) -> None:
        """Moves `run_count` x `places` pages.

        Args:
            stream: the stream.
            element: 16, 4 or 1: every address, stride and size is a multiple.
            runs: device address of the table of runs, [run_count, 4] (`PackedPages.table`).
            run_count: number of runs.
            ids: device address of the block ids, int64 [places]; a negative one is left out.
            places: blocks of all parts.
            blocks: blocks of a part.
            packed: device address of the buffer.
            part_bytes: bytes of a part in it.
        """
        self._arguments[:] = (runs, ids, packed, part_bytes, run_count, places, blocks)
        grid = min(run_count * places, _THREAD_BLOCKS)
        function, arguments = self._functions[f"{self._name}_{element}"], int(self._pointers.ctypes.data)
        self._cuda.call("cuLaunchKernel", function, grid, 1, 1, _THREADS, 1, 1, 0, stream, arguments, 0)


@functools.cache
def _functions(ordinal: int) -> dict[str, Any]:
    """The kernels by name, for the life of the process, as the context of `open_device` is."""
    cuda = open_device(ordinal)
    module = cuda.call("cuModuleLoadData", _PTX.read_bytes() + b"\0")
    names = [f"{way}_{element}" for way in ("gather", "scatter") for element in (16, 4, 1)]
    return {name: cuda.call("cuModuleGetFunction", module, name.encode()) for name in names}
