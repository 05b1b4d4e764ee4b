"""vTensor's manager: what requests ask of their memory, done with virtual addresses and physical chunks (section 5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from prefixd_swap.errors import IntegrityError, MemoryMisuseError, OutOfMemoryError
from prefixd_swap.geometry import KvGeometry
from prefixd_swap.vmem.base import FrameId, VirtualMemory
from prefixd_swap.vmem.frame_table import FrameTable
from prefixd_swap.vtensor.physical_set import PhysicalSet
from prefixd_swap.vtensor.virtual_set import Row, VirtualSet, runs
from prefixd_swap.vtensor.virtual_tensor import VirtualTensor

if TYPE_CHECKING:
    import torch

_NO_FRAME = FrameId(-1)


@dataclass(slots=True)
class MappingCounts:
    """How blocks came to be where requests read them, since the start.

    mapped: blocks that had to be mapped.  reused: blocks that were still mapped there from a request before.
    copied: blocks whose bytes were copied (copy on write, tails).
    """

    mapped: int = 0
    reused: int = 0
    copied: int = 0


class VirtualTensorManager:
    """Creates, extends, shares and releases virtual tensors.

    The three parts of vTensor's pool (5.2) are `virtual` (vSet), `physical` (pSet), and the prefix tree, which is not
    here: whoever keeps prefixes says which frames hold one (`match`), and which frames are to stay as one (`record`,
    `forget`). vTensor's operations (5.3) are `virtual.v_alloc`, `physical.p_alloc`, `virtual.map`, `virtual.unmap`,
    `virtual.v_free` and `physical.p_free`; its scheduling (5.4) is `create`, `extend`, `match` (Prefix Match),
    `record` (Prefix Record) and `release`.

    ```
    frame of block    0    1    2    3
    a                [7]  [3]  [4]  [9]     after fork(a) -> b: 7, 3, 4 and 9 have two references
    b                [7]  [3]  [4]  [12]    after writable(b, 3, 12): its last block is a copy of its own
    ```

    Not thread-safe: one thread owns it. With `background`, mappings are made there, in order, while the owner computes;
    `wait` before a virtual tensor's memory is touched.

    Args:
        memory: the memory of all frames.
        table: the frames' chunks.
        geometry: the shape of the KV.
        requests: most virtual tensors at a time.
        max_tokens: the longest virtual tensor.
        limit: most frames that `physical.p_alloc` creates; 0 where frames come from another process.
        background: a single thread that maps; None maps at once.
        frames_per_block: see `VirtualSet`; what is said here of blocks is then true of frames.

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
        self.neighbours: Sequence[VirtualTensorManager] = ()
        """All managers, this one among them, that share the process's mappings and one `background`."""

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
        """How many released virtual tensors wait for a stream."""
        return len(self.virtual.rows) - self.virtual.idle_count - len(self._live)

    # -- scheduling (vTensor 5.4) -------------------------------------------------------------------------------

    def create(self, wanted: Sequence[FrameId] = ()) -> VirtualTensor:
        """A virtual tensor without memory, on addresses where most of `wanted` are still mapped.

        Without `wanted`: where most of this manager's own free frames are still mapped (vAttention, 6.2.2), else where
        nothing is. Raises OutOfMemoryError when all addresses are taken.
        """
        if self.virtual.idle_count == 0:
            self.poll()
        row = self.virtual.v_alloc(wanted, self.physical.is_free)
        if row is None:
            raise OutOfMemoryError(
                f"all {len(self.virtual.rows)} virtual tensors are taken; end a request, or reserve for more requests"
            )
        tensor = VirtualTensor(row, self.virtual.kv[row.number], self.geometry, self.virtual.frames_per_block)
        self._live[row.number] = tensor
        return tensor

    def match(self, tensor: VirtualTensor, frames: Sequence[FrameId]) -> None:
        """Prefix Match: map `frames`, which hold a prefix and which others may have too, as the next blocks."""
        self.extend(tensor, frames)

    def extend(self, tensor: VirtualTensor, frames: Sequence[FrameId]) -> None:
        """Extend: map `frames` as the next blocks, each with one reference more.

        A block for which -1 stands has no memory: nothing reads or writes it.

        All of them or, when this raises, none. Raises MemoryMisuseError past the longest virtual tensor or for a frame
        that does not exist, OutOfMemoryError when the process has no mapping left; with `background` that is raised by
        `wait`.
        """
        first = len(tensor._frames)
        if first + len(frames) > self.virtual.blocks:
            raise MemoryMisuseError(
                f"{len(frames)} more blocks do not fit: {first} of {self.virtual.blocks} are mapped; "
                "reserve virtual tensors for more tokens"
            )
        present = _present(frames)
        self.physical.retain(present)
        try:
            self._map(tensor, first, list(frames))
        except BaseException:
            self.physical.release(present)
            raise
        tensor._frames.extend(frames)

    def grow(self, tensor: VirtualTensor, tokens: int) -> bool:
        """`grow_all` of one virtual tensor."""
        return self.grow_all({tensor: tokens})

    def grow_all(self, tokens: Mapping[VirtualTensor, int]) -> bool:
        """Extend each virtual tensor with frames of `physical.p_alloc` until it has memory for its tokens.

        False, and nothing changed, when there would be more frames than the limit. Raises as `extend`, with nothing
        changed.
        """
        lacking: list[tuple[VirtualTensor, int]] = []
        slots: list[FrameId] = []  # what is mapped on the blocks to come
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
        placed = iter(_in_place(slots, frames))
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
        """Give back the memory of the blocks behind the first `tokens`, which nothing on the device uses.

        The mappings stay, as after `release`.
        """
        self._give_back(tensor, self._blocks(tokens))

    def prepare(self, tokens: int, most: int) -> int:
        """Eager allocation (vAttention, 6.2.2): map free frames where the next `create` begins, for `tokens`.

        They stay free, so whoever lacks memory can still take them. `most` frames are taken at most, none when
        there would be more frames than the limit; returns how many were. Raises as `extend`.
        """
        row = self.virtual.next_row(is_free=self.physical.is_free)
        if row is None:
            return 0
        first = row.leading(self.physical.is_free)
        stop = min(self._blocks(tokens), self.virtual.blocks, first + most)
        # From the first block on: what is mapped there already must not be taken for the blocks behind.
        frames = self.physical.p_alloc(stop, row.mapped[:stop]) if stop > first else None
        if frames is None:
            return 0
        try:
            self._run(row, first, _in_place(row.mapped[:stop], frames)[first:])
        finally:
            self.physical.release(reversed(frames))
        return stop - first

    def record(self, tensor: VirtualTensor, first: int, stop: int) -> Sequence[FrameId]:
        """Prefix Record: the frames of blocks [first, stop), which are full and are not written again.

        They get a reference more each, so that they stay when the request ends, until `forget`.
        """
        if not 0 <= first <= stop <= len(tensor._frames):
            raise MemoryMisuseError(f"blocks {first} to {stop} of {len(tensor._frames)} cannot be recorded")
        frames = tuple(tensor._frames[first:stop])
        self.physical.retain(frames)
        self._recorded.update(frames)
        return frames

    def forget(self, frames: Sequence[FrameId]) -> None:
        """Give back the references that `record` took: the prefix tree has these frames no more."""
        if not Counter(frames) <= self._recorded:
            raise MemoryMisuseError(f"frames {list(frames)[:8]} were not all recorded; forget what record() returned")
        self.physical.release(frames)
        self._recorded.subtract(frames)

    def fork(self, tensor: VirtualTensor) -> VirtualTensor:
        """A second virtual tensor with the same memory, the last block included; see `writable`.

        Raises OutOfMemoryError when all addresses are taken or the process has no mapping left.
        """
        other = self.create(tensor._frames)
        try:
            self.extend(other, tensor._frames)
        except BaseException:
            self.release(other)
            raise
        return other

    def assign(self, tensor: VirtualTensor, frames: Sequence[FrameId]) -> None:
        """Give `tensor` these frames in place of those it has: only blocks that differ are mapped anew (beam search).

        Nothing on the device uses `tensor`. Raises as `extend`; `tensor` can then only be released.
        """
        before, after = tensor._frames, list(frames)
        pairs = zip(before, after, strict=False)
        same = next((block for block, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(before), len(after)))
        present = _present(after)
        self.physical.retain(present)
        try:
            self._map(tensor, same, after[same:])
        except BaseException:
            self.physical.release(present)
            raise
        tensor._frames = after
        self.physical.release(_present(before))

    def pass_by(self, tensor: VirtualTensor, blocks: int) -> None:
        """Give up the memory of the first `blocks` blocks, which nothing reads or writes any more: a sliding window has
        left them behind. Their mappings stay, as after `release`."""
        passed = range(tensor._passed, min(blocks, len(tensor._frames)))
        self.physical.release(_present(tensor._frames[passed.start : passed.stop]))
        tensor._frames[passed.start : passed.stop] = [_NO_FRAME] * len(passed)
        tensor._passed = max(tensor._passed, passed.stop)

    def is_shared(self, tensor: VirtualTensor, block: int) -> bool:
        """Whether another virtual tensor has the block's frame too."""
        return self.physical.references(tensor._frames[block]) > 1

    def writable(self, tensor: VirtualTensor, block: int, frame: FrameId, tokens: int) -> None:
        """Copy on write: make `frame` the memory of a block that is shared, with a copy of its first `tokens` tokens.

        Nothing on the device uses `tensor`; the copy is queued on the current stream. `frame` holds nothing that is
        needed and gets a reference. Raises as `extend`; `tensor` can then only be released.
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
        self.physical.retain([frame])
        try:
            self._map(tensor, block, [frame])
            self.wait([tensor, source])
        except BaseException:
            self.physical.release([frame])
            raise
        tensor._frames[block] = frame
        self.physical.release([shared])
        self.copy_tokens(source, tensor, block * self.geometry.block_tokens, tokens)

    def copy_tokens(self, source: VirtualTensor, target: VirtualTensor, first: int, count: int) -> None:
        """Copy `count` tokens from `first` on, on the current stream: the tail of a prefix, which fills no chunk."""
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
        """Release: give references and addresses back once `streams` are done with what they hold now.

        Nothing is unmapped (lazy deallocation): the mappings stay until other frames are wanted on these addresses, or
        until `reclaim`. `on_released` is called then; only after it may the frames hold something else. On host memory
        that is at once; on CUDA `poll` runs what had to wait. Raises DeviceError when the driver takes no event: the
        tensor is not released then, and can be released again.
        """
        if self._live.get(tensor.row) is not tensor:
            raise MemoryMisuseError(f"virtual tensor {tensor.row} is released already; release it once")
        self._settle(tensor)

        def give_back() -> None:
            self._end(tensor)
            self._give_back(tensor, 0)
            self.virtual.v_free(tensor._row)
            if on_released is not None:
                on_released()

        self._fence.retire(streams, give_back)
        self._end(tensor)

    # -- time ---------------------------------------------------------------------------------------------------

    def wait(self, tensors: Iterable[VirtualTensor], tokens: int | None = None) -> None:
        """Wait until `tensors` are mapped, or their first `tokens` tokens.

        Raises what a mapping of them in the background raised, and again each time: blocks that could not be mapped
        never count as mapped.
        """
        needed = self.virtual.blocks if tokens is None else self._blocks(tokens)
        for tensor in tensors:
            for block, job in tensor._mapping:
                if block < needed:
                    job.result()
            tensor._mapping = [(block, job) for block, job in tensor._mapping if block >= needed]

    def poll(self, wait: bool = False) -> int:
        """Finish the releases that are due, or with `wait` all; returns how many are left."""
        return self._fence.poll(wait)

    # -- memory -------------------------------------------------------------------------------------------------

    def unmap_unused(self, tensor: VirtualTensor) -> int:
        """Unmap what is mapped behind the last block of `tensor`; returns how many blocks were."""
        self._drain()
        return self.virtual.unmap(tensor._row, len(tensor._frames))

    def reclaim(self, frames: Iterable[FrameId] | None = None) -> int:
        """Unmap what no request uses: everything, or what lies from one of `frames` on; returns blocks unmapped.

        That is on idle rows, and on rows in use behind the last block and where there is no memory any more. Before
        frames cease to exist they must not be mapped anywhere (`physical.p_free`, a tier that shrinks).
        """
        self._drain()
        if frames is None:
            return sum(self.virtual.unmap(*unused) for unused in self._unused(self.virtual.idle()))
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
            # Of what a window has left behind these blocks only: a pass that still runs may read their neighbours.
            passed = [block for block in blocks.tolist() if block < len(tensor._frames)]
            empty = [block for block in passed if tensor._frames[block] == _NO_FRAME]
            unmapped += sum(self.virtual.unmap(row, start, stop) for start, stop in runs(empty))
        return unmapped

    def reclaim_until(self, unmapped: int) -> int:
        """Reclamation below a watermark (vAttention, 6.2.2): unmap what no request uses until that many free frames
        are mapped nowhere, or nothing is left to unmap; returns blocks unmapped.

        Rows that have been idle longest come first, each from its end; then what rows in use do not use. The row that
        the next `create` takes keeps its mappings.
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
        """Those of `frames` of which any row still maps a piece."""
        self._drain()
        found = self.virtual.find(frames).items()
        return {FrameId(frame) for number, blocks in found for frame in self.virtual.rows[number].held[blocks].tolist()}

    def check_integrity(self) -> None:
        """Raise IntegrityError unless references, frames and mappings agree. Waits for mappings in the background."""
        self._drain()
        referenced = [frame for tensor in self._live.values() for frame in _present(tensor._frames)]
        referenced += self._recorded.elements()
        if not self.releasing_count:
            self.physical.check_integrity(referenced)
        for tensor in self._live.values():
            pairs = zip(tensor._row.mapped, tensor._frames, strict=False)
            mapped = [at if frame != _NO_FRAME else _NO_FRAME for at, frame in pairs]
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

    def _map(self, tensor: VirtualTensor, first: int, frames: list[FrameId]) -> None:
        job = self._run(tensor._row, first, frames)
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
            # The process has no mapping left: those that idle rows keep for later go first.
            for manager in self.neighbours or (self,):
                for idle in list(manager.virtual.idle()):
                    manager.virtual.unmap(idle)
            mapped = self.virtual.map(row, first, frames)
        self.counts.mapped += mapped
        self.counts.reused += len(frames) - mapped

    def _give_back(self, tensor: VirtualTensor, first: int) -> None:
        """Give up the frames from block `first` on. The last one becomes free first, hence is the first that another
        takes: the next request on this row begins where the memory is still mapped."""
        self.physical.release(reversed(_present(tensor._frames[first:])))
        del tensor._frames[first:]
        tensor._passed = min(tensor._passed, first)

    def _unused(self, idle: Iterable[Row]) -> list[tuple[Row, int, int]]:
        """On which blocks of which rows what is mapped serves nobody: on rows that are idle, and on rows in use behind
        the last block and where there is no memory."""
        unused = [(row, 0, self.virtual.blocks) for row in idle]
        for tensor in self._live.values():
            frames = tensor._frames
            if tensor._passed or _NO_FRAME in frames:
                empty = np.flatnonzero(np.array(frames) == _NO_FRAME).tolist()
                unused += [(tensor._row, start, stop) for start, stop in runs(empty)]
            unused.append((tensor._row, len(frames), self.virtual.blocks))
        return unused

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.geometry.block_tokens) * self.virtual.frames_per_block

    def _settle(self, tensor: VirtualTensor) -> None:
        """Wait for a tensor's mappings; one that failed has left its blocks unmapped, and that is all."""
        for _, job in tensor._mapping:
            job.exception()

    def _end(self, tensor: VirtualTensor) -> None:
        """Note that `tensor` is live no more; its row may be another tensor's already."""
        if self._live.get(tensor.row) is tensor:
            del self._live[tensor.row]

    def _drain(self) -> None:
        """Wait for the last mapping in the background, hence for all of them."""
        if self._last is not None:
            self._last.exception()


def _present(frames: list[FrameId] | Sequence[FrameId]) -> Sequence[FrameId]:
    """The frames but for -1, which stands where a block has no memory."""
    return [frame for frame in frames if frame != _NO_FRAME] if _NO_FRAME in frames else frames


def _in_place(mapped: Sequence[FrameId], frames: Sequence[FrameId]) -> list[FrameId]:
    """`frames` in an order that leaves those that are mapped on one of the blocks where they are."""
    left = set(frames)
    kept = []
    for frame in mapped:
        stays = frame in left
        left.discard(frame)
        kept.append(frame if stays else _NO_FRAME)
    others = (frame for frame in frames if frame in left)
    return [frame if frame != _NO_FRAME else next(others) for frame in kept]
