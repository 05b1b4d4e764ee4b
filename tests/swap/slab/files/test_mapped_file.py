"""What was read of the index does not stay in this process's memory."""

from __future__ import annotations

import random
from pathlib import Path

from prefixd_swap.slab.files.file_ops import FileOps
from prefixd_swap.slab.index.index import SlabIndex
from tests.swap.slab.page_cache import resident_bytes

DICE = random.Random(0)
KEYS = [DICE.randbytes(24) for _ in range(40_000)]


def test_reads_and_writes_leave_little_of_the_index_in_memory(tmp_path: Path) -> None:
    index = SlabIndex(tmp_path / "index", FileOps())
    file = tmp_path / "index" / "data.mdb"
    for start in range(0, len(KEYS), 1000):  # the map grows on the way, and moves
        index.apply([(key, bytes(200)) for key in KEYS[start : start + 1000]])
    size = file.stat().st_size
    assert size > 10 << 20
    assert resident_bytes(file) < 5 << 20, "the last writes"
    assert sum(map(len, index.chunks())) == len(KEYS)
    assert resident_bytes(file) < 1 << 20, "a reading of everything"
    most = 0
    for number, key in enumerate(KEYS[:4000]):
        assert index.get(key) == bytes(200)
        if not number % 97:
            most = max(most, resident_bytes(file))
    assert 0 < most < 7 << 20, "many single reads"
    index.close()
