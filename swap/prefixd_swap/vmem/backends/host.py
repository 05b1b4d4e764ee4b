"""Virtual memory in host memory: one memory file, mapped at chosen addresses.

A chunk is a part of the file, so its id is its offset divided by the chunk size. Neighbouring chunks with consecutive
ids merge into one mapping of the kernel. A process may have 65,530 mappings by default.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from prefixd_swap.errors import CreationStoppedError, MemoryMisuseError, OutOfMemoryError
from prefixd_swap.memory_limit import memory_bytes
from prefixd_swap.vmem.backends import linux
from prefixd_swap.vmem.backends.mapping_budget import PROCESS_MAPPINGS
from prefixd_swap.vmem.base import ChunkIds, Export, VirtualMemory
from prefixd_swap.vmem.fence import Fence, HostFence

_HUGE_PAGE_BYTES = 2 << 20
_ALLOCATE_BYTES = 256 << 20  # of one call; between two calls `stop_creating` is checked


class HostMemory(VirtualMemory):
    """Chunks in a memory file (`memfd`); `chunk_bytes` is a multiple of the page, by default one page.

    Raises MemoryMisuseError for a chunk that is not a multiple of the page.
    """

    def __init__(self, chunk_bytes: int | None = None) -> None:
        chunk_bytes = linux.PAGE_BYTES if chunk_bytes is None else chunk_bytes
        if chunk_bytes < 1 or chunk_bytes % linux.PAGE_BYTES:
            raise MemoryMisuseError(f"a chunk of {chunk_bytes} bytes is not a multiple of the page, {linux.PAGE_BYTES}")
        super().__init__(chunk_bytes, "cpu", on_device=False, owner=True)
        self._fd = os.memfd_create("prefixd-gpu-tier", os.MFD_CLOEXEC)

    @classmethod
    def attach(cls, chunk_bytes: int, runs: Sequence[Sequence[int]], fd: int) -> HostMemory:
        """The memory of another process, through its file; this object owns the descriptor from now on."""
        memory = cls.__new__(cls)
        VirtualMemory.__init__(memory, chunk_bytes, "cpu", on_device=False, owner=False)
        memory._fd = fd
        memory._enter_runs(runs)
        return memory

    def available_bytes(self) -> int:
        """Bytes that the system, or the control group, can give without swapping."""
        return linux.available_bytes()

    def total_bytes(self) -> int:
        """The machine's memory, or less where a control group allows less."""
        return memory_bytes()

    def _make_fence(self) -> Fence:
        return HostFence()

    def _create(self, chunks: range) -> None:
        offset, nbytes = chunks.start * self.chunk_bytes, len(chunks) * self.chunk_bytes
        available = linux.available_bytes()
        if nbytes > available:
            raise OutOfMemoryError(
                f"{nbytes} bytes of host memory are wanted, {available} are available; "
                "make the tier (or memory_limit) smaller"
            )
        try:
            # Allocates and zeroes every page now: otherwise the first write to 2 MiB takes 0.4 ms longer.
            for done in range(0, nbytes, _ALLOCATE_BYTES):
                self._check_creating()
                os.posix_fallocate(self._fd, offset + done, min(_ALLOCATE_BYTES, nbytes - done))
        except (OSError, CreationStoppedError) as error:
            with contextlib.suppress(OSError):  # the first error is the one to report
                os.ftruncate(self._fd, offset)
            if isinstance(error, CreationStoppedError):
                raise
            raise OutOfMemoryError(
                f"allocating {nbytes} bytes of host memory failed ({error.strerror}); "
                "make the tier (or memory_limit) smaller"
            ) from error

    def _destroy(self, chunks: range) -> None:
        linux.punch_hole(self._fd, chunks.start * self.chunk_bytes, len(chunks) * self.chunk_bytes)

    def _drop(self, chunks: range) -> None:
        """Nothing to release: only the owner cuts the file."""

    def _import(self, chunks: range, fds: Iterable[int]) -> None:
        """Nothing to import: the file, which this process has, contains the chunks."""

    def _reserve(self, nbytes: int) -> int:
        # Aligned to huge pages, so that the system can map a large run with them.
        return linux.reserve_addresses(nbytes, _HUGE_PAGE_BYTES)

    def _free(self, address: int, nbytes: int) -> None:
        linux.release_addresses(address, nbytes)

    def _map(self, address: int, chunks: ChunkIds) -> None:
        done = 0
        try:
            for first, count in _runs(chunks):
                nbytes = count * self.chunk_bytes
                linux.map_file(address + done, nbytes, self._fd, first * self.chunk_bytes)
                done += nbytes
        except OutOfMemoryError:
            if done:
                linux.unmap_to_reserved(address, done)
            raise

    def _take_mappings(self, count: int) -> None:
        PROCESS_MAPPINGS.take(count)

    def _give_mappings(self, count: int) -> None:
        PROCESS_MAPPINGS.give(count)

    def _unmap(self, address: int, count: int) -> None:
        linux.unmap_to_reserved(address, count * self.chunk_bytes)

    def _map_scratch(self, addresses: Sequence[int], nbytes: int) -> Callable[[], None]:
        self._take_mappings(2 * len(addresses))  # each may split a reservation in two
        fd = os.memfd_create("prefixd-scratch", os.MFD_CLOEXEC)
        mapped: list[int] = []

        def undo() -> None:
            for address in mapped:
                linux.unmap_to_reserved(address, nbytes)
            self._give_mappings(2 * len(addresses))

        try:
            os.ftruncate(fd, nbytes)
            for address in addresses:
                linux.map_file(address, nbytes, fd, 0)
                mapped.append(address)
        except BaseException:
            undo()
            raise
        finally:
            os.close(fd)  # the mappings keep the file
        return undo

    def _describe(self) -> dict[str, object]:
        return {"kind": "host"}

    def _export(self, meta: bytes, runs: Sequence[tuple[int, int]], further: bool) -> Export:
        return Export(meta, 0 if further else 1, lambda _: os.dup(self._fd))

    def _close(self) -> None:
        os.close(self._fd)


def _runs(chunks: ChunkIds) -> Iterator[tuple[int, int]]:
    """Ids as (first, count) of consecutive ones, in order: `[5, 6, 2]` -> `(5, 2), (2, 1)`."""
    starts = np.flatnonzero(np.diff(chunks, prepend=chunks[0] - 2) != 1)
    counts = np.diff(starts, append=len(chunks))
    yield from zip(chunks[starts].tolist(), counts.tolist(), strict=True)
