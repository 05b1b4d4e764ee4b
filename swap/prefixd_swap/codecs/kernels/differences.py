"""How far decoded numbers are from the exact ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from prefixd_swap.codecs.codec import LayerErrors, UInt8s
from prefixd_swap.codecs.kernels.compiling import compiled
from prefixd_swap.codecs.kernels.floats import MAGNITUDE, bits_of, float_of, load_row
from prefixd_swap.codecs.kernels.words import layout_of, readable_words
from prefixd_swap.codecs.part_shape import DTYPE_BYTES, PartShape


@compiled(reorders=True)
def _measure(exact: Any, decoded: Any, sizes: Any, strides: Any, kind: int, measured: Any) -> None:
    """Compares two parts.

    Args:
        exact, decoded: all numbers of the parts, uint16 or uint32.
        sizes, strides, kind: as of `encode_part`.
        measured: [layers, 2, 3] of float64, keys and then values: the largest difference, the sum of the squares of the
            differences, and that of the exact numbers.
    """
    layers, tokens, heads, channels = sizes
    left, right = np.empty(channels, np.uint32), np.empty(channels, np.uint32)
    for layer in range(layers):
        for kv in range(2):
            most, noise, power = np.uint32(0), np.float64(0), np.float64(0)
            for token in range(tokens):
                for head in range(heads):
                    start = layer * strides[0] + kv * strides[1] + token * strides[2] + head * strides[3]
                    load_row(exact, start, kind, left)
                    load_row(decoded, start, kind, right)
                    for i in range(channels):
                        number = float_of(left[i])
                        difference = number - float_of(right[i])
                        most = max(most, bits_of(difference) & MAGNITUDE)
                        noise += np.float64(difference) * np.float64(difference)
                        power += np.float64(number) * np.float64(number)
            measured[layer, kv, 0] = float_of(most)
            measured[layer, kv, 1] = noise
            measured[layer, kv, 2] = power


def measure_errors(exact: UInt8s, decoded: UInt8s, shape: PartShape) -> LayerErrors:
    """How far a decoded part is from the exact one; infinite where a layer had only zeros and has others now."""
    left, right = (readable_words(data, DTYPE_BYTES[shape.dtype]) for data in (exact, decoded))
    measured = np.empty((shape.layers, 2, 3))
    _measure(left, right, *layout_of(shape), measured)
    largest, noise, power = np.moveaxis(measured, -1, 0)
    numbers = shape.tokens * shape.heads * shape.channels
    rms = np.sqrt(power / numbers)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        relative = np.stack((largest, np.sqrt(noise / numbers))) / rms
        relative[:, (power == 0) & (noise == 0)] = 0
        most = relative.max(axis=-1).astype(np.float32)
    return LayerErrors(most[0], most[1])
