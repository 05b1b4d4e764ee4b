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
    """Writes the errors of each layer; the other arguments are as of `encode_part`."""
    layers, tokens, heads, channels = sizes
    for layer in range(layers):
        largest[layer] = rms[layer] = 0
        for kv in range(2):
            most, noise, power = np.uint32(0), np.float64(0), np.float64(0)
            for token in range(tokens):
                for head in range(heads):
                    start = layer * strides[0] + kv * strides[1] + token * strides[2] + head * strides[3]
                    left, right = exact[start : start + channels], decoded[start : start + channels]
                    for i in range(channels):
                        number = float_of(read_bits(left[i]))
                        difference = number - float_of(read_bits(right[i]))
                        most = max(most, bits_of(difference) & MAGNITUDE)
                        noise += np.float64(difference) * np.float64(difference)
                        power += np.float64(number) * np.float64(number)
            if power > 0:
                size = np.sqrt(power / np.float64(tokens * heads * channels))
                largest[layer] = max(largest[layer], np.float32(np.float64(float_of(most)) / size))
                rms[layer] = max(rms[layer], np.float32(np.sqrt(noise / power)))
            elif most > 0:
                largest[layer] = rms[layer] = np.float32(np.inf)


def measure_errors(exact: UInt8s, decoded: UInt8s, shape: PartShape) -> LayerErrors:
    """How far a decoded part is from the exact one; infinite where a layer had only zeros and has others now."""
    left, right = (readable_words(data, WORDS[shape.dtype]) for data in (exact, decoded))
    errors = LayerErrors(np.empty(shape.layers, np.float32), np.empty(shape.layers, np.float32))
    _compare(left, right, *layout_of(shape), errors.largest, errors.rms)
    return errors
