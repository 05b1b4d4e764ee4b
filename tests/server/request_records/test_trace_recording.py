"""Recording a trace: bounded, one at a time, with hashes that tell what prompts have in common and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from prefixd.base.errors import InvalidArgumentError, PreconditionError
from prefixd.cache import NamespaceSpec, PartSpec
from prefixd.cache.prompt_listeners import Lookup
from prefixd.server.request_records.trace_recording import TraceRecording
from prefixd.v1 import admin_pb2 as pb
from tests.rig import Rig


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path / "disk")
    yield made
    await made.close()


def look_up(rig: Rig, prompt: list[int], salt: bytes = b"") -> None:
    spec = NamespaceSpec("model", 16, (PartSpec("kv", 0, rig.part_bytes),), salt)
    namespace = rig.cache.register(spec)
    chain = rig.cache.chain(namespace, b"".join(token.to_bytes(4, "little") for token in prompt))
    rig.cache.prompts.tell_looked_up(namespace, chain, Lookup(chain.tokens, len(chain), 0))


async def recorded(rig: Rig, *prompts: tuple[list[int], bytes]) -> list[pb.RecordedRequest]:
    async with aclosing(TraceRecording(rig.cache, 0.01).record(5.0)) as messages:
        found: list[pb.RecordedRequest] = []
        async for message in messages:
            if not found and not message.done:
                for prompt, salt in prompts:
                    look_up(rig, prompt, salt)
                rig.clock.now += 5.0
            found += message.requests
        assert message.done and not message.dropped_requests
    assert not rig.cache.prompts.looked_up and not rig.cache.prompts.answered
    return found


async def test_equal_beginnings_have_equal_hashes_only_in_one_namespace_and_one_recording(
    rig: Rig,
) -> None:
    common = list(range(512))
    prompts = [([*common, *[tail] * 600], b"") for tail in (1, 2)]
    one, two, salted = await recorded(rig, *prompts, (prompts[0][0], b"salt"))
    assert (one.prompt_tokens, one.output_tokens, len(one.hashes)) == (1112, 0, 2)
    assert one.hashes[0] == two.hashes[0]
    assert len({*one.hashes, *two.hashes, *salted.hashes}) == 5
    again = (await recorded(rig, prompts[0]))[0]
    assert not set(again.hashes) & set(one.hashes)


async def test_what_is_not_read_is_dropped_and_counted(rig: Rig) -> None:
    recording = TraceRecording(rig.cache, 0.01)
    async with aclosing(recording.record(0.0)) as messages:
        await anext(messages)
        for _ in range(5000):
            look_up(rig, [1] * 20)
        assert (await anext(messages)).dropped_requests == 5000 - 4096
        with pytest.raises(PreconditionError, match="another recording"):
            await anext(recording.record(0.0))
    with pytest.raises(InvalidArgumentError, match="duration_s = -1"):
        await anext(recording.record(-1.0))
    assert not rig.cache.prompts.looked_up


async def test_others_run_while_many_short_prompts_are_sent(rig: Rig) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with aclosing(TraceRecording(rig.cache, 0.0).record(0.0)) as messages:
        await anext(messages)
        for _ in range(4000):
            look_up(rig, [1] * 20)
        counting = asyncio.create_task(count_turns())
        assert len((await anext(messages)).requests) == 4000
        counting.cancel()
    assert turns > 10
