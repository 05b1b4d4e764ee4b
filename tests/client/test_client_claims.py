"""Several prompts in one call, and claims on what is computed: the SDK against the service itself, in this process."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from prefixd.cache import TieredCache
from prefixd.client import (
    AsyncCache,
    AsyncClient,
    ClaimResult,
    Client,
    InvalidArgumentError,
    MatchResult,
    NamespaceSpec,
    PartSpec,
    Tier,
    TierRun,
)
from prefixd.server.services import match_answers
from prefixd.server.services.match_answers import MatchAnswers
from prefixd.v1 import cache_pb2 as pb
from tests.waiting import until

SPEC = NamespaceSpec("model", 4, (PartSpec("kv", 0, 64),))
Open = Callable[[], Any]


def prompt(*starts: int) -> list[int]:
    """Blocks of four tokens, each told apart by its first."""
    return [token for start in starts for token in range(100 * start, 100 * start + 4)]


async def store(cache: AsyncCache, tokens: list[int]) -> None:
    await cache.store(tokens, np.zeros(len(tokens) // 4 * 64, np.uint8))


@pytest.fixture
async def address(cache_server: grpc.aio.Server, folder: Path) -> str:
    cache_server.add_insecure_port(f"unix:{folder}/s")
    await cache_server.start()
    return f"unix:{folder}/s"


@pytest.fixture
async def opened(address: str) -> AsyncIterator[Open]:
    """Opens one engine after the other: a client of its own with the namespace."""
    clients: list[AsyncClient] = []

    async def one() -> AsyncCache:
        clients.append(AsyncClient(address, memory="streamed"))
        return await clients[-1].register(SPEC)

    yield one
    for client in clients:
        await client.close()


def counting(counts: Counter[str], name: str) -> Any:
    method = getattr(MatchAnswers, name)

    def count(self: Any, *arguments: Any) -> Any:
        counts[name] += 1
        return method(self, *arguments)

    return count


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the daemon was asked, by call."""
    counts: Counter[str] = Counter()
    for name in ("match", "match_many", "claim"):
        monkeypatch.setattr(MatchAnswers, name, counting(counts, name))
    return counts


# -- several prompts ------------------------------------------------------------------------------------------------


async def test_many_prompts_are_one_call_and_each_counts_once(
    opened: Open, cache: TieredCache, called: Counter[str]
) -> None:
    engine = await opened()
    await store(engine, prompt(1, 2, 3))
    called.clear()
    prompts = [prompt(1, 2, 9), [], prompt(7), prompt(1, 2, 3, 4), [1, 2]]
    answers = await engine.match_many(prompts, counted=[True, True, False, True, True])
    assert [answer.blocks for answer in answers] == [2, 0, 0, 3, 0]
    assert answers[3].runs == (TierRun(Tier.CPU, 3),) and answers[1] == MatchResult(0, ())
    assert called == {"match_many": 1}
    assert cache.counters.asked_tokens == 12 + 16 and sum(cache.counters.hit_tokens) == 0
    assert [await engine.match(each) for each in prompts] == answers, "the same as one after the other"
    assert await engine.match_many([]) == []
    with pytest.raises(InvalidArgumentError, match="counted has 1 values for 2 prompts"):
        await engine.match_many(prompts[:2], counted=[True])


async def test_calls_are_divided_by_prompts_and_bytes(opened: Open, called: Counter[str]) -> None:
    engine = await opened()
    assert len(await engine.match_many([prompt(each) for each in range(300)])) == 300
    assert called == {"match_many": 2}
    called.clear()
    long = np.arange(400_000, dtype=np.uint32)  # 1.6 MB
    assert [answer.blocks for answer in await engine.match_many([long] * 5)] == [0] * 5
    assert called == {"match_many": 2, "match": 1}


async def test_too_many_prompts_are_refused_and_none_counts(
    opened: Open, cache: TieredCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = await opened()
    monkeypatch.setattr(match_answers, "_PROMPTS_BYTES", 1 << 20)  # this server takes 4 MiB in a message
    many = pb.MatchManyRequest(prompts=[pb.PromptToMatch(token_ids=b"1234", asked=True)] * 257)
    with pytest.raises(InvalidArgumentError, match="prompts has 257 prompts; send 256 at most"):
        await engine._namespace.match_many(many)
    long = pb.MatchManyRequest(prompts=[pb.PromptToMatch(token_ids=bytes(1 << 20), asked=True)] * 2)
    with pytest.raises(InvalidArgumentError, match="prompts has 2097152 bytes of token ids"):
        await engine._namespace.match_many(long)
    wrong = pb.MatchManyRequest(prompts=[pb.PromptToMatch(token_ids=b"1234" * 4, asked=True), pb.PromptToMatch()])
    with pytest.raises(InvalidArgumentError, match="token_ids is empty"):
        await engine._namespace.match_many(wrong)
    assert cache.counters.asked_tokens == 0


async def test_an_older_daemon_is_asked_about_one_after_the_other(stand_in: Any, spec: NamespaceSpec) -> None:
    async with AsyncClient(stand_in.address) as client:
        cache = await client.register(spec)
        for _ in range(2):
            assert [answer.blocks for answer in await cache.match_many([[1, 2], [3, 4]])] == [1, 1]
    assert stand_in.entered.count("Match") == 4


# -- claims ---------------------------------------------------------------------------------------------------------


async def test_eight_engines_compute_a_prefix_once(opened: Open, called: Counter[str]) -> None:
    tokens, computed = prompt(1, 2, 3, 4), 0

    async def serve(engine: AsyncCache) -> None:
        nonlocal computed
        claim = await engine.claim(tokens, wait_s=30.0)
        if claim.cached_blocks < 4:
            await asyncio.sleep(0)  # the others ask meanwhile
            computed += 4 - claim.cached_blocks
            await store(engine, tokens)
        assert not await engine.end_claim(claim), "it ended with its blocks"
        assert (await engine.match(tokens)).blocks == 4

    await asyncio.gather(*[serve(await opened()) for _ in range(8)])
    assert computed == 4 and called["claim"] == 8


async def test_a_match_says_who_computes_the_rest(opened: Open) -> None:
    one, other = await opened(), await opened()
    await store(one, prompt(1))
    claim = await one.claim(prompt(1, 2, 3), ttl_s=20.0)
    assert (claim.cached_blocks, claim.ttl_s <= 20.0, claim.other) == (1, True, None)
    assert (await one.match(prompt(1, 2))).claimed is None, "one's own is no news"
    (seen,) = await other.match_many([prompt(1, 2, 9)])
    claimed = seen.claimed
    assert claimed is not None and (claimed.first_block, claimed.end_block, claimed.prompt_blocks) == (1, 2, 3)
    assert 0 < claimed.left_s <= 20.0 and claimed.age_s >= 0
    refused = await other.claim(prompt(1, 2, 9))
    assert not refused.claim_id and refused.other is not None and not await other.end_claim(refused)
    assert await one.end_claim(claim) and not await one.end_claim(claim)
    assert (await other.match(prompt(1, 2, 9))).claimed is None


async def test_the_claim_of_an_engine_that_dies_passes_on(opened: Open, address: str) -> None:
    other = await opened()
    dying = AsyncClient(address, memory="streamed")
    await (await dying.register(SPEC)).claim(prompt(1))
    waiting = asyncio.create_task(other.claim(prompt(1), wait_s=30.0))
    await asyncio.sleep(0)
    await dying.close()
    assert (await waiting).claim_id


async def test_a_caller_that_gives_up_has_no_claim(opened: Open, cache: TieredCache) -> None:
    one, other, third = await opened(), await opened(), await opened()
    claim = await one.claim(prompt(1))
    waiting = asyncio.create_task(other.claim(prompt(1), wait_s=30.0))
    await until(lambda: cache.computing.counters.waits)
    waiting.cancel()
    await one.end_claim(claim)
    assert (await third.claim(prompt(1), wait_s=30.0)).claim_id, "what it got meanwhile was given back"


async def test_prompts_without_a_block_and_wrong_times(opened: Open) -> None:
    engine = await opened()
    assert await engine.claim([]) == ClaimResult(0) == await engine.claim([1, 2])
    with pytest.raises(InvalidArgumentError, match="wait_s is -1"):
        await engine.claim(prompt(1), wait_s=-1)


async def test_the_blocking_client_has_the_same(address: str) -> None:
    def use() -> None:
        with Client(address, memory="streamed") as client:
            cache = client.register(SPEC)
            claim = cache.claim(prompt(1))
            assert claim.claim_id and cache.end_claim(claim)
            assert [answer.blocks for answer in cache.match_many([prompt(1), prompt(2)])] == [0, 0]

    await asyncio.to_thread(use)
