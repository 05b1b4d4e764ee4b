"""Slab stores of 64 pages, and chains of blocks of one part in them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from prefixd_swap.slab.files.slab_file import INDEX_BITS
from prefixd_swap.slab.index.block_record import BlockRecord, NewBlock
from prefixd_swap.slab.store import SlabStore
from prefixd_swap.spans import Span

NS = b"namespac"
PAGE = 4096
CAPACITY = 64 * PAGE


@contextmanager
def opened(path: Path, capacity_bytes: int = CAPACITY, **how: Any) -> Iterator[SlabStore]:
    """A store that adds up at the end, and is closed then."""
    store = SlabStore.open(path, capacity_bytes, **how)
    try:
        yield store
        store.check_integrity()
    finally:
        store.close()


def key(number: int) -> bytes:
    return struct.pack(">QQ", 0, number)


def write(store: SlabStore, *chain: tuple[int, int | None, bytes]) -> list[BlockRecord]:
    """Store (number, parent's number, content); a block is deeper than every block of a lower number."""
    arrays = [np.frombuffer(bytearray(content), dtype=np.uint8) for _, _, content in chain]
    records = store.write(
        [
            NewBlock(
                NS,
                key(number),
                b"" if parent is None else key(parent),
                b"tokn",
                number,
                [Span(int(array.ctypes.data), array.nbytes)],
            )
            for (number, parent, _), array in zip(chain, arrays, strict=True)
        ]
    )
    assert all(records)
    return [record for record in records if record]


def read(store: SlabStore, record: BlockRecord) -> bytes:
    part = record.parts[0]
    assert part is not None
    target = np.zeros(part.nbytes, dtype=np.uint8)
    store.read(part, Span(int(target.ctypes.data), part.nbytes))
    return target.tobytes()


def slab_of(path: Path, record: BlockRecord) -> Path:
    """The file that the first part of a block is in."""
    part = record.parts[0]
    assert part is not None
    return path / "slabs" / f"{part.slot >> INDEX_BITS:010x}.slab"
