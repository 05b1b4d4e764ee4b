from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixd_swap import SlabStore
from prefixd_swap.slab.files.file_ops import FileOps
from prefixd_swap.slab.index.index import SlabIndex
from prefixd_swap.slab.index.lmdb_file import Pread, newest_meta, nodes, read_trees, tree_entries
from prefixd_swap.slab.index.page_check import check_pages

PAGE = os.sysconf("SC_PAGE_SIZE")
READ_ALL = """
import sys, lmdb
with lmdb.open(sys.argv[1], max_dbs=3, lock=False, readonly=True) as env:
    for name in (b"blocks", b"namespaces", b"pins"):
        with env.begin(db=env.open_db(name)) as txn, txn.cursor() as cursor:
            for key, value in cursor:
                pass
"""


def pread(fd: int, buffer: memoryview, offset: int) -> int:
    return os.preadv(fd, [buffer], offset)


def cut_off(path: Path, pages: int) -> str:
    """The damage of an index's file if it had so many pages."""
    fd = os.open(path / "data.mdb", os.O_RDONLY)
    try:
        return check_pages(fd, pread, pages * PAGE)
    finally:
        os.close(fd)


def pages_of(path: Path) -> int:
    return (path / "data.mdb").stat().st_size // PAGE


def last_page(path: Path) -> int:
    fd = os.open(path / "data.mdb", os.O_RDONLY)
    try:
        meta = newest_meta(fd, pread)
    finally:
        os.close(fd)
    assert meta is not None
    with lmdb.open(str(path), max_dbs=3, lock=False, readonly=True) as env:
        info = env.info()
        assert (meta.last_page, meta.transaction) == (info["last_pgno"], info["last_txnid"])
    return meta.last_page


def store_and_remove(index: SlabIndex, rng: random.Random, transactions: int) -> tuple[dict[bytes, bytes], set[bytes]]:
    """Change an index at random, in transactions of many sizes; the blocks and pins that it has to have then."""
    blocks: dict[bytes, bytes] = {}
    pins: set[bytes] = set()
    for _ in range(transactions):
        changes: dict[bytes, bytes | None] = {}
        for _ in range(rng.choice([1, 10, 300])):
            if blocks and rng.random() < 0.5:
                changes[rng.choice(list(blocks))] = None
            else:
                changes[rng.randbytes(24)] = rng.randbytes(rng.choice([60, 200, 1500, 3000, 9000]))
        if rng.random() < 0.2:
            changes = dict.fromkeys(blocks)
        index.apply(list(changes.items()))
        blocks |= {key: value for key, value in changes.items() if value is not None}
        blocks = {key: value for key, value in blocks.items() if changes.get(key, value) is not None}
        if blocks and rng.random() < 0.3:
            chosen, pinned = rng.sample(sorted(blocks), 1), rng.random() < 0.7
            index.pin(chosen, pinned)
            pins = pins.union(chosen) if pinned else pins.difference(chosen)
        pins &= blocks.keys()
        if rng.random() < 0.2:
            index.put_namespaces({rng.randbytes(8): rng.randbytes(rng.choice([100, 10_000]))})
    return blocks, pins


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 32), lives=st.integers(1, 4))
def test_an_index_is_whole_after_any_changes(seed: int, lives: int) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        for _ in range(lives):
            index = SlabIndex(path, FileOps())
            assert index.damage == ""
            index.apply([(key, None) for chunk in list(index.chunks()) for key, _ in chunk])
            blocks, pins = store_and_remove(index, rng, rng.randint(1, 8))
            index.close()
            index = SlabIndex(path, FileOps())
            assert index.damage == ""
            assert dict(row for chunk in index.chunks() for row in chunk) == blocks
            assert set(index.pins()) == pins
            index.close()


def test_a_file_that_ends_before_pages_that_are_free_is_whole(tmp_path: Path) -> None:
    """LMDB does not write pages that one transaction has allocated and freed, so the file ends before its last page."""
    path, kept = tmp_path / "index", {bytes(24): b"kept"}
    index = SlabIndex(path, FileOps())
    rng = random.Random(1)
    keys = [rng.randbytes(24) for _ in range(400)]
    index.apply(list(kept.items()))
    for start in range(0, len(keys), 20):
        index.apply([(key, bytes(200)) for key in keys[start : start + 20]])
    index.apply([(key, None) for key in keys])
    index.close()
    assert pages_of(path) <= last_page(path)
    index = SlabIndex(path, FileOps())
    assert index.damage == "" and list(index.chunks()) == [list(kept.items())]
    index.apply([(key, bytes(3000)) for key in keys])
    index.close()
    index = SlabIndex(path, FileOps())
    assert index.damage == "" and sum(map(len, index.chunks())) == 1 + len(keys)
    index.close()


def counted() -> tuple[list[int], Pread]:
    """The bytes that each read asks for, and how to read."""
    asked: list[int] = []

    def reading(fd: int, buffer: memoryview, offset: int) -> int:
        asked.append(len(buffer))
        return pread(fd, buffer, offset)

    return asked, reading


def dies_of_sigbus(path: Path) -> bool:
    done = subprocess.run([sys.executable, "-c", READ_ALL, str(path)], check=False, capture_output=True)
    assert done.returncode in (0, -signal.SIGBUS), done.stderr
    return done.returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_what_is_cut_off_is_what_lmdb_dies_of(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "index"
    index = SlabIndex(path, FileOps())
    rng = random.Random(seed)
    blocks, _ = store_and_remove(index, rng, 5)
    index.apply([(key, None) for key in sorted(blocks)[: len(blocks) // 2]])
    index.close()
    data = (path / "data.mdb").read_bytes()
    pages = len(data) // PAGE
    verdicts = [not cut_off(path, count) for count in range(2, pages + 1)]
    assert verdicts == sorted(verdicts) and verdicts[-1] and not verdicts[0]
    whole = 2 + verdicts.index(True)
    for count in {whole, whole - 1, *(rng.randrange(2, pages) for _ in range(6))}:
        copy = tmp_path / str(count)
        copy.mkdir()
        (copy / "data.mdb").write_bytes(data[: count * PAGE])
        if count >= whole:
            assert not dies_of_sigbus(copy)
            again = SlabIndex(copy, FileOps())
            assert again.damage == ""
        else:
            again = SlabIndex(copy, FileOps())
            assert again.damage == cut_off(path, count) and "is gone" in again.damage
        again.close()


@pytest.mark.parametrize("tail", [1, PAGE - 1])
def test_part_of_a_page_in_use_is_not_enough(tmp_path: Path, tail: int) -> None:
    path = tmp_path / "index"
    index = SlabIndex(path, FileOps())
    store_and_remove(index, random.Random(1), 3)
    index.close()
    data = (path / "data.mdb").read_bytes()
    whole = next(count for count in range(2, len(data)) if not cut_off(path, count))
    (path / "data.mdb").write_bytes(data[: (whole - 1) * PAGE + tail])
    index = SlabIndex(path, FileOps())
    assert f"page {whole - 1} is gone" in index.damage
    index.close()


@pytest.mark.parametrize("content", [b"", b"garbage " * 4096])
def test_what_is_no_index_has_no_meta_page(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data.mdb").write_bytes(content)
    fd = os.open(tmp_path / "data.mdb", os.O_RDONLY)
    try:
        assert newest_meta(fd, pread) is None and check_pages(fd, pread, len(content)) == ""
    finally:
        os.close(fd)


def test_the_newer_meta_counts(tmp_path: Path) -> None:
    """Transactions write the two metas in turns; the pages of the newest one are looked for."""
    path = tmp_path / "index"
    for number in range(4):
        index = SlabIndex(path, FileOps())
        index.apply([(bytes([number]) * 24, bytes(3000))])
        index.close()
        last_page(path)


@pytest.mark.parametrize("claimed", [10_001, 1 << 20, (1 << 32) - 1])
def test_a_node_that_claims_more_than_its_run_has_is_left_out(tmp_path: Path, claimed: int) -> None:
    path = tmp_path / "index"
    index = SlabIndex(path, FileOps())
    index.apply([(b"a" * 24, bytes(10_000)), (b"b" * 24, bytes(100)), (b"c" * 24, bytes(10_000))])
    index.close()
    content = bytearray((path / "data.mdb").read_bytes())
    at = content.rindex(b"a" * 24) - 8  # the node's header, its data's size first
    assert int.from_bytes(content[at : at + 2], "little") == 10_000
    if claimed == 10_001:
        run = int.from_bytes(content[at + 32 : at + 40], "little")
        content[run * PAGE + 12 : run * PAGE + 16] = (1).to_bytes(4, "little")  # how many pages it has
    else:
        content[at : at + 4] = claimed.to_bytes(4, "little")
    (path / "data.mdb").write_bytes(content)
    asked, reading = counted()
    fd = os.open(path / "data.mdb", os.O_RDONLY)
    try:
        page_bytes, trees = read_trees(fd, reading)
        rows = dict(tree_entries(fd, reading, page_bytes, trees[b"blocks"]))
    finally:
        os.close(fd)
    assert rows == {b"b" * 24: bytes(100), b"c" * 24: bytes(10_000)}
    assert max(asked) <= len(content), "no more memory than the file has bytes"


@pytest.mark.parametrize("root", [1 << 40, 1 << 55, 1 << 63, (1 << 64) - 2])
def test_a_root_where_no_file_has_a_page_is_damage(tmp_path: Path, root: int) -> None:
    path = tmp_path / "index"
    SlabIndex(path, FileOps()).close()
    content = bytearray((path / "data.mdb").read_bytes())
    for meta in (0, PAGE):
        at = meta + 16 + 24 + 2 * 48 - 8  # page header, magic to map size, both trees, of which the root is last
        content[at : at + 8] = root.to_bytes(8, "little")
    (path / "data.mdb").write_bytes(content)
    fd = os.open(path / "data.mdb", os.O_RDONLY)
    try:
        assert "is gone" in check_pages(fd, pread, 3 * PAGE)
    finally:
        os.close(fd)
    index = SlabIndex(path, FileOps())
    assert index.damage
    index.close()


_OPEN = """
import sys
from pathlib import Path
from prefixd_swap import SlabStore
for name in sys.argv[1:]:
    store = SlabStore.open(Path(name), 64 << 20)
    store.load(), store.namespaces(), store.pins()
    store.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_flipped_bit_of_a_page_ends_a_start(tmp_path: Path, seed: int) -> None:
    """In a process of its own: LMDB asserts, which would end this one."""
    rng = random.Random(seed)
    whole = tmp_path / "whole"
    SlabStore.open(whole, 64 << 20).close()
    index = SlabIndex(whole / "index", FileOps())
    store_and_remove(index, rng, 40)
    index.close()
    content, names = (whole / "index" / "data.mdb").read_bytes(), []
    tree = content.rindex(b"\x06\0blocks") + 8  # what the main tree says of this one
    for number in range(60):
        names.append(str(shutil.copytree(whole, tmp_path / str(number))))
        page = rng.randrange(2, len(content) // PAGE)
        at = page * PAGE + rng.randrange(rng.choice([18, 200, PAGE])) if number > 5 else tree + rng.randrange(6)
        changed = bytearray(content)
        changed[at] ^= 1 << rng.randrange(8)
        (tmp_path / str(number) / "index" / "data.mdb").write_bytes(changed)
    done = subprocess.run([sys.executable, "-c", _OPEN, *names], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-1000:]


@pytest.mark.parametrize("longer", [0, 1, 1 << 20])
def test_a_run_may_be_longer_than_its_data_but_not_reach_into_others(tmp_path: Path, longer: int) -> None:
    """LMDB keeps the run where shorter data takes the place of longer in the same transaction."""
    path = tmp_path / "index"
    index = SlabIndex(path, FileOps())
    key = b"a" * 24
    index.apply([(b"b" * 24, bytes(500)), (key, bytes(20_000)), (key, b"\x01" * 9000)])
    index.close()
    data = path / "data.mdb"
    content = bytearray(data.read_bytes())
    at = content.rindex(key) - 8
    run = int.from_bytes(content[at + 32 : at + 40], "little") * PAGE + 12  # of how many pages it is
    assert int.from_bytes(content[run : run + 4], "little") * PAGE > 20_000
    content[run : run + 4] = (int.from_bytes(content[run : run + 4], "little") + longer).to_bytes(4, "little")
    data.write_bytes(content)
    index = SlabIndex(path, FileOps())
    assert bool(index.damage) == bool(longer), index.damage
    assert longer or index.get(key) == b"\x01" * 9000
    index.close()


@pytest.mark.parametrize("field", ["size of data", "size of key", "start of nodes"])
def test_a_node_of_another_size_is_damage(tmp_path: Path, field: str) -> None:
    """LMDB would move the other nodes of the page to the wrong places when it removes this one."""
    path = tmp_path / "index"
    index = SlabIndex(path, FileOps())
    index.apply([(number.to_bytes(24, "big"), bytes(104)) for number in range(200)])
    index.close()
    content = bytearray((path / "data.mdb").read_bytes())
    fd = os.open(path / "data.mdb", os.O_RDONLY)
    _, trees = read_trees(fd, pread)
    leaf = next(
        page
        for page in range(2, len(content) // PAGE)
        if len(nodes(np.frombuffer(content, np.uint8).reshape(-1, PAGE)[page : page + 1], 2)[0]) > 20
        and page != trees[b"blocks"].root
    )
    first = int.from_bytes(content[leaf * PAGE + 16 : leaf * PAGE + 18], "little")
    at = leaf * PAGE + {"size of data": first, "size of key": first + 6, "start of nodes": 14}[field]
    for bit in range(1 if field == "size of data" else 2, 4):
        changed = bytearray(content)
        changed[at] ^= 1 << bit - 1
        (path / "data.mdb").write_bytes(changed)
        assert f"page {leaf} of data.mdb is damaged" in check_pages(fd, pread, len(content))
    (path / "data.mdb").write_bytes(content)
    assert check_pages(fd, pread, len(content)) == ""
    os.close(fd)


def listed_as_free(content: bytes) -> list[int]:
    """Where the index's file has numbers of free pages."""
    found = []
    for page in range(2, len(content) // PAGE):
        some = np.frombuffer(content, np.uint8).reshape(-1, PAGE)[page : page + 1]
        for offset in nodes(some, 2)[1].tolist():
            at = page * PAGE + offset
            nbytes, flags, key_bytes = struct.unpack_from("<IHH", content, at)
            begin = at + 8 + key_bytes
            count = int.from_bytes(content[begin : begin + 8], "little")
            if (flags, key_bytes, nbytes) == (0, 8, 8 * (count + 1)):
                found += range(begin + 8, begin + nbytes, 8)
    return found


@pytest.mark.parametrize("wrong", ["in use", "another free one", "a meta page", "behind the last one", "too many"])
def test_a_free_page_that_is_in_use_is_damage(tmp_path: Path, wrong: str) -> None:
    """LMDB would write to it: `MDB_CORRUPTED: Located page was wrong type` after the next changes."""
    path, rng = tmp_path / "index", random.Random(2)
    index = SlabIndex(path, FileOps())
    keys = [rng.randbytes(24) for _ in range(300)]
    for start in range(0, len(keys), 30):
        index.apply([(key, bytes(300)) for key in keys[start : start + 30]])
    index.close()
    content = bytearray((path / "data.mdb").read_bytes())
    fd = os.open(path / "data.mdb", os.O_RDONLY)
    assert check_pages(fd, pread, len(content)) == ""
    meta = newest_meta(fd, pread)
    assert meta is not None
    os.close(fd)
    places = [at for at in listed_as_free(bytes(content)) if content[at - 8 : at] != content[at : at + 8]]
    values = {"in use": meta.roots[-1], "a meta page": 1, "behind the last one": meta.last_page + 1}
    verdicts = []
    for at in places:
        changed = bytearray(content)
        before = int.from_bytes(changed[at - 8 : at], "little")
        number = values.get(wrong, before)
        changed[at : at + 8] = number.to_bytes(8, "little")
        if wrong == "too many":
            changed[at - 8 : at] = (1 << 20).to_bytes(8, "little")
        (path / "data.mdb").write_bytes(changed)
        fd = os.open(path / "data.mdb", os.O_RDONLY)
        verdicts.append("is damaged" in check_pages(fd, pread, len(content)))
        os.close(fd)
    assert any(verdicts), "some lists are of earlier transactions, which count no longer"


def test_a_leaf_among_branches_is_a_damaged_page(tmp_path: Path) -> None:
    """LMDB's `assert(IS_LEAF(mp))` ended the daemon at each start."""
    path = tmp_path / "index"
    index = SlabIndex(path, FileOps())
    index.apply([(number.to_bytes(24, "big"), bytes(500)) for number in range(200)])
    index.close()
    content = bytearray((path / "data.mdb").read_bytes())
    pages = np.frombuffer(content, np.uint8).reshape(-1, PAGE)
    fd = os.open(path / "data.mdb", os.O_RDONLY)
    assert check_pages(fd, pread, len(content)) == ""
    os.close(fd)
    leaf = next(page for page in range(2, len(pages)) if len(nodes(pages[page : page + 1], 2)[0]) > 3)
    content[leaf * PAGE + 10] = 1  # flags: a branch
    (path / "data.mdb").write_bytes(content)
    fd = os.open(path / "data.mdb", os.O_RDONLY)
    assert "is damaged" in check_pages(fd, pread, len(content))
    os.close(fd)
    index = SlabIndex(path, FileOps())
    assert "is damaged" in index.damage
    index.close()


@pytest.mark.parametrize(
    ("page", "field", "value"),
    [
        ("branch", 12, lambda lower, upper: 18),
        ("branch", 12, lambda lower, upper: lower - 2),
        ("leaf", 12, lambda lower, upper: lower - 2),
        ("leaf", 14, lambda lower, upper: lower - 2),
    ],
    ids=["one child: LMDB aborts", "a child less", "an entry less", "entries in the offsets"],
)
def test_a_page_that_has_lost_some_of_its_nodes_is_damaged(
    tmp_path: Path, page: str, field: int, value: Callable[[int, int], int]
) -> None:
    path = tmp_path / "index"
    index = SlabIndex(path, FileOps())
    blocks = {number.to_bytes(24, "big"): bytes(500) for number in range(200)}
    index.apply(list(blocks.items()))
    index.close()
    content = bytearray((path / "data.mdb").read_bytes())
    fd = os.open(path / "data.mdb", os.O_RDONLY)
    try:
        at = root = read_trees(fd, pread)[1][b"blocks"].root
    finally:
        os.close(fd)
    assert root is not None and content[root * PAGE + 10] == 1
    if page == "leaf":
        (node,) = struct.unpack_from("<H", content, root * PAGE + 16)
        (at,) = struct.unpack_from("<H", content, root * PAGE + node)
        assert content[at * PAGE + 10] == 2
    struct.pack_into("<H", content, at * PAGE + field, value(*struct.unpack_from("<HH", content, at * PAGE + 12)))
    (path / "data.mdb").write_bytes(content)
    index = SlabIndex(path, FileOps())
    assert index.damage == f"page {at} of data.mdb is damaged"
    index.close()


@pytest.mark.parametrize("blocks", [3, 200])
def test_a_root_that_is_a_branch_and_a_leaf_is_damaged(tmp_path: Path, blocks: int) -> None:
    path = tmp_path / "index"
    index = SlabIndex(path, FileOps())
    index.apply([(number.to_bytes(24, "big"), bytes(500)) for number in range(blocks)])
    index.close()
    content = bytearray((path / "data.mdb").read_bytes())
    fd = os.open(path / "data.mdb", os.O_RDONLY)
    try:
        root = read_trees(fd, pread)[1][b"blocks"].root
    finally:
        os.close(fd)
    assert root is not None
    content[root * PAGE + 10] = 3
    (path / "data.mdb").write_bytes(content)
    index = SlabIndex(path, FileOps())
    assert index.damage == f"page {root} of data.mdb is damaged"
    index.close()


@pytest.mark.parametrize(
    ("at", "bit"),
    [(44, 2), (92, 1), (92, 2), (141, 3)],
    ids=["LMDB aborts", "it finds no tree", "it refuses the flags", "it has no memory for the map"],
)
def test_a_damaged_meta_page_is_found_and_all_blocks_come_back(tmp_path: Path, at: int, bit: int) -> None:
    """Flags of both trees, and the number of the last page."""
    blocks = {bytes([number]) * 24: bytes(100) for number in range(9)}
    path = tmp_path / "index"
    index = SlabIndex(path, FileOps())
    index.apply(list(blocks.items()))
    index.close()
    content = bytearray((path / "data.mdb").read_bytes())
    newest = max((0, PAGE), key=lambda page: int.from_bytes(content[page + 144 : page + 152], "little"))
    content[newest + at] ^= 1 << bit
    (path / "data.mdb").write_bytes(content)
    index = SlabIndex(path, FileOps())
    assert index.damage == "the newest meta page of data.mdb is damaged" and index.aside is not None
    index.close()
    fd = os.open(index.aside / "data.mdb", os.O_RDONLY)
    try:
        page_bytes, trees = read_trees(fd, pread)
        assert dict(tree_entries(fd, pread, page_bytes, trees[b"blocks"])) == blocks
    finally:
        os.close(fd)


@pytest.mark.parametrize("change", [-1, 1, 1 << 40])
def test_a_tree_that_has_other_than_its_entries_is_damaged(tmp_path: Path, change: int) -> None:
    path = tmp_path / "index"
    index = SlabIndex(path, FileOps())
    index.apply([(bytes(24), bytes(10))])
    index.close()
    content = bytearray((path / "data.mdb").read_bytes())
    at = content.rindex(b"\x06\0blocks") + 8 + 32  # flags, depth and pages, then the entries
    assert int.from_bytes(content[at : at + 8], "little") == 1
    content[at : at + 8] = (1 + change).to_bytes(8, "little")
    (path / "data.mdb").write_bytes(content)
    index = SlabIndex(path, FileOps())
    assert "is damaged" in index.damage
    index.close()


def test_no_more_is_read_of_a_run_than_it_has(tmp_path: Path) -> None:
    """One altered bit makes a node's data gigabytes long, which a start must not put into memory."""
    path = tmp_path / "index"
    index = SlabIndex(path, FileOps())
    index.apply([(bytes([number]) * 24, bytes(100_000)) for number in range(1, 101)])
    index.close()
    content = bytearray((path / "data.mdb").read_bytes())
    at = content.rindex(bytes([1]) * 24) - 8
    assert int.from_bytes(content[at : at + 4], "little") == 100_000
    content[at + 2] |= 1 << 6  # 4 MiB more
    (path / "data.mdb").write_bytes(content)
    asked, reading = counted()
    fd = os.open(path / "data.mdb", os.O_RDONLY)
    try:
        assert "is damaged" in check_pages(fd, reading, len(content))
    finally:
        os.close(fd)
    assert max(asked) < 200_000
