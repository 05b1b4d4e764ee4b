"""A record of the index that is not as it was written is damage to one block, whatever in it was changed."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from prefixd_swap import RecordDamagedError, SlabStore, Span, StorageError
from prefixd_swap.slab.index.block_record import (
    BlockRecord,
    DiskPart,
    NewBlock,
    decode_record,
    encode_record,
    index_key,
    record_slots,
    without_parts,
)

NS = b"namespac"
PAGE = 4096
_BYTES = np.arange(PAGE, dtype=np.uint8)


def key(number: int) -> bytes:
    return struct.pack("<QQ", number, number)


def block(number: int, parent: int | None = None, parts: int = 2) -> NewBlock:
    span = Span(int(_BYTES.ctypes.data), 700)
    above = b"" if parent is None else key(parent)
    return NewBlock(NS, key(number), above, struct.pack("<4I", *range(4)), 0 if parent is None else 1, [span] * parts)


def value_of(number: int, parts: int = 2) -> bytes:
    return encode_record(block(number, 1, parts), [DiskPart(1 << 24 | part, 700, 99) for part in range(parts)])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SlabStore]:
    opened = SlabStore.open(tmp_path / "store", 64 * PAGE)
    yield opened
    opened.close()


def damaged(value: bytes) -> list[bytes]:
    """The value with each byte changed in several ways, cut off after each byte, and with bytes too many."""
    flips = [
        value[:at] + bytes([value[at] ^ mask]) + value[at + 1 :] for at in range(len(value)) for mask in (1, 128, 255)
    ]
    return [*flips, *(value[:length] for length in range(len(value))), value + b"\0", value * 2]


def test_what_is_decoded_is_what_was_encoded() -> None:
    name = index_key(NS, key(7))
    parts = (DiskPart(5, 700, 2**64 - 1), None, DiskPart(2**40, 1, 0))
    written = encode_record(block(7, 3, 3), parts)
    assert decode_record(name, written) == BlockRecord(NS, key(7), key(3), block(7).tokens, parts, 1)
    assert record_slots(written) == [(5, 700), (2**40, 1)]


def test_a_record_may_have_no_part_on_disk() -> None:
    name, node = index_key(NS, key(7)), encode_record(block(7, 3), [None, None])
    assert decode_record(name, node) == BlockRecord(NS, key(7), key(3), block(7).tokens, (None, None), 1)
    assert record_slots(node) == []
    assert without_parts(value_of(7), [0, 1, 2]) == encode_record(block(7, 1), [None, None])
    for changed in damaged(node):
        with suppress(RecordDamagedError):
            without_parts(changed, [0, 1])


def test_a_changed_record_is_a_storage_error_or_a_record() -> None:
    name, refused = index_key(NS, key(7)), 0
    for changed in damaged(value_of(7)):
        try:
            record = decode_record(name, changed)
            assert all(part is None or part.nbytes > 0 for part in record.parts)
            assert len(record.tokens) % 4 == 0
            assert record_slots(changed) == [(part.slot, part.nbytes) for part in record.parts if part]
        except StorageError:
            refused += 1
            with pytest.raises(StorageError):
                record_slots(changed)
    assert refused > len(value_of(7))


@pytest.mark.parametrize(
    ("at", "put", "words"),
    [
        (4, struct.pack("<H", 0), "0 parts end at byte 24"),
        (4, struct.pack("<H", 3), "3 parts end at byte 96"),
        (4, struct.pack("<H", 0xFFFF), "65535 parts end at byte 1572864"),
        (6, struct.pack("<H", 0x8001), "flags are 0x8001"),
        (24, struct.pack("<Q", 1 << 63), "larger than any disk"),
        (32, struct.pack("<Q", 0), "a part of 0 bytes has a slot"),
    ],
)
def test_the_message_says_what_is_wrong_and_what_to_do(at: int, put: bytes, words: str) -> None:
    value = value_of(7)
    changed = value[:at] + put + value[at + len(put) :]
    with pytest.raises(RecordDamagedError, match=f"record of 88 bytes is damaged .*{words}.*; remove the block"):
        decode_record(index_key(NS, key(7)), changed)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (value_of(7)[:23], "header alone has 24"),
        (value_of(7)[:-1], "4 each"),
    ],
)
def test_a_record_of_a_wrong_length(value: bytes, words: str) -> None:
    with pytest.raises(RecordDamagedError, match=words):
        decode_record(index_key(NS, key(7)), value)


def test_a_key_of_a_wrong_length() -> None:
    with pytest.raises(RecordDamagedError, match="key of 8 bytes"):
        decode_record(NS, value_of(7))


def test_a_store_goes_on_with_any_record_changed(store: SlabStore) -> None:
    """Check, list, replace and remove: only StorageErrors, the neighbour stays, and a revive gets every slot back."""
    good, victim = store.write([block(1), block(2)])
    assert good is not None and victim is not None
    name = index_key(NS, key(2))
    written = store._index.get(name)
    assert written is not None
    known = np.array([part.slot for part in good.parts if part], np.int64)
    changes = damaged(written)
    for changed in [*random.Random(4).sample(changes, 80), written[:4] + b"\x09" + written[5:]]:
        store._index.apply([(name, changed)])
        for act in (lambda: store.check(NS, key(2)), lambda: list(store.records()), store.load):
            with suppress(StorageError):
                act()
        assert store.check(NS, key(1))
        if len(changed) % 2:
            store.remove([(NS, key(2))])
        else:
            assert store.write([block(2)])[0] is not None, "written again, over the damaged record"
            assert store.check(NS, key(2))
            store.remove([(NS, key(2))])
        assert store.check(NS, key(1))
        assert store.revive(known).tolist() == []
        store.check_integrity()
        assert store.used_bytes == 2 * PAGE
        (again,) = store.write([block(2)])
        assert again is not None
        name, written = index_key(NS, key(2)), store._index.get(index_key(NS, key(2)))


def test_a_removal_that_meets_a_damaged_record_is_durable_and_leaks_are_told(
    store: SlabStore, caplog: pytest.LogCaptureFixture
) -> None:
    good, _ = store.write([block(1), block(2)])
    assert good is not None
    name = index_key(NS, key(2))
    written = store._index.get(name)
    assert written is not None
    store._index.apply([(name, written[:4] + b"\xff" + written[5:])])
    store.remove([(NS, key(2))])
    assert [record.key for record in store.records()] == [key(1)]
    assert "free only after a restart" in caplog.text and "255 parts" in caplog.text
    store.check_integrity()  # the slots that nobody names are accounted for
    assert store.used_bytes == 4 * PAGE
    store.revive(np.array([part.slot for part in good.parts if part], np.int64))
    assert store.used_bytes == 2 * PAGE


def test_slots_of_a_changed_record_are_not_freed_twice(store: SlabStore) -> None:
    """It names a slot that is free: the write that replaces it is stored all the same, and keeps its own slots."""
    store.write([block(1), block(2)])
    name = index_key(NS, key(2))
    written = store._index.get(name)
    assert written is not None
    store._index.apply([(name, written[:24] + struct.pack("<Q", 1 << 24 | 60) + written[32:])])
    (again,) = store.write([block(2)])
    assert again is not None and store.check(NS, key(2))
    (third,) = store.write([block(3)])
    assert third is not None
    slots = [part.slot for record in store.records() for part in record.parts if part]
    assert len(slots) == len(set(slots)) == 6


@pytest.mark.parametrize("change", [b"\x01\x80", b"\x09\x00", b"\x05\x00"])
def test_a_record_with_unknown_flags_is_dropped_at_the_start(tmp_path: Path, change: bytes) -> None:
    store = SlabStore.open(tmp_path / "store", 64 * PAGE)
    store.write([block(1), block(2)])
    name = index_key(NS, key(2))
    written = store._index.get(name)
    assert written is not None
    store._index.apply([(name, written[:6] + change + written[8:]), (index_key(NS, key(3)), written + b"x")])
    store.close()
    store = SlabStore.open(tmp_path / "store", 64 * PAGE)
    assert (store.recovery.kept, store.recovery.lost_slots) == (1, 2)
    assert store.used_bytes == 2 * PAGE
    store.close()


def test_two_records_that_name_one_slot_are_parted_by_a_revive(store: SlabStore) -> None:
    records = store.write([block(1), block(2)])
    known = np.array([part.slot for record in records if record for part in record.parts if part], np.int64)
    first = store._index.get(index_key(NS, key(1)))
    assert first is not None
    store._index.apply([(index_key(NS, key(2)), first)])
    lost = store.revive(known).tolist()
    assert lost == known[2:].tolist()
    store.check_integrity()
    assert store.used_bytes == 2 * PAGE


def test_a_removal_frees_the_slots_of_the_others_when_a_record_names_one_that_is_free(
    store: SlabStore, caplog: pytest.LogCaptureFixture
) -> None:
    assert all(store.write([block(1), block(2), block(3)]))
    names = {number: index_key(NS, key(number)) for number in (1, 2, 3)}
    values = {number: store._index.get(name) for number, name in names.items()}
    assert values[1] is not None
    store._index.apply([(names[2], values[1])])
    store.remove([(NS, key(2))])
    assert store.used_bytes == 4 * PAGE, "the slots of block 1 were freed"
    store.remove([(NS, key(number)) for number in (3, 1)])
    assert "free only after a restart" in caplog.text
    assert store.used_bytes == 2 * PAGE, "block 3 has gone with its slots; those of block 2 wait for a restart"
