"""Lists of frames, block by block; -1 stands for a block without memory."""

from __future__ import annotations

from collections.abc import Sequence

from prefixd_swap.vmem.base import FrameId

NO_FRAME = FrameId(-1)


def present(frames: list[FrameId] | Sequence[FrameId]) -> Sequence[FrameId]:
    """The frames without -1, which stands for a block without memory."""
    return [frame for frame in frames if frame != NO_FRAME] if NO_FRAME in frames else frames


def in_place(mapped: Sequence[FrameId], frames: Sequence[FrameId]) -> list[FrameId]:
    """`frames` in an order that keeps each one on its block if it is in `mapped`.

    mapped [3, -1, 5], frames [5, 8, 3] -> [3, 8, 5]
    """
    left = set(frames)
    kept = []
    for frame in mapped:
        stays = frame in left
        left.discard(frame)
        kept.append(frame if stays else NO_FRAME)
    others = (frame for frame in frames if frame in left)
    return [frame if frame != NO_FRAME else next(others) for frame in kept]
