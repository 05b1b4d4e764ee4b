"""What a load counts where the disk keeps some blocks as they are and some in fewer bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from prefixd.cache.coding.namespace_codings import TierCodec
from prefixd.cache.index.trie import DISK
from prefixd.server.services.load_estimates import LoadEstimates
from prefixd.serving.loading.load_bytes import BlockLoads, LoadBytes, bytes_to_load
from prefixd_scheduler import Distance, Stretch
from tests.cache.disk.coded_rig import SHAPE, CodedRig
from tests.rig import BLOCK_TOKENS

PROMPT = list(range(1, 13))
ALL = np.full(len(PROMPT), 1, np.uint8)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[CodedRig]:
    """A disk of 12 blocks, some of which are noise that stays as it is."""
    rig = CodedRig(tmp_path, disk_codec=TierCodec("int8"), cpu=16, disk=32)
    yield rig
    await rig.close()


async def on_disk(rig: CodedRig) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], int]:
    """The rows of a prompt that is on disk alone, and how many are coded."""
    rows = np.array(await rig.to_disk_alone(PROMPT))
    coded = int(np.count_nonzero(rig.trie.coded_bytes[rows, 0]))
    assert 0 < coded < len(rows)
    return rows, coded


async def test_a_coded_block_moves_what_is_stored_and_decodes_what_it_has(rig: CodedRig) -> None:
    assert bytes_to_load(rig.trie, np.zeros(0, np.int64), ALL[:0]) == LoadBytes()
    rows, coded = await on_disk(rig)
    found = bytes_to_load(rig.trie, rows, ALL)
    assert found == LoadBytes(rig.stored(rows.tolist()), coded * SHAPE.nbytes)
    is_coded = rig.trie.coded_bytes[rows, 0] > 0
    loads = BlockLoads(rig.trie, rows, ALL)
    raw = loads.total(~is_coded)
    assert raw == LoadBytes((len(rows) - coded) * SHAPE.nbytes) and loads.total(is_coded) + raw == found
    assert bytes_to_load(rig.trie, rows, 0 * ALL) == LoadBytes() and not LoadBytes(), "nothing lacks"


async def test_a_block_that_is_nearer_too_is_not_decoded(rig: CodedRig) -> None:
    rows, _ = await on_disk(rig)
    assert await rig.get(PROMPT) == len(PROMPT)
    assert (rig.trie.slots[rows, DISK] >= 0).all()
    assert bytes_to_load(rig.trie, rows, ALL) == LoadBytes(len(rows) * SHAPE.nbytes)


async def test_an_engines_load_teaches_what_decoding_takes(rig: CodedRig) -> None:
    rows, coded = await on_disk(rig)
    estimates, tokens = LoadEstimates(rig.cache), len(PROMPT) * BLOCK_TOKENS
    stored = rig.stored(rows.tolist())
    assert estimates.stretches(rig.trie, rows, 0) == [
        Stretch(Distance.DISK, tokens, stored, coded * SHAPE.nbytes),
    ]
    for nbytes in (SHAPE.nbytes, 8 * SHAPE.nbytes):
        estimates.cost.observe_load(Distance.DISK, nbytes, nbytes / 1e6)  # as they are: 1 MB/s
    expected_s = stored / 1e6 + coded * SHAPE.nbytes / 2e6
    with estimates.watch(rig.trie, 0, tokens, None) as watch:

        def matched(path: object, tiers: object) -> None:
            watch.begin(path)
            rig.clock.now += expected_s

        lease = await rig.lease(PROMPT, matched=matched)
        watch.complete = lease is not None and len(lease.rows) == watch.blocks
    assert watch.estimate.load_s == pytest.approx(stored / 1e6), "decoding was never seen"
    assert estimates.cost.load_s(SHAPE.nbytes, Distance.DISK) == pytest.approx(SHAPE.nbytes / 1e6, rel=0.1)
    learned_s = estimates.cost.load_s(stored, Distance.DISK, decoded_bytes=coded * SHAPE.nbytes)
    assert learned_s == pytest.approx(expected_s, rel=0.1)


async def test_eviction_weighs_what_the_disk_keeps(rig: CodedRig) -> None:
    assert rig.trie.compression(np.arange(1), DISK) == 1.0
    rows, coded = await on_disk(rig)
    times = np.asarray(rig.trie.compression(rows, DISK))
    assert np.count_nonzero(times > 1.2) == coded and np.count_nonzero(times == 1.0) == len(rows) - coded
    assert rig.trie.compression(rows, DISK - 1) == 1.0
