"""What the dispatcher writes into the records of requests: stages, waits, loads, decisions, preemptions."""

from __future__ import annotations

from prefixd.observability.request_record import RequestRecord, StageName, Wait
from prefixd.serving.request.states import RequestState
from prefixd.worker_protocol.protocol import Cancel
from prefixd_scheduler import Distance
from tests.serving.bench import Bench, MakeBench
from tests.serving.fake_worker import BLOCK
from tests.waiting import until

ONE = range(100, 117)
TWO = range(200, 217)


def stages(record: RequestRecord) -> list[str]:
    return [stage.name.value for stage in record.stages]


async def test_a_request_that_waits_for_a_place(make_bench: MakeBench) -> None:
    bench = await make_bench(40, max_running=1)
    busy, waiting = bench.submit(ONE, max_tokens=8), bench.submit(TWO)
    await bench.running(busy)
    await bench.quiet()
    bench.now = 3.0
    await bench.finish(busy)
    await bench.finish(waiting)
    record = waiting.record
    assert stages(record) == ["queue", "prefill", "decode"]
    assert record.seconds(StageName.QUEUE) == record.handed_over_s == 3.0
    assert record.waits[Wait.PLACES] == 3.0 == sum(record.waits.values())
    assert record.first_token_s == 3.0
    blocks = (len(TWO) - 1) // BLOCK
    assert record.missing is not None and (record.missing.found, record.missing.missing) == (0, blocks)
    assert busy.record.missing is not None and busy.record.found_tokens == [0, 0, 0, 0]


async def test_cached_blocks_are_found_and_loaded(make_bench: MakeBench) -> None:
    bench = await make_bench(40)
    await bench.cached(ONE)
    request = bench.submit(ONE)
    await bench.finish(request)
    record, blocks = request.record, (len(ONE) - 1) // BLOCK
    assert record.found_tokens == record.hit_tokens == [0, blocks * BLOCK, 0, 0]
    assert record.missing is None
    (load,) = (stage for stage in record.stages if stage.name is StageName.LOAD)
    assert load.attributes == {
        "tier": "cpu",
        "blocks": blocks,
        "bytes": blocks * int(request.trie.group_bytes[request.trie.all_groups]),
        "urgency": "demand",
        "outcome": "complete",
    }
    (prefill,) = (stage for stage in record.stages if stage.name is StageName.PREFILL)
    assert prefill.attributes == {"computed_tokens": len(ONE) - blocks * BLOCK}


async def test_what_the_worker_computes_counts_as_stored(make_bench: MakeBench) -> None:
    bench = await make_bench(40)
    stored = bench.cache.measurements.traffic.stored_bytes
    request = bench.submit(ONE)
    await bench.finish(request)
    trie, who = request.trie, (request.record.tenant, request.record.model)
    blocks = int(trie.blocks_by_namespace().sum())
    assert blocks and dict(stored) == {who: blocks * trie.block_bytes}
    await bench.finish(bench.submit(ONE))
    assert dict(stored) == {who: blocks * trie.block_bytes}, "the second prompt was cached"


async def test_a_load_that_is_given_up(make_bench: MakeBench) -> None:
    bench = await make_bench(40)
    await bench.cached(ONE)
    request = await _loading(bench)
    bench.now += 1000.0
    await bench.finish(request)
    (load,) = (stage for stage in request.record.stages if stage.name is StageName.LOAD)
    assert (load.attributes["outcome"], load.attributes["arrived_blocks"]) == ("given_up", 0)
    assert request.record.waits[Wait.LOAD] == 1000.0
    assert request.record.hit_tokens == [0, 0, 0, 0]
    bench.engine.open.set()
    await bench.quiet()


async def _loading(bench: Bench) -> object:
    """A request whose load has begun; loading took 0.02 s so far, whatever it was."""
    nbytes = int(bench.cache.trie(bench.namespace).group_bytes[-1])
    for blocks in (1, 2):
        bench.cost.observe_load(Distance.CPU, blocks * nbytes, 0.02)
        bench.cost.observe_compute(blocks * BLOCK, blocks * 0.02)
    bench.engine.open.clear()
    request = bench.submit(ONE)
    await until(lambda: bench.engine.waiting)
    assert request.state is RequestState.STAGING
    return request


async def test_cached_blocks_that_are_not_loaded(make_bench: MakeBench) -> None:
    bench = await make_bench(40, load="never")
    await bench.cached(ONE)
    request = bench.submit(ONE)
    await bench.finish(request)
    (decision,) = request.record.decisions
    assert (decision.blocks, decision.tier, decision.by_setting) == ((len(ONE) - 1) // BLOCK, "cpu", True)
    assert "load" not in stages(request.record)


async def test_a_request_that_gives_way(make_bench: MakeBench) -> None:
    bench = await make_bench(12)
    old, young = bench.submit(ONE, max_tokens=20), bench.submit(TWO, max_tokens=20)
    await bench.running(old)
    await bench.running(young)
    while not any(isinstance(message, Cancel) for message in bench.sent):
        bench.step()
        await bench.quiet()
    bench.answer_cancels()
    bench.now = 5.0
    await bench.finish(old, young)
    record = young.record
    assert (record.preempted, record.restarts) == (1, 0)
    assert record.preempted_for == (f"request {old.name} of tenant {old.queued.tenant}",)
    assert stages(record) == ["queue", "prefill", "decode", "queue", "load", "prefill", "decode"]
    assert record.later_waits[Wait.PREEMPTED] == 5.0 and Wait.PREEMPTED not in record.waits
    assert not old.record.preempted


async def test_a_request_without_a_worker(make_bench: MakeBench) -> None:
    bench = await make_bench(40, ready=False)
    request = bench.submit(ONE)
    bench.now = 2.0
    bench.dispatcher.on_ready()
    await bench.running(request)
    bench.die()
    bench.now = 7.0
    bench.dispatcher.on_ready()
    await bench.finish(request)
    assert request.record.waits[Wait.WORKER] == 7.0
    assert request.record.restarts == 1
