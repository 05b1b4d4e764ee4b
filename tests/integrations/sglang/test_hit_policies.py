"""At which lengths a prefix can be used."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.integrations.sglang.hit_policies import TrailingPool, usable_lengths


def _pool(pages: int, there: Sequence[bool]) -> TrailingPool:
    asked: set[int] = set()

    def tell(wanted: Sequence[int]) -> list[bool]:
        assert not asked & set(wanted), "a page is asked about once"
        asked.update(wanted)
        return [there[page] for page in wanted]

    return TrailingPool(pages, tell)


def test_the_example() -> None:
    windows, states = [True, True, False, True, True, True], [False, True, False, False, True, False]
    assert usable_lengths(6, [_pool(2, windows)], every=True) == [1, 2, 5, 6]
    assert usable_lengths(6, [_pool(1, states)], every=True) == [2, 5]
    assert usable_lengths(6, [_pool(2, windows), _pool(1, states)], every=True) == [2, 5]
    assert usable_lengths(6, [_pool(2, windows), _pool(1, states)], every=False) == [5]


@pytest.mark.parametrize("every", [True, False])
def test_nothing_to_use(every: bool) -> None:
    assert usable_lengths(0, [_pool(2, [])], every=every) == []
    assert usable_lengths(3, [_pool(1, [False] * 3)], every=every) == []


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=80), st.integers(0, 5), st.integers(1, 40))
def test_all_lengths(there: list[tuple[bool, bool]], pages: int, step: int) -> None:
    first, second = [one for one, _ in there], [two for _, two in there]
    expected = [
        length
        for length in range(1, len(there) + 1)
        if all(first[max(0, length - max(1, pages)) : length]) and second[length - 1]
    ]
    pools = [_pool(pages, first), _pool(1, second)]
    assert usable_lengths(len(there), pools, every=True, step=step) == expected
    pools = [_pool(pages, first), _pool(1, second)]
    assert usable_lengths(len(there), pools, every=False, step=step) == expected[-1:]
