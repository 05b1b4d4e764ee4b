"""Parts of blocks for the tests of codecs: shapes, and numbers as bytes and back."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from prefixd_swap.codecs.codec import UInt8s
from prefixd_swap.codecs.part_shape import AXES, Axis, PartShape

Float32s = npt.NDArray[np.float32]
BY_TOKEN: tuple[Axis, ...] = ("token", "layer", "kv", "head", "channel")
BY_LAYER: tuple[Axis, ...] = ("layer", "kv", "token", "head", "channel")
ORDERS: list[tuple[Axis, ...]] = [(*outer, "channel") for outer in itertools.permutations(AXES[:-1])]

shapes = st.builds(
    PartShape,
    st.sampled_from(["bfloat16", "float16", "float32"]),
    layers=st.integers(1, 3),
    tokens=st.integers(1, 20),
    heads=st.integers(1, 3),
    channels=st.integers(1, 70),
    order=st.sampled_from(ORDERS),
)


def to_bytes(numbers: Float32s, shape: PartShape) -> UInt8s:
    """Numbers [layer, kv, token, head, channel] as a part, rounded to the nearest by other means than the codecs'."""
    turned = np.ascontiguousarray(numbers.transpose([AXES.index(axis) for axis in shape.order]))
    if shape.dtype == "bfloat16":
        bits = turned.view(np.uint32).astype(np.uint64)
        words = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return words.reshape(-1).view(np.uint8)
    return turned.astype(shape.dtype).reshape(-1).view(np.uint8)


def to_numbers(data: UInt8s, shape: PartShape) -> Float32s:
    """The numbers of a part as [layer, kv, token, head, channel]."""
    if shape.dtype == "bfloat16":
        numbers = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        numbers = data.view(shape.dtype).astype(np.float32)
    return numbers.reshape(shape.sizes).transpose([shape.order.index(axis) for axis in AXES])


def random_part(shape: PartShape, seed: int = 0, channel_spread: float = 0.7) -> UInt8s:
    """A part such as models have: keys with channels of very different sizes, values with such tokens."""
    random = np.random.default_rng(seed)
    layers, tokens, heads, channels = shape.layers, shape.tokens, shape.heads, shape.channels
    numbers = random.standard_normal((layers, 2, tokens, heads, channels))
    numbers[:, 0] *= np.exp(random.standard_normal((layers, 1, heads, channels)) * channel_spread)
    numbers[:, 1] *= np.exp(random.standard_normal((layers, tokens, heads, 1)) * channel_spread)
    return to_bytes(numbers.astype(np.float32), shape)


def plain_errors(exact: UInt8s, decoded: UInt8s, shape: PartShape) -> tuple[npt.NDArray[np.float64], ...]:
    """Largest and RMS error of each layer by plain numpy."""
    left, right = (to_numbers(data, shape).astype(np.float64) for data in (exact, decoded))
    axes = (2, 3, 4)
    rms = np.sqrt((left**2).mean(axes))
    apart = np.abs(left - right)
    largest, noise = apart.max(axes), np.sqrt((apart**2).mean(axes))
    least = np.where(rms > 0, rms, 1)
    return (largest / least).max(axis=1), (noise / least).max(axis=1)


def numbers_of(shape: PartShape) -> int:
    """How many numbers a part has."""
    return math.prod(shape.sizes)
