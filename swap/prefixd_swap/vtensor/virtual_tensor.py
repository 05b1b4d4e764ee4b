"""A request's KV as one tensor over memory that other requests share (vTensor, section 5.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from prefixd_swap.geometry import KvGeometry
from prefixd_swap.vmem.base import FrameId
from prefixd_swap.vtensor.virtual_set import Row

if TYPE_CHECKING:
    import torch


class VirtualTensor:
    """The keys and values of one request: a row of addresses, and the frames that are its memory, block by block.

    `kv` is the view ``[max_tokens, layers, 2, kv_heads, head_dim]``: attention runs on slices of it as on any tensor.
    Only the first `capacity_tokens` tokens may be touched, once `VirtualTensorManager.wait` has returned. A frame can
    be in many virtual tensors at once: that is how a prefix is shared without a copy.

    Made by `VirtualTensorManager`, and changed by it alone.
    """

    def __init__(self, row: Row, kv: torch.Tensor, geometry: KvGeometry, frames_per_block: int = 1) -> None:
        self.kv = kv
        self._row = row
        self._block_tokens = geometry.block_tokens
        self._per_block = frames_per_block
        self._frames: list[FrameId] = []
        self._passed = 0  # so many frames, from the first on, were given up
        self._mapping: list[tuple[int, Future[None]]] = []  # the first block of what is mapped in the background

    @property
    def row(self) -> int:
        """Which row of the reservation it is: the index of a batch's dimension 0, vAttention's reqId."""
        return self._row.number

    @property
    def blocks(self) -> int:
        """How many blocks have memory, or had it until it was given up (`VirtualTensorManager.pass_by`)."""
        return len(self._frames) // self._per_block

    @property
    def capacity_tokens(self) -> int:
        """How many tokens have memory, or had it."""
        return self.blocks * self._block_tokens

    @property
    def frames(self) -> Sequence[FrameId]:
        """The frames of the blocks, in order; -1 where there is no memory."""
        return tuple(self._frames)

    def still_mapped(self, frames: Sequence[FrameId]) -> int:
        """How many of `frames`, from the first on, are mapped on its first blocks already."""
        return self._row.common(frames)

    def still_free(self, is_free: Callable[[FrameId], bool]) -> int:
        """How many of its addresses' first blocks are mapped on frames that nobody has."""
        return self._row.leading(is_free)

    @property
    def mapping(self) -> bool:
        """Whether a mapping in the background has not ended."""
        return any(not job.done() for _, job in self._mapping)

    @property
    def usable_tokens(self) -> int:
        """How many tokens, from the first on, can be used now: those before what is still being mapped."""
        firsts = [block for block, job in self._mapping if not job.done()]
        return min(firsts, default=len(self._frames)) // self._per_block * self._block_tokens
