"""Prompts with images: found again by their content, and never cut or shared inside an image.

The bench's worker checks each cached byte that it is told to read against the tokens and images before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.images import identity
from prefixd.images.decoding import InputArray, Pixels
from prefixd.serving.images.prompt_images import PromptLayout
from prefixd.serving.request.request import Request
from prefixd.serving.request.states import RequestState
from prefixd.worker_protocol.protocol import Cancel, PromptImage, Start
from tests.serving.bench import Bench, Events, MakeBench
from tests.serving.fake_worker import BLOCK, MODELS, PLACEHOLDER, next_token, seen_tokens

BenchOf = Callable[..., AbstractAsyncContextManager[Bench]]

Piece = list[int] | tuple[str, int]
"""Tokens, or an image: its name and how many tokens it has."""
NOTHING = InputArray("int64", (0,), b"")
CAT, DOG = ("cat", 6), ("dog", 6)


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """The bench's blocks are smaller than a daemon allows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity, "LEAST_BLOCK_TOKENS", BLOCK)
        yield


def lay_out(pieces: Sequence[Piece], cross: bool = False) -> tuple[list[int], PromptLayout | None]:
    tokens: list[int] = []
    images: list[PromptImage] = []
    for piece in pieces:
        if isinstance(piece, tuple):
            name, count = piece
            images.append(
                PromptImage(len(tokens), count, name.encode().ljust(32, b"."), Pixels(0, (), {name: NOTHING}))
            )
            tokens += [PLACEHOLDER] * count
        else:
            tokens += piece
    if not images:
        return tokens, None
    return tokens, PromptLayout(np.asarray(tokens, "<u4").tobytes(), images, BLOCK, cross)


def submit(bench: Bench, *pieces: Piece, cross: bool = False, max_tokens: int = 2) -> Request:
    tokens, layout = lay_out(pieces, cross)
    return bench.submit(tokens, layout=layout, max_tokens=max_tokens)


async def run(bench: Bench, *pieces: Piece, **options: int) -> Request:
    request = submit(bench, *pieces, **options)
    await bench.finish(request)
    return request


def starts_of(bench: Bench, request: Request) -> list[Start]:
    return [message for message in bench.sent if isinstance(message, Start) and message.id == request.id]


def cached(bench: Bench, request: Request) -> int:
    """Blocks that it started with."""
    return starts_of(bench, request)[-1].cached_blocks


def answer(start: Start, count: int) -> list[int]:
    """What the model says to a prompt."""
    tokens = seen_tokens(start)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[-count:]


async def test_the_worker_gets_the_tokens_and_the_images(make_bench: MakeBench, events: Events) -> None:
    bench = await make_bench(20)
    request = await run(bench, [1, 2, 3], CAT, [4, 5], max_tokens=5)
    (start,) = starts_of(bench, request)
    assert np.frombuffer(start.tokens, "<u4").tolist() == [1, 2, 3] + [PLACEHOLDER] * 6 + [4, 5]
    assert [(image.first, image.tokens, *image.pixels.inputs) for image in start.images] == [(3, 6, "cat")]
    assert events(request) == (answer(start, 5), "length")
    assert np.frombuffer(request.token_ids, "<u4").tolist()[11:] == answer(start, 5)


async def test_the_content_of_an_image_decides_what_is_found(make_bench: MakeBench) -> None:
    bench = await make_bench(40)
    text = list(range(100, 110))
    await run(bench, [1, 2], CAT, text)  # 18 tokens and 2
    again = await run(bench, [1, 2], CAT, text)
    other = await run(bench, [1, 2], DOG, text)
    assert [cached(bench, request) for request in (again, other)] == [4, 0]
    assert [again.encoded_images, other.encoded_images] == [0, 1]
    assert (bench.dispatcher.counters.asked_images, bench.dispatcher.counters.encoded_images) == (3, 2)


async def test_what_stands_before_an_image_is_shared(make_bench: MakeBench) -> None:
    bench = await make_bench(40)
    text = list(range(100, 108))
    await run(bench, text, CAT, [1])
    assert cached(bench, await run(bench, text, DOG, [1])) == 2


async def test_output_fills_the_block_in_which_an_image_begins(make_bench: MakeBench) -> None:
    bench = await make_bench(40)
    text, image = list(range(100, 109)), ("cat", 2)  # a token and the image are in the last block
    request = await run(bench, text, image, max_tokens=6)
    output = answer(starts_of(bench, request)[0], 5)
    goes_on = await run(bench, text, image, output, [3, 4, 5])
    with_other = await run(bench, text, ("dog", 2), output, [3, 4, 5])
    assert [cached(bench, request) for request in (goes_on, with_other)] == [4, 2]


async def test_no_prefix_ends_inside_an_image(make_bench: MakeBench) -> None:
    bench = await make_bench(40)
    image = ("cat", 10)  # tokens 3 to 12: blocks 1, 2 and 3 end inside, and block 4 ends behind it
    first = submit(bench, [1, 2, 3], image, [5, 6, 7, 8])
    await bench.running(first)
    await bench.finish(first)
    same = await run(bench, [1, 2, 3], image, [5, 6, 7, 9])
    other_tail = await run(bench, [1, 2, 3], image, [9, 9, 9, 9])
    assert cached(bench, same) == 4
    assert cached(bench, other_tail) == 0, "what they share ends in the last block that has the image"


async def test_a_request_does_not_wait_for_blocks_that_end_inside_an_image(make_bench: MakeBench) -> None:
    bench = await make_bench(40)
    image = ("cat", 10)
    first = submit(bench, [1, 2, 3], image, [5, 6, 7, 8])
    await bench.running(first)
    other = submit(bench, [1, 2, 3], image, [9, 9, 9, 9])
    await bench.running(other)  # though its first three blocks are on their way
    same = submit(bench, [1, 2, 3], image, [5, 6, 7, 8])
    await bench.quiet()
    assert same.state is RequestState.WAITING
    await bench.finish(first, other, same)
    assert cached(bench, same) == 4


async def test_a_preempted_request_resumes_outside_its_images(make_bench: MakeBench, events: Events) -> None:
    bench = await make_bench(9)
    long = submit(bench, list(range(100, 108)), max_tokens=16)
    await bench.running(long)
    late = submit(bench, [1, 2, 3], ("cat", 10), [5], max_tokens=12)
    await bench.running(late)
    await bench.finish(long, late)
    assert len(starts_of(bench, late)) > 1, "it was not preempted"
    start = starts_of(bench, late)[0]
    assert events(late) == (answer(start, 12), "length")


async def test_with_cross_attention_all_rows_depend_on_all_images(make_bench: MakeBench) -> None:
    bench = await make_bench(40)
    text = list(range(100, 112))
    prompt: list[Piece] = [text, ("cat", 1), [4, 5, 6]]
    # The bench's worker takes blocks before an image for equal, so what it is told is looked at, not what it reads.
    await run(bench, *prompt, cross=True)
    same = await run(bench, *prompt, cross=True)
    other = await run(bench, text, ("dog", 1), [4, 5, 6], cross=True)
    longer = await run(bench, *prompt, ("cat", 1), [7, 8, 9], cross=True)
    alone = await run(bench, text, [4, 5, 6, 7])
    assert [cached(bench, request) for request in (same, other, longer, alone)] == [3, 0, 0, 0]


async def test_images_of_a_cancelled_run_are_sent_again(make_bench: MakeBench, events: Events) -> None:
    bench = await make_bench(20)
    request = submit(bench, [1, 2, 3], CAT, [4], max_tokens=6)
    await bench.running(request)
    bench.step()
    bench.die()
    bench.dispatcher.on_ready()
    await bench.finish(request)
    first, second = starts_of(bench, request)
    assert first.images == second.images
    assert events(request) == (answer(first, 6), "length")
    assert not [message for message in bench.sent if isinstance(message, Cancel)]


pieces = st.lists(
    st.one_of(
        st.lists(st.integers(100, 102), min_size=1, max_size=7),
        st.tuples(st.sampled_from(["cat", "dog"]), st.sampled_from([1, 3, 6, 13])),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("model", ["plain", "windows"])
@settings(max_examples=25, deadline=None)
@given(prompts=st.lists(pieces, min_size=2, max_size=6), shared=st.integers(0, 3))
async def test_whatever_is_shared_the_answers_are_right(
    bench_of: BenchOf, events: Events, model: str, prompts: list[list[Piece]], shared: int
) -> None:
    async with bench_of(24 * MODELS[model].block_frames, model=model) as bench:
        requests = [submit(bench, *prompts[0][:shared], *prompt, max_tokens=5) for prompt in prompts]
        await bench.finish(*requests)
        for request in requests:
            assert events(request) == (answer(starts_of(bench, request)[0], 5), "length")
            for start in starts_of(bench, request):
                tokens = start.cached_blocks * BLOCK
                assert identity.last_cut(tokens, request.images._spans if request.images else []) == tokens
