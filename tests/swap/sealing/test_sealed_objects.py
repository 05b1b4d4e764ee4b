"""Encrypted objects: what was encrypted comes back for the same part and key, and for nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from prefixd_swap.errors import ChecksumError, EncodingError, MissingKeyError, StorageError
from prefixd_swap.sealing.rest_keys import RestKey, RestKeys
from prefixd_swap.sealing.sealed_objects import (
    SEAL_BYTES,
    SealedHead,
    UInt8s,
    is_sealed,
    open_sealed,
    part_identity,
    read_head,
    seal,
)

OLD, NEW, OTHER = (RestKey.derive(each * 16) for each in (b"o", b"n", b"x"))
KEYS = RestKeys((NEW, OLD))
IDENTITY = part_identity(b"n" * 8, b"k" * 16, 0)


def array(data: bytes) -> UInt8s:
    return np.frombuffer(data, np.uint8).copy()


def opened(stored: UInt8s, keys: RestKeys = KEYS, identity: bytes = IDENTITY) -> bytes:
    into = np.zeros(max(0, stored.nbytes - SEAL_BYTES), np.uint8)
    open_sealed(stored, keys, identity, into)
    return into.tobytes()


@given(st.binary(max_size=300), st.booleans(), st.sampled_from([OLD, NEW]), st.integers(0, 65535))
def test_the_content_comes_back(content: bytes, coded: bool, key: RestKey, part: int) -> None:
    identity = part_identity(b"n" * 8, b"k" * 16, part)
    stored = seal(array(content), key, identity, coded=coded)
    assert is_sealed(stored)
    assert read_head(stored) == SealedHead(key.id, coded, len(content))
    into = np.full(len(content) + 3, 7, np.uint8)
    assert open_sealed(stored, KEYS, identity, into) == xxhash.xxh3_64_intdigest(content)
    assert into.tobytes() == content + bytes([7, 7, 7])


@pytest.mark.parametrize("nbytes", [0, 1, 16, 100])
def test_every_bit_counts(nbytes: int) -> None:
    stored = seal(array(bytes(range(nbytes))), NEW, IDENTITY)
    kinds = set()
    for bit in range(8 * stored.nbytes):
        flipped = stored.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises((ChecksumError, EncodingError, MissingKeyError)) as caught:
            opened(flipped)
        kinds.add((caught.type, bit // 8))
    assert {at for kind, at in kinds if kind is MissingKeyError} == {12, 13, 14, 15}  # the key's id
    assert {at for kind, at in kinds if kind is EncodingError} == {*range(10)}  # magic, version, unknown flags
    assert {at for kind, at in kinds if kind is ChecksumError} == {9, 10, 11, *range(16, stored.nbytes)}


def test_every_truncation_and_any_further_byte_is_found() -> None:
    stored = seal(array(bytes(range(40))), NEW, IDENTITY)
    for length in range(stored.nbytes):
        with pytest.raises(EncodingError if length < SEAL_BYTES else ChecksumError):
            opened(stored[:length].copy())
    with pytest.raises(ChecksumError):
        opened(np.append(stored, np.uint8(0)))


@given(st.binary(max_size=60))
def test_what_was_never_encrypted_does_not_open(data: bytes) -> None:
    with pytest.raises(StorageError):
        opened(array(data))
    assert is_sealed(array(data)) is data.startswith(b"prefixd\x02")


@pytest.mark.parametrize(
    "identity",
    [
        part_identity(b"m" * 8, b"k" * 16, 0),
        part_identity(b"n" * 8, b"l" * 16, 0),
        part_identity(b"n" * 8, b"k" * 16, 1),
        b"",
    ],
)
def test_an_object_opens_only_as_the_part_that_it_was_made_for(identity: bytes) -> None:
    with pytest.raises(ChecksumError, match="another block's"):
        opened(seal(array(b"content"), NEW, IDENTITY), identity=identity)


def test_a_missing_key_is_named_and_keeps_the_object() -> None:
    stored = seal(array(b"content"), OTHER, IDENTITY)
    before = stored.copy()
    with pytest.raises(MissingKeyError, match=f"the key {OTHER.name} is missing; put it back"):
        opened(stored)
    assert (stored == before).all()
    assert opened(stored, RestKeys((NEW, OLD, OTHER))) == b"content"


def test_another_key_with_the_same_id_does_not_open_it() -> None:
    twin = RestKey(NEW.id, OTHER.objects, OTHER.records)
    with pytest.raises(ChecksumError):
        opened(seal(array(b"content"), twin, IDENTITY))


def test_equal_bytes_make_objects_that_have_nothing_in_common() -> None:
    one, two = (seal(array(bytes(64)), NEW, IDENTITY) for _ in range(2))
    assert (one[16:32] != two[16:32]).any()  # the salt
    assert np.count_nonzero(one[32:] == two[32:]) < 10


def test_a_wrong_checksum_from_before_is_found() -> None:
    content = array(b"content")
    known = xxhash.xxh3_64_intdigest(content.data)
    assert opened(seal(content, NEW, IDENTITY, checksum=known)) == b"content"
    with pytest.raises(ChecksumError, match="altered before"):
        opened(seal(content, NEW, IDENTITY, checksum=known ^ 1))


def test_memory_that_is_too_small_is_refused_before_it_is_written() -> None:
    into = np.zeros(6, np.uint8)
    with pytest.raises(EncodingError, match="7 bytes, and its memory 6"):
        open_sealed(seal(array(b"content"), NEW, IDENTITY), KEYS, IDENTITY, into)
    assert not into.any()


def test_threads_share_keys() -> None:
    contents = [np.full(100_000, number, np.uint8) for number in range(64)]

    def there_and_back(number: int) -> bool:
        identity = part_identity(b"n" * 8, b"k" * 16, number)
        return opened(seal(contents[number], (OLD, NEW)[number % 2], identity), identity=identity) == bytes(
            contents[number]
        )

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(there_and_back, range(64)))
