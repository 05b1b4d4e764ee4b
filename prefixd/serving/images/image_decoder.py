"""Images of prompts are decoded in processes of their own, which can be killed (`prefixd/images/decode_process.py`)."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prefixd.base.errors import ConfigError, ExhaustedError, InvalidArgumentError, UnavailableError
from prefixd.images.decoding import (
    Answer,
    Decoded,
    Described,
    Drop,
    Job,
    Killed,
    Pixels,
    Refused,
    encode,
    from_decoder,
)
from prefixd.images.image_files import ImageLimits
from prefixd.images.token_counts import ImageProcessor
from prefixd.serving.images.pixel_store import PixelPlace, PixelStore

log = logging.getLogger(__name__)

AT_ONCE = 2
"""Images that are decoded at a time, each of another tenant, so that one that takes its full time blocks no other."""
_WAIT_TIMES = 6
"""An image is given up after this many times its processor time: a busy machine is slower."""
_LINE_BYTES = 1 << 20
_STOP_S = 5.0
_MODULE = "prefixd.images.decode_process"
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # it forks, and threads do not come along


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """An image that the worker can take.

    Attributes:
        tokens: number of its placeholders in the prompt.
        pixels: the image.
        place: where its pixels lie; the caller of `decode` is its user.
    """

    tokens: int
    pixels: Pixels
    place: PixelPlace

    @property
    def nbytes(self) -> int:
        """Bytes of its pixels."""
        return math.prod(self.pixels.shape)


class ImageDecoder:
    """Decodes images for one model.

    Args:
        directory: the model's.
        limits: what an image may have.
        store: where files and pixels lie.
        threads: write files into the memory.
    """

    def __init__(self, directory: Path, limits: ImageLimits, store: PixelStore, threads: ThreadPoolExecutor) -> None:
        self.limits = limits
        self._directory = directory
        self._store = store
        self._threads = threads
        self._ids = itertools.count()
        self._process: _DecodeProcess | None = None
        self._starting = asyncio.Lock()
        self._places = asyncio.Semaphore(AT_ONCE)
        self._closed = False

    async def start(self) -> ImageProcessor:
        """Starts the process; returns the model's image processor in numbers. Takes seconds.

        Raises ConfigError: there is no process for it, no image processor, or one of a family that is not known.
        """
        return (await self._started()).processor

    async def decode(self, data: bytes, number: int) -> DecodedImage:
        """Decodes a file. When the caller is cancelled, its process is killed.

        Args:
            data: the file. `number`: which of the prompt's, from 0.

        Raises:
            InvalidArgumentError: it cannot be used, or takes too much time; see `check_image`.
            ExhaustedError: there is no memory for it, or the machine is too busy to decode it.
            UnavailableError: the daemon ends, or the process has ended.
        """
        await self._places.acquire()
        place = self._store.place()
        submitted, written = False, None

        def free(_: object = None) -> None:
            self._places.release()
            place.leave()

        try:
            try:
                process = await self._started()
                written = asyncio.get_running_loop().run_in_executor(self._threads, place.write, data)
                await asyncio.shield(written)
            except asyncio.CancelledError:
                if written is not None and written.cancelled():  # the threads were shut down; not by the caller
                    raise UnavailableError("the daemon is ending; send the request again when it is back") from None
                raise
            except ConfigError as error:
                raise UnavailableError(f"images[{number}] cannot be decoded: {error}") from error
            except OSError as error:
                raise ExhaustedError(
                    f"there is no memory to decode images[{number}] of {len(data)} bytes ({error.strerror}); send it "
                    "again later"
                ) from error
            job = Job(next(self._ids), number, place.offset, len(data))
            answered = process.submit(job)
            submitted = True
        finally:
            if written is not None and not written.done():
                written.add_done_callback(free)  # the thread still writes there, and would fill freed memory again
            elif not submitted:
                free()
        return await self._answer(process, job, place, answered)

    async def _answer(
        self, process: _DecodeProcess, job: Job, place: PixelPlace, answered: asyncio.Future[Answer]
    ) -> DecodedImage:
        """Waits for a job's answer. Its memory and its turn are freed when its process has ended, for any reason."""
        wanted = True

        def ended(_: asyncio.Future[Answer]) -> None:
            self._places.release()
            if not wanted:
                place.leave()

        answered.add_done_callback(ended)
        seconds = self.limits.image_seconds
        try:
            async with asyncio.timeout(_WAIT_TIMES * seconds):
                answer = await asyncio.shield(answered)
            if isinstance(answer, Decoded):
                return DecodedImage(answer.tokens, answer.pixels, place)
        except BaseException as error:
            if answered.done():
                place.leave()
            else:
                wanted = False
                process.drop(job.id)
            if isinstance(error, TimeoutError):
                raise ExhaustedError(
                    f"images[{job.number}] was not decoded in {_WAIT_TIMES * seconds} s: the machine is too busy; send "
                    "it again later"
                ) from error
            raise
        place.leave()
        if isinstance(answer, Refused):
            raise InvalidArgumentError(answer.why)
        if answer.overtime:
            raise InvalidArgumentError(
                f"images[{job.number}] ({job.nbytes} bytes) takes more than {seconds} s to decode, and "
                f"worker.image_seconds allows {seconds}; save it anew"
            )
        log.error("the process that decoded an image of %d bytes ended with status %d", job.nbytes, answer.status)
        raise UnavailableError(
            f"the process that decoded images[{job.number}] ended with status {answer.status}; send it again later"
        )

    async def _started(self) -> _DecodeProcess:
        """The running process, or a new one."""
        async with self._starting:
            if self._closed:
                raise UnavailableError("the daemon is ending; send the request again when it is back")
            if self._process is None or self._process.ended:
                self._process = await _start(self._directory, self.limits, self._store.fd, self._keep)
            return self._process

    def _keep(self, process: _DecodeProcess) -> None:
        """Remembers a process that has been started, so that `close` can end it."""
        self._process = process
        if self._closed:
            process.kill()

    def close(self) -> None:
        """Kills the process at once."""
        self._closed = True
        if self._process is not None:
            self._process.kill()

    async def stop(self) -> None:
        """After `close`, waits for the process's end."""
        if self._process is not None:
            await self._process.wait()


class _DecodeProcess:
    """The daemon's side of the process."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.processor: ImageProcessor
        self._process = process
        self._reader = reader
        self._writer = writer
        self._jobs: dict[int, asyncio.Future[Answer]] = {}
        self._listening: asyncio.Task[None] | None = None
        self._killed = False

    @property
    def ended(self) -> bool:
        """Whether it takes no more jobs."""
        return self._killed

    async def read_description(self) -> Described:
        """Reads its first message; afterwards it takes jobs. Raises ConnectionError if it has ended."""
        if not (line := await self._reader.readline()):
            raise ConnectionError(f"transformers ended with status {await self._process.wait()}, see the lines above")
        described = from_decoder(line)
        assert isinstance(described, Described)
        if described.processor is not None:
            self.processor = described.processor
            self._listening = asyncio.create_task(self._listen(), name="image decoder")
        return described

    def submit(self, job: Job) -> asyncio.Future[Answer]:
        """Hands over a job; the future gets an answer in any case."""
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if self.ended:  # other jobs may still run until `_listen` has seen its end
            answered.set_result(Killed(job.id, False, self._process.returncode or 0))
        else:
            self._jobs[job.id] = answered
            self._writer.write(encode(job) + b"\n")
        return answered

    def drop(self, job: int) -> None:
        """Kills the child process of a job."""
        if not self._killed:
            self._writer.write(encode(Drop(job)) + b"\n")

    def kill(self) -> None:
        """Ends it, and with it its child processes."""
        self._killed = True
        with suppress(ProcessLookupError):
            self._process.kill()
        self._writer.close()

    async def wait(self) -> None:
        """Waits for its end."""
        await self._process.wait()
        if self._listening is not None:
            await asyncio.wait({self._listening})

    async def _listen(self) -> None:
        try:
            with suppress(ConnectionError):
                while line := await self._reader.readline():
                    answer = from_decoder(line)
                    assert not isinstance(answer, Described)
                    answered = self._jobs.pop(answer.id)
                    answered.set_result(answer)
        finally:
            self._killed = True
            self._writer.close()
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_S)
            except TimeoutError:
                self.kill()
                await self._process.wait()
            for number, answered in self._jobs.items():
                answered.set_result(Killed(number, False, self._process.returncode or 0))
            self._jobs.clear()


async def _start(
    directory: Path, limits: ImageLimits, memory: int, started: Callable[[_DecodeProcess], None]
) -> _DecodeProcess:
    """A process that takes jobs. `started` is called with it as soon as it runs. Raises ConfigError."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                _MODULE,
                "--parent",
                str(os.getpid()),
                "--fd",
                str(theirs.fileno()),
                "--memory",
                str(memory),
                "--limits",
                msgspec.json.encode(limits).decode(),
                os.fspath(directory),
                pass_fds=[theirs.fileno(), memory],
                env={**os.environ, **_ENVIRONMENT},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                process_group=0,  # Ctrl-C does not reach it
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_LINE_BYTES)
    except (OSError, RuntimeError) as error:
        ours.close()
        raise ConfigError(
            f"the image processor in {str(directory)!r} cannot be loaded: no process for it ({error}); give the "
            "daemon more processes and descriptors, and restart it"
        ) from error
    made = _DecodeProcess(process, reader, writer)
    started(made)
    try:
        described = await made.read_description()
        why = described.error[:300]
    except ConnectionError as error:
        described, why = None, str(error)
    except BaseException:
        made.kill()
        raise
    if described is None or described.processor is None:
        made.kill()
        raise ConfigError(
            f"the image processor in {str(directory)!r} cannot be loaded: {why}; save preprocessor_config.json there "
            "with save_pretrained"
        )
    return made
