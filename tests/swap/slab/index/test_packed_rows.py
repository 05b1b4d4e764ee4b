"""Rows read from the file's pages are the rows that LMDB has, in its order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from prefixd_swap.slab.files.file_ops import FileOps
from prefixd_swap.slab.index.index import SlabIndex
from prefixd_swap.slab.index.packed_rows import INDEX_KEY_BYTES, PackedRows, pack
from prefixd_swap.slab.index.rows import IndexDamagedError, Row


def rows_of(packed: PackedRows) -> list[Row]:
    """In key order; each position once."""
    found: dict[int, Row] = {}
    for width, pieces in packed.by_width.items():
        for places, content in pieces:
            assert len(content) == width * len(places)
            for at, place in enumerate(places.tolist()):
                row = bytes(content[at * width : (at + 1) * width])
                assert place not in found
                found[place] = row[:INDEX_KEY_BYTES], row[INDEX_KEY_BYTES:]
    assert sorted(found) == list(range(packed.count))
    return [found[place] for place in range(packed.count)]


def packed_of(index: SlabIndex) -> tuple[list[Row], list[bytes]]:
    packed = index.packed()
    return rows_of(packed), packed.odd_keys


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.fixture
def index(path: Path) -> Iterator[SlabIndex]:
    path.mkdir(exist_ok=True)
    made = SlabIndex(path, FileOps())
    yield made
    made.close()


def test_an_empty_index_has_no_rows(index: SlabIndex) -> None:
    assert packed_of(index) == ([], [])


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_those_of_lmdb(index: SlabIndex, seed: int) -> None:
    rng = random.Random(seed)
    there: dict[bytes, bytes] = {}
    for _ in range(6):
        sizes = rng.choice([[200], [200, 300], [1, 100, 1900, 2100, 9000]])
        fresh = {rng.randbytes(INDEX_KEY_BYTES): rng.randbytes(rng.choice(sizes)) for _ in range(rng.randint(1, 900))}
        gone = rng.sample(sorted(there), rng.randint(0, len(there) * 9 // 10))
        index.apply([*((key, None) for key in gone), *fresh.items()])
        there = {key: value for key, value in there.items() if key not in gone} | fresh
        rows, odd = packed_of(index)
        assert rows == sorted(there.items()) == [row for chunk in index.chunks() for row in chunk]
        assert not odd


def test_rows_of_one_length_in_leaves_and_in_runs_are_in_order(index: SlabIndex) -> None:
    """LMDB keeps the run where shorter data takes the place of longer."""
    keys = [bytes([number]) * INDEX_KEY_BYTES for number in range(3)]
    index.apply([(key, key * 10) for key in keys])
    index.apply([(keys[2], bytes(9000)), (keys[2], keys[2] * 10)])
    assert packed_of(index) == ([(key, key * 10) for key in keys], [])


def test_keys_of_another_length_are_told_apart(index: SlabIndex) -> None:
    rows = {bytes([at]) * length: b"value" for at, length in enumerate([1, 24, 24, 23, 40, 24])}
    index.apply(list(rows.items()))
    found, odd = packed_of(index)
    assert found == [row for row in sorted(rows.items()) if len(row[0]) == INDEX_KEY_BYTES]
    assert odd == [key for key in sorted(rows) if len(key) != INDEX_KEY_BYTES]
    (chunk,) = index.chunks()
    assert (rows_of(pack(chunk)), pack(chunk).odd_keys) == (found, odd)


def test_a_file_that_has_changed_since_it_was_checked_is_damaged(index: SlabIndex, path: Path) -> None:
    rng = random.Random(0)
    index.apply([(rng.randbytes(INDEX_KEY_BYTES), bytes(9000)) for _ in range(400)])
    whole = (path / "data.mdb").read_bytes()
    page_bytes = 4096
    overflow = [at for at in range(0, len(whole), page_bytes) if whole[at + 10] == 4]
    with (path / "data.mdb").open("r+b") as file:
        for at in overflow:
            file.seek(at + 10)
            file.write(b"\0")
    with pytest.raises(IndexDamagedError, match="is damaged"):
        index.packed()
    with (path / "data.mdb").open("r+b") as file:
        for at in overflow:
            file.seek(at + 10)
            file.write(b"\4")
    assert len(packed_of(index)[0]) == 400


def test_an_index_without_blocks_is_damaged(index: SlabIndex, path: Path) -> None:
    assert packed_of(index) == ([], []), "what the opening has read"
    index.close()
    (path / "data.mdb").unlink()
    lmdb.open(str(path), max_dbs=1).close()
    with pytest.raises(IndexDamagedError, match="no tree of blocks"):
        index.packed()
