"""Requests of several tenants whose blocks become common: who finds what, and what is entered behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from prefixd.cache import Namespace
from prefixd.cache.index.trie import CPU
from prefixd.images.decoding import Pixels
from prefixd.serving.images.prompt_images import PromptLayout
from prefixd.serving.loading import piece_load, tail_load
from prefixd.serving.request.request import Request
from prefixd.worker_protocol.protocol import Arrived, Extend, PromptImage, Start
from tests.serving.bench import Bench, Events, Expected, MakeBench
from tests.serving.dispatch.staging.test_loading import pace
from tests.serving.fake_worker import BLOCK, MODELS
from tests.tries import used_rows
from tests.waiting import until

PROMPT = range(100, 133)  # 8 blocks and a token
LONGER = range(100, 157)  # 14 and a token
LARGEST = 5 * 200


@dataclass
class House:
    """A bench whose requests belong to tenants."""

    bench: Bench
    homes: dict[str, Namespace]

    def submit(self, tenant: str, tokens: Sequence[int], **options: Any) -> Request:
        bench = self.bench
        if tenant not in self.homes:
            spec = msgspec.structs.replace(bench.namespace.spec, tenant=tenant, worker=True)
            self.homes[tenant] = bench.cache.register(spec)
        bench.namespace = self.homes[tenant]
        return bench.submit(tokens, **options)

    async def run(self, tenant: str, tokens: Sequence[int], **options: Any) -> Request:
        request = self.submit(tenant, tokens, **options)
        await self.bench.finish(request)
        await self.settle()
        return request

    async def settle(self) -> None:
        assert self.bench.cache.common is not None
        await self.bench.cache.common.work()
        await self.bench.quiet()

    def found(self, request: Request) -> int:
        """Blocks that the worker was given with it."""
        starts = [message for message in self.bench.sent if isinstance(message, Start)]
        return next(start.cached_blocks for start in starts if start.id == request.id)


async def house_of(make_bench: MakeBench, frames: int = LARGEST, **options: Any) -> House:
    return House(await make_bench(frames, **{"cpu_slots": LARGEST, "share_after": 3, "load": "always", **options}), {})


@pytest.mark.parametrize("model", MODELS)
async def test_the_first_to_find_a_prompt_comes_after_so_many_who_computed_it(
    make_bench: MakeBench, events: Events, expected: Expected, model: str
) -> None:
    house = await house_of(make_bench, model=model)
    for tenant in "abc":
        request = await house.run(tenant, PROMPT, max_tokens=2)
        assert (house.found(request), sum(request.hit_tokens or [])) == (0, 0)
        assert events(request) == (expected(PROMPT, 2), "length")
    request = await house.run("d", LONGER, max_tokens=5)
    assert house.found(request) == 8
    assert request.hit_tokens is not None and request.hit_tokens[CPU] == 8 * BLOCK
    assert events(request) == (expected(LONGER, 5), "length")
    again = await house.run("d", LONGER, max_tokens=5)  # own blocks behind common ones
    assert house.found(again) == 14
    assert house.found(await house.run("a", LONGER, max_tokens=1)) == 8
    assert house.found(await house.run("b", LONGER, max_tokens=1)) == 8
    assert house.found(await house.run("c", LONGER, max_tokens=1)) == 14


async def test_tenants_do_not_wait_for_each_other(make_bench: MakeBench) -> None:
    """A prompt is computed once for a tenant, and not for all: to wait would tell that another has it."""
    house = await house_of(make_bench)
    first, second = house.submit("a", PROMPT), house.submit("b", PROMPT)
    third = house.submit("a", PROMPT)
    await house.bench.running(first)
    await house.bench.running(second)
    await house.bench.quiet()
    assert third.id not in house.bench.runs
    assert second.queued.lacks != first.queued.lacks == third.queued.lacks
    await house.bench.finish(first, second, third)
    assert [house.found(each) for each in (first, second, third)] == [0, 0, 8]


async def test_a_worker_that_knows_an_image_does_not_tell_another_tenant(make_bench: MakeBench) -> None:
    """An answer says how many embeddings of its images were computed, and comes earlier without."""
    house = await house_of(make_bench)
    images = [PromptImage(place, 3, b"\1" * 32, Pixels(0, (), {})) for place in (2, 7)]
    layout = PromptLayout(bytes(40), images, 8, cross=False)
    await house.run("a", PROMPT)
    await house.run("b", PROMPT)
    first, again, other = (layout.of_request().for_worker(house.homes[tenant]) for tenant in "aab")
    assert first == again != other
    assert first[0].digest == first[1].digest not in (images[0].digest, other[0].digest)


@pytest.mark.parametrize("look_ahead", [0, 8])
async def test_a_request_that_waits_sees_that_its_prompt_has_become_common(
    make_bench: MakeBench, look_ahead: int
) -> None:
    """In the queue, and where it was staged without anything."""
    house = await house_of(make_bench, max_running=1, look_ahead=look_ahead)
    for tenant in "ab":
        await house.run(tenant, PROMPT)
    last = house.submit("c", PROMPT)
    await house.bench.running(last)
    waiting = house.submit("d", PROMPT)
    await house.bench.quiet()
    assert waiting.queued.cached_tokens == 0
    house.bench.step(last)
    await house.settle()
    house.bench.dispatcher._tracker.refresh()
    assert waiting.queued.cached_tokens == (0 if look_ahead else 8 * BLOCK)
    await house.bench.finish(last, waiting)
    assert house.found(waiting) == 8


async def test_a_request_goes_on_behind_common_blocks_after_its_worker_died(
    make_bench: MakeBench, events: Events, expected: Expected
) -> None:
    house = await house_of(make_bench)
    for tenant in "abc":
        await house.run(tenant, PROMPT)
    request = house.submit("d", LONGER, max_tokens=9)
    await house.bench.running(request)
    house.bench.step(request)
    house.bench.die()
    await house.bench.quiet()
    house.bench.dispatcher.on_ready()
    await house.bench.finish(request)
    assert events(request) == (expected(LONGER, 9), "length")
    assert house.found(await house.run("d", LONGER)) == 14


async def test_common_blocks_are_on_disk_and_own_ones_behind_them(make_bench: MakeBench) -> None:
    """A record on disk names its parent, of which only the common one may have bytes."""
    house = await house_of(make_bench, disk=True)
    for tenant in "abc":
        await house.run(tenant, PROMPT)
    await house.run("d", LONGER)
    cache = house.bench.cache
    await cache.write_back.flush()
    rows = used_rows(cache.trie(house.homes["d"]))
    for tier in cache.tiers.memories:
        for trie in cache.tries:
            cache.placement.drop(trie, rows[::-1], tier)
    assert house.found(await house.run("d", LONGER)) == 14
    assert house.found(await house.run("a", LONGER)) == 8


async def test_what_is_loaded_beside_a_run_may_be_common(
    make_bench: MakeBench, events: Events, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run computes the front, passes over common blocks, and enters its own behind them."""
    monkeypatch.setattr(piece_load, "_PIECE_S", 1e-9)
    monkeypatch.setattr(tail_load, "_LEAST_TOKENS", BLOCK)
    house = await house_of(make_bench, load="auto")
    bench, blocks = house.bench, 16
    prompt = [*range(100, 100 + blocks * BLOCK), 7]
    for tenant in "abc":
        await house.run(tenant, prompt, max_tokens=1)
    pace(bench, block_s=float(BLOCK))
    bench.engine.open.clear()
    request = house.submit("d", prompt, max_tokens=2 * BLOCK)
    await bench.running(request)
    assert house.found(request) == 0
    bench.step()
    await until(lambda: any(isinstance(message, Extend) for message in bench.sent))
    bench.engine.open.set()
    await bench.finish(request)
    assert any(isinstance(message, Arrived) for message in bench.sent)
    assert events(request) == (expected(prompt, 2 * BLOCK), "length")
    own = bench.cache.trie(house.homes["d"]).nodes(house.homes["d"].root, request.chain).tolist()
    assert len(own) == blocks + 2, "the blocks that it has generated are cached"


async def test_the_state_of_a_request_does_not_become_a_common_blocks(make_bench: MakeBench) -> None:
    """Others would find a prefix that one tenant alone has computed."""
    house = await house_of(make_bench, model="states")
    bench = house.bench
    for tenant in "abc":
        await house.run(tenant, PROMPT, max_tokens=1)
    request = house.submit("d", PROMPT, max_tokens=2)
    run = await bench.running(request)
    bench.step()
    trie, last = request.trie, request.rows[7:8]
    state = np.array([trie.part_mask[-1]])
    for tier in bench.cache.tiers.memories:
        bench.cache.placement.drop(trie, last, tier, state)
    assert not trie.available[last] & state
    run.tail_blocks = 8
    bench._keep(run.tokens[: 8 * BLOCK], run.start.state.tail if run.start.state else [])
    await bench.finish(request)
    assert not trie.available[last] & state
