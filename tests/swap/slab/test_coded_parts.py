"""Coded parts in a store: slots of their own sizes, read decoded, and kept by a restart; the format says so."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash

from prefixd_swap import BlockRecord, DiskPart, NewBlock, SlabStore, Span
from prefixd_swap.codecs.coded_part import CodedPart
from prefixd_swap.codecs.coding import Coded, Coding, Decoded, code, decode_object
from prefixd_swap.codecs.part_shape import AXES, PartShape
from prefixd_swap.codecs.registry import find_codec
from prefixd_swap.errors import ChecksumError, FormatError
from prefixd_swap.slab.files.file_ops import FileOps
from prefixd_swap.slab.index.record_columns import OF_ANY_SIZE
from prefixd_swap.slots import PAGE_BYTES, round_to_slot
from tests.swap.codecs.parts import random_part

PART_BYTES = 96 << 10
SHAPE = PartShape("bfloat16", 6, 16, 4, 64, AXES)
NAMESPACE = b"namespac"


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def contents(count: int, nbytes: int = PART_BYTES) -> list[np.ndarray]:
    """Bytes of which a codec makes fewer: of so many bits each."""
    rng = np.random.default_rng(3)
    return [rng.integers(0, 2 << at, nbytes, np.uint8) for at in range(count)]


def coded(data: np.ndarray, codec: str = "lossless") -> CodedPart:
    made = code(data, Coding(find_codec(codec), SHAPE if data.nbytes == SHAPE.nbytes else None))
    assert isinstance(made, Coded)
    return CodedPart(made.data, xxhash.xxh3_64_intdigest(made.data.data))


def blocks(data: Sequence[np.ndarray], raw: Sequence[int] = (), codec: str = "lossless") -> list[NewBlock]:
    keys = [key(at) for at in range(len(data))]
    return [
        NewBlock(
            NAMESPACE,
            name,
            before,
            b"1234",
            at,
            [Span(data[at].ctypes.data, data[at].nbytes) if at in raw else coded(data[at], codec)],
            errors=(0.25, 0.125) if at == 2 else None,
        )
        for at, (before, name) in enumerate(pairwise([b"", *keys]))
    ]


def read(store: SlabStore, parts: Sequence[DiskPart], nbytes: int = PART_BYTES) -> list[np.ndarray]:
    into = [np.zeros(nbytes, np.uint8) for _ in parts]
    for part, outcome in zip(parts, store.read_all(parts, [each.ctypes.data for each in into], nbytes), strict=True):
        assert isinstance(outcome, Decoded) if part.coded else outcome is None
    return into


@pytest.mark.parametrize("nbytes", [PART_BYTES, 12_000], ids=["alone", "together"])
@pytest.mark.parametrize("io", ["direct", "buffered", "mmap"])
def test_coded_and_raw_parts_are_read_and_survive_a_restart(tmp_path: Path, nbytes: int, io: str) -> None:
    data = contents(6, nbytes)
    store = SlabStore.open(tmp_path / "store", 8 << 20, io=io)  # type: ignore[arg-type]
    records = [each for each in store.write(blocks(data, raw=[1])) if each is not None]
    parts = [part for record in records for part in record.parts if part is not None]
    assert [part.coded for part in parts] == [True, False, True, True, True, True]
    assert all(part.nbytes < nbytes for part in parts if part.coded)
    assert store.used_bytes == sum(part.slot_bytes for part in parts) < 6 * round_to_slot(nbytes)
    assert all((one == other).all() for one, other in zip(read(store, parts, nbytes), data, strict=True))
    store.close()

    store = SlabStore.open(tmp_path / "store", 8 << 20, io=io)  # type: ignore[arg-type]
    assert store.used_bytes == sum(part.slot_bytes for part in parts)
    assert sorted(store.records(), key=lambda record: record.depth) == records
    loaded = store.load()
    by_kind = {group.part_bytes: group for group in loaded.groups if group.errors is None}
    assert set(by_kind) == {(nbytes,), (OF_ANY_SIZE,)}
    assert sorted(by_kind[OF_ANY_SIZE,].nbytes[:, 0].tolist()) == sorted(
        part.nbytes for at, part in enumerate(parts) if part.coded and at != 2
    )
    (altered,) = (group for group in loaded.groups if group.errors is not None)
    assert altered.errors is not None and altered.errors.tolist() == [[0.25, 0.125]] and altered.rows.tolist() == [2]
    assert all((one == other).all() for one, other in zip(read(store, parts, nbytes), data, strict=True))
    store.check_integrity()
    store.remove([(NAMESPACE, key(at)) for at in reversed(range(6))])
    assert store.used_bytes == 0
    store.close()


def test_coded_neighbours_are_read_together_wherever_they_go(tmp_path: Path) -> None:
    class Device(FileOps):
        reads = 0

        def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
            self.reads += 1
            return super().pread(fd, buffer, offset)

    data, device = contents(4, 128 << 10), Device()  # all in one mixed page
    store = SlabStore.open(tmp_path / "store", 8 << 20, io="direct", ops=device)
    parts = [each.parts[0] for each in store.write(blocks(data)) if each is not None]
    stored = [part for part in parts if part is not None]
    assert max(part.nbytes for part in stored) > 64 << 10
    device.reads = 0
    assert all((one == other).all() for one, other in zip(read(store, stored, 128 << 10), data, strict=True))
    assert device.reads == 1
    store.close()


def test_a_part_that_is_kept_stays_as_it_is(tmp_path: Path) -> None:
    data = contents(2)
    store = SlabStore.open(tmp_path / "store", 8 << 20)
    (first,) = store.write([NewBlock(NAMESPACE, key(1), b"", b"1234", 0, [coded(data[0]), None])])
    assert isinstance(first, BlockRecord)
    (second,) = store.write(
        [NewBlock(NAMESPACE, key(1), b"", b"1234", 0, [first.parts[0], Span(data[1].ctypes.data, PART_BYTES)])]
    )
    assert second is not None and second.parts[0] == first.parts[0]
    assert (read(store, [part for part in second.parts if part is not None])[0] == data[0]).all()
    store.close()


@pytest.mark.parametrize("codec", ["lossless", "int8"])
@pytest.mark.parametrize("at", [0, 40, 700])
def test_damage_of_a_coded_part_is_its_own(tmp_path: Path, at: int, codec: str) -> None:
    data = [random_part(SHAPE, seed) for seed in range(3)]
    store = SlabStore.open(tmp_path / "store", 8 << 20)
    records = store.write(blocks(data, codec=codec))
    for each in data:
        decode_object(coded(each, codec).data, each)
    parts = [part for record in records if record for part in record.parts if part is not None]
    slab, index = store._slabs.find(parts[1].slot)
    with slab.path.open("r+b") as file:
        file.seek(index * PAGE_BYTES + at)
        byte = file.read(1)[0]
        file.seek(index * PAGE_BYTES + at)
        file.write(bytes([byte ^ 4]))
    into = [np.zeros(PART_BYTES, np.uint8) for _ in parts]
    outcomes = store.read_all(parts, [each.ctypes.data for each in into], PART_BYTES)
    assert isinstance(outcomes[1], ChecksumError) and "the slot at byte" in str(outcomes[1])
    assert (into[0] == data[0]).all() and (into[2] == data[2]).all()
    assert not into[1].any(), "what is damaged is not decoded"
    with pytest.raises(ChecksumError):
        store.check(NAMESPACE, key(1))
    store.close()


def test_a_directory_says_that_it_has_coded_parts_from_the_first_one_on(tmp_path: Path) -> None:
    data, path = contents(3), tmp_path / "store"
    store = SlabStore.open(path, 8 << 20)
    store.write(blocks(data[:1], raw=[0]))
    store.close()
    assert versions(path) == [2, 2], "an earlier prefixd can read it"
    store = SlabStore.open(path, 8 << 20)
    store.write([NewBlock(NAMESPACE, key(7), b"", b"1234", 0, [coded(data[0])])])
    assert versions(path) == [3, 3], "before the part is named"
    store.close()
    store = SlabStore.open(path, 8 << 20)
    store.remove([(NAMESPACE, key(7))])
    store.close()
    assert versions(path) == [3, 3]


@pytest.mark.parametrize("copy", [None, 2])
def test_a_crash_between_the_two_superblocks_goes_forward(tmp_path: Path, copy: int | None) -> None:
    """The copy is deleted first; if an earlier prefixd made it anew meanwhile, the later format counts."""
    path = tmp_path / "store"
    SlabStore.open(path, 8 << 20).close()
    old = (path / "SUPERBLOCK.copy").read_bytes()
    store = SlabStore.open(path, 8 << 20)
    store.write([NewBlock(NAMESPACE, key(7), b"", b"1234", 0, [coded(contents(1)[0])])])
    store.close()
    (path / "SUPERBLOCK.copy").unlink()
    if copy is not None:
        (path / "SUPERBLOCK.copy").write_bytes(old)
    store = SlabStore.open(path, 8 << 20)
    assert len(list(store.records())) == 1
    store.close()
    assert versions(path)[0] == 3


def test_a_format_of_the_future_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    SlabStore.open(path, 8 << 20).close()
    for name in ("SUPERBLOCK", "SUPERBLOCK.copy"):
        fields = struct.pack("<8sII", b"prefixd\0", 4, PAGE_BYTES)
        (path / name).write_bytes(fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields)))
    with pytest.raises(FormatError, match="of a newer prefixd"):
        SlabStore.open(path, 8 << 20)


def versions(path: Path) -> list[int]:
    return [struct.unpack_from("<8sII", (path / name).read_bytes())[1] for name in ("SUPERBLOCK", "SUPERBLOCK.copy")]
