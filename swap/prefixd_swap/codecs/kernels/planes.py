"""Bytes of the same significance side by side: exponents then compress, and mantissas do not."""

from __future__ import annotations

from typing import Any

import numpy as np

from prefixd_swap.codecs.kernels.compiling import compiled


@compiled()
def split_words(words: Any, turns: bool, planes: Any) -> None:
    """Plane p gets byte p of each word, the lowest first.

    Args:
        words: [n], uint16 or uint32.
        turns: words are turned left by a bit before, so that the highest byte of a bfloat16 or float32 is its exponent.
        planes: [bytes of a word, n].
    """
    bits = 8 * len(planes)
    for plane in range(len(planes)):
        target = planes[plane]
        shift = np.uint32(8 * plane)
        if turns:
            for i in range(words.size):
                word = np.uint32(words[i])
                target[i] = ((word << np.uint32(1)) | (word >> np.uint32(bits - 1))) >> shift
        else:
            for i in range(words.size):
                target[i] = np.uint32(words[i]) >> shift


@compiled()
def join_pairs(low: Any, high: Any, turned: bool, words: Any) -> None:
    """The uint16 words whose planes these are; [n] each."""
    if turned:
        for i in range(words.size):
            word = np.uint16(low[i]) | (np.uint16(high[i]) << np.uint16(8))
            words[i] = (word >> np.uint16(1)) | (word << np.uint16(15))
    else:
        for i in range(words.size):
            words[i] = np.uint16(low[i]) | (np.uint16(high[i]) << np.uint16(8))


@compiled()
def join_quads(first: Any, second: Any, third: Any, fourth: Any, turned: bool, words: Any) -> None:
    """The uint32 words whose planes these are; [n] each."""
    turn = np.uint32(1 if turned else 0)
    back = np.uint32(31 if turned else 0)
    for i in range(words.size):
        lower = np.uint32(first[i]) | (np.uint32(second[i]) << np.uint32(8))
        word = lower | (np.uint32(third[i]) << np.uint32(16)) | (np.uint32(fourth[i]) << np.uint32(24))
        words[i] = (word >> turn) | (word << back)
