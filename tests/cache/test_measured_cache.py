"""The cache measures lookups, loads, writes, leases and prefetches, and counts traffic by tenant and model."""

from __future__ import annotations

from collections.abc import Callable

from prefixd.base.tiers import Tier
from prefixd.cache.index.trie import CPU, DISK
from prefixd.observability.histogram import Histogram
from tests.rig import BLOCK_TOKENS, PART_BYTES, Rig

PROMPT = list(range(1, 9))


def seen(histogram: Histogram) -> dict[tuple[str, ...], int]:
    """Number of values by labels."""
    return {labels: sum(series.counts) for labels, series in histogram}


async def test_an_engine_that_stores_and_reads_is_measured(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=8, disk=64)
    measured, who = rig.cache.measurements, rig.namespace.spec.who
    await rig.put(PROMPT, durable=True)
    await rig.put(list(range(20, 28)), durable=True)  # the first prompt is on disk alone
    assert not any(rig.tiers(PROMPT, CPU))
    lease = await rig.lease(PROMPT)
    assert lease is not None
    rig.clock.now += 30.0
    rig.cache.release(rig.session, lease.id)
    timings, traffic = measured.timings, measured.traffic
    assert seen(timings.save_s)["fill",] == 2 and seen(timings.save_s)["write",] >= 2
    assert seen(timings.load_s) == {("disk", "demand"): 1}
    assert {labels: series.total for labels, series in timings.lease_s} == {(rig.session.tenant.name, "released"): 30.0}
    assert seen(timings.lookup_s).keys() == {who}
    counters = rig.cache.tiers.counters
    assert [each.loaded_bytes for each in counters] == [0, 0, len(PROMPT) * PART_BYTES, 0]
    assert dict(traffic.asked_tokens) == {who: rig.cache.counters.asked_tokens}
    assert dict(traffic.hit_tokens) == {(*who, "disk"): rig.cache.counters.hit_tokens[DISK]}
    assert rig.cache.counters.hit_tokens[DISK] == len(PROMPT) * BLOCK_TOKENS
    assert dict(traffic.stored_bytes) == {who: 16 * PART_BYTES}
    assert rig.session.stored_bytes == 16 * PART_BYTES
    await rig.put(PROMPT)
    assert rig.session.stored_bytes == 16 * PART_BYTES, "nothing was new"


async def test_leases_end_in_three_ways(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=8)
    await rig.put(PROMPT[:2])
    for _ in range(2):
        assert await rig.lease(PROMPT[:2], ttl_s=10.0) is not None
    rig.clock.now += 11.0
    assert rig.cache.leases.expire(rig.clock.now) == 2
    assert await rig.lease(PROMPT[:2]) is not None
    rig.cache.leases.close(rig.session)
    tenant = rig.session.tenant.name
    assert seen(rig.cache.measurements.timings.lease_s) == {(tenant, "expired"): 2, (tenant, "session"): 1}


async def test_the_lead_of_a_prefetch_is_from_its_arrival_to_the_lease(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=8, disk=64)
    await rig.put(PROMPT, durable=True)
    await rig.put(list(range(20, 28)), durable=True)
    lead = rig.cache.measurements.timings.prefetch_lead_s
    await rig.cache.prefetch(rig.session, rig.namespace, rig.chain(PROMPT))
    await rig.cache.mover.quiesce()
    rig.clock.now += 2.0
    await rig.get(PROMPT)
    ((labels, series),) = lead
    assert (labels, series.total) == ((Tier.CPU.label,), 3.0), "the lease comes a second later still"
    await rig.get(PROMPT)
    assert sum(lead.counts) == 1, "without a hint there is no lead"


async def test_a_prefetch_that_comes_too_late_has_no_lead(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=8, disk=64)
    await rig.put(PROMPT, durable=True)
    await rig.put(list(range(20, 28)), durable=True)
    await rig.cache.prefetch(rig.session, rig.namespace, rig.chain(PROMPT))
    await rig.get(PROMPT)  # the prefetch has not begun
    lead = rig.cache.measurements.timings.prefetch_lead_s
    assert lead.counts[0] == sum(lead.counts) == 1
