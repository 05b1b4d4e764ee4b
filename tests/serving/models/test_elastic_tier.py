"""The tier grows and shrinks under a dispatcher; the test is the worker's supervisor, and the device."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from prefixd.base.errors import ExhaustedError, InvalidArgumentError, PreconditionError
from prefixd.base.tenancy.tenants import Quota, TierQuota
from prefixd.cache import check_integrity
from prefixd.server.figures.tenant_figures import check_tiers_hold
from prefixd.serving.models import elastic_tier, tier_resize
from prefixd.serving.models.elastic_size import Bounds
from prefixd.serving.models.elastic_tier import ElasticTier
from prefixd.serving.request.request import Request
from prefixd.serving.request.states import RequestState
from prefixd_swap import FramePool, NewFrames, OutOfMemoryError
from tests.serving.bench import Bench, Events, Expected, Supervisor
from tests.serving.fake_worker import GEOMETRY
from tests.waiting import WAIT_S, until

FRAME = GEOMETRY.block_bytes
LEAST, MOST = 4, 24


@dataclass
class Elastic:
    """A bench whose tier breathes between 4 and 24 frames on a device of which others have `others` frames."""

    bench: Bench
    tier: ElasticTier
    resize: tier_resize.TierResize
    supervisor: Supervisor
    device_frames: int
    others: int = 0
    looks: int = 0

    @property
    def pool(self) -> FramePool:
        return self.bench.cache.tiers.frames

    def device_bytes(self, pool: FramePool) -> tuple[int, int]:
        self.looks += 1
        return (self.device_frames - self.others - pool.capacity) * FRAME, self.device_frames * FRAME

    async def look(self) -> None:
        """Returns when the tier, which has more than its least, has looked at the load as it is now."""
        looks = self.looks
        await until(lambda: self.looks > looks + 2)

    async def pass_idle_s(self) -> None:
        """Passes more than the time after which a tier without requests is idle."""
        await self.look()
        self.bench.now += 3.1

    async def resize_to(self, frames: int) -> tier_resize.ResizeProgress:
        async for progress in self.resize.resize(frames * FRAME, 1.0):
            last = progress
        return last


@pytest.fixture
def elastic(make_bench: Callable[..., Awaitable[Bench]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`async with elastic(...) as e`: reserve and device in frames, the rest as for a bench."""
    monkeypatch.setattr(tier_resize, "_SLICE_FRAMES", 4)
    monkeypatch.setattr(tier_resize, "_RETRY_S", 0.001)
    monkeypatch.setattr(elastic_tier, "_RETRY_S", 0.001)
    monkeypatch.setattr(elastic_tier, "LOOK_S", 0.005)

    @asynccontextmanager
    async def make(reserve: int = 0, device: int = 100, **options: Any) -> AsyncIterator[Elastic]:
        bench = await make_bench(MOST, **options)
        supervisor = Supervisor(bench)
        resize = supervisor.tier_resize()
        async for _ in resize.resize(LEAST * FRAME, 1.0):
            pass
        supervisor.told.clear()
        made: Elastic
        tier = ElasticTier(
            bench.cache,
            resize,
            bench.dispatcher.context.share,
            [bench.dispatcher],
            lambda: bench.now,
            lambda pool: made.device_bytes(pool),
        )
        made = Elastic(bench, tier, resize, supervisor, device)

        async def pool() -> tuple[FramePool, Bounds]:
            made.pool.let_grow(MOST)
            return made.pool, Bounds(LEAST, MOST, reserve, idle_s=3.0)

        task = tier.start(pool())
        await until(lambda: tier.figures is not None)
        try:
            yield made
        finally:
            await tier.stop()
            await resize.stop()
            task.result()
        check_integrity(bench.cache)

    return make


async def test_it_grows_for_requests_and_an_idle_one_has_its_least(
    elastic: Any, expected: Expected, events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with elastic() as e:
        bench = e.bench
        requests = [bench.submit(range(100 * n, 100 * n + 16), max_tokens=4) for n in range(3)]  # 5 blocks each
        for request in requests:
            await bench.running(request)
        assert e.pool.capacity >= 15 and [what for what, *_ in e.supervisor.told] == ["grow"] * len(e.supervisor.told)
        await bench.finish(*requests)
        assert bench.cache.tiers.counters[0].evicted == 0, "it grew before anything had to go"
        assert e.tier.figures.reason == "requests need it"
        bench.now += 2.9
        await bench.quiet()
        assert e.pool.capacity >= 15
        bench.now += 0.2
        await until(lambda: e.tier.figures.reason == "no request waits or runs")
        assert e.pool.capacity == e.pool.memory.chunk_count == LEAST
        assert bench.cache.tiers.counters[0].demoted == 12 - LEAST
        assert e.tier.figures.target_bytes == LEAST * FRAME and e.tier.figures.most_bytes == MOST * FRAME
        again = bench.submit(range(16), max_tokens=4)
        assert (await bench.running(again)).start.cached_blocks == 3, "found in the tier below"
        await bench.finish(again)
        for first, request in zip((0, 100, 200, 0), (*requests, again), strict=True):
            assert events(request) == (expected(range(first, first + 16), 4), "length")
    changes = [record.getMessage() for record in caplog.records if "instead of" in record.getMessage()]
    assert "instead of 16.0 KiB: requests need it" in changes[0] and any(
        "has 16.0 KiB instead of" in line for line in changes
    )


async def test_cached_blocks_stay_while_the_device_has_memory_and_go_when_it_has_none(elastic: Any) -> None:
    async with elastic(device=40, reserve=8) as e:
        bench = e.bench
        for number in range(4):
            request = bench.submit(range(100 * number, 100 * number + 12), max_tokens=2)  # 3 full blocks of 4
            await bench.running(request)
            await bench.finish(request)
            bench.now += 0.1
        assert bench.cache.tiers.counters[0].evicted == 0 and e.pool.capacity >= 12
        assert e.tier.figures.reason in ("to keep cached blocks", "requests need it")
        bench.now += 1.5  # not idle yet
        e.others = 40 - e.pool.capacity - 4  # 4 frames are free, and 8 are to be
        before = e.pool.capacity
        await until(lambda: e.pool.capacity <= before - 6)
        await until(lambda: e.tier.figures.reason.startswith("less than gpu.reserve_bytes"))
        assert bench.cache.tiers.counters[0].evicted > 0


async def test_a_request_that_fits_the_most_waits_for_the_device(elastic: Any) -> None:
    async with elastic(device=40, reserve=4) as e:
        bench = e.bench
        e.others = 40 - LEAST - 1
        large = bench.submit(range(40), max_tokens=8)  # 12 blocks
        await bench.quiet()
        assert large.state is RequestState.WAITING and e.pool.capacity == LEAST
        await until(lambda: e.tier.figures.target_bytes == 12 * FRAME)
        bench.now += 20
        e.others = 0
        await until(lambda: large.state is RequestState.RUNNING)
        assert e.pool.capacity >= 12
        await bench.finish(large)


async def test_a_request_for_which_the_device_has_no_memory_is_passed_then_told(elastic: Any) -> None:
    async with elastic(device=40, reserve=4, max_running=1, look_ahead=0) as e:
        bench, share = e.bench, e.bench.dispatcher.context.share
        e.others = 40 - LEAST - 1
        large = [bench.submit(range(40), max_tokens=8), bench.submit(range(200, 240), max_tokens=8)]
        small = [bench.submit(range(6), max_tokens=2), bench.submit(range(300, 308), max_tokens=2)]
        await bench.finish(*small)  # the first one lacks the block that a large one lacks, too
        assert share.short and share.refused_s == bench.now
        assert [each.state for each in large] == [RequestState.WAITING] * 2
        bench.now += 29
        large.append(bench.submit(range(400, 440), max_tokens=8))
        await bench.finish(bench.submit(range(500, 504), max_tokens=2))
        bench.now += 2
        await until(lambda: large[0].state is large[1].state is RequestState.ENDED)
        error = large[0].events.get_nowait()
        assert isinstance(error, ExhaustedError) and f"need up to {12 * FRAME} bytes of the GPU tier, which" in str(
            error
        )
        assert f"which has {LEAST * FRAME} and may have {MOST * FRAME}, but cpu gave no more for 30 s" in str(error)
        await bench.quiet()
        assert large[2].state is RequestState.WAITING, "it has waited for 2 s"
        e.others = 0
        await bench.finish(large[2])
        await until(lambda: not share.short and share.refused_s is None)


async def test_a_device_that_gives_memory_little_by_little_does_not_refuse_it(elastic: Any) -> None:
    async with elastic(device=40) as e:
        bench, share = e.bench, e.bench.dispatcher.context.share
        e.others = 40 - LEAST
        large = bench.submit(range(40), max_tokens=8)  # 12 blocks
        await until(lambda: share.refused_s == bench.now)
        bench.now += 29
        e.others -= 2
        await until(lambda: share.refused_s == bench.now)
        assert e.pool.capacity == LEAST + 2
        bench.now += 2
        await bench.quiet()
        assert large.state is RequestState.WAITING
        bench.now += 31
        await until(lambda: large.state is RequestState.ENDED)


async def test_a_request_that_others_pass_runs_when_memory_comes(elastic: Any) -> None:
    async with elastic(device=40, reserve=4, max_running=2) as e:
        bench, numbers = e.bench, iter(range(100, 100_000, 100))
        e.others = 40 - LEAST - 1
        large, small = bench.submit(range(40), max_tokens=8), list[Request]()

        async def work() -> None:
            while sum(each.state is not RequestState.ENDED for each in small) < 4:
                begin = next(numbers)
                small.append(bench.submit(range(begin, begin + 6), max_tokens=2))
            bench.answer_cancels()
            bench.step()
            await asyncio.sleep(0.001)

        while len(small) < 20:
            await work()
        assert large.state is RequestState.WAITING
        e.others = 0
        async with asyncio.timeout(WAIT_S):
            while large.state is not RequestState.ENDED:
                await work()
        await bench.finish(*small)


async def test_what_a_passed_request_waits_for_is_not_given_back(elastic: Any) -> None:
    async with elastic(device=40, reserve=8, max_running=1) as e:
        bench = e.bench
        e.others = 40 - LEAST - 1
        large, small = bench.submit(range(40), max_tokens=8), bench.submit(range(100, 104), max_tokens=2)
        await bench.running(small)
        e.others = 0
        await until(lambda: e.pool.capacity >= 12)
        await until(lambda: bench.dispatcher.context.share.begins_frames == 12)
        e.others = 40 - e.pool.capacity - 2
        bench.now += 5
        await e.look()
        assert large.state is not RequestState.RUNNING and e.pool.lasting >= 12
        await bench.finish(small)
        await bench.running(large)
        await bench.finish(large)


async def test_what_others_are_guaranteed_counts_in_what_a_request_needs(elastic: Any) -> None:
    async with elastic(device=40, reserve=4) as e:
        bench = e.bench
        e.others = 40 - LEAST - 1
        bench.cache.tenants.known("other").quota = Quota(tiers=(TierQuota(3 * FRAME), TierQuota(), TierQuota()))
        large, small = bench.submit(range(8), max_tokens=2), bench.submit(range(100, 102), max_tokens=2)
        await bench.finish(small)
        bench.now += 31
        await until(lambda: large.state is RequestState.ENDED)
        error = f"up to {3 * FRAME} bytes of the GPU tier beside {3 * FRAME} that are guaranteed to other tenants"
        assert error in str(large.events.get_nowait())


async def test_it_grows_for_a_tenant_at_its_limit_by_what_it_gets_more(elastic: Any) -> None:
    """The tenant loses blocks of its own as well."""
    async with elastic() as e:
        bench, slots, tier = e.bench, e.bench.cache.mover.slots, e.bench.cache.tiers.compute
        await bench.finish(bench.submit(range(16), max_tokens=1))
        await e.pass_idle_s()
        await until(lambda: e.pool.capacity == LEAST == tier.used_bytes // FRAME)
        bench.dispatcher.context.share.next_turn()  # as if a request had come: the tier is not idle
        bench.cache.tenants.default.quota = Quota(tiers=(TierQuota(0, 10 * FRAME), TierQuota(), TierQuota()))
        others = await slots.take_frames(2, tenant=bench.cache.tenants.known("other"))
        frames = await slots.take_frames(8)
        assert others and frames and tier.used_bytes == 12 * FRAME
        assert bench.cache.tiers.counters[0].evicted == 2
        tier.free([*others, *frames])


async def test_a_worker_that_loads_holds_nobody_up(elastic: Any) -> None:
    """The tier grows, but not into the memory of the model that is being loaded."""
    async with elastic(device=40, reserve=4) as e:
        bench, share = e.bench, e.bench.dispatcher.context.share
        e.supervisor.load(coming_bytes=14 * FRAME)
        first = bench.submit(range(40), max_tokens=8)  # 12 blocks
        await bench.running(first)
        await bench.finish(first)
        e.others = 40 - e.pool.capacity - 16
        large = bench.submit(range(200, 256), max_tokens=8)  # 16 blocks
        await until(lambda: share.short)
        size = e.pool.capacity
        bench.now += 40
        await bench.finish(bench.submit(range(300, 304), max_tokens=2))
        assert large.state is RequestState.WAITING and share.refused_s is None and e.pool.capacity == size
        e.supervisor.become_ready()
        await until(lambda: large.state is RequestState.RUNNING)
        await bench.finish(large)


async def test_a_worker_that_loads_keeps_the_frames_that_it_was_handed(elastic: Any) -> None:
    async with elastic() as e:
        bench = e.bench
        await bench.finish(bench.submit(range(60), max_tokens=4))
        size = e.pool.capacity
        e.supervisor.load()
        await e.pass_idle_s()
        await until(lambda: e.tier.figures.target_bytes == LEAST * FRAME)
        await bench.finish(bench.submit(range(200, 208), max_tokens=2))
        assert e.pool.capacity == e.pool.lasting >= size
        e.supervisor.become_ready()
        await e.pass_idle_s()
        await until(lambda: e.pool.capacity == LEAST)


async def test_it_does_not_grow_into_memory_that_others_take_meanwhile(
    elastic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with elastic(device=60, reserve=8) as e:
        bench, create = e.bench, e.pool.create

        def create_beside_another(count: int) -> NewFrames:
            e.others += 10
            new: NewFrames = create(count)
            return new

        monkeypatch.setattr(e.pool, "create", create_beside_another)
        large = bench.submit(range(92), max_tokens=4)  # 24 blocks
        await until(lambda: e.pool.capacity == 20)
        await bench.quiet()
        assert large.state is RequestState.WAITING and e.pool.capacity == 20, "fewer than half of the reserve are free"
        monkeypatch.setattr(e.pool, "create", create)
        e.others = 0
        bench.now += 1.1
        await until(lambda: large.state is RequestState.RUNNING)
        await bench.finish(large)


async def test_memory_that_could_not_be_given_back_is_tried_again(
    elastic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with elastic() as e:
        bench = e.bench
        await bench.finish(bench.submit(range(28), max_tokens=4))  # 8 blocks
        assert e.pool.capacity == 8
        with monkeypatch.context() as broken:

            def fail(offset: int, nbytes: int) -> None:
                raise OutOfMemoryError("too many mappings; raise vm.max_map_count")

            broken.setattr(e.pool._window, "unmap", fail)
            await e.pass_idle_s()
            await until(lambda: e.pool.capacity == LEAST)
            await e.look()
            assert e.pool.memory.chunk_count == 8
        await until(lambda: e.pool.memory.chunk_count == LEAST)


async def test_a_request_that_has_waited_for_a_new_worker_has_not_waited_for_frames(elastic: Any) -> None:
    async with elastic(device=40, reserve=4) as e:
        bench = e.bench
        e.others = 40 - LEAST - 1
        large = bench.submit(range(40), max_tokens=8)
        await until(lambda: e.tier.figures.target_bytes == 12 * FRAME)
        bench.dispatcher.on_death("killed", False)
        bench.now += 40
        bench.dispatcher.on_ready()
        await bench.quiet()
        assert large.state is RequestState.WAITING
        e.others = 0
        await until(lambda: large.state is RequestState.RUNNING)
        await bench.finish(large)


async def test_what_is_ahead_of_its_turn_makes_nothing_grow(elastic: Any) -> None:
    async with elastic(max_running=1) as e:
        bench = e.bench
        await bench.cached(range(100, 132))
        running = bench.submit(range(8), max_tokens=4)
        await bench.running(running)
        size = e.pool.capacity
        ahead = bench.submit(range(100, 133), max_tokens=2)
        await bench.quiet()
        assert e.pool.capacity == size and ahead.state is not RequestState.RUNNING
        await bench.finish(running, ahead)


async def test_it_grows_by_what_other_tenants_are_guaranteed(elastic: Any) -> None:
    async with elastic() as e:
        bench = e.bench
        bench.cache.tenants.known("other").quota = Quota(tiers=(TierQuota(4 * FRAME), TierQuota(), TierQuota()))
        request = bench.submit(range(8), max_tokens=2)  # 3 blocks
        await bench.running(request)
        assert e.pool.capacity >= 4 + 3
        await bench.finish(request)


async def test_guarantees_have_to_fit_its_least(elastic: Any) -> None:
    async with elastic(reserve=4) as e:
        await e.bench.finish(e.bench.submit(range(60), max_tokens=4))
        assert e.pool.capacity >= 16
        fits, more = (Quota(tiers=(TierQuota(count * FRAME), TierQuota(), TierQuota())) for count in (LEAST, LEAST + 1))
        check_tiers_hold(e.bench.cache, {"a": fits}, gpu=True)
        with pytest.raises(ValueError, match=r"gpu\.least_bytes"):
            check_tiers_hold(e.bench.cache, {"a": more}, gpu=True)


async def test_a_shrink_ends_when_a_request_comes(elastic: Any) -> None:
    async with elastic() as e:
        bench = e.bench
        first = bench.submit(range(60), max_tokens=4)
        await bench.running(first)
        await bench.finish(first)
        size = e.pool.capacity
        bench.engine.open.clear()
        await e.pass_idle_s()
        await until(lambda: bench.engine.waiting)
        second = bench.submit(range(200, 208), max_tokens=2)
        await until(lambda: second.state is RequestState.RUNNING)
        assert e.pool.capacity >= size - 4, "after the slice under way"
        bench.engine.open.set()
        await bench.finish(second)
        await e.pass_idle_s()
        await until(lambda: e.pool.capacity == LEAST)


async def test_a_resize_sets_its_most(elastic: Any) -> None:
    async with elastic() as e:
        bench = e.bench
        request = bench.submit(range(60), max_tokens=4)  # 16 blocks
        await bench.running(request)
        await bench.finish(request)
        assert e.pool.capacity >= 16
        done = await e.resize_to(10)
        assert (done.nbytes, done.unfinished) == (10 * FRAME, "") and e.tier.figures.most_bytes == 10 * FRAME
        again = bench.submit(range(200, 236), max_tokens=2)  # 10 blocks
        await bench.running(again)
        assert e.pool.capacity == 10
        await bench.finish(again)
        done = await e.resize_to(MOST)
        assert done.nbytes == 10 * FRAME and e.tier.figures.most_bytes == MOST * FRAME, "it grows when it is wanted"
        running = bench.submit(range(300, 324), max_tokens=16)  # 10 blocks
        await bench.running(running)
        shrinking = asyncio.create_task(e.resize_to(6))
        await until(lambda: e.resize.busy)
        with pytest.raises(PreconditionError, match="being resized to"):
            await e.resize_to(12)
        assert e.tier.figures.most_bytes == 6 * FRAME
        await bench.finish(running)
        assert (await shrinking).nbytes == 6 * FRAME
        with pytest.raises(InvalidArgumentError, match=f"below the tier's least, {LEAST * FRAME} "):
            await e.resize_to(LEAST - 1)
        with pytest.raises(ExhaustedError, match=f"can ever have; give at most {MOST * FRAME}"):
            await e.resize_to(MOST + 1)


async def test_a_device_that_gives_less_than_it_has_is_not_asked_again_at_once(
    elastic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with elastic() as e:
        bench, tries = e.bench, 0

        def full(count: int) -> NewFrames:
            nonlocal tries
            tries += 1
            raise OutOfMemoryError("the device is full; make the tier smaller")

        with monkeypatch.context() as broken:
            broken.setattr(e.pool, "create", full)
            large = bench.submit(range(40), max_tokens=8)
            await until(lambda: tries)
            await bench.quiet()
            assert tries == 1 and large.state is RequestState.WAITING
        bench.now += 1.1
        await until(lambda: large.state is RequestState.RUNNING)
        await bench.finish(large)


async def test_at_the_end_whoever_waits_for_frames_goes_on(elastic: Any) -> None:
    async with elastic() as e:
        waiting: asyncio.Task[bool] = asyncio.create_task(e.tier._grow(2, needed=False))
        await asyncio.sleep(0)
        e.tier.interrupt()
        assert not await waiting
        e.tier._ended = False  # stop() sets it again
