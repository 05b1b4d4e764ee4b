"""What a tenant may ask of generation, and what it may do to others' requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from prefixd.base.errors import AlreadyExistsError, ExhaustedError, InvalidArgumentError
from prefixd.base.sampling import Sampling
from prefixd.base.tenancy.fairness import SharedBytes
from prefixd.base.tenancy.tenants import Quota, Tenant, Tenants
from prefixd.cache import TieredCache
from prefixd.serving.generation import Accepted, Finished, GenerateParams, Tokens, generation
from prefixd.serving.request.request_events import Ended, NewTokens
from prefixd.serving.text.tokenization import TextCodec
from prefixd.worker_protocol.protocol import BeamResult
from prefixd_scheduler import RequestQueue, create_policy
from tests.serving.generation.test_generation import Desk, byte_ids, desk, ids, logprobs, shown, spelled
from tests.waiting import until

__all__ = ["desk"]


@pytest.fixture(scope="module")
def real_codec(model_directory: Path) -> TextCodec:
    return TextCodec(model_directory)


@pytest.fixture
async def tenants(cache: TieredCache) -> AsyncIterator[Tenants]:
    cache.tenants.set_quotas({"a": Quota(), "b": Quota()})
    yield cache.tenants


def tenant_of(tenants: Tenants, name: str) -> Tenant:
    found = tenants.get(name)
    assert found is not None
    return found


# -- whose request -----------------------------------------------------------------------------------------------------


async def test_an_id_is_a_tenants_own(desk: Desk, tenants: Tenants) -> None:
    a, b = tenant_of(tenants, "a"), tenant_of(tenants, "b")
    runs = {t.name: desk.generation.run(GenerateParams("hello", request_id="mine", tenant=t)) for t in (a, b)}
    for run in runs.values():
        assert isinstance(await anext(run), Accepted)
    await desk.refused(AlreadyExistsError, "'mine' is running", request_id="mine", tenant=a)
    assert not desk.generation.cancel("mine", tenants.default)
    assert desk.generation.cancel("mine", a)
    assert [request.queued.tenant for request in desk.dispatcher.cancelled] == ["a"]
    assert isinstance(await anext(runs["a"]), Finished)
    await runs["a"].aclose()
    assert not desk.generation.cancel("mine", a)
    again = desk.generation.run(GenerateParams("hello", request_id="mine", tenant=a))
    await anext(again)
    assert desk.generation.cancel("mine"), "an operator cancels all of that id"
    assert [request.queued.tenant for request in desk.dispatcher.cancelled] == ["a", "b", "a"]
    for run in (again, runs["b"]):
        await run.aclose()
    assert not desk.generation._live


async def test_who_names_no_tenant_is_the_default_one(desk: Desk, tenants: Tenants) -> None:
    await desk.events(Ended("stop"), read_only=True)
    (request,) = desk.dispatcher.submitted
    assert (request.queued.tenant, request.read_only) == ("default", True)
    assert desk.generation.requests_of(tenants.default) == (1, 0)


# -- how many ----------------------------------------------------------------------------------------------------------


async def test_waiting_requests_of_a_tenant_are_bounded_before_any_work(desk: Desk, tenants: Tenants) -> None:
    a, b = tenant_of(tenants, "a"), tenant_of(tenants, "b")
    a.quota = Quota(waiting_requests=3)
    await desk.events(Ended("stop"), tenant=a)
    words = ["tenant a", "1 of 3 requests wait", "tenants.a.waiting_requests", "send it again when some have run"]
    await desk.refused(ExhaustedError, *words, tenant=a, n=3, temperature=1.0)
    assert a.refused["waiting_requests"] == 1
    assert len(await desk.events(Ended("stop"), Ended("stop"), tenant=a)) == 2
    await desk.events(Ended("stop"), tenant=b)


async def test_who_waits_by_the_time_that_a_text_is_tokenized_counts(desk: Desk, tenants: Tenants) -> None:
    a = tenant_of(tenants, "a")
    a.quota = Quota(waiting_requests=1)
    desk.codec.open.clear()
    runs = [asyncio.create_task(desk.events(Ended("stop"), tenant=a)) for _ in range(3)]
    await until(lambda: desk.codec.texts)
    desk.codec.open.set()
    ends = await asyncio.gather(*runs, return_exceptions=True)
    assert sorted(isinstance(end, ExhaustedError) for end in ends) == [False, True, True]
    assert len(desk.dispatcher.submitted) == 1


async def test_a_refusal_by_the_queue_names_the_tenant_and_is_counted(desk: Desk, tenants: Tenants) -> None:
    a, queue = tenant_of(tenants, "a"), RequestQueue(create_policy("fcfs"), 12, lambda: len(tenants))
    desk.dispatcher.submit = lambda request: queue.push(request.queued)  # type: ignore[method-assign]
    run = desk.generation.run(GenerateParams("hello", n=8, sampling=Sampling(temperature=1.0), tenant=a))
    await anext(run)
    with pytest.raises(
        ExhaustedError, match=r"tenant a: 8 requests of the tenant wait; of the queue's 12 places 2 .*queue_limit"
    ):
        await desk.events(tenant=a)
    assert a.refused["scheduler.queue_limit"] == 1
    other = desk.generation.run(
        GenerateParams("hello", n=2, sampling=Sampling(temperature=1.0), tenant=tenant_of(tenants, "b"))
    )
    assert isinstance(await anext(other), Accepted)
    for each in (run, other):
        await each.aclose()


async def test_requests_a_second_are_bounded_and_the_refusal_says_when_to_come_again(
    desk: Desk, tenants: Tenants
) -> None:
    a, b, now_s = tenant_of(tenants, "a"), tenant_of(tenants, "b"), [100.0]
    desk.generation._rates._clock = lambda: now_s[0]
    a.quota = Quota(requests_per_s=4.0)
    for _ in range(4):
        await desk.events(Ended("stop"), tenant=a)
    words = ["tenant a", "more than 4 requests a second", "tenants.a.requests_per_s", "send it again in 0.250 s"]
    await desk.refused(ExhaustedError, *words, tenant=a)
    await desk.refused(ExhaustedError, tenant=a, prompt="x" * (15 << 20))
    assert a.refused["requests_per_s"] == 2
    await desk.events(Ended("stop"), tenant=b)
    now_s[0] += 0.25
    await desk.events(Ended("stop"), tenant=a)
    await desk.refused(ExhaustedError, "0.250 s", tenant=a)
    now_s[0] += 1e9
    for _ in range(4):
        await desk.events(Ended("stop"), tenant=a)
    await desk.refused(ExhaustedError, tenant=a)
    a.quota = Quota(requests_per_s=0.01)  # less than one a second: one may come at once
    now_s[0] += 100.0
    await desk.events(Ended("stop"), tenant=a)
    await desk.refused(ExhaustedError, "in 100.000 s", tenant=a)
    a.quota = Quota()
    for _ in range(9):
        await desk.events(Ended("stop"), tenant=a)
    assert not desk.generation._rates._buckets


# -- how much ----------------------------------------------------------------------------------------------------------


async def test_bytes_of_all_calls_are_bounded_and_each_tenant_keeps_its_part(desk: Desk, tenants: Tenants) -> None:
    a, b = tenant_of(tenants, "a"), tenant_of(tenants, "b")
    held = desk.generation._messages = SharedBytes(600, "prompt and parameters", "the daemon", lambda: len(tenants))
    run = desk.generation.run(GenerateParams("hello", tenant=a, message_bytes=400))
    await anext(run)
    words = ["1 bytes of prompt", "others have 400", "allows 600, of which 100 are kept for each tenant"]
    await desk.refused(ExhaustedError, *words, tenant=a, message_bytes=1)
    assert a.refused["the daemon"] == 1
    await desk.events(Ended("stop"), tenant=b, message_bytes=100)
    assert held.nbytes == 400
    await run.aclose()
    assert held.nbytes == 0


async def test_a_long_text_is_not_kept_while_its_request_waits(desk: Desk) -> None:
    params = GenerateParams("".join(["x"] * 1500))
    run = desk.generation.run(params)
    await anext(run)
    frame = run.ag_frame
    assert frame is not None and frame.f_locals["params"].prompt == b""
    await run.aclose()


async def test_any_number_of_images_is_refused_by_their_number(desk: Desk) -> None:
    images, best = [b""] * 7_000_000, float("inf")
    for _ in range(3):
        began_s = time.thread_time()
        await desk.refused(InvalidArgumentError, "7000000 images; send at most 4096", images=images)
        best = min(best, time.thread_time() - began_s)
    assert best < 0.003, "their lengths are not added up"


# -- text that was held back -------------------------------------------------------------------------------------------

HALF = byte_ids(b"\xc3")


@pytest.mark.parametrize("reason", ["length", "stop", "cancelled"])
async def test_what_was_held_back_is_told_however_a_sequence_ends(desk: Desk, reason: Any) -> None:
    held = await desk.events(NewTokens(spelled("ab\n\nU")), Ended(reason), stop=["\n\nUser:"])
    assert shown(held)[1] == "ab\n\nU"
    half = await desk.events(NewTokens(spelled("a")), NewTokens(HALF), Ended(reason))
    assert shown(half)[1] == "a\ufffd"
    both = await desk.events(NewTokens(spelled("a\n")), NewTokens(HALF), Ended(reason), stop=["\n\ufffdx"])
    assert shown(both)[1] == "a\n\ufffd"


async def test_what_was_held_back_is_told_of_the_best(desk: Desk) -> None:
    run = desk.generation.run(
        GenerateParams("hello", best_of=2, sampling=Sampling(temperature=1.0, stop=["\n\nUser:"]))
    )
    await anext(run)
    for request, score in zip(desk.dispatcher.submitted, (-9.0, -1.0), strict=True):
        request.events.put_nowait(NewTokens([*spelled("a\n"), *HALF], logprobs(score, score, score)))
        request.events.put_nowait(Ended("length"))
    assert shown([event async for event in run])[1] == "a\n\ufffd"


async def test_what_was_held_back_is_told_of_each_beam(desk: Desk) -> None:
    beams = [BeamResult([*spelled("a"), *HALF], -1.0, "length"), BeamResult([*spelled("b"), *HALF], -2.0, "stop")]
    events = await desk.events(Ended("length", beams), width=2, n=2)
    assert [shown(events, index)[1] for index in range(2)] == ["a\ufffd", "b\ufffd"]
    texts = [event.token_ids for event in events if isinstance(event, Tokens) and event.index == 0]
    assert texts[-1] == [], "the last one has text alone"


async def test_a_cancelled_request_tells_what_it_had(desk: Desk) -> None:
    run = desk.generation.run(GenerateParams(ids(1, 2), request_id="mine"))
    await anext(run)
    (request,) = desk.dispatcher.submitted
    request.events.put_nowait(NewTokens([*spelled("a"), *HALF]))
    assert desk.generation.cancel("mine")
    assert shown([event async for event in run])[1] == "a\ufffd"


def test_the_daemons_own_bound_is_above_a_message() -> None:
    assert generation.MOST_MESSAGE_BYTES // 2 >= 16 << 20
