"""Every model that reads images, on the daemon's cache: transformers' tokens, wherever the prefix comes from.

In one process; `tests/server/generation/test_images.py` runs them through a daemon and its worker. What Llama 3.2
Vision keeps of images is in `test_image_kv.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from prefixd.base.sampling import BeamSearch
from tests.serving.dispatch.model_bench import open_model_bench
from tests.slow import slow_but
from tests.worker.images import test_images as worker_tests
from tests.worker.tiny_models import IMAGES

BLOCK, NEW, LONG = 16, 8, 40
picture, text = worker_tests.picture, worker_tests.text


@pytest.fixture(scope="module")
def vision_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    return cache(lambda name, kv: worker_tests.Vision(name, tmp_path_factory.mktemp(name), block_tokens=BLOCK, kv=kv))


@pytest.fixture(
    params=slow_but([("gemma3", "virtual")], [*((name, "virtual") for name in IMAGES), ("gemma3", "paged")]),
    ids="-".join,
)
def vision(request: pytest.FixtureRequest, vision_of: Callable[[str, str], Any]) -> Any:
    return vision_of(*request.param)


def frames(vision: Any, blocks: int) -> int:
    return blocks * vision.model.spec.block_frames + 6 * vision.model.spec.image_frames


def reach(prompt: Any) -> int:
    """Tokens of the blocks of a prompt that may be found: not to the inside of an image."""
    tokens = (len(prompt.tokens) - 1) // BLOCK * BLOCK
    while any(image.first < tokens < image.first + image.tokens for image in prompt.images):
        tokens -= BLOCK
    return tokens


async def test_a_hit_from_each_tier_and_after_a_restart_gives_transformers_tokens(vision: Any, tmp_path: Path) -> None:
    """With an image in the prefix, one behind it, and the same image at another place."""
    cat, dog = picture(1), picture(2)
    first = vision.prompt(text(1, 9), cat, text(2, 40))
    second = vision.prompt(text(1, 9), cat, text(2, 40), dog, text(3, 7))
    moved = vision.prompt(text(4, 25), cat, text(5, 5))
    hit = reach(first)
    async with open_model_bench(vision.model, tmp_path, frames(vision, 60)) as bench:
        assert await bench.generate(first.tokens, NEW, first.images) == (vision.greedy(first, NEW), (0, 0, 0, 0))
        assert await bench.generate(first.tokens, NEW, first.images) == (vision.greedy(first, NEW), (hit, 0, 0, 0))
        tokens, hits = await bench.generate(second.tokens, NEW, second.images)
        assert tokens == vision.greedy(second, NEW)
        assert vision.cross or hits[0] == len(first.tokens) // BLOCK * BLOCK  # there all rows depend on all images
        assert await bench.generate(moved.tokens, NEW, moved.images) == (vision.greedy(moved, NEW), (0, 0, 0, 0))
        await bench.clear_gpu_tier()
        hit = reach(second)
        assert await bench.generate(second.tokens, NEW, second.images) == (vision.greedy(second, NEW), (0, hit, 0, 0))
    async with open_model_bench(vision.model, tmp_path, frames(vision, 60)) as bench:
        assert await bench.generate(second.tokens, NEW, second.images) == (vision.greedy(second, NEW), (0, 0, hit, 0))


async def test_requests_that_are_preempted_and_resumed_give_transformers_tokens(vision: Any, tmp_path: Path) -> None:
    prompts = [vision.prompt(text(20 + number, 9), picture(5 + number), text(30, 20)) for number in range(2)]
    async with open_model_bench(vision.model, tmp_path, frames(vision, 30)) as bench:
        requests = [bench.submit(prompt.tokens, LONG, prompt.images) for prompt in prompts]
        counters, taken = bench.dispatcher.preemption.counters, list[int]()
        while not all(request.generated for request in requests):
            await asyncio.sleep(0)
        bench.paused = True
        while not counters.preempted:
            assert bench.dispatcher.running, "both have ended"
            bench.pass_once()
            while more := await bench.take_block():
                taken += more
            await bench.cache.mover.quiesce()
            for _ in range(5):
                await asyncio.sleep(0)
        bench.paused = False
        bench.cache.tiers.compute.free(taken)
        for request, prompt in zip(requests, prompts, strict=True):
            assert await bench.tokens_of(request) == vision.greedy(prompt, LONG)


async def test_requests_whose_worker_dies_give_transformers_tokens(vision: Any, tmp_path: Path) -> None:
    """The sequences of one prompt (`n`), and a prompt with another image."""
    prompt, other = vision.prompt(text(40, 30), picture(8)), vision.prompt(text(40, 30), picture(9))
    async with open_model_bench(vision.model, tmp_path, frames(vision, 90)) as bench:
        asked = [prompt, prompt, other]
        requests = [bench.submit(each.tokens, LONG, each.images) for each in asked]
        while not all(request.generated for request in requests):
            await asyncio.sleep(0)
        bench.die()
        for request, each in zip(requests, asked, strict=True):
            assert await bench.tokens_of(request) == vision.greedy(each, LONG)


async def test_beams_with_images_are_those_of_transformers(vision: Any, tmp_path: Path) -> None:
    prompt = vision.prompt(text(50, 20), picture(11), text(51, 5))
    expected = vision.greedy(prompt, NEW, num_beams=2)
    async with open_model_bench(vision.model, tmp_path, frames(vision, 60)) as bench:
        for _ in range(2):  # cold, and behind what is cached
            request = bench.submit(prompt.tokens, NEW, prompt.images, beam_search=BeamSearch(width=2))
            async with asyncio.timeout(60):
                event = await request.events.get()  # type: ignore[attr-defined]
            assert event.beams[0].tokens == expected
            await bench.cache.mover.quiesce()
        assert request.hit_tokens is not None and sum(request.hit_tokens) > 0
