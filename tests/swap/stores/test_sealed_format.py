"""The format of sealed objects stays: objects of earlier daemons open, and what is made now has their layout."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from prefixd_swap.errors import AlteredObjectError, BadObjectError, StaleObjectError
from prefixd_swap.stores.base import NAME_BYTES
from prefixd_swap.stores.names import BlockIdentity, object_name
from prefixd_swap.stores.sealed import Seal, is_coded, stated_bytes

SECRET, KEY, PAYLOAD = b"s" * 16, b"k" * 16, bytes(range(40))
CHECKSUM = xxhash.xxh3_64_intdigest(PAYLOAD)
CLEAR_HEAD = bytes.fromhex(
    "7072656669786400010000000200000004000000030000000000000028000000000000006e6e6e6e6e6e6e6e6767676767676767b183"
    "8b25c7b557bf2f34d9d382ed1090a961469e636ba5900af25fe46e87e37637b18be0693d4b580849cb573c9261138399b0cd"
)
ENCRYPTED_HEAD = bytes.fromhex(
    "7072656669786400010001000200000004000000030000000000000028000000000000006e6e6e6e6e6e6e6e676767676767676755b0"
    "00f3a8933d82ad948dff91dc3299fbd578da0d78122998380da4a45c2c61f9d9913eda546ab6a8d8f9c87fb3dabf2b41629a"
)
ENCRYPTED = bytes.fromhex("8caa18797bc7b7d8bb697a49010b4be0f7d488b8a8943673f60bbc9730b6b11403413e19ba1e602f")


def block_of(seal: Seal) -> BlockIdentity:
    keys, tokens = seal.keys(b"salt"), b"\1\0\0\0" * 4
    return BlockIdentity(keys, keys.chain(keys.root(b"root"), [tokens])[0], b"n" * 8, b"g" * 8, 3, tokens)


@pytest.mark.parametrize(("key", "head", "stored"), [(None, CLEAR_HEAD, PAYLOAD), (KEY, ENCRYPTED_HEAD, ENCRYPTED)])
def test_an_object_of_an_earlier_daemon_opens(key: bytes | None, head: bytes, stored: bytes) -> None:
    seal = Seal(SECRET, key)
    payload = bytearray(stored)
    checksum = seal.open(block_of(seal), 2, memoryview(head), memoryview(payload))
    assert payload == PAYLOAD
    assert checksum == seal.open(block_of(seal), 2, *sealed_again(seal))


def sealed_again(seal: Seal, label: bytes = b"") -> tuple[memoryview, memoryview]:
    head, payload = seal.close(block_of(seal), 2, memoryview(PAYLOAD), None, label=label, coded=bool(label))
    return memoryview(head), memoryview(bytearray(payload))


@pytest.mark.parametrize("label", [b"", b"int8"])
@pytest.mark.parametrize("key", [None, KEY])
def test_every_bit_of_an_object_counts(key: bytes | None, label: bytes) -> None:
    seal = Seal(SECRET, key)
    head, payload = sealed_again(seal, label)
    assert len(head) == len(CLEAR_HEAD) == seal.head_bytes
    assert (bytes(payload) == PAYLOAD) is (key is None)
    assert is_coded(head) is bool(label) and stated_bytes(head) == len(PAYLOAD)
    assert seal.open(block_of(seal), 2, head, memoryview(bytearray(payload)), label=label) == CHECKSUM
    whole = bytes(head) + bytes(payload)
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        view = memoryview(flipped)
        with pytest.raises(BadObjectError):
            seal.open(block_of(seal), 2, view[: len(head)], view[len(head) :], label=label)


def test_a_coded_object_opens_under_its_own_label_alone() -> None:
    seal = Seal(SECRET)
    head, payload = sealed_again(seal, b"int8")
    for label, error in ((b"", StaleObjectError), (b"lossless", AlteredObjectError)):
        with pytest.raises(error):
            seal.open(block_of(seal), 2, head, memoryview(bytearray(payload)), label=label)
    raw, payload = sealed_again(seal)
    with pytest.raises(AlteredObjectError):
        seal.open(block_of(seal), 2, raw, memoryview(bytearray(payload)), label=b"int8")


@given(st.binary(min_size=30, max_size=30), st.integers(0, 1023), st.lists(st.binary(max_size=64), max_size=4))
def test_each_label_has_names_of_its_own(digest: bytes, part: int, labels: list[bytes]) -> None:
    names = {label: object_name(digest, part, label) for label in {b"", *labels}}
    assert len(set(names.values())) == len(names) and {len(name) for name in names.values()} == {NAME_BYTES}
    assert names[b""] == digest + part.to_bytes(2, "little"), "as every version names it"
