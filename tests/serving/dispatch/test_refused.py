"""A cache that is not finite: the caller sees the answer of a run without it, and the blocks go."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from prefixd.base.errors import UnavailableError
from prefixd.base.sampling import BeamSearch
from prefixd.cache import check_integrity
from prefixd.cache.background.refused_blocks import NOT_FINITE
from prefixd.cache.index.trie import GPU, NO_SLOT
from prefixd.serving.request.request import Request
from prefixd.serving.request.request_events import Ended
from prefixd_swap import FrameId
from tests.serving.dispatch.model_bench import ModelBench, open_model_bench
from tests.serving.models.test_models import BLOCK, BLOCKS, NEW, Subject, prompt_of
from tests.waiting import until


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    return cache(lambda name: Subject(name, "virtual", tmp_path_factory.mktemp(name)))


@pytest.fixture(params=["gemma3_text", "jamba"])
def subject(request: pytest.FixtureRequest, subject_of: Callable[[str], Subject]) -> Subject:
    """With windows, and with states."""
    return subject_of(request.param)


@pytest.fixture
def plain(subject_of: Callable[[str], Subject]) -> Subject:
    """One group."""
    return subject_of("deepseek_v3")


def opened(subject: Subject, folder: Path) -> Any:
    return open_model_bench(subject.model, folder, subject.frames(blocks=60, states=20))


def poison(bench: ModelBench, block: int = BLOCKS - 1) -> None:
    """Makes every number of a cached block of the prompt a NaN, in the GPU tier."""
    for slot in bench.trie.slots[bench.path(prompt_of(0))[block], GPU].tolist():
        if slot != NO_SLOT:
            span = bench.pool.span(FrameId(slot))
            ctypes.memset(span.address, 255, span.nbytes)


async def gone(bench: ModelBench) -> None:
    """Waits until what was refused has left every tier."""
    await until(lambda: not bench.trie.refused)
    await bench.cache.mover.quiesce()


@pytest.mark.slow
async def test_the_answer_is_that_of_a_run_without_the_cache_and_the_blocks_go(
    subject: Subject, tmp_path: Path
) -> None:
    expected, prompt = subject.tokens(0), prompt_of(0)
    async with opened(subject, tmp_path) as bench:
        await bench.generate(prompt, NEW)
        poison(bench)
        request = bench.submit(prompt, NEW)
        assert await bench.tokens_of(request) == expected
        assert (request.resumed, request.uncached) == (1, True)
        await gone(bench)
        assert not len(bench.path(prompt)) and bench.cache.mover.lost[NOT_FINITE] >= BLOCKS
        assert await bench.generate(prompt, NEW) == (expected, (0, 0, 0, 0)), "it is computed again, and kept"
        assert await bench.generate(prompt, NEW) == (expected, (BLOCKS * BLOCK, 0, 0, 0))


async def test_the_copies_on_disk_go_too(plain: Subject, tmp_path: Path) -> None:
    async with opened(plain, tmp_path) as bench:
        await bench.generate(prompt_of(0), NEW)
        poison(bench)
        await bench.clear_gpu_tier()
        await bench.cache.write_back.flush()
    async with opened(plain, tmp_path) as bench:
        bench.trie.pinned[bench.path(prompt_of(0))] = True
        request = bench.submit(prompt_of(0), NEW)
        assert await bench.tokens_of(request) == plain.tokens(0)
        assert request.hit_tokens == [0, 0, BLOCKS * BLOCK, 0], "the checksums are right"
        await gone(bench)
    async with opened(plain, tmp_path) as bench:
        assert not len(bench.path(prompt_of(0)))


async def test_several_at_once_are_all_answered(plain: Subject, tmp_path: Path) -> None:
    async with opened(plain, tmp_path) as bench:
        await bench.generate(prompt_of(0), NEW)
        poison(bench)
        requests = [bench.submit(prompt_of(0), NEW) for _ in range(12)]
        for request in requests:
            assert await bench.tokens_of(request) == plain.tokens(0)
        await gone(bench)
        late = bench.submit(prompt_of(0), NEW)
        assert await bench.tokens_of(late) == plain.tokens(0) and not late.uncached


async def test_a_step_in_the_middle_of_the_output_goes_on_where_it_was(plain: Subject, tmp_path: Path) -> None:
    async with opened(plain, tmp_path) as bench:
        await bench.generate(prompt_of(0), NEW)
        request = bench.submit(prompt_of(0), NEW)
        while request.generated < 5:
            await asyncio.sleep(0)
        poison(bench, 0)
        assert await bench.tokens_of(request) == plain.tokens(0), "each token was told once"
        assert request.resumed == 1
        await gone(bench)


async def test_what_is_held_goes_when_it_is_held_no_more(plain: Subject, tmp_path: Path) -> None:
    async with opened(plain, tmp_path) as bench:
        await bench.generate(prompt_of(0), NEW)
        poison(bench)
        path = bench.path(prompt_of(0))
        with bench.cache.holds.hold("a test", bench.trie, path, bench.cache.tiers.compute):
            await bench.tokens_of(bench.submit(prompt_of(0), NEW))
            for _ in range(2):
                tokens, hits = await bench.generate(prompt_of(0), NEW)
                assert (tokens, sum(hits)) == (plain.tokens(0), 0), "neither used nor recorded behind it"
            assert bench.trie.refused and len(bench.path(prompt_of(0))) == BLOCKS
            blocks = len(bench.trie)
            await bench.generate([*prompt_of(0), *prompt_of(1)], 1)
            assert len(bench.trie) == blocks
            check_integrity(bench.cache)
        await gone(bench)
        assert not len(bench.path(prompt_of(0)))


async def test_who_waits_does_not_begin_with_what_is_refused_meanwhile(plain: Subject, tmp_path: Path) -> None:
    async with opened(plain, tmp_path) as bench:
        await bench.generate(prompt_of(0), NEW)
        path = bench.path(prompt_of(0))
        bench.dispatcher.requests.ready = False
        request = bench.submit(prompt_of(0), NEW)
        assert len(request.found) == BLOCKS
        with bench.cache.holds.hold("a test", bench.trie, path, bench.cache.tiers.compute):
            bench.cache.refused.refuse(bench.trie, int(path[3]), int(bench.trie.generation[path[3]]))
            bench.dispatcher.on_ready()
            assert await bench.tokens_of(request) == plain.tokens(0)
            assert (request.hit_tokens, request.resumed) == ([3 * BLOCK, 0, 0, 0], 0), "what is before it is used"
        await gone(bench)
        assert len(bench.path(prompt_of(0))) == 3


async def test_beams_are_searched_again(plain: Subject, tmp_path: Path) -> None:
    async def searched(request: Request) -> list[list[int]]:
        async with asyncio.timeout(60):
            ended = await request.events.get()  # type: ignore[attr-defined]
        assert isinstance(ended, Ended), ended
        return [beam.tokens for beam in ended.beams]

    async with opened(plain, tmp_path) as bench:
        expected = await searched(bench.submit(prompt_of(0), NEW, beam_search=BeamSearch(width=3)))
        poison(bench)
        request = bench.submit(prompt_of(0), NEW, beam_search=BeamSearch(width=3))
        assert await searched(request) == expected and request.uncached
        await gone(bench)
        assert bench.cache.mover.lost[NOT_FINITE]


async def test_a_model_that_is_not_finite_without_the_cache_loses_nobody_a_block(
    plain: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(plain, tmp_path) as bench:
        await bench.generate(prompt_of(0), NEW)
        forward = bench.engine._forward
        with monkeypatch.context() as patch:
            patch.setattr(bench.engine, "_forward", lambda *arguments: forward(*arguments) * float("nan"))
            for seed, runs in ((0, 2), (1, 1)):  # cached, and not
                request = bench.submit(prompt_of(seed), NEW)
                event = await request.events.get()  # type: ignore[attr-defined]
                assert isinstance(event, UnavailableError) and "not finite" in str(event)
                assert request.resumed == runs - 1
        assert not bench.cache.mover.lost[NOT_FINITE] and not bench.trie.refused
        assert await bench.generate(prompt_of(0), NEW) == (plain.tokens(0), (BLOCKS * BLOCK, 0, 0, 0))


# -- read-only ---------------------------------------------------------------------------------------------------------


async def test_a_read_only_request_uses_what_is_there_and_leaves_nothing(subject: Subject, tmp_path: Path) -> None:
    async with opened(subject, tmp_path) as bench:
        trie = bench.trie
        request = bench.submit(prompt_of(0), NEW, read_only=True)
        assert await bench.tokens_of(request) == subject.tokens(0)
        assert not trie.any_part[: trie.rows].any() and not len(trie), "nothing was there, and nothing is"
        await bench.generate(prompt_of(0), NEW)
        path, before = bench.path(prompt_of(0)), len(trie)
        used, uses = trie.last_used[path].copy(), trie.uses[path].copy()
        long = [*prompt_of(0), *subject.tokens(0), 5]
        request = bench.submit(long, NEW, read_only=True)
        await bench.tokens_of(request)
        assert sum(request.hit_tokens or ()) >= BLOCKS * BLOCK
        assert len(trie) == before
        assert (trie.last_used[path] == used).all() and (trie.uses[path] == uses).all()
        assert not bench.cache.tiers.compute.in_flight
