"""Virtual memory on a GPU through CUDA's driver API.

One chunk is one allocation, since `cuMemMap` takes no offset into an allocation. The expensive calls (`benchmarks.gpu`,
on an H100) are `cuMemSetAccess` (24 to 32 us a chunk), `cuMemUnmap` (16 to 19) and creating (12 to 18). They take as
long for chunks of 2 MiB as for 128 MiB, so larger chunks map the same bytes in fewer calls; one call for a run of
chunks saves only Python's time. Releasing takes 13 us, and 95 for 128 MiB. Chunks are created once and recycled by the
pool above.

The device gets a chunk's memory back when every process that attached it has unmapped it and released its handle: by
`destroy` in the owner, by `drop` in the others.

`make gpu-check` runs it on a GPU; elsewhere the tests run it against a stand-in driver.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prefixd_swap.errors import MemoryMisuseError, OutOfMemoryError, SwapError, TransferError
from prefixd_swap.vmem.backends.cuda_driver import CudaDevice, open_device
from prefixd_swap.vmem.base import ChunkIds, Export, VirtualMemory
from prefixd_swap.vmem.fence import CudaFence, Fence


class CudaMemory(VirtualMemory):
    """Chunks on one GPU; `chunk_bytes` is a multiple of the device's granularity (2 MiB), which is the default.

    Raises DeviceError without a usable GPU, MemoryMisuseError for a chunk the device cannot allocate.
    """

    def __init__(self, ordinal: int = 0, chunk_bytes: int | None = None) -> None:
        cuda = open_device(ordinal)
        cuda.use_context()
        properties = _shareable(cuda)
        minimum = cuda.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = int(cuda.call("cuMemGetAllocationGranularity", properties, minimum))
        chunk_bytes = granularity if chunk_bytes is None else chunk_bytes
        if chunk_bytes < 1 or chunk_bytes % granularity:
            raise MemoryMisuseError(f"a chunk of {chunk_bytes} bytes is not a multiple of the device's {granularity}")
        super().__init__(chunk_bytes, cuda.tensor_device, on_device=True, owner=True)
        self._setup(cuda)
        self._properties = properties

    @classmethod
    def attach(cls, ordinal: int, chunk_bytes: int, runs: Sequence[Sequence[int]], fds: Iterable[int]) -> CudaMemory:
        """The chunks of another process; imports and closes the descriptors of `fds` one by one.

        Raises TransferError when there are fewer descriptors than chunks.
        """
        memory = cls.__new__(cls)
        cuda = open_device(ordinal)
        VirtualMemory.__init__(memory, chunk_bytes, cuda.tensor_device, on_device=True, owner=False)
        memory._setup(cuda)
        descriptors = iter(fds)
        try:
            for first, count in runs:
                memory._import(range(first, first + count), descriptors)
            memory._enter_runs(runs)
        except BaseException:
            memory.close()
            raise
        return memory

    def available_bytes(self) -> int:
        """cuMemGetInfo's free bytes."""
        self._cuda.use_context()
        return int(self._cuda.call("cuMemGetInfo")[0])

    def total_bytes(self) -> int:
        """cuMemGetInfo's total bytes."""
        self._cuda.use_context()
        return int(self._cuda.call("cuMemGetInfo")[1])

    def _make_fence(self) -> Fence:
        return CudaFence(self._cuda)

    def _setup(self, cuda: CudaDevice) -> None:
        api = cuda.api
        self._cuda = cuda
        self._handles: dict[int, Any] = {}
        self._fd_type = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._access = api.CUmemAccessDesc()
        self._access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._access.location.id = cuda.ordinal
        self._access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def _create(self, chunks: range) -> None:
        self._cuda.use_context()
        nbytes = len(chunks) * self.chunk_bytes
        free, total = self._cuda.call("cuMemGetInfo")
        if nbytes > free:
            raise OutOfMemoryError(
                f"{nbytes} bytes are wanted on {self._cuda.name}, {free} of its {total} bytes are free; "
                "make the GPU tier smaller, or end what else uses this GPU (nvidia-smi)"
            )
        try:
            for chunk in chunks:
                self._check_creating()
                self._handles[chunk] = self._cuda.call("cuMemCreate", self.chunk_bytes, self._properties, 0)
        except SwapError:
            self._drop(chunks)
            raise

    def _destroy(self, chunks: range) -> None:
        self._drop(chunks)

    def _drop(self, chunks: range) -> None:
        self._cuda.use_context()
        for chunk in chunks:
            if chunk in self._handles:
                self._cuda.call("cuMemRelease", self._handles[chunk])
                del self._handles[chunk]  # only now: after a failure, the next call releases it again

    def _import(self, chunks: range, fds: Iterable[int]) -> None:
        self._cuda.use_context()
        descriptors = iter(fds)
        try:
            for chunk in chunks:
                fd = next(descriptors, None)
                if fd is None:
                    raise TransferError(f"no descriptor came for chunk {chunk}; send one for each of the chunks")
                try:
                    handle = self._cuda.call("cuMemImportFromShareableHandle", fd, self._fd_type)
                finally:
                    os.close(fd)
                self._handles[chunk] = handle
        except BaseException:
            self._drop(chunks)
            raise

    def _reserve(self, nbytes: int) -> int:
        self._cuda.use_context()
        return int(self._cuda.call("cuMemAddressReserve", nbytes, 0, 0, 0))

    def _free(self, address: int, nbytes: int) -> None:
        self._cuda.use_context()
        self._cuda.call("cuMemAddressFree", address, nbytes)

    def _map(self, address: int, chunks: ChunkIds) -> None:
        self._cuda.use_context()
        size, done = self.chunk_bytes, 0
        try:
            for chunk in chunks.tolist():
                self._cuda.call("cuMemMap", address + done * size, size, 0, self._handles[chunk], 0)
                done += 1
            self._cuda.call("cuMemSetAccess", address, done * size, [self._access], 1)
        except SwapError:
            if done:
                self._unmap(address, done)
            raise

    def _take_mappings(self, count: int) -> None:
        """The kernel does not count the driver's mappings."""

    def _give_mappings(self, count: int) -> None:
        """The kernel does not count the driver's mappings."""

    def _unmap(self, address: int, count: int) -> None:
        # One call unmaps a run, as long as it covers whole mappings and nothing else; NVIDIA's sample vectorAddMMAP
        # does the same.
        self._cuda.use_context()
        self._cuda.call("cuMemUnmap", address, count * self.chunk_bytes)

    def _map_scratch(self, addresses: Sequence[int], nbytes: int) -> Callable[[], None]:
        self._cuda.use_context()
        size, handles, mapped = self.chunk_bytes, list[Any](), list[int]()

        def undo() -> None:
            self._cuda.use_context()
            for address in mapped:
                self._cuda.call("cuMemUnmap", address, size)
            for handle in handles:
                self._cuda.call("cuMemRelease", handle)

        try:
            for _ in range(nbytes // size):
                handles.append(self._cuda.call("cuMemCreate", size, _shareable(self._cuda), 0))
            for address in addresses:
                for index, handle in enumerate(handles):
                    self._cuda.call("cuMemMap", address + index * size, size, 0, handle, 0)
                    mapped.append(address + index * size)
                self._cuda.call("cuMemSetAccess", address, nbytes, [self._access], 1)
        except BaseException:
            undo()
            raise
        return undo

    def _describe(self) -> dict[str, object]:
        return {"kind": "cuda", "ordinal": self._cuda.ordinal}

    def _export(self, meta: bytes, runs: Sequence[tuple[int, int]], further: bool) -> Export:
        ids = [chunk for first, count in runs for chunk in range(first, first + count)]
        return Export(meta, len(ids), lambda index: self._open(ids[index]))

    def _open(self, chunk: int) -> int:
        self._cuda.use_context()
        return int(self._cuda.call("cuMemExportToShareableHandle", self._handles[chunk], self._fd_type, 0))

    def _close(self) -> None:
        self._cuda.use_context()
        for handle in self._handles.values():
            self._cuda.call("cuMemRelease", handle)
        self._handles.clear()


def _shareable(cuda: CudaDevice) -> Any:
    """Properties of an allocation that can be exported; the driver needs them when it creates the allocation."""
    api = cuda.api
    properties = api.CUmemAllocationProp()
    properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = cuda.ordinal
    properties.requestedHandleTypes = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return properties
