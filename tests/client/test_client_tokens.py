"""Token ids on their way to the wire."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.client import InvalidArgumentError
from prefixd.client.messages import token_bytes

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=50)


@given(IDS)
def test_every_form_gives_little_endian_uint32(ids: list[int]) -> None:
    wire = struct.pack(f"<{len(ids)}I", *ids)
    assert token_bytes(ids) == wire
    assert token_bytes(tuple(ids)) == wire
    for dtype in ("<u4", ">u4", "<i8", "<u8"):
        assert token_bytes(np.array(ids, dtype)) == wire
    assert token_bytes(np.repeat(np.array(ids, np.uint32), 2)[::2]) == wire


def test_a_range_is_a_sequence_too() -> None:
    assert token_bytes(range(3)) == struct.pack("<3I", 0, 1, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        [-1],
        [2**32],
        [1.5],
        ["a"],
        "text",
        [[1, 2]],
        np.array([-1]),
        np.array([2**32]),
        np.zeros((2, 2), int),
        np.ones(3),
    ],
    ids=str,
)
def test_anything_else_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidArgumentError):
        token_bytes(wrong)  # type: ignore[arg-type]
