"""How far decoded numbers are from the exact ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from prefixd_swap.codecs.codec import LayerErrors, UInt8s
from prefixd_swap.codecs.kernels.compiling import compiled
from prefixd_swap.codecs.kernels.floats import MAGNITUDE, WORDS, bits_of, float_of, read_bits
from prefixd_swap.codecs.kernels.words import layout_of, readable_words
from prefixd_swap.codecs.part_shape import PartShape


@compiled(reorders=True)
def _compare(exact: Any, decoded: Any, sizes: Any, strides: Any, largest: Any, rms: Any) -> None:
    """Writes the errors of each layer; the other arguments are as of `encode_part`. Reads in the order of the bytes."""
    layers, tokens, heads, channels = sizes
    most = np.zeros((layers, 2), np.uint32)
    noise, power = np.zeros((layers, 2)), np.zeros((layers, 2))
    for start in range(0, exact.size, channels):
        layer, kv = (start // strides[0]) % layers, (start // strides[1]) % 2
        left, right = exact[start : start + channels], decoded[start : start + channels]
        row_most, row_noise, row_power = np.uint32(0), np.float64(0), np.float64(0)
        for i in range(channels):
            number = float_of(read_bits(left[i]))
            difference = number - float_of(read_bits(right[i]))
            row_most = max(row_most, bits_of(difference) & MAGNITUDE)
            row_noise += np.float64(difference) * np.float64(difference)
            row_power += np.float64(number) * np.float64(number)
        most[layer, kv] = max(most[layer, kv], row_most)
        noise[layer, kv] += row_noise
        power[layer, kv] += row_power
    numbers = np.float64(tokens * heads * channels)
    for layer in range(layers):
        largest[layer] = rms[layer] = 0
        for kv in range(2):
            if power[layer, kv] > 0:
                relative = np.float64(float_of(most[layer, kv])) / np.sqrt(power[layer, kv] / numbers)
                largest[layer] = max(largest[layer], np.float32(relative))
                rms[layer] = max(rms[layer], np.float32(np.sqrt(noise[layer, kv] / power[layer, kv])))
            elif most[layer, kv] > 0:
                largest[layer] = rms[layer] = np.float32(np.inf)


def measure_errors(exact: UInt8s, decoded: UInt8s, shape: PartShape) -> LayerErrors:
    """How far a decoded part is from the exact one; infinite where a layer had only zeros and has others now."""
    left, right = (readable_words(data, WORDS[shape.dtype]) for data in (exact, decoded))
    errors = LayerErrors(np.empty(shape.layers, np.float32), np.empty(shape.layers, np.float32))
    _compare(left, right, *layout_of(shape), errors.largest, errors.rms)
    return errors
