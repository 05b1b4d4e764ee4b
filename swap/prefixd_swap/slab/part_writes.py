"""Writes parts to their slots with several threads: parts in adjacent slots by one call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from threading import Semaphore
from typing import TypeVar

import xxhash

from prefixd_swap.slab.files.adjacent import SMALL_BYTES, join_spans
from prefixd_swap.slab.files.file_ops import host_bytes
from prefixd_swap.slab.files.pread_io import STEP_BYTES
from prefixd_swap.slab.files.slab_file import INDEX_BITS, SlabFile
from prefixd_swap.slab.files.slab_files import SlabFiles
from prefixd_swap.slab.index.block_record import DiskPart
from prefixd_swap.slots import PAGE_BYTES, round_to_slot
from prefixd_swap.spans import Span

T = TypeVar("T")

_BYTES_AT_ONCE = 256 << 10
"""Of small parts in one job: submitting a job costs more than writing one small part."""
_MOST_BYTES = 4 << 20
"""The most bytes of one call. A thread needs the interpreter's lock between two calls, and may wait for it longer than
for the device."""


@dataclass(frozen=True, slots=True)
class PartWrite:
    """A part to be written to a slot that was taken for it."""

    span: Span
    slot: int
    checksum: int | None
    """xxh3_64 of the bytes; None: not computed yet."""
    coded: bool = False
    """Its slot, then, may be some pages larger than the bytes."""
    key_id: int = 0
    """The id of the key that encrypts it; 0: it is in clear."""


@dataclass(slots=True)
class _Run:
    """Parts in adjacent slots of a slab."""

    slab: SlabFile
    index: int
    """The first slot's unit."""
    spans: list[Span]
    end: int
    """The number that a slot behind the last one has."""
    nbytes: int
    """Of all slots."""
    in_place: bool = True
    """Whether the parts are adjacent in memory, too, so that the call needs no copy."""

    def write(self) -> None:
        self.slab.write(self.index, join_spans(self.spans, self.nbytes))


def write_parts(
    parts: Sequence[PartWrite],
    slabs: SlabFiles,
    threads: ThreadPoolExecutor | None,
    io_threads: int,
    meanwhile: Callable[[], T],
) -> tuple[T, set[SlabFile]]:
    """Write parts; returns the result of `meanwhile`, and the slabs that have the parts.

    The caller's thread runs `meanwhile` when all of `threads` write: before, it would keep the interpreter's lock from
    them. Without threads it does both, one after the other.

    Raises:
        StorageError: a write failed; no thread writes to the slots any more.
    """
    total = sum(round_to_slot(part.span.nbytes) for part in parts)
    share = -(-total // io_threads)
    runs = _alternate(_adjacent(parts, slabs, min(_MOST_BYTES, max(_BYTES_AT_ONCE, share))))
    written = {run.slab for run in runs}
    jobs = list(_jobs(runs, min(_BYTES_AT_ONCE, share)))
    if threads is None or len(jobs) < 2:
        _write(runs)
        return meanwhile(), written
    futures: list[Future[None]] = []
    begun = Semaphore(0)
    try:
        futures.extend(threads.submit(_write, job, begun.release) for job in jobs)
        for _ in range(min(io_threads, len(jobs))):
            begun.acquire()
        result = meanwhile()
    finally:
        wait(futures)  # even if one fails: slots may be freed only when no thread writes to them
    try:
        for future in futures:
            future.result()
    finally:
        del futures  # else an error's traceback, this frame and the error are a cycle that keeps slabs open
    return result, written


def stored_parts(parts: Sequence[PartWrite]) -> list[DiskPart]:
    """The parts as they are stored. Computes the checksums that are missing."""
    return [DiskPart(part.slot, part.span.nbytes, _checksum(part), part.coded, part.key_id) for part in parts]


def _adjacent(parts: Sequence[PartWrite], slabs: SlabFiles, most_bytes: int) -> Iterator[_Run]:
    """The parts in the order of their slots, in runs of at most `most_bytes`, or of one part."""
    run: _Run | None = None
    for part in sorted(parts, key=lambda part: part.slot):
        if run is None or not _extend(run, part, most_bytes):
            if run is not None:
                yield run
            nbytes = round_to_slot(part.span.nbytes)
            slab, index = slabs.find(part.slot)
            run = _Run(slab, index, [part.span], part.slot + nbytes // PAGE_BYTES, nbytes)
    if run is not None:
        yield run


def _extend(run: _Run, part: PartWrite, most_bytes: int) -> bool:
    """Add a part to a run if its slot is the next one, and few bytes need a copy; whether it was added."""
    if part.slot != run.end or not part.slot % (1 << INDEX_BITS):  # the first slot of the next slab
        return False
    last, nbytes = run.spans[-1], run.nbytes + round_to_slot(part.span.nbytes)
    in_place = run.in_place and part.span.address == last.address + last.nbytes and not last.nbytes % PAGE_BYTES
    if nbytes > (most_bytes if in_place else min(most_bytes, STEP_BYTES)):
        return False
    if not in_place and part.span.nbytes > SMALL_BYTES:
        return False
    run.spans.append(part.span)
    run.end += (nbytes - run.nbytes) // PAGE_BYTES
    run.nbytes, run.in_place = nbytes, in_place
    return True


def _alternate(runs: Iterable[_Run]) -> list[_Run]:
    """The runs in an order in which they are written to all drives at once: one of each drive in turn."""
    by_drive: defaultdict[Path, list[_Run]] = defaultdict(list)
    for run in runs:
        by_drive[run.slab.path.parent].append(run)
    return [run for turn in zip_longest(*by_drive.values()) for run in turn if run is not None]


def _jobs(runs: Sequence[_Run], least_bytes: int) -> Iterator[list[_Run]]:
    """The runs in lists of at least `least_bytes`, but for the last one."""
    job: list[_Run] = []
    nbytes = 0
    for run in runs:
        job.append(run)
        nbytes += run.nbytes
        if nbytes >= least_bytes:
            yield job
            job, nbytes = [], 0
    if job:
        yield job


def _write(runs: Sequence[_Run], begin: Callable[[], None] = lambda: None) -> None:
    begin()
    for run in runs:
        run.write()


def _checksum(part: PartWrite) -> int:
    if part.checksum is not None:
        return part.checksum
    return xxhash.xxh3_64_intdigest(host_bytes(part.span, part.span.nbytes))
