"""Encrypted ends of records: one by one and in columns they are the same."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd_swap.errors import EncodingError, MissingKeyError
from prefixd_swap.sealing.rest_keys import RestKey, RestKeys
from prefixd_swap.sealing.sealed_records import (
    RECORD_SEAL_BYTES,
    open_record,
    open_records,
    record_keys,
    seal_record,
)

OLD, NEW, OTHER = (RestKey.derive(each * 16) for each in (b"o", b"n", b"x"))
KEYS = RestKeys((NEW, OLD))


@given(
    st.integers(0, 70).flatmap(lambda n: st.lists(st.binary(min_size=n, max_size=n), min_size=1, max_size=30)),
    st.randoms(use_true_random=False),
)
def test_columns_open_what_single_records_seal(ends: list[bytes], random: Random) -> None:
    keys = [random.choice([OLD, NEW]) for _ in ends]
    sealed = [seal_record(end, key) for end, key in zip(ends, keys, strict=True)]
    assert [open_record(each, KEYS) for each in sealed] == ends
    rows = np.frombuffer(b"".join(sealed), np.uint8).reshape(len(sealed), -1)
    assert record_keys(rows).tolist() == [key.id for key in keys]
    assert [row.tobytes() for row in open_records(rows, KEYS)] == ends


def test_more_rows_than_are_decrypted_at_once() -> None:
    rows = np.random.default_rng(7).integers(0, 256, (9_000, 100), np.uint8)
    sealed = np.frombuffer(b"".join(seal_record(row.tobytes(), NEW) for row in rows), np.uint8).reshape(len(rows), -1)
    table = np.hstack([np.zeros((len(rows), 5), np.uint8), sealed])  # as in the index: the end of a longer row
    assert (open_records(table[:, 5:], KEYS) == rows).all()


def test_equal_ends_look_different_and_are_not_in_clear() -> None:
    end = bytes(range(64))
    one, two = seal_record(end, NEW), seal_record(end, NEW)
    assert len(one) == len(end) + RECORD_SEAL_BYTES
    assert one[RECORD_SEAL_BYTES:] != two[RECORD_SEAL_BYTES:]
    assert end[:8] not in one


def test_a_missing_key_is_named() -> None:
    sealed = seal_record(b"tokens", OTHER)
    with pytest.raises(MissingKeyError, match=OTHER.name):
        open_record(sealed, KEYS)
    with pytest.raises(MissingKeyError, match=OTHER.name):
        open_records(np.frombuffer(sealed, np.uint8).reshape(1, -1), KEYS)


def test_an_end_without_its_head_is_refused() -> None:
    with pytest.raises(EncodingError, match="not 15"):
        open_record(bytes(15), KEYS)
    with pytest.raises(EncodingError, match="not 15"):
        open_records(np.zeros((2, 15), np.uint8), KEYS)
