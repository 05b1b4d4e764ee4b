"""vTensor's manager: gives requests memory by mapping physical chunks on virtual addresses (section 5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from prefixd_swap.errors import IntegrityError, MemoryMisuseError, OutOfMemoryError
from prefixd_swap.group_shape import KvGeometry
from prefixd_swap.number_runs import consecutive_runs, true_runs
from prefixd_swap.vmem.base import FrameId, VirtualMemory
from prefixd_swap.vmem.frame_table import FrameTable
from prefixd_swap.vtensor.frame_lists import NO_FRAME, in_place, present
from prefixd_swap.vtensor.mapping_ahead import MappingAhead
from prefixd_swap.vtensor.physical_set import PhysicalSet
from prefixd_swap.vtensor.virtual_set import Row, VirtualSet
from prefixd_swap.vtensor.virtual_tensor import VirtualTensor

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class MappingCounts:
    """Blocks that requests got since the start.

    mapped: blocks that were mapped.  reused: blocks that were still mapped there by an earlier request.
    copied: blocks whose bytes were copied (copy on write, tails).
    """

    mapped: int = 0
    reused: int = 0
    copied: int = 0


class VirtualTensorManager:
    """Creates, extends, shares and releases virtual tensors.

    vTensor's pool (5.2) has three parts: `virtual` (vSet), `physical` (pSet), and the prefix tree. The caller keeps the
    prefix tree: it passes the frames of a cached prefix to `match`, and keeps frames by `record` until `forget`.
    vTensor's operations (5.3) are `virtual.v_alloc`, `physical.p_alloc`, `virtual.map`, `virtual.unmap`,
    `virtual.v_free` and `physical.p_free`; its scheduling (5.4) is `create`, `extend`, `match` (Prefix Match),
    `record` (Prefix Record) and `release`.

    ```
    frame of block    0    1    2    3
    a                [7]  [3]  [4]  [9]     after fork(a) -> b: 7, 3, 4 and 9 have two references
    b                [7]  [3]  [4]  [12]    after writable(b, 3, 12): its last block is a copy of its own
    ```

    Not thread-safe: one thread owns it. `background` makes the mappings in order while the owner computes; call `wait`
    before touching a virtual tensor's memory.

    Args:
        memory: the memory of all frames.
        table: the frames' chunks.
        geometry: the shape of the KV.
        requests: the most virtual tensors at a time.
        max_tokens: the longest virtual tensor.
        limit: the most frames that `physical.p_alloc` creates; 0 if frames come from another process.
        background: a single thread that makes mappings; None: the caller's thread makes them at once.
        frames_per_block: as in `VirtualSet`; "block" here then means one of its frames.

    Raises GeometryError for a frame that is not whole chunks, OutOfMemoryError without address space.
    """

    def __init__(
        self,
        memory: VirtualMemory,
        table: FrameTable,
        geometry: KvGeometry,
        *,
        requests: int,
        max_tokens: int,
        limit: int = 0,
        background: Executor | None = None,
        frames_per_block: int = 1,
    ) -> None:
        self.geometry = geometry
        self.memory = memory
        self.virtual = VirtualSet(memory, table, geometry, requests, max_tokens, frames_per_block)
        self.physical = PhysicalSet(memory, table, limit)
        self.counts = MappingCounts()
        self._background = background
        self._fence = memory.fence()
        self._live: dict[int, VirtualTensor] = {}
        self._recorded: Counter[FrameId] = Counter()
        self._last: Future[None] | None = None  # the last mapping in the background
        self._round: Future[None] | None = None  # work of `ahead` in the background
        self.ahead = MappingAhead(self.virtual, table, self._is_waited_for)
        """Maps and unmaps on idle rows, by `expect` and `map_ahead`."""
        self.neighbours: Sequence[VirtualTensorManager] = ()
        """All managers, this one included, that share the process's mappings and one `background`."""

    @property
    def kv(self) -> torch.Tensor:
        """All virtual tensors as one: ``[requests, tokens, layers, 2, kv_heads, head_dim]``."""
        return self.virtual.kv

    @property
    def live(self) -> Iterable[VirtualTensor]:
        """The virtual tensors that are not released."""
        return self._live.values()

    @property
    def releasing_count(self) -> int:
        """Released virtual tensors that still wait for a stream."""
        return len(self.virtual.rows) - self.virtual.idle_count - len(self._live)

    # -- scheduling (vTensor 5.4) -------------------------------------------------------------------------------

    def create(self, wanted: Sequence[FrameId] = ()) -> VirtualTensor:
        """A virtual tensor without memory, on the addresses where most of `wanted` are still mapped.

        Without `wanted`: where most of this manager's own free frames are still mapped (vAttention, 6.2.2), else where
        nothing is mapped. Raises OutOfMemoryError when all addresses are in use.
        """
        if self.virtual.idle_count == 0:
            self.poll()
        row = self.virtual.v_alloc(wanted, self.physical.is_free, self.ahead.expected_rows)
        if row is None:
            raise OutOfMemoryError(
                f"all {len(self.virtual.rows)} virtual tensors are taken; end a request, or reserve for more requests"
            )
        self.ahead.take(row.number)
        tensor = VirtualTensor(row, self.virtual.kv[row.number], self.geometry, self.virtual.frames_per_block)
        self._live[row.number] = tensor
        return tensor

    def match(self, tensor: VirtualTensor, frames: Sequence[FrameId]) -> None:
        """Prefix Match: map `frames`, which hold a prefix and may be shared, as the next blocks."""
        self.extend(tensor, frames)

    def extend(self, tensor: VirtualTensor, frames: Sequence[FrameId]) -> None:
        """Extend: map `frames` as the next blocks, each with one more reference.

        A block with -1 in `frames` has no memory: nothing reads or writes it.

        Maps all of them or, when this raises, none. Raises MemoryMisuseError past the longest virtual tensor or for a
        frame that does not exist, OutOfMemoryError when the process has no mapping left; with `background`, `wait`
        raises that.
        """
        first = len(tensor._frames)
        if first + len(frames) > self.virtual.blocks:
            raise MemoryMisuseError(
                f"{len(frames)} more blocks do not fit: {first} of {self.virtual.blocks} are mapped; "
                "reserve virtual tensors for more tokens"
            )
        self._retain_and_map(tensor, first, list(frames), present(frames))
        tensor._frames.extend(frames)

    def grow(self, tensor: VirtualTensor, tokens: int) -> bool:
        """`grow_all` of one virtual tensor."""
        return self.grow_all({tensor: tokens})

    def grow_all(self, tokens: Mapping[VirtualTensor, int]) -> bool:
        """Extend each virtual tensor with frames of `physical.p_alloc` until it has memory for its tokens.

        False, and nothing changed, if that exceeds the limit of frames. Raises as `extend`, with nothing changed.
        """
        lacking: list[tuple[VirtualTensor, int]] = []
        slots: list[FrameId] = []  # the frames that are mapped now on the new blocks
        for tensor, wanted in tokens.items():
            first = len(tensor._frames)
            stop = max(first, self._blocks(wanted))
            if stop > self.virtual.blocks:
                raise MemoryMisuseError(
                    f"{wanted} tokens do not fit into a virtual tensor of {self.virtual.tokens}; reserve for more"
                )
            lacking.append((tensor, stop - first))
            slots += tensor._row.mapped[first:stop]
        if not slots:
            return True
        frames = self.physical.p_alloc(len(slots), slots)
        if frames is None:
            return False
        placed = iter(in_place(slots, frames))
        grown: list[tuple[VirtualTensor, int]] = []
        try:
            for tensor, count in lacking:
                self.extend(tensor, list(islice(placed, count)))
                grown.append((tensor, count))
        except BaseException:
            for tensor, count in grown:
                self._give_back(tensor, len(tensor._frames) - count)
            raise
        finally:
            self.physical.release(frames)  # p_alloc's reference; extend has taken its own
        return True

    def truncate(self, tensor: VirtualTensor, tokens: int) -> None:
        """Give back the memory of the blocks behind the first `tokens` tokens, which nothing on the device uses.

        The mappings stay, as after `release`.
        """
        self._give_back(tensor, self._blocks(tokens))

    def prepare(self, tokens: int, most: int) -> int:
        """Eager allocation (vAttention, 6.2.2): map free frames for `tokens` tokens on the row of the next `create`.

        The frames stay free, so other requests can still take them. Maps at most `most` frames, and none if that
        exceeds the limit of frames; returns the number mapped. Raises as `extend`.
        """
        row = self.virtual.next_row(is_free=self.physical.is_free)
        if row is None:
            return 0
        first = row.leading(self.physical.is_free)
        stop = min(self._blocks(tokens), self.virtual.blocks, first + most)
        # From block 0 on: frames that are mapped on its leading blocks must not be used for later blocks.
        frames = self.physical.p_alloc(stop, row.mapped[:stop]) if stop > first else None
        if frames is None:
            return 0
        try:
            self._run(row, first, in_place(row.mapped[:stop], frames)[first:])
        finally:
            self.physical.release(reversed(frames))
        return stop - first

    def expect(self, frames: Sequence[FrameId]) -> None:
        """A request with `frames` as its first blocks will probably come: `map_ahead` maps them where its `create` will
        look for them. Does nothing without `background`: the owner would wait for the mapping all the same."""
        if self._background is not None:
            self.ahead.expect(frames)

    def map_ahead(self) -> None:
        """Begin what may wait, in the background, when the device begins to compute (vAttention, 6.2): map what is
        expected, and unmap idle rows (`MappingAhead`). Raises the error of the device in the background before."""
        if self._background is None or not self.ahead.stale:
            return
        if self._round is None or self._round.done():
            if self._round is not None:
                self._round.result()
            self._round = self._background.submit(self.ahead.work)

    def record(self, tensor: VirtualTensor, first: int, stop: int) -> Sequence[FrameId]:
        """Prefix Record: the frames of blocks [first, stop), which are full and are not written again.

        Each frame gets one more reference, which keeps it after the end of the request, until `forget`.
        """
        if not 0 <= first <= stop <= len(tensor._frames):
            raise MemoryMisuseError(f"blocks {first} to {stop} of {len(tensor._frames)} cannot be recorded")
        frames = tuple(tensor._frames[first:stop])
        self.physical.retain(frames)
        self._recorded.update(frames)
        return frames

    def forget(self, frames: Sequence[FrameId]) -> None:
        """Give back the references that `record` took, after the prefix tree has dropped these frames."""
        if not Counter(frames) <= self._recorded:
            raise MemoryMisuseError(f"frames {list(frames)[:8]} were not all recorded; forget what record() returned")
        self.physical.release(frames)
        self._recorded.subtract(frames)

    def fork(self, tensor: VirtualTensor) -> VirtualTensor:
        """A second virtual tensor with the same memory, the last block included; see `writable`.

        Raises OutOfMemoryError when all addresses are in use or the process has no mapping left.
        """
        other = self.create(tensor._frames)
        try:
            self.extend(other, tensor._frames)
        except BaseException:
            self.release(other)
            raise
        return other

    def assign(self, tensor: VirtualTensor, frames: Sequence[FrameId]) -> None:
        """Replace the frames of `tensor` (beam search); only the blocks from the first difference on are mapped.

        Nothing on the device uses `tensor`. Raises as `extend`; `tensor` can then only be released.
        """
        before, after = tensor._frames, list(frames)
        pairs = zip(before, after, strict=False)
        same = next((block for block, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(before), len(after)))
        self._retain_and_map(tensor, same, after[same:], present(after))
        tensor._frames = after
        self.physical.release(present(before))

    def pass_by(self, tensor: VirtualTensor, blocks: int) -> None:
        """Give up the memory of the first `blocks` blocks, which a sliding window has left behind.

        Nothing reads or writes them any more. Their mappings stay, as after `release`.
        """
        passed = range(tensor._passed, min(blocks, len(tensor._frames)))
        self.physical.release(present(tensor._frames[passed.start : passed.stop]))
        tensor._frames[passed.start : passed.stop] = [NO_FRAME] * len(passed)
        tensor._passed = max(tensor._passed, passed.stop)

    def is_shared(self, tensor: VirtualTensor, block: int) -> bool:
        """Whether the block's frame has another reference: another virtual tensor's, or a recorded prefix's."""
        return self.physical.references(tensor._frames[block]) > 1

    def writable(self, tensor: VirtualTensor, block: int, frame: FrameId, tokens: int) -> None:
        """Copy on write: make `frame` the memory of a shared block, with a copy of the block's first `tokens` tokens.

        Nothing on the device uses `tensor`; the copy is queued on the current stream. `frame` gets a reference; its old
        bytes are overwritten. Raises as `extend`; `tensor` can then only be released.
        """
        shared = tensor._frames[block]
        source = next(
            (
                other
                for other in self._live.values()
                if other is not tensor and block < len(other._frames) and other._frames[block] == shared
            ),
            None,
        )
        if source is None:
            raise MemoryMisuseError(
                f"block {block} is shared with no other virtual tensor: write to it as it is if it has one reference, "
                "or forget the recorded prefix that it is part of"
            )
        self._retain_and_map(tensor, block, [frame], [frame])
        try:
            self.wait([tensor, source])
        except BaseException:
            self.physical.release([frame])
            raise
        tensor._frames[block] = frame
        self.physical.release([shared])
        self.copy_tokens(source, tensor, block * self.geometry.block_tokens, tokens)

    def copy_tokens(self, source: VirtualTensor, target: VirtualTensor, first: int, count: int) -> None:
        """Copy `count` tokens from `first` on, on the current stream: the tail of a prefix that fills no block."""
        if count > 0:
            target.kv[first : first + count].copy_(source.kv[first : first + count])
            block = self.geometry.block_tokens
            self.counts.copied += self._blocks(first + count) - first // block * self.virtual.frames_per_block

    def release(
        self,
        tensor: VirtualTensor,
        *,
        streams: Iterable[int] = (),
        on_released: Callable[[], None] | None = None,
    ) -> None:
        """Release: give references and addresses back once the work that `streams` hold now has ended.

        On host memory that is at once; on CUDA `poll` does it later. `on_released` is called then; only after it may
        the frames get other bytes. Nothing is unmapped (lazy deallocation): the mappings stay until other frames are
        mapped on these addresses, or until `reclaim`. Raises DeviceError when the driver records no event: the tensor
        is then not released, and can be released again.
        """
        if self._live.get(tensor.row) is not tensor:
            raise MemoryMisuseError(f"virtual tensor {tensor.row} is released already; release it once")
        for _, job in tensor._mapping:
            job.exception()  # waits; after a failure the blocks are just not mapped

        def give_back() -> None:
            self._remove_live(tensor)
            self._give_back(tensor, 0)
            self.virtual.v_free(tensor._row)
            self.ahead.stale = True
            if on_released is not None:
                on_released()

        self._fence.retire(streams, give_back)
        self._remove_live(tensor)

    # -- waiting ------------------------------------------------------------------------------------------------

    def wait(self, tensors: Iterable[VirtualTensor], tokens: int | None = None) -> None:
        """Wait until `tensors`, or their first `tokens` tokens, are mapped.

        Raises the error of a background mapping of them, in every call: blocks that could not be mapped stay unmapped.
        """
        needed = self.virtual.blocks if tokens is None else self._blocks(tokens)
        for tensor in tensors:
            for block, job in tensor._mapping:
                if block < needed:
                    job.result()
            tensor._mapping = [(block, job) for block, job in tensor._mapping if block >= needed]

    def poll(self, wait: bool = False) -> int:
        """Finish the releases that are due, or with `wait` all; returns the number left."""
        return self._fence.poll(wait)

    # -- unused mappings ----------------------------------------------------------------------------------------

    def unmap_unused(self, tensor: VirtualTensor) -> int:
        """Unmap everything behind the last block of `tensor`; returns the number of blocks unmapped."""
        self._drain()
        return self.virtual.unmap(tensor._row, len(tensor._frames))

    def reclaim(self, frames: Iterable[FrameId] | None = None) -> int:
        """Unmap blocks that no request uses; returns the number of blocks unmapped.

        Those are blocks of idle rows, and blocks of rows in use that are behind the last block or have no memory. With
        `frames`: on each row only from the first block with one of them on. Frames must be mapped nowhere before they
        are destroyed (`physical.p_free`, a tier that shrinks).
        """
        self._drain()
        if frames is None:
            return sum(self.virtual.unmap(*unused) for unused in self._unused(self.virtual.idle()))
        frames = set(frames)
        self.ahead.forget(frames)
        unmapped = 0
        idle = {row.number for row in self.virtual.idle()}
        for number, blocks in self.virtual.find(frames).items():
            row, tensor = self.virtual.rows[number], self._live.get(number)
            if tensor is None:
                unmapped += self.virtual.unmap(row, int(blocks[0])) if number in idle else 0
                continue
            behind = blocks[blocks >= len(tensor._frames)]
            if len(behind):
                unmapped += self.virtual.unmap(row, int(behind[0]))
            # Of the blocks that a window has left behind, only these: a pass that still runs may read their neighbours.
            passed = [block for block in blocks.tolist() if block < len(tensor._frames)]
            empty = [block for block in passed if tensor._frames[block] == NO_FRAME]
            unmapped += sum(self.virtual.unmap(row, run.start, run.stop) for run in consecutive_runs(empty))
        return unmapped

    def reclaim_until(self, unmapped: int) -> int:
        """Reclamation below a watermark (vAttention, 6.2.2); returns the number of blocks unmapped.

        Unmaps unused blocks until `unmapped` free frames are mapped nowhere, or nothing is left to unmap. The longest
        idle rows come first, each from its end; then unused blocks of rows in use. The row of the next `create` keeps
        its mappings.
        """
        self._drain()
        spared = self.virtual.next_row(is_free=self.physical.is_free)
        done = 0
        lacking = unmapped - self.physical.unmapped_count
        for row, first, stop in self._unused(row for row in self.virtual.idle() if row is not spared):
            while lacking > 0 and stop > first:
                start = max(first, stop - lacking)
                done += (here := self.virtual.unmap(row, start, stop))
                stop = start
                if here:
                    lacking = unmapped - self.physical.unmapped_count
        return done

    def still_mapped(self, frames: Iterable[FrameId]) -> set[FrameId]:
        """Those of `frames` that are held by a block of any row."""
        self._drain()
        found = self.virtual.find(frames).items()
        return {FrameId(frame) for number, blocks in found for frame in self.virtual.rows[number].held[blocks].tolist()}

    def check_integrity(self) -> None:
        """Raise IntegrityError unless references, frames and mappings agree. Waits for mappings in the background."""
        self._drain()
        referenced = [frame for tensor in self._live.values() for frame in present(tensor._frames)]
        referenced += self._recorded.elements()
        if not self.releasing_count:
            self.physical.check_integrity(referenced)
        for tensor in self._live.values():
            pairs = zip(tensor._row.mapped, tensor._frames, strict=False)
            mapped = [at if frame != NO_FRAME else NO_FRAME for at, frame in pairs]
            if mapped != tensor._frames and not any(job.exception() for _, job in tensor._mapping):
                raise IntegrityError(f"virtual tensor {tensor.row} has frames {tensor._frames}, but maps {mapped}")
        self.virtual.check_integrity()
        self.memory.check_integrity()

    def close(self) -> None:
        """Wait for all releases and give the addresses back; `kv` and views of it must not be used any more."""
        for tensor in list(self._live.values()):
            self.release(tensor)
        self._drain()
        self._fence.close()
        self.virtual.close()

    # -- inside -------------------------------------------------------------------------------------------------

    def _retain_and_map(
        self, tensor: VirtualTensor, first: int, frames: list[FrameId], retained: Sequence[FrameId]
    ) -> None:
        """Add a reference to `retained` and map `frames` from block `first` on; when this raises, neither."""
        self.physical.retain(retained)
        try:
            job = self._run(tensor._row, first, frames)
        except BaseException:
            self.physical.release(retained)
            raise
        if job is not None:
            tensor._mapping.append((first, job))

    def _run(self, row: Row, first: int, frames: list[FrameId]) -> Future[None] | None:
        if self._background is None:
            self._map_now(row, first, frames)
            return None
        self._last = self._background.submit(self._map_now, row, first, frames)
        return self._last

    def _map_now(self, row: Row, first: int, frames: list[FrameId]) -> None:
        try:
            mapped = self.virtual.map(row, first, frames)
        except OutOfMemoryError:
            # The process has no mapping left: unmap the idle rows of all managers, and try again.
            for manager in self.neighbours or (self,):
                for idle in list(manager.virtual.idle()):
                    manager.virtual.unmap(idle)
            mapped = self.virtual.map(row, first, frames)
        self.counts.mapped += mapped
        self.counts.reused += len(frames) - mapped

    def _give_back(self, tensor: VirtualTensor, first: int) -> None:
        """Give up the frames from block `first` on.

        The last frame becomes free first, so `p_alloc` takes it first: the leading frames stay free the longest for the
        next request on this row, where they are still mapped.
        """
        self.physical.release(reversed(present(tensor._frames[first:])))
        del tensor._frames[first:]
        tensor._passed = min(tensor._passed, first)

    def _unused(self, idle: Iterable[Row]) -> list[tuple[Row, int, int]]:
        """(row, first, stop): the blocks of `idle` rows, and of rows in use the blocks without memory and those behind
        the last block."""
        unused = [(row, 0, self.virtual.blocks) for row in idle]
        for tensor in self._live.values():
            frames = tensor._frames
            if tensor._passed or NO_FRAME in frames:
                unused += [(tensor._row, run.start, run.stop) for run in true_runs(np.array(frames) == NO_FRAME)]
            unused.append((tensor._row, len(frames), self.virtual.blocks))
        return unused

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.geometry.block_tokens) * self.virtual.frames_per_block

    def _remove_live(self, tensor: VirtualTensor) -> None:
        """Remove `tensor` from the live ones, unless its row is another tensor's already."""
        if self._live.get(tensor.row) is tensor:
            del self._live[tensor.row]

    def _drain(self) -> None:
        """Wait for all that is done in the background."""
        for job in (self._last, self._round):
            if job is not None:
                job.exception()

    def _is_waited_for(self) -> bool:
        """Whether a request's mapping is queued in the background thread."""
        jobs = [manager._last for manager in self.neighbours or (self,)]
        return any(job is not None and not job.done() for job in jobs)
