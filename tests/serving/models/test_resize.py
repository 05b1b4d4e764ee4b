"""Frames come and go under a dispatcher; the test is the worker's supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from prefixd.base.errors import ExhaustedError, InvalidArgumentError, PreconditionError, UnavailableError
from prefixd.base.tenancy.tenants import Quota, TierQuota
from prefixd.cache import check_integrity
from prefixd.cache.index.trie import TIERS
from prefixd.observability.eviction_journal import Cause, Reason
from prefixd.serving.dispatch import worker_results
from prefixd.serving.models import tier_resize
from prefixd.serving.models.tier_resize import ResizeProgress, TierResize
from prefixd.serving.request.request import Request
from prefixd.serving.request.states import RequestState
from prefixd_swap import NewFrames, OutOfMemoryError
from tests.serving.bench import Bench, Supervisor
from tests.serving.fake_worker import GEOMETRY
from tests.tries import match_rows
from tests.waiting import until

FRAME = GEOMETRY.block_bytes


@pytest.fixture
def resizing(make_bench: Callable[..., Awaitable[Bench]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`await resizing(frames, ...)`: a bench, its supervisor and what resizes it, four frames a slice."""
    monkeypatch.setattr(tier_resize, "_SLICE_FRAMES", 4)
    monkeypatch.setattr(tier_resize, "_RETRY_S", 0.001)
    monkeypatch.setattr(tier_resize, "_PROGRESS_S", 0.001)

    async def make(frames: int, **options: Any) -> tuple[Bench, Supervisor, TierResize]:
        bench = await make_bench(frames, **options)
        supervisor = Supervisor(bench)
        return bench, supervisor, supervisor.tier_resize()

    return make


async def to(resize: TierResize, frames: int, wait_s: float = 1.0) -> ResizeProgress:
    async for progress in resize.resize(frames * FRAME, wait_s):
        last = progress
    assert last.done
    return last


async def test_a_slice_at_a_time(resizing: Any) -> None:
    """What leaves is gone from the tier before the worker is told; what comes is told before it can be allocated."""
    bench, supervisor, resize = await resizing(16)
    pool = bench.cache.tiers.frames
    done = await to(resize, 6)
    assert (done.before_bytes, done.nbytes, done.unfinished) == (16 * FRAME, 6 * FRAME, "")
    assert [(what, len(frames), capacity) for what, frames, capacity in supervisor.told] == [
        ("shrink", 4, 12),
        ("shrink", 4, 8),
        ("shrink", 2, 6),
    ]
    assert (pool.capacity, pool.lasting, pool.memory.chunk_count) == (6, 6, 6)
    supervisor.told.clear()
    assert (await to(resize, 13)).nbytes == 13 * FRAME
    assert [(what, len(frames), capacity) for what, frames, capacity in supervisor.told] == [
        ("grow", 4, 6),
        ("grow", 3, 10),
    ]
    check_integrity(bench.cache)


async def test_cached_blocks_go_down_and_held_ones_stay(resizing: Any) -> None:
    bench, _, resize = await resizing(16)
    old, running = bench.submit(range(24)), bench.submit(range(100, 124), max_tokens=4)
    await bench.running(old)
    await bench.finish(old)
    await bench.running(running)
    bench.step()
    done = await to(resize, 7)
    assert (done.nbytes, done.unfinished) == (7 * FRAME, "")
    assert done.evicted_blocks == done.demoted_blocks == 6
    await bench.finish(running)
    again = bench.submit(range(24))
    run = await bench.running(again)
    assert run.start.cached_blocks == 5, "found a tier below"
    await bench.finish(again)


async def test_the_journal_says_that_blocks_left_as_the_tier_shrank(resizing: Any) -> None:
    bench, _, resize = await resizing(16, cpu_slots=1)
    await bench.finish(bench.submit(range(48)))
    trie = bench.cache.trie(bench.namespace)
    before = {trie.key(row).hex() for row in np.flatnonzero(trie.nearest[: trie.rows] < TIERS)}
    await to(resize, 7)
    gone = before - {trie.key(row).hex() for row in np.flatnonzero(trie.nearest[: trie.rows] < TIERS)}
    assert gone
    keys = np.frombuffer(bytes.fromhex("".join(gone)), np.uint8).reshape(-1, 16)
    removals = await bench.cache.placement.evictions.find(keys, 100.0)
    assert {each and each.cause for each in removals} == {Cause(Reason.RESIZE, by="tier resize")}


async def test_a_request_that_runs_keeps_what_it_may_need(resizing: Any) -> None:
    """Until it has ended; meanwhile no other begins that would not fit the smaller tier."""
    bench, _, resize = await resizing(16)
    large = bench.submit(range(24), max_tokens=16)  # 10 blocks
    await bench.running(large)
    bench.step()
    shrinking = asyncio.create_task(to(resize, 5, wait_s=1e9))
    await until(lambda: bench.cache.tiers.frames.capacity == 10)
    too_large = bench.submit(range(200, 224))  # 7 blocks: more than 5, but not more than there are
    small = bench.submit(range(300, 304))
    await bench.quiet()
    assert not shrinking.done() and large.state is RequestState.RUNNING
    await bench.finish(large)
    done = await shrinking
    assert (done.nbytes, done.unfinished) == (5 * FRAME, "")
    await bench.finish(small, too_large)
    assert [type(request.events._queue[-1]).__name__ for request in (large, small)] == ["Ended", "Ended"]


async def test_who_waits_and_can_never_fit_is_told(resizing: Any) -> None:
    bench, _, resize = await resizing(16, max_running=1)
    first = bench.submit(range(8), max_tokens=4)
    await bench.running(first)
    too_large, small = bench.submit(range(200, 240)), bench.submit(range(300, 304))
    assert (await to(resize, 5)).unfinished == ""
    await bench.finish(first, small)
    error = too_large.events.get_nowait()
    assert isinstance(error, ExhaustedError)
    assert (
        "44 tokens, need up to 45056 bytes" in str(error)
        and "resized to 20480" in str(error)
        and too_large.state is RequestState.ENDED
    )


async def test_what_is_held_too_long_is_named(resizing: Any) -> None:
    bench, _, resize = await resizing(16)
    request = bench.submit(range(24), max_tokens=16)
    await bench.running(request)
    bench.step()
    done = await to(resize, 3, wait_s=0.0)
    assert done.nbytes == 10 * FRAME and "may come to need 10" in done.unfinished and request.name in done.unfinished
    assert bench.cache.tiers.frames.lasting == 10
    await bench.finish(request)


async def test_one_at_a_time_and_ended_between_two_slices(resizing: Any) -> None:
    bench, supervisor, resize = await resizing(16)
    supervisor.lets_go.clear()
    steps = resize.resize(4 * FRAME, 1.0)
    await anext(steps)
    await until(lambda: supervisor.told)
    with pytest.raises(PreconditionError, match=f"to {4 * FRAME} bytes now"):
        await anext(resize.resize(8 * FRAME, 1.0))
    await steps.aclose()
    with pytest.raises(PreconditionError):  # its slice is still under way
        await anext(resize.resize(8 * FRAME, 1.0))
    supervisor.lets_go.set()
    await until(lambda: not resize._begun)
    frames = bench.cache.tiers.frames
    assert frames.lasting == frames.memory.chunk_count == 12, "it has the size that it has come to"
    assert (await to(resize, 16)).nbytes == 16 * FRAME


async def test_impossible_sizes_change_nothing(resizing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, supervisor, resize = await resizing(8)
    await to(resize, 6)
    supervisor.told.clear()
    with pytest.raises(InvalidArgumentError, match=f"{2 * FRAME - 1} bytes hold 1 frames.*give {2 * FRAME} or more"):
        await anext(resize.resize(2 * FRAME - 1, 1.0))
    with pytest.raises(ExhaustedError, match=f"give at most {8 * FRAME}"):
        await to(resize, 9)
    monkeypatch.setattr(type(bench.cache.tiers.frames.memory), "available_bytes", lambda _: FRAME)
    with pytest.raises(ExhaustedError, match=f"has {FRAME} bytes free; give at most {7 * FRAME}"):
        await to(resize, 8)
    assert not supervisor.told and bench.cache.tiers.frames.lasting == 6
    assert (await to(resize, 7)).nbytes == 7 * FRAME


async def test_a_device_that_fills_up_meanwhile(resizing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, _, resize = await resizing(16)
    await to(resize, 4)
    pool = bench.cache.tiers.frames
    create = pool.create

    def full_after_one(count: int) -> NewFrames:
        if pool.capacity > 4:
            raise OutOfMemoryError("the device is full; make the tier smaller")
        return create(count)

    monkeypatch.setattr(pool, "create", full_after_one)
    done = await to(resize, 16)
    assert (done.nbytes, done.unfinished) == (8 * FRAME, "the device is full; make the tier smaller")
    check_integrity(bench.cache)


@pytest.mark.parametrize("next_frames", [6, 16])
async def test_memory_that_could_not_be_given_back_goes_with_the_next_resize(
    resizing: Any, monkeypatch: pytest.MonkeyPatch, next_frames: int
) -> None:
    bench, _, resize = await resizing(16)
    pool = bench.cache.tiers.frames
    with monkeypatch.context() as broken:

        def fail(offset: int, nbytes: int) -> None:
            raise OutOfMemoryError("too many mappings; raise vm.max_map_count")

        broken.setattr(pool._window, "unmap", fail)
        assert "max_map_count" in (await to(resize, 6)).unfinished
    assert (pool.capacity, pool.memory.chunk_count) == (12, 16)
    check_integrity(bench.cache)
    assert (await to(resize, next_frames)).unfinished == ""
    assert pool.memory.chunk_count == next_frames


async def test_the_end_of_the_daemon_ends_a_resize(resizing: Any) -> None:
    _bench, supervisor, resize = await resizing(16)
    supervisor.lets_go.clear()
    shrinking = asyncio.create_task(to(resize, 4))
    await until(lambda: supervisor.told)
    resize.interrupt()
    supervisor.lets_go.set()
    done = await shrinking
    assert (done.nbytes, done.unfinished) == (12 * FRAME, "it was ended")
    with pytest.raises(UnavailableError, match="the daemon is ending"):
        await anext(resize.resize(4 * FRAME, 1.0))


async def test_what_a_dead_worker_ran_keeps_the_tier_as_large_as_it_needs(
    resizing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told that it fits, and has told its caller tokens."""
    bench, _, resize = await resizing(24)
    monkeypatch.setattr(worker_results, "_INTERRUPTED_ROWS", 1)  # one request a callback
    small, large = bench.submit(range(8)), bench.submit(range(100, 124), max_tokens=16)
    await bench.running(large)
    bench.step()
    bench.die()
    assert (
        large.id in bench.dispatcher.requests.interrupted
        and bench.dispatcher.requests.begun_frames() == large.most_blocks == 10
    )
    await until(lambda: large.state is RequestState.WAITING)
    shrinking = asyncio.create_task(to(resize, 5, wait_s=1e9))
    await until(lambda: bench.cache.tiers.frames.capacity == 10)
    bench.dispatcher.on_ready()
    await bench.finish(small, large)
    assert [request.events._queue[-1].__class__.__name__ for request in (small, large)] == ["Ended", "Ended"]
    assert (await shrinking).nbytes == 5 * FRAME


async def test_who_would_not_fit_the_smaller_tier_is_not_handed_over_meanwhile(resizing: Any) -> None:
    """It waited for frames when the resize began; with fewer than it may need it would keep all others waiting."""
    bench, _, resize = await resizing(16)
    old = bench.submit(range(60), max_tokens=1)
    await bench.running(old)
    await bench.finish(old)
    bench.engine.open.clear()
    large = bench.submit(range(200, 224), max_tokens=24)  # 7 blocks at first, 12 at the end
    await until(lambda: bench.engine.waiting)
    shrinking = asyncio.create_task(to(resize, 5, wait_s=1e9))
    await until(lambda: bench.cache.tiers.frames.lasting == 5)
    bench.engine.open.set()
    small = bench.submit(range(300, 304))
    await bench.finish(large, small)
    assert (await shrinking).nbytes == 5 * FRAME
    error = large.events.get_nowait()
    assert isinstance(error, ExhaustedError) and "48 tokens" in str(error)


async def test_a_slow_tier_below_does_not_hold_a_resize_for_ever(resizing: Any) -> None:
    bench, _, resize = await resizing(16)
    old = bench.submit(range(60), max_tokens=1)
    await bench.running(old)
    await bench.finish(old)
    bench.engine.open.clear()
    shrinking = asyncio.create_task(to(resize, 4, wait_s=5.0))
    await until(lambda: bench.engine.waiting)
    bench.now += 6
    done = await shrinking
    assert done.nbytes > 4 * FRAME and "eviction" in done.unfinished
    steps = resize.resize(4 * FRAME, 1e9)
    await anext(steps)
    await steps.aclose()
    await until(lambda: not resize._begun)  # hanging up ends it, though the copies have not ended
    bench.engine.open.set()
    await bench.quiet()
    check_integrity(bench.cache)
    assert (await to(resize, 4)).nbytes == 4 * FRAME


async def test_a_request_that_alone_gets_no_frame_is_ended(resizing: Any) -> None:
    """Pinned blocks that have nowhere to go hold the tier: it would wait for ever, and all others behind it."""
    bench, _, _ = await resizing(12, cpu_slots=2)

    async def pinned(tokens: range) -> None:
        request = bench.submit(tokens, max_tokens=1)
        await bench.running(request)
        await bench.finish(request)
        trie = bench.cache.trie(bench.namespace)
        trie.pinned[match_rows(trie, bench.namespace.root, request.chain)] = True

    async def ended(request: Request) -> str:
        await until(lambda: bench.dispatcher._supply._lacking == (request.id, bench.now))
        bench.now += 31
        await until(lambda: request.state in (RequestState.CANCELLING, RequestState.ENDED))
        bench.answer_cancels()
        await bench.quiet()
        *_, error = request.events._queue
        assert isinstance(error, ExhaustedError)
        return str(error)

    await pinned(range(24))
    starved = bench.submit(range(200, 216), max_tokens=24)  # 5 blocks at first, 10 at the end
    run = await bench.running(starved)
    # A frame may come only with the next look: it lacks one for good when it has the 8 that are not pinned.
    await until(lambda: bench.step() or (len(run.frames) == 8 and starved.state is RequestState.STARVED))
    behind = bench.submit(range(300, 320))
    assert "12 of 12 frames of the gpu tier are held, 4 blocks are pinned" in await ended(starved)
    await bench.finish(behind)
    await pinned(range(300, 320))
    assert "9 blocks are pinned" in await ended(bench.submit(range(400, 430)))


async def test_it_stays_large_enough_for_what_tenants_are_guaranteed(resizing: Any) -> None:
    bench, _, resize = await resizing(16)
    tenant = bench.cache.tenants.known("a")
    tenant.quota = Quota(tiers=(TierQuota(9 * FRAME), TierQuota(), TierQuota()))
    with pytest.raises(InvalidArgumentError, match=f"guaranteed {9 * FRAME} bytes of the gpu tier"):
        await to(resize, 8)
    assert (await to(resize, 9)).nbytes == 9 * FRAME


async def test_frames_that_a_worker_was_handed_stay_while_it_loads(resizing: Any) -> None:
    """It reads no message. Nobody else waits for it: the tier grows, and requests have all frames."""
    bench, supervisor, resize = await resizing(16)
    await to(resize, 12)
    old = bench.submit(range(40), max_tokens=1)
    await bench.running(old)
    await bench.finish(old)
    bench.engine.open.clear()
    shrinking = asyncio.create_task(to(resize, 4, wait_s=5.0))
    await until(lambda: bench.engine.waiting)
    supervisor.load()  # the worker has died while room was made, and its successor was handed the frames
    supervisor.told.clear()
    bench.engine.open.set()
    pool = bench.cache.tiers.frames
    await until(lambda: pool.lasting == 12)
    await bench.quiet()
    check_integrity(bench.cache)
    bench.now += 6
    done = await shrinking
    assert (done.nbytes, supervisor.told) == (12 * FRAME, [])
    assert done.unfinished.startswith("the worker loads its model, and lets go of no frame until then")
    assert (await to(resize, 16)).nbytes == 16 * FRAME
    supervisor.become_ready()
    assert (await to(resize, 4)).nbytes == 4 * FRAME
    supervisor.load(coming_bytes=1 << 60)
    with pytest.raises(
        ExhaustedError, match=f"beside {1 << 60} for models that are being loaded; give at most {4 * FRAME}"
    ):
        await to(resize, 5)
