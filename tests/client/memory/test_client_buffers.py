"""Callers' buffers seen as blocks and parts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.client import BufferSizeError, InvalidArgumentError, ServerError
from prefixd.client.memory.buffers import RUN_BYTES, BlockBuffers, StreamSink

PARTS = (6, 2)


@given(
    blocks=st.integers(1, 12),
    first=st.integers(0, 3),
    separate=st.booleans(),
    shuffle=st.randoms(use_true_random=False),
)
def test_runs_move_each_part_between_its_place_and_its_slot(blocks, first, separate, shuffle) -> None:
    total = first + blocks
    slots = list(range(blocks * 2))
    if shuffle.random() < 0.7:
        shuffle.shuffle(slots)
    offsets = [slot * 8 for slot in slots] if shuffle.random() < 0.5 else _packed(slots)
    data = np.random.default_rng(blocks).integers(0, 256, total * 8, dtype=np.uint8)
    grid = data.reshape(total, 8)
    source = [grid[:, :6].tobytes(), grid[:, 6:].tobytes()] if separate else data
    arena = np.zeros(8 * 2 * blocks, np.uint8)
    for run in BlockBuffers(source, PARTS, total, writable=False).runs(offsets, first, blocks):
        arena[run.arena_offset : run.arena_offset + run.user.nbytes] = run.user
    for block in range(blocks):
        for part, (start, nbytes) in enumerate([(0, 6), (6, 2)]):
            at = offsets[block * 2 + part]
            assert arena[at : at + nbytes].tolist() == grid[first + block, start : start + nbytes].tolist()


def _packed(slots: list[int]) -> list[int]:
    """Offsets in the order of `slots` without gaps, so that neighbours can merge."""
    offsets, at = [0] * len(slots), 0
    for slot in slots:
        offsets[slot] = at
        at += PARTS[slot % 2]
    return offsets


def test_neighbours_are_one_copy_up_to_a_limit() -> None:
    block = RUN_BYTES // 4
    source = np.zeros(block * 6, np.uint8)
    runs = list(BlockBuffers(source, [block], 6, writable=False).runs([i * block for i in range(6)], 0, 6))
    assert [run.user.nbytes for run in runs] == [4 * block, 2 * block]


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(BufferSizeError, match=r"15 bytes.*need 16"):
        BlockBuffers(bytes(15), PARTS, 2, writable=False)
    with pytest.raises(BufferSizeError, match=r"17 bytes.*need 16"):
        BlockBuffers(bytes(17), PARTS, 2, writable=False)
    with pytest.raises(BufferSizeError, match=r"3 bytes.*need 4"):
        BlockBuffers([bytearray(12), bytearray(3)], PARTS, 2, writable=True)
    with pytest.raises(BufferSizeError, match=r"1 buffers.*2 parts"):
        BlockBuffers([bytearray(16)], PARTS, 2, writable=True)
    BlockBuffers(bytearray(17), PARTS, 2, writable=True)


def test_size_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="need"):
        BlockBuffers(b"", PARTS, 1, writable=False)


@pytest.mark.parametrize(
    "wrong", [bytes(8), np.zeros((4, 4), np.uint8)[:, :2], 5, pytest.param(object(), id="object")], ids=repr
)
def test_unusable_targets_are_refused(wrong: object) -> None:
    with pytest.raises(InvalidArgumentError):
        BlockBuffers(wrong, PARTS, 1, writable=True)


def test_an_array_of_any_dtype_is_bytes() -> None:
    source = np.arange(4, dtype=np.float32)
    buffers = BlockBuffers(source, PARTS, 2, writable=False)
    assert buffers.part(1, 1).tobytes() == source.tobytes()[14:16]


@given(cuts=st.lists(st.integers(0, 24), max_size=6), separate=st.booleans())
def test_a_stream_fills_blocks_whatever_its_pieces(cuts: list[int], separate: bool) -> None:
    data = bytes(range(24))
    target = [bytearray(18), bytearray(6)] if separate else bytearray(24)
    sink = StreamSink(BlockBuffers(target, PARTS, 3, writable=True), 0, 3)
    edges = [0, *sorted(cuts), 24]
    for begin, end in pairwise(edges):
        assert sink.missing_bytes == 24 - begin
        sink.write(data[begin:end])
    assert not sink.missing_bytes
    whole = np.frombuffer(data, np.uint8).reshape(3, 8)
    assert target == ([whole[:, :6].tobytes(), whole[:, 6:].tobytes()] if separate else data)
    with pytest.raises(ServerError, match="1 bytes more"):
        sink.write(b"x")


@pytest.mark.parametrize("separate", [False, True])
def test_messages_have_several_parts_up_to_a_size_and_all_bytes_in_order(separate: bool) -> None:
    parts = (3, 10)
    content = np.arange(13 * 5, dtype=np.uint8)
    if separate:
        by_block = content.reshape(5, 13)
        buffers = BlockBuffers([by_block[:, :3].copy(), by_block[:, 3:].copy()], parts, 5, writable=False)
    else:
        buffers = BlockBuffers(content, parts, 5, writable=False)
    messages = list(buffers.messages(1, 4, 100, 16))
    assert b"".join(messages) == content[13:].tobytes()
    assert [len(message) for message in messages] == [16, 13, 13, 10]
    assert [len(message) for message in buffers.messages(1, 1, 4, 4)] == [3, 4, 4, 2], (
        "parts are cut where they must be"
    )
    assert [len(message) for message in buffers.messages(1, 2, 8, 4)] == [3, 8, 2, 3, 8, 2], "long ones go alone"
    assert list(buffers.messages(2, 0, 16, 16)) == []
