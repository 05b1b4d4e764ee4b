"""vTensor's manager: gives requests memory by mapping physical chunks on virtual addresses (section 5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from prefixd_swap.errors import IntegrityError, MemoryMisuseError, OutOfMemoryError
from prefixd_swap.group_shape import KvGeometry
from prefixd_swap.vmem.base import FrameId, VirtualMemory
from prefixd_swap.vmem.frame_table import FrameTable
from prefixd_swap.vtensor.frame_lists import NO_FRAME, present
from prefixd_swap.vtensor.physical_set import PhysicalSet
from prefixd_swap.vtensor.row_mapping import RowMapping
from prefixd_swap.vtensor.unused_mappings import UnusedMappings
from prefixd_swap.vtensor.virtual_set import VirtualSet
from prefixd_swap.vtensor.virtual_tensor import VirtualTensor

if TYPE_CHECKING:
    import torch


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
    before touching a virtual tensor's memory. `mapping` maps ahead of need too, `unused` unmaps, and `own_memory` grows
    virtual tensors with frames of `physical`.

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
        self._fence = memory.fence()
        self._live: dict[int, VirtualTensor] = {}
        self._recorded: Counter[FrameId] = Counter()
        self.mapping = RowMapping(self.virtual, table, background)
        self.unused = UnusedMappings(self.virtual, self.physical, self.mapping, self._live)

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

    def blocks_of(self, tokens: int) -> int:
        """Blocks that so many tokens fill or begin."""
        return -(-tokens // self.geometry.block_tokens) * self.virtual.frames_per_block

    # -- scheduling (vTensor 5.4) -------------------------------------------------------------------------------

    def create(self, wanted: Sequence[FrameId] = ()) -> VirtualTensor:
        """A virtual tensor without memory, on the addresses where most of `wanted` are still mapped.

        Without `wanted`: where most of this manager's own free frames are still mapped (vAttention, 6.2.2), else where
        nothing is mapped. Raises OutOfMemoryError when all addresses are in use.
        """
        if self.virtual.idle_count == 0:
            self.poll()
        row = self.virtual.v_alloc(wanted, self.physical.is_free, self.mapping.ahead.expected_rows)
        if row is None:
            raise OutOfMemoryError(
                f"all {len(self.virtual.rows)} virtual tensors are taken; end a request, or reserve for more requests"
            )
        self.mapping.ahead.take(row.number)
        tensor = VirtualTensor(row, self.virtual.kv[row.number], self.geometry, self.virtual.frames_per_block)
        self._live[row.number] = tensor
        return tensor

    def open(self, frames: Sequence[FrameId]) -> VirtualTensor:
        """A virtual tensor with `frames` as its first blocks, on the addresses where most of them are still mapped.

        Raises as `create` and `extend`.
        """
        tensor = self.create(frames)
        try:
            self.extend(tensor, frames)
        except BaseException:
            self.release(tensor)
            raise
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

    def truncate(self, tensor: VirtualTensor, tokens: int) -> None:
        """Give back the memory of the blocks behind the first `tokens` tokens, which nothing on the device uses.

        The mappings stay, as after `release`.
        """
        self.give_back(tensor, self.blocks_of(tokens))

    def give_back(self, tensor: VirtualTensor, first: int) -> None:
        """Give up the frames from block `first` on.

        The last frame becomes free first, so `p_alloc` takes it first: the leading frames stay free the longest for the
        next request on this row, where they are still mapped.
        """
        self.physical.release(reversed(present(tensor._frames[first:])))
        del tensor._frames[first:]
        tensor._passed = min(tensor._passed, first)

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
        return self.open(tensor._frames)

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
            self.mapping.counts.copied += self.blocks_of(first + count) - first // block * self.virtual.frames_per_block

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
        mapped on these addresses, or until `unused.reclaim`. Raises DeviceError when the driver records no event: the
        tensor is then not released, and can be released again.
        """
        if self._live.get(tensor.row) is not tensor:
            raise MemoryMisuseError(f"virtual tensor {tensor.row} is released already; release it once")
        for _, job in tensor._mapping:
            job.exception()  # waits; after a failure the blocks are just not mapped

        def give_back() -> None:
            self._remove_live(tensor)
            self.give_back(tensor, 0)
            self.virtual.v_free(tensor._row)
            self.mapping.ahead.stale = True
            if on_released is not None:
                on_released()

        self._fence.retire(streams, give_back)
        self._remove_live(tensor)

    # -- waiting ------------------------------------------------------------------------------------------------

    def wait(self, tensors: Iterable[VirtualTensor], tokens: int | None = None) -> None:
        """Wait until `tensors`, or their first `tokens` tokens, are mapped.

        Raises the error of a background mapping of them, in every call: blocks that could not be mapped stay unmapped.
        """
        needed = self.virtual.blocks if tokens is None else self.blocks_of(tokens)
        for tensor in tensors:
            for block, job in tensor._mapping:
                if block < needed:
                    job.result()
            tensor._mapping = [(block, job) for block, job in tensor._mapping if block >= needed]

    def poll(self, wait: bool = False) -> int:
        """Finish the releases that are due, or with `wait` all; returns the number left."""
        return self._fence.poll(wait)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless references, frames and mappings agree. Waits for mappings in the background."""
        self.mapping.drain()
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
        self.mapping.drain()
        self._fence.close()
        self.virtual.close()

    # -- inside -------------------------------------------------------------------------------------------------

    def _retain_and_map(
        self, tensor: VirtualTensor, first: int, frames: list[FrameId], retained: Sequence[FrameId]
    ) -> None:
        """Add a reference to `retained` and map `frames` from block `first` on; when this raises, neither."""
        self.physical.retain(retained)
        try:
            job = self.mapping.map(tensor._row, first, frames)
        except BaseException:
            self.physical.release(retained)
            raise
        if job is not None:
            tensor._mapping.append((first, job))

    def _remove_live(self, tensor: VirtualTensor) -> None:
        """Remove `tensor` from the live ones, unless its row is another tensor's already."""
        if self._live.get(tensor.row) is tensor:
            del self._live[tensor.row]
