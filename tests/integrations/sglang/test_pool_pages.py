"""Copies between a host pool's pages and the arena, without SGLang."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from prefixd.integrations.sglang.pool_pages import (
    BufferPages,
    FlatPages,
    NoPages,
    PagesUnusable,
    TensorsAt,
    pages_of,
)

TOKENS, LAYERS, ROW = 4, 3, 8


class LayerFirst:
    """K and V of each layer apart, as SGLang's pools in layer_first."""

    layout = "layer_first"
    page_size = TOKENS
    size = 32

    def __init__(self) -> None:
        self.kv_buffer = torch.randint(0, 256, (2, LAYERS, self.size, ROW), dtype=torch.uint8)
        self.k_refs = [self.kv_buffer[0, layer] for layer in range(LAYERS)]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        base = self.kv_buffer.data_ptr()
        addresses = [
            base + (half * LAYERS + layer) * self.size * ROW + int(start) * ROW
            for start in indices[::TOKENS]
            for layer in range(LAYERS)
            for half in range(2)
        ]
        return addresses, [TOKENS * ROW] * len(addresses)


class Apart(LayerFirst):
    """Each layer in a tensor of its own, at no even distances, and of another size."""

    def __init__(self) -> None:
        self.layers = [
            torch.randint(0, 256, (self.size, ROW * (1 + layer)), dtype=torch.uint8) for layer in range(LAYERS)
        ]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pairs = [
            (layer.data_ptr() + int(start) * layer.shape[1], TOKENS * layer.shape[1])
            for start in indices[::TOKENS]
            for layer in self.layers
        ]
        return [address for address, _ in pairs], [nbytes for _, nbytes in pairs]


class Flat:
    """Hands out whole pages only."""

    layout = "layer_first"
    page_size = TOKENS
    size = 32

    def __init__(self) -> None:
        self.buffer = torch.randn(LAYERS, self.size, ROW).to(torch.bfloat16)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> None:
        raise ValueError("Unsupported layout")

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(LAYERS * TOKENS * ROW, dtype=torch.bfloat16)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.buffer[:, index : index + TOKENS].flatten()

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.buffer[:, index : index + TOKENS] = page.reshape(LAYERS, TOKENS, ROW)


def _tokens(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * TOKENS, (page + 1) * TOKENS) for page in pages])


def _unchecked() -> None:
    pass


def _bytes_of(pool: Any) -> list[bytes]:
    return [value.contiguous().view(torch.uint8).numpy().tobytes() for value in _all_tensors(pool)]


def _all_tensors(pool: Any) -> list[torch.Tensor]:
    return pool.layers if isinstance(pool, Apart) else [getattr(pool, "kv_buffer", getattr(pool, "buffer", None))]


@pytest.mark.parametrize(("kind", "made"), [(LayerFirst, BufferPages), (Apart, BufferPages), (Flat, FlatPages)])
def test_pages_go_to_the_arena_and_back(kind: Any, made: Any) -> None:
    pool = kind()
    pages = pages_of(pool)
    assert isinstance(pages, made)
    arena = np.zeros(16 * pages.page_bytes + 100, np.uint8)
    before = _bytes_of(pool)
    places = [(0, 100), (1, 100 + pages.page_bytes), (2, 100 + 5 * pages.page_bytes)]
    pages.at(_tokens(1, 2, 5), 3).save(arena, places, _unchecked)
    assert _bytes_of(pool) == before
    assert not arena[:100].any() and not arena[100 + 2 * pages.page_bytes : 100 + 5 * pages.page_bytes].any()
    for tensor in _all_tensors(pool):
        tensor.zero_()
    pages.at(_tokens(1, 2, 5), 3).load(arena, places, _unchecked)
    fresh = kind()
    fresh_pages = pages_of(fresh)
    again = np.zeros_like(arena)
    pages.at(_tokens(1, 2, 5), 3).save(again, places, _unchecked)
    assert np.array_equal(arena, again)
    fresh_pages.at(_tokens(6), 1).load(arena, [(0, 100)], _unchecked)  # to another place
    fresh_pages.at(_tokens(6), 1).save(again, [(0, 0)], _unchecked)
    assert np.array_equal(again[: pages.page_bytes], arena[100 : 100 + pages.page_bytes])


def test_a_page_lies_in_the_arena_in_the_order_of_its_buffers() -> None:
    pool = LayerFirst()
    pages = pages_of(pool)
    arena = np.zeros(pages.page_bytes, np.uint8)
    pages.at(_tokens(3), 1).save(arena, [(0, 0)], _unchecked)
    expected = torch.stack([pool.kv_buffer[half, layer, 12:16] for layer in range(LAYERS) for half in range(2)])
    assert arena.tobytes() == expected.numpy().tobytes()


def test_the_right_to_copy_is_asked_for_before_each_copy() -> None:
    for pool in (LayerFirst(), Apart(), Flat()):
        pages = pages_of(pool)
        before = _bytes_of(pool)
        arena = np.full(4 * pages.page_bytes, 7, np.uint8)

        def refuse() -> None:
            raise TimeoutError("expired")

        at = pages.at(_tokens(0, 1), 2)
        with pytest.raises(TimeoutError):
            at.load(arena, [(0, 0), (1, pages.page_bytes)], refuse)
        with pytest.raises(TimeoutError):
            at.save(arena, [(0, 0), (1, pages.page_bytes)], refuse)
        assert _bytes_of(pool) == before
        assert (arena == 7).all()


@pytest.mark.parametrize(
    ("indices", "pages"),
    [
        (_tokens(0), 2),
        (_tokens(8), 1),  # behind the last
        (torch.arange(30, 34), 1),
        (torch.arange(-4, 0), 1),
        (_tokens(0).flip(0), 1),
        (_tokens(0, 1)[::2], 1),
        (_tokens(0).reshape(2, 2), 1),
        (None, 1),
        ([0, 1, 2, 3], 1),
    ],
)
@pytest.mark.parametrize("kind", [LayerFirst, Apart, Flat])
def test_indices_that_name_no_pages(kind: Any, indices: Any, pages: int) -> None:
    with pytest.raises(PagesUnusable):
        pages_of(kind()).at(indices, pages)


def test_a_pool_that_says_something_else_than_at_first() -> None:
    pool = LayerFirst()
    pages = pages_of(pool)
    meta = pool.get_page_buffer_meta
    for wrong in (
        lambda indices: (meta(indices)[0][:-1], meta(indices)[1][:-1]),
        lambda indices: (meta(indices)[0], [size + 1 for size in meta(indices)[1]]),
        lambda indices: (meta(indices)[0], [size - 1 for size in meta(indices)[1]]),
        lambda indices: ([address + (1 << 40) for address in meta(indices)[0]], meta(indices)[1]),
        lambda indices: ([0] * len(meta(indices)[0]), meta(indices)[1]),
    ):
        pool.get_page_buffer_meta = wrong  # type: ignore[method-assign]
        with pytest.raises(PagesUnusable):
            pages.at(_tokens(0), 1)


def test_pools_without_bytes_and_without_pages() -> None:
    class Logical:
        page_size = TOKENS
        kv_buffer = None

        def get_page_buffer_meta(self, indices: torch.Tensor) -> None:
            return None

    assert isinstance(pages_of(Logical()), NoPages)
    with pytest.raises(PagesUnusable):
        pages_of(object())


def test_tensors_are_checked() -> None:
    good = torch.zeros(8)
    TensorsAt([good], 32)
    for wrong in (None, torch.zeros(9), torch.zeros(4, 4).t()[:2]):
        with pytest.raises(PagesUnusable):
            TensorsAt([wrong], 32)
