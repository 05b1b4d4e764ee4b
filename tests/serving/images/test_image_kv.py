"""Keys and values of images in the tiers: Llama 3.2 Vision on a real engine, against transformers' own `generate`."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from prefixd.base.long_work.pacer import Pacer
from prefixd.base.sampling import BeamSearch
from prefixd.cache import Trie, check_integrity
from prefixd.cache.index.trie import CPU, DISK, GPU
from prefixd.images.identity import LEAST_BLOCK_TOKENS
from prefixd.server.prefixes.prefix_info import describe
from prefixd.server.prefixes.prefix_keys import Prefix
from prefixd.serving.frame_budget import FrameBudget
from prefixd.serving.images.image_kv import ImageHolds, ImageKv, image_namespace
from prefixd.serving.request.request import Request
from prefixd.serving.request.request_events import Ended
from prefixd_swap import FrameId
from tests.serving.dispatch.model_bench import ModelBench, open_model_bench
from tests.waiting import until
from tests.worker.images import test_images as worker_tests

BLOCK, NEW = LEAST_BLOCK_TOKENS, 6
picture, text = worker_tests.picture, worker_tests.text


BOTH = pytest.mark.parametrize("vision", ["virtual", "paged"], indirect=True)


@pytest.fixture(scope="module")
def vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An image takes two frames, as a block of text takes one; with block tables they lie side by side."""
    return worker_tests.Vision(
        "mllama", tmp_path_factory.mktemp("mllama"), block_tokens=BLOCK, kv=getattr(request, "param", "virtual")
    )


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
def bench_of(vision: Any, tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[ModelBench]]:
    """Benches one after the other on one disk."""

    @asynccontextmanager
    async def opened(frames: int = 60) -> AsyncIterator[ModelBench]:
        async with open_model_bench(vision.model, tmp_path / "disk", frames) as bench:
            yield bench

    return opened


def submit(bench: ModelBench, prompt: Any, max_tokens: int = NEW, **sampling: Any) -> Request:
    return bench.submit(prompt.tokens, max_tokens, prompt.images, **sampling)


async def ask(bench: ModelBench, vision: Any, prompt: Any) -> Request:
    """Runs a prompt alone; its answer is transformers'."""
    request = submit(bench, prompt)
    assert await bench.tokens_of(request) == vision.greedy(prompt, NEW)
    await bench.cache.mover.quiesce()
    return request


def hits(request: Request) -> list[int]:
    assert request.hit_tokens is not None
    return request.hit_tokens


async def test_an_image_is_in_the_tiers_once_for_all_prompts(
    vision: Any, encoded: list[bytes], bench_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cat, dog = picture(1), picture(2, 30, 56)
    prompt = vision.prompt(text(1, 9), cat, text(2, 20), dog, text(3, 7))
    other = vision.prompt(text(4, 13), dog, text(5, 5), cat, text(6, 9), dog)
    async with bench_of() as bench:
        await ask(bench, vision, prompt)
        assert len(encoded) == 2
        request = await ask(bench, vision, other)
        assert hits(request) == [0, 0, 0, 0], "its text is another one"
        assert bench.dispatcher.counters.found_images == 3
        assert hits(await ask(bench, vision, prompt))[GPU] > 0
        assert len(encoded) == 2
        kv = request.image_kv
        assert kv is not None
        assert kv.frames == 2 * bench.model.spec.image_frames == 4
        assert int(np.count_nonzero(kv.trie.any_part[: kv.trie.rows])) == kv.frames
        for digest in kv.chains:
            info = await describe(bench.cache, Prefix.of(kv.trie, int(kv.find(digest)[-1])), Pacer())
            (group,) = info.groups
            assert (list(group.names), group.rule) == (["cross"], "cross-attention to images in the first 2 blocks")
            assert (info.blocks, group.blocks, info.gpu_blocks) == (2, 2, 2)
        with monkeypatch.context() as patched:
            patched.setattr(kv.trie._keys, "find_all", None)
            assert all(len(kv.find(digest)) == 2 for digest in kv.chains), "known blocks are not looked up again"


@BOTH
async def test_images_come_up_from_each_tier_and_after_a_restart(
    vision: Any, encoded: list[bytes], bench_of: Any
) -> None:
    prompt = vision.prompt(text(7, 20), picture(3), text(8, 9), picture(4), text(9, 30))
    async with bench_of() as bench:
        await ask(bench, vision, prompt)
        await bench.clear_gpu_tier()
        assert hits(await ask(bench, vision, prompt))[CPU] > 0
        await bench.cache.write_back.flush()
    async with bench_of() as bench:
        assert hits(await ask(bench, vision, prompt))[DISK] > 0
        other = vision.prompt(picture(4), text(10, 12))
        assert hits(await ask(bench, vision, other)) == [0, 0, 0, 0]
    assert len(encoded) == 2


async def test_what_is_evicted_of_an_image_is_computed_again_and_its_text_is_not(
    vision: Any, encoded: list[bytes], bench_of: Any
) -> None:
    prompt = vision.prompt(text(11, 20), picture(5), text(12, 30))
    async with bench_of() as bench:
        kv = (await ask(bench, vision, prompt)).image_kv
        assert kv is not None
        (digest,) = kv.chains
        compute = bench.cache.tiers.compute
        bench.cache.placement.drop(kv.trie, kv.find(digest)[-1:], compute)
        assert not len(kv.find(digest)), "half an image is none"
        assert hits(await ask(bench, vision, prompt))[GPU] > 0
        assert len(encoded) == 2
        assert len(kv.find(digest)) == kv.size(digest)


async def test_a_load_of_an_image_that_hangs_is_given_up_and_the_image_embedded(
    vision: Any, encoded: list[bytes], bench_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = vision.prompt(text(11, 20), picture(5), text(12, 30))
    async with bench_of() as bench:
        loader, mover, compute = bench.dispatcher.loader, bench.cache.mover, bench.cache.tiers.compute
        kv = (await ask(bench, vision, prompt)).image_kv
        assert kv is not None
        (digest,) = kv.chains
        bench.cache.placement.drop(kv.trie, kv.find(digest)[-1:], compute)
        await ask(bench, vision, prompt)
        assert len(encoded) == 2 and loader._cost.encode_s(1, 2) is not None, "beside what its tokens took"
        await bench.clear_gpu_tier()
        await ask(bench, vision, prompt)
        await bench.clear_gpu_tier()
        assert len(encoded) == 2
        bring = mover.bring

        async def hang(trie: Trie, *arguments: Any, **options: Any) -> int:
            if trie is kv.trie:
                await asyncio.Event().wait()
            return int(await bring(trie, *arguments, **options))

        monkeypatch.setattr(mover, "bring", hang)
        loader._mode = "auto"
        await ask(bench, vision, prompt)
        assert (len(encoded), loader.counters.abandoned) == (3, 1)


@BOTH
async def test_bytes_of_an_image_that_are_altered_change_the_answer(
    vision: Any, encoded: list[bytes], bench_of: Any
) -> None:
    """Those of another image, and those of the text before, that no hit reads, do not."""
    prompt, other = vision.prompt(text(13, 20), picture(6), text(14, 9)), vision.prompt(picture(7), text(15, 9))
    async with bench_of() as bench:
        kept = [(await ask(bench, vision, each)).image_kv for each in (prompt, other)]
        for kv, changes in zip(kept, (True, False), strict=True):
            assert kv is not None
            slots = [int(slot) for digest in kv.chains for slot in kv.trie.slots[kv.find(digest), GPU, 0]]
            for slot in slots:
                window = worker_tests.rig_frame(bench, slot)
                saved = window.clone()
                window.copy_(-3 * saved)
                answer = await bench.tokens_of(submit(bench, prompt))
                assert (answer != vision.greedy(prompt, NEW)) == changes
                window.copy_(saved)
        assert len(encoded) == 2


async def test_requests_with_one_image_at_a_time_when_frames_are_few(
    vision: Any, encoded: list[bytes], bench_of: Any
) -> None:
    """Six requests over three images; two run at most. One is preempted, or the worker dies."""
    prompts = [vision.prompt(text(16 + n, 10), picture(8 + n % 3), text(30 + n, 14)) for n in range(6)]
    async with bench_of(14) as bench:
        requests = [submit(bench, prompt, max_tokens=16) for prompt in prompts]
        while not bench.dispatcher.running:
            await bench.cache.mover.quiesce()
            bench.pass_once()
            await asyncio.sleep(0)
        bench.die()
        for request, prompt in zip(requests, prompts, strict=True):
            assert await bench.tokens_of(request) == vision.greedy(prompt, 16)
        assert len(set(encoded)) == len({prompt.images[0].digest for prompt in prompts}) == 3
        await bench.cache.mover.quiesce()
        check_integrity(bench.cache)
        assert bench.dispatcher.taken_frames == 0


async def test_an_image_that_another_request_is_about_to_fill_is_waited_for(
    vision: Any, encoded: list[bytes], bench_of: Any
) -> None:
    prompts = [vision.prompt(text(50 + n, 10), picture(20), text(60, 5), picture(20)) for n in range(3)]
    async with bench_of() as bench:
        requests = [submit(bench, prompt) for prompt in prompts]
        for request, prompt in zip(requests, prompts, strict=True):
            assert await bench.tokens_of(request) == vision.greedy(prompt, NEW)
        assert len(encoded) == 1
        await bench.dispatcher.idle()
        assert bench.dispatcher.taken_frames == 0


async def test_an_image_that_two_requests_have_filled_is_there_once(vision: Any, bench_of: Any) -> None:
    """Neither was there when the other was staged."""
    prompt = vision.prompt(text(70, 10), picture(21))
    async with bench_of() as bench:
        request = await ask(bench, vision, prompt)
        kv = request.image_kv
        assert kv is not None
        (digest,) = kv.chains
        bench.cache.placement.drop(kv.trie, kv.find(digest)[::-1], bench.cache.tiers.compute, expendable=True)
        assert not len(kv.find(digest))
        budget, size = FrameBudget(), kv.size(digest)
        first, second = (ImageHolds(bench.cache, budget, f"request {n}", kv, True, True) for n in range(2))
        given = []
        for holds in (first, second):
            assert (holds.missing_blocks, len(holds.held)) == (size, 0)
            holds.yield_frames()
            frames = await bench.cache.mover.slots.take_frames(size)
            assert [(each.frames, each.filled) for each in holds.claim_frames(frames)] == [(frames, False)]
            assert holds.filling(0) == {digest}, "every row depends on it"
            given.append((frames, holds))
        assert [holds.filled([0]) for _, holds in given] == [given[0][0], []]
        assert [len(holds.held) for holds in (first, second)] == [size, 0]
        assert (second.grew, second.filling(1 << 20), budget.taken) == (True, set(), size)
        for holds in (first, second):
            holds.end()
        bench.cache.tiers.compute.free(given[1][0])
        assert budget.taken == 0
        check_integrity(bench.cache)


async def test_without_a_cache_every_request_fills_frames_of_its_own(
    vision: Any, encoded: list[bytes], bench_of: Any
) -> None:
    prompt = vision.prompt(text(71, 10), picture(22), text(72, 9))
    async with bench_of() as bench:
        bench.dispatcher.context.options = replace(bench.dispatcher.context.options, caching=False)
        bench.dispatcher._prefetcher._caching = False
        bench.dispatcher._tracker._caching = False
        for _ in range(2):
            request = await ask(bench, vision, prompt)
        assert len(encoded) == 2
        assert request.image_kv is not None
        assert not request.image_kv.trie.any_part.any()


@BOTH
async def test_beams_find_their_images_in_a_tier(vision: Any, encoded: list[bytes], bench_of: Any) -> None:
    prompt = vision.prompt(text(75, 13), picture(25), text(76, 6))
    async with bench_of() as bench:
        await ask(bench, vision, prompt)
        await bench.clear_gpu_tier()
        request = submit(bench, prompt, beam_search=BeamSearch(width=3, early_stopping=True))
        async with asyncio.timeout(60):
            ended = await request.events.get()  # type: ignore[attr-defined]
        assert isinstance(ended, Ended)
        assert ended.beams[0].tokens == vision.greedy(prompt, NEW, num_beams=3, early_stopping=True)
        assert len(encoded) == 1


async def test_an_image_that_is_not_finite_is_embedded_again(vision: Any, encoded: list[bytes], bench_of: Any) -> None:
    prompt = vision.prompt(text(77, 20), picture(26), text(78, 30))
    async with bench_of() as bench:
        kv = (await ask(bench, vision, prompt)).image_kv
        assert kv is not None
        (digest,) = kv.chains
        for slot in kv.trie.slots[kv.find(digest), GPU].ravel().tolist():
            span = bench.pool.span(FrameId(slot))
            ctypes.memset(span.address, 255, span.nbytes)
        request = submit(bench, prompt)
        assert await bench.tokens_of(request) == vision.greedy(prompt, NEW)
        assert request.uncached and len(encoded) == 2
        await until(lambda: not (kv.trie.refused or bench.trie.refused))
        assert not len(kv.find(digest))
        await ask(bench, vision, prompt)
        assert len(kv.find(digest)) and len(encoded) == 3


async def test_a_read_only_request_leaves_no_image(vision: Any, bench_of: Any) -> None:
    prompt = vision.prompt(text(79, 20), picture(27))
    async with bench_of() as bench:
        request = bench.submit(prompt.tokens, NEW, prompt.images, read_only=True)
        assert await bench.tokens_of(request) == vision.greedy(prompt, NEW)
        assert request.image_kv is not None
        assert not request.image_kv.trie.any_part.any() and not bench.trie.any_part.any()


async def test_tenants_do_not_share_images(vision: Any, bench_of: Any) -> None:
    images = vision.prompt(picture(23)).images
    async with bench_of() as bench:
        spec = bench.namespace.spec
        salted = image_namespace(msgspec.structs.replace(spec, salt=b"tenant"), bench.hello)
        plain = image_namespace(spec, bench.hello)
        assert salted is not None and plain is not None and salted.name == plain.name
        one, two = (
            ImageKv.of(bench.cache, bench.cache.register(each), images, bench.hello)
            for each in (salted, msgspec.structs.replace(salted, salt=b""))
        )
        (digest,) = one.chains
        assert one.namespace is not two.namespace
        assert one.chains[digest].key(0) != two.chains[digest].key(0)


async def test_a_damaged_image_on_disk_is_embedded_again(vision: Any, encoded: list[bytes], bench_of: Any) -> None:
    prompt = vision.prompt(text(73, 20), picture(24), text(74, 30))
    async with bench_of() as bench:
        kv = (await ask(bench, vision, prompt)).image_kv
        assert kv is not None
        await bench.clear_gpu_tier()
        await bench.cache.write_back.flush()
    async with bench_of() as bench:
        again = submit(bench, prompt)
        kv = again.image_kv
        assert kv is not None
        (digest,) = kv.chains
        rows = kv.find(digest)
        kv.trie.set_checksums(rows[:1], np.zeros((1, 1), np.uint64))
        assert await bench.tokens_of(again) == vision.greedy(prompt, NEW)
        assert sum(hits(again)) > 0, "its text was there"
        assert len(encoded) == 2
