"""Copies between the engine's KV blocks and the daemon's arena in a worker, beside the model's steps.

A load acquires a lease for each slice of its blocks, copies, and releases; a release that succeeds proves that the
slice's bytes were the right ones from the first to the last. So a prompt may be longer than the daemon's memory. A save
reserves, copies and commits. A step waits only for loads that it computes on (`LoadJob.waits`). Only calls to the
daemon have a time limit: the time of a copy or of a step of the model says nothing about the daemon.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from prefixd.client import (
    AsyncCache,
    AsyncLease,
    AsyncReservation,
    ClientError,
    ExhaustedError,
    LeaseLost,
    within_request,
    within_trace,
)
from prefixd.integrations.engine.connector_counters import ConnectorCounters
from prefixd.integrations.engine.copying.cuda_device import ArenaPin, Fence, computed_already, computing_stream
from prefixd.integrations.engine.copying.group_pages import NO_BLOCK, GroupPages
from prefixd.integrations.engine.copying.layer_arrivals import LayerArrivals
from prefixd.integrations.engine.copying.part_copies import Direction, PartAt, PartCopies, PartRefused
from prefixd.integrations.engine.daemon_link import Link, LinkDown
from prefixd.integrations.engine.geometry import Geometry
from prefixd.integrations.engine.jobs import LoadJob, LoadOutcome, Outcomes, SaveJob
from prefixd_swap import CopyEngine, PageCopies, StreamMark, SwapError

if TYPE_CHECKING:
    from prefixd_swap.codecs.on_device.object_copies import ObjectCopies

_SAVE_PAUSE_S = 1.0
_RETAIN_PAUSE_S = 60.0
_COMPLAINT_S = 60.0
_ROOM_S = 2.0  # longest wait of a slice for memory that others hold; then the engine computes the rest
_ROOM_PAUSE_S = 0.005
_LONGEST_ROOM_PAUSE_S = 0.1


class Transfers:
    """One rank's loads and saves.

    Args:
        link: the connection to the daemon.
        geometry: how prefixd blocks are made of the engine's.
        pages: this rank's memory, one entry per group of `geometry`.
        rank: of this worker among the tensor-parallel ones.
        engine: copies page by page.
        counters: count loads and saves.
        ordinal: the CUDA device; its copies need the arena pinned. None on a CPU.
        page_copies: copies in batches instead, for pages on a device.
        object_copies: makes int8 objects of pages instead, where the groups of `geometry` say so.
    """

    def __init__(
        self,
        link: Link,
        geometry: Geometry,
        pages: Sequence[GroupPages],
        rank: int,
        engine: CopyEngine,
        counters: ConnectorCounters,
        ordinal: int | None = None,
        page_copies: PageCopies | None = None,
        object_copies: ObjectCopies | None = None,
    ) -> None:
        self._link = link
        self._geometry = geometry
        self._pages = list(pages)
        self._rank = rank
        self._parts = geometry.parts_of(rank)
        self._counts_hits = rank == 0
        self._copies = PartCopies(geometry, self._pages, engine, page_copies, object_copies)
        self._counters = counters
        self._ordinal = ordinal
        self._pin = ArenaPin(ordinal, link.log) if ordinal is not None else None
        self._changed = threading.Condition()
        self._outcomes = Outcomes()
        self._received: set[str] = set()
        self._failed_requests: dict[str, set[int]] = {}
        self._failed_ids: set[int] = set()
        self._loading = 0
        self._layers = LayerArrivals(len(self._pages[0].layers))
        self._saves: deque[tuple[SaveJob, Fence]] = deque()
        self._saving = False
        self._save_again_s = 0.0
        self._retain_again_s = 0.0
        self._complain_again_s = 0.0
        if self._pin is not None:
            self._link.spawn(partial(self._pin_early, self._pin)).add_done_callback(link.report)

    # -- from the engine's thread -----------------------------------------------------------------------------------

    def load(self, job: LoadJob, fence: Fence = computed_already) -> None:
        """Starts a load into blocks that are unused once `fence` returns.

        The bytes are there when the load is reported, so work that is submitted later reads them, in any stream.
        """
        with self._changed:
            self._loading += 1
        if job.waits:
            self._layers.begin(job.request_id)
        began_s = time.monotonic()
        there = Progress()
        future = self._link.spawn(lambda: self._load(job, fence, there))
        future.add_done_callback(lambda done: self._report_load(job, there, done, time.monotonic() - began_s))

    def save(self, jobs: Sequence[SaveJob], fence: Fence) -> None:
        """Queues saves of blocks that are complete once `fence` returns."""
        with self._changed:
            self._saves.extend((job, fence) for job in jobs)
            if self._saving or not self._saves:
                return
            self._saving = True
        self._link.spawn(self._run_saves).add_done_callback(self._link.report)

    def wait_for_layer(self, layer: int, stream: int | None = None) -> None:
        """Waits until every load that this step computes on has the layer's bytes, or has failed.

        On a GPU only `stream` waits for bytes that are on their way; None: the stream that torch computes in.
        """

        def hold(mark: StreamMark) -> None:
            assert self._ordinal is not None, "a load without a GPU has no marks"
            mark.hold(computing_stream(self._ordinal) if stream is None else stream)

        self._layers.wait_for(layer, hold)

    def wait_for_loads_of_step(self) -> None:
        """Waits until every load that this step computes on has ended."""
        self._layers.wait_for_all()

    def wait_for_any(self, timeout_s: float) -> None:
        """Waits until a load or save has ended, or for `timeout_s`; returns at once if none is under way."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._outcomes) or not (self._loading or self._saving), timeout_s)

    def take_received(self) -> tuple[set[str], dict[str, set[int]]]:
        """Returns the requests with loads that ended since the last call, and for loads that failed as a whole the
        engine's blocks by request."""
        with self._changed:
            received, failed = self._received, self._failed_requests
            self._received, self._failed_requests = set(), {}
            return received, failed

    def take_failed_ids(self) -> set[int]:
        """Returns the engine's blocks that have no valid bytes since a load failed, and forgets them."""
        with self._changed:
            failed, self._failed_ids = self._failed_ids, set()
            return failed

    def take_outcomes(self) -> Outcomes:
        """Returns the jobs that ended since the last call."""
        with self._changed:
            outcomes, self._outcomes = self._outcomes, Outcomes()
            return outcomes

    def close(self) -> None:
        """Ends the session and waits for the copies under way."""
        self._link.close()
        self._copies.close()
        if self._pin is not None:
            self._pin.drop()

    # -- loads, in the link's thread --------------------------------------------------------------------------------

    async def _load(self, job: LoadJob, fence: Fence, there: Progress) -> None:
        """Loads slice by slice, each under a lease of its own; holds no lease while it waits for the next."""
        done = 0
        slice_blocks = self._link.slice_blocks(self._geometry.block_bytes)
        while done < job.blocks:
            lease = await self._lease_slice(job, done, min(slice_blocks, job.blocks - done))
            if lease is None:
                return
            try:
                if not done:
                    await _wait_for(fence)
                nbytes = await self._load_slice(job, lease, done)
                await self._link.guard(lease.release)
            except BaseException:
                self._link.give_back(lease)
                raise
            done += lease.blocks
            there.nbytes += nbytes
            if done == job.blocks or not self._geometry.needs_end:
                there.blocks = done

    async def _lease_slice(self, job: LoadJob, done: int, most: int) -> AsyncLease | None:
        """Leases up to `most` blocks behind the first `done` of a job; waits up to `_ROOM_S` for room. None if no more
        of the prefix is cached, or the lease would be useless."""
        pause_s, until_s = _ROOM_PAUSE_S, time.monotonic() + _ROOM_S
        while True:
            lease: AsyncLease | None
            try:
                lease = await self._link.guard(partial(self._acquire, job, done, most), self._limit_s(job, most))
            except ExhaustedError:  # the tenant holds as much as it may
                lease = None
            if lease is not None:
                # An older daemon leases the bytes that a prefix of the lease's length needs, not of the job's length.
                useless = self._geometry.needs_end and not lease.cached_blocks and lease.blocks < job.blocks
                if lease.blocks and not useless:
                    return lease
                if lease.blocks:
                    self._link.give_back(lease)
                if lease.cached_blocks <= job.first_block + done:
                    return None
            if time.monotonic() >= until_s:
                return None
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_ROOM_PAUSE_S)

    async def _load_slice(self, job: LoadJob, lease: AsyncLease, done: int) -> int:
        """Copies the blocks of a lease, which follow the first `done` of a job; returns their bytes."""
        groups = range(len(self._pages))
        nbytes = 0

        def parts_of(blocks: range) -> list[PartAt]:
            listed = (
                self._copies.parts_at(lease, base, block, groups, job.block_ids, done + block) for block in blocks
            )
            return [part for parts in listed for part in parts]

        async with self._mapped_arena(lease) as base:
            if job.waits and lease.blocks == job.blocks:
                arrived = partial(self._layers.add, job.request_id)
                return await self._copies.load_in_turn(parts_of(range(lease.blocks)), arrived, lease.check)
            for blocks in self._copies.batches(lease.blocks):
                nbytes += await self._copies.copy(parts_of(blocks), None, Direction.LOAD)
        return nbytes

    async def _acquire(self, job: LoadJob, done: int, most: int) -> AsyncLease:
        cache = await self._link.cache(job.prefix.spec)
        with within_request(job.request_id), within_trace(job.traceparent):
            return await cache.acquire(
                np.frombuffer(job.prefix.tokens, "<u4"),
                first_block=job.first_block + done,
                max_blocks=most,
                parts=self._parts,
                prefix_blocks=job.first_block + job.blocks,
                counted=False,
                found=job.found if self._counts_hits else None,
            )

    def _report_load(self, job: LoadJob, there: Progress, done: Future[None], elapsed_s: float) -> None:
        error = LinkDown("the engine ends") if done.cancelled() else done.exception()
        good = there.blocks
        if error is not None and not isinstance(error, LinkDown | LeaseLost):
            self._link.log.error("prefixd: the prefix of request %s could not be loaded: %s", job.request_id, error)
        failed = job.blocks - good
        nbytes = there.nbytes if good else 0
        with self._changed:
            self._loading -= 1
            if not job.waits:
                self._received.add(job.request_id)
            if failed:
                if self._geometry.by_block:
                    per_block = len(job.block_ids[0]) // job.blocks
                    self._failed_ids.update(
                        block for block in job.block_ids[0][good * per_block :] if block != NO_BLOCK
                    )
                else:
                    every = {block for ids in job.block_ids for block in ids}
                    self._failed_requests[job.request_id] = every - {NO_BLOCK}
            self._outcomes.merge(Outcomes({job.request_id: (1, LoadOutcome(nbytes, elapsed_s, failed))}))
            self._changed.notify_all()
        self._layers.end(job.request_id)  # after the failed blocks are known
        self._counters.loaded(nbytes, elapsed_s, failed)

    # -- saves, one after the other, in the link's thread -----------------------------------------------------------

    async def _run_saves(self) -> None:
        while self._saves:
            job, fence = self._saves[0]
            groups = self._geometry.saved_by(self._rank, job.prefix.tokens, job.groups)
            kept = Progress()
            try:
                if groups:  # else another rank saves all of it
                    with within_request(job.request_id), within_trace(job.traceparent):
                        await self._save(job, groups, fence, kept)
            except (LinkDown, LeaseLost):
                pass  # counted below as dropped
            except (ClientError, SwapError) as error:
                self._link.log.error("prefixd: %d blocks could not be saved: %s", job.blocks, error)
            except Exception as error:  # after any error the engine gets its blocks back
                self._link.log.error("prefixd: %d blocks could not be saved", job.blocks, exc_info=error)
            self._counters.saved(kept.nbytes)
            # Blocks are counted with the body's groups; saves of other groups add bytes to counted blocks.
            if groups and groups[0] in self._geometry.body:
                self._counters.saved_blocks(kept.blocks, kept.duplicates, job.blocks - kept.blocks - kept.duplicates)
            with self._changed:
                self._saves.popleft()
                self._saving = bool(self._saves)
                self._outcomes.merge(Outcomes(saves={job.id: 1}))
                self._changed.notify_all()
                if not self._saving:
                    return

    async def _save(self, job: SaveJob, groups: Sequence[int], fence: Fence, kept: Progress) -> None:
        """Saves a job's bytes of `groups`."""
        if not self._link.up or self._link.draining or time.monotonic() < self._save_again_s:
            return
        await _wait_for(fence)
        cache = await self._link.guard(partial(self._link.cache, job.prefix.spec))
        done = job.first_block
        end = job.first_block + job.blocks
        tokens = np.frombuffer(job.prefix.tokens, "<u4")[: end * self._geometry.block_tokens]  # no slots for others
        block_bytes = sum(self._geometry.groups[group].part_bytes for group in groups)
        block_ids = [ids for group, ids in zip(job.groups, job.block_ids, strict=True) if group in groups]
        while done < end:
            reservation = await self._link.guard(
                partial(self._reserve, cache, tokens, done, groups), 2 * self._link.timeout_s
            )
            if reservation is None:
                return
            try:
                if not reservation.blocks:
                    kept.duplicates += end - done
                    return
                if reservation.first_block < done:  # its prefix was evicted meanwhile
                    return
                kept.duplicates += reservation.first_block - done
                skipped = reservation.first_block - job.first_block
                filled = await self._fill(reservation, groups, block_ids, skipped)
                if not filled:
                    return
                retention = job.retention if time.monotonic() >= self._retain_again_s else ()
                try:
                    commit = partial(reservation.commit, filled, retention=retention)
                    result = await self._link.guard(commit, self._limit_s(job))
                except ExhaustedError as error:  # an older daemon refuses the blocks together with the priorities
                    if not retention:
                        raise
                    self._pause_priorities(str(error))
                    continue
                if result.retention_refused:
                    self._pause_priorities(result.retention_refused)
                done = reservation.first_block + reservation.blocks
                kept.blocks += result.committed
                kept.nbytes += result.committed * block_bytes
                kept.duplicates += result.duplicates
                if filled < reservation.blocks:
                    return
            finally:
                self._link.give_back(reservation)  # unless it was committed

    async def _fill(
        self,
        reservation: AsyncReservation,
        groups: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        skipped: int,
    ) -> int:
        """Copies the job's blocks behind the first `skipped` into a reservation; returns how many of its first blocks
        may be committed: all but a refused one and those behind it."""
        async with self._mapped_arena(reservation) as base:
            for blocks in self._copies.batches(reservation.blocks):
                parts = [
                    part
                    for block in blocks
                    for part in self._copies.parts_at(reservation, base, block, groups, block_ids, skipped + block)
                ]
                try:
                    await self._copies.copy(parts, None, Direction.SAVE)
                except PartRefused as refused:
                    self._counters.refused(1)
                    self._complain(refused)
                    return blocks.start + refused.place // len(groups)
        return reservation.blocks

    async def _reserve(
        self,
        cache: AsyncCache,
        tokens: np.ndarray[tuple[int], np.dtype[np.uint32]],
        first_block: int,
        groups: Sequence[int],
    ) -> AsyncReservation | None:
        """Reserves slots for the groups' parts of the blocks from `first_block` on; None if there is no room now."""
        parts = [self._parts[group] for group in groups]
        try:
            async with asyncio.timeout(self._link.timeout_s):
                return await cache.reserve(tokens, first_block=first_block, parts=parts)
        except TimeoutError:
            # The daemon waits for the disk. The engine goes on; it computes the blocks again if it needs them.
            self._save_again_s = time.monotonic() + _SAVE_PAUSE_S
            await self._link.probe()  # raises if the daemon is away
            return None
        except ExhaustedError:
            return None

    # -- both -------------------------------------------------------------------------------------------------------

    def _pause_priorities(self, why: str) -> None:
        """Saves without priorities for `_RETAIN_PAUSE_S`, since the daemon would refuse them again."""
        self._retain_again_s = time.monotonic() + _RETAIN_PAUSE_S
        self._link.log.warning(
            "prefixd: for %g s blocks are saved without the priorities that requests ask for: %s", _RETAIN_PAUSE_S, why
        )

    def _complain(self, refused: PartRefused) -> None:
        if time.monotonic() >= self._complain_again_s:
            self._complain_again_s = time.monotonic() + _COMPLAINT_S
            self._link.log.warning(
                "prefixd: codec_on_device: a block and those behind it are not saved (%s); refused_blocks counts them, "
                "and for %g s the log does not. Where there are many, leave the option out: with `codec` such blocks "
                "are stored without loss",
                refused.why.value,
                _COMPLAINT_S,
            )

    def _limit_s(self, job: LoadJob | SaveJob, blocks: int | None = None) -> float:
        """Time limit of a call that may wait for the bytes of `blocks` of a job's blocks (None: all)."""
        blocks = job.blocks if blocks is None else blocks
        whole = blocks * self._geometry.block_bytes
        return self._link.limit_s(self._geometry.nbytes(blocks) if isinstance(job, LoadJob) else whole)

    @asynccontextmanager
    async def _mapped_arena(self, hold: AsyncLease | AsyncReservation) -> AsyncIterator[int]:
        """The arena's address; it stays mapped for as long as the context lasts, even if the session ends meanwhile."""
        arena = self._link.arena
        if arena is None:
            raise LeaseLost("the session ended before the copy began")
        with hold.copying():
            mapped = arena.bytes_at(0, arena.nbytes)
            async with nullcontext() if self._pin is None else self._pin.use(arena, hold.check):
                yield int(mapped.ctypes.data)
            del mapped

    async def _pin_early(self, pin: ArenaPin) -> None:
        """Pins the arena before the first load, which would wait for it."""
        if (arena := self._link.arena) is not None:
            async with pin.use(arena, lambda: None):  # no lease to check
                pass


class Progress:
    """Blocks and bytes that a job has moved so far."""

    def __init__(self) -> None:
        self.blocks = 0
        self.nbytes = 0
        self.duplicates = 0


async def _wait_for(fence: Fence) -> None:
    if fence is not computed_already:
        await asyncio.to_thread(fence)
