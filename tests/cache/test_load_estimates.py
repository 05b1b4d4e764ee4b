"""What a load for an engine takes is learned from loads, and told with every answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefixd.base.errors import InvalidArgumentError
from prefixd.cache.moving.beginnings import Reader
from prefixd.server.services.load_estimates import LoadEstimates, LoadWatch
from prefixd.v1 import cache_pb2 as pb
from prefixd_scheduler import Distance, Stretch
from tests.rig import BLOCK_TOKENS, Rig
from tests.tries import match_rows

PREFILL = pb.Prefill(token_s=1.0)
A, B = [1, 2, 3, 4], [5, 6, 7, 8]


async def on_disk(make_rig: Callable[..., Rig]) -> Rig:
    """Two prompts of 4 blocks that lie on disk alone."""
    rig = make_rig(cpu=8, disk=16)
    for prompt in (A, B):
        await rig.put(prompt, durable=True)
    await rig.restart()
    return rig


async def load(rig: Rig, estimates: LoadEstimates, watch: LoadWatch, prompt: list[int], takes_s: float) -> None:
    with watch:

        def matched(path: object, tiers: object) -> None:
            watch.begin(path)
            rig.clock.now += takes_s

        lease = await rig.lease(prompt, matched=matched)
        watch.complete = lease is not None and len(lease.rows) == watch.blocks


async def test_a_load_teaches_what_the_next_one_takes(make_rig: Callable[..., Rig]) -> None:
    rig = await on_disk(make_rig)
    estimates, tokens = LoadEstimates(rig.cache), 4 * BLOCK_TOKENS
    first = estimates.watch(rig.trie, 0, tokens, PREFILL)
    await load(rig, estimates, first, A, 2.0)
    assert not first.estimate.HasField("load_s")
    assert first.estimate.compute_s == tokens
    second = estimates.watch(rig.trie, 0, tokens, PREFILL)
    await load(rig, estimates, second, B, 2.0)
    assert second.estimate.load_s == pytest.approx(2.0)
    assert (second.estimate.best_blocks, second.estimate.best_s) == (4, pytest.approx(2.0))
    here = estimates.estimate(rig.trie, match_rows(rig.trie, rig.namespace.root, rig.chain(A)), 0, tokens, None)
    assert (here.load_s, here.HasField("compute_s")) == (0.0, False)
    assert not any(estimates.queued_bytes.values())


async def test_who_computes_faster_than_the_disk_reads_is_told_so(make_rig: Callable[..., Rig]) -> None:
    rig = await on_disk(make_rig)
    estimates, tokens = LoadEstimates(rig.cache), 4 * BLOCK_TOKENS
    await load(rig, estimates, estimates.watch(rig.trie, 0, tokens, None), A, 1000.0)
    watch = estimates.watch(rig.trie, 1, tokens, PREFILL)
    path = match_rows(rig.trie, rig.namespace.root, rig.chain(B))
    assert estimates.stretches(rig.trie, path, 1) == [
        Stretch(Distance.GPU, BLOCK_TOKENS, 0),
        Stretch(Distance.DISK, 3 * BLOCK_TOKENS, 3 * rig.part_bytes),
    ]
    with watch:
        watch.begin(Reader(rig.trie, path, 1, len(path)))
        behind = estimates.estimate(rig.trie, path, 1, tokens, PREFILL)
    assert (watch.estimate.best_blocks, watch.estimate.best_s) == (1, 3 * BLOCK_TOKENS)
    assert behind.load_s == pytest.approx(2 * watch.estimate.load_s), "it waits for the other one, too"


async def test_a_load_that_did_not_come_whole_teaches_nothing(make_rig: Callable[..., Rig]) -> None:
    rig = await on_disk(make_rig)
    estimates = LoadEstimates(rig.cache)
    with estimates.watch(rig.trie, 0, 4 * BLOCK_TOKENS, None) as watch:
        path = match_rows(rig.trie, rig.namespace.root, rig.chain(A))
        watch.begin(Reader(rig.trie, path, 0, len(path)))
    assert estimates.cost.load_s(1, Distance.DISK) is None


def test_a_prefill_below_zero_is_refused_before_anything_is_loaded(make_rig: Callable[..., Rig]) -> None:
    estimates = LoadEstimates(make_rig().cache)
    with pytest.raises(InvalidArgumentError, match=r"prefill: token_s = -1.0; .* 0 or more"):
        estimates.watch(make_rig().trie, 0, 16, pb.Prefill(token_s=-1.0))


async def test_of_two_who_load_the_same_one_learns(make_rig: Callable[..., Rig]) -> None:
    rig = await on_disk(make_rig)
    estimates, tokens = LoadEstimates(rig.cache), 4 * BLOCK_TOKENS
    path = match_rows(rig.trie, rig.namespace.root, rig.chain(A))
    with estimates.watch(rig.trie, 0, tokens, None) as first, estimates.watch(rig.trie, 0, tokens, None) as second:
        first.begin(Reader(rig.trie, path, 0, len(path)))
        second.begin(Reader(rig.trie, path, 0, len(path)))
        assert estimates.queued_bytes[Distance.DISK] == 4 * rig.part_bytes
        rig.clock.now += 2.0
        first.complete = second.complete = True
    assert estimates.cost.load_s(4 * rig.part_bytes, Distance.DISK) == pytest.approx(2.0)
    assert not any(estimates.queued_bytes.values())
