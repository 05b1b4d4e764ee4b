"""SGLang's keys as digests."""

from __future__ import annotations

import hashlib

import pytest

from prefixd.integrations.engine.pages_by_key.chains import BLOCK_TOKENS, KEY_BYTES
from prefixd.integrations.sglang.page_keys import digests_of


def test_a_key_is_the_tokens_of_its_block() -> None:
    assert (KEY_BYTES, BLOCK_TOKENS) == (32, 8)
    keys = [hashlib.sha256(f"page {number}".encode()).hexdigest() for number in range(3)]
    assert digests_of(keys) == bytes.fromhex("".join(keys))
    assert digests_of([]) == b""


@pytest.mark.parametrize("key", ["", "a" * 63, "a" * 65, "A" * 64, "g" * 64, " " * 64, "ab" * 31 + " a", "\ud800", "é"])
def test_other_keys_are_hashed(key: str) -> None:
    digests = digests_of([key, "a" * 64])
    assert len(digests) == 2 * KEY_BYTES
    assert digests[KEY_BYTES:] == bytes.fromhex("a" * 64)
    assert digests[:KEY_BYTES] not in (bytes.fromhex("a" * 64), bytes(KEY_BYTES))


def test_keys_that_only_together_have_the_right_length() -> None:
    first, second = digests_of(["a" * 63, "b" * 65]), digests_of(["a" * 64, "b" * 64])
    assert len(first) == len(second) == 2 * KEY_BYTES
    assert first != second


def test_a_key_must_be_a_string() -> None:
    with pytest.raises(TypeError):
        digests_of([7])  # type: ignore[list-item]
