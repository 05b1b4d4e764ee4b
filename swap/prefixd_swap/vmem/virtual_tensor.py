"""A request's KV as one tensor over memory that other requests share (vTensor, section 5)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from prefixd_swap.errors import MemoryMisuseError, SwapError
from prefixd_swap.geometry import KvGeometry
from prefixd_swap.vmem.base import FrameId, VirtualMemory

if TYPE_CHECKING:
    import torch


class VirtualTensor:
    """Addresses for `max_tokens` tokens of one request, on which frames are mapped block by block.

    `kv` is the view ``[max_tokens, layers, 2, kv_heads, head_dim]``, whatever the layout, and stays the same
    object: attention runs on slices of it as on any tensor. Only the first `capacity_tokens` tokens may be
    touched. A frame can be mapped in many virtual tensors at once; that is how a prefix is shared without a
    copy.

    `first_chunk` is `FramePool.first_chunk` of the pool whose frames are mapped.
    Raises GeometryError if a block is not made of whole chunks, OutOfMemoryError without address space.
    """

    def __init__(self, memory: VirtualMemory, geometry: KvGeometry, max_tokens: int, first_chunk: int = 0) -> None:
        if max_tokens < 1:
            raise MemoryMisuseError(f"a virtual tensor for {max_tokens} tokens is not possible; give at least 1")
        self.geometry = geometry
        self.max_tokens = max_tokens
        self._frame_chunks = geometry.chunks_per_block(memory.chunk_bytes)
        self._first_chunk = first_chunk
        self._max_blocks = -(-max_tokens // geometry.block_tokens)
        self._frames: list[FrameId] = []
        # Piece p of all blocks lies in a region of its own: one region for "token", one a layer for "layer".
        self._region_bytes = self._max_blocks * geometry.piece_bytes
        self._range = memory.reserve(geometry.pieces * self._region_bytes)
        self.kv = self._view()

    @property
    def blocks(self) -> int:
        """How many blocks are mapped."""
        return len(self._frames)

    @property
    def capacity_tokens(self) -> int:
        """How many tokens are backed by memory."""
        return min(len(self._frames) * self.geometry.block_tokens, self.max_tokens)

    @property
    def frames(self) -> Sequence[FrameId]:
        """The frames of the mapped blocks, in order."""
        return tuple(self._frames)

    def extend(self, frames: Sequence[FrameId]) -> None:
        """Map `frames` as the next blocks: a cached prefix first, then room for what will be computed.

        All of them or, when this raises, none. Raises MemoryMisuseError past `max_tokens` or for a frame that
        does not exist, OutOfMemoryError when the process has no mapping left.
        """
        if len(self._frames) + len(frames) > self._max_blocks:
            raise MemoryMisuseError(
                f"{len(frames)} more blocks do not fit: {len(self._frames)} of {self._max_blocks} are "
                "mapped; reserve the virtual tensor for more tokens"
            )
        if not frames:
            return
        first = np.asarray(frames, np.int64)[:, None] * self._frame_chunks + self._first_chunk
        chunks = first + np.arange(self._frame_chunks)
        by_piece = chunks.reshape(len(frames), self.geometry.pieces, -1).swapaxes(0, 1)
        done = 0
        try:
            for piece in range(self.geometry.pieces):
                self._range.map(self._offset(piece), by_piece[piece].reshape(-1))
                done += 1
        except SwapError:
            for piece in range(done):
                self._range.unmap(self._offset(piece), len(frames) * self.geometry.piece_bytes)
            raise
        self._frames.extend(frames)

    def release(self) -> None:
        """Unmap all blocks; the addresses and `kv` stay for another request.

        At once: the caller has made sure that nothing on the device still uses them.
        `VirtualTensorPool.release` waits for streams.
        """
        for piece in range(self.geometry.pieces if self._frames else 0):
            self._range.unmap(piece * self._region_bytes, len(self._frames) * self.geometry.piece_bytes)
        self._frames.clear()

    def close(self) -> None:
        """Release, and give the addresses back; `kv` and every view of it must not be used any more."""
        self._range.discard()
        self._frames.clear()

    def _offset(self, piece: int) -> int:
        return piece * self._region_bytes + len(self._frames) * self.geometry.piece_bytes

    def _view(self) -> torch.Tensor:
        import torch

        shape = self.geometry
        heads = shape.kv_heads * shape.head_dim
        if shape.layout == "token":
            token, layer = shape.layers * 2 * heads, 2 * heads
        else:
            token, layer = 2 * heads, self._region_bytes // shape.element_bytes
        return self._range.tensor(
            (self.max_tokens, shape.layers, 2, shape.kv_heads, shape.head_dim),
            getattr(torch, shape.dtype),
            (token, layer, heads, shape.head_dim, 1),
        )


class VirtualTensorPool:
    """Virtual tensors of one size, kept after release so that reserving addresses is paid once. One thread
    owns it."""

    def __init__(
        self,
        memory: VirtualMemory,
        geometry: KvGeometry,
        max_tokens: int,
        first_chunk: int = 0,
        keep: int = 64,
    ) -> None:
        self._memory = memory
        self._geometry = geometry
        self._max_tokens = max_tokens
        self._first_chunk = first_chunk
        self._keep = keep
        self._fence = memory.fence()
        self._idle: list[VirtualTensor] = []

    @property
    def idle_count(self) -> int:
        """How many released virtual tensors wait for a request."""
        return len(self._idle)

    def acquire(self) -> VirtualTensor:
        """A virtual tensor with nothing mapped. Raises OutOfMemoryError without address space."""
        if self._idle:
            return self._idle.pop()
        return VirtualTensor(self._memory, self._geometry, self._max_tokens, self._first_chunk)

    def release(
        self,
        tensor: VirtualTensor,
        streams: Iterable[int] = (),
        on_unmapped: Callable[[], None] | None = None,
    ) -> None:
        """Unmap `tensor` once `streams` are done with what they hold now, keep it, then call `on_unmapped`.

        `streams` are the handles of all CUDA streams that used it; on host memory nothing waits. Work that
        had to wait is run by `poll`. Only after `on_unmapped` may the frames hold something else.
        """

        def unmap() -> None:
            tensor.release()
            if len(self._idle) < self._keep:
                self._idle.append(tensor)
            else:
                tensor.close()
            if on_unmapped is not None:
                on_unmapped()

        self._fence.retire(streams, unmap)

    def poll(self, wait: bool = False) -> int:
        """Finish the releases that are due, or with `wait` all of them; returns how many are left."""
        return self._fence.poll(wait)

    def close(self) -> None:
        """Finish all releases and give the kept addresses back."""
        self._fence.poll(wait=True)
        for tensor in self._idle:
            tensor.close()
        self._idle.clear()
