"""Pages of SGLang's as prompts of prefixd."""

from __future__ import annotations

import hashlib

import pytest

from prefixd.integrations.sglang.chains import BLOCK_TOKENS, KEY_BYTES, Chains, Starts, digests_of


def _keys(count: int, name: str = "page") -> list[str]:
    return [hashlib.sha256(f"{name} {number}".encode()).hexdigest() for number in range(count)]


def test_a_key_is_the_tokens_of_its_block() -> None:
    assert (KEY_BYTES, BLOCK_TOKENS) == (32, 8)
    keys = _keys(3)
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


def test_prefix_keys_lead_up_to_a_call() -> None:
    keys = _keys(6)
    chain = Chains().chain(keys[4:], keys[:4])
    assert (chain.before, len(chain)) == (4, 6)
    assert chain.path == digests_of(keys)
    assert chain.page(5) == digests_of(keys[5:])
    assert chain.part(2, 4) == digests_of(keys[2:4])


def test_what_was_said_before_leads_up_to_a_call() -> None:
    keys = _keys(9)
    chains = Chains()
    chains.chain(keys[:5], None)
    chains.chain(keys[5:], keys[:5])
    assert chains.chain(keys[7:], None).path == digests_of(keys)
    assert chains.chain(keys[:2], None).before == 0
    assert chains.chain(_keys(2, "other"), None).before == 0


def test_keys_in_a_circle_lead_nowhere() -> None:
    keys = _keys(2)
    chains = Chains(links=64)
    chains.chain([keys[0], keys[1], keys[0]], None)
    assert chains.chain([keys[0]], None).before == 0
    assert chains.chain([keys[1], keys[1]], None).before <= 64


def test_old_links_are_forgotten() -> None:
    chains = Chains(links=10)
    keys = _keys(100)
    chains.chain(keys, None)
    assert len(chains._parents) == 10
    assert chains.chain(keys[50:], keys[:50]).before == 50


def test_paths_that_begin_in_the_middle() -> None:
    keys = _keys(6)
    chain = Chains().chain(keys, None)
    starts = Starts(limit=2)
    assert starts.of(chain, 5) == [0]
    starts.add(chain.page(2))
    starts.add(chain.page(4))
    assert (starts.of(chain, 5), starts.of(chain, 3), starts.of(chain, 1)) == ([4, 2, 0], [2, 0], [0])
    starts.add(chain.page(5))
    assert starts.of(chain, 5) == [5, 4, 0]
    starts.drop(chain.page(4))
    assert chain.page(4) not in starts
    assert chain.page(5) in starts
