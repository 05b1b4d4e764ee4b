"""Copies between pages that are scattered over a GPU and packed in host memory.

An engine's KV blocks are pages of tens of KiB, a region a layer, in any order; in host memory the pages of several
blocks are packed as one part. A prefix of 32K tokens of an 8B model has 65,536 pages: listing them as copies takes 200
ms of Python, and each page would be its own transfer. So one kernel a layer gathers them on the device into a staging
buffer, and one copy a part (2 MiB here) moves them to the host. Loads go the other way.

`cuMemcpyBatchAsync` needs no buffer, but it exists only from CUDA 12.8 on, needs every page listed too, and leaves the
transfers as small as they are. Gathering costs device bandwidth, and a device has 50 times more of it than of PCIe.

        pages (any order)            staging, packed                    host
        layer 0: [ b7 .. b2 .. ]     part 0: | L0 b7 b2 | L1 b7 b2 |    part 0 at any address
        layer 1: [ b7 .. b2 .. ] <-> part 1: | L0 b4 b9 | L1 b4 b9 |    part 1 at any address

`make gpu-check` runs it on a GPU; elsewhere the tests run it against a stand-in driver, with kernels on CPU tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from prefixd_swap.copies.copy_engine import wait_all
from prefixd_swap.copies.pinning import pieces
from prefixd_swap.errors import MemoryMisuseError, SwapError
from prefixd_swap.threads import started_threads
from prefixd_swap.vmem.cuda import CudaMemory
from prefixd_swap.vmem.cuda_driver import CudaDevice, open_device

if TYPE_CHECKING:
    import torch

Ids = npt.NDArray[np.int64]

NO_BLOCK = -1
"""In a list of block ids: this position is not copied."""

_STAGING_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PageRun:
    """The pages of one layer (or of one group of its heads).

    Block `b` of the engine has `nbytes` bytes at `address + b * stride`.
    """

    address: int
    stride: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PackedPages:
    """Pages on the device, and the addresses of the parts in host memory.

    A part is packed run by run; within a run the blocks follow each other.
    """

    runs: Sequence[PageRun]
    ids: Ids
    """[parts, blocks a part]: the blocks, no block twice; `NO_BLOCK` leaves a place out."""
    addresses: Ids
    """[parts]: the host address of each part."""

    @property
    def part_bytes(self) -> int:
        """Bytes of one part."""
        return int(self.ids.shape[1]) * sum(run.nbytes for run in self.runs)

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""
        return int(np.count_nonzero(self.ids != NO_BLOCK)) * sum(run.nbytes for run in self.runs)


class PageCopies:
    """Copies pages of the GPU `ordinal` in batches, each way on a stream and through a staging buffer of its own.

    Args:
        ordinal: the CUDA device.
        part_bytes: the longest part; the staging buffers hold at least one of them.

    Raises:
        DeviceError: there is no usable GPU.
        OutOfMemoryError: the GPU has no 128 MiB for the staging buffers, or the system no threads.
    """

    def __init__(self, ordinal: int, part_bytes: int = 0) -> None:
        self._memory = CudaMemory(ordinal)
        self._ways: list[_Way] = []
        try:
            for name in ("prefixd-gather", "prefixd-scatter"):
                self._ways.append(_Way(open_device(ordinal), self._memory, max(part_bytes, _STAGING_BYTES), name))
        except BaseException:
            self.close()
            raise

    async def gather(self, packed: PackedPages) -> None:
        """Copy pages to host memory; returns when the bytes are there.

        The bytes of the pages must be complete. When this returns or raises, also by cancellation, the memory is not
        touched any more. Raises MemoryMisuseError if a place has no block, DeviceError when the driver fails.
        """
        if (packed.ids == NO_BLOCK).any():
            raise MemoryMisuseError("a part that is saved needs a block in every place; leave the part out")
        await self._ways[0].run(packed, _Way.gather)

    async def scatter(self, packed: PackedPages) -> None:
        """Copy host memory to pages that nothing reads or writes any more. Otherwise as `gather`.

        When it returns, work that is submitted to any stream reads the new bytes.
        """
        await self._ways[1].run(packed, _Way.scatter)

    def close(self) -> None:
        """Wait for copies under way, end the threads and give streams and buffers back. Can be called twice."""
        while self._ways:
            self._ways.pop().close()
        self._memory.close()


class _Way:
    """One direction: a thread that submits, a stream and a staging buffer.

    The stream runs its work in order, so the buffer is filled again without waiting on the host.
    """

    def __init__(self, cuda: CudaDevice, memory: CudaMemory, staging_bytes: int, name: str) -> None:
        self._cuda = cuda
        self._device = memory.device
        chunks = -(-staging_bytes // memory.chunk_bytes)
        self._staging = memory.reserve(chunks * memory.chunk_bytes)
        self._staging.map(0, memory.create(chunks))
        self._pool = started_threads(1, name, cuda.use_context)
        try:
            with cuda.context():
                self._stream = cuda.call("cuStreamCreate", cuda.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
                self._event = cuda.create_event()
        except SwapError:
            self._pool.shutdown()
            raise

    async def run(self, packed: PackedPages, batch: Callable[[_Way, PackedPages], None]) -> None:
        if packed.part_bytes > self._staging.nbytes:
            raise MemoryMisuseError(
                f"a part of {packed.part_bytes} bytes is over the {self._staging.nbytes} that PageCopies was made for"
            )
        if packed.nbytes:
            await wait_all([self._pool.submit(self._submit, packed, batch)])

    def gather(self, packed: PackedPages) -> None:
        staged = self._view(packed)
        with self._kernels():
            gather_pages(packed.runs, packed.ids, staged, self._device)
        for host, device, nbytes in self._host_copies(packed):
            self._cuda.call("cuMemcpyDtoHAsync", host, device, nbytes, self._stream)

    def scatter(self, packed: PackedPages) -> None:
        staged = self._view(packed)
        for host, device, nbytes in self._host_copies(packed):
            self._cuda.call("cuMemcpyHtoDAsync", device, host, nbytes, self._stream)
        with self._kernels():
            scatter_pages(packed.runs, packed.ids, staged, self._device)

    def close(self) -> None:
        self._pool.shutdown()
        with self._cuda.context():
            self._cuda.call("cuStreamSynchronize", self._stream)
            self._cuda.destroy_event(self._event)
            self._cuda.call("cuStreamDestroy", self._stream)

    def _submit(self, packed: PackedPages, batch: Callable[[_Way, PackedPages], None]) -> None:
        step = self._staging.nbytes // packed.part_bytes
        try:
            for first in range(0, len(packed.ids), step):
                some = slice(first, first + step)
                batch(self, PackedPages(packed.runs, packed.ids[some], packed.addresses[some]))
            self._cuda.call("cuEventRecord", self._event, self._stream)
        except BaseException:
            # Some copies may be under way; the caller may free the memory as soon as this raises.
            self._cuda.api.cuStreamSynchronize(self._stream)
            raise
        self._cuda.call("cuEventSynchronize", self._event)

    def _view(self, packed: PackedPages) -> torch.Tensor:
        import torch

        return self._staging.tensor((len(packed.ids), packed.part_bytes), torch.uint8)

    def _host_copies(self, packed: PackedPages) -> Iterator[tuple[int, int, int]]:
        """(host address, staging address, bytes) of each copy; adjacent parts are one copy."""
        width = packed.part_bytes
        starts = np.flatnonzero(np.diff(packed.addresses, prepend=packed.addresses[0] - width - 1) != width)
        for first, count in zip(starts.tolist(), np.diff(starts, append=len(packed.addresses)).tolist(), strict=True):
            host, device = int(packed.addresses[first]), self._staging.base + first * width
            for offset, nbytes in pieces(host, count * width):
                yield host + offset, device + offset, nbytes

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        """Runs torch's kernels on the stream."""
        if self._device == "cpu":  # of the stand-in: torch computes at once there, and must not overtake the copies
            self._cuda.call("cuStreamSynchronize", self._stream)
            yield
            return
        import torch

        with torch.cuda.stream(torch.cuda.ExternalStream(int(self._stream), device=self._device)):
            yield


def gather_pages(runs: Sequence[PageRun], ids: Ids, staged: torch.Tensor, device: str) -> None:
    """Pack the pages of the blocks `ids` [parts, blocks a part] into `staged`, uint8 [parts, part's bytes]."""
    import torch

    rows = torch.from_numpy(ids.reshape(-1)).to(device)
    for pages, packed in _views(runs, ids, staged, device):
        packed.copy_(pages.index_select(0, rows).view(packed.shape))


def scatter_pages(runs: Sequence[PageRun], ids: Ids, staged: torch.Tensor, device: str) -> None:
    """The reverse of `gather_pages`; skips places of `NO_BLOCK`."""
    import torch

    flat = ids.reshape(-1)
    wanted = np.flatnonzero(flat != NO_BLOCK)
    rows = torch.from_numpy(flat[wanted]).to(device)
    places = None if len(wanted) == len(flat) else torch.from_numpy(wanted).to(device)
    for pages, packed in _views(runs, ids, staged, device):
        bytes_of = packed.reshape(len(flat), -1)
        pages.index_copy_(0, rows, bytes_of if places is None else bytes_of.index_select(0, places))


def _views(
    runs: Sequence[PageRun], ids: Ids, staged: torch.Tensor, device: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The pages of each run [blocks, elements] and their packed bytes [parts, blocks a part, elements].

    Elements are as large as alignment allows: a kernel that moves single bytes is slow.
    """
    import torch

    from prefixd_swap.vmem.dlpack import tensor_at

    parts, blocks = ids.shape
    rows = int(ids.max()) + 1
    at = 0
    for run in runs:
        common = math.gcd(run.address, run.stride, run.nbytes, at, staged.shape[1], staged.data_ptr())
        dtype = torch.int64 if common % 8 == 0 else torch.int32 if common % 4 == 0 else torch.uint8
        elements = run.nbytes // dtype.itemsize
        pages = tensor_at(run.address, (rows, elements), (run.stride // dtype.itemsize, 1), dtype, device)
        packed = staged[:, at : at + blocks * run.nbytes].view(dtype).view(parts, blocks, elements)
        yield pages, packed
        at += blocks * run.nbytes
