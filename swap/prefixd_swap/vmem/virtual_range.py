"""Contiguous addresses, and the chunks that are mapped on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from prefixd_swap.errors import MemoryMisuseError, SwapError
from prefixd_swap.number_runs import true_runs
from prefixd_swap.spans import Span

if TYPE_CHECKING:  # a daemon that makes no tensors starts without torch, in a fifth of the time
    import torch

    from prefixd_swap.vmem.base import ChunkIds, VirtualMemory

_UNMAPPED = -1


class VirtualRange:
    """`nbytes` contiguous addresses from `base`; offsets are bytes from there. Made by `VirtualMemory.reserve`."""

    def __init__(self, memory: VirtualMemory, base: int, nbytes: int) -> None:
        self.memory = memory
        self.base = base
        self.nbytes = nbytes
        # The chunk on each slot, as far as slots were ever used: most of a range may never be mapped.
        self._slots: ChunkIds = np.empty(0, np.int64)
        self._closed = False

    def map(self, offset: int, chunks: Sequence[int] | ChunkIds) -> None:
        """Map `chunks` one after the other from `offset`; all of them, or none when this raises.

        On host memory, chunks with consecutive ids cost one mapping of the kernel. Raises MemoryMisuseError, and
        OutOfMemoryError when the process has no mapping left.
        """
        ids = np.asarray(chunks, np.int64)
        with self.memory.lock:
            slots = self._slots_at(offset, len(ids) * self.memory.chunk_bytes)
            if (slots != _UNMAPPED).any():
                at = offset + int((slots != _UNMAPPED).argmax()) * self.memory.chunk_bytes
                raise MemoryMisuseError(f"a chunk is mapped at offset {at} already; unmap it first")
            self.memory.check_exists(ids)
            if not len(ids):
                return
            added = self._added_mappings(offset, ids)
            self.memory._take_mappings(added)
            try:
                self.memory._map(self.base + offset, ids)
            except SwapError:
                self.memory._give_mappings(added)
                raise
            slots[:] = ids
            np.add.at(self.memory._mapped, ids, 1)

    def unmap(self, offset: int, nbytes: int) -> None:
        """Unmap `nbytes` from `offset`, all of which must be mapped.

        The caller has made sure that nothing on the device still uses these addresses (see `Fence`). Raises
        MemoryMisuseError; OutOfMemoryError, with nothing unmapped, if unmapping splits a mapping of the kernel and the
        process has no mapping left.
        """
        with self.memory.lock:
            slots = self._slots_at(offset, nbytes)
            if (slots == _UNMAPPED).any():
                at = offset + int((slots == _UNMAPPED).argmax()) * self.memory.chunk_bytes
                raise MemoryMisuseError(f"nothing is mapped at offset {at}; unmap only what is mapped")
            if not len(slots):
                return
            self.memory._unmap(self.base + offset, len(slots))
            self.memory._give_mappings(-self._added_mappings(offset, np.full(len(slots), _UNMAPPED)))
            np.subtract.at(self.memory._mapped, slots, 1)
            slots[:] = _UNMAPPED

    def clear(self, offset: int, nbytes: int) -> None:
        """Unmap everything that is mapped on `nbytes` from `offset`, as by `unmap`. Can be repeated after an error."""
        with self.memory.lock:
            mapped = self._slots_at(offset, nbytes) != _UNMAPPED
            if mapped.all():  # nearly always, and finding runs takes as long as unmapping
                self.unmap(offset, nbytes)
                return
            for run in true_runs(mapped):
                self.unmap(offset + run.start * self.memory.chunk_bytes, len(run) * self.memory.chunk_bytes)

    def tensor(
        self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None, offset: int = 0
    ) -> torch.Tensor:
        """A view of these addresses, without a copy; `strides` in elements, contiguous if not given.

        The view may cover addresses on which nothing is mapped: touching those kills the process (host) or its context
        (CUDA). Do not use it after the range is closed. Raises MemoryMisuseError if it would leave the range.
        """
        self._check_open()
        if strides is None:
            strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        if len(strides) != len(shape) or min((*shape, *strides, offset), default=0) < 0:
            raise MemoryMisuseError(f"shape {tuple(shape)}, strides {tuple(strides)}, offset {offset} make no view")
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        end = offset + (last + 1) * dtype.itemsize if math.prod(shape) else offset
        if end > self.nbytes or offset % dtype.itemsize:
            raise MemoryMisuseError(
                f"a view of {dtype} {tuple(shape)} from byte {offset} ends at {end}; it must be aligned to "
                f"its elements and stay within the {self.nbytes} bytes of the range"
            )
        from prefixd_swap.vmem.dlpack import tensor_at

        return tensor_at(self.base + offset, shape, strides, dtype, self.memory.device)

    def span(self, offset: int, nbytes: int) -> Span:
        """`nbytes` bytes from `offset` for the copy engine; they must be mapped. Raises MemoryMisuseError."""
        chunk = self.memory.chunk_bytes
        start = offset - offset % chunk
        with self.memory.lock:
            unmapped = (self._slots_at(start, -(-(offset + nbytes - start) // chunk) * chunk) == _UNMAPPED).any()
        if unmapped:
            raise MemoryMisuseError(f"bytes {offset} to {offset + nbytes} are not all mapped; map them first")
        return Span(self.base + offset, nbytes, self.memory.on_device)

    @contextmanager
    def scratch(self, offsets: Sequence[int], nbytes: int) -> Iterator[None]:
        """Have memory of this process alone on `nbytes` from each of `offsets`: the same memory at all of them.

        For passes over addresses on which nothing is mapped yet, such as those that capture a CUDA graph when a worker
        starts: all chunks belong to the daemon, which may have KV in each. Nothing on the device uses the addresses
        when the context ends. Raises MemoryMisuseError if a chunk is mapped there, OutOfMemoryError.
        """
        memory = self.memory
        with memory.lock:
            for offset in offsets:
                if (self._slots_at(offset, nbytes) != _UNMAPPED).any():
                    raise MemoryMisuseError(f"chunks are mapped at offset {offset}; unmap them first")
            undo = memory._map_scratch([self.base + offset for offset in offsets], nbytes)
        try:
            yield
        finally:
            with memory.lock:
                undo()

    def mapped_chunks(self) -> ChunkIds:
        """The ids of all mapped chunks in the order of their addresses; one mapped twice appears twice."""
        mapped: ChunkIds = self._slots[self._slots != _UNMAPPED]
        return mapped

    def chunks(self, offset: int, nbytes: int) -> ChunkIds:
        """The ids of the chunks that are mapped on `nbytes` from `offset`; -1 where nothing is mapped."""
        with self.memory.lock:
            return self._slots_at(offset, nbytes).copy()

    def close(self) -> None:
        """Give the addresses back. Raises MemoryMisuseError while a chunk is mapped. Can be called twice."""
        with self.memory.lock:
            if self._closed:
                return
            mapped = len(self.mapped_chunks())
            if mapped:
                raise MemoryMisuseError(f"{mapped} chunks are mapped on this range; unmap them before closing it")
            self.memory._free(self.base, self.nbytes)
            self.memory._ranges.discard(self)
            self._closed = True

    def discard(self) -> None:
        """Unmap everything, then close: for the end of a memory, when nothing uses it any more."""
        with self.memory.lock:
            if not self._closed:
                self.clear(0, len(self._slots) * self.memory.chunk_bytes)
            self.close()

    def _slots_at(self, offset: int, nbytes: int) -> ChunkIds:
        """A writable view of the slots of `nbytes` from `offset`."""
        self._check_open()
        chunk = self.memory.chunk_bytes
        if offset % chunk or nbytes % chunk:
            raise MemoryMisuseError(f"offset {offset} and size {nbytes} must be multiples of the chunk, {chunk} bytes")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise MemoryMisuseError(f"bytes {offset} to {offset + nbytes} leave the range of {self.nbytes} bytes")
        start, stop = offset // chunk, (offset + nbytes) // chunk
        # `_added_mappings` also reads the slot after `stop`.
        missing = min(stop + 1, self.nbytes // chunk) - len(self._slots)
        if missing > 0:
            added = min(max(missing, len(self._slots)), self.nbytes // chunk - len(self._slots))
            self._slots = np.append(self._slots, np.full(added, _UNMAPPED, np.int64))
        slots: ChunkIds = self._slots[start:stop]
        return slots

    def _added_mappings(self, offset: int, slots: ChunkIds) -> int:
        """Kernel mappings that are added, or removed if negative, when `slots` is written from `offset`."""
        start = offset // self.memory.chunk_bytes
        before = self._slots[max(start - 1, 0) : start + len(slots) + 1]
        after = before.copy()
        after[min(start, 1) :][: len(slots)] = slots
        return _borders(after) - _borders(before)

    def _check_open(self) -> None:
        if self._closed:
            raise MemoryMisuseError("this range is closed; reserve another")


def _borders(slots: ChunkIds) -> int:
    """Number of neighbours between which one kernel mapping ends and another begins."""
    left, right = slots[:-1], slots[1:]
    apart = np.where((left == _UNMAPPED) | (right == _UNMAPPED), left != right, left + 1 != right)
    return int(np.count_nonzero(apart))
