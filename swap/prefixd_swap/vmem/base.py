"""Virtual memory in chunks: the contract, and the accounting that all implementations share.

Physical memory comes in chunks of one size. A range (`virtual_range`) is a run of reserved addresses; chunks are mapped
anywhere on it, and one chunk can be mapped at many addresses, in many ranges and in many processes (vTensor, section
5).
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NewType

import numpy as np
import numpy.typing as npt

from prefixd_swap.errors import CreationStoppedError, IntegrityError, MemoryMisuseError, TransferError
from prefixd_swap.number_runs import true_runs
from prefixd_swap.vmem.fence import Fence
from prefixd_swap.vmem.virtual_range import VirtualRange

ChunkId = NewType("ChunkId", int)
FrameId = NewType("FrameId", int)
ChunkIds = npt.NDArray[np.int64]

_ABSENT = -1


@dataclass(frozen=True, slots=True)
class Export:
    """A memory for another process to attach: a description, `meta`, and `count` descriptors.

    A descriptor is opened when it is sent, since a GPU tier has more chunks than a process may hold files.
    """

    meta: bytes
    count: int
    open: Callable[[int], int]


class VirtualMemory(ABC):
    """Chunks of physical memory and the ranges they are mapped on. Safe to use from several threads.

    Every misuse raises MemoryMisuseError, the same in every implementation, and leaves the memory as it was.
    """

    backed = True
    """False in a memory without bytes, which only counts; see `Tier.backed`."""

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

        A chunk takes up to 200 us, so create many in a thread. Raises OutOfMemoryError when there is not enough memory,
        CreationStoppedError after `stop_creating`, both with nothing created.
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
        """End a `create` that runs in another thread, and refuse later calls: for the end of a process."""
        self._stopped.set()

    def destroy(self, chunks: range) -> None:
        """Give the memory of `chunks` back. They must not be mapped in this process.

        On CUDA the device gets the memory back once every process that attached the chunks has dropped them too. On
        host memory the system gets it back at once; a process that still maps a chunk and touches it would allocate
        memory again. Raises DeviceError, with the chunks as they were, when the device refuses: call it again.
        """
        with self.lock:
            self._check_usable(owner=True)
            counts = self._check_unmapped(chunks, "destroying")
            self._destroy(chunks)
            counts[:] = _ABSENT

    def drop(self, chunks: range) -> None:
        """Release `chunks` in a process that attached the memory; they do not exist here any more.

        They must not be mapped in this process. Raises MemoryMisuseError, also in the owner, which calls `destroy`.
        """
        with self.lock:
            self._check_attached()
            counts = self._check_unmapped(chunks, "dropping")
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
            runs = [(run.start, len(run)) for run in true_runs(self._mapped != _ABSENT)]
            return self._export(self._meta(runs), runs, further=False)

    def export_run(self, chunks: range) -> Export:
        """Everything that a process needs to adopt `chunks` if it has attached this memory before."""
        with self.lock:
            self._check_usable(owner=True)
            self._check_run(chunks)
            runs = [(chunks.start, len(chunks))]
            return self._export(self._meta(runs), runs, further=True)

    def adopt(self, meta: bytes, fds: Iterable[int]) -> range:
        """Take further chunks into a process that attached the memory; `meta` is from the owner's `export_run`.

        The chunks keep the owner's ids. `fds` is an iterator of `recv_export`, or a list; this memory owns every
        descriptor that it takes. Other threads may map and unmap meanwhile; only one thread adopts at a time. Raises
        TransferError if `meta` describes another memory or descriptors are missing, MemoryMisuseError for chunks that
        are here already, all with nothing adopted.
        """
        chunks = self._parse_run(meta)
        with self.lock:
            self._check_attached()
            there = self._mapped[chunks.start : chunks.stop] != _ABSENT
            if there.any():
                chunk = chunks.start + int(there.argmax())
                raise MemoryMisuseError(f"chunk {chunk} is here already; adopt new ones only")
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
        """A new fence, which delays work until streams no longer use this memory; `close` closes it at the latest."""
        with self.lock:
            self._check_usable()
            fence = self._make_fence()
            self._fences.append(fence)
            return fence

    @abstractmethod
    def available_bytes(self) -> int:
        """Bytes of the device that are free for new chunks now. Asks the system, so call it in a thread."""

    @abstractmethod
    def total_bytes(self) -> int:
        """Bytes that the device has in all; the chunks can never take more."""

    @property
    def chunk_count(self) -> int:
        """Number of chunks that exist."""
        return int(np.count_nonzero(self._mapped != _ABSENT))

    def mapping_counts(self, chunks: ChunkIds) -> npt.NDArray[np.int32]:
        """Mappings of each of `chunks` in this process. Raises MemoryMisuseError if one does not exist."""
        with self.lock:
            self.check_exists(chunks)
            return self._mapped[chunks]

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every chunk's number of mappings equals the mappings in the ranges."""
        with self.lock:
            found = np.where(self._mapped == _ABSENT, _ABSENT, 0).astype(np.int32)
            for reserved in self._ranges:
                np.add.at(found, reserved.mapped_chunks(), 1)
            if not np.array_equal(found, self._mapped):
                chunk = int((found != self._mapped).argmax())
                counted = int(self._mapped[chunk])
                raise IntegrityError(f"chunk {chunk} is counted as mapped {counted} times, but is {found[chunk]} times")

    def close(self) -> None:
        """Close the fences, unmap and free every range and give all memory back. Can be called twice.

        Every later call is refused.
        """
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

    def _enter_runs(self, runs: Sequence[Sequence[int]]) -> None:
        """Enter the chunks, as (first, count), of a memory that was just attached."""
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

    def _check_unmapped(self, chunks: range, before: str) -> npt.NDArray[np.int32]:
        """The mapping counts of `chunks`, all zero. Raises MemoryMisuseError if one is mapped."""
        self._check_run(chunks)
        counts = self._mapped[chunks.start : chunks.stop]
        if counts.any():
            chunk = chunks.start + int(counts.argmax())
            raise MemoryMisuseError(f"chunk {chunk} is mapped {counts.max()} times; unmap it before {before} it")
        return counts

    def _parse_run(self, meta: bytes) -> range:
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

    # An implementation provides these. The base calls them with the lock held and with checked arguments.

    @abstractmethod
    def _create(self, chunks: range) -> None: ...

    @abstractmethod
    def _destroy(self, chunks: range) -> None: ...

    @abstractmethod
    def _drop(self, chunks: range) -> None: ...

    @abstractmethod
    def _import(self, chunks: range, fds: Iterable[int]) -> None:
        """Import the owner's `chunks`, all of them or, when raising, none; called without the lock."""

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
        """Count kernel mappings before they are made. Raises OutOfMemoryError above the limit."""

    @abstractmethod
    def _give_mappings(self, count: int) -> None:
        """Uncount kernel mappings."""

    @abstractmethod
    def _unmap(self, address: int, count: int) -> None: ...

    @abstractmethod
    def _map_scratch(self, addresses: Sequence[int], nbytes: int) -> Callable[[], None]:
        """Map the same new memory of this process on all of `addresses`, or none when raising; returns what undoes it.

        It is no chunk: it has no id, and nothing counts its mappings.
        """

    @abstractmethod
    def _describe(self) -> dict[str, object]: ...

    @abstractmethod
    def _export(self, meta: bytes, runs: Sequence[tuple[int, int]], further: bool) -> Export:
        """`further`: the other process has attached this memory before, and `runs` are new to it."""

    @abstractmethod
    def _close(self) -> None: ...
