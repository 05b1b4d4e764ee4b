"""Copies between pages that are scattered over a GPU and packed in host memory.

An engine's KV blocks are pages of tens of KiB, a region a layer, in any order; in host memory the pages of several
blocks are packed as one part. A prefix of 32K tokens of an 8B model has 65,536 pages, and each would be its own
transfer. So one kernel moves the pages of all layers between the cache and a staging buffer, and one copy a row of
parts moves them to the host or from there. The buffer has two halves: the kernel fills one while the other is copied.

        pages (any order)            staging, packed                    host
        layer 0: [ b7 .. b2 .. ]     part 0: | L0 b7 b2 | L1 b7 b2 |    part 0 at any address
        layer 1: [ b7 .. b2 .. ] <-> part 1: | L0 b4 b9 | L1 b4 b9 |    part 1 at any address

        gather:   kernels   | half 0 | half 1 |        | half 0 |            scatter: the other way round
                  copies             | half 0 | half 1 |        | half 0 |

Where pages lie so that a strided copy has long rows (the layers of a block together, or the blocks of a part one behind
the other), there is neither kernel nor staging: see `PackedPages.without_packing`.

The kernel reads no host memory: where kernels read pinned memory beside FlashAttention 3, SGLang saw faults and went
back to staging (sglang#20611). `cuMemcpyBatchAsync` needs no buffer, but only from CUDA 12.8 on, and every page listed;
`benchmarks.gpu` compares it.

`make gpu-check` runs it on a GPU; elsewhere the tests run it against a stand-in driver, which runs the same kernel.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from prefixd_swap.copies.copy_engine import StreamMark
from prefixd_swap.copies.kernel_check import check_kernel
from prefixd_swap.copies.page_kernel import PageKernel
from prefixd_swap.copies.page_runs import NO_BLOCK, Ids, PackedPages
from prefixd_swap.copies.strided_copies import Rows, StridedCopies, evenly_spaced
from prefixd_swap.errors import MemoryMisuseError, SwapError
from prefixd_swap.threads import started_threads, wait_all
from prefixd_swap.vmem.backends.cuda import CudaMemory
from prefixd_swap.vmem.backends.cuda_driver import CudaDevice, open_device, register_host, unregister_host

_HALF_BYTES = 32 << 20
_TABLE_BYTES = 2 << 20
_ALIGNED = 256
_ROW_BYTES, _CALL_BYTES = 64 << 10, 1 << 20  # not yet measured: see the part "pages" of `benchmarks.gpu`

Submitted = Callable[[int, StreamMark], None]


class PageCopies:
    """Copies pages of the GPU `ordinal` in batches, each way on streams and through a staging buffer of its own.

    Args:
        ordinal: the CUDA device.
        part_bytes: the longest part; each half of a staging buffer holds at least one of them.
        row_bytes: rows from this length on are copied without a kernel; None: none are.
        call_bytes: the least bytes of such a copy.

    Raises:
        DeviceError: there is no usable GPU, its driver does not take the kernel, or this moves wrong bytes there.
        OutOfMemoryError: the GPU has no 132 MiB for the staging buffers, or the system no threads.
    """

    def __init__(
        self,
        ordinal: int,
        part_bytes: int = 0,
        *,
        row_bytes: int | None = _ROW_BYTES,
        call_bytes: int = _CALL_BYTES,
    ) -> None:
        self._memory = CudaMemory(ordinal)
        self._ways: list[_Way] = []
        half_bytes = -(-max(part_bytes, _HALF_BYTES) // _ALIGNED) * _ALIGNED
        try:
            for gather in (True, False):
                self._ways.append(_Way(open_device(ordinal), self._memory, half_bytes, gather))
            with open_device(ordinal).context():
                check_kernel(open_device(ordinal), self._memory, self._ways[0].now, self._ways[1].now)
        except BaseException:
            self.close()
            raise
        for way in self._ways:
            way.without_packing = None if row_bytes is None else (row_bytes, call_bytes)

    async def gather(self, packed: PackedPages) -> None:
        """Copy pages to host memory; returns when the bytes are there.

        The bytes of the pages must be complete. When this returns or raises, also by cancellation, the memory is not
        touched any more. Raises MemoryMisuseError if a place has no block, DeviceError when the driver fails.
        """
        if (packed.ids == NO_BLOCK).any():
            raise MemoryMisuseError("a part that is saved needs a block in every place; leave the part out")
        await self._ways[0].run([packed], None)

    async def scatter(self, packed: PackedPages) -> None:
        """Copy host memory to pages that nothing reads or writes any more. Otherwise as `gather`.

        When it returns, work that is submitted to any stream reads the new bytes.
        """
        await self._ways[1].run([packed], None)

    async def scatter_in_turn(self, several: Sequence[PackedPages], submitted: Submitted) -> None:
        """As `scatter`, of several, one after the other: of a model's layers, for example.

        Args:
            several: the copies.
            submitted: called in a thread with the index of each once it is submitted, and a mark behind it: work that
                is submitted to a stream behind `mark.hold(stream)` reads its bytes.
        """
        await self._ways[1].run(several, submitted)

    def close(self) -> None:
        """Wait for copies under way, end the threads and give streams and buffers back. Can be called twice."""
        while self._ways:
            self._ways.pop().close()
        self._memory.close()


class _Way:
    """One direction: a thread that submits, a stream for kernels, one for copies, and a staging buffer.

        | tables: runs and ids | half 0 | half 1 |

    The streams wait for each other by events, so the thread submits everything and waits once, at the end.
    """

    def __init__(self, cuda: CudaDevice, memory: CudaMemory, half_bytes: int, gather: bool) -> None:
        self._cuda = cuda
        self._gather = gather
        self.without_packing: tuple[int, int] | None = None
        """Arguments of `PackedPages.without_packing`; None: all pages are packed."""
        self._halves = [_TABLE_BYTES, _TABLE_BYTES + half_bytes]
        self._half_bytes = half_bytes
        chunks = -(-(_TABLE_BYTES + 2 * half_bytes) // memory.chunk_bytes)
        self._staging = memory.reserve(chunks * memory.chunk_bytes)
        self._staging.map(0, memory.create(chunks))
        self._tables = np.frombuffer(mmap.mmap(-1, _TABLE_BYTES), np.uint8)
        self._tables_used = 0
        self._next_half = 0
        self._streams: list[Any] = []
        self._events: list[Any] = []
        self._pool = started_threads(1, f"prefixd-{'gather' if gather else 'scatter'}", cuda.use_context)
        try:
            with cuda.context():
                for _ in range(2):
                    self._streams.append(cuda.call("cuStreamCreate", cuda.api.CUstream_flags.CU_STREAM_NON_BLOCKING))
                for _ in range(6):
                    self._events.append(cuda.create_event())
                self._kernel = PageKernel(cuda, gather=gather)
            register_host(self._tables.ctypes.data, _TABLE_BYTES, cuda.ordinal)
        except SwapError:
            self._pool.shutdown()
            self._give_back()
            raise
        self._kernels, self._copies = self._streams
        self._filled, self._emptied = self._events[:2], self._events[2:4]  # of each half
        self._host = StridedCopies(cuda, self._copies, to_device=not gather)
        self._upload = StridedCopies(cuda, self._kernels, to_device=True)

    async def run(self, several: Sequence[PackedPages], submitted: Submitted | None) -> None:
        for packed in several:
            if packed.part_bytes > self._half_bytes:
                raise MemoryMisuseError(
                    f"a part of {packed.part_bytes} bytes is over the {self._half_bytes} that PageCopies was made for"
                )
        if any(packed.nbytes for packed in several):
            await wait_all([self._pool.submit(self._submit, several, submitted)])

    def now(self, packed: PackedPages) -> None:
        """As `run`, in the calling thread, which has the context."""
        self._submit([packed], None)

    def close(self) -> None:
        self._pool.shutdown()
        unregister_host(self._tables.ctypes.data, self._cuda.ordinal)
        self._give_back()

    def _give_back(self) -> None:
        with self._cuda.context():
            while self._streams:
                self._cuda.call("cuStreamSynchronize", self._streams[-1])
                self._cuda.call("cuStreamDestroy", self._streams.pop())
            while self._events:
                self._cuda.destroy_event(self._events.pop())

    def _submit(self, several: Sequence[PackedPages], submitted: Submitted | None) -> None:
        self._tables_used = 0  # everything of the last run has ended
        try:
            for index, packed in enumerate(several):
                if packed.nbytes:
                    self._submit_one(packed.in_order())
                self._follow(self._events[4], self._copies, self._kernels)
                if submitted is not None:
                    submitted(index, StreamMark(self._cuda.ordinal, int(self._kernels)))
            self._cuda.call("cuEventRecord", self._events[5], self._kernels)
        except BaseException:
            # Some copies may be under way; the caller may free the memory as soon as this raises.
            for stream in self._streams:
                self._cuda.api.cuStreamSynchronize(stream)
            raise
        self._cuda.call("cuEventSynchronize", self._events[5])

    def _submit_one(self, packed: PackedPages) -> None:
        staged: PackedPages | None = packed
        if self.without_packing is not None:
            direct, staged = packed.without_packing(*self.without_packing)
            for rows in direct:
                self._host.submit(rows)
        if staged is None:
            return
        most = max(1, _TABLE_BYTES // 2 // (8 * staged.ids.shape[1]))  # parts whose ids fit into half of the tables
        for first in range(0, len(staged.ids), most):
            some = slice(first, first + most)
            self._submit_staged(PackedPages(staged.runs, staged.ids[some], staged.addresses[some]))

    def _submit_staged(self, packed: PackedPages) -> None:
        part_bytes, blocks = packed.part_bytes, packed.ids.shape[1]
        runs_at, ids_at = self._put_tables(packed.table(), packed.ids)
        element = packed.element()
        step = self._half_bytes // part_bytes
        for first in range(0, len(packed.ids), step):
            parts = min(step, len(packed.ids) - first)
            half, self._next_half = self._next_half, 1 - self._next_half
            staging = self._staging.base + self._halves[half]

            def launch(first: int = first, parts: int = parts, staging: int = staging) -> None:
                ids, places = ids_at + 8 * first * blocks, parts * blocks
                of_ids = (ids, places, blocks)
                self._kernel.launch(self._kernels, element, runs_at, len(packed.runs), *of_ids, staging, part_bytes)

            if self._gather:
                self._cuda.call("cuStreamWaitEvent", self._kernels, self._emptied[half], 0)
                launch()
                self._follow(self._filled[half], self._kernels, self._copies)
                self._copy(packed.addresses[first : first + parts], part_bytes, staging)
                self._cuda.call("cuEventRecord", self._emptied[half], self._copies)
            else:
                self._cuda.call("cuStreamWaitEvent", self._copies, self._emptied[half], 0)
                self._copy(packed.addresses[first : first + parts], part_bytes, staging)
                self._follow(self._filled[half], self._copies, self._kernels)
                launch()
                self._cuda.call("cuEventRecord", self._emptied[half], self._kernels)

    def _copy(self, addresses: Ids, part_bytes: int, staging: int) -> None:
        """Copies parts between the host and `staging`, in which they follow each other."""
        for first, count, pitch in evenly_spaced(addresses, part_bytes):
            device = staging + first * part_bytes
            self._host.submit(Rows(int(addresses[first]), device, part_bytes, count, pitch, part_bytes))

    def _put_tables(self, runs: Ids, ids: Ids) -> tuple[int, int]:
        """Uploads the tables in front of the kernels; returns their device addresses."""
        nbytes = runs.nbytes + ids.nbytes
        if nbytes > _TABLE_BYTES:
            raise MemoryMisuseError(
                f"{len(runs)} runs and {ids.size} blocks have tables of {nbytes} bytes, over the {_TABLE_BYTES} that "
                "PageCopies has; make the parts smaller"
            )
        if self._tables_used + nbytes > _TABLE_BYTES:
            self._cuda.call("cuStreamSynchronize", self._kernels)
            self._tables_used = 0
        at, end = self._tables_used, self._tables_used + nbytes
        self._tables[at : at + runs.nbytes] = runs.reshape(-1).view(np.uint8)
        self._tables[at + runs.nbytes : end] = np.ascontiguousarray(ids).reshape(-1).view(np.uint8)
        self._tables_used = -(-end // 16) * 16
        device = self._staging.base + at
        self._upload.submit(Rows(int(self._tables.ctypes.data) + at, device, nbytes, 1, nbytes, nbytes))
        return device, device + runs.nbytes

    def _follow(self, event: Any, stream: Any, follower: Any) -> None:
        """What is submitted to `follower` from now on waits for what `stream` holds."""
        self._cuda.call("cuEventRecord", event, stream)
        self._cuda.call("cuStreamWaitEvent", follower, event, 0)
