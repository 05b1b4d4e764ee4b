"""Prefixes that an operator warms up: from disk, from a store of other hosts, and never in anybody's way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixd.base.errors import InvalidArgumentError, NotFoundError
from prefixd.cache.index.trie import CPU
from prefixd.server.prefixes import warm_answers
from prefixd.server.prefixes.warm_answers import WarmAnswers
from prefixd.v1 import admin_pb2 as pb
from prefixd.v1 import cache_pb2
from tests.cache.remote.memory_store import MemoryStore
from tests.rig import BLOCK_TOKENS, PART_BYTES, MakeRig, Rig

PROMPT = [1, 2, 3, 4, 5]
SPEC = cache_pb2.Namespace(
    name="model", block_tokens=BLOCK_TOKENS, parts=[cache_pb2.Part(group="kv", rank=0, nbytes=PART_BYTES)]
)


@pytest.fixture
async def make_rig(tmp_path: Path) -> AsyncIterator[MakeRig]:
    """`make_rig(...)` opens a rig; all of them are closed and checked in the end."""
    rigs: list[Rig] = []

    def make(**how: Any) -> Rig:
        rigs.append(Rig(tmp_path / str(len(rigs)), **how))
        return rigs[-1]

    yield make
    for rig in rigs:
        await rig.close()


def tokens(prompt: list[int]) -> bytes:
    return np.repeat(np.array(prompt, "<u4"), BLOCK_TOKENS).tobytes()


def asked(rig: Rig, prompt: list[int] = PROMPT) -> pb.WarmRequest:
    return pb.WarmRequest(token_ids=tokens(prompt), namespace_id=rig.namespace.id, namespace=SPEC, tenant="default")


def found(answer: pb.WarmResponse) -> dict[int, int]:
    return {run.tier: run.blocks for run in answer.found}


async def test_from_disk_after_a_restart_by_key_and_by_tokens(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=16)
    await rig.put(PROMPT, durable=True)
    await rig.put([7, 8], durable=True)
    await rig.restart()
    warming = WarmAnswers(rig.cache)
    answer = await warming.warm(asked(rig))
    assert (answer.blocks, answer.brought, answer.left, found(answer)) == (5, 5, 0, {cache_pb2.TIER_DISK: 5})
    assert rig.tiers(PROMPT, CPU) == [True] * 5
    assert sum(rig.cache.measurements.timings.lookup_s.counts) == 0, "it is no engine's look-up"
    again = await warming.warm(asked(rig))
    assert (again.brought, again.left, found(again)) == (0, 0, {cache_pb2.TIER_CPU: 5})
    key = f"{rig.namespace.id.hex()}/{rig.chain([7, 8]).key(1).hex()}"
    answer = await warming.warm(pb.WarmRequest(key=key))
    assert (answer.blocks, answer.brought) == (2, 2) and rig.tiers([7, 8], CPU) == [True] * 2
    rig.check()


async def test_others_run_while_a_long_prefix_is_read_by_key(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, turns = make_rig(cpu=8, disk=16), 0

    async def give_way() -> None:
        nonlocal turns
        turns += 1
        await asyncio.sleep(0)

    monkeypatch.setattr(warm_answers, "give_way", give_way, raising=False)
    monkeypatch.setattr(warm_answers, "_TOKENS_AT_ONCE", 2 * BLOCK_TOKENS, raising=False)
    await rig.put(PROMPT, durable=True)
    await rig.restart()
    key = f"{rig.namespace.id.hex()}/{rig.chain(PROMPT).key(4).hex()}"
    answer = await WarmAnswers(rig.cache).warm(pb.WarmRequest(key=key))
    assert (answer.blocks, answer.brought, turns) == (5, 5, 2)


async def test_a_new_host_gets_what_another_has_shared(tmp_path: Path) -> None:
    stores = MemoryStore(), MemoryStore()
    stores[1].objects = stores[0].objects
    old, new = (Rig(tmp_path / name, cpu=16, remote=store) for name, store in zip("ab", stores, strict=True))
    await old.put(PROMPT)
    assert old.cache.mover.remote is not None and await old.cache.mover.remote.sharing.write_all()
    request = asked(new, [*PROMPT, 9])
    new.cache.leases.close(new.session)
    ordinal = new.namespace.ordinal
    del new.namespace  # nobody has registered it there yet
    assert new.cache.namespaces.forget(ordinal)
    answer = await WarmAnswers(new.cache).warm(request)
    assert (answer.blocks, answer.brought, found(answer)) == (6, 5, {cache_pb2.TIER_REMOTE: 5})
    new.namespace, new.session = new.register(), new.open_session()
    assert new.tiers(PROMPT, CPU) == [True] * 5 and await new.get(PROMPT) == 5, "every byte is right"
    for rig in (old, new):
        await rig.close()


async def test_no_more_comes_than_prefetches_may_bring(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=16, prefetch_bytes=3 * PART_BYTES)
    await rig.put(PROMPT, durable=True)
    await rig.restart()
    warming = WarmAnswers(rig.cache)
    answer = await warming.warm(asked(rig))
    assert (answer.brought, answer.left) == (3, 2)
    answer = await warming.warm(asked(rig))
    assert (answer.brought, answer.left) == (2, 0), "the rest comes with the next call"


async def test_who_needs_the_room_goes_first(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=16)
    await rig.put([1, 2, 3, 4], durable=True)
    await rig.put([7, 8, 9], durable=True)
    await rig.restart()
    warm = asyncio.create_task(WarmAnswers(rig.cache).warm(asked(rig, [1, 2, 3, 4])))
    await asyncio.sleep(0)
    lease = await rig.lease([7, 8, 9])
    assert lease is not None and len(lease.rows) == 3
    answer = await warm
    assert answer.brought + answer.left <= 4
    rig.check()


async def test_wrong_requests(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8)
    warming = WarmAnswers(rig.cache)
    with pytest.raises(InvalidArgumentError, match="nothing to warm up was named"):
        await warming.warm(pb.WarmRequest())
    with pytest.raises(NotFoundError, match="no prefix has the key"):
        await warming.warm(pb.WarmRequest(key="9f86d081"))
    salted = rig.register("other", salt=b"secret")
    strange = pb.WarmRequest(token_ids=tokens([1]), namespace_id=bytes(8), namespace=SPEC, tenant="default")
    with pytest.raises(NotFoundError, match=r"has a salt \(a secret\) or a worker"):
        await warming.warm(strange)
    strange.tenant = "nobody"
    with pytest.raises(NotFoundError, match="there is no tenant 'nobody' here yet"):
        await warming.warm(strange)
    strange.ClearField("namespace")
    with pytest.raises(NotFoundError, match="send it as `namespace`"):
        await warming.warm(strange)
    known = pb.WarmRequest(token_ids=tokens([1]), namespace_id=salted.id)
    assert (await warming.warm(known)).blocks == 1, "its tenant has registered it"
    with pytest.raises(InvalidArgumentError, match="token_ids is empty"):
        await warming.warm(pb.WarmRequest(token_ids=b"", namespace_id=salted.id))
