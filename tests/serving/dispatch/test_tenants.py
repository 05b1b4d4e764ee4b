"""Tenants beside each other in one dispatcher."""

from __future__ import annotations

from prefixd.base.sampling import BeamSearch
from prefixd.worker_protocol.protocol import Cancel, Start
from tests.serving.bench import Bench, MakeBench
from tests.waiting import until


def started(bench: Bench) -> list[int]:
    return [message.id for message in bench.sent if isinstance(message, Start)]


async def preempted(bench: Bench) -> int:
    while not (cancels := [message.id for message in bench.sent if isinstance(message, Cancel)]):
        bench.step()
        await bench.quiet()
    bench.answer_cancels()
    await bench.quiet()
    return cancels[0]


async def test_a_flood_does_not_keep_another_tenant_waiting(make_bench: MakeBench) -> None:
    bench = await make_bench(64, max_running=1, look_ahead=0)
    flood = [bench.submit(range(100 * n, 100 * n + 9), max_tokens=1, tenant="flood", priority=-5) for n in range(1, 9)]
    late = [bench.submit(range(100 * n, 100 * n + 9), max_tokens=1, tenant="late") for n in range(11, 13)]
    assert bench.dispatcher.requests_of("flood") == (8, 0)
    await bench.finish(*flood, *late)
    order = started(bench)
    assert {order.index(late[0].id), order.index(late[1].id)} <= {0, 1, 2, 3}
    assert bench.dispatcher.requests_of("flood") == (0, 0)


async def test_output_counts_as_service(make_bench: MakeBench) -> None:
    bench = await make_bench(64, max_running=1, look_ahead=0)
    long = [bench.submit(range(100 * n, 100 * n + 5), max_tokens=30, tenant="long") for n in range(1, 4)]
    short = [bench.submit(range(100 * n, 100 * n + 5), max_tokens=1, tenant="short") for n in range(11, 21)]
    await bench.running(long[0])
    assert bench.dispatcher.requests_of("long") == (2, 1)
    await bench.finish(*long, *short)
    assert started(bench)[1:9] == [request.id for request in short[:8]], "65 tokens of service against 7 each"


async def test_a_beam_search_is_charged_though_it_tells_of_nothing(make_bench: MakeBench) -> None:
    bench = await make_bench(64)
    request = bench.submit(range(100, 109), max_tokens=20, tenant="a")
    await bench.running(request)
    share = bench.dispatcher.queue._share
    before = share.received("a")
    request.sampling = type(request.sampling)(max_tokens=20, beam_search=BeamSearch(width=4))
    bench.step()
    assert share.received("a") == before + 2 * 4 + 2, "and the token that this worker tells"
    request.sampling = type(request.sampling)(max_tokens=20)


async def test_a_priority_takes_no_frames_from_another_tenant(make_bench: MakeBench) -> None:
    """The tenant whose requests have most gives way, the last in its own rank."""
    bench = await make_bench(24)
    alone = bench.submit(range(100, 117), max_tokens=40, priority=9, tenant="modest")
    await bench.running(alone)
    others = []
    for number in range(3):
        first = 200 + 100 * number
        others.append(bench.submit(range(first, first + 17), max_tokens=40, priority=number - 5, tenant="greedy"))
        await bench.running(others[-1])
    assert [await preempted(bench) for _ in range(2)] == [others[2].id, others[1].id]
    await bench.finish(alone, *others)
    assert not alone.resumed


async def test_of_one_request_each_the_later_one_gives_way(make_bench: MakeBench) -> None:
    bench = await make_bench(12)
    first = bench.submit(range(100, 121), max_tokens=24, priority=9, tenant="a")
    await bench.running(first)
    second = bench.submit(range(200, 209), max_tokens=36, priority=-9, tenant="b")
    await bench.running(second)
    assert await preempted(bench) == second.id
    await bench.finish(first, second)


async def test_a_read_only_request_that_gives_way_leaves_nothing_to_match(make_bench: MakeBench) -> None:
    bench = await make_bench(10)
    first = bench.submit(range(100, 117), max_tokens=20, read_only=True)
    await bench.running(first)
    second = bench.submit(range(200, 209), max_tokens=20, read_only=True)
    await bench.running(second)
    assert await preempted(bench) == second.id
    await bench.finish(first, second)
    assert second.resumed == 1 and second.generated == 20
    assert not len(second.trie), "no block was ever entered"


async def test_who_waits_does_not_wait_for_a_read_only_request_to_compute(make_bench: MakeBench) -> None:
    bench = await make_bench(30)
    silent = bench.submit(range(100, 117), max_tokens=9, read_only=True)
    await bench.running(silent)
    recording = bench.submit(range(100, 117), max_tokens=1)
    await bench.running(recording)
    await bench.finish(silent, recording)
    again = bench.submit(range(100, 117), max_tokens=1, read_only=True)
    assert (await bench.running(again)).start.cached_blocks == 4
    await bench.finish(again)


async def test_a_place_is_kept_for_a_tenant_that_comes_later(make_bench: MakeBench) -> None:
    bench = await make_bench(64, max_running=4, look_ahead=0)
    bench.cache.tenants.known("flood")
    bench.cache.tenants.known("late")
    flood = [bench.submit(range(100 * n, 100 * n + 9), max_tokens=9, tenant="flood") for n in range(1, 9)]
    await until(lambda: len(bench.runs) == 2)
    await bench.quiet()
    assert bench.dispatcher.requests_of("flood") == (6, 2), "one is kept for late, and one for the default tenant"
    late = bench.submit(range(2000, 2009), max_tokens=9, tenant="late")
    await bench.running(late)
    assert bench.dispatcher.requests_of("flood") == (6, 2), "it did not wait for one of them to end"
    await bench.finish(*flood, late)


async def test_a_place_that_is_kept_is_taken_though_many_stand_before(make_bench: MakeBench) -> None:
    bench = await make_bench(64, max_running=4, look_ahead=0)
    for name in "ab":
        bench.cache.tenants.known(name)
    first = bench.submit(range(900, 905), max_tokens=30, tenant="a")
    long = bench.submit(range(1000, 1060), max_tokens=1, tenant="b")
    flood = [bench.submit(range(100 * n, 100 * n + 5), max_tokens=30, tenant="a") for n in range(1, 9)]
    while long.id in bench.dispatcher.waiting or long.id in bench.dispatcher.running:
        bench.step()
        await bench.quiet()
    late = bench.submit(range(2000, 2005), max_tokens=1, tenant="b")
    await bench.running(late)
    assert bench.dispatcher.requests_of("a") == (7, 2)
    await bench.finish(first, long, late, *flood)
