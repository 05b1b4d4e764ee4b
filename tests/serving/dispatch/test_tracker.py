"""What the tracker says of waiting requests is what a search from scratch finds, whatever happened to the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.cache import NONE
from prefixd.cache.index.trie import DISK, GPU
from prefixd.serving.dispatch.tracker import PrefixTracker
from prefixd.serving.request.request import Request
from prefixd_scheduler import Distance, RequestQueue, create_policy, prompt_weight
from tests.serving.bench import Bench, MakeBench
from tests.tries import forget_blocks, match_rows, subtree_rows

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


def from_scratch(bench: Bench, request: Request) -> tuple[int, int, float]:
    """Blocks of the longest cached prefix, its farthest tier, and the weight of the prompt."""
    trie = request.trie
    parent, blocks, where = request.namespace.root, 0, []
    for block in range(request.usable_blocks):
        row = trie.find(request.namespace.ordinal, request.chain.key(block))
        if row is None or trie.parent[row] != parent or trie.tokens[row].tobytes() != request.chain.block(block):
            break
        tiers = [tier for tier in range(NONE) if trie.has(row, tier)]
        if not tiers:
            break
        where.append(Distance(min(tiers)))
        parent, blocks = row, blocks + 1
    return blocks, max(where, default=NONE), prompt_weight([(tier, BLOCK) for tier in where], request.prompt_tokens)


async def change(
    bench: Bench, queue: RequestQueue, tracker: PrefixTracker, waiting: list[Request], what: str, argument: Any
) -> None:
    cache, trie = bench.cache, bench.cache.trie(bench.namespace)
    if what in ("bring", "forget"):
        chain = bench.request(prompt(argument)).chain
        rows = match_rows(trie, bench.namespace.root, chain)
        if what == "forget":
            await forget_blocks(cache.mover, trie, subtree_rows(trie, rows[-1:])[::-1] if len(rows) else [])
            return
        trie.hold(rows, GPU)
        await cache.mover.bring(trie, rows, cache.tiers.compute)
        trie.unhold(rows, cache.tiers.compute.level)
        cache.placement.sweep(trie, rows)
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
        tier = cache.tiers.compute if what == "crowd gpu" else cache.tiers.shared
        tier.free(await cache.mover.slots.allocate(tier, trie.part_bytes, argument))


@settings(max_examples=150)
@given(changes=CHANGES, disk=st.booleans())
@pytest.mark.slow
def test_weights_follow_every_change(bench_of: Callable[..., Any], changes: list[tuple[str, Any]], disk: bool) -> None:
    async def scenario() -> None:
        async with bench_of(frames=8, cpu_slots=8, disk=disk) as bench:
            queue = RequestQueue(create_policy("relaxed-fpf"), 100)
            tracker = PrefixTracker(bench.cache, queue)
            waiting: list[Request] = []
            for what, argument in changes:
                await change(bench, queue, tracker, waiting, what, argument)
                tracker.refresh()
                tracker.refresh()  # the first began where the one before ended, with the last request perhaps
                for request in waiting:
                    blocks, farthest, weight = from_scratch(bench, request)
                    assert (len(request.rows), int(request.farthest)) == (blocks, farthest), what
                    assert request.queued.weight == weight, what
                    assert request.queued.cached_tokens == blocks * BLOCK
                    last = (request.namespace.root, request.chain.key(blocks - 1)) if blocks else None
                    assert request.queued.prefix == last
                queue.check_integrity()

    asyncio.run(scenario())


async def watched(
    make_bench: MakeBench, requests: int, rows_a_refresh: int, blocks: int = 4
) -> tuple[Bench, PrefixTracker, list[Request]]:
    """Requests with so many cached blocks each, on disk and in the CPU tier, and a tracker that has seen them so."""
    bench = await make_bench(8, cpu_slots=blocks * requests, disk=True)
    queue = RequestQueue(create_policy("fcfs"), 100)
    tracker = PrefixTracker(bench.cache, queue, rows_a_refresh=rows_a_refresh)
    waiting = []
    for number in range(requests):
        tokens = range(100 * number, 100 * number + 25)
        await bench.cached(tokens[: BLOCK * blocks + 1])
        waiting.append(bench.request(tokens))
        queue.push(waiting[-1].queued)
        tracker.add(waiting[-1])
        assert waiting[-1].farthest is Distance.CPU
    await bench.cache.write_back.flush()
    while tracker._unread_slots > 0:
        tracker.refresh()
    return bench, tracker, waiting


def drop(bench: Bench, request: Request, block: int) -> None:
    """A block's copy in the CPU tier goes; the one on disk stays."""
    bench.cache.placement.discard_copies(request.trie, request.found[block : block + 1], bench.cache.tiers.shared)


def on_disk(waiting: list[Request]) -> int:
    return sum(request.farthest is Distance.DISK for request in waiting)


async def test_a_tail_that_moved_is_seen_at_once(make_bench: MakeBench) -> None:
    bench, tracker, waiting = await watched(make_bench, 10, rows_a_refresh=1)
    drop(bench, waiting[7], 3)
    tracker.refresh()
    assert [request.farthest for request in waiting].index(Distance.DISK) == 7
    assert on_disk(waiting) == 1


async def test_a_quarter_that_moved_is_seen_at_once(make_bench: MakeBench) -> None:
    """The tail moves first, and the blocks before it later: the prompt's weight sinks class by class."""
    bench, tracker, waiting = await watched(make_bench, 10, rows_a_refresh=1, blocks=6)
    weights = [waiting[7].queued.weight]
    for block in (5, 4, 3, 2, 1, 0):
        drop(bench, waiting[7], block)
        tracker.refresh()
        weights.append(waiting[7].queued.weight)
    assert weights == [3.0, 3.0, 2.5, 2.5, 2.5, 2.0, 2.0]
    assert on_disk(waiting) == 1


async def test_a_header_that_all_prompts_share_decides_nothing(make_bench: MakeBench) -> None:
    """Two blocks of a header, nine of a document. It is a header after 32 prompts, until one comes that lacks it."""
    bench = await make_bench(8, cpu_slots=64)
    queue = RequestQueue(create_policy("relaxed-fpf"), 100)
    tracker = PrefixTracker(bench.cache, queue)
    documents = [[*range(8), *range(100 * number, 100 * number + 36), 9] for number in range(1, 5)]
    for document in documents[:2]:
        await bench.cached(document)
    waiting: list[Request] = []

    def weights(*prompts: list[int]) -> list[float]:
        """Of the first four, when so many more have come, and all were read."""
        for prompt in prompts:
            waiting.append(bench.request(prompt))
            queue.push(waiting[-1].queued)
            tracker.add(waiting[-1])
        tracker.refresh()
        tracker.refresh()
        queue.check_integrity()
        return [request.queued.weight for request in waiting[:4]]

    with_header = [3.0, 3.0, 1.5, 1.5]
    assert weights(*documents * 7, *documents[:3]) == with_header
    assert weights(documents[3]) == [3.0, 3.0, 1.0, 1.0]
    assert {request.queued.weight for request in waiting} == {3.0, 1.0}
    assert weights([7] * 45) == with_header
    assert {request.queued.weight for request in waiting[:-1]} == {3.0, 1.5}


async def test_so_many_namespaces_have_headers(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixd.serving.dispatch.tracker._HEADERS", 0)
    _, tracker, _ = await watched(make_bench, 3, rows_a_refresh=1000)
    assert not tracker._headers


@pytest.mark.parametrize("tokens", [25, 41, 4 * 41 + 1])
async def test_marks_are_the_ends_of_quarters(make_bench: MakeBench, tokens: int) -> None:
    bench = await make_bench(64, cpu_slots=64)
    queue = RequestQueue(create_policy("fcfs"), 1)
    tracker = PrefixTracker(bench.cache, queue)
    await bench.cached(range(tokens))
    request = bench.request(range(tokens))
    queue.push(request.queued)
    tracker.add(request)
    blocks = len(request.found)
    assert blocks == tokens // BLOCK
    ends = [-(-blocks * quarter // 4) - 1 for quarter in (1, 2, 3, 4)]
    assert tracker._marks[0].tolist() == request.found[ends].tolist()


async def test_a_block_between_marks_that_moved_is_seen_in_turn(make_bench: MakeBench) -> None:
    """60 rows, 12 a refresh: after 5 of them every request was read."""
    bench, tracker, waiting = await watched(make_bench, 10, rows_a_refresh=12, blocks=6)
    for last in (9, 0, 4):
        drop(bench, waiting[last], 0)  # the marks are 1, 2, 4 and 5
        before = on_disk(waiting)
        for _ in range(5):
            tracker.refresh()
        assert on_disk(waiting) == before + 1
        assert waiting[last].farthest is Distance.DISK


async def test_a_change_during_a_turn_begins_another(make_bench: MakeBench) -> None:
    bench, tracker, waiting = await watched(make_bench, 10, rows_a_refresh=8)
    drop(bench, waiting[9], 1)
    for _ in range(4):
        tracker.refresh()
    drop(bench, waiting[0], 2)  # it has been read in this turn
    for _ in range(5):
        tracker.refresh()
    assert on_disk(waiting) == 2
    assert tracker._unread_slots <= 0


async def test_many_changes_at_once_are_looked_up_over_several_refreshes(make_bench: MakeBench) -> None:
    bench, tracker, waiting = await watched(make_bench, 10, rows_a_refresh=4)
    for request in waiting:
        drop(bench, request, 3)
    for refresh in range(1, 11):
        tracker.refresh()
        assert on_disk(waiting) == refresh, "one request costs more than 4 rows"
    assert not tracker._changed


@pytest.mark.parametrize(("rows_a_refresh", "estimated"), [(1, 1), (8, 2), (11, 2), (100, 10)])
async def test_a_refresh_estimates_requests_of_so_many_rows_in_turn(
    make_bench: MakeBench, rows_a_refresh: int, estimated: int
) -> None:
    """4 rows each; one at least."""
    asked: list[int] = []

    def ready_s(request: Request) -> float:
        asked.append(request.id)
        return 1.0

    bench = await make_bench(8, cpu_slots=40)
    queue = RequestQueue(create_policy("shortest-ready"), 100)
    tracker = PrefixTracker(bench.cache, queue, rows_a_refresh=rows_a_refresh, ready_s=ready_s)
    waiting = []
    for number in range(10):
        tokens = range(100 * number, 100 * number + 25)
        await bench.cached(tokens[:17])
        waiting.append(bench.request(tokens))
        queue.push(waiting[-1].queued)
        tracker.add(waiting[-1])
    while tracker._unread_slots > 0:
        tracker.refresh()
    tracker._next_estimate = 0
    asked.clear()
    for refresh in range(1, 10 // estimated + 1):
        tracker.refresh()
        assert asked == [request.id for request in waiting][: refresh * estimated]


async def test_a_prefix_that_grew_is_seen(make_bench: MakeBench) -> None:
    bench, tracker, waiting = await watched(make_bench, 10, rows_a_refresh=1000)
    await bench.cached(range(300, 325))  # the third one's, all of it
    tracker.refresh()
    assert [len(request.found) for request in waiting] == [4, 4, 4, 6, 4, 4, 4, 4, 4, 4]
    assert waiting[3].queued.cached_tokens == 24


@pytest.mark.parametrize("how", ["stage", "add"])
async def test_what_is_not_watched_is_left_alone(make_bench: MakeBench, how: str) -> None:
    bench, tracker, waiting = await watched(make_bench, 3, rows_a_refresh=1000)
    tracker.remove(waiting[1])
    tracker.remove(waiting[1])  # twice is once
    drop(bench, waiting[1], 3)
    tracker.refresh()
    assert not tracker.verify(waiting[1])
    assert on_disk(waiting) == 0
    if how == "add":
        tracker.add(waiting[1])
        assert on_disk(waiting) == 1


async def test_verified_rows_are_exact(make_bench: MakeBench) -> None:
    bench, tracker, waiting = await watched(make_bench, 2, rows_a_refresh=1)
    request = waiting[0]
    gone = request.found[2:]
    assert not tracker.verify(request)
    await forget_blocks(bench.cache.mover, request.trie, gone[::-1].tolist())
    assert tracker.verify(request)
    assert len(request.found) == 2
    assert np.array_equal(request.generations, request.trie.generation[request.found])
    assert not tracker.verify(request)
    assert request.trie.nearest[request.found].max() < DISK


async def test_without_caching_nothing_is_watched(make_bench: MakeBench) -> None:
    bench = await make_bench(8)
    await bench.cached(range(17))
    queue = RequestQueue(create_policy("fcfs"), 100)
    tracker = PrefixTracker(bench.cache, queue, caching=False)
    request = bench.request(range(17))
    queue.push(request.queued)
    tracker.add(request)
    tracker.refresh()
    assert not tracker.verify(request)
    assert not tracker.has_grown(request)
    assert (len(request.found), request.farthest, request.queued.weight) == (0, Distance.NONE, 1.0)
