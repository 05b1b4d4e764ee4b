"""Virtual tensors grow with frames of the manager's own: an engine without a daemon allocates so (vAttention, 5.3).

The manager has a limit of frames, and its `physical` creates and frees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.vmem.base import FrameId
from prefixd_swap.vtensor.frame_lists import in_place
from prefixd_swap.vtensor.manager import VirtualTensorManager
from prefixd_swap.vtensor.virtual_tensor import VirtualTensor


def grow(manager: VirtualTensorManager, tensor: VirtualTensor, tokens: int) -> bool:
    """`grow_all` of one virtual tensor."""
    return grow_all(manager, {tensor: tokens})


def grow_all(manager: VirtualTensorManager, tokens: Mapping[VirtualTensor, int]) -> bool:
    """Extend each virtual tensor with frames of `physical.p_alloc` until it has memory for its tokens.

    False, and nothing changed, if that exceeds the limit of frames. Raises as `VirtualTensorManager.extend`, with
    nothing changed.
    """
    virtual, physical = manager.virtual, manager.physical
    lacking: list[tuple[VirtualTensor, int]] = []
    slots: list[FrameId] = []  # the frames that are mapped now on the new blocks
    for tensor, wanted in tokens.items():
        first = len(tensor._frames)
        stop = max(first, manager.blocks_of(wanted))
        if stop > virtual.blocks:
            raise MemoryMisuseError(
                f"{wanted} tokens do not fit into a virtual tensor of {virtual.tokens}; reserve for more"
            )
        lacking.append((tensor, stop - first))
        slots += tensor._row.mapped[first:stop]
    if not slots:
        return True
    frames = physical.p_alloc(len(slots), slots)
    if frames is None:
        return False
    placed = iter(in_place(slots, frames))
    grown: list[tuple[VirtualTensor, int]] = []
    try:
        for tensor, count in lacking:
            manager.extend(tensor, list(islice(placed, count)))
            grown.append((tensor, count))
    except BaseException:
        for tensor, count in grown:
            manager.give_back(tensor, len(tensor._frames) - count)
        raise
    finally:
        physical.release(frames)  # p_alloc's reference; extend has taken its own
    return True


def prepare(manager: VirtualTensorManager, tokens: int, most: int) -> int:
    """Eager allocation (vAttention, 6.2.2): map free frames for `tokens` tokens on the row of the next `create`.

    The frames stay free, so other requests can still take them. Maps at most `most` frames, and none if that exceeds
    the limit of frames; returns the number mapped. Raises as `VirtualTensorManager.extend`.
    """
    virtual, physical = manager.virtual, manager.physical
    row = virtual.next_row(is_free=physical.is_free)
    if row is None:
        return 0
    first = row.leading(physical.is_free)
    stop = min(manager.blocks_of(tokens), virtual.blocks, first + most)
    # From block 0 on: frames that are mapped on its leading blocks must not be used for later blocks.
    frames = physical.p_alloc(stop, row.mapped[:stop]) if stop > first else None
    if frames is None:
        return 0
    try:
        manager.mapping.map(row, first, in_place(row.mapped[:stop], frames)[first:])
    finally:
        physical.release(reversed(frames))
    return stop - first
