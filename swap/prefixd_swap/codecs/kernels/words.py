"""A part's bytes as the arrays that kernels take: of one type each, so a kernel is compiled once for a word size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd_swap.codecs.codec import UInt8s
from prefixd_swap.codecs.kernels.floats import KINDS
from prefixd_swap.codecs.part_shape import PartShape

Words = npt.NDArray[Any]
"""uint16 or uint32."""


def readable_bytes(data: UInt8s) -> UInt8s:
    """Bytes that lie side by side and cannot be written to."""
    view = np.ascontiguousarray(data).view()
    view.flags.writeable = False
    return view


def readable_words(data: UInt8s, nbytes: int) -> Words:
    """Words of `nbytes` bytes; a copy where they are not aligned."""
    words = readable_bytes(data).view(f"u{nbytes}")
    if not words.flags.aligned:
        words = words.copy()
        words.flags.writeable = False
    return words


@contextmanager
def writable_words(into: UInt8s, nbytes: int) -> Iterator[Words]:
    """Words of `nbytes` bytes to write; where they are not aligned, they are copied at the end."""
    if into.flags.c_contiguous and (words := into.view(f"u{nbytes}")).flags.aligned:
        yield words
        return
    words = np.empty(into.size // nbytes, f"u{nbytes}")
    yield words
    into[:] = words.view(np.uint8)


def layout_of(shape: PartShape) -> tuple[Any, Any, int]:
    """What kernels know of a shape: layers, tokens, heads, channels; words from one layer, kv, token, head to the next;
    one of `KINDS`.
    """
    strides, words = {}, 1
    for axis, size in zip(reversed(shape.order), reversed(shape.sizes), strict=True):
        strides[axis] = words
        words *= size
    sizes = (shape.layers, shape.tokens, shape.heads, shape.channels)
    return sizes, (strides["layer"], strides["kv"], strides["token"], strides["head"]), KINDS[shape.dtype]
