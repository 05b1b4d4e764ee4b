"""A start without the codec of blocks on disk is refused, says why, and changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
import xxhash

from prefixd.base.errors import ConfigError
from prefixd.server.startup.storage import open_store
from prefixd.settings import Settings
from prefixd_swap import NewBlock, SlabStore
from prefixd_swap.codecs.coded_part import CodedPart
from prefixd_swap.codecs.registry import CODECS, find_codec


@pytest.fixture(autouse=True)
def forget_codecs() -> Iterator[None]:
    find_codec.cache_clear()
    yield
    find_codec.cache_clear()


def write_coded(path: Path, *codecs: int) -> None:
    path.mkdir(mode=0o700, exist_ok=True)
    store = SlabStore.open(path, 1 << 20)
    store.put_namespace(b"namespac", b"spec")
    data = np.arange(100, dtype=np.uint8)
    for codec in codecs:
        part = CodedPart(data, xxhash.xxh3_64_intdigest(data.data), codec=codec)
        assert all(store.write([NewBlock(b"namespac", bytes([codec]) * 16, b"", b"toke", 0, [part])]))
    store.close()


def settings(tmp_path: Path) -> Settings:
    return Settings.load(None, {"data_dir": tmp_path, "disk.path": tmp_path / "blocks", "disk.bytes": 1 << 20})


async def start(tmp_path: Path) -> int:
    """Opens the store as the daemon does; returns the blocks that it has."""
    async with AsyncExitStack() as stack:
        store = open_store(settings(tmp_path), None, stack)
        assert store is not None
        return len(store.load())


async def refusal(tmp_path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        await start(tmp_path)
    return str(refused.value)


async def test_a_missing_package_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_coded(tmp_path / "blocks", CODECS["lossless"], CODECS["int8"])
    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, "prefixd_swap.codecs.quantized", None)
        said = await refusal(tmp_path)
        assert "codec int8: a package is missing" in said and "pip install 'prefixd[codecs]'" in said
        assert f"delete {tmp_path / 'blocks'}" in said
    assert not list((tmp_path / "blocks").glob("**/*damaged*"))
    find_codec.cache_clear()
    assert await start(tmp_path) == 2, "nothing was lost"


async def test_a_codec_of_a_newer_prefixd_stops_the_start(tmp_path: Path) -> None:
    write_coded(tmp_path / "blocks", CODECS["lossless"], 9)
    said = await refusal(tmp_path)
    assert "codec number 9, of a newer prefixd" in said and "exact, lossless, int8, k8v4; upgrade prefixd" in said
    assert not list((tmp_path / "blocks").glob("**/*damaged*"))


async def test_a_codec_without_blocks_is_not_needed(tmp_path: Path) -> None:
    write_coded(tmp_path / "blocks", 9)
    blocks = [(b"namespac", bytes([9]) * 16)]
    with pytest.MonkeyPatch.context() as known:
        known.setattr("prefixd_swap.slab.opening.NAMES", {9: "nine"})
        known.setattr("prefixd_swap.slab.opening.find_codec", lambda number: number)
        store = SlabStore.open(tmp_path / "blocks", 1 << 20)
        store.remove(blocks)
        store.close()
    assert await start(tmp_path) == 0


async def test_an_index_that_was_replaced_knows_the_codecs(tmp_path: Path) -> None:
    """Blocks of a damaged index are brought back: still no start without their codec."""
    write_coded(tmp_path / "blocks", 9)
    with pytest.MonkeyPatch.context() as known:
        known.setattr("prefixd_swap.slab.opening.NAMES", {9: "nine"})
        known.setattr("prefixd_swap.slab.opening.find_codec", lambda number: number)
        known.setattr("prefixd_swap.slab.index.index.check_pages", lambda *_: "page 7 of data.mdb is damaged")
        store = SlabStore.open(tmp_path / "blocks", 1 << 20)
        assert store.recovery.kept == 1
        store.close()
    assert "codec number 9" in await refusal(tmp_path)
