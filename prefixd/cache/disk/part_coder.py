"""Makes fewer bytes of blocks before they are written to disk, in threads."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash

from prefixd.cache.coding.namespace_codings import NamespaceCodings
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.placement.placement import Placement
from prefixd.cache.rules import GroupMask
from prefixd_swap import OutOfMemoryError, Span, host_bytes, started_threads
from prefixd_swap.codecs.codec import Refused
from prefixd_swap.codecs.coded_part import CodedPart
from prefixd_swap.codecs.coding import Coding, code
from prefixd_swap.slab.index.block_record import Errors
from prefixd_swap.slots import PAGE_BYTES, coded_slot_bytes, round_to_slot
from prefixd_swap.tiers import MemoryTier

log = logging.getLogger(__name__)

THREADS = 2
"""Threads that code."""

CodedBlocks = Mapping[tuple[int, int], "PartCode"]
"""By row and part."""


@dataclass(frozen=True, slots=True)
class PartCode:
    """A part that is to be stored coded.

    Attributes:
        stored: what is written.
        checksum: xxh3_64 of the bytes in memory.
        errors: of a lossy codec.
    """

    stored: CodedPart
    checksum: int
    errors: Errors | None


NOTHING_CODED: CodedBlocks = {}


def larger_errors(one: Errors | None, other: Errors | None) -> Errors | None:
    """The larger of each of two blocks' errors."""
    if one is None or other is None:
        return one or other
    return max(one[0], other[0]), max(one[1], other[1])


@dataclass(frozen=True, slots=True)
class _Job:
    row: int
    part: int
    span: Span
    coding: Coding
    known: int | None


class PartCoder:
    """Codes parts of blocks.

    Args:
        placement: records where blocks are.
        codings: how the parts of each namespace are coded.
    """

    def __init__(self, placement: Placement, codings: NamespaceCodings) -> None:
        self._tiers = placement.tiers
        self._codings = codings
        self._threads: ThreadPoolExecutor | None = None
        self.refused: Counter[str] = Counter()
        """Parts that stayed as they are though a codec was chosen, by reason."""

    def close(self) -> None:
        """Ends the threads."""
        if self._threads is not None:
            self._threads.shutdown()

    def has_work(self, trie: Trie, rows: Rows) -> bool:
        """Whether any of the rows' namespaces is stored otherwise than it is."""
        return any(any(self._codings.codings(ordinal)) for ordinal in np.unique(trie.namespace[rows]).tolist())

    async def code(self, trie: Trie, rows: Rows, source: MemoryTier, groups: GroupMask) -> CodedBlocks:
        """Codes parts of the KV groups in each mask of rows, held in `source`; leaves out those to be stored raw.

        Bytes in memory that came from a lossy copy are coded without loss. Bytes that are not what was committed stay
        raw, so that the checksum of the commit finds them when they are read.
        """
        jobs = self._jobs(trie, rows, source, groups) if source.backed else []
        if not jobs:
            return {}
        if self._threads is None:
            try:
                self._threads = started_threads(THREADS, "prefixd-codecs")
            except OutOfMemoryError as error:
                if not self.refused["no_threads"]:
                    log.warning("blocks are written to disk as they are for now, without their codec: %s", error)
                self.refused["no_threads"] += len(jobs)
                return {}
        loop, shares = asyncio.get_running_loop(), [jobs[at::THREADS] for at in range(THREADS)]
        done = await asyncio.gather(
            *(loop.run_in_executor(self._threads, partial(_code_all, share)) for share in shares if share)
        )
        coded: dict[tuple[int, int], PartCode] = {}
        for outcomes in done:
            for job, outcome in outcomes:
                if isinstance(outcome, PartCode):
                    coded[job.row, job.part] = outcome
                else:
                    self.refused[outcome] += 1
        return coded

    def _jobs(self, trie: Trie, rows: Rows, source: MemoryTier, groups: GroupMask) -> list[_Job]:
        jobs: list[_Job] = []
        of_shared = source is self._tiers.shared  # checksums are of its bytes
        for ordinal in np.unique(trie.namespace[rows]).tolist():
            codings = self._codings.codings(ordinal)
            if not any(codings):
                continue
            mine = np.flatnonzero(trie.namespace[rows] == ordinal)
            addresses = source.addresses(trie.slots[rows[mine], source.level]).tolist()
            checksums, known = trie.checksums[rows[mine]].tolist(), trie.checksummed[rows[mine]].tolist()
            decoded = trie.decoded[rows[mine]].tolist()
            for at, (place, mask) in enumerate(zip(mine.tolist(), groups[mine].tolist(), strict=True)):
                for part in np.flatnonzero(trie.part_mask & np.uint8(mask)).tolist():
                    coding = codings[part] if trie.part_bytes[part] > PAGE_BYTES else None
                    if coding is not None and coding.codec.lossy and decoded[at] & int(trie.part_mask[part]):
                        coding = self._codings.without_loss(ordinal, part)
                    if coding is not None:
                        span = Span(addresses[at][part], trie.part_bytes[part], source.on_device)
                        expected = checksums[at][part] if of_shared and known[at][part] else None
                        jobs.append(_Job(int(rows[place]), part, span, coding, expected))
        return jobs


def _code_all(jobs: Sequence[_Job]) -> list[tuple[_Job, PartCode | str]]:
    """Runs in a thread."""
    return [(job, _code(job)) for job in jobs]


def _code(job: _Job) -> PartCode | str:
    """The coded part, or why it is stored as it is."""
    data = np.frombuffer(host_bytes(job.span, job.span.nbytes), np.uint8)
    checksum = xxhash.xxh3_64_intdigest(data.data)
    if job.known is not None and job.known != checksum:
        return "altered_in_memory"
    made = code(data, job.coding)
    if isinstance(made, Refused):
        return made.value
    if coded_slot_bytes(made.data.nbytes) >= round_to_slot(data.nbytes):
        return Refused.NOT_FEWER.value  # in whole pages: then the exact bytes are the better ones
    errors = None
    if made.errors is not None:
        errors = float(made.errors.largest.max()), float(made.errors.rms.max())
    return PartCode(CodedPart(made.data, xxhash.xxh3_64_intdigest(made.data.data)), checksum, errors)
