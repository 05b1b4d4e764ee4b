"""Images and placeholders of a prompt: matched, bounded, and laid out."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from prefixd.base.errors import ExhaustedError, InvalidArgumentError, UnavailableError
from prefixd.base.tenancy.fairness import SharedBytes
from prefixd.base.tenancy.tenants import Tenant
from prefixd.images.check_image import check_image
from prefixd.images.decoding import Pixels
from prefixd.images.image_files import ImageLimits
from prefixd.images.token_counts import FixedCount, GridCount, ImageProcessor
from prefixd.serving.images.image_decoder import DecodedImage
from prefixd.serving.images.image_reader import ImageReader
from prefixd.serving.images.pixel_store import PixelStore
from prefixd.serving.images.prompt_images import PromptLayout
from prefixd.worker_protocol.protocol import ImageShape
from tests.hello import hello

PLACEHOLDER = 90
HELLO = hello(frame_bytes=8192, block_tokens=8, chunk_bytes=8192, vocab_size=100, max_model_tokens=40, eos_token_ids=())


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


@pytest.fixture
def store() -> Iterator[PixelStore]:
    made = PixelStore()
    yield made
    made.close()


class Decoder:
    """Decodes in this process, one byte a pixel."""

    def __init__(self, processor: ImageProcessor, limits: ImageLimits, store: PixelStore) -> None:
        self._processor, self._limits, self._store = processor, limits, store

    async def decode(self, data: bytes, number: int) -> DecodedImage:
        checked = check_image(data, number, self._processor, self._limits)
        place = self._store.place()
        place.write(checked.image.tobytes())
        return DecodedImage(checked.tokens, Pixels(place.offset, (3, *checked.image.size), {}), place)


def reader(
    threads: ThreadPoolExecutor, store: PixelStore, counts: Any = None, step_tokens: int = 64, **shape: Any
) -> ImageReader:
    images = ImageShape(PLACEHOLDER, **{"kind": "rows", **shape})
    hello = msgspec.structs.replace(HELLO, images=images)
    processor = ImageProcessor(counts or FixedCount(5), bytes(32))
    limits = ImageLimits(2, 1 << 16, 4096)
    return ImageReader(hello, processor, limits, step_tokens, Decoder(processor, limits, store), threads)


async def read(made: ImageReader, tokens: Any, images: list[bytes], most_bytes: int = 1 << 20) -> PromptLayout | None:
    held = SharedBytes(most_bytes, "images", "worker.images_bytes")
    return await made.read(tokens, images, "a", partial(held.held, Tenant("a", 0)))


def picture(color: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), color).save(file, "PNG")
    return file.getvalue()


def ids(*tokens: int) -> Any:
    return np.array(tokens, np.uint32)


async def test_each_placeholder_is_repeated_as_often_as_its_image_has_tokens(
    threads: ThreadPoolExecutor, store: PixelStore
) -> None:
    red, green = picture(), picture("green")
    layout = await read(reader(threads, store), ids(1, PLACEHOLDER, 2, PLACEHOLDER), [red, green])
    assert layout is not None
    expected = [1, *[PLACEHOLDER] * 5, 2, *[PLACEHOLDER] * 5]
    assert np.frombuffer(layout.token_ids, "<u4").tolist() == expected
    assert [(image.first, image.tokens) for image in layout.images] == [(1, 5), (7, 5)]
    places = [image.pixels.offset for image in layout.images]
    assert [os.pread(store.fd, 768, place) for place in places] == [b"\xff\0\0" * 256, b"\0\x80\0" * 256]
    assert layout.images[0].digest != layout.images[1].digest
    assert not layout.cross
    assert await read(reader(threads, store), ids(1, 2), []) is None


async def test_what_does_not_fit_is_refused(threads: ThreadPoolExecutor, store: PixelStore) -> None:
    many = [PLACEHOLDER] * 3
    with pytest.raises(InvalidArgumentError, match=r"3 placeholders \(token id 90\).* 2 images; write one placeholder"):
        await read(reader(threads, store), ids(*many), [picture()] * 2)
    with pytest.raises(InvalidArgumentError, match=r"3 images, and worker.images_per_prompt allows 2; send fewer"):
        await read(reader(threads, store), ids(*many), [picture()] * 3)
    with pytest.raises(InvalidArgumentError, match=r"has 44 tokens with those of its 1 images.* takes 40.* at most 39"):
        await read(reader(threads, store), ids(*[1] * 39, PLACEHOLDER), [picture()])
    with pytest.raises(InvalidArgumentError, match=r"5 tokens.* worker.max_step_tokens is 4; raise that to 5"):
        await read(reader(threads, store, step_tokens=4, both_ways=True), ids(PLACEHOLDER), [picture()])


@pytest.mark.parametrize("both_ways", [False, True])
async def test_images_that_meet_are_refused_where_the_model_takes_them_for_one(
    threads: ThreadPoolExecutor, store: PixelStore, both_ways: bool
) -> None:
    counts = FixedCount(5) if both_ways else GridCount(8, 64, 1024)
    with pytest.raises(InvalidArgumentError, match="images 0 and 1 follow each other directly"):
        made = reader(threads, store, counts, both_ways=both_ways)
        await read(made, ids(1, PLACEHOLDER, PLACEHOLDER), [picture()] * 2)
    assert await read(reader(threads, store), ids(1, PLACEHOLDER, PLACEHOLDER), [picture()] * 2) is not None


async def test_a_daemon_that_ends_says_so(threads: ThreadPoolExecutor, store: PixelStore) -> None:
    busy = threading.Event()
    threads.submit(busy.wait)
    waiting = asyncio.create_task(read(reader(threads, store), ids(PLACEHOLDER), [picture()]))
    await asyncio.sleep(0)
    threads.shutdown(wait=False, cancel_futures=True)
    busy.set()
    with pytest.raises(UnavailableError, match="the daemon is ending"):
        await waiting
    with pytest.raises(UnavailableError, match="the daemon is ending"):
        await read(reader(threads, store), ids(PLACEHOLDER), [picture()])


async def test_pixels_have_memory_as_long_as_there_are_users(threads: ThreadPoolExecutor, store: PixelStore) -> None:
    """The call that sent them, and the requests that may run: a worker may read them until its last word."""
    held, made = SharedBytes(2000, "images", "worker.images_bytes"), reader(threads, store)
    hold = partial(held.held, Tenant("a", 0))
    layout = await made.read(ids(PLACEHOLDER, 2, PLACEHOLDER), [picture(), picture()], "a", hold)
    assert layout is not None
    request = layout.of_request()
    request.enter()
    assert held.nbytes == 2 * 768 and store.nbytes > 0
    layout.leave()
    with pytest.raises(ExhaustedError, match=r"768 bytes of images, others have 1536.* allows 2000"):
        await made.read(ids(PLACEHOLDER), [picture()], "a", hold)
    assert held.nbytes == 2 * 768 and store.nbytes > 0
    assert os.pread(store.fd, 3, layout.images[1].pixels.offset) == b"\xff\0\0"
    request.leave()
    assert held.nbytes == store.nbytes == 0
    later = await made.read(ids(PLACEHOLDER), [picture()], "a", hold)
    assert later is not None and later.images[0].pixels.offset not in [each.pixels.offset for each in layout.images]
    assert os.pread(store.fd, 3, layout.images[1].pixels.offset) == bytes(3), "nobody's pixels come to lie there"
    later.leave()
    with pytest.raises(InvalidArgumentError, match=r"images\[1\] .* cannot be read"):
        await made.read(ids(PLACEHOLDER, 2, PLACEHOLDER), [picture(), b"junk"], "a", hold)
    assert held.nbytes == store.nbytes == 0, "of the first one, too"


async def test_the_files_of_all_requests_are_bounded() -> None:
    held, tenant = SharedBytes(10, "images", "worker.images_bytes"), Tenant("a", 0)
    with held.held(tenant, 7):
        with (
            pytest.raises(ExhaustedError, match=r"4 bytes of images, others have 7, and worker.images_bytes allows 10"),
            held.held(tenant, 4),
        ):
            pass
        with held.held(tenant, 3):
            assert held.nbytes == 10
    assert held.nbytes == 0
