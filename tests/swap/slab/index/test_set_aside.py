"""An index that was set aside is kept and counted, and what can be read of it comes back."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
from pathlib import Path

import lmdb
import numpy as np
import pytest

from prefixd_swap import NewBlock, SetAside, ShrinkError, SlabStore, Span, StorageError, discard, salvage
from prefixd_swap.slab.files.file_ops import FileOps
from prefixd_swap.slab.index.block_record import DiskPart, encode_record, index_key
from prefixd_swap.slab.index.set_aside import MOST, NOTE
from prefixd_swap.slab.salvage import NO_PARENT, OVERWRITTEN, UNREADABLE
from tests.swap.slab.chains import opened

NS, OTHER = b"namespac", b"other ns"
PAGE = 4096
CAPACITY = 256 * PAGE
CHAIN = 4


def content(number: int) -> bytes:
    return random.Random(number).randbytes(300 + 4000 * (number % 3))


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def write(store: SlabStore, numbers: range) -> None:
    """Blocks in chains of four: the first of each has no parent. Every fifth is pinned."""
    alive = [np.frombuffer(bytearray(content(number)), np.uint8) for number in numbers]
    blocks = [
        NewBlock(
            NS,
            key(number),
            key(number - 1) if number % CHAIN else b"",
            b"tokn" * 40,
            number % CHAIN,
            [Span(int(array.ctypes.data), array.nbytes)],
        )
        for number, array in zip(numbers, alive, strict=True)
    ]
    assert all(store.write(blocks))
    store.pin([(NS, key(number)) for number in numbers if number % 5 == 0], True)


def contents(store: SlabStore) -> dict[int, bytes]:
    found = {}
    for record in store.records():
        (part,) = record.parts
        assert part is not None
        target = np.zeros(part.nbytes, np.uint8)
        store.read(part, Span(int(target.ctypes.data), part.nbytes))
        found[int.from_bytes(record.key, "big")] = target.tobytes()
    return found


def filled(path: Path, count: int = 40) -> None:
    with opened(path, CAPACITY) as store:
        store.put_namespace(NS, b"what it stands for")
        write(store, range(count))


def only(store: SlabStore) -> SetAside:
    (found,) = store.set_aside()
    return found


def bring_back(store: SlabStore) -> tuple[int, dict[str, int]]:
    result = salvage(only(store), store)
    store.adopt(result.rows, result.namespaces, result.pins)
    discard(only(store))
    store.check_integrity()
    return result.blocks, dict(result.lost)


def test_an_index_that_was_whole_comes_back_whole(path: Path) -> None:
    """As one that an earlier version has set aside, without a note."""
    filled(path)
    (path / "index").rename(path / "index.damaged")
    store = SlabStore.open(path, CAPACITY)
    assert only(store) == SetAside(path / "index.damaged", "", 40) and not contents(store)
    assert bring_back(store) == (40, {})
    assert store.set_aside() == []
    for _ in range(2):
        assert contents(store) == {number: content(number) for number in range(40)}
        assert set(store.pins()) == {(NS, key(number)) for number in range(0, 40, 5)}
        assert store.namespaces() == {NS: b"what it stands for"}
        write(store, range(40, 44))
        store.remove([(NS, key(number)) for number in range(43, 39, -1)])
        store.close()
        store = SlabStore.open(path, CAPACITY)
    store.close()


@pytest.mark.parametrize("pages", range(2, 14))
def test_what_can_be_read_of_a_file_that_was_cut_off_is_back_at_once(path: Path, pages: int) -> None:
    filled(path)
    data = path / "index" / "data.mdb"
    whole = data.read_bytes()
    data.write_bytes(whole[: pages * PAGE])
    with opened(path, CAPACITY) as store:
        if not store.recovery.index_damage:
            pytest.skip("no page that is in use is missing")
        assert "cut off" in only(store).reason
        note = json.loads((only(store).path / NOTE).read_text())
        assert note == {"reason": only(store).reason, "blocks": only(store).blocks}
        counted = only(store).blocks
        found = contents(store)
        assert all(found[number] == content(number) for number in found)
        assert all(number % CHAIN == 0 or number - 1 in found for number in found)
        assert counted == 40 - len(found) or (counted is None and not found)
        assert store.recovery.lost == {}, "counted once, with what was set aside"
        blocks, lost = bring_back(store)
        assert blocks == 0 and set(lost) <= {UNREADABLE, NO_PARENT} and sum(lost.values()) == (counted or 0)
        assert contents(store) == found


@pytest.mark.parametrize("damaged", [3, 12, 39])
def test_a_key_out_of_order_costs_its_block_and_what_continues_it(path: Path, damaged: int) -> None:
    filled(path)
    data = path / "index" / "data.mdb"
    whole = data.read_bytes()
    wrong = NS + b"\x7f" + key(damaged)[1:] if damaged < 39 else NS + key(0)[:-1] + b"\x01"
    data.write_bytes(whole.replace(NS + key(damaged), wrong))
    with opened(path, CAPACITY) as store:
        end = damaged - damaged % CHAIN + CHAIN
        lost = set(range(damaged, end))
        assert "out of order" in store.recovery.index_damage
        found = contents(store)
        assert {number: each for number, each in found.items() if number < 40} == {
            number: content(number) for number in range(40) if number not in lost
        }
        store.check_integrity()
        assert only(store).blocks == 40 - len(found)
        bring_back(store)
        assert contents(store) == found
    with opened(path, CAPACITY) as store:
        assert contents(store) == found and not store.recovery.lost


def test_a_page_that_the_device_cannot_read_costs_what_is_in_it(path: Path) -> None:
    filled(path)
    with lmdb.open(str(path / "index"), max_dbs=3, lock=False) as env, env.begin() as txn:
        pages = env.info()["last_pgno"] + 1
        assert txn.stat(env.open_db(b"blocks", txn))["leaf_pages"] > 2

    class Bad(FileOps):
        page = 0

        def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
            if offset <= self.page * PAGE < offset + len(buffer) and os.readlink(f"/proc/self/fd/{fd}").endswith(
                "data.mdb"
            ):
                raise OSError(errno.EIO, "Input/output error")
            return super().pread(fd, buffer, offset)

    kept = []
    for Bad.page in range(2, pages):
        copy = path.with_name(f"page{Bad.page}")
        shutil.copytree(path, copy)
        with opened(copy, CAPACITY, ops=Bad()) as store:
            found = contents(store)
            assert all(each == content(number) for number, each in found.items())
            if damage := store.recovery.index_damage:
                assert "cannot be read: Input/output error" in damage
                kept.append(len(found))
            else:  # a page that no tree has
                assert len(found) == 40
    assert len(kept) >= 6, "branches and leaves of all trees"
    assert min(kept) < 40 and max(kept) == 40 and sum(20 < each < 40 for each in kept) > 1


@pytest.mark.parametrize("gone", ["folder", "file", "content"])
def test_an_index_that_is_gone_beside_slabs_is_set_aside(path: Path, gone: str) -> None:
    filled(path)
    if gone == "folder":
        shutil.rmtree(path / "index")
    elif gone == "file":
        (path / "index" / "data.mdb").unlink()
    else:
        (path / "index" / "data.mdb").write_bytes(b"")
    for _ in range(2):
        with opened(path, CAPACITY) as store:
            assert only(store).blocks is None and not contents(store)
            assert re.fullmatch(
                "data.mdb is empty|the index is gone, and \\d+ slab files are there", only(store).reason
            )
    with opened(path, CAPACITY) as store:
        assert bring_back(store) == (0, {}) and store.set_aside() == []
    with opened(path, CAPACITY) as store:
        assert store.set_aside() == []


def test_a_new_directory_has_lost_nothing(path: Path) -> None:
    for _ in range(2):
        with opened(path, CAPACITY) as store:
            assert store.set_aside() == []


@pytest.mark.parametrize("seed", range(4))
def test_what_was_overwritten_since_does_not_come_back(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    filled(path)
    (path / "index").rename(path / "index.damaged")
    with opened(path, CAPACITY) as store:
        store.put_namespace(NS, b"what it stands for")
        again = range(0, 4 * rng.randint(1, 3))
        write(store, again)  # computed again
        write(store, range(100, 100 + 4 * rng.randint(1, 4)))
        new = contents(store)
        result = salvage(only(store), store)
        assert (result.there, result.blocks + sum(result.lost.values())) == (len(again), 40 - len(again))
        assert result.lost[OVERWRITTEN]
        bring_back(store)
        found = contents(store)
        assert found.items() >= new.items() and len(found) == len(new) + result.blocks
        assert all(each == content(number) for number, each in found.items())


def test_records_that_name_no_bytes_or_the_same_are_not_believed(path: Path) -> None:
    filled(path, 8)
    records = {}
    with lmdb.open(str(path / "index"), max_dbs=3, lock=False) as env:
        blocks = env.open_db(b"blocks")
        with env.begin(write=True, db=blocks) as txn:
            (good,) = [DiskPart(*_part(txn.get(index_key(NS, key(4)))))]

            def put(number: int, part: DiskPart, namespace: bytes = NS) -> None:
                record = NewBlock(namespace, key(number), b"", b"tokn", 0, [])
                txn.put(index_key(namespace, key(number)), encode_record(record, [part]))

            put(200, DiskPart(good.slot, 1 << 60, 1))
            put(201, DiskPart((1 << 62) + 5, 10, 1))
            put(202, good)
            put(203, DiskPart(77, 10, 1), OTHER)
            txn.put(index_key(NS, key(204)), b"no record")
            records = dict(txn.cursor())
    assert len(records) == 13
    (path / "index").rename(path / "index.damaged")
    with opened(path, CAPACITY) as store:
        blocks, lost = bring_back(store)
        # 4 and 202 name the same bytes, and 5 to 7 continue 4.
        assert (blocks, lost) == (4, {UNREADABLE: 4, OVERWRITTEN: 2, NO_PARENT: 3})
        assert sorted(contents(store)) == [0, 1, 2, 3]


def _part(value: bytes) -> tuple[int, int, int]:
    slot, nbytes, checksum = (int.from_bytes(value[24 + at : 32 + at], "little") for at in (0, 8, 16))
    return slot, nbytes, checksum


def test_slabs_that_it_names_are_not_deleted_for_a_smaller_capacity(path: Path) -> None:
    filled(path)
    (path / "index").rename(path / "index.damaged")
    with pytest.raises(ShrinkError, match="slabs that hold blocks"):
        SlabStore.open(path, CAPACITY // 8, shrink=False)
    with opened(path, CAPACITY, shrink=False) as store:
        assert bring_back(store) == (40, {})


def test_four_are_kept(path: Path) -> None:
    for number in range(MOST + 2):
        store = SlabStore.open(path, CAPACITY)
        write(store, range(4 * number, 4 * number + 4))
        store._index.replace(f"damage {number}")
        store.close()
    store = SlabStore.open(path, CAPACITY)
    found = store.set_aside()
    assert [each.path.name for each in found] == [
        "index.damaged",
        "index.damaged.2",
        "index.damaged.3",
        "index.damaged.4",
    ]
    assert [each.reason for each in found] == ["damage 0", "damage 1", "damage 2", f"damage {MOST + 1}"]
    assert [each.blocks for each in found] == [4] * MOST
    store.close()


@pytest.mark.parametrize("note", [b"", b"no JSON", b"[]", b'{"reason": "r", "blocks": "many"}', b'{"blocks": 3}', None])
def test_a_note_that_cannot_be_read_costs_the_reason(path: Path, note: bytes | None) -> None:
    filled(path, 4)
    (path / "index").rename(path / "index.damaged")
    if note is None:
        (path / "index.damaged" / NOTE).mkdir()  # reading it is an OSError
    else:
        (path / "index.damaged" / NOTE).write_bytes(note)
    with opened(path, CAPACITY) as store:
        assert only(store).blocks in (4, None) and only(store).reason in ("", "r")
        assert bring_back(store) == (4, {})


def test_a_directory_that_cannot_be_read_is_an_error_of_storage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path, 4)
    with opened(path, CAPACITY) as store:

        def refuse(self: Path) -> bool:
            raise PermissionError(errno.EACCES, "Permission denied")

        with monkeypatch.context() as patched:
            patched.setattr(Path, "is_dir", refuse)
            with pytest.raises(StorageError, match=r"looking for .*index.damaged; give this user the right"):
                store.set_aside()


@pytest.mark.parametrize("content", [b"", b"garbage " * 4096])
def test_what_is_no_index_brings_nothing_back(path: Path, content: bytes) -> None:
    filled(path)
    (path / "index" / "data.mdb").write_bytes(content)
    with opened(path, CAPACITY) as store:
        for found in store.set_aside():
            assert found.blocks is None
            result = salvage(found, store)
            assert (result.blocks, result.there, dict(result.lost)) == (0, 0, {})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"
