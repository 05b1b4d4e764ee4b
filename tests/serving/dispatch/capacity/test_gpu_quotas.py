"""Quotas of the GPU tier: who is at its most waits for its own requests, and others pass it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from prefixd.base.errors import ExhaustedError
from prefixd.base.tenancy.tenants import Quota, Tenant, TierQuota
from prefixd.cache import check_integrity
from prefixd.serving.request.request import Request
from prefixd_scheduler import QueuedRequest
from tests.serving.bench import Bench, Events, MakeBench
from tests.waiting import until


class Home:
    """A tenant with a namespace of its own; quotas are in frames."""

    def __init__(self, bench: Bench, name: str, guaranteed: int = 0, most: int | None = None) -> None:
        cache, self.bench = bench.cache, bench
        self.tenant: Tenant = cache.tenants.known(name)
        self.namespace = cache.register(msgspec.structs.replace(bench.namespace.spec, tenant=name))
        self.limit(guaranteed, most)

    def limit(self, guaranteed: int, most: int | None) -> None:
        frame = self.bench.cache.tiers.gpu.frame_bytes
        quota = TierQuota(guaranteed * frame, None if most is None else most * frame)
        self.tenant.quota = Quota(tiers=(quota, TierQuota(), TierQuota()))

    def submit(self, tokens: Sequence[int], max_tokens: int = 3) -> Request:
        request = self.bench.request(tokens, max_tokens)
        request.namespace = self.namespace
        request.chain = self.bench.cache.chain(self.namespace, np.asarray(tokens, "<u4").tobytes())
        request.queued = replace_tenant(request.queued, self.tenant.name)
        self.bench.dispatcher.submit(request)
        return request

    @property
    def used(self) -> int:
        """Frames that it has."""
        gpu = self.bench.cache.tiers.gpu
        return self.bench.cache.mover.use.used_bytes(self.tenant, gpu) // gpu.frame_bytes


def replace_tenant(queued: QueuedRequest, tenant: str) -> QueuedRequest:
    return replace(queued, tenant=tenant)


def prompt(number: int, tokens: int = 9) -> range:
    return range(1000 * number, 1000 * number + tokens)


async def finish(bench: Bench, requests: Sequence[Request], homes: Sequence[Home], most: Sequence[int]) -> int:
    """Computes until all have ended; the most requests that ran at once. Nobody ever has more than its most."""
    together = 0
    while any(each.id in bench.dispatcher.waiting or each.id in bench.dispatcher.running for each in requests):
        await bench.quiet()
        assert [home.used <= frames for home, frames in zip(homes, most, strict=True)] == [True] * len(homes)
        together = max(together, len(bench.runs))
        bench.answer_cancels()
        bench.step()
    await bench.quiet()
    check_integrity(bench.cache)
    return together


async def test_a_flood_at_its_most_waits_for_its_own_and_others_pass_it(make_bench: MakeBench) -> None:
    bench = await make_bench(24, look_ahead=0, max_running=4)
    a, b = Home(bench, "a", most=4), Home(bench, "b")
    flood = [a.submit(prompt(number)) for number in range(1, 9)]
    await bench.quiet()
    others = [b.submit(prompt(number)) for number in range(11, 13)]
    await until(lambda: len(bench.runs) == 3)
    assert sorted(bench.runs) == sorted([flood[0].id, others[0].id, others[1].id])
    assert await finish(bench, [*flood, *others], [a], [4]) == 3


async def test_a_shared_prefix_counts_once(make_bench: MakeBench) -> None:
    bench = await make_bench(24, max_running=8)
    a = Home(bench, "a", most=7)
    first = a.submit(range(17))
    assert await finish(bench, [first], [a], [7]) == 1
    again = [a.submit([*range(16), 99 + number]) for number in range(4)]
    await until(lambda: len(bench.runs) == 3)
    await bench.quiet()
    assert len(bench.runs) == 3, "four blocks that all have, and one of each"
    await finish(bench, again, [a], [7])


async def test_what_can_never_run_within_the_quota_is_refused(make_bench: MakeBench, events: Events) -> None:
    bench = await make_bench(24)
    a, b = Home(bench, "a", most=4), Home(bench, "b", guaranteed=8)
    long, short = a.submit(prompt(1, 20)), a.submit(prompt(2, 5), 2)
    await finish(bench, [long, short], [a], [4])
    assert isinstance(error := events(long)[1], ExhaustedError) and re.search(
        r"tenant a: .*tenants\.a\.gpu_most", str(error)
    )
    assert short.generated == 2 and a.tenant.refused == {"gpu_most": 1}
    b.limit(22, None)
    other = a.submit(prompt(3))
    await finish(bench, [other], [a], [4])
    assert isinstance(error := events(other)[1], ExhaustedError)
    frame = bench.cache.tiers.gpu.frame_bytes
    assert f"it may hold {2 * frame}, as {22 * frame} of {24 * frame} bytes are guaranteed to others" in str(error)
    assert "tenants.a.gpu_guaranteed" in str(error) and "lower what others are guaranteed" in str(error)
    assert "raise the limit" not in str(error) and a.tenant.refused == {"gpu_most": 1, "gpu_guaranteed": 1}
    assert b.used == 0


async def test_running_requests_leave_others_what_they_are_guaranteed(make_bench: MakeBench) -> None:
    bench = await make_bench(12, max_running=8)
    a, b = Home(bench, "a"), Home(bench, "b", guaranteed=6)
    flood = [a.submit(prompt(number), 3) for number in range(1, 6)]
    await until(lambda: len(bench.runs) == 2)
    await bench.quiet()
    assert len(bench.runs) == 2, "of three blocks each"
    others = [b.submit(prompt(number), 3) for number in range(11, 13)]
    await until(lambda: {each.id for each in others} <= set(bench.runs))  # at once: nobody ends meanwhile
    assert await finish(bench, [*flood, *others], [a], [12]) == 4
    assert not any(each.resumed for each in [*flood, *others]), "nobody was preempted"


async def test_all_that_a_request_may_come_to_is_counted(make_bench: MakeBench) -> None:
    bench = await make_bench(24, max_running=8)
    a = Home(bench, "a", most=8)
    requests = [a.submit(prompt(number, 5), 15) for number in range(1, 4)]
    assert await finish(bench, requests, [a], [8]) == 1, "five blocks each, though it begins with two"
    assert not any(each.resumed for each in requests)


async def test_what_several_tenants_run_leaves_others_their_guarantees(make_bench: MakeBench) -> None:
    bench = await make_bench(12, max_running=8)
    a, b, c = Home(bench, "a"), Home(bench, "b", guaranteed=6), Home(bench, "c")
    flood = [home.submit(prompt(number)) for number in range(1, 4) for home in (a, c)]
    await until(lambda: len(bench.runs) == 2)
    await bench.quiet()
    assert len(bench.runs) == 2, "six frames together"
    assert await finish(bench, [*flood, b.submit(prompt(9))], [a], [12]) >= 3
