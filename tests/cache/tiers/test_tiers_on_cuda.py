"""The tiers with GPU memory at the top: every way between them, by way of the pinned arena.

Runs on a GPU, and against the stand-in driver (`tests/swap/test_cuda_stand_in.py`) where there is none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from prefixd.cache.index.trie import CPU, DISK, GPU
from tests.rig import MakeRig, Rig
from tests.waiting import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "PREFIXD_TEST_STAND_IN" not in os.environ and not torch.cuda.is_available(),
        reason="no CUDA GPU on this machine; test_cuda_stand_in.py runs this against the stand-in driver",
    ),
]


@pytest.fixture
def make(make_rig: MakeRig) -> MakeRig:
    def make(**how: Any) -> Rig:
        rig = make_rig(**{"gpu": 2, "cpu": 2, "disk": 8, "device": "cuda", **how})
        assert rig.cache.tiers.compute.on_device
        return rig

    return make


async def bring(rig: Rig, prompt: Sequence[int]) -> int:
    """Brings the prompt's blocks up to the GPU tier and checks every byte of those that arrived."""
    rows = np.array(rig.rows(prompt))
    rig.trie.hold(rows, GPU)
    there = await rig.cache.mover.bring(rig.trie, rows, rig.cache.tiers.compute)
    for block, row in enumerate(rows[:there].tolist()):
        span = rig.frame(int(rig.trie.slots[row, GPU, 0]))
        assert await rig.download(span) == rig.content(rig.namespace, rig.chain(prompt), block)
    rig.unhold(rows.tolist(), rig.cache.tiers.compute)
    return there


async def test_blocks_go_down_a_tier_at_a_time_and_come_up_from_each(make: MakeRig) -> None:
    rig = make()
    for prompt in ([1, 2], [3, 4], [5, 6]):
        rig.unhold(await rig.put_gpu(prompt), rig.cache.tiers.compute)
    assert [rig.trie.nearest[rig.rows(p)].tolist() for p in ([5, 6], [3, 4], [1, 2])] == [
        [GPU, GPU],
        [CPU, CPU],
        [DISK, DISK],
    ]
    assert await bring(rig, [1, 2]) == 2, "from disk, staged in the arena"
    assert not any(rig.tiers([1, 2], CPU)), "what was staged is not kept there"
    for prompt in ([3, 4], [5, 6], [1, 2]):
        assert await bring(rig, prompt) == 2


async def test_an_engine_reads_what_a_worker_computed(make: MakeRig) -> None:
    """From the GPU tier to the arena, where `get` checks every byte."""
    rig = make(gpu=4, cpu=4)
    rig.unhold(await rig.put_gpu([1, 2, 3]), rig.cache.tiers.compute)
    assert await rig.get([1, 2, 3]) == 3


async def test_flush_writes_gpu_blocks_and_a_restart_brings_them_back(make: MakeRig) -> None:
    rig = make(gpu=4, cpu=4)
    rig.unhold(await rig.put_gpu([1, 2, 3, 4]), rig.cache.tiers.compute)
    assert await rig.cache.write_back.flush() == 4
    await rig.restart()
    assert rig.restored == 4
    assert await bring(rig, [1, 2, 3, 4]) == 4


async def test_write_back_makes_gpu_blocks_clean(make: MakeRig) -> None:
    rig = make(gpu=8, cpu=8, write_back=True)
    rig.start_write_back()
    rig.unhold(await rig.put_gpu([1, 2, 3, 4, 5, 6, 7, 8]), rig.cache.tiers.compute)
    await until(lambda: any(rig.tiers([1, 2, 3, 4, 5, 6, 7, 8], DISK)))
    await rig.cache.write_back.stop()
    assert await rig.get([1, 2, 3, 4, 5, 6, 7, 8]) == 8


async def test_without_room_to_stage_nothing_comes_and_nothing_is_lost(make: MakeRig) -> None:
    rig = make(cpu=2)
    await rig.put([1], durable=True)
    for other in ([2, 3], [4, 5]):
        await rig.put(other, durable=True)
    assert rig.tiers([1], CPU) == [False]
    lease = await rig.lease([4, 5])
    assert lease is not None
    with rig.nothing_lost():
        assert await bring(rig, [1]) == 0
    assert rig.cache.mover.lost["no room in the CPU tier to stage a read"] == 1
    rig.cache.release(rig.session, lease.id)
    assert await bring(rig, [1]) == 1


async def test_a_damaged_block_never_reaches_the_gpu(make: MakeRig) -> None:
    rig = make()
    await rig.put([1, 2], durable=True)
    await rig.put([3, 4], durable=True)
    rows = rig.rows([1, 2])
    assert rig.trie.nearest[rows].tolist() == [DISK, DISK]
    rig.damage(rows[1])
    assert await bring(rig, [1, 2]) == 1
    assert rig.cache.mover.lost["checksum mismatch on disk"] == 1
    assert len(rig.rows([1, 2])) == 1
