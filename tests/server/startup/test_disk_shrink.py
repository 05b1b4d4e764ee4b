"""A daemon that is given a smaller disk tier than what there is deletes no blocks unless it is told to."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from prefixd.base.errors import ConfigError
from prefixd.server.startup.storage import open_store
from prefixd.settings import Settings
from prefixd_swap import NewBlock, SlabStore, Span

MIB = 1 << 20


def settings(folder: Path, **disk: object) -> Settings:
    return Settings.load(None, {"data_dir": folder, **{f"disk.{name}": value for name, value in disk.items()}}, {})


async def test_a_smaller_tier_over_blocks_is_refused_with_the_remedy(tmp_path: Path) -> None:
    data = np.zeros(MIB, np.uint8)
    (tmp_path / "blocks").mkdir(mode=0o700)
    store = SlabStore.open(tmp_path / "blocks", 8 * MIB, slab_bytes=MIB)
    blocks = [NewBlock(b"namespac", bytes([n]) * 16, b"", b"tokn", 0, [Span(data.ctypes.data, MIB)]) for n in range(8)]
    assert all(store.write(blocks))
    store.close()
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=r"disk\.bytes = 2097152: .* deletes 6 slabs .*disk\.shrink = true"):
            open_store(settings(tmp_path, bytes="2MiB"), None, stack)
    assert len(list((tmp_path / "blocks" / "slabs").iterdir())) == 8
    async with AsyncExitStack() as stack:
        kept = open_store(settings(tmp_path, bytes="2MiB", shrink=True), None, stack)
        assert kept is not None and kept.recovery.kept == 2
