"""Pins in the index: they outlast restarts and crashes, and are there no longer than their blocks."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lmdb
import pytest

from prefixd_swap import IntegrityError, StorageError
from prefixd_swap.slab.index.block_record import index_key
from prefixd_swap.slab.store import SlabStore
from tests.swap.slab.chains import CAPACITY, NS, key, opened, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def names(*numbers: int) -> list[tuple[bytes, bytes]]:
    return [(NS, key(number)) for number in numbers]


def test_pins_outlast_a_restart_and_end_with_unpin(path: Path) -> None:
    with opened(path) as store:
        write(store, (1, None, b"a"), (2, 1, b"b"), (3, 2, b"c"))
        assert store.pin(names(1, 2, 3), True) == 3
        assert store.pin(names(3), False) == 1
    with opened(path) as store:
        assert store.pins() == names(1, 2)
        assert store.pin(names(1, 2), False) == 2
        assert store.pins() == []


def test_only_blocks_that_are_stored_are_pinned(path: Path) -> None:
    with opened(path) as store:
        write(store, (1, None, b"a"))
        assert store.pin(names(1, 7), True) == 1
        assert store.pins() == names(1)


def test_a_pin_goes_with_its_block_and_stays_when_it_is_written_again(path: Path) -> None:
    with opened(path) as store:
        write(store, (1, None, b"a"), (2, 1, b"b"))
        store.pin(names(1, 2), True)
        write(store, (1, None, b"other bytes"))
        assert store.pins() == names(1, 2)
        store.remove(names(2))
        store.check_integrity()
        write(store, (2, 1, b"b"))
        assert store.pins() == names(1), "the block that came later has none"


def test_a_pin_without_a_block_is_found(path: Path) -> None:
    store = SlabStore.open(path, CAPACITY)
    write(store, (1, None, b"a"))
    store.pin(names(1), True)
    store.check_integrity()
    store._index._write(lambda txn: txn.put(index_key(NS, key(7)), b"", db=store._index._pins))
    with pytest.raises(IntegrityError, match="1 pins are of blocks that are not stored"):
        store.check_integrity()
    store.close()


def test_a_closed_store_pins_nothing(path: Path) -> None:
    store = SlabStore.open(path, CAPACITY)
    store.close()
    with pytest.raises(StorageError, match="closed"):
        store.pin(names(1), True)


def forget_pins(path: Path) -> None:
    """Makes the index one from before there were pins."""
    with lmdb.open(str(path / "index"), max_dbs=3, lock=False) as env, env.begin(write=True) as txn:
        txn.drop(env.open_db(b"pins", txn))


def test_an_index_from_before_there_were_pins_opens(path: Path) -> None:
    with opened(path) as store:
        write(store, (1, None, b"a"))
    forget_pins(path)
    with opened(path) as store:
        assert (store.recovery.kept, store.pins()) == (1, [])
        assert store.pin(names(1), True) == 1


class FullEnvironment:
    """LMDB whose map is too full for another sub-database, until it has grown."""

    def __init__(self, *where: Any, **how: Any) -> None:
        self._env = lmdb.Environment(*where, **how)
        self._full = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def open_db(self, name: bytes) -> Any:
        if name == b"pins" and self._full:
            raise lmdb.MapFullError("full")
        return self._env.open_db(name)

    def set_mapsize(self, nbytes: int) -> None:
        self._env.set_mapsize(nbytes)
        self._full = False


def test_an_index_without_room_for_pins_grows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path) as store:
        write(store, (1, None, b"a"))
    forget_pins(path)
    monkeypatch.setattr(lmdb, "open", FullEnvironment)
    with opened(path) as store:
        assert store.pin(names(1), True) == 1


def test_a_killed_writer_has_pinned_what_it_was_told_and_nothing_without_its_bytes(path: Path) -> None:
    script = """
import sys
from pathlib import Path
import numpy as np
from prefixd_swap.slab.index.block_record import NewBlock
from prefixd_swap.slab.store import SlabStore
from prefixd_swap.spans import Span
store = SlabStore.open(Path(sys.argv[1]), 64 * 4096)
data = np.full(4096, 7, dtype=np.uint8)
for number in range(10**6):
    name = (b"namespac", number.to_bytes(16, "big"))
    store.write([NewBlock(*name, b"", b"tokn", 0, [Span(int(data.ctypes.data), 4096)])])
    assert store.pin([name], True) == 1
    print("+", number, flush=True)
    if number >= 12:
        store.remove([(b"namespac", (number - 12).to_bytes(16, "big"))])
"""
    child = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    last = -1
    for line in child.stdout:
        last = int(line.split()[1])
        if last == 40:
            child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    with opened(path) as store:
        store.check_integrity()  # every pin has its block
        pinned = {int.from_bytes(name, "big") for _, name in store.pins()}
        assert pinned >= set(range(last - 10, last + 1))
        assert len(pinned) <= 14
