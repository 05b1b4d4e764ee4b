"""Images' embeddings in the tiers, on a real engine, against transformers' own `generate`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixd.base.long_work.pacer import Pacer
from prefixd.cache import check_integrity
from prefixd.cache.index.trie import GPU
from prefixd.server.prefixes.prefix_info import describe
from prefixd.server.prefixes.prefix_keys import Prefix
from prefixd.serving.request.request import Request
from prefixd.serving.request.states import RequestState
from tests.serving.dispatch.model_bench import ModelBench, open_model_bench
from tests.worker.images import test_images as worker_tests

BLOCK, NEW, LONG = 16, 6, 40
FRAMES = 80
picture, text = worker_tests.picture, worker_tests.text


BOTH = pytest.mark.parametrize("vision", ["virtual", "paged"], indirect=True)


@pytest.fixture(scope="module")
def vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory, kv = tmp_path_factory.mktemp("llava"), getattr(request, "param", "virtual")
    return worker_tests.Vision("llava_onevision", directory, block_tokens=BLOCK, kv=kv)


@pytest.fixture
def encoded(vision: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """The images that the vision encoder has embedded."""
    made: list[bytes] = []
    encode = vision.model.images.encode

    def counted(image: Any) -> Any:
        made.append(image.digest)
        return encode(image)

    monkeypatch.setattr(vision.model.images, "encode", counted)
    yield made


@pytest.fixture
async def bench(vision: Any, tmp_path: Path) -> AsyncIterator[ModelBench]:
    async with open_model_bench(vision.model, tmp_path, FRAMES) as bench:
        yield bench
        await bench.cache.mover.quiesce()
        check_integrity(bench.cache)


async def ask(bench: ModelBench, vision: Any, prompt: Any, **options: Any) -> Request:
    """Runs a prompt alone; its answer is transformers'."""
    request = bench.submit(prompt.tokens, NEW, prompt.images, **options)
    assert await bench.tokens_of(request) == vision.greedy(prompt, NEW)
    await bench.cache.mover.quiesce()
    return request


async def begin(bench: ModelBench, prompt: Any, generated: int) -> Request:
    """Runs a long request until it has so many tokens; then nothing runs."""
    request = bench.submit(prompt.tokens, LONG, prompt.images)
    while request.generated < generated:
        await asyncio.sleep(0)
    bench.paused = True
    return request


@BOTH
async def test_an_embedding_is_in_the_tiers_once_for_all_prompts(
    vision: Any, encoded: list[bytes], bench: ModelBench
) -> None:
    cat, dog = picture(1), picture(2, 30, 56)
    prompt = vision.prompt(text(1, 9), cat, text(2, 20), dog, text(3, 7))
    kv = (await ask(bench, vision, prompt)).image_kv
    assert kv is not None and len(encoded) == 2
    await ask(bench, vision, vision.prompt(text(4, 13), dog, text(5, 5), cat, text(6, 9), dog))
    assert len(encoded) == 2 and bench.dispatcher.counters.found_images == 3
    frame_bytes = bench.pool.frame_bytes
    for image in prompt.images:
        blocks = -(-image.tokens * 64 * 4 // frame_bytes)
        assert kv.size(image.digest) == len(kv.find(image.digest)) == blocks
        info = await describe(bench.cache, Prefix.of(kv.trie, int(kv.find(image.digest)[-1])), Pacer())
        (group,) = info.groups
        assert (list(group.names), group.rule, info.gpu_blocks) == (["embedding"], "vision embedding", blocks)
    assert int(np.count_nonzero(kv.trie.any_part[: kv.trie.rows])) == kv.frames
    await bench.clear_gpu_tier()
    await ask(bench, vision, vision.prompt(text(7, 5), dog, text(8, 5)))
    assert len(encoded) == 2, "it came up from the CPU tier"


async def test_a_request_holds_an_embedding_until_its_tokens_are_computed(
    vision: Any, encoded: list[bytes], bench: ModelBench
) -> None:
    """Then its frames are there for others, while the request runs on."""
    prompt = vision.prompt(text(11, 9), picture(11), text(12, 60))
    request = await begin(bench, prompt, generated=2)
    kv, (image,) = request.image_kv, prompt.images
    assert kv is not None and request.image_holds is not None
    rows = kv.find(image.digest)
    assert len(rows) and not kv.trie.holds[rows].any() and not len(request.image_holds.held)
    taken = list[int]()
    while more := await bench.take_block():
        taken += more
    assert not len(kv.find(image.digest)) or kv.trie.nearest[rows].min() > GPU
    bench.cache.tiers.compute.free(taken)
    bench.paused = False
    assert await bench.tokens_of(request) == vision.greedy(prompt, LONG)


async def test_a_part_of_an_embedding_is_none(vision: Any, encoded: list[bytes], bench: ModelBench) -> None:
    cat = picture(21)
    kv = (await ask(bench, vision, vision.prompt(text(21, 9), cat, text(22, 9)))).image_kv
    assert kv is not None
    (digest,) = kv.chains
    bench.cache.placement.drop(kv.trie, kv.find(digest)[-1:], bench.cache.tiers.compute)
    assert kv.trie.any_part.any() and not len(kv.find(digest))
    await ask(bench, vision, vision.prompt(text(23, 12), cat, text(24, 9)))
    assert len(encoded) == 2 and len(kv.find(digest)) == kv.blocks[digest]


async def test_a_request_that_resumes_behind_an_image_takes_no_frames_for_it(
    vision: Any, encoded: list[bytes], bench: ModelBench
) -> None:
    prompt = vision.prompt(text(31, 9), picture(31), text(32, 60))
    kv = (await ask(bench, vision, prompt)).image_kv
    assert kv is not None
    (digest,) = kv.chains
    bench.cache.placement.drop(kv.trie, kv.find(digest)[::-1], bench.cache.tiers.compute, expendable=True)
    again = await ask(bench, vision, prompt)
    assert again.hit_tokens is not None and again.hit_tokens[GPU] > prompt.images[0].first + prompt.images[0].tokens
    assert len(encoded) == 1 and not len(kv.find(digest))


@pytest.mark.parametrize("read_only", [True, False])
async def test_an_embedding_that_is_not_kept_gives_its_frames_up_when_it_is_passed(
    vision: Any, encoded: list[bytes], bench: ModelBench, read_only: bool
) -> None:
    prompt = vision.prompt(text(41, 9), picture(41), text(42, 60))
    if not read_only:
        context = bench.dispatcher.context
        context.options = replace(context.options, keep_embeddings=False)
    request = bench.submit(prompt.tokens, LONG, prompt.images, read_only=read_only)
    most = 0
    while request.generated < 2:
        await asyncio.sleep(0)
        most = max(most, 0 if request.image_holds is None else sum(map(len, request.image_holds._own.values())))
    kv = request.image_kv
    assert kv is not None and request.image_holds is not None and most == kv.blocks[prompt.images[0].digest]
    assert not request.image_holds._own and not kv.trie.any_part.any()
    assert await bench.tokens_of(request) == vision.greedy(prompt, LONG)
    await ask(bench, vision, vision.prompt(text(43, 5), picture(41), text(44, 5)), read_only=read_only)
    assert len(encoded) == 2


async def test_two_requests_at_once_embed_an_image_once(vision: Any, encoded: list[bytes], bench: ModelBench) -> None:
    """The second one waits for the first, whose image is another prompt's."""
    cat = picture(51)
    prompts = [vision.prompt(text(51 + number, 9 + number), cat, text(60, 9)) for number in range(3)]
    requests = [bench.submit(prompt.tokens, NEW, prompt.images) for prompt in prompts]
    for request, prompt in zip(requests, prompts, strict=True):
        assert await bench.tokens_of(request) == vision.greedy(prompt, NEW)
    assert len(encoded) == 1


async def test_a_short_prompt_does_not_wait_for_a_long_one_that_comes_to_the_same_image_later(
    vision: Any, encoded: list[bytes], bench: ModelBench
) -> None:
    cat = picture(51)
    long, short = vision.prompt(text(51, 330), cat, text(60, 9)), vision.prompt(text(53, 5), cat, text(60, 9))
    first = bench.submit(long.tokens, NEW, long.images)
    while first.state is not RequestState.RUNNING or not first.run.computed_tokens:
        await asyncio.sleep(0)
    second = bench.submit(short.tokens, NEW, short.images)
    while second.state is RequestState.WAITING:
        await asyncio.sleep(0)
    assert first.run.computed_tokens < 200, "the image is 330 tokens from its beginning"
    for request, prompt in ((first, long), (second, short)):
        assert await bench.tokens_of(request) == vision.greedy(prompt, NEW)


async def test_a_run_that_copies_an_images_kv_enters_no_embedding(
    vision: Any, encoded: list[bytes], bench: ModelBench
) -> None:
    """The frames that it was given for the image were never filled."""
    prompt = vision.prompt(text(71, 9), picture(71), text(72, 60))
    first = await begin(bench, prompt, generated=1)
    kv = first.image_kv
    assert kv is not None
    (digest,) = kv.chains
    bench.cache.placement.drop(kv.trie, kv.find(digest)[::-1], bench.cache.tiers.compute, expendable=True)
    bench.paused = False
    second = bench.submit(prompt.tokens, LONG, prompt.images)
    second.fork_of = first.id
    for request in (first, second):
        assert await bench.tokens_of(request) == vision.greedy(prompt, LONG)
    assert len(encoded) == 1 + len(kv.find(digest)) // kv.blocks[digest]
