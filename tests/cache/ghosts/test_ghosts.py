"""The ghosts of a cache: they hear its prompts, keep to their time, and take the memory that they may."""

from __future__ import annotations

import asyncio
import itertools
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from prefixd.cache import NamespaceSpec, PartSpec
from prefixd.cache.coding.namespace_codings import TierCodec
from prefixd.cache.ghosts.ghost_tier import GhostTier, Prompt, Sizes
from prefixd.cache.ghosts.ghosts import Ghosts
from prefixd.cache.ghosts.prefix_hashes import PrefixHashes
from prefixd.cache.prompt_listeners import Lookup
from tests.cache.disk.coded_rig import SHAPE, CodedRig
from tests.rig import Rig


async def settle(ghosts: Ghosts) -> None:
    while ghosts.queued:
        for _ in ghosts.work_once():
            pass


async def test_prompts_are_heard_once_and_estimated_as_the_cache_finds_them(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    ghosts = Ghosts(rig.cache, "lru", 1 << 20, hashes=PrefixHashes(bytes(range(24))))
    ghosts.listen()
    prompt = [1, 2, 3, 4, 5, 6]
    await rig.lease(prompt)
    await rig.put(prompt)
    lease = await rig.lease(prompt)
    assert lease is not None
    await settle(ghosts)
    first = ghosts.estimates()[0]
    assert ghosts.asked_tokens() == rig.cache.counters.asked_tokens
    assert first.hit_rate == first.now.hit_rate == 0.5
    assert not first.sure
    mine = ghosts.estimates(rig.namespace.spec.tenant)[0]
    assert mine.now.hit_rate == 0.5
    assert ghosts.estimates("nobody")[0].references == 0


async def test_a_disk_of_coded_blocks_counts_for_the_blocks_that_it_holds(tmp_path: Path) -> None:
    for codec, least in (("exact", 1.0), ("int8", 1.2)):
        rig = CodedRig(tmp_path / codec, disk_codec=TierCodec(codec), cpu=8, disk=16, mixed=False)
        ghosts = Ghosts(rig.cache, "lru", 1 << 20)
        sizes = ghosts._sizes(ghosts.tiers[1])
        assert sizes.compression == 1.0, "nothing was written yet"
        rows = await rig.to_disk_alone([1, 2, 3])
        sizes = ghosts._sizes(ghosts.tiers[1])
        assert sizes.compression == 3 * SHAPE.nbytes / rig.stored(rows) >= least
        assert sizes.totals()[-1] == pytest.approx(8 * sizes.compression * sizes.nbytes)
        now = ghosts.estimates()[1]
        assert now.nbytes == rig.cache.tiers.durable.capacity_bytes and now.sizes[-1].nbytes == 8 * now.nbytes
        await rig.close()


async def test_a_part_of_a_prompt_does_not_keep_all_of_it_in_memory(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    ghosts = Ghosts(rig.cache, "lru", 1 << 20)
    chain = rig.cache.chain(rig.namespace, bytes(4 << 20))  # an engine may ask for its first block alone
    whole = weakref.ref(chain._capacity)
    for blocks in (1, 0):
        ghosts.asked(rig.namespace, chain, Lookup(blocks, blocks, 0))
    del chain
    assert ghosts.queued == 2 and whole() is None


async def test_what_was_asked_lately_keeps_no_long_blocks(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    ghosts = Ghosts(rig.cache, "lru", 1 << 20)
    namespace = rig.cache.register(NamespaceSpec("long blocks", 65_536, (PartSpec("all", 0, 1),)))
    tracemalloc.start()
    try:
        for number in range(64):
            prompt = rig.cache.chain(namespace, number.to_bytes(4 * 65_536, "little"))
            ghosts.asked(namespace, prompt, Lookup(65_536, 1, 0))
            await settle(ghosts)
        assert len(ghosts._recent) == 64 and tracemalloc.get_traced_memory()[0] < 1 << 20, "of 16 MiB of tokens"
    finally:
        tracemalloc.stop()


async def test_too_many_prompts_are_skipped_and_counted_and_the_sample_shrinks(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    ghosts = Ghosts(rig.cache, "lru", 1 << 20, spent_s=lambda: 0.0)
    chain = rig.chain([1, 2, 3, 4], rig.namespace)
    for _ in range(2000):
        ghosts.asked(rig.namespace, chain, Lookup(4, len(chain), 0))
    assert ghosts.queued == 1024
    assert ghosts.skipped_prompts == 2000 - 1024


async def test_work_waits_for_its_share_of_the_time(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    spent = itertools.count()  # every look at the clock costs 4 ms
    ghosts = Ghosts(rig.cache, "lru", 1 << 20, spent_s=lambda: next(spent) * 0.004)
    ghosts.listen()
    chain = rig.chain([1, 2, 3, 4], rig.namespace)
    task = asyncio.create_task(ghosts.run())
    for _ in range(200):
        ghosts.asked(rig.namespace, chain, Lookup(4, len(chain), 0))
    for _ in range(300):
        await asyncio.sleep(0)
    busy_s = ghosts.busy_s
    assert 0 < busy_s < 0.06, "the credit of the beginning, and no more while the time stands still"
    assert ghosts.queued
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("policy", ["lru", "weighing"])
def test_the_memory_is_bounded(policy: str) -> None:
    blocks = 4096
    tracemalloc.start()
    ghost = GhostTier(1, blocks, policy, ("lfu", "s3-fifo", "lru"), rate=1.0)
    hashes = np.random.default_rng(0).integers(0, 1 << 63, (8, blocks // 8), np.uint64)
    for row in hashes:
        for _ in ghost.use(Prompt(0.0, "t", 16, 1, Lookup(16 * len(row), len(row), 0)), row, Sizes(blocks // 2)):
            pass
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert ghost.blocks >= blocks // 2
    assert taken < blocks * ghost.bytes_a_block(policy)
