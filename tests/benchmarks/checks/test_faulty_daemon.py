"""The file layer that fails on command does fail, each way, and the store it is under survives it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.checks.fault_injection.faulty_daemon import FAULTS, FaultyDaemon, FaultyOps
from prefixd.cli.demo.daemon_process import DaemonFailed
from prefixd_swap import ChecksumError, NewBlock, SlabStore, Span, StorageError
from prefixd_swap.slab.files.io import DiskIo

CONTENT = np.arange(8192, dtype=np.uint8)


class Rig:
    """A store, and the file of its orders."""

    def __init__(self, path: Path, io: DiskIo = "direct") -> None:
        self._path = path
        self._io = io
        self._orders = path / "orders"
        self.open()

    def open(self) -> None:
        self.store = SlabStore.open(self._path / "store", 16 << 20, io=self._io, ops=FaultyOps(self._orders))

    def order(self, name: str | None) -> None:
        fresh = self._path / "fresh"
        fresh.write_text(json.dumps(FAULTS[name] if name else {}))
        fresh.rename(self._orders)

    def write(self, number: int) -> None:
        span = Span(CONTENT.ctypes.data, CONTENT.nbytes)
        assert self.store.write([NewBlock(b"namespac", bytes([number]) * 16, b"", b"1234", 0, [span])])[0]

    def read(self) -> list[int]:
        """The blocks there are, their bytes compared."""
        into = np.zeros(CONTENT.nbytes, np.uint8)
        found = []
        for record in self.store.records():
            assert record.parts[0] is not None
            self.store.read(record.parts[0], Span(into.ctypes.data, into.nbytes))
            assert (into == CONTENT).all()
            found.append(record.key[0])
        return found


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.store.close()


@pytest.mark.parametrize(
    "name", ["disk full", "no room for the index", "write error", "sync error", "index error", "read-only file system"]
)
def test_a_refused_write_is_an_error_until_the_disk_is_healed(rig: Rig, name: str) -> None:
    rig.write(1)
    rig.order(name)
    with pytest.raises(StorageError):
        rig.write(2)
    rig.order(None)
    rig.write(3)
    assert rig.read() == [1, 3]


@pytest.mark.parametrize("name", ["disk full", "no room for a slab", "no descriptors for slabs"])
def test_a_slab_that_cannot_be_made_is_an_error(rig: Rig, name: str) -> None:
    rig.order(name)
    with pytest.raises(StorageError):
        rig.write(1)
    rig.order(None)
    rig.write(2)
    assert rig.read() == [2]


@pytest.mark.parametrize(("name", "durable"), [("index error half-way", [1]), ("index error afterwards", [1, 2])])
def test_a_commit_of_unknown_outcome_needs_a_store_opened_again(rig: Rig, name: str, durable: list[int]) -> None:
    rig.write(1)
    rig.order(name)
    with pytest.raises(StorageError):
        rig.write(2)
    rig.order(None)
    with pytest.raises(StorageError, match="half-way"):
        rig.write(3)
    rig.store.close()
    rig.open()
    assert rig.read() == durable
    rig.write(4)
    rig.store.check_integrity()


@pytest.mark.parametrize("io", ["mmap", "direct", "buffered"])
def test_reads_fail_or_are_wrong(tmp_path: Path, io: DiskIo) -> None:
    rig = Rig(tmp_path, io)
    assert rig.store.io == io
    rig.write(1)
    rig.order("read error")
    with pytest.raises(StorageError, match="Input/output error"):
        rig.read()
    rig.order("wrong bytes read")
    with pytest.raises(ChecksumError):
        rig.read()
    rig.order("wrong bytes written")
    rig.write(2)
    rig.order(None)
    with pytest.raises(ChecksumError):
        rig.read()
    rig.store.close()


@pytest.mark.slow
def test_a_daemon_obeys() -> None:
    daemon = FaultyDaemon({"cpu.bytes": "1MiB", "disk.bytes": "64MiB"})
    daemon.break_disk("read-only file system")
    with pytest.raises(DaemonFailed, match="Read-only file system"), daemon:
        pass
    daemon.heal_disk()
    with daemon:
        assert daemon.pid
