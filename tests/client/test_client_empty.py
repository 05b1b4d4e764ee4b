"""One rule for all calls: a prompt without tokens has no blocks, and a salt is bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prefixd.client import (
    AsyncClient,
    Client,
    InvalidArgumentError,
    MatchResult,
    MemoryUnavailable,
    NamespaceSpec,
    Retention,
    Sampling,
    StoreResult,
)
from prefixd.client.inference import generate_request

EMPTY = [[], (), np.empty(0, np.uint32), np.empty(0)]


@pytest.mark.parametrize("memory", ["shared", "streamed"])
@pytest.mark.parametrize("tokens", EMPTY, ids=["list", "tuple", "array", "array of floats"])
async def test_a_prompt_without_tokens_has_no_blocks(
    stand_in: Any, spec: NamespaceSpec, memory: Any, tokens: Any
) -> None:
    async with AsyncClient(stand_in.address, memory=memory) as client:
        cache = await client.register(spec)
        assert await cache.match(tokens, counted=True) == MatchResult(0, ())
        assert await cache.prefetch(tokens) == await cache.persist(tokens) == 0
        assert await cache.retain(tokens, [Retention(priority=5)]) == 0
        assert await cache.load(tokens, bytearray()) == 0
        assert await cache.store(tokens, b"", durable=True) == StoreResult(0, 0)
        if memory == "streamed":
            for grant in (cache.acquire, cache.reserve):
                with pytest.raises(MemoryUnavailable):
                    await grant(tokens)
        else:
            async with await cache.acquire(tokens) as lease:
                assert (lease.blocks, lease.offsets) == (0, ()) and await lease.copy_into(bytearray()) == 0
                await lease.renew()
            async with await cache.reserve(tokens) as slots:
                assert slots.blocks == 0 and await slots.copy_from(b"") == 0
                assert await slots.commit(durable=True, retention=[Retention(priority=5)]) == StoreResult(0, 0)
        assert set(stand_in.entered) <= {"OpenSession", "RegisterNamespace"}, "the daemon was not asked"


@pytest.mark.parametrize("salt", ["text", "", None, 7, bytearray(b"x")])
def test_a_salt_is_bytes(salt: Any) -> None:
    told = f"salt is of type {type(salt).__name__}; it must be bytes, of a text `text.encode"
    with pytest.raises(InvalidArgumentError, match=told):
        NamespaceSpec("model", 2, (), salt=salt)
    with pytest.raises(InvalidArgumentError, match=told):
        generate_request([1], Sampling(), salt=salt)
    with Client("unix:/nowhere") as client, pytest.raises(InvalidArgumentError, match=told):
        next(client.generate([1], salt=salt))
