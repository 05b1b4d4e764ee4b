"""Reads parts of blocks from the slabs into memory, decodes those that are coded, and verifies them there."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from prefixd_swap.codecs.coding import Decoded, decode_run
from prefixd_swap.errors import ChecksumError, EncodingError, StorageError
from prefixd_swap.slab.files.adjacent import SMALL_BYTES, are_adjacent, copy_bytes, join_spans
from prefixd_swap.slab.files.file_ops import host_bytes
from prefixd_swap.slab.files.pread_io import STEP_BYTES
from prefixd_swap.slab.files.slab_file import INDEX_BITS, SlabFile
from prefixd_swap.slab.files.slab_files import SlabFiles
from prefixd_swap.slab.index.block_record import DiskPart
from prefixd_swap.slab.part_decoder import PartDecoder
from prefixd_swap.slots import PAGE_BYTES, round_to_slot
from prefixd_swap.spans import Span

PartRead = StorageError | Decoded | None
"""The outcome of reading a part: its error, what was decoded, or None for a raw part that is good."""

_KEPT_BYTES = 16 << 20  # of a buffer that a thread keeps


class SlabReader:
    """Reads parts. Any thread may call it."""

    def __init__(self, slabs: SlabFiles, decoder: PartDecoder) -> None:
        self._slabs = slabs
        self._decoder = decoder

    def read(self, part: DiskPart, into: Span) -> None:
        """As `SlabStore.read`."""
        buffer = host_bytes(into, part.nbytes)
        slab, index = self._slabs.find(part.slot)
        slab.read(index, buffer)
        verify(part, slab, index, xxhash.xxh3_64_intdigest(buffer))

    def read_all(
        self, parts: Sequence[DiskPart], addresses: Sequence[int], nbytes: int, identities: Sequence[bytes] | None
    ) -> list[PartRead]:
        """As `SlabStore.read_all`.

        Parts in adjacent slots are read together if they are small or coded, or if their memory is adjacent too: a call
        for each costs more than a copy, and threads that make thousands of calls a second delay all others by the
        interpreter's lock.
        """
        spans, names = [Span(address, nbytes) for address in addresses], identities or [b""] * len(parts)
        results: list[PartRead] = []
        for run in _runs(parts, spans):
            results += self._read_run(parts[run], spans[run], names[run])
        return results

    def _read_run(self, parts: Sequence[DiskPart], spans: Sequence[Span], names: Sequence[bytes]) -> list[PartRead]:
        """Read parts in adjacent slots."""
        if len(parts) > 1:
            with contextlib.suppress(StorageError):  # then each part is read alone, for its own error
                slab, index = self._slabs.find(parts[0].slot)
                nbytes = sum(round_to_slot(part.nbytes) for part in parts)
                if not any(part.coded for part in parts) and are_adjacent(spans):
                    slab.read(index, join_spans(spans, nbytes))
                    return [_judge(part, slab, into) for part, into in zip(parts, spans, strict=True)]
                run = slab.read_run(index, nbytes)
                starts = [PAGE_BYTES * (part.slot - parts[0].slot) for part in parts]
                decoded = _decode_run(run, parts, starts, spans)
                return [
                    done or self._take(part, slab, run[start:], into, name)
                    for done, part, start, into, name in zip(decoded, parts, starts, spans, names, strict=True)
                ]
        return [self._try_read(*each) for each in zip(parts, spans, names, strict=True)]

    def _try_read(self, part: DiskPart, into: Span, name: bytes) -> PartRead:
        try:
            if not part.coded:
                self.read(part, into)
                return None
            slab, index = self._slabs.find(part.slot)
            stored = _buffer(part.slot_bytes)
            slab.read(index, stored[: round_to_slot(part.nbytes)])
            return self._take(part, slab, stored, into, name)
        except StorageError as error:
            return error
        except (MemoryError, OSError) as error:
            return _no_memory(part, error)

    def _take(self, part: DiskPart, slab: SlabFile, read: memoryview, into: Span, name: bytes) -> PartRead:
        """Verifies what was read of a part, the beginning of `read`, and copies or decodes it to its place."""
        stored, target = read[: part.nbytes], host_bytes(into, into.nbytes)
        if not part.coded:
            copy_bytes(stored, target)
            return _judge(part, slab, into)
        index = part.slot % (1 << INDEX_BITS)
        try:
            verify(part, slab, index, xxhash.xxh3_64_intdigest(stored))
            return self._decoder.decode(np.frombuffer(stored, np.uint8), np.frombuffer(target, np.uint8), name)
        except EncodingError as error:
            return ChecksumError(f"the slot at byte {index * PAGE_BYTES} of {slab.path}: {error}; remove the block")
        except ChecksumError as error:
            return error
        except MemoryError as error:
            return _no_memory(part, error)


def _decode_run(
    run: memoryview, parts: Sequence[DiskPart], starts: Sequence[int], spans: Sequence[Span]
) -> list[Decoded | None]:
    """Decodes and verifies parts that were read together; None for each that must be taken alone."""
    if not all(part.coded for part in parts):
        return [None] * len(parts)
    sizes, checksums = [part.nbytes for part in parts], [part.checksum for part in parts]
    into = [span.address for span in spans]
    return decode_run(np.frombuffer(run, np.uint8), starts, sizes, checksums, into, spans[0].nbytes)


def _no_memory(part: DiskPart, error: Exception) -> StorageError:
    return StorageError(f"{part.nbytes} stored bytes of a part cannot be read: no memory for them ({error})")


def _runs(parts: Sequence[DiskPart], spans: Sequence[Span]) -> Iterator[slice]:
    """Runs of parts that one call reads, up to 1 MiB each."""
    start = nbytes = 0
    for at, part in enumerate(parts):
        if at and not (nbytes + round_to_slot(part.nbytes) <= STEP_BYTES and _follows(parts, spans, at)):
            yield slice(start, at)
            start, nbytes = at, 0
        nbytes += round_to_slot(part.nbytes)
    if parts:
        yield slice(start, len(parts))


def _follows(parts: Sequence[DiskPart], spans: Sequence[Span], at: int) -> bool:
    """Whether one call should read a part and the one before it."""
    before, part = parts[at - 1], parts[at]
    if part.slot != before.slot + round_to_slot(before.nbytes) // PAGE_BYTES or not part.slot % (1 << INDEX_BITS):
        return False
    if before.coded and part.coded:  # decoded from where they are read to, so that nothing more is copied
        return True
    if max(before.nbytes, part.nbytes) <= SMALL_BYTES:
        return True
    adjacent = spans[at].address == spans[at - 1].address + round_to_slot(part.nbytes)
    return adjacent and not (before.coded or part.coded)


def verify(part: DiskPart, slab: SlabFile, index: int, found: int) -> None:
    """Compare the checksum `found` of the bytes in a part's slot with the recorded one.

    Raises:
        ChecksumError: they differ.
    """
    if found != part.checksum:
        raise ChecksumError(
            f"the slot at byte {index * PAGE_BYTES} of {slab.path}: {part.nbytes} bytes have checksum {found:016x}, "
            f"written were {part.checksum:016x}; remove the block, it will be computed again"
        )


def _judge(part: DiskPart, slab: SlabFile, into: Span) -> ChecksumError | None:
    """Verifies a raw part that was read; returns the error, or None."""
    try:
        verify(part, slab, part.slot % (1 << INDEX_BITS), xxhash.xxh3_64_intdigest(host_bytes(into, part.nbytes)))
    except ChecksumError as error:
        return error
    return None


def _buffer(nbytes: int) -> memoryview:
    """A page-aligned buffer of at least `nbytes` bytes; up to `_KEPT_BYTES` the calling thread keeps it."""
    kept = _local.buffer
    if kept is not None and len(kept) >= nbytes:
        return kept
    fresh = memoryview(mmap.mmap(-1, round_to_slot(nbytes)))
    if nbytes <= _KEPT_BYTES:
        _local.buffer = fresh
    return fresh


class _Local(threading.local):
    buffer: memoryview | None = None


_local = _Local()
