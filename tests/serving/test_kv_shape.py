"""How blocks and states lie in frames."""

from __future__ import annotations

from prefixd.base.rules.rules import RecurrentState, SlidingWindow
from prefixd.serving.kv_shape import KvShape
from prefixd.worker_protocol.protocol import GroupShape
from prefixd_swap.block_layers import BlockLayers
from prefixd_swap.padded_rows import PaddedRows
from tests.hello import hello

FULL = GroupShape("full", None, 2, 1)
STATE = GroupShape("state", RecurrentState(), 3, 2)


def window(tokens: int, frames: int = 1) -> GroupShape:
    return GroupShape(f"window-{tokens}", SlidingWindow(tokens), 1, frames)


def test_a_part_is_a_frame_and_one_plain_group_keeps_its_name() -> None:
    assert [part.group for part in KvShape((GroupShape("attention", None, 2, 1),), 16).parts(8192)] == ["attention"]
    parts = KvShape((FULL, window(64, frames=2), STATE), 16).parts(4096)
    assert [part.group for part in parts] == ["full", "window-64.0", "window-64.1", "state.0", "state.1"]
    assert [part.rule for part in parts] == [None, *[SlidingWindow(64)] * 2, *[RecurrentState()] * 2]
    assert {part.nbytes for part in parts} == {4096}


def test_parts_of_padded_tokens_are_packed_wherever_a_frame_begins() -> None:
    """80 KiB at a stride of 96 KiB: 64 tokens are three frames of 2 MiB, which end inside tokens. Not in pages."""
    padded = GroupShape("full", None, 2, 3, token_bytes=80 << 10, token_stride=96 << 10)
    parts = KvShape((padded, STATE), 64).parts(2 << 20)
    offsets = [part.rows and part.rows.offset for part in parts]
    assert offsets == [0, 32 << 10, 64 << 10, None, None]
    assert [part.nbytes >> 10 for part in parts] == [1712, 1712, 1696, 2048, 2048]
    assert sum(part.nbytes for part in parts[:3]) == 64 * (80 << 10)
    pages = KvShape((padded, STATE), 64, whole_pages=True).parts(2 << 20)
    assert [(part.nbytes >> 20, part.rows) for part in pages] == [(6, None), (4, None)]


def test_a_frame_of_padding_alone_is_a_small_part() -> None:
    wide = GroupShape("attention", None, 2, 2, token_bytes=12 << 10, token_stride=32 << 10)
    first, second = KvShape((wide,), 1).parts(16 << 10)
    assert (first.nbytes, first.rows) == (12 << 10, PaddedRows(32 << 10, 12 << 10, 16 << 10))
    assert (second.nbytes, second.rows) == (16, PaddedRows(16 << 10, 16, 16 << 10))


def test_a_state_of_every_block_stays_as_long_as_its_block() -> None:
    every = GroupShape("state", RecurrentState(16), 3, 1)
    assert [part.rule for part in KvShape((FULL, every), 16).parts(4096)] == [None, RecurrentState(16)]


def test_windows_that_are_one_group_of_the_trie_are_passed_together() -> None:
    """Windows of 6 and of 9 tokens both need 2 blocks of 4: what is held for the larger one is held for both."""
    shape = KvShape((FULL, window(6, frames=2), window(9), window(30)), 4)
    assert list(shape.passed(81)) == [(0, 1, 0), (1, 3, 18), (3, 4, 18), (4, 5, 13)]


def test_a_long_prompt_never_needs_all_of_its_windows_at_once() -> None:
    shape = KvShape((FULL, window(64), STATE), 16, step_tokens=32)
    assert shape.most_frames(4) == 2 * 4 + 2 * 2
    assert shape.most_frames(1000) == 1000 + (64 + 2 * 32) // 16 + 3 + 2 * 2


def test_layers_can_come_one_after_the_other_where_a_block_is_one_slot_of_one_plain_group() -> None:
    plain, padded = (
        GroupShape("attention", None, 4, 1),
        GroupShape("attention", None, 4, 1, token_bytes=4096, token_stride=6144),
    )
    shape = KvShape.of(hello(groups=(plain,), token_bytes=4096), 64)
    assert shape.layers == BlockLayers(4, 16, 1024, 4096, "token")
    shape = KvShape.of(hello(groups=(plain,), token_bytes=4096, layout="layer"), 64)
    assert shape.layers == BlockLayers(4, 16, 1024, 1024, "layer")
    shape = KvShape.of(hello(groups=(padded,), token_bytes=4096), 64)
    assert shape.layers == BlockLayers(4, 16, 1024, 6144, "token")
    pages = GroupShape("attention", None, 4, 3)
    assert KvShape.of(hello(groups=(pages,), token_bytes=4096, whole_pages=True), 64).layers is not None
    for groups in ((pages,), (FULL, STATE), (window(64),), (FULL, FULL)):
        assert KvShape.of(hello(groups=groups, token_bytes=4096), 64).layers is None
