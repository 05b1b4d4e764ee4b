"""The dispatcher when something comes between: no frames, no worker, no caller; damaged blocks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from prefixd.base.errors import ExhaustedError, UnavailableError
from prefixd.base.tenancy.tenants import Tenants
from prefixd.cache import check_integrity
from prefixd.cache.index.trie import CPU, DISK, GPU
from prefixd.serving.dispatch import endings, worker_results
from prefixd.serving.dispatch.capacity import concurrency as concurrency_limit
from prefixd.serving.generation import inbox
from prefixd.serving.request.states import RequestState
from prefixd.worker_protocol.protocol import Cancel, Done, Start
from prefixd_scheduler import SharedLimit
from tests.serving.bench import Bench, Events, Expected, MakeBench
from tests.tries import forget_blocks, match_rows
from tests.waiting import until

ONE = range(100, 117)  # 5 frames to start with
TWO = range(200, 217)
WARM = range(300, 317)


def cancels(bench: Bench) -> list[int]:
    return [message.id for message in bench.sent if isinstance(message, Cancel)]


# -- no frames ------------------------------------------------------------------------------------------------------


async def test_the_youngest_makes_room_and_goes_on_later(
    make_bench: MakeBench, events: Events, expected: Expected
) -> None:
    bench = await make_bench(12)
    old, young = bench.submit(ONE, max_tokens=20), bench.submit(TWO, max_tokens=20)
    await bench.running(old)
    await bench.running(young)
    while not cancels(bench):
        bench.step()
        await bench.quiet()
    assert cancels(bench) == [young.id]
    await bench.finish(old, young)
    assert (bench.dispatcher.preemption.counters.preempted, old.resumed, young.resumed) == (1, 0, 1)
    assert events(old) == (expected(ONE, 20), "length")
    assert events(young) == (expected(TWO, 20), "length")
    # What it was told of hits is what it found at first, not what it found of its own when it came back.
    assert young.hit_tokens == [0, 0, 0, 0]
    assert bench.cache.counters.asked_tokens == 34


async def test_staged_prefixes_give_way_to_what_runs(make_bench: MakeBench) -> None:
    bench = await make_bench(12, max_running=1)
    await bench.cached(WARM)
    busy = bench.submit(ONE, max_tokens=30)  # 12 blocks in the end
    await bench.running(busy)
    waiting = bench.submit(WARM)
    await until(lambda: waiting.state is RequestState.READY)
    await bench.finish(busy)
    assert not bench.dispatcher.preemption.counters.preempted
    await bench.finish(waiting)


async def test_two_copies_of_one_answer_do_not_block_the_last(
    make_bench: MakeBench, events: Events, expected: Expected
) -> None:
    """Both compute the same 8 blocks of output; the second then holds the first one's copies beside its own."""
    bench = await make_bench(10)
    first = bench.submit(range(5), max_tokens=32)
    second = bench.submit(range(5), max_tokens=32)
    await bench.finish(first, second)
    for request in (first, second):
        assert events(request) == (expected(range(5), 32), "length")


# -- no worker ------------------------------------------------------------------------------------------------------


async def test_what_a_dead_worker_ran_is_run_again(make_bench: MakeBench, events: Events, expected: Expected) -> None:
    bench = await make_bench(24)
    requests = [bench.submit(ONE, max_tokens=9), bench.submit(TWO, max_tokens=9)]
    for request in requests:
        await bench.running(request)
    for _ in range(5):
        bench.step()
        await bench.quiet()
    bench.die()
    await bench.quiet()
    assert not bench.runs
    assert [request.id in bench.dispatcher.waiting for request in requests] == [True, True]
    bench.dispatcher.on_ready()
    for request in requests:
        run = await bench.running(request)
        # 17 + 5 tokens, of which 21 were computed: 5 blocks are there, and nothing is sampled twice.
        assert (run.start.cached_blocks, run.start.generated) == (5, 5)
    await bench.finish(*requests)
    assert [events(request) for request in requests] == [(expected(p, 9), "length") for p in (ONE, TWO)]
    assert bench.dispatcher.counters.resumed == 2


async def test_a_request_that_kills_every_worker_is_ended(make_bench: MakeBench, events: Events) -> None:
    bench = await make_bench(24)
    poison = bench.submit(ONE)
    for _ in range(3):
        await bench.running(poison)
        bench.die()
        bench.dispatcher.on_ready()
    tokens, error = events(poison)
    assert tokens == []
    assert isinstance(error, UnavailableError)
    assert "signal 9" in str(error)
    assert poison.id not in bench.dispatcher.waiting
    innocent = bench.submit(TWO)
    await bench.finish(innocent)


async def test_everyone_is_told_when_the_worker_is_given_up(make_bench: MakeBench, events: Events) -> None:
    bench = await make_bench(24, max_running=1)
    await bench.cached(WARM)
    requests = [bench.submit(prompt) for prompt in (ONE, TWO, WARM)]
    await bench.running(requests[0])
    await until(lambda: requests[2].state is RequestState.READY)
    bench.die(gave_up=True)
    for request in requests:
        tokens, error = events(request)
        assert tokens == []
        assert isinstance(error, UnavailableError)
        assert "signal 9" in str(error)
    assert not bench.dispatcher.waiting
    assert not bench.dispatcher.running
    await asyncio.wait_for(bench.dispatcher.idle(), 60)


async def test_a_worker_that_dies_while_room_is_made_is_given_nothing(make_bench: MakeBench) -> None:
    """Until its successor is ready, which could not even read what it was sent before its memory came."""
    bench = await make_bench(5)
    first = bench.submit(ONE)
    await bench.running(first)
    await bench.finish(first)
    bench.sent.clear()
    bench.engine.open.clear()
    second = bench.submit(TWO)  # its frames have to be emptied first, which takes a copy
    await until(lambda: bench.engine.waiting)
    bench.die()
    bench.engine.open.set()
    await bench.quiet()
    assert not bench.sent
    assert second.id in bench.dispatcher.waiting
    bench.dispatcher.on_ready()
    await bench.running(second)
    await bench.finish(second)
    assert bench.cache.tiers.counters[bench.cache.tiers.compute.level].demoted > 0


async def test_what_a_dead_worker_still_says_is_ignored(make_bench: MakeBench) -> None:
    bench = await make_bench(16)
    request = bench.submit(ONE)
    await bench.running(request)
    bench.dispatcher.on_done(Done(999, "length"))
    bench.die()
    bench.dispatcher.on_done(Done(request.id, "cancelled"))
    assert request.id in bench.dispatcher.waiting
    bench.dispatcher.on_ready()
    await bench.finish(request)


async def test_a_death_is_dealt_with_a_slice_at_a_time(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is given to the next worker before all that the dead one ran is put back, and others run in between."""
    monkeypatch.setattr(worker_results, "_INTERRUPTED_ROWS", 1)
    bench = await make_bench(40)
    requests = [bench.submit(range(1000 * k, 1000 * k + 17), max_tokens=9) for k in range(1, 5)]
    for request in requests:
        await bench.running(request)
    bench.step()
    bench.dispatcher.cancel(requests[2])
    bench.die()
    assert [request.id in bench.dispatcher.waiting for request in requests] == [True, False, False, False]
    bench.dispatcher.cancel(requests[3])  # its turn has not come
    check_integrity(bench.cache)
    bench.sent.clear()
    bench.dispatcher.on_ready()
    others = asyncio.create_task(asyncio.sleep(0))
    await others
    assert not bench.sent
    for request in requests[:2]:
        await bench.running(request)
    assert [request.state for request in requests[2:]] == [RequestState.ENDED] * 2
    await bench.finish(*requests[:2])


async def test_a_crowd_is_told_a_slice_at_a_time(
    make_bench: MakeBench, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endings, "_ENDED_AT_ONCE", 2)
    bench = await make_bench(24, ready=False)
    crowd = [bench.submit(range(k, k + 9)) for k in range(7)]
    bench.die(gave_up=True)
    assert len(bench.dispatcher.waiting) == 5
    await until(lambda: not bench.dispatcher.waiting)
    for request in crowd:
        tokens, error = events(request)
        assert (tokens, type(error)) == ([], UnavailableError)
    again = [bench.submit(range(k, k + 9)) for k in range(7)]
    error = UnavailableError("the daemon drained for too long")
    await asyncio.wait_for(bench.dispatcher.end_all(error), 60)
    assert [events(request) for request in again] == [([], error)] * 7


async def test_a_stop_while_a_death_is_dealt_with_ends_everything(
    make_bench: MakeBench, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_results, "_INTERRUPTED_ROWS", 1)
    bench = await make_bench(24)
    requests = [bench.submit(ONE), bench.submit(TWO)]
    for request in requests:
        await bench.running(request)
    bench.step()
    bench.die()
    await bench.dispatcher.stop()
    bench.dispatcher.abandon()
    assert [request.state for request in requests] == [RequestState.ENDED] * 2
    for request in requests:
        assert isinstance(events(request)[1], UnavailableError)


# -- the far side of an await ---------------------------------------------------------------------------------------


async def test_blocks_that_go_while_another_is_handed_over_are_not_used(
    make_bench: MakeBench, events: Events, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows hold another prompt's blocks by the time that their request is staged."""
    bench = await make_bench(40)
    warm = bench.submit(WARM, max_tokens=1)
    await bench.running(warm)
    await bench.finish(warm)
    trie = bench.cache.trie(bench.namespace)
    take_frames = bench.cache.mover.slots.take_frames

    async def take_and_replace(count: int, *args: Any, **kwargs: Any) -> list[int] | None:
        monkeypatch.undo()
        frames = await take_frames(count, *args, **kwargs)
        rows = match_rows(trie, bench.namespace.root, bench.request(WARM).chain)
        assert await forget_blocks(bench.cache.mover, trie, rows[::-1].tolist()) == 4  # as an operator's eviction does
        await bench.cached(range(900, 917))
        assert sorted(match_rows(trie, bench.namespace.root, bench.request(range(900, 917)).chain)) == sorted(rows)
        return frames

    monkeypatch.setattr(bench.cache.mover.slots, "take_frames", take_and_replace)
    first, second = bench.submit(ONE), bench.submit(WARM)
    assert len(second.found) == 4
    assert (await bench.running(second)).start.cached_blocks == 0
    await bench.finish(first, second)
    assert events(second) == (expected(WARM, 2), "length")


# -- no caller ------------------------------------------------------------------------------------------------------


async def test_cancelled_in_the_queue(make_bench: MakeBench, events: Events) -> None:
    bench = await make_bench(16, max_running=1)
    busy, waiting = bench.submit(ONE), bench.submit(TWO)
    await bench.running(busy)
    bench.dispatcher.cancel(waiting)
    assert events(waiting) == ([], "cancelled")
    bench.dispatcher.cancel(waiting)  # twice is once
    assert events(waiting) == ([], None)
    await bench.finish(busy)
    assert waiting.id not in [message.id for message in bench.sent if isinstance(message, Start)]


async def test_cancelled_while_its_prefix_comes_up(make_bench: MakeBench, events: Events) -> None:
    bench = await make_bench(16)
    await bench.cached(WARM)
    bench.engine.open.clear()
    request = bench.submit(WARM)
    await until(lambda: bench.engine.waiting)
    bench.dispatcher.cancel(request)
    assert events(request) == ([], "cancelled")
    trie = bench.cache.trie(bench.namespace)
    assert trie.holds[:, GPU].sum() == 4  # the copy still writes there
    bench.engine.open.set()
    await bench.quiet()
    await until(lambda: not trie.holds[:, GPU].any())
    assert not bench.sent


async def test_cancelled_while_it_runs(make_bench: MakeBench, events: Events, expected: Expected) -> None:
    bench = await make_bench(16)
    request = bench.submit(ONE, max_tokens=9)
    await bench.running(request)
    bench.step()
    bench.dispatcher.cancel(request)
    assert cancels(bench) == [request.id]
    assert request.run.frames  # the worker still maps them
    bench.answer_cancels()
    assert events(request) == (expected(ONE, 1), "cancelled")
    assert bench.cache.tiers.frames.used_count == 4  # what it computed is kept


@pytest.mark.parametrize("answered", [True, False])
async def test_cancelled_while_it_is_preempted(make_bench: MakeBench, events: Events, answered: bool) -> None:
    bench = await make_bench(12)
    old, young = bench.submit(ONE, max_tokens=20), bench.submit(TWO, max_tokens=20)
    await bench.running(young)
    while not cancels(bench):
        bench.step()
        await bench.quiet()
    if answered:
        bench.answer_cancels()
    bench.dispatcher.cancel(young)
    await bench.finish(old, young)
    assert events(young)[1] == "cancelled"
    assert events(old)[1] == "length"
    assert bench.dispatcher.counters.resumed == int(answered)


async def test_cancelled_when_its_worker_is_dead(make_bench: MakeBench, events: Events) -> None:
    bench = await make_bench(16)
    early, late = bench.submit(ONE), bench.submit(TWO)
    await bench.running(late)
    bench.dispatcher.cancel(early)
    bench.die()
    assert events(early) == ([], "cancelled")
    bench.dispatcher.cancel(late)
    assert events(late) == ([], "cancelled")
    await asyncio.wait_for(bench.dispatcher.idle(), 60)


async def test_ended_from_above(make_bench: MakeBench, events: Events) -> None:
    bench = await make_bench(16, max_running=1)
    runs, waits = bench.submit(ONE), bench.submit(TWO)
    await bench.running(runs)
    error = UnavailableError("the daemon drained for too long")
    ending = asyncio.create_task(bench.dispatcher.end_all(error))
    await bench.quiet()
    assert events(waits) == ([], error)
    bench.answer_cancels()
    await asyncio.wait_for(ending, 60)
    assert events(runs) == ([], error)


async def test_an_error_of_the_worker_is_the_callers(make_bench: MakeBench, events: Events) -> None:
    bench = await make_bench(16)
    request = bench.submit(ONE)
    await bench.running(request)
    del bench.runs[request.id]
    bench.dispatcher.on_done(Done(request.id, "error", "the model's logits are not finite"))
    tokens, error = events(request)
    assert tokens == []
    assert isinstance(error, UnavailableError)
    assert "not finite" in str(error)
    assert bench.dispatcher.counters.finished == 0


# -- damaged blocks -------------------------------------------------------------------------------------------------


async def test_a_damaged_block_is_computed_again(make_bench: MakeBench, events: Events, expected: Expected) -> None:
    bench = await make_bench(5, cpu_slots=2, disk=True, load="always")
    first = bench.submit(WARM)
    await bench.finish(first)
    await bench.cache.write_back.flush()
    other = bench.submit(ONE)  # crowds it out of the GPU tier
    await bench.finish(other)
    trie = bench.cache.trie(bench.namespace)
    request = bench.request(WARM)
    rows = match_rows(trie, bench.namespace.root, request.chain)
    assert trie.nearest[rows].tolist() == [DISK, DISK, CPU, CPU]
    trie.checksums[rows[1], 0] ^= 1
    bench.dispatcher.submit(request)
    assert len(request.rows) == 4
    run = await bench.running(request)
    assert run.start.cached_blocks == 1
    assert sum(request.hit_tokens or []) == 4
    await bench.finish(request)
    assert events(request) == (expected(WARM, 2), "length")
    assert bench.cache.mover.lost["checksum mismatch on disk"] == 1


async def test_without_memory_for_one_more_fewer_run_and_all_are_served(
    make_bench: MakeBench, events: Events, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency_limit, "RETRY_S", 0.01)
    monkeypatch.setattr(concurrency_limit, "CALM_S", 0.01)
    bench = await make_bench(16)
    troubles = bench.cache.tiers.troubles
    served, refused = bench.submit(ONE), bench.submit(TWO)
    await bench.running(refused)
    del bench.runs[refused.id]
    bench.dispatcher.on_done(Done(refused.id, "no_memory", "too many mappings; raise vm.max_map_count"))
    assert events(refused) == ([], None)
    assert (bench.dispatcher.counters.resumed, refused.resumed, bench.dispatcher.preemption.counters.preempted) == (
        1,
        1,
        0,
    )
    assert (
        troubles.what(concurrency_limit.PART)
        == "1 of 4 requests run at once: too many mappings; raise vm.max_map_count"
    )
    await bench.running(refused)  # when one more is tried
    await bench.finish(served, refused)
    assert events(served)[0] == expected(ONE, 2) and events(refused)[0] == expected(TWO, 2)
    await until(lambda: concurrency_limit.PART not in troubles)


async def test_without_memory_for_a_request_alone_its_caller_is_told(make_bench: MakeBench, events: Events) -> None:
    bench = await make_bench(16)
    request = bench.submit(ONE)
    await bench.running(request)
    del bench.runs[request.id]
    bench.dispatcher.on_done(Done(request.id, "no_memory", "no addresses left; raise ulimit -v"))
    tokens, error = events(request)
    assert tokens == [] and isinstance(error, ExhaustedError) and "raise ulimit -v" in str(error)


async def test_a_call_that_is_not_read_ends_its_requests_and_no_others(
    make_bench: MakeBench, events: Events, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its sequences runs, one waits; the bench checks that nothing is left held."""
    monkeypatch.setattr(inbox, "MOST_UNREAD", 3)
    bench = await make_bench(40, max_running=2)
    unread = [bench.request(ONE, max_tokens=20), bench.request(range(300, 317), max_tokens=20)]

    def end() -> None:
        for request in unread:
            bench.dispatcher.cancel(request)

    of_all = SharedLimit(100)
    shared = inbox.Inbox(1, end, Tenants().default, of_all)
    for index, request in enumerate(unread):
        request.events = shared.sink(index)
    bench.dispatcher.submit(unread[0])
    other = bench.submit(TWO, max_tokens=20)
    await bench.running(other)
    bench.dispatcher.submit(unread[1])
    while not any(isinstance(message, Cancel) for message in bench.sent):
        bench.step()
        await bench.quiet()
    assert len(bench.runs[unread[0].id].tokens) == len(ONE) + 4
    bench.answer_cancels()
    await bench.finish(*unread, other)
    assert [request.state for request in unread] == [RequestState.ENDED] * 2
    assert events(other) == (expected(TWO, 20), "length")
    with pytest.raises(ExhaustedError, match="4 tokens and logprobs wait to be read"):
        await shared.get()
    assert not of_all.total
