"""One buffer with the states of all recurrent layers of a sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ALIGNMENT = 64  # bytes: more than any type needs, and a line of a CPU's cache


@dataclass(frozen=True, slots=True)
class StateShape:
    """What one layer keeps of a sequence.

    conv: (channels, kernel), the last inputs of its convolution. recurrent: for example (heads, head_dim, d_state);
    None for a layer that is a convolution only (LFM2), as is its type.
    """

    conv: tuple[int, int]
    conv_dtype: torch.dtype
    recurrent: tuple[int, ...] | None = None
    recurrent_dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of `shape` in bytes [start, stop) of the buffer."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.start : self.stop].view(self.dtype).view(1, *self.shape)


class StateLayout:
    """What lies where in the buffer of a sequence.

        | conv of layer 0 | recurrent of layer 0 | conv of layer 1 | ...

    Every part starts at a multiple of 64 bytes. Layers are counted among the recurrent ones, in the order in which the
    model calls them. A buffer is a 1-D tensor of uint8 with at least `nbytes` bytes, which starts at such a multiple,
    too; a copy of its bytes is a copy of the state.
    """

    def __init__(self, shapes: Sequence[StateShape]) -> None:
        self.shapes = tuple(shapes)
        self._layers: list[tuple[_Part, _Part | None]] = []
        end = 0
        for shape in self.shapes:
            conv = _place(end, shape.conv, shape.conv_dtype)
            end = conv.stop
            recurrent = None
            if shape.recurrent is not None and shape.recurrent_dtype is not None:
                recurrent = _place(end, shape.recurrent, shape.recurrent_dtype)
                end = recurrent.stop
            self._layers.append((conv, recurrent))
        self.nbytes = end

    @property
    def layer_bytes(self) -> int:
        """Of the largest layer's part."""
        return max((recurrent or conv).stop - conv.start for conv, recurrent in self._layers)

    def views(self, buffer: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A layer's conv state ``[1, channels, kernel]`` and recurrent state ``[1, ...]`` in the buffer.

        Writing to them writes to the buffer.
        """
        conv, recurrent = self._layers[layer]
        return conv.view(buffer), None if recurrent is None else recurrent.view(buffer)

    def copy(self, source: torch.Tensor, target: torch.Tensor, layer: int) -> None:
        """Copy a layer's part from one buffer to another."""
        conv, recurrent = self._layers[layer]
        start, stop = conv.start, (recurrent or conv).stop
        target[start:stop].copy_(source[start:stop])


def _place(end: int, shape: tuple[int, ...], dtype: torch.dtype) -> _Part:
    """The next part behind byte `end`."""
    start = -(-end // _ALIGNMENT) * _ALIGNMENT
    return _Part(start, start + math.prod(shape) * dtype.itemsize, shape, dtype)
