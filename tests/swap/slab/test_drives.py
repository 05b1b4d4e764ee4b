"""A store over several directories: prefixes on all of them, and no block lost because a drive is not mounted."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixd_swap.errors import DiskFullError, FormatError, MissingDriveError, StorageError
from prefixd_swap.slab.data_directory import RAW_VERSION, DataDirectory
from prefixd_swap.slab.drives import list_drives
from prefixd_swap.slab.files.file_ops import FileOps
from prefixd_swap.slab.index.block_record import NewBlock
from prefixd_swap.slab.store import SlabStore
from prefixd_swap.spans import Span
from tests.swap.slab.chains import key, opened

NS = b"namespac"
MIB = 1 << 20
NEVER = 1 << 30


class Drives:
    """A store in `first`, `second` and so on, as many as `count`."""

    def __init__(self, path: Path, count: int = 2) -> None:
        self.paths = [path / name for name in ("first", "second", "third")[:count]]
        self.contents: dict[int, bytes] = {}

    def open(self, capacity_bytes: int = 64 * MIB, **how: Any) -> AbstractContextManager[SlabStore]:
        more = how.pop("more", self.paths[1:])
        return opened(self.paths[0], capacity_bytes, slab_bytes=8 * MIB, more_paths=more, **how)

    def put(self, store: SlabStore, start: int, count: int, nbytes: int = MIB) -> None:
        """A prompt's blocks `start` and on, each the parent of the next; the first has no parent."""
        rng = np.random.default_rng(start)
        arrays = [rng.integers(0, 256, nbytes, np.uint8) for _ in range(count)]
        numbers = range(start, start + count)
        parents = [b"", *(key(number) for number in numbers)]
        new = [
            NewBlock(NS, key(number), parent, b"tokn", number - start, [Span(int(array.ctypes.data), nbytes)])
            for number, parent, array in zip(numbers, parents, arrays, strict=False)
        ]
        assert all(store.write(new))
        self.contents |= {number: array.tobytes() for number, array in zip(numbers, arrays, strict=True)}

    def check(self, store: SlabStore) -> set[int]:
        """The numbers of the stored blocks, whose bytes must be right."""
        found = set()
        for record in store.records():
            (part,) = record.parts
            assert part is not None
            into = np.zeros(part.nbytes, np.uint8)
            store.read(part, Span(int(into.ctypes.data), part.nbytes))
            number = int.from_bytes(record.key, "big")
            assert into.tobytes() == self.contents[number]
            found.add(number)
        return found

    def places(self, store: SlabStore, numbers: Sequence[int]) -> list[str]:
        """The directory of each block."""
        slots = {int.from_bytes(record.key, "big"): record.parts[0] for record in store.records()}
        found = []
        for number in numbers:
            part = slots[number]
            assert part is not None
            slab, _ = store._slabs.find(part.slot)
            found.append(slab.path.parent.parent.name)
        return found


@pytest.fixture
def drives(tmp_path: Path) -> Drives:
    return Drives(tmp_path)


def test_blocks_of_a_prefix_alternate(drives: Drives) -> None:
    with drives.open() as store:
        drives.put(store, 0, 24)
        places = drives.places(store, range(24))
        assert all(before != after for before, after in pairwise(places))
        assert drives.check(store) == set(range(24))


def test_all_drives_are_written_at_once(drives: Drives) -> None:
    order: list[str] = []

    class Order(FileOps):
        def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
            if (path := os.readlink(f"/proc/self/fd/{fd}")).endswith(".slab"):
                order.append(Path(path).parent.parent.name)
            return super().pwrite(fd, buffer, offset)

    with drives.open(ops=Order(), io_threads=1) as store:
        drives.put(store, 0, 16)
    assert len(order) == 16 and all(before != after for before, after in pairwise(order))


class Syncs(FileOps):
    """While `together`, each sync of a slab waits for the one of the other drive; those in `bad` fail."""

    def __init__(self) -> None:
        self.both = threading.Barrier(2, timeout=20)
        self.together = False
        self.bad = "nowhere"

    def fdatasync(self, fd: int) -> None:
        if self.together and (path := os.readlink(f"/proc/self/fd/{fd}")).endswith(".slab"):
            self.both.wait()
            if self.bad in path:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fdatasync(fd)


def test_all_drives_are_synced_at_once(drives: Drives) -> None:
    ops = Syncs()
    with drives.open(ops=ops) as store:
        drives.put(store, 0, 2)
        ops.together = True
        drives.put(store, 10, 2)
        ops.bad = "/second/"
        with pytest.raises(StorageError, match=r"syncing .*/second/.* kernel log"):
            drives.put(store, 20, 2)
        assert drives.check(store) == {0, 1, 10, 11}
        assert [slab.path.parent.parent.name for slab in store._slabs._slabs.values() if slab.failed] == ["second"]


def test_small_blocks_alternate_by_the_megabyte(drives: Drives) -> None:
    with drives.open() as store:
        drives.put(store, 0, 96, 64 << 10)
        places = drives.places(store, range(96))
        runs = [places[at : at + 16] for at in range(0, 96, 16)]
        assert all(len(set(run)) == 1 for run in runs)
        assert all(before[0] != after[0] for before, after in pairwise(runs))


def test_a_prefix_that_grows_call_by_call_alternates(tmp_path: Path) -> None:
    drives = Drives(tmp_path, 3)
    with drives.open() as store:
        near: list[int | None] | None = None
        for number in range(9):
            array = np.full(MIB, number, np.uint8)
            parent = key(number - 1) if number else b""
            span = Span(array.ctypes.data, MIB)
            new = NewBlock(NS, key(number), parent, b"tokn", number, [span], near=near)
            (record,) = store.write([new])
            assert record is not None and record.parts[0] is not None
            near = [record.parts[0].slot]
        places = drives.places(store, range(9))
        assert places == places[:3] * 3 and len(set(places)) == 3


def test_other_prefixes_begin_in_other_drives(drives: Drives) -> None:
    with drives.open() as store:
        for number in range(8):
            drives.put(store, 100 * number, 1)
        places = drives.places(store, [100 * number for number in range(8)])
        assert places.count("first") == places.count("second") == 4


def test_the_capacity_counts_all_drives(drives: Drives) -> None:
    with drives.open(32 * MIB) as store:
        drives.put(store, 0, 32)
        assert store.room(MIB) == 0 and store.used_bytes == 32 * MIB
        sizes = [sum(slab.stat().st_size for slab in (path / "slabs").iterdir()) for path in drives.paths]
        assert sizes == [16 * MIB, 16 * MIB]


def test_everything_is_there_again_in_any_order_of_the_others(tmp_path: Path) -> None:
    drives = Drives(tmp_path, 3)
    with drives.open() as store:
        drives.put(store, 0, 20)
    with drives.open(more=drives.paths[:0:-1]) as store:
        assert drives.check(store) == set(range(20))
    assert set(list_drives(drives.paths[0])) == set(drives.paths[1:])


def test_a_drive_that_is_not_mounted_costs_no_block(drives: Drives) -> None:
    with drives.open() as store:
        drives.put(store, 0, 20)
    second = drives.paths[1]
    second.rename(second.with_name("elsewhere"))
    second.mkdir()  # the mount point
    for more in ([second], []):
        with pytest.raises(MissingDriveError, match="second, which is not there"), drives.open(more=more):
            pass
    assert list(second.iterdir()) == []
    second.rmdir()
    second.with_name("elsewhere").rename(second)
    with drives.open() as store:
        assert drives.check(store) == set(range(20))


def test_a_replaced_drive_costs_its_blocks_and_those_behind_them(drives: Drives) -> None:
    with drives.open() as store:
        drives.put(store, 0, 1)
        drives.put(store, 100, 1)
        drives.put(store, 200, 8)
        lost = {number for number in (0, 100) if drives.places(store, [number]) == ["second"]}
        assert len(lost) == 1
    shutil.rmtree(drives.paths[1])
    with pytest.raises(MissingDriveError, match="is empty, as a place where no drive is mounted"), drives.open():
        pass
    with drives.open(drop_missing=True) as store:
        kept = drives.check(store)
        assert {0, 100} - lost <= kept and not kept & lost and len(kept) <= 2
        drives.put(store, 300, 8)
        assert set(drives.places(store, range(300, 308))) == {"first", "second"}
    with drives.open() as store:
        assert drives.check(store) >= set(range(300, 308))


def test_a_drive_that_was_given_up_comes_back_empty(drives: Drives) -> None:
    with drives.open() as store:
        drives.put(store, 0, 20)
    with drives.open(more=[], drop_missing=True) as store:
        drives.put(store, 100, 20)
        kept = drives.check(store)
    with drives.open() as store:
        assert drives.check(store) == kept
        drives.put(store, 200, 20)
        assert drives.check(store) == kept | set(range(200, 220))


def test_a_store_gets_another_drive(drives: Drives) -> None:
    with drives.open(16 * MIB, more=[]) as store:
        drives.put(store, 0, 16)
    directory = DataDirectory(drives.paths[0], FileOps())
    assert directory.version == RAW_VERSION, "as before there was a way to have several"
    directory.close()
    with drives.open(48 * MIB) as store:
        drives.put(store, 100, 32)
        assert drives.check(store) == {*range(16), *range(100, 132)}
        assert set(drives.places(store, range(100, 116))) == {"second"}, "the new drive catches up first"
    directory = DataDirectory(drives.paths[0], FileOps(), drives.paths[1:])
    assert directory.version != RAW_VERSION, "a version that knows one directory would drop the others' blocks"
    directory.close()


def test_directories_of_others_are_refused(drives: Drives, tmp_path: Path) -> None:
    with drives.open() as store:
        drives.put(store, 0, 4)
    other = Drives(tmp_path / "other")
    (tmp_path / "other").mkdir()
    with pytest.raises(FormatError, match="belongs to another store"), other.open(more=drives.paths[1:]):
        pass
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "letter.txt").touch()
    for path, why in [
        (tmp_path / "used", "letter.txt"),
        (drives.paths[0], "choose an empty directory"),
        (drives.paths[1], "is .*second or a copy"),
    ]:
        with pytest.raises(FormatError, match=why), drives.open(more=[drives.paths[1], path]):
            pass
    shutil.copytree(drives.paths[1], tmp_path / "copy")
    with pytest.raises(FormatError, match="or a copy of it"), drives.open(more=[drives.paths[1], tmp_path / "copy"]):
        pass
    new = tmp_path / "new"
    with pytest.raises(FormatError, match="given twice"), drives.open(more=[drives.paths[1], new, new]):
        pass
    with drives.open(more=[drives.paths[1], new]) as store:
        assert drives.check(store) == set(range(4))


def test_a_slab_that_was_copied_to_another_drive_is_refused(drives: Drives) -> None:
    with drives.open() as store:
        drives.put(store, 0, 4)
    slab = next((drives.paths[0] / "slabs").iterdir())
    shutil.copy(slab, drives.paths[1] / "slabs" / slab.name)
    with pytest.raises(StorageError, match="the same number; delete the copy"), drives.open():
        pass


@pytest.mark.parametrize("which", ["DRIVE", "DRIVES"])
def test_one_of_two_files_is_enough(drives: Drives, which: str) -> None:
    with drives.open() as store:
        drives.put(store, 0, 4)
    folder = drives.paths[which == "DRIVE"]
    before = (folder / which).read_bytes()
    for damage in (b"", before.replace(b'"', b"'", 1), before[:-3], before.replace(b"0", b"1").replace(b"a", b"b")):
        (folder / which).write_bytes(damage)
        with drives.open() as store:
            assert drives.check(store) == set(range(4))
        assert (folder / which).read_bytes() == before
    for name in (which, f"{which}.copy"):
        (folder / name).write_bytes(b"{}")
    with pytest.raises(FormatError, match="and its copy are damaged"), drives.open():
        pass


class Faults(FileOps):
    """Fails the call `fail_at` of those that change files, and writes to the directory `bad`; full: `full`."""

    def __init__(self, fail_at: int = NEVER, bad: str = "", full: str = "") -> None:
        self.fail_at = fail_at
        self.bad, self.full = bad, full

    def _count(self) -> None:
        self.fail_at -= 1
        if self.fail_at < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT:
            self._count()
        return super().open(path, flags)

    def mkdir(self, path: Path) -> None:
        self._count()
        super().mkdir(path)

    def rename(self, old: Path, new: Path) -> None:
        self._count()
        super().rename(old, new)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._count()
        if self.bad and f"/{self.bad}/" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pwrite(fd, buffer, offset)

    def free_bytes(self, path: Path) -> int:
        return 0 if self.full and f"/{self.full}/" in str(path) else 1 << 40


def test_a_start_that_failed_anywhere_is_done_again(tmp_path: Path) -> None:
    for fail_at in range(200):
        drives = Drives(tmp_path / str(fail_at), 3)
        (tmp_path / str(fail_at)).mkdir()
        with drives.open(more=[]) as store:
            drives.put(store, 0, 2)
        faults = Faults(fail_at)
        try:
            with drives.open(ops=faults):
                pass
        except StorageError:
            with drives.open() as store:
                assert drives.check(store) == {0, 1}
        else:
            assert fail_at > 10
            return
    pytest.fail("the start never succeeds")


def test_a_drive_that_is_full_is_left_out(drives: Drives) -> None:
    faults = Faults(full="second")
    with drives.open(ops=faults) as store:
        drives.put(store, 0, 16)
        assert set(drives.places(store, range(16))) == {"first"}
        assert not store.shrunk
        faults.full = ""
        drives.put(store, 100, 16)
        assert "second" in drives.places(store, range(100, 116))
        assert drives.check(store) == {*range(16), *range(100, 116)}


def test_drives_that_are_all_full_are_an_error_once(drives: Drives) -> None:
    faults = Faults(full=drives.paths[0].parent.name)
    with drives.open(ops=faults) as store:
        array = np.zeros(MIB, np.uint8)
        new = [NewBlock(NS, key(0), b"", b"tokn", 0, [Span(array.ctypes.data, MIB)])]
        with pytest.raises(DiskFullError, match="too few for another slab"):
            store.write(new)
        assert store.write(new) == [None] and store.shrunk


def test_a_drive_that_fails_to_write_fails_the_write_as_a_whole(drives: Drives) -> None:
    faults = Faults()
    with drives.open(ops=faults) as store:
        drives.put(store, 0, 4)
        faults.bad = "second"
        arrays = np.zeros((4, MIB), np.uint8)
        new = [NewBlock(NS, key(9 + at), b"", b"tokn", 0, [Span(arrays[at].ctypes.data, MIB)]) for at in range(4)]
        with pytest.raises(StorageError, match="second"):
            store.write(new)
        assert drives.check(store) == set(range(4)) and store.used_bytes == 4 * MIB
        slots = np.array([part.slot for record in store.records() for part in record.parts if part], np.int64)
        with pytest.raises(StorageError, match="second/PROBE"):
            store.revive(slots)
        faults.bad = ""
        assert not len(store.revive(slots))
        assert all(store.write(new))
