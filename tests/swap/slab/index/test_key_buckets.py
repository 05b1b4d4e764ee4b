"""Keys are found in buckets, also where clients chose many that begin alike."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefixd_swap.slab.index.record_columns import _KeyBuckets

halves = st.one_of(st.integers(0, 3), st.integers(0, (1 << 64) - 1), st.integers((1 << 63) - 2, (1 << 63) + 2))
names = st.tuples(halves, halves)


def columns(keys: list[tuple[int, int]]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """[n, 2]: keys, in whose order numbers are compared, as they lie in memory."""
    return np.array(keys, np.uint64).reshape(-1, 2).byteswap()


@given(st.sets(names, min_size=1, max_size=60), st.lists(names, max_size=20))
def test_each_key_is_found_at_its_place(there: set[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    ascending = sorted(there)
    keys = columns(ascending)
    wanted = [*ascending[::-1], *others]
    found, same = _KeyBuckets(keys[:, 0].byteswap(), keys).find(columns(wanted))
    assert same.tolist() == [key in there for key in wanted]
    assert [ascending[at] for at, is_there in zip(found, same, strict=True) if is_there] == [
        key for key in wanted if key in there
    ]


def test_ten_thousand_keys_that_begin_alike_take_a_few_steps_each() -> None:
    keys = columns([(7, number) for number in range(10_000)])
    found, same = _KeyBuckets(keys[:, 0].byteswap(), keys).find(keys[::-1])
    assert same.all() and (found == np.arange(10_000)[::-1]).all()
