"""The end of a model's image decoding, in order: who writes into the pixels' memory ends before it is given back."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from prefixd.base.errors import UnavailableError
from prefixd.images.decoding import Job, Killed
from prefixd.images.image_files import ImageLimits
from prefixd.serving.images.image_decoder import ImageDecoder, _DecodeProcess
from prefixd.serving.images.pixel_store import PixelPlace, PixelStore
from prefixd.serving.models.model_host import ModelHost
from tests.waiting import WAIT_S


class Process:
    """A process of which a test says when it ends."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.is_over = asyncio.Event()

    def kill(self) -> None:
        pass

    async def wait(self) -> int:
        await self.is_over.wait()
        self.returncode = -9
        return -9


class Writer:
    def write(self, data: bytes) -> None:
        pass

    def close(self) -> None:
        pass


def decode_process() -> tuple[_DecodeProcess, Process, asyncio.StreamReader]:
    process, reader = Process(), asyncio.StreamReader()
    return _DecodeProcess(cast(Any, process), reader, cast(Any, Writer())), process, reader


async def test_a_job_after_the_end_is_answered_and_no_other_before_its_process_has_ended() -> None:
    made, process, reader = decode_process()
    made._listening = asyncio.create_task(made._listen())
    first = made.submit(Job(1, 0, 0, 10))
    made.kill()
    second = made.submit(Job(2, 0, 1 << 30, 10))
    assert second.done() and second.result() == Killed(2, False, 0)
    await asyncio.sleep(0)
    early = first.done()
    reader.feed_eof()
    process.is_over.set()
    assert not early, "its process may still write into its memory"
    assert await asyncio.wait_for(first, WAIT_S) == Killed(1, False, -9)
    await made.wait()
    assert made._listening.exception() is None


class Text:
    def close(self) -> None:
        pass


@pytest.fixture
async def host() -> ModelHost:
    """A model that is loading, with its image decoder."""
    made = ModelHost.__new__(ModelHost)
    made._model, made._text = None, cast(Any, Text())
    made._images, made._pixels = ThreadPoolExecutor(1), PixelStore()
    made._decoder = ImageDecoder(Path("model"), ImageLimits(1, 1 << 20, 1 << 20, 10), made._pixels, made._images)
    return made


class Writing:
    """Stands in for `PixelPlace.write`: says when it begins, and goes on when it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on, self.ended = threading.Event(), threading.Event(), threading.Event()
        really = PixelPlace.write

        def write(place: PixelPlace, data: bytes) -> None:
            self.begun.set()
            self.go_on.wait(WAIT_S)
            really(place, data)
            self.ended.set()

        monkeypatch.setattr(PixelPlace, "write", write)


async def test_the_pixels_are_closed_when_no_thread_writes_there(
    host: ModelHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = Writing(monkeypatch)
    made, _, _ = decode_process()
    host._decoder._process = made
    decoding = [asyncio.create_task(host._decoder.decode(b"a file", number)) for number in range(2)]
    await asyncio.to_thread(writing.begun.wait, WAIT_S)
    made._process.is_over.set()  # type: ignore[attr-defined]
    host.stop_tokenizing()
    fd = host._pixels.fd
    ending = asyncio.create_task(host.stop_loading())
    for _ in range(20):
        await asyncio.sleep(0.001)
    os.fstat(fd)
    assert not ending.done() and host._pixels.fd == fd
    writing.go_on.set()
    await asyncio.wait_for(ending, WAIT_S)
    assert writing.ended.is_set() and host._pixels.fd == -1
    for each in decoding:  # one was being written, one waited for the thread
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(each, WAIT_S)


async def test_an_end_while_the_worker_starts_again_ends_the_decoder(host: ModelHost) -> None:
    made, process, reader = decode_process()
    made._listening = asyncio.create_task(made._listen())
    host._decoder._process = made

    def kill() -> None:
        process.is_over.set()
        reader.feed_eof()

    process.kill = kill  # type: ignore[method-assign]
    await asyncio.wait_for(host.stop_loading(), WAIT_S)
    assert host._decoder._closed and process.returncode == -9
