"""A part's bytes as the arrays that kernels take: of one type each, so a kernel is compiled once for a word size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd_swap.codecs.codec import UInt8s
from prefixd_swap.codecs.part_shape import PartShape

_SHAPES = 256  # whose layouts are kept: a daemon's namespaces have few
Words = npt.NDArray[Any]
"""Of a type of `WORDS`."""


def readable_bytes(data: UInt8s) -> UInt8s:
    """Bytes that lie side by side and cannot be written to."""
    view = np.ascontiguousarray(data).view()
    view.flags.writeable = False
    return view


def readable_words(data: UInt8s, word: Any) -> Words:
    """Words of a type such as np.uint16; a copy where they are not aligned."""
    words: Words = readable_bytes(data).view(word)
    if not words.flags.aligned:
        words = words.copy()
        words.flags.writeable = False
    return words


@contextmanager
def writable_words(into: UInt8s, word: Any) -> Iterator[Words]:
    """Words of a type to write; where they are not aligned, they are copied at the end."""
    if into.flags.c_contiguous and (words := into.view(word)).flags.aligned:
        yield words
        return
    words = np.empty(into.size // np.dtype(word).itemsize, word)
    yield words
    into[:] = words.view(np.uint8)


@lru_cache(_SHAPES)
def layout_of(shape: PartShape) -> tuple[Any, Any]:
    """What kernels know of a shape: layers, tokens, heads, channels; words between layers, kv, tokens, heads."""
    strides, words = {}, 1
    for axis, size in zip(reversed(shape.order), reversed(shape.sizes), strict=True):
        strides[axis] = words
        words *= size
    sizes = (shape.layers, shape.tokens, shape.heads, shape.channels)
    return sizes, (strides["layer"], strides["kv"], strides["token"], strides["head"])
