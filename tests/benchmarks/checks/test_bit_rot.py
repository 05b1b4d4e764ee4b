"""The bit rot harness in short, and proof that it sees what nobody found."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.checks import bit_rot
from benchmarks.storage.bit_flips import KINDS, StoredBlocks, draw
from prefixd_swap import NewBlock, SlabStore, Span

CAPACITY = 16 << 20


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [False, True])
def test_every_flip_is_found_and_nothing_wrong_is_served(encrypted: bool) -> None:
    findings = bit_rot.run(18, 4, seed=1, numbers=6, encrypted=encrypted)
    assert not findings.broken, findings.result()
    result = findings.result()
    assert (result["flips"], result["detected"], result["served_wrong"], result["index_wrong"]) == (18, 18, 0, 0)
    assert set(result["detected_by"]) >= set(bit_rot.WAYS)
    assert result["index_flips"] == 4 and result["recomputed_blocks"] > 0


@pytest.mark.slow
def test_what_is_not_found_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bit_rot, "_apply", lambda flips: None)
    findings = bit_rot.run(3, 0, seed=1, numbers=2)
    assert (findings.flips.total(), findings.detected.total()) == (3, 0) and "undetected is 3" in findings.broken


@pytest.fixture
def stored(tmp_path: Path) -> StoredBlocks:
    """60 blocks in chains of three, of two sizes."""
    store = SlabStore.open(tmp_path / "blocks", CAPACITY)
    data = np.random.default_rng(0).integers(0, 256, (60, 9000), np.uint8)
    for number in range(60):
        size = 9000 if number < 30 else 4096
        parent = (number - 1).to_bytes(16, "big") if number % 3 else b""
        span = Span(data[number].ctypes.data, size)
        store.write([NewBlock(b"nspace00", number.to_bytes(16, "big"), parent, bytes(4), number % 3, [span])])
    store.close()
    return StoredBlocks(tmp_path / "blocks", CAPACITY)


def test_flips_hit_blocks_of_their_own_and_change_them(stored: StoredBlocks) -> None:
    seen = set()
    for seed in range(30):
        flips = draw(stored, 12, random.Random(seed))
        hit = [block for flip in flips for block in flip.blocks]
        assert len(hit) == 12
        keys = {block.key for block in hit}
        for block in hit:
            assert keys & set(stored.relatives(block)) == {block.key}
        for flip in flips:
            seen.add(flip.kind)
            for write, block in zip(flip.writes, flip.blocks, strict=True):
                (place,) = block.places
                assert write.file == place.file and place.offset <= write.offset < place.offset + place.nbytes
                if write.data is not None:
                    assert len(write.data) == place.nbytes
                    assert write.data != write.file.read_bytes()[write.offset :][: place.nbytes]
    assert seen == set(KINDS)


def test_a_flip_is_in_the_file(stored: StoredBlocks) -> None:
    for flip in draw(stored, 12, random.Random(3)):
        flip.apply()
        for write in flip.writes:
            if write.data is None:
                assert write.file.stat().st_size == write.offset
            elif write.file.stat().st_size > write.offset + len(write.data):
                assert write.file.read_bytes()[write.offset :].startswith(write.data)
