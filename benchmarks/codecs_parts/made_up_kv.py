"""Parts whose numbers are spread as those of real models are, without a model."""

from __future__ import annotations

import numpy as np

from prefixd_swap.codecs.codec import UInt8s
from prefixd_swap.codecs.part_shape import AXES, Axis, PartShape

CHANNELS = 128
BY_TOKEN: tuple[Axis, ...] = ("token", "layer", "kv", "head", "channel")
_OUTLIERS = 4  # channels of a head whose keys are far larger, in pairs as rotary embeddings make them


def part_shape(nbytes: int, tokens: int, dtype: str) -> PartShape:
    """A part of about so many bytes: up to eight heads, then as many layers as it takes."""
    numbers = nbytes // (4 if dtype == "float32" else 2)
    heads_and_layers = max(1, numbers // (2 * tokens * CHANNELS))
    heads = min(8, heads_and_layers)
    return PartShape(dtype, max(1, heads_and_layers // heads), tokens, heads, CHANNELS, BY_TOKEN)


def made_up_part(shape: PartShape, seed: int) -> UInt8s:
    """Keys with a mean and a spread of each channel and a few outlier channels; values with a spread of each token.

    The first token's keys are large and its values small, as of a token that attention sinks into.
    """
    random = np.random.default_rng(seed)
    layers, tokens, heads, channels = shape.layers, shape.tokens, shape.heads, shape.channels
    numbers = random.standard_normal((layers, 2, tokens, heads, channels)).astype(np.float32)
    spread = np.exp(0.5 * random.standard_normal((layers, 1, heads, channels)))
    spread[..., random.choice(channels, min(_OUTLIERS, channels), replace=False)] *= 6
    mean = random.standard_normal((layers, 1, heads, channels)) * spread
    numbers[:, 0] = numbers[:, 0] * spread + mean
    numbers[:, 1] *= np.exp(0.3 * random.standard_normal((layers, tokens, heads, 1)))
    numbers[:, 0, 0] *= 2
    numbers[:, 1, 0] *= 0.1
    turned = np.ascontiguousarray(numbers.transpose([AXES.index(axis) for axis in shape.order]))
    if shape.dtype == "bfloat16":
        words = turned.view(np.uint32)
        turned = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
    else:
        turned = turned.astype(shape.dtype)
    return turned.reshape(-1).view(np.uint8)
