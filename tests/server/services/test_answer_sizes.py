"""No answer is larger than a message can be: a grant is cut to what can be told of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from prefixd.base.errors import InvalidArgumentError
from prefixd.cache import Lease, NamespaceSpec, PartSpec, Process, Reservation, TieredCache
from prefixd.cache.cache import MAX_BLOCKS
from prefixd.server.rpc.sockets import listeners
from prefixd.server.services import cache_service
from prefixd.v1 import cache_pb2 as pb
from prefixd.v1 import cache_pb2_grpc

PARTS = 3
ROOM = 1 << 16  # of a message, for everything else in it


@pytest.fixture
async def stub(cache_server: grpc.aio.Server, tmp_path: Path) -> AsyncIterator[Any]:
    cache_server.add_insecure_port(f"unix:{tmp_path}/s")
    await cache_server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        yield cache_pb2_grpc.PrefixCacheStub(channel)


def test_the_largest_answers_fit_into_a_message() -> None:
    limit = listeners.MESSAGE_BYTES - ROOM
    largest = [2**64 - 1] * cache_service._GRANTED_PARTS
    assert pb.AcquireResponse(offsets=largest).ByteSize() <= limit
    assert pb.ReserveResponse(offsets=largest).ByteSize() <= limit
    assert pb.GetHeader(sent=bytes(cache_service._GRANTED_PARTS)).ByteSize() <= limit
    run = pb.TierRun(tier=pb.TIER_REMOTE, blocks=1)
    each = pb.MatchResponse(runs=[run]).ByteSize()
    assert MAX_BLOCKS * each <= limit, "every block in another tier than the one before it"


async def test_a_grant_has_no_more_blocks_than_its_answer_can_tell_of(
    cache: TieredCache, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_service, "_GRANTED_PARTS", 4 * PARTS + 2)
    events = stub.OpenSession(pb.OpenSessionRequest())
    session = (await events.read()).opened.session_id
    cache.leases.sessions[session].processes.add(Process(1))
    parts = [pb.Part(group=f"g{part}", nbytes=8) for part in range(PARTS)]
    wanted = pb.Namespace(name="n", block_tokens=1, parts=parts)
    register = pb.RegisterNamespaceRequest(session_id=session, namespace=wanted)
    named = {
        "session_id": session,
        "namespace_id": (await stub.RegisterNamespace(register)).namespace_id,
        "token_ids": np.arange(10, dtype="<u4").tobytes(),
    }
    for first in (0, 4, 8):
        reserved = await stub.Reserve(pb.ReserveRequest(**named))
        blocks = min(4, 10 - first)
        assert (reserved.first_block, reserved.blocks, len(reserved.offsets)) == (first, blocks, blocks * PARTS)
        commit = pb.CommitRequest(session_id=session, reservation_id=reserved.reservation_id, blocks=reserved.blocks)
        assert (await stub.Commit(commit)).committed == blocks
    lease = await stub.Acquire(pb.AcquireRequest(**named))
    assert (lease.blocks, len(lease.offsets)) == (4, 4 * PARTS)
    last = await stub.Acquire(pb.AcquireRequest(**named, first_block=4, max_blocks=3, parts=[1]))
    assert (last.blocks, len(last.offsets)) == (3, 3)
    sent = [message async for message in stub.Get(pb.GetRequest(**named, first_block=2))]
    assert sent[0].header.blocks == 4 and sum(len(message.data) for message in sent[1:]) == 4 * PARTS * 8
    assert (cache.leases.count(Lease), cache.leases.count(Reservation)) == (2, 0)
    events.cancel()


async def test_a_prompt_has_only_so_many_blocks(cache: TieredCache) -> None:
    namespace = cache.register(NamespaceSpec("n", 2, (PartSpec("g", 0, 8),)))
    assert len(cache.chain(namespace, bytes(8 * MAX_BLOCKS + 4))) == MAX_BLOCKS
    with pytest.raises(InvalidArgumentError, match=rf"{MAX_BLOCKS + 1} blocks of 2 tokens; a call takes {MAX_BLOCKS}"):
        cache.chain(namespace, bytes(8 * (MAX_BLOCKS + 1)))
