from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from prefixd_swap.errors import GeometryError
from prefixd_swap.group_shape import KvGeometry

LLAMA_8B = KvGeometry(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16)


def test_bytes_of_a_known_model() -> None:
    assert LLAMA_8B.token_bytes == 128 << 10
    assert LLAMA_8B.block_bytes == 2 << 20
    assert (LLAMA_8B.pieces, LLAMA_8B.piece_bytes) == (1, 2 << 20)
    assert LLAMA_8B.chunks_per_block(2 << 20) == 1


def test_layer_layout_has_a_piece_a_layer() -> None:
    by_layer = dataclasses.replace(LLAMA_8B, layout="layer", block_tokens=1024)
    assert (by_layer.pieces, by_layer.piece_bytes) == (32, 4 << 20)
    assert by_layer.chunks_per_block(2 << 20) == 64


def test_a_block_that_is_no_whole_chunk_is_refused_with_the_tokens_that_fit() -> None:
    by_layer = dataclasses.replace(LLAMA_8B, layout="layer")
    with pytest.raises(GeometryError, match=r"65536 bytes.*2097152.*multiple of 512"):
        by_layer.check_chunk(2 << 20)
    dataclasses.replace(by_layer, block_tokens=512).check_chunk(2 << 20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"head_dim": "64"}, "head_dim is '64'"),
        ({"dtype": "int3"}, "'int3' is not supported; use one of float32"),
        ({"layout": "page"}, "'page' does not exist"),
    ],
)
def test_invalid_fields_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        dataclasses.replace(LLAMA_8B, **change)


@pytest.mark.parametrize("chunk_bytes", [0, -4096])
def test_an_impossible_chunk_is_refused(chunk_bytes: int) -> None:
    with pytest.raises(GeometryError, match=str(chunk_bytes)):
        LLAMA_8B.check_chunk(chunk_bytes)
