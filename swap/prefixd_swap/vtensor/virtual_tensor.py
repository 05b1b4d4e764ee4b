"""A request's KV as one tensor over memory that other requests share (vTensor, section 5.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from prefixd_swap.group_shape import KvGeometry
from prefixd_swap.vmem.base import FrameId
from prefixd_swap.vtensor.virtual_set import Row

if TYPE_CHECKING:
    import torch


class VirtualTensor:
    """The keys and values of one request: a row of addresses, and the frames that are its memory, block by block.

    `kv` is the view ``[max_tokens, layers, 2, kv_heads, head_dim]``: attention runs on slices of it as on any tensor.
    Only the first `capacity_tokens` tokens may be touched, once `VirtualTensorManager.wait` has returned. Virtual
    tensors share a prefix without a copy by having the same frames.

    Only `VirtualTensorManager` makes and changes it.
    """

    def __init__(self, row: Row, kv: torch.Tensor, geometry: KvGeometry, frames_per_block: int = 1) -> None:
        self.kv = kv
        self._row = row
        self._block_tokens = geometry.block_tokens
        self._per_block = frames_per_block
        self._frames: list[FrameId] = []
        self._passed = 0  # frames, from the first on, that were given up
        self._mapping: list[tuple[int, Future[None]]] = []  # background mappings, each with its first block

    @property
    def row(self) -> int:
        """Its row of the reservation: the index in a batch's dimension 0, vAttention's reqId."""
        return self._row.number

    @property
    def blocks(self) -> int:
        """Blocks that have memory, or had it before `VirtualTensorManager.pass_by`."""
        return len(self._frames) // self._per_block

    @property
    def capacity_tokens(self) -> int:
        """Tokens of `blocks`."""
        return self.blocks * self._block_tokens

    @property
    def frames(self) -> Sequence[FrameId]:
        """The frames of the blocks, in order; -1 where there is no memory."""
        return tuple(self._frames)

    def still_mapped(self, frames: Sequence[FrameId]) -> int:
        """How many of `frames`, from the first on, are still mapped on its first blocks."""
        return self._row.common(frames)

    def still_free(self, is_free: Callable[[FrameId], bool]) -> int:
        """Number of leading blocks of its row on which free frames are still mapped."""
        return self._row.leading(is_free)

    @property
    def mapping(self) -> bool:
        """Whether a background mapping has not ended."""
        return any(not job.done() for _, job in self._mapping)

    @property
    def settled(self) -> bool:
        """Whether there is no background mapping to wait for, nor an error of one to raise."""
        return not self._mapping

    @property
    def usable_tokens(self) -> int:
        """Leading tokens that can be used now: those before the first background mapping that has not ended."""
        if not self._mapping:
            return len(self._frames) // self._per_block * self._block_tokens
        firsts = [block for block, job in self._mapping if not job.done()]
        return min(firsts, default=len(self._frames)) // self._per_block * self._block_tokens
