"""Known keys and values in the worker's memory are found in the parts of a block by the shapes of the parts."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from prefixd.base.rules.rules import RecurrentState
from prefixd.cache import PartSpec
from prefixd.serving.kv_shape import KvShape
from prefixd.worker_protocol.protocol import GroupShape
from prefixd_swap.codecs.part_shape import AXES
from prefixd_swap.group_shape import KvGeometry
from tests.hello import hello

LAYERS, HEADS, CHANNELS, TOKENS = 3, 2, 4, 8


def memory_of(geometry: KvGeometry) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16]]:
    """A block as the worker fills it, 0xff in the padding; and its numbers, [token, layer, kv, head, channel]."""
    numbers = np.arange(TOKENS * LAYERS * 2 * HEADS * CHANNELS, dtype=np.float16).reshape(
        TOKENS, LAYERS, 2, HEADS, CHANNELS
    )
    memory = np.full(geometry.block_bytes, 0xFF, np.uint8)
    strides = [stride * geometry.element_bytes for stride in geometry.strides]
    if geometry.layout == "layer":
        strides[1] = geometry.piece_bytes
    view = np.ndarray(numbers.shape, np.float16, memory.data, 0, tuple(strides))
    view[:] = numbers
    return memory, numbers


def packed(memory: npt.NDArray[np.uint8], part: PartSpec) -> npt.NDArray[np.uint8]:
    """The bytes of a part in other tiers than the GPU tier."""
    if part.rows is None:
        return memory
    data = np.zeros(part.nbytes, np.uint8)
    for run in part.rows.runs():
        for row in range(run.rows):
            begin = run.padded + row * part.rows.stride
            data[run.packed + row * run.width :][: run.width] = memory[begin : begin + run.width]
    return data


def found(data: npt.NDArray[np.uint8], part: PartSpec) -> npt.NDArray[np.float16]:
    """The numbers of a part by its shape, [token, layer, kv, head, channel]."""
    assert part.shape is not None and part.shape.nbytes == len(data)
    array = data.view(np.float16).reshape(part.shape.sizes)
    in_order = array.transpose([part.shape.order.index(axis) for axis in AXES])  # layer, kv, token, head, channel
    return in_order.transpose(2, 0, 1, 3, 4)


@pytest.mark.parametrize(
    ("layout", "frames", "stride", "whole_pages"),
    [
        ("token", 1, 0, False),
        ("token", 4, 0, False),
        ("token", 1, 128, False),
        ("token", 4, 128, False),
        ("token", 4, 0, True),
        ("layer", 1, 0, False),
        ("layer", 1, 48, False),
        ("layer", 3, 0, True),
    ],
)
def test_the_numbers_of_a_part_lie_as_its_shape_says(layout: str, frames: int, stride: int, whole_pages: bool) -> None:
    geometry = KvGeometry(LAYERS, HEADS, CHANNELS, "float16", TOKENS, layout, stride)  # type: ignore[arg-type]
    padding = (geometry.piece_token_bytes, stride) if stride else (0, 0)
    group = GroupShape("attention", None, LAYERS, frames, *padding, HEADS, CHANNELS)
    frame_bytes = geometry.block_bytes // frames
    said = hello(
        groups=(group,), dtype="float16", block_tokens=TOKENS, layout=layout, frame_bytes=frame_bytes,
        whole_pages=whole_pages,
    )  # fmt: skip
    parts = KvShape.of(said, 16).parts(frame_bytes)
    memory, numbers = memory_of(geometry)
    slots = memory.reshape(len(parts), -1)
    read = [found(packed(slot, part), part) for slot, part in zip(slots, parts, strict=True)]
    assert np.array_equal(np.concatenate(read), numbers)


GROUP = GroupShape("attention", None, LAYERS, 1, 0, 0, HEADS, CHANNELS)
BLOCK = TOKENS * LAYERS * 2 * HEADS * CHANNELS * 2


@pytest.mark.parametrize(
    ("fields", "frame_bytes"),
    [
        ({"groups": (msgspec.structs.replace(GROUP, kv_heads=0, head_dim=0),)}, BLOCK),
        ({"dtype": "float8"}, BLOCK),
        ({"groups": (msgspec.structs.replace(GROUP, frames=3),)}, BLOCK // 3),
        ({"groups": (msgspec.structs.replace(GROUP, frames=3),), "layout": "layer"}, BLOCK // 3),
        ({"groups": (msgspec.structs.replace(GROUP, token_bytes=96, token_stride=128),), "whole_pages": True}, 1024),
        ({"groups": (msgspec.structs.replace(GROUP, frames=4, token_bytes=96, token_stride=112),)}, 224 + 16),
    ],
    ids=["latents", "dtype", "cut tokens", "cut layers", "padding in pages", "cut tokens with padding"],
)
def test_what_is_no_dense_array_has_no_shape(fields: dict[str, object], frame_bytes: int) -> None:
    good = hello(groups=(GROUP,), dtype="float16", block_tokens=TOKENS, frame_bytes=BLOCK)
    assert KvShape.of(good, 16).parts(BLOCK)[0].shape is not None
    said = msgspec.structs.replace(good, frame_bytes=frame_bytes, **fields)
    assert {part.shape for part in KvShape.of(said, 16).parts(frame_bytes)[1:]} <= {None}
    assert KvShape.of(said, 16).parts(frame_bytes)[0].shape is None


def test_states_beside_keys_and_values_have_no_shape() -> None:
    state = GroupShape("state", RecurrentState(), 2, 2)
    said = hello(groups=(GROUP, state), dtype="float16", block_tokens=TOKENS, frame_bytes=BLOCK)
    attention, *states = KvShape.of(said, 16).parts(BLOCK)
    assert attention.shape is not None and math.prod(attention.shape.sizes) * 2 == BLOCK
    assert [part.shape for part in states] == [None, None]
