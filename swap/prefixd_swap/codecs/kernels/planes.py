"""Bytes of the same significance side by side: exponents then compress, and mantissas do not.

Words are turned left by a bit before: the sign goes to the mantissa, and the highest byte of a bfloat16 or float32 is
its exponent. That makes a bfloat16 0.4% smaller, and a float16 no larger.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prefixd_swap.codecs.kernels.compiling import compiled


@compiled()
def split_pairs(words: Any, low: Any, high: Any) -> None:
    """The planes of uint16 words; [n] each."""
    for i in range(words.size):
        word = (words[i] << np.uint16(1)) | (words[i] >> np.uint16(15))
        low[i] = word
        high[i] = word >> np.uint16(8)


@compiled()
def split_quads(words: Any, first: Any, second: Any, third: Any, fourth: Any) -> None:
    """The planes of uint32 words; [n] each."""
    for i in range(words.size):
        word = (words[i] << np.uint32(1)) | (words[i] >> np.uint32(31))
        first[i] = word
        second[i] = word >> np.uint32(8)
        third[i] = word >> np.uint32(16)
        fourth[i] = word >> np.uint32(24)


@compiled()
def join_pairs(low: Any, high: Any, words: Any) -> None:
    """The uint16 words whose planes these are; [n] each."""
    for i in range(words.size):
        word = np.uint16(low[i]) | (np.uint16(high[i]) << np.uint16(8))
        words[i] = (word >> np.uint16(1)) | (word << np.uint16(15))


@compiled()
def join_quads(first: Any, second: Any, third: Any, fourth: Any, words: Any) -> None:
    """The uint32 words whose planes these are; [n] each."""
    for i in range(words.size):
        lower = np.uint32(first[i]) | (np.uint32(second[i]) << np.uint32(8))
        word = lower | (np.uint32(third[i]) << np.uint32(16)) | (np.uint32(fourth[i]) << np.uint32(24))
        words[i] = (word >> np.uint32(1)) | (word << np.uint32(31))
