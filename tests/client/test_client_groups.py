"""A client gives the daemon parts of which most blocks have none, and gets what the rules need, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import numpy.typing as npt
import pytest

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import (
    AsyncCache,
    AsyncClient,
    ChunkedWindow,
    CrossAttention,
    NamespaceSpec,
    PartSpec,
    PreconditionError,
    RecurrentState,
    Rule,
    StoreResult,
    VisionEmbedding,
)

BLOCK_TOKENS, NBYTES = 4, 256
KV, STATE = 0, 1  # parts
Bytes = npt.NDArray[np.uint8]


@pytest.fixture(params=["shared", "streamed"])
async def client(request: pytest.FixtureRequest, daemon: DaemonProcess) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(daemon.address, name="test", memory=request.param) as made:
        yield made


async def register(client: AsyncClient, name: str, *rules: Rule | None, request: pytest.FixtureRequest) -> AsyncCache:
    parts = tuple(PartSpec(f"group{place}", 0, NBYTES, rule) for place, rule in enumerate(rules))
    return await client.register(NamespaceSpec(f"{name} {request.node.name}", BLOCK_TOKENS, parts))


def prompt(blocks: int, first_token: int = 0) -> npt.NDArray[np.uint32]:
    return np.arange(first_token, first_token + blocks * BLOCK_TOKENS, dtype=np.uint32)


def kv(blocks: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(1, 256, blocks * NBYTES, dtype=np.uint8)


async def load(cache: AsyncCache, blocks: int, max_blocks: int = 0) -> tuple[int, list[Bytes]]:
    """What is found of a prompt: blocks, and the bytes of each part; 0 where nothing was copied."""
    into = [np.zeros(blocks * NBYTES, np.uint8) for _ in cache.spec.parts]
    return await cache.load(prompt(blocks), into, max_blocks=max_blocks), into


def block(data: Bytes, index: int) -> bytes:
    return data[index * NBYTES : (index + 1) * NBYTES].tobytes()


async def test_states_of_a_few_blocks(client: AsyncClient, request: pytest.FixtureRequest) -> None:
    """All blocks have KV, two of ten a state: the prompt can continue after these."""
    cache = await register(client, "states", None, RecurrentState(), request=request)
    keys, states = kv(10, 1), kv(10, 2)
    assert await cache.store(prompt(10), keys, parts=[KV]) == StoreResult(10, 0)
    assert (await cache.match(prompt(10))).blocks == 0, "no state yet"
    for end in (4, 10):
        state = states[(end - 1) * NBYTES : end * NBYTES]
        stored = await cache.store(prompt(end), state, parts=[STATE], first_block=end - 1)
        assert stored == StoreResult(1, 0)
        assert await cache.store(prompt(end), state, parts=[STATE], first_block=end - 1) == StoreResult(0, 1)
    for asked, expected in ((10, 10), (9, 4), (4, 4), (3, 0)):
        found, (got_keys, got_states) = await load(cache, asked)
        assert found == expected
        assert got_keys[: found * NBYTES].tobytes() == keys[: found * NBYTES].tobytes()
        there = [at for at in range(asked) if block(got_states, at) != bytes(NBYTES)]
        assert there == ([found - 1] if found else [])
        assert all(block(got_states, at) == block(states, at) for at in there)


async def test_a_longer_prompt_goes_on_behind_a_state(client: AsyncClient, request: pytest.FixtureRequest) -> None:
    cache = await register(client, "longer", None, RecurrentState(2 * BLOCK_TOKENS), request=request)
    keys, states = kv(8, 1), kv(8, 2)
    await cache.store(prompt(4), keys[: 4 * NBYTES], parts=[KV])
    await cache.store(prompt(4), states[3 * NBYTES : 4 * NBYTES], parts=[STATE], first_block=3)
    assert await cache.store(prompt(8), keys[4 * NBYTES :], parts=[KV], first_block=4) == StoreResult(4, 0)
    assert (await cache.match(prompt(8))).blocks == 4
    await cache.store(prompt(8), states[7 * NBYTES :], parts=[STATE], first_block=7)
    assert (await cache.match(prompt(8))).blocks == 8
    found, (_, got_states) = await load(cache, 8)
    assert found == 8 and block(got_states, 7) == block(states, 7)


async def test_a_state_is_no_use_without_the_blocks_before(client: AsyncClient, request: pytest.FixtureRequest) -> None:
    cache = await register(client, "alone", None, RecurrentState(), request=request)
    with pytest.raises(PreconditionError, match="block 0"):
        await cache.store(prompt(4), kv(1, 1), parts=[STATE], first_block=3)
    assert (await cache.match(prompt(4))).blocks == 0


async def test_a_model_of_states_alone(client: AsyncClient, request: pytest.FixtureRequest) -> None:
    """Most blocks have no bytes at all."""
    cache = await register(client, "mamba", RecurrentState(), request=request)
    state = kv(1, 1)
    assert await cache.store(prompt(6), state, first_block=5) == StoreResult(1, 0)
    assert (await cache.match(prompt(5))).blocks == 0
    found, (got,) = await load(cache, 8)
    assert found == 6 and block(got, 5) == state.tobytes() and not got[: 5 * NBYTES].any()
    assert await cache.store(prompt(8), kv(1, 2), first_block=7) == StoreResult(1, 0)
    assert (await cache.match(prompt(8))).blocks == 8 and (await cache.match(prompt(7))).blocks == 6


async def test_chunks(client: AsyncClient, request: pytest.FixtureRequest) -> None:
    """A writer that has let go of an earlier chunk stores what it has."""
    cache = await register(client, "chunks", None, ChunkedWindow(3 * BLOCK_TOKENS), request=request)
    keys = kv(7, 1)
    await cache.store(prompt(7), keys, parts=[0])
    assert await cache.store(prompt(7), keys[3 * NBYTES :], parts=[1], first_block=3) == StoreResult(4, 0)
    assert [(await cache.match(prompt(blocks))).blocks for blocks in range(1, 8)] == [0, 0, 3, 4, 5, 6, 7]


async def test_a_full_chunk_that_is_missing_is_stored(client: AsyncClient, request: pytest.FixtureRequest) -> None:
    """Where it ends a prompt goes on without it, but the same prompt again goes on inside it."""
    cache = await register(client, "full chunk", None, ChunkedWindow(3 * BLOCK_TOKENS), request=request)
    keys, chunks = kv(6, 1), kv(6, 2)
    await cache.store(prompt(6), keys, parts=[0])
    assert [(await cache.match(prompt(blocks))).blocks for blocks in (5, 6)] == [3, 6]
    streamed = request.node.callspec.params["client"] == "streamed"
    sent = 3 if streamed else 6  # a stream begins with the chunk that ends where the match ends
    assert await cache.store(prompt(6), [keys, chunks]) == StoreResult(sent, 6 - sent)
    assert await cache.store(prompt(6), [keys, chunks]) == StoreResult(0, 6)
    assert (await cache.match(prompt(5))).blocks == 5
    found, (_, got) = await load(cache, 5)
    assert found == 5 and [block(got, at) for at in (3, 4)] == [block(chunks, at) for at in (3, 4)]


async def test_the_images_of_a_prompt(client: AsyncClient, request: pytest.FixtureRequest) -> None:
    cache = await register(client, "images", None, CrossAttention(2), request=request)
    keys, image = kv(5, 1), kv(2, 2)
    await cache.store(prompt(5), keys, parts=[0])
    await cache.store(prompt(1), image[:NBYTES], parts=[1])
    assert (await cache.match(prompt(5))).blocks == 0, "half an image"
    assert await cache.store(prompt(2), image, parts=[1]) == StoreResult(1, 1)
    assert (await cache.match(prompt(5))).blocks == 5
    found, (_, got) = await load(cache, 5)
    assert found == 5 and got[: 2 * NBYTES].tobytes() == image.tobytes() and not got[2 * NBYTES :].any()


async def test_an_image_by_its_content(client: AsyncClient, request: pytest.FixtureRequest) -> None:
    cache = await register(client, "embeddings", VisionEmbedding(), request=request)
    rows = kv(4, 1)
    assert await cache.store(prompt(4), rows) == StoreResult(4, 0)
    found, (got,) = await load(cache, 4)
    assert found == 4 and got.tobytes() == rows.tobytes()
    assert (await cache.match(prompt(4, first_token=1))).blocks == 0, "another image"
