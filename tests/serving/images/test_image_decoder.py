"""Processes that decode images: bounded in time, killed when nobody wants their image, and never waited for by others.

A stand-in spares transformers; `tests/server/generation/test_images.py` runs the real one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prefixd.base.errors import ConfigError, InvalidArgumentError, UnavailableError
from prefixd.images.image_files import ImageLimits
from prefixd.images.token_counts import FixedCount
from prefixd.serving.images import image_decoder
from prefixd.serving.images.image_decoder import AT_ONCE, ImageDecoder
from prefixd.serving.images.pixel_store import PixelPlace, PixelStore
from tests.serving.images.decode_stand_in import PID
from tests.waiting import WAIT_S, until

pytestmark = pytest.mark.slow
LONG = ImageLimits(1, 1 << 20, 1 << 20, image_seconds=3600)


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., ImageDecoder]]:
    monkeypatch.setattr(image_decoder, "_MODULE", "tests.serving.images.decode_stand_in")
    store, made = PixelStore(), list[ImageDecoder]()
    with ThreadPoolExecutor(1) as threads:

        def make_decoder(limits: ImageLimits = LONG) -> ImageDecoder:
            made.append(ImageDecoder(Path("model"), limits, store, threads))
            return made[-1]

        yield make_decoder
        for decoder in made:
            decoder.close()
            await decoder.stop()
    store.close()


@pytest.fixture
async def decoder(make: Callable[..., ImageDecoder]) -> ImageDecoder:
    made = make()
    assert (await made.start()).counts == FixedCount(5)
    return made


async def spinning(decoder: ImageDecoder) -> tuple[asyncio.Task[object], int]:
    """An image whose decoding does not end, and the process that is at it."""
    before = decoder._store._next
    task = asyncio.create_task(decoder.decode(b"spin", 0))
    pids: list[int] = []

    def begun() -> bool:
        if decoder._store._next == before:
            return False
        pid = PID.unpack(os.pread(decoder._store.fd, PID.size, before << 30).ljust(PID.size, b"\0"))[0]
        if pid and pid != int.from_bytes(b"spin", "little"):
            pids.append(pid)
        return bool(pids)

    await until(begun)
    return task, pids[0]


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def test_a_file_becomes_pixels_in_shared_memory(decoder: ImageDecoder) -> None:
    image = await decoder.decode(b"a file", 0)
    assert (image.tokens, image.nbytes) == (5, 6)
    assert os.pread(decoder._store.fd, 6, image.pixels.offset) == b"a file"
    image.place.leave()
    assert decoder._store.nbytes == 0


async def test_an_image_that_takes_long_keeps_nobody_elses_waiting(decoder: ImageDecoder) -> None:
    task, _ = await spinning(decoder)
    for number in range(3):
        (await decoder.decode(b"a file", number)).place.leave()
    assert not task.done()
    task.cancel()


async def test_who_goes_away_takes_the_process_along(decoder: ImageDecoder) -> None:
    """And leaves its turn and its memory."""
    for _ in range(AT_ONCE + 1):
        task, pid = await spinning(decoder)
        task.cancel()
        await until(lambda pid=pid: gone(pid))
    await until(lambda: not decoder._store.nbytes)
    (await decoder.decode(b"a file", 0)).place.leave()


async def test_who_goes_away_while_the_file_is_written_leaves_its_memory(
    decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread goes on writing: the place is free, and its turn another's, once it has ended."""
    begun, go_on, write = threading.Event(), threading.Event(), PixelPlace.write

    def slowly(place: PixelPlace, data: bytes) -> None:
        begun.set()
        assert go_on.wait(WAIT_S)
        write(place, data)

    monkeypatch.setattr(PixelPlace, "write", slowly)
    task = asyncio.create_task(decoder.decode(b"a file", 0))
    try:
        await until(begun.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert decoder._places._value == AT_ONCE - 1
    finally:
        go_on.set()
    await until(lambda: decoder._places._value == AT_ONCE)
    assert decoder._store.nbytes == 0


async def test_ending_does_not_wait_for_an_image(decoder: ImageDecoder) -> None:
    task, pid = await spinning(decoder)
    decoder.close()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(task, WAIT_S)
    await decoder.stop()
    await until(lambda: gone(pid))
    with pytest.raises(UnavailableError, match="the daemon is ending; send the request again"):
        await decoder.decode(b"a file", 0)


async def test_a_process_that_dies_is_started_again(decoder: ImageDecoder) -> None:
    task, pid = await spinning(decoder)
    assert decoder._process is not None
    os.kill(decoder._process._process.pid, signal.SIGKILL)
    with pytest.raises(UnavailableError, match=r"that decoded images\[0\] ended with status -9; send it again later"):
        await asyncio.wait_for(task, WAIT_S)
    await until(lambda: gone(pid))
    (await decoder.decode(b"a file", 0)).place.leave()


async def test_a_decoder_that_crashes_fails_one_image(decoder: ImageDecoder, capfd: pytest.CaptureFixture[str]) -> None:
    process = decoder._process
    with pytest.raises(UnavailableError, match=r"images\[3\] ended with status -11"):
        await decoder.decode(b"crash", 3)
    (await decoder.decode(b"a file", 0)).place.leave()
    assert decoder._process is process and decoder._store.nbytes == 0


async def test_an_image_that_takes_more_time_than_it_may_is_refused(
    make: Callable[..., ImageDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_decoder, "_WAIT_TIMES", 100)  # however busy the machine is
    decoder = make(ImageLimits(1, 1 << 20, 1 << 20, image_seconds=1))
    with pytest.raises(InvalidArgumentError, match=r"images\[2\] \(4 bytes\) takes more than 1 s.*image_seconds"):
        await decoder.decode(b"spin", 2)
    assert decoder._store.nbytes == 0
    (await decoder.decode(b"a file", 0)).place.leave()


async def test_an_image_that_the_machine_has_no_time_for_is_given_up(
    decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_decoder, "_WAIT_TIMES", 0.1 / LONG.image_seconds)
    with pytest.raises(image_decoder.ExhaustedError, match=r"images\[0\] was not decoded in .*send it again later"):
        await decoder.decode(b"spin", 0)
    await until(lambda: not decoder._store.nbytes)


async def test_a_model_without_an_image_processor(
    make: Callable[..., ImageDecoder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(image_decoder, "_MODULE", "prefixd.images.decode_process")
    decoder = make()
    decoder._directory = tmp_path
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*save preprocessor_config.json there") as caught:
        await decoder.start()
    assert "\n" not in str(caught.value)
