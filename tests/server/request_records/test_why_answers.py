"""`Why`: which requests it explains, and what it looks up in the journal of evictions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prefixd.base.errors import InvalidArgumentError, NotFoundError
from prefixd.cache import NamespaceSpec, PartSpec, TieredCache
from prefixd.cache.placement.lacked_blocks import note_missing
from prefixd.observability.actor import acting
from prefixd.observability.eviction_journal import Reason, because
from prefixd.observability.request_log import RequestLog
from prefixd.observability.request_record import Kind, RequestRecord, StageName
from prefixd.server.request_records import why_answers
from prefixd.server.request_records.why_answers import WhyAnswers
from prefixd.v1 import admin_pb2 as pb
from prefixd.v1 import cache_pb2
from tests.rig import OpenCache

TOKENS = 4


@pytest.fixture
async def cache() -> AsyncIterator[TieredCache]:
    async with OpenCache(cpu_bytes=1 << 20, clock=lambda: 1000.0) as opened:
        yield opened.cache


@pytest.fixture
def log(cache: TieredCache) -> RequestLog:
    return RequestLog(cache.clock, kept=200, unix_clock=lambda: 1.8e9)


@pytest.fixture
def answers(cache: TieredCache, log: RequestLog) -> WhyAnswers:
    generation: Any = SimpleNamespace(records=log, token_text=lambda model, token: f"<{token}>")
    return WhyAnswers(cache, generation)


def computed(log: RequestLog, id: str, tokens: int = 40) -> RequestRecord:
    """A request that came 10 s ago, and computed its prompt."""
    record = log.begin(Kind.GENERATE, "Generate", id=id, tenant="a", model="m", arrival_s=990.0)
    record.prompt_tokens, record.hit_tokens = tokens, [0, 0, 0, 0]
    record.note(StageName.PREFILL, 990.0, 991.0)
    record.first_token_s = 991.0
    return record


async def test_which_requests_are_explained(answers: WhyAnswers, log: RequestLog) -> None:
    computed(log, "one").end("stop", 992.0)
    log.begin(Kind.LOOKUP, "Acquire", client_id="chat-7").end("ok", 1000.0)
    log.begin(Kind.STORE, "Put", client_id="chat-7").end("ok", 1000.0)
    named = [each.method for each in (await answers.answer(pb.WhyRequest(request_id="chat-7"))).requests]
    assert named == ["Acquire", "Put"]
    assert [each.id for each in (await answers.answer(pb.WhyRequest(last=5))).requests] == ["one"]
    last = (await answers.answer(pb.WhyRequest(last=2, calls=True))).requests
    assert [each.method for each in last] == ["Put", "Acquire"]
    with pytest.raises(NotFoundError, match="the daemon remembers the last 200"):
        await answers.answer(pb.WhyRequest(request_id="nobody"))
    with pytest.raises(InvalidArgumentError, match="send request_id, or last = 10"):
        await answers.answer(pb.WhyRequest())
    with pytest.raises(InvalidArgumentError, match="last is 65; ask for at most 64"):
        await answers.answer(pb.WhyRequest(last=65))
    log.kept = 0
    with pytest.raises(NotFoundError, match="is remembered"):
        await answers.answer(pb.WhyRequest(request_id="nobody"))


async def test_who_evicted_what_it_lacked(answers: WhyAnswers, log: RequestLog, cache: TieredCache) -> None:
    home = cache.register(NamespaceSpec("m", TOKENS, (PartSpec("full", 0, 4096),), tenant="a"))
    chain = cache.chain(home, np.arange(40, dtype="<u4").tobytes())
    record = computed(log, "one")
    record.missing = note_missing(home, chain, 0, len(chain))
    journal = cache.placement.evictions
    with acting("r7"), because(Reason.ROOM, "b"):
        journal.enter(chain.key_rows(0, 2), 1, 960.0)
        journal.enter(chain.key_rows(2, 7), 1, 970.0)
    with because(Reason.OPERATOR):
        journal.enter(chain.key_rows(7, 8), 2, 980.0)
        journal.enter(chain.key_rows(0, 10), 2, 995.0)  # after its arrival: it had been computed again
    record.end("stop", 992.0)
    (found,) = (await answers.answer(pb.WhyRequest(request_id="one"))).requests
    assert (found.cause, found.missing.missing_blocks, found.missing.looked_for) == ("evicted", 10, 10)
    room, operator = found.missing.evictions
    assert (room.blocks, room.before_s, room.tier) == (7, 20.0, cache_pb2.TIER_CPU)
    assert (room.reason, room.tenant, room.by) == ("room", "b", "r7")
    assert (operator.blocks, operator.reason, operator.tier) == (1, "operator", cache_pb2.TIER_DISK)
    assert "for tenant b, which needed room, by r7 20.0 s before it came" in found.sentence


async def test_the_block_at_which_a_load_failed(answers: WhyAnswers, log: RequestLog, cache: TieredCache) -> None:
    key = np.arange(16, dtype=np.uint8)
    for name, cause in (("one", "load_failed"), ("two", "damaged")):
        record = computed(log, name)
        record.found_tokens = [0, 0, 36, 0]
        record.note(StageName.LOAD, 990.0, 990.1, tier="disk", outcome="failed", block_key=key.tobytes().hex())
        record.end("stop", 992.0)
        (found,) = (await answers.answer(pb.WhyRequest(request_id=name))).requests
        assert found.cause == cause
        with because(Reason.DAMAGED):
            cache.placement.evictions.enter(key.reshape(1, 16), 2, 990.05)
    assert {stage.name: dict(stage.attributes) for stage in found.stages}["load"]["tier"] == "disk"


async def test_only_what_runs_is_looked_up_again(
    answers: WhyAnswers, log: RequestLog, cache: TieredCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = cache.register(NamespaceSpec("m", TOKENS, (PartSpec("full", 0, 4096),), tenant="a"))
    chain = cache.chain(home, np.arange(40, dtype="<u4").tobytes())
    journal, looked = cache.placement.evictions, list[float]()
    find = journal.find
    monkeypatch.setattr(journal, "find", lambda keys, before_s: (looked.append(before_s), find(keys, before_s))[1])
    record = computed(log, "one")
    record.missing = note_missing(home, chain, 0, len(chain))
    for looked_up in (1, 2, 3, 3):
        if looked_up == 3:
            record.end("stop", 992.0)
        (found,) = (await answers.answer(pb.WhyRequest(last=1))).requests
        assert found.missing.looked_for == 10 and len(looked) == looked_up
    for number in range(150):
        computed(log, f"r{number}").end("stop", 992.0)
    for _ in range(3):
        assert len((await answers.answer(pb.WhyRequest(last=64))).requests) == 64
    assert len(answers._found) == 65
    monkeypatch.setattr(why_answers, "_FOUND_KEPT", 65)
    await answers.answer(pb.WhyRequest(request_id="r0"))
    assert len(answers._found) == 65


async def test_a_request_that_runs(answers: WhyAnswers, log: RequestLog) -> None:
    record = log.begin(Kind.GENERATE, "Generate", id="one", arrival_s=990.0)
    record.begin(StageName.MODEL, 990.0)
    (found,) = (await answers.answer(pb.WhyRequest(request_id="one"))).requests
    assert (found.cause, found.outcome, found.age_s) == ("model_loading", "", 10.0)
    assert not found.HasField("ended_s") and not found.stages[0].HasField("end_s") and not found.HasField("missing")
    assert found.arrived_unix_s == 1.8e9 - 10
