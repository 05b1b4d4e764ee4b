"""What the tracker says of waiting requests is what a search from scratch finds, whatever happened to the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.cache import CPU, GPU, NONE
from prefixd.server.tracker import PrefixTracker
from prefixd_scheduler import RequestQueue, create_policy

if TYPE_CHECKING:
    from prefixd.server.request import Request
    from tests.server.dispatcher.conftest import Bench

BLOCK = 4
BRANCHES = st.lists(st.integers(0, 1), min_size=1, max_size=5)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["commit", "bring", "forget", "wait", "leave"]), BRANCHES),
        st.tuples(st.sampled_from(["crowd gpu", "crowd cpu"]), st.integers(1, 12)),
        st.tuples(st.just("flush"), st.none()),
    ),
    max_size=30,
)


def prompt(branches: list[int]) -> list[int]:
    """A path in a binary tree of blocks, and a token of its own."""
    return [token for depth, branch in enumerate(branches) for token in [depth, branch, 7, 7]] + [9]


def from_scratch(bench: Bench, request: Request) -> tuple[int, int]:
    """Blocks of the longest cached prefix, and its farthest tier."""
    trie = request.trie
    parent, distance, blocks = request.namespace.root, GPU, 0
    for block in range(request.usable_blocks):
        row = trie.find(request.chain.key(block))
        if row is None or trie.parent[row] != parent or trie.tokens[row].tobytes() != request.chain.block(block):
            break
        tiers = [tier for tier in range(NONE) if trie.has(row, tier)]
        if not tiers:
            break
        distance = max(distance, min(tiers))
        parent, blocks = row, blocks + 1
    return blocks, distance if blocks else NONE


async def change(
    bench: Bench, queue: RequestQueue, tracker: PrefixTracker, waiting: list[Request], what: str, argument: Any
) -> None:
    cache, trie = bench.cache, bench.cache.trie(bench.namespace)
    if what in ("bring", "forget"):
        chain = bench.request(prompt(argument)).chain
        rows = trie.match(bench.namespace.root, chain).rows
        if what == "forget":
            await cache.mover.forget(trie, trie.subtree(rows[-1:])[::-1] if len(rows) else [])
            return
        trie.hold(rows, GPU)
        await cache.mover.bring(trie, rows, GPU)
        cache.unhold(trie, rows, GPU)
    elif what == "commit":
        await bench.cached(prompt(argument))
    elif what == "wait":
        waiting.append(bench.request(prompt(argument)))
        queue.push(waiting[-1].queued)
        tracker.add(waiting[-1])
    elif what == "leave" and waiting:
        left = waiting.pop(sum(argument) % len(waiting))
        queue.remove(left.id)
        tracker.remove(left)
    elif what == "flush":
        await cache.write_back.flush()
    elif what.startswith("crowd"):
        tier = GPU if what == "crowd gpu" else CPU
        for slots in await cache.mover.allocate(tier, trie.part_bytes, argument):
            cache.tiers.release(tier, slots)


@settings(max_examples=150)
@given(changes=CHANGES, disk=st.booleans())
def test_distances_follow_every_change(
    bench_of: Callable[..., Any], changes: list[tuple[str, Any]], disk: bool
) -> None:
    async def scenario() -> None:
        async with bench_of(frames=8, cpu_slots=8, disk=disk) as bench:
            queue = RequestQueue(create_policy("relaxed-fpf"), 100)
            tracker = PrefixTracker(bench.cache, queue)
            waiting: list[Request] = []
            for what, argument in changes:
                await change(bench, queue, tracker, waiting, what, argument)
                tracker.refresh()
                for request in waiting:
                    blocks, distance = from_scratch(bench, request)
                    assert (len(request.rows), int(request.queued.distance)) == (blocks, distance), what
                    assert request.queued.cached_tokens == blocks * BLOCK
                    last = request.chain.key(blocks - 1) if blocks else None
                    assert request.queued.prefix == last
                queue.check_integrity()

    asyncio.run(scenario())
