"""Virtual memory in chunks: the contract, and the accounting that both implementations share.

Physical memory comes in chunks of one size. A range is a run of reserved addresses; chunks are mapped
anywhere on it, and one chunk can be mapped at many addresses, in many ranges and in many processes (vTensor,
section 5).
"""

from __future__ import annotations

import json
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

import numpy as np
import numpy.typing as npt

from prefixd_swap.errors import CreationStoppedError, IntegrityError, MemoryMisuseError, SwapError, TransferError
from prefixd_swap.spans import Span
from prefixd_swap.vmem.fence import Fence

if TYPE_CHECKING:  # a daemon that makes no tensors starts without torch, in a fifth of the time
    import torch

ChunkId = NewType("ChunkId", int)
FrameId = NewType("FrameId", int)
ChunkIds = npt.NDArray[np.int64]

_UNMAPPED = -1
_ABSENT = -1


@dataclass(frozen=True, slots=True)
class Export:
    """What another process needs to attach a memory: `meta`, and `count` descriptors opened one by one.

    Descriptors are opened when they are sent, since a GPU tier has more chunks than a process may hold files.
    """

    meta: bytes
    count: int
    open: Callable[[int], int]


class VirtualMemory(ABC):
    """Chunks of physical memory and the ranges they are mapped on. Safe to use from several threads.

    Every misuse raises MemoryMisuseError, the same on every implementation, and leaves the memory as it was.
    """

    backed = True
    """Whether there are bytes; see `Tier.backed`."""

    def __init__(self, chunk_bytes: int, device: str, on_device: bool, owner: bool) -> None:
        self.chunk_bytes = chunk_bytes
        self.device = device
        self.on_device = on_device
        self.owner = owner
        self.lock = threading.RLock()
        self._mapped: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._ranges: set[VirtualRange] = set()
        self._fences: list[Fence] = []
        self._stopped = threading.Event()
        self._closed = False

    def create(self, count: int) -> range:
        """Create `count` chunks with consecutive ids and memory behind them; ids are never used twice.

        It takes up to 200 us a chunk, so many are created in a thread. Raises OutOfMemoryError when there is not
        enough memory, CreationStoppedError after `stop_creating`, both with nothing created.
        """
        with self.lock:
            self._check_usable(owner=True)
            if count < 1:
                raise MemoryMisuseError(f"cannot create {count} chunks; the count must be positive")
            created = range(len(self._mapped), len(self._mapped) + count)
            self._create(created)
            self._mapped = np.append(self._mapped, np.zeros(count, np.int32))
            return created

    def stop_creating(self) -> None:
        """End a `create` that runs in another thread, and refuse later ones: for the end of a process."""
        self._stopped.set()

    def destroy(self, chunks: range) -> None:
        """Give the memory of `chunks` back. They must not be mapped in this process.

        On CUDA the device has it back once every process that attached them has dropped them too; on host memory it
        has at once, and a process that still maps one would take memory again by touching it. Raises DeviceError,
        with the chunks as they were, when the device does not take it: call it again.
        """
        with self.lock:
            self._check_usable(owner=True)
            counts = self._unmapped(chunks, "destroying")
            self._destroy(chunks)
            counts[:] = _ABSENT

    def drop(self, chunks: range) -> None:
        """In a process that attached the memory: give its hold on `chunks` up; they do not exist here any more.

        They must not be mapped in this process. Raises MemoryMisuseError, also in the owner, which destroys.
        """
        with self.lock:
            self._check_attached()
            counts = self._unmapped(chunks, "dropping")
            self._drop(chunks)
            counts[:] = _ABSENT

    def reserve(self, nbytes: int) -> VirtualRange:
        """Reserve contiguous addresses, a whole number of chunks, with nothing mapped on them.

        Raises OutOfMemoryError when the address space is used up.
        """
        with self.lock:
            self._check_usable()
            if nbytes < 1 or nbytes % self.chunk_bytes:
                raise MemoryMisuseError(f"{nbytes} bytes are not a whole number of chunks of {self.chunk_bytes} bytes")
            reserved = VirtualRange(self, self._reserve(nbytes), nbytes)
            self._ranges.add(reserved)
            return reserved

    def export(self) -> Export:
        """Everything a process needs to attach the chunks that exist now, under the same ids."""
        with self.lock:
            self._check_usable(owner=True)
            edges = np.flatnonzero(np.diff(self._mapped != _ABSENT, prepend=False, append=False))
            runs = [(int(start), int(stop - start)) for start, stop in edges.reshape(-1, 2)]
            return self._export(self._meta(runs), runs, further=False)

    def export_run(self, chunks: range) -> Export:
        """Everything that a process which attached this memory before needs to adopt `chunks` too."""
        with self.lock:
            self._check_usable(owner=True)
            self._check_run(chunks)
            runs = [(chunks.start, len(chunks))]
            return self._export(self._meta(runs), runs, further=True)

    def adopt(self, meta: bytes, fds: Iterable[int]) -> range:
        """In a process that attached the memory: take in the further chunks that the owner's `export_run` describes.

        They have the owner's ids. `fds` is what `recv_export` gives, or a list; every descriptor taken from it
        belongs to this memory. Mapping and unmapping goes on in other threads meanwhile; only one thread adopts at a
        time. Raises TransferError for a description of another memory or too few descriptors, MemoryMisuseError for
        chunks that are here already, all with nothing adopted.
        """
        chunks = self._further(meta)
        with self.lock:
            self._check_attached()
            self._check_absent(chunks)
        self._import(chunks, fds)
        with self.lock:
            if self._closed:
                self._drop(chunks)
            self._check_usable()
            added = max(0, chunks.stop - len(self._mapped))
            self._mapped = np.append(self._mapped, np.full(added, _ABSENT, np.int32))
            self._mapped[chunks.start : chunks.stop] = 0
            return chunks

    def fence(self) -> Fence:
        """A new fence for work that must wait for what still uses this memory; it ends with the memory."""
        with self.lock:
            self._check_usable()
            made = self._make_fence()
            self._fences.append(made)
            return made

    @abstractmethod
    def available_bytes(self) -> int:
        """Bytes of the device from which chunks could be created now. It asks the system: for a thread."""

    @abstractmethod
    def total_bytes(self) -> int:
        """Bytes that the device has in all: there can never be more chunks."""

    @property
    def chunk_count(self) -> int:
        """How many chunks exist."""
        return int(np.count_nonzero(self._mapped != _ABSENT))

    def mapping_counts(self, chunks: ChunkIds) -> npt.NDArray[np.int32]:
        """On how many places each of `chunks` is mapped in this process. Raises MemoryMisuseError if one does not
        exist."""
        with self.lock:
            self.check_exists(chunks)
            return self._mapped[chunks]

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the count of every chunk's mappings is what the ranges hold."""
        with self.lock:
            found = np.where(self._mapped == _ABSENT, _ABSENT, 0).astype(np.int32)
            for reserved in self._ranges:
                np.add.at(found, reserved.mapped_chunks(), 1)
            if not np.array_equal(found, self._mapped):
                chunk = int((found != self._mapped).argmax())
                counted = int(self._mapped[chunk])
                raise IntegrityError(f"chunk {chunk} is counted as mapped {counted} times, but is {found[chunk]} times")

    def close(self) -> None:
        """Close the fences, unmap and free every range and give all memory back; further use is refused. Can be
        called twice."""
        with self.lock:
            if self._closed:
                return
            for fence in self._fences:
                fence.close()
            for reserved in list(self._ranges):
                reserved.discard()
            self._close()
            self._closed = True

    def __enter__(self) -> VirtualMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def exist(self, chunks: ChunkIds) -> npt.NDArray[np.bool_]:
        """Whether each of `chunks` exists."""
        with self.lock:
            exist = (chunks >= 0) & (chunks < len(self._mapped))
            exist[exist] = self._mapped[chunks[exist]] != _ABSENT
            return exist

    def check_exists(self, chunks: ChunkIds) -> None:
        """Raise MemoryMisuseError if one of `chunks` does not exist."""
        missing = ~self.exist(chunks)
        if missing.any():
            raise MemoryMisuseError(f"chunk {chunks[missing][0]} does not exist; {self.chunk_count} chunks do")

    def _adopt(self, runs: Sequence[Sequence[int]]) -> None:
        size = max((first + count for first, count in runs), default=0)
        self._mapped = np.full(size, _ABSENT, np.int32)
        for first, count in runs:
            self._mapped[first : first + count] = 0

    def _check_usable(self, owner: bool = False) -> None:
        if self._closed:
            raise MemoryMisuseError("this memory is closed; create or attach another")
        if owner and not self.owner:
            raise MemoryMisuseError("this memory is attached; only the process that created it can do that")

    def _check_attached(self) -> None:
        self._check_usable()
        if self.owner:
            raise MemoryMisuseError("this memory is the process's own; only one that attached it can do that")

    def _check_creating(self) -> None:
        if self._stopped.is_set():
            raise CreationStoppedError("creating chunks was stopped; nothing more is created on this memory")

    def _check_run(self, chunks: range) -> None:
        if chunks.step != 1:
            raise MemoryMisuseError(f"{chunks} is not a run of consecutive chunks")
        self.check_exists(np.asarray(chunks, np.int64))

    def _unmapped(self, chunks: range, before: str) -> npt.NDArray[np.int32]:
        """The counts of `chunks`, all zero. Raises MemoryMisuseError if they are not."""
        self._check_run(chunks)
        counts = self._mapped[chunks.start : chunks.stop]
        if counts.any():
            chunk = chunks.start + int(counts.argmax())
            raise MemoryMisuseError(f"chunk {chunk} is mapped {counts.max()} times; unmap it before {before} it")
        return counts

    def _check_absent(self, chunks: range) -> None:
        there = self._mapped[chunks.start : chunks.stop] != _ABSENT
        if there.any():
            raise MemoryMisuseError(f"chunk {chunks.start + int(there.argmax())} is here already; adopt new ones only")

    def _further(self, meta: bytes) -> range:
        """The run that `meta` describes. Raises TransferError if it is not one of this memory's."""
        try:
            told = json.loads(meta)
            ((first, count),) = told["chunks"]
            same = told == {**json.loads(self._meta([])), "chunks": told["chunks"]}
            chunks = range(int(first), int(first) + int(count))
        except (ValueError, KeyError, TypeError) as error:
            raise TransferError(f"{meta[:80]!r} does not describe a run; are both processes of one version?") from error
        if not same or chunks.start < 0 or not chunks:
            raise TransferError(f"{meta[:80]!r} is not a run of this memory; adopt what its owner's export_run gave")
        return chunks

    def _meta(self, runs: Sequence[tuple[int, int]]) -> bytes:
        return json.dumps({"chunk_bytes": self.chunk_bytes, "chunks": runs, **self._describe()}).encode()

    # What an implementation provides. All are called with the lock held and with checked arguments.

    @abstractmethod
    def _create(self, chunks: range) -> None: ...

    @abstractmethod
    def _destroy(self, chunks: range) -> None: ...

    @abstractmethod
    def _drop(self, chunks: range) -> None: ...

    @abstractmethod
    def _import(self, chunks: range, fds: Iterable[int]) -> None:
        """Get hold of the owner's `chunks`, all or, when raising, none; called without the lock."""

    @abstractmethod
    def _make_fence(self) -> Fence: ...

    @abstractmethod
    def _reserve(self, nbytes: int) -> int: ...

    @abstractmethod
    def _free(self, address: int, nbytes: int) -> None: ...

    @abstractmethod
    def _map(self, address: int, chunks: ChunkIds) -> None:
        """Map all of `chunks` or, when raising, none."""

    @abstractmethod
    def _take_mappings(self, count: int) -> None:
        """Count kernel mappings that are about to be made. Raises OutOfMemoryError if they are too many."""

    @abstractmethod
    def _give_mappings(self, count: int) -> None:
        """Count kernel mappings that are gone."""

    @abstractmethod
    def _unmap(self, address: int, count: int) -> None: ...

    @abstractmethod
    def _describe(self) -> dict[str, object]: ...

    @abstractmethod
    def _export(self, meta: bytes, runs: Sequence[tuple[int, int]], further: bool) -> Export:
        """`further`: the other process has attached this memory before."""

    @abstractmethod
    def _close(self) -> None: ...


class VirtualRange:
    """`nbytes` contiguous addresses from `base`; offsets are bytes from there. Made by
    `VirtualMemory.reserve`."""

    def __init__(self, memory: VirtualMemory, base: int, nbytes: int) -> None:
        self.memory = memory
        self.base = base
        self.nbytes = nbytes
        # As far as anything was ever mapped or asked for: a range may be reserved for far more than is ever mapped.
        self._slots: ChunkIds = np.empty(0, np.int64)
        self._closed = False

    def map(self, offset: int, chunks: Sequence[int] | ChunkIds) -> None:
        """Map `chunks` one after the other from `offset`; all of them, or none when this raises.

        Chunks with consecutive ids cost one mapping of the kernel on host memory. Raises MemoryMisuseError,
        and OutOfMemoryError when the process has no mapping left.
        """
        ids = np.asarray(chunks, np.int64)
        with self.memory.lock:
            slots = self._window(offset, len(ids) * self.memory.chunk_bytes)
            if (slots != _UNMAPPED).any():
                at = offset + int((slots != _UNMAPPED).argmax()) * self.memory.chunk_bytes
                raise MemoryMisuseError(f"a chunk is mapped at offset {at} already; unmap it first")
            self.memory.check_exists(ids)
            if not len(ids):
                return
            added = self._change_of_mappings(offset, ids)
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
        MemoryMisuseError, and OutOfMemoryError, with nothing unmapped, when the process has no mapping left, which
        taking a part out of a run needs.
        """
        with self.memory.lock:
            slots = self._window(offset, nbytes)
            if (slots == _UNMAPPED).any():
                at = offset + int((slots == _UNMAPPED).argmax()) * self.memory.chunk_bytes
                raise MemoryMisuseError(f"nothing is mapped at offset {at}; unmap only what is mapped")
            if not len(slots):
                return
            self.memory._unmap(self.base + offset, len(slots))
            self.memory._give_mappings(-self._change_of_mappings(offset, np.full(len(slots), _UNMAPPED)))
            np.subtract.at(self.memory._mapped, slots, 1)
            slots[:] = _UNMAPPED

    def clear(self, offset: int, nbytes: int) -> None:
        """Unmap what is mapped of the `nbytes` from `offset`, in runs; see `unmap`. After an error it can be called
        again."""
        with self.memory.lock:
            mapped = self._window(offset, nbytes) != _UNMAPPED
            if mapped.all():  # nearly always, and finding runs takes as long as unmapping
                self.unmap(offset, nbytes)
                return
            edges = np.diff(mapped, prepend=False, append=False)
            for start, stop in np.flatnonzero(edges).reshape(-1, 2).tolist():
                self.unmap(offset + start * self.memory.chunk_bytes, (stop - start) * self.memory.chunk_bytes)

    def tensor(
        self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None, offset: int = 0
    ) -> torch.Tensor:
        """A view of these addresses, without a copy; `strides` in elements, contiguous if not given.

        It may cover addresses on which nothing is mapped: touching those kills the process (host) or its
        context (CUDA). It must not be used after the range is closed. Raises MemoryMisuseError if it would
        leave the range.
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
            unmapped = (self._window(start, -(-(offset + nbytes - start) // chunk) * chunk) == _UNMAPPED).any()
        if unmapped:
            raise MemoryMisuseError(f"bytes {offset} to {offset + nbytes} are not all mapped; map them first")
        return Span(self.base + offset, nbytes, self.memory.on_device)

    def mapped_chunks(self) -> ChunkIds:
        """The ids of all mapped chunks in the order of their addresses; one mapped twice appears twice."""
        mapped: ChunkIds = self._slots[self._slots != _UNMAPPED]
        return mapped

    def chunks(self, offset: int, nbytes: int) -> ChunkIds:
        """The ids of the chunks that `nbytes` from `offset` are mapped to, -1 where nothing is mapped."""
        with self.memory.lock:
            return self._window(offset, nbytes).copy()

    def close(self) -> None:
        """Give the addresses back. Nothing may be mapped: raises MemoryMisuseError otherwise. Can be called
        twice."""
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

    def _window(self, offset: int, nbytes: int) -> ChunkIds:
        self._check_open()
        chunk = self.memory.chunk_bytes
        if offset % chunk or nbytes % chunk:
            raise MemoryMisuseError(f"offset {offset} and size {nbytes} must be multiples of the chunk, {chunk} bytes")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise MemoryMisuseError(f"bytes {offset} to {offset + nbytes} leave the range of {self.nbytes} bytes")
        start, stop = offset // chunk, (offset + nbytes) // chunk
        # With the slot behind it, which says whether a mapping that reaches to `stop` ends there.
        missing = min(stop + 1, self.nbytes // chunk) - len(self._slots)
        if missing > 0:
            added = min(max(missing, len(self._slots)), self.nbytes // chunk - len(self._slots))
            self._slots = np.append(self._slots, np.full(added, _UNMAPPED, np.int64))
        slots: ChunkIds = self._slots[start:stop]
        return slots

    def _change_of_mappings(self, offset: int, slots: ChunkIds) -> int:
        """How many kernel mappings more there are once `slots` is written from `offset`."""
        start = offset // self.memory.chunk_bytes
        before = self._slots[max(start - 1, 0) : start + len(slots) + 1]
        after = before.copy()
        after[min(start, 1) :][: len(slots)] = slots
        return _borders(after) - _borders(before)

    def _check_open(self) -> None:
        if self._closed:
            raise MemoryMisuseError("this range is closed; reserve another")


def _borders(slots: ChunkIds) -> int:
    """Between how many neighbours one kernel mapping ends and another begins."""
    left, right = slots[:-1], slots[1:]
    apart = np.where((left == _UNMAPPED) | (right == _UNMAPPED), left != right, left + 1 != right)
    return int(np.count_nonzero(apart))
