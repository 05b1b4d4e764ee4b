"""Makes fewer bytes of blocks before they are written to disk, and encrypts them, in threads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import xxhash

from prefixd.base.codec_names import CodecName
from prefixd.cache.coding.namespace_codings import NamespaceCodings
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.namespaces import NamespaceRegistry
from prefixd.cache.placement.placement import Placement
from prefixd.cache.rules import GroupMask
from prefixd_swap import OutOfMemoryError, Span, host_bytes, started_threads
from prefixd_swap.codecs.codec import Refused, UInt8s
from prefixd_swap.codecs.coded_part import CodedPart
from prefixd_swap.codecs.coding import Coding, code_or_lossless
from prefixd_swap.codecs.registry import CODECS
from prefixd_swap.errors import EncodingError
from prefixd_swap.sealing.rest_keys import RestKey
from prefixd_swap.sealing.sealed_objects import part_identity, seal
from prefixd_swap.slab.index.block_record import Errors
from prefixd_swap.slots import PAGE_BYTES, round_to_slot
from prefixd_swap.tiers import MemoryTier

log = logging.getLogger(__name__)

CodedBlocks = Mapping[tuple[int, int], "PartCode"]
"""By row and part."""


@dataclass(frozen=True, slots=True)
class PartCode:
    """A part that is to be stored coded, encrypted, or both.

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
    coding: Coding | None
    known: int | None
    key: RestKey | None
    identity: bytes


class PartCoder:
    """Codes and encrypts parts of blocks.

    Args:
        placement: records where blocks are.
        codings: how the parts of each namespace are coded.
        namespaces: have the tenants, whose keys encrypt.
    """

    def __init__(self, placement: Placement, codings: NamespaceCodings, namespaces: NamespaceRegistry) -> None:
        self._tiers = placement.tiers
        self._codings = codings
        self._namespaces = namespaces
        self._threads: ThreadPoolExecutor | None = None
        self.refused: Counter[str] = Counter()
        """Parts that the chosen codec has not coded, by reason."""
        self.taken_bytes = 0
        """Bytes of parts that the threads have taken since the start, as they are in memory."""
        self.busy_s = 0.0
        """Seconds that the threads took for them, those of all threads together."""

    @property
    def tier_codec(self) -> CodecName:
        """The codec of blocks for which neither their namespace nor their tenant names one."""
        return self._codings.tier.name

    def close(self) -> None:
        """Ends the threads."""
        if self._threads is not None:
            self._threads.shutdown()

    def has_work(self, trie: Trie, rows: Rows) -> bool:
        """Whether any of the rows' namespaces is stored otherwise than it is."""
        return any(
            self._key(ordinal) is not None or any(self._codings.codings(ordinal))
            for ordinal in np.unique(trie.namespace[rows]).tolist()
        )

    async def code(self, trie: Trie, rows: Rows, source: MemoryTier, groups: GroupMask) -> CodedBlocks:
        """Codes and encrypts parts of the KV groups in each mask of rows, held in `source`; leaves out those to be
        stored raw.

        Bytes in memory that came from a lossy copy are coded without loss. Bytes that are not what was committed are
        not coded, so that the checksum of the commit finds them when they are read.
        """
        jobs = self._jobs(trie, rows, source, groups) if source.backed else []
        if not jobs:
            return {}
        if self._threads is None:
            try:
                self._threads = started_threads(self._codings.tier.threads, "prefixd-codecs")
            except OutOfMemoryError as error:
                if not self.refused["no_threads"]:
                    log.warning("blocks are written to disk as they are for now, without their codec: %s", error)
                self.refused["no_threads"] += len(jobs)
                return self._collect([_code(replace(job, coding=None)) for job in jobs if job.key is not None])
        loop, threads = asyncio.get_running_loop(), self._codings.tier.threads
        shares = [jobs[at::threads] for at in range(threads)]
        running = [loop.run_in_executor(self._threads, partial(_code_all, share)) for share in shares if share]
        try:
            done = await asyncio.gather(*running)
        finally:
            await asyncio.gather(*running, return_exceptions=True)  # they read memory that the caller holds
        self.busy_s += sum(seconds for _, seconds in done)
        return self._collect([outcome for outcomes, _ in done for outcome in outcomes])

    async def complete(
        self, trie: Trie, rows: Rows, source: MemoryTier, groups: GroupMask, coded: CodedBlocks
    ) -> CodedBlocks:
        """Adds to `coded` the parts that must be encrypted and are not among them, or with another key: they have come
        to memory since, or the tenant's key has.

        No part of a tenant with a key is written in clear, and none with another key than its block's record.
        """
        while len(lacking := self._lacking(trie, rows, groups, coded)):
            fresh = await self.code(trie, rows[lacking], source, groups[lacking])
            if not fresh:
                break
            coded = {**coded, **fresh}
        return coded

    def _lacking(self, trie: Trie, rows: Rows, groups: GroupMask, coded: CodedBlocks) -> list[int]:
        """Which of `rows` have parts to be written that `coded` does not have as their tenant's key encrypts them."""

        def is_right(row: int, part: int, key: RestKey) -> bool:
            return (made := coded.get((row, part))) is not None and made.stored.key_id == key.id

        keys = {ordinal: self._key(ordinal) for ordinal in np.unique(trie.namespace[rows]).tolist()}
        if not any(keys.values()):
            return []
        masks = (trie.part_mask & groups[:, None]) != 0
        return [
            at
            for at, (row, ordinal) in enumerate(zip(rows.tolist(), trie.namespace[rows].tolist(), strict=True))
            if (key := keys[ordinal]) is not None
            and not all(is_right(row, part, key) for part in np.flatnonzero(masks[at]).tolist())
        ]

    def _collect(self, outcomes: Iterable[_Outcome]) -> dict[tuple[int, int], PartCode]:
        coded = {}
        for outcome in outcomes:
            self.taken_bytes += outcome.job.span.nbytes
            if outcome.made is not None:
                coded[outcome.job.row, outcome.job.part] = outcome.made
            if outcome.refused:
                self.refused[outcome.refused] += 1
        return coded

    def _key(self, ordinal: int) -> RestKey | None:
        """The key that encrypts the blocks of a namespace."""
        durable = self._tiers.durable
        return None if durable is None else durable.keys.key_for(self._namespaces.at(ordinal).spec.tenant)

    def _jobs(self, trie: Trie, rows: Rows, source: MemoryTier, groups: GroupMask) -> list[_Job]:
        jobs: list[_Job] = []
        of_shared = source is self._tiers.shared  # checksums are of its bytes
        for ordinal in np.unique(trie.namespace[rows]).tolist():
            codings, key = self._codings.codings(ordinal), self._key(ordinal)
            if key is None and not any(codings):
                continue
            mine = np.flatnonzero(trie.namespace[rows] == ordinal)
            addresses = source.addresses(trie.slots[rows[mine], source.level]).tolist()
            checksums, known = trie.checksums[rows[mine]].tolist(), trie.checksummed[rows[mine]].tolist()
            decoded, names = trie.decoded[rows[mine]].tolist(), trie.keys(rows[mine])
            namespace = self._namespaces.at(ordinal).id
            for at, (place, mask) in enumerate(zip(mine.tolist(), groups[mine].tolist(), strict=True)):
                for part in np.flatnonzero(trie.part_mask & np.uint8(mask)).tolist():
                    coding = codings[part] if trie.part_bytes[part] > PAGE_BYTES else None
                    if coding is not None and coding.codec.lossy and decoded[at] & int(trie.part_mask[part]):
                        coding = self._codings.without_loss(ordinal, part)
                    if coding is not None or key is not None:
                        span = Span(addresses[at][part], trie.part_bytes[part], source.on_device)
                        expected = checksums[at][part] if of_shared and known[at][part] else None
                        identity = part_identity(namespace, names[at].tobytes(), part)
                        jobs.append(_Job(int(rows[place]), part, span, coding, expected, key, identity))
        return jobs


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What was made of a part, None: it is stored as it is; and why the chosen codec has not coded it."""

    job: _Job
    made: PartCode | None
    refused: str = ""


def _code_all(jobs: Sequence[_Job]) -> tuple[list[_Outcome], float]:
    """Runs in a thread; also returns the seconds that it took."""
    begun_s = time.perf_counter()
    return [_code_if_possible(job) for job in jobs], time.perf_counter() - begun_s


def _code_if_possible(job: _Job) -> _Outcome:
    """As `_code`; a part is stored as it is if the codec finds no memory, or does not decode what it has encoded.

    Raises:
        OutOfMemoryError: it must be encrypted, and there is no memory for that either.
    """
    try:
        return _code(job)
    except EncodingError as error:
        log.error("a block is written as it is; this is a defect of the codec, report it: %s", error)
        return replace(_code(replace(job, coding=None)), job=job, refused="encoding_failed")
    except MemoryError:
        try:
            return replace(_code(replace(job, coding=None)), job=job, refused="no_memory")
        except MemoryError as error:
            raise OutOfMemoryError(
                f"a part of {job.span.nbytes} bytes cannot be encrypted: the system gives this process no more memory"
            ) from error


def _code(job: _Job) -> _Outcome:
    data = np.frombuffer(host_bytes(job.span, job.span.nbytes), np.uint8)
    checksum = xxhash.xxh3_64_intdigest(data.data)
    if job.known is not None and job.known != checksum:
        made = None if job.key is None else _encrypt(job, job.key, data, job.known)
        return _Outcome(job, made, "altered_in_memory")
    coded, why = (None, None) if job.coding is None else code_or_lossless(data, job.coding)
    if coded is not None and round_to_slot(coded.data.nbytes) >= round_to_slot(data.nbytes):
        coded, why = None, why or Refused.NOT_FEWER  # in whole pages: then the exact bytes are the better ones
    refused = "" if why is None else why.value
    if coded is None:
        return _Outcome(job, None if job.key is None else _encrypt(job, job.key, data, checksum), refused)
    errors = None
    if coded.errors is not None:
        errors = float(coded.errors.largest.max()), float(coded.errors.rms.max())
    codec = CODECS[coded.codec]
    if job.key is not None:
        return _Outcome(job, _encrypt(job, job.key, coded.data, checksum, codec=codec, errors=errors), refused)
    stored = CodedPart(coded.data, xxhash.xxh3_64_intdigest(coded.data.data), codec=codec)
    return _Outcome(job, PartCode(stored, checksum, errors), refused)


def _encrypt(
    job: _Job, key: RestKey, data: UInt8s, checksum: int, *, codec: int = 0, errors: Errors | None = None
) -> PartCode:
    """The part, encrypted: `data` is what a codec has made of it, or else its own bytes with `checksum`."""
    sealed = seal(data, key, job.identity, coded=codec > 0, checksum=None if codec else checksum)
    return PartCode(CodedPart(sealed, xxhash.xxh3_64_intdigest(sealed.data), key.id, codec), checksum, errors)
