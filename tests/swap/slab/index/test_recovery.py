from __future__ import annotations

import errno
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import xxhash

from prefixd_swap.errors import DirectoryInUseError, DiskFullError, FormatError, ShrinkError, StorageError, SwapError
from prefixd_swap.slab.data_directory import VERSION
from prefixd_swap.slab.files.file_ops import FileOps
from prefixd_swap.slab.files.slab_file import INDEX_BITS
from prefixd_swap.slab.index.block_record import DiskPart, NewBlock, encode_record
from prefixd_swap.slab.index.index import SlabIndex
from prefixd_swap.slab.index.record_columns import IndexTable, Records
from prefixd_swap.slab.index.recovery import Recovery
from prefixd_swap.slab.index.rows import IndexDamagedError
from prefixd_swap.slab.store import SlabStore
from prefixd_swap.spans import Span
from tests.swap.slab.chains import CAPACITY, NS, PAGE, key, opened, read, slab_of, write


def put_raw(path: Path, rows: dict[bytes, bytes]) -> None:
    """Write into the index behind the store's back."""
    with lmdb.open(str(path / "index"), max_dbs=2, lock=False) as env:
        blocks = env.open_db(b"blocks")
        with env.begin(write=True, db=blocks) as txn:
            for name, value in rows.items():
                txn.put(name, value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "store"


def test_blocks_survive_a_restart_parents_first(path: Path) -> None:
    with opened(path) as store:
        records = write(store, (5, None, b"root"), (7, 6, b"leaf"), (6, 5, b"middle"))
    with opened(path) as store:
        assert store.recovery == Recovery(kept=3)
        assert list(store.records()) == sorted(records, key=lambda record: record.depth)
        assert [read(store, record) for record in store.records()] == [b"root", b"middle", b"leaf"]
        assert store.used_bytes == 3 * PAGE
        more = write(store, (8, 7, b"more"))
        assert {record.parts for record in records}.isdisjoint({more[0].parts})


def test_a_killed_writer_loses_nothing_it_was_told_is_stored(path: Path) -> None:
    script = """
import sys
from collections.abc import Iterator
from pathlib import Path
import numpy as np
from prefixd_swap.slab.index.block_record import NewBlock
from prefixd_swap.slab.store import SlabStore
from prefixd_swap.spans import Span
store = SlabStore.open(Path(sys.argv[1]), 64 * 4096)
for number in range(10**6):
    data = np.full(9000, number % 256, dtype=np.uint8)
    name = number.to_bytes(16, "big")
    if store.write([NewBlock(b"namespac", name, b"", b"tokn", 0, [Span(int(data.ctypes.data), 9000)])])[0]:
        print("+", number, flush=True)
    if number >= 12:
        store.remove([(b"namespac", (number - 12).to_bytes(16, "big"))])
        print("-", number - 12, flush=True)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stderr is not None
    alive: set[int] = set()
    last = -1
    for line in child.stdout:
        sign, number = line.split()
        last = max(last, int(number))
        alive = alive | {int(number)} if sign == "+" else alive - {int(number)}
        if last >= 60:
            child.send_signal(signal.SIGKILL)
    child.wait(60)
    assert last >= 60, child.stderr.read()
    child.stderr.close()
    with opened(path) as store:
        assert store.recovery.lost_slots == store.recovery.lost_parents == 0
        found = {int.from_bytes(record.key, "big"): record for record in store.records()}
        # Only the operation under way may go either way.
        assert alive - {last - 11, last - 12} <= set(found) <= alive | {last + 1}
        for number, record in found.items():
            assert read(store, record) == bytes([number % 256]) * 9000


def test_a_lost_slab_costs_its_blocks_and_their_children(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(path) as store:
        written = write(
            store,
            (0, None, b"small"),
            (1, None, b"L" * 5 * PAGE),
            (2, 1, b"child"),
            (3, 2, b"grandchild"),
            (4, 0, b"ok"),
        )
    slab_of(path, written[1]).unlink()
    with opened(path) as store:
        assert store.recovery == Recovery(kept=2, lost_slots=1, lost_parents=2)
        losses = "1 whose bytes are gone, another block's, or not known; 2 whose parents are gone"
        assert caplog.messages == [f"{path}: blocks are dropped: {losses}"]
        assert [read(store, record) for record in store.records()] == [b"small", b"ok"]
        store.check_integrity()
        write(store, (9, None, b"N" * 5 * PAGE))
    with opened(path) as store:
        assert store.recovery == Recovery(kept=3)


def test_a_truncated_slab_costs_what_was_cut_off(path: Path) -> None:
    with opened(path) as store:
        write(store, *((i, None, bytes([i]) * PAGE) for i in range(4)))
    (slab,) = (path / "slabs").iterdir()
    os.truncate(slab, 2 * PAGE + 5)
    with opened(path) as store:
        assert store.recovery == Recovery(kept=2, lost_slots=2)
        assert [read(store, record) for record in store.records()] == [bytes(PAGE), b"\1" * PAGE]


def test_a_slab_cut_off_while_open_is_an_error_not_a_signal(path: Path) -> None:
    with opened(path) as store:
        (record,) = write(store, (0, None, b"x" * PAGE))
        (slab,) = (path / "slabs").iterdir()
        os.truncate(slab, 100)
        with pytest.raises(StorageError, match="ends at byte 100, inside the slot at byte 0"):
            read(store, record)


def test_nonsense_in_the_index_is_dropped(path: Path) -> None:
    with opened(path) as store:
        good, other = write(store, (0, None, b"good"), (1, None, b"other"))
    part = good.parts[0]
    assert part is not None

    def row(number: int, parent: bytes, *parts: DiskPart) -> tuple[bytes, bytes]:
        return NS + key(number), encode_record(NewBlock(NS, key(number), parent, b"tokn", number, []), parts)

    put_raw(
        path,
        dict(
            [
                row(10, b"", part),  # another block's slot
                row(11, b"", DiskPart(part.slot + 3, PAGE + 1, 0)),  # reaches beyond the file
                row(12, b"", DiskPart(part.slot + 2, 1, 0), DiskPart(part.slot + 9999, 1, 0)),  # no such slot
                row(13, b"", DiskPart(77 << INDEX_BITS, 1, 0)),  # no such slab
                row(18, b"", DiskPart(part.slot, 2 * PAGE, 0)),  # the bytes of two blocks
                row(19, b"", DiskPart(part.slot + 2, 1, 0), DiskPart(part.slot + 2, 1, 0)),  # its own, twice
                row(23, b"", DiskPart(part.slot + 2, 1 << 62, 0)),
                row(24, b"", DiskPart(1 << 62, 1, 0)),
                row(14, b""),  # nothing stored
                row(15, key(400), DiskPart(part.slot + 2, 1, 0)),  # no parent
                (NS + key(16), b"short"),
                (NS + key(17), encode_record(NewBlock(NS, key(17), b"", b"", 1, []), [part])[:30]),
            ]
        ),
    )
    with opened(path) as store:
        assert store.recovery == Recovery(kept=2, lost_slots=11, lost_parents=1)
        assert list(store.records()) == [good, other]
        assert store.used_bytes == 2 * PAGE
    with opened(path) as store:
        assert store.recovery == Recovery(kept=2)


def test_a_smaller_capacity_holds_at_once(path: Path) -> None:
    with opened(path) as store:
        write(store, *((i, None, bytes([i]) * PAGE) for i in range(64)))
    (path / "slabs" / "notes.txt").write_text("not a slab")
    (path / "slabs" / "00000000ff.slab").touch()  # a crash before its space was there
    with opened(path, 10 * PAGE) as store:
        assert sum(file.stat().st_size for file in (path / "slabs").glob("*.slab")) <= 10 * PAGE
        kept = list(store.records())
        assert store.recovery.kept == len(kept) == 8 and store.recovery.lost_slots == 56
        assert all(read(store, record) == record.key[-1:] * PAGE for record in kept)
        write(store, (100, None, b"a"), (101, None, b"b"))
        assert store.room(1) == 0


def test_a_smaller_capacity_that_loses_blocks_can_be_refused(path: Path) -> None:
    with opened(path, slab_bytes=8 * PAGE) as store:
        write(store, *((i, None, bytes([i]) * PAGE) for i in range(64)))
        oldest = sorted({slab_of(path, record) for record in store.records()})[:2]
        store.remove([(NS, record.key) for record in list(store.records()) if slab_of(path, record) in oldest])
    before = sorted((file.name, file.stat().st_size) for file in (path / "slabs").iterdir())
    kept = sum(nbytes for _, nbytes in before) - sum(file.stat().st_size for file in oldest)
    with pytest.raises(ShrinkError, match="deletes 1 slabs that hold blocks"):
        SlabStore.open(path, kept - PAGE, shrink=False)
    assert sorted((file.name, file.stat().st_size) for file in (path / "slabs").iterdir()) == before
    with opened(path, kept, shrink=False) as store:  # those without blocks go first
        assert store.recovery.kept == kept // PAGE and not oldest[0].exists()
    with opened(path, kept - PAGE, shrink=True) as store:
        assert 0 < store.recovery.kept < kept // PAGE


@pytest.mark.slow
def test_the_directory_has_one_owner(path: Path) -> None:
    script = """
import sys
from collections.abc import Iterator
from pathlib import Path
from prefixd_swap.slab.store import SlabStore
store = SlabStore.open(Path(sys.argv[1]), 64 * 4096)
print("open", flush=True)
sys.stdin.read()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == "open\n"
    with pytest.raises(DirectoryInUseError, match=rf"{path} is in use by process {child.pid};"):
        SlabStore.open(path, CAPACITY)
    child.kill()  # dies without closing
    child.communicate(timeout=60)
    with opened(path), pytest.raises(DirectoryInUseError, match=f"process {os.getpid()}"):
        SlabStore.open(path, CAPACITY)


def test_files_of_others_and_other_versions_are_left_alone(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "thesis.txt").write_text("precious")
    with pytest.raises(FormatError, match=r"no superblock but holds 'thesis.txt'; choose an empty directory"):
        SlabStore.open(path, CAPACITY)
    assert os.listdir(path) == ["thesis.txt"]
    shutil.rmtree(path)
    SlabStore.open(path, CAPACITY).close()
    good = (path / "SUPERBLOCK").read_bytes()
    for content, message in [
        (b"", "not a prefixd superblock"),
        (b"somebody else's file", "not a prefixd superblock; choose an empty directory"),
        (good[:8] + struct.pack("<I", 99) + good[12:], "format 99, of a newer prefixd .*; upgrade prefixd"),
        (good[:8] + struct.pack("<I", 0) + good[12:], "format 0, of an older prefixd .*; use the prefixd that wrote"),
        (good[:12] + struct.pack("<I", 16384) + good[16:], "pages of 16384 .*; choose another directory"),
        (good[:-1] + bytes([good[-1] ^ 1]), f"damaged; delete {path} to start"),
        (good[:-3], "damaged"),
        (good[:10], "damaged"),
    ]:
        for name in ("SUPERBLOCK", "SUPERBLOCK.copy"):
            (path / name).write_bytes(content)
        with pytest.raises(FormatError, match=message):
            SlabStore.open(path, CAPACITY)
        assert (path / "SUPERBLOCK").read_bytes() == content
    (path / "SUPERBLOCK").write_bytes(good)
    SlabStore.open(path, CAPACITY).close()
    assert (path / "SUPERBLOCK.copy").read_bytes() == good


@pytest.mark.parametrize("damaged", ["SUPERBLOCK", "SUPERBLOCK.copy"])
@pytest.mark.parametrize("damage", ["absent", "empty", "cut off", "flipped bit", "flipped version", "garbage"])
def test_a_damaged_superblock_is_mended_from_the_other(
    path: Path, damaged: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(path) as store:
        (record,) = write(store, (1, None, b"kept"))
    good = (path / damaged).read_bytes()
    contents = {
        "empty": b"",
        "cut off": good[:-3],
        "flipped bit": good[:-1] + bytes([good[-1] ^ 1]),
        "flipped version": good[:8] + bytes([good[8] ^ 64]) + good[9:],
        "garbage": os.urandom(len(good)),
    }
    if damage == "absent":
        (path / damaged).unlink()
    else:
        (path / damaged).write_bytes(contents[damage])
    with opened(path) as store:
        assert store.recovery == Recovery(kept=1) and read(store, record) == b"kept"
    assert (path / "SUPERBLOCK").read_bytes() == (path / "SUPERBLOCK.copy").read_bytes() == good
    (line,) = caplog.messages
    assert line.endswith("; written anew from its copy") and "delete" not in line, "nothing is left to do"


def test_a_whole_superblock_of_another_format_is_refused_whatever_its_copy_says(path: Path) -> None:
    SlabStore.open(path, CAPACITY).close()
    fields = (path / "SUPERBLOCK").read_bytes()[:8] + struct.pack("<II", VERSION + 1, PAGE)
    newer = fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))
    (path / "SUPERBLOCK").write_bytes(newer)
    with pytest.raises(
        FormatError, match=f"{path} has format {VERSION + 1}, of a newer prefixd .* or delete {path} to start"
    ):
        SlabStore.open(path, CAPACITY)
    assert (path / "SUPERBLOCK").read_bytes() == newer


@pytest.mark.parametrize("fault", ["a folder", "a device error"])
def test_an_unreadable_slab_costs_its_blocks(path: Path, fault: str) -> None:
    with opened(path) as store:
        _, large, _ = write(store, (0, None, b"small"), (1, None, b"L" * 5 * PAGE), (2, 1, b"child"))
    lost = slab_of(path, large)

    class Failing(FileOps):
        def open(self, name: Path, flags: int) -> int:
            if name == lost:
                raise OSError(errno.EIO, "Input/output error")
            return super().open(name, flags)

    if fault == "a folder":
        lost.unlink()
        lost.mkdir()
    with opened(path, ops=FileOps() if fault == "a folder" else Failing()) as store:
        assert store.recovery == Recovery(kept=1, lost_slots=1, lost_parents=1)
        assert [read(store, record) for record in store.records()] == [b"small"]
        (again,) = write(store, (1, None, b"L" * 5 * PAGE))  # in another slab, of another number
        assert read(store, again) == b"L" * 5 * PAGE


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EMFILE, "raise this process's limit of open files"),
        (errno.EACCES, "give this user the right to read and write there"),
        (errno.EPERM, "give this user the right to read and write there"),
        (errno.EROFS, "the file system is read-only"),
    ],
)
def test_what_an_operator_can_end_costs_no_block(path: Path, code: int, remedy: str) -> None:
    with opened(path) as store:
        write(store, (0, None, b"small"))

    class Failing(FileOps):
        def open(self, name: Path, flags: int) -> int:
            if name.suffix == ".slab":
                raise OSError(code, os.strerror(code))
            return super().open(name, flags)

    with pytest.raises(StorageError, match=rf"opening the slab .*; {remedy}"):
        SlabStore.open(path, CAPACITY, ops=Failing())
    with opened(path) as store:
        assert store.recovery == Recovery(kept=1)


def test_a_slab_that_grew_keeps_its_blocks(path: Path) -> None:
    with opened(path, slab_bytes=4 * PAGE) as store:
        (record,) = write(store, (0, None, b"kept"))
    (slab,) = (path / "slabs").iterdir()
    os.truncate(slab, slab.stat().st_size + 3 * PAGE + 7)
    with opened(path, slab_bytes=4 * PAGE) as store:
        assert store.recovery == Recovery(kept=1) and read(store, record) == b"kept"


def test_a_crash_before_the_superblock_is_no_obstacle(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "LOCK").write_text("1\n")
    (path / "SUPERBLOCK.new").write_bytes(b"half")
    SlabStore.open(path, CAPACITY).close()
    assert {file.name for file in path.iterdir()} == {"LOCK", "SUPERBLOCK", "SUPERBLOCK.copy", "index", "slabs"}


def test_what_a_start_drops_counts_as_lost_by_reason(path: Path) -> None:
    with opened(path) as store:
        records = write(store, (1, None, b"a" * 12 * PAGE), (2, 1, b"b" * 12 * PAGE), (3, None, b"c" * 12 * PAGE))
    slab_of(path, records[0]).unlink()
    gone = {slab_of(path, record) for record in records if not slab_of(path, record).exists()}
    with opened(path) as store:
        lost = store.recovery.lost
        assert sum(lost.values()) == 3 - store.recovery.kept and len(gone) >= 1
        assert lost["on disk, but the bytes are gone, another block's, or not known"] >= 1
    with opened(path) as store:
        assert store.recovery.lost == {}


def test_an_index_that_cannot_be_read_is_set_aside(path: Path) -> None:
    """LMDB itself would be killed by SIGBUS."""
    with opened(path) as store:
        write(store, (1, None, b"x"))

    class Failing(FileOps):
        bad: int | None = None

        def open(self, name: Path, flags: int) -> int:
            fd = super().open(name, flags)
            if self.bad is None and name.name == "data.mdb":
                self.bad = fd
            return fd

        def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
            if fd == self.bad:
                self.bad = -1
                raise OSError(errno.EIO, "Input/output error")
            return super().pread(fd, buffer, offset)

    with opened(path, ops=Failing()) as store:
        assert "cannot be read: Input/output error at byte 0" in store.recovery.index_damage
        assert list(store.records()) == [] and (path / "index.damaged" / "data.mdb").exists()
        write(store, (1, None, b"again"))


@pytest.mark.parametrize("damage", ["garbage", "cut off", "empty", "gone"])
def test_a_damaged_index_costs_its_blocks_and_no_more(path: Path, damage: str) -> None:
    with opened(path) as store:
        write(store, *((number, None, b"x") for number in range(40)))
    data = path / "index" / "data.mdb"
    if damage == "gone":
        data.unlink()
    else:
        content = {"garbage": b"garbage " * 4096, "cut off": data.read_bytes()[:12_288], "empty": b""}[damage]
        data.write_bytes(content)
    with opened(path) as store:
        assert store.recovery.kept == 0 and list(store.records()) == []
        set_aside = path / "index.damaged" / "data.mdb"
        if damage in ("garbage", "cut off"):
            assert store.recovery.index_damage and set_aside.read_bytes() == content
        write(store, (1, None, b"again"))
    with opened(path) as store:
        assert store.recovery == Recovery(kept=1)
        assert [read(store, record) for record in store.records()] == [b"again"]


def test_paths_that_cannot_be_a_store(tmp_path: Path) -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file"):
        SlabStore.open(tmp_path / "file", CAPACITY)
    with pytest.raises(StorageError, match="/proc/prefixd"):
        SlabStore.open(Path("/proc/prefixd"), CAPACITY)

    class NoSpace(FileOps):
        def fdatasync(self, fd: int) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(DiskFullError):
        SlabStore.open(tmp_path / "full", CAPACITY, ops=NoSpace())
    SlabStore.open(tmp_path / "full", CAPACITY).close()
    assert not set(os.listdir("/proc/self/fd")) - descriptors
    assert issubclass(FormatError, SwapError)


def test_files_are_for_their_owner_only(path: Path) -> None:
    with opened(path) as store:
        write(store, (0, None, b"secret"))
    for entry in [path, *path.rglob("*")]:
        assert entry.stat().st_mode & 0o077 == 0, entry


def _must_be_in_prompt_order(records: Records) -> None:
    """Each block with a child that is one deeper is followed by such a child, and the parent is in the row before."""
    at = np.flatnonzero((records.parent >= 0) & (records.depth == records.depth[records.parent] + 1))
    above = records.parent[at]
    assert (records.parent[above + 1] == above).all() and (records.depth[above + 1] == records.depth[above] + 1).all()


def test_the_order_of_a_prompt_of_any_length_is_found_in_a_moment() -> None:
    table = IndexTable([])
    table.rows, table.depth = 100_000, np.arange(100_000)
    begin = time.thread_time()
    order = table._prompt_order(np.ones(table.rows, np.bool_), table.depth - 1)
    assert time.thread_time() - begin < 2.0  # one pass over all records a block takes a minute
    assert (order == table.depth).all()


def test_records_in_columns_say_what_records_say(path: Path) -> None:
    """Several namespaces, block widths and part sizes, keys that differ only in their last or first bytes."""
    with opened(path, 1024 * PAGE) as store:
        array = np.arange(3 * PAGE, dtype=np.uint8)
        rng = np.random.default_rng(5)
        expected: dict[tuple[bytes, bytes], NewBlock] = {}
        for namespace in (b"zzzzzzzz", b"aaaaaaaa", bytes(8)):
            keys: list[bytes] = []
            for number in range(60):
                name = number.to_bytes(16, "little" if number % 2 else "big") if number % 3 else rng.bytes(16)
                parent = keys[int(rng.integers(number))] if number and number % 7 else b""
                depth = expected[namespace, parent].depth + 1 if parent else 0
                sizes = [(PAGE,), (PAGE, 100), (None, 5000)][number % 3 if namespace[0] else 0]
                parts = [Span(int(array.ctypes.data), size) if size else None for size in sizes]
                tokens = rng.bytes(4 * (16 if number % 5 else 4))
                keys.append(name)
                expected[namespace, name] = NewBlock(namespace, name, parent, tokens, depth, parts)
        blocks = list(expected.values())
        assert all(store.write(blocks))
    with opened(path, 1024 * PAGE) as store:
        assert store.recovery == Recovery(kept=180)
        by_name = {(record.namespace, record.key): record for record in store.records()}
        for _ in range(2):  # what `open` read, then read anew
            records = store.load()
            assert len(records) == 180 and sorted(records.namespaces) == [bytes(8), b"aaaaaaaa", b"zzzzzzzz"]
            _must_be_in_prompt_order(records)
            rows = np.concatenate([group.rows for group in records.groups])
            assert sorted(rows.tolist()) == list(range(180))
            for group in records.groups:
                for at, row in enumerate(group.rows.tolist()):
                    namespace = records.namespaces[records.namespace[row]]
                    found = by_name[namespace, records.keys[row].tobytes()]
                    above = int(records.parent[row])
                    assert above < row
                    if above < 0:
                        assert found.parent == b"" and records.namespaces[-1 - above] == namespace
                    else:
                        assert found.parent == records.keys[above].tobytes()
                        assert records.namespace[above] == records.namespace[row]
                    parts = tuple(
                        DiskPart(slot, size, check) if size else None
                        for slot, size, check in zip(
                            group.slots[at].tolist(), group.part_bytes, group.checksums[at].tolist(), strict=True
                        )
                    )
                    assert (parts, group.tokens[at].tobytes(), int(records.depth[row])) == (
                        found.parts,
                        found.tokens,
                        found.depth,
                    )
        victim = next(block for block in blocks if any(block.key == other.parent for other in blocks))
        store.remove([(victim.namespace, victim.key)])
        children = [b for b in blocks if b.parent == victim.key and b.namespace == victim.namespace]
        assert 0 < len(store.load()) <= 179 - len(children)


def test_an_empty_store_has_empty_columns(path: Path) -> None:
    with opened(path) as store:
        for _ in range(2):
            assert len(store.load()) == 0 and store.load().groups == ()


@pytest.mark.parametrize("how", ["deleted", "cut off"])
def test_a_slab_that_is_lost_under_us_gets_no_more_blocks(path: Path, how: str) -> None:
    with opened(path) as store:
        first, second = write(store, (0, None, b"a" * PAGE), (1, None, b"b" * PAGE))
        assert len(store.lost_slots()) == 0
        (slab,) = (path / "slabs").iterdir()
        if how == "deleted":
            slab.unlink()
        else:
            os.truncate(slab, PAGE)
        with pytest.raises(StorageError, match=f"{slab} was deleted or cut off while in use; leave the files"):
            write(store, (2, None, b"c"))
        lost = set(store.lost_slots().tolist())
        parts = [part for record in (first, second) for part in record.parts if part is not None]
        assert [part.slot in lost for part in parts] == [how == "deleted", True]
        assert set(store.lost_slots().tolist()) == lost, "as long as it has blocks"
        (other,) = write(store, (2, None, b"c"))
        assert other.parts[0] is not None and other.parts[0].slot not in lost, "in another file"
        store.remove([(NS, key(0)), (NS, key(1))])
        assert len(store.lost_slots()) == 0
    with opened(path) as store:
        assert store.recovery == Recovery(kept=1)


def test_an_index_with_keys_out_of_order_is_set_aside(path: Path) -> None:
    with opened(path) as with_blocks:
        write(with_blocks, (1, None, b"one" * 100), (2, 1, b"two" * 100), (3, 2, b"three" * 100))
    data = bytearray((path / "index/data.mdb").read_bytes())
    assert (NS + key(2)) in data
    data = data.replace(NS + key(2), NS + b"\xff" + key(2)[1:])
    (path / "index/data.mdb").write_bytes(data)
    with opened(path) as store:
        assert "out of order" in store.recovery.index_damage and len(store.load()) == 0


def test_keys_out_of_order_are_damage_also_after_the_start(path: Path) -> None:
    value = encode_record(NewBlock(NS, key(0), b"", b"tokn", 0, []), [DiskPart(77, 10, 1)])
    for numbers in ((2, 1), (1, 1), (1, 1 << 63, 3)):
        with pytest.raises(IndexDamagedError, match="out of order"):
            IndexTable([[(NS + key(number)[::-1], value) for number in numbers]]).link()


def test_a_namespace_of_which_all_blocks_are_dropped_is_none_of_the_records(path: Path) -> None:
    """A parent is -1 minus a namespace's number: with more namespaces than blocks it was no index of the columns."""
    data = np.zeros(PAGE, np.uint8)
    names = [bytes([number]) * 8 for number in range(3)]
    with opened(path) as store:
        for name in names:
            store.write([NewBlock(name, key(1), b"", b"tokn", 0, [Span(data.ctypes.data, PAGE)])])
    put_raw(path, {name + key(1): b"damaged" for name in names[:2]})
    with opened(path) as store:
        assert store.recovery == Recovery(kept=1, lost_slots=2)
        records = store.load()
        assert (records.namespaces, records.namespace.tolist(), records.parent.tolist()) == ((names[2],), [0], [-1])


def test_an_index_that_does_not_find_what_it_has_is_set_aside(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path) as with_blocks:
        write(with_blocks, (1, None, b"one" * 100), (2, 1, b"two" * 2000))
    put_raw(path, {NS + key(9): encode_record(NewBlock(NS, key(9), key(8), b"tokn", 9, []), [DiskPart(77, 10, 1)])})
    with monkeypatch.context() as patched:
        patched.setattr(SlabIndex, "apply", lambda self, changes: [None for _ in changes])
        store = SlabStore.open(path, CAPACITY)
    assert "does not find" in store.recovery.index_damage and len(store.load()) == 0
    store.check_integrity()
    write(store, (1, None, b"again" * 100))
    store.check_integrity()
    store.close()


def test_an_index_that_is_damaged_while_open_is_replaced_by_revive(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path) as store:
        (record,) = write(store, (0, None, b"a" * PAGE))
        (part,) = record.parts
        assert part is not None
        known = np.array([part.slot], np.int64)
        really = store._index.replace
        damaged = True

        def chunks(index: SlabIndex) -> Iterator[list[tuple[bytes, bytes]]]:
            if damaged:
                raise IndexDamagedError("MDB_CORRUPTED while reading the index")
            yield from ()

        def replace(damage: str) -> None:
            nonlocal damaged
            really(damage)
            damaged = False

        with monkeypatch.context() as patched:
            patched.setattr(SlabIndex, "chunks", chunks)
            patched.setattr(store._index, "replace", replace)
            assert store.revive(known).tolist() == known.tolist(), "the block is lost"
        assert "MDB_CORRUPTED" in store._index.damage and list(store.records()) == [] and store.used_bytes == 0
        write(store, (1, None, b"b" * PAGE))
    with opened(path) as store:
        assert store.recovery == Recovery(kept=1)


def test_an_index_is_replaced_while_others_read_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path) as store:
        index, free = store._index, []
        really = index._replace

        def replace(damage: str) -> None:
            free.append(not index._lock.locked())
            really(damage)

        monkeypatch.setattr(index, "_replace", replace)
        index.replace("a test says so")
        assert free == [False], "nobody gets at an index that is closed"
        assert index.get(b"x") is None


def test_a_lost_slab_that_a_write_found_gets_no_more_blocks_after_a_revive(path: Path) -> None:
    with opened(path) as store:
        (record,) = write(store, (0, None, b"a" * PAGE))
        (slab,) = (path / "slabs").iterdir()
        slab.unlink()
        with pytest.raises(StorageError, match="was deleted or cut off while in use"):
            write(store, (1, None, b"b"))
        store.revive(np.array([part.slot for part in record.parts if part], np.int64))
        write(store, (1, None, b"b"))  # in another file


def test_a_directory_of_the_format_before_pages_is_refused(path: Path) -> None:
    """Its slabs had one slot size each, and slots were named by their index."""
    SlabStore.open(path, CAPACITY).close()
    fields = (path / "SUPERBLOCK").read_bytes()[:8] + struct.pack("<II", 1, PAGE)
    for name in ("SUPERBLOCK", "SUPERBLOCK.copy"):
        (path / name).write_bytes(fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields)))
    slab = path / "slabs" / f"0000000001-{PAGE}.slab"
    slab.write_bytes(b"old" * PAGE)
    message = f"{path} has format 1, of an older prefixd .* use the prefixd that wrote it.* or delete {path} to start"
    with pytest.raises(FormatError, match=message):
        SlabStore.open(path, CAPACITY)
    assert slab.read_bytes() == b"old" * PAGE


def test_slots_of_many_sizes_are_where_they_were(path: Path) -> None:
    rng = np.random.default_rng(3)
    sizes = [int(size) for size in rng.choice([100, PAGE, 3 * PAGE, 5 * PAGE + 1, 7 * PAGE], 60)]
    with opened(path, 512 * PAGE) as store:
        contents = {number: rng.bytes(size) for number, size in enumerate(sizes)}
        write(store, *((number, None, content) for number, content in contents.items()))
        gone = [number for number in contents if number % 3 == 0]
        store.remove([(NS, key(number)) for number in gone])
        used = store.used_bytes
    with opened(path, 512 * PAGE) as store:
        assert store.recovery == Recovery(kept=40) and store.used_bytes == used
        for record in store.records():
            assert read(store, record) == contents[int.from_bytes(record.key, "big")]
        store.check_integrity()
        while any(store.write([new_block(1000 + store.used_bytes, [b"x" * PAGE])])):
            pass
        assert store.used_bytes > 480 * PAGE
        store.check_integrity()
        for record in store.records():
            if (number := int.from_bytes(record.key, "big")) in contents:
                assert read(store, record) == contents[number]


def new_block(number: int, parts: Sequence[bytes | DiskPart | None], parent: int | None = None) -> NewBlock:
    spans = [_span(part) if isinstance(part, bytes) else part for part in parts]
    return NewBlock(NS, key(number), b"" if parent is None else key(parent), b"tokn", number, spans)


_alive: list[np.ndarray[Any, Any]] = []


def _span(content: bytes) -> Span:
    _alive.append(np.frombuffer(bytearray(content), dtype=np.uint8))
    return Span(int(_alive[-1].ctypes.data), len(content))


def test_nodes_stay_for_the_blocks_that_continue_them(path: Path) -> None:
    with opened(path) as store:
        nodes = [new_block(1, [None, None]), new_block(2, [None, None], 1), new_block(9, [None, None], 2)]
        blocks = [*nodes, new_block(3, [None, b"leaf"], 2), new_block(4, [None, None])]
        written = store.write(blocks)
        assert [record is not None and record.parts == (None, None) for record in written] == [
            True,
            True,
            True,
            False,
            True,
        ]
        assert store.used_bytes == PAGE and store.check(NS, key(1))
        store.check_integrity()
        assert len(store.load()) == 5
    with opened(path) as store:
        assert store.recovery == Recovery(kept=3, empty_nodes=2), "9 and 4 lead to nothing"
        assert [record.key for record in store.records()] == [key(1), key(2), key(3)]
        store.check_integrity()
        store.remove([(NS, key(2))])
    with opened(path) as store:
        assert store.recovery == Recovery(kept=0, lost_parents=1, empty_nodes=1)


def test_nodes_outlive_a_revival(path: Path) -> None:
    with opened(path) as store:
        _, leaf = store.write([new_block(1, [None]), new_block(2, [b"leaf"], 1)])
        assert leaf is not None and leaf.parts[0] is not None
        assert store.revive(np.array([leaf.parts[0].slot])).tolist() == []
        assert [record.key for record in store.records()] == [key(1), key(2)]


def test_parts_are_dropped_and_added_while_the_record_stays(path: Path) -> None:
    with opened(path) as store:
        (first,) = store.write([new_block(1, [b"a" * PAGE, b"b" * 3 * PAGE, b"c"])])
        assert first is not None and store.used_bytes == 5 * PAGE
        store.drop_parts([(NS, key(1), [1, 7]), (NS, key(99), [0])])
        (found,) = store.records()
        assert found.parts == (first.parts[0], None, first.parts[2]) and store.used_bytes == 2 * PAGE
        store.check_integrity()
        (again,) = store.write([new_block(1, [found.parts[0], b"B" * 100, None])])
        assert again is not None and again.parts[0] == first.parts[0] and again.parts[2] is None
        assert store.used_bytes == 2 * PAGE, "the part that was neither kept nor written is gone"
        assert read(store, again) == b"a" * PAGE
        store.check_integrity()
        store.drop_parts([(NS, key(1), [0, 1]), (NS, key(1), [2])])
        assert store.used_bytes == 0 and [record.parts for record in store.records()] == [(None, None, None)]


def test_a_part_that_the_block_does_not_have_cannot_be_kept(path: Path) -> None:
    with opened(path) as store:
        first, other = store.write([new_block(1, [b"a", b"b"]), new_block(2, [b"c"])])
        assert first is not None and other is not None
        for bad in [
            new_block(1, [other.parts[0], None]),  # another block's
            new_block(1, [first.parts[1], None]),  # at another place
            new_block(2, [other.parts[0], other.parts[0]]),
            new_block(3, [first.parts[0]]),  # of no block
        ]:
            with pytest.raises(StorageError, match=r"is to be kept as DiskPart\(.*write the part again"):
                store.write([new_block(5, [b"new"]), bad])
        assert store.used_bytes == 3 * PAGE and len(list(store.records())) == 2


def test_a_failed_write_beside_a_kept_part_leaves_it(path: Path) -> None:
    class Failing(FileOps):
        fails = False

        def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
            if self.fails:
                raise OSError(errno.EIO, "Input/output error")
            return super().pwrite(fd, buffer, offset)

    ops = Failing()
    with opened(path, ops=ops) as store:
        (first,) = store.write([new_block(1, [b"a", None])])
        assert first is not None
        ops.fails = True
        with pytest.raises(StorageError):
            store.write([new_block(1, [first.parts[0], b"b"])])
        ops.fails = False
        assert store.used_bytes == PAGE and read(store, first) == b"a"
        store.check_integrity()
        (both,) = store.write([new_block(1, [first.parts[0], b"b"])])
        assert both is not None and store.used_bytes == 2 * PAGE
