"""``python -m prefixd.images.decode_process``: decodes images, each in a process of its own that can be killed.

The daemon starts one for each model that reads images (`serving/images/image_decoder.py`). It loads transformers
without torch once (70 MiB), and then forks for each image: so each image has its own limit of processor time, and no
state of an earlier image.
"""

from __future__ import annotations

import argparse
import os
import resource
import selectors
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec

from prefixd.base.errors import InvalidArgumentError
from prefixd.images.check_image import check_image
from prefixd.images.decoding import (
    Answer,
    Decoded,
    Described,
    Drop,
    InputArray,
    Job,
    Killed,
    Pixels,
    Refused,
    encode,
    to_decoder,
)
from prefixd.images.image_files import ImageLimits
from prefixd.images.load_processor import load_processor
from prefixd.images.prepare import prepare_image
from prefixd.images.token_counts import ImageProcessor
from prefixd.process.child import end_with

Work = Callable[[Job, bytes], Answer]
"""Decodes an image's file; writes its pixels into the shared memory."""

_READ_BYTES = 1 << 16
_NICENESS = 10


@dataclass(slots=True)
class _Child:
    job: Job
    pid: int
    read_end: int
    answer: bytearray = field(default_factory=bytearray)


class DecodeServer:
    """Takes jobs from the daemon, forks for each, and answers.

    Args:
        connection: socket to the daemon; when it closes, all children are killed.
        memory: descriptor of the shared memory.
        seconds: the most processor time of a job.
        work: does a job in a child process.
    """

    def __init__(self, connection: socket.socket, memory: int, seconds: int, work: Work) -> None:
        self._connection = connection
        self._memory = memory
        self._seconds = seconds
        self._work = work
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serves jobs until the daemon closes the connection."""
        lines = bytearray()
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._connection:
                    self._read_answer(key.data)
                    continue
                with suppress(ConnectionResetError):
                    if received := self._connection.recv(_READ_BYTES):
                        lines += received
                        continue
                for child in self._children.values():
                    os.kill(child.pid, signal.SIGKILL)
                return
            *whole, rest = lines.split(b"\n")
            lines = bytearray(rest)
            for line in whole:
                self._handle(to_decoder(line))

    def _handle(self, message: Job | Drop) -> None:
        if isinstance(message, Drop):
            if (child := self._children.get(message.id)) is not None:
                os.kill(child.pid, signal.SIGKILL)
            return
        try:
            read_end, write_end = os.pipe()
        except OSError:
            self._send(Killed(message.id, False, 0))
            return
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            os.close(read_end)
            os.close(write_end)
            self._send(Killed(message.id, False, 0))
            return
        if pid == 0:
            self._run_child(message, write_end, parent)
        os.close(write_end)
        child = self._children[message.id] = _Child(message, pid, read_end)
        self._selector.register(read_end, selectors.EVENT_READ, child)

    def _read_answer(self, child: _Child) -> None:
        if part := os.read(child.read_end, _READ_BYTES):
            child.answer += part
            return
        self._selector.unregister(child.read_end)
        os.close(child.read_end)
        del self._children[child.job.id]
        _, status, usage = os.wait4(child.pid, 0)
        if (code := os.waitstatus_to_exitcode(status)) == 0:
            self._connection.sendall(child.answer)
            return
        overtime = code < 0 and usage.ru_utime + usage.ru_stime > self._seconds - 0.5
        self._send(Killed(child.job.id, overtime, code))

    def _send(self, answer: Answer) -> None:
        self._connection.sendall(encode(answer) + b"\n")

    def _run_child(self, job: Job, write_end: int, parent: int) -> NoReturn:
        """Does the work within the limits, and ends the process."""
        status = 1
        try:
            end_with(parent)
            self._connection.close()
            _limit_process(self._seconds)
            answer = self._work(job, os.pread(self._memory, job.nbytes, job.offset))
            os.write(write_end, encode(answer) + b"\n")  # a few hundred bytes fit into the pipe at once
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)


def _limit_process(seconds: int) -> None:
    """Bounds this process's processor time, and gives the daemon and the worker precedence in scheduling; if memory is
    short, the kernel kills this process before them."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICENESS)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    warnings.simplefilter("ignore")  # otherwise every unusual file would print one


def decode_work(processor: Any, described: ImageProcessor, limits: ImageLimits, memory: int) -> Work:
    """Returns the work of a child: it checks and decodes an image, and prepares it with a model's image processor."""

    def work(job: Job, data: bytes) -> Answer:
        try:
            checked = check_image(data, job.number, described, limits)
        except InvalidArgumentError as error:
            return Refused(job.id, str(error))
        try:
            prepared = prepare_image(checked.image, processor)
        except Exception as error:  # each processor has its own errors for sizes that it refuses
            why = " ".join(str(error).split())[:200]
            return Refused(job.id, f"images[{job.number}] cannot be prepared for the model: {why}; make it smaller")
        left, offset = prepared.pixels.data.cast("B"), job.offset
        while left:
            written = os.pwrite(memory, left, offset)
            left, offset = left[written:], offset + written
        inputs = {
            name: InputArray(str(array.dtype), array.shape, array.tobytes()) for name, array in prepared.inputs.items()
        }
        return Decoded(job.id, checked.tokens, Pixels(job.offset, prepared.pixels.shape, inputs))

    return work


def main(
    arguments: list[str] | None = None,
    load: Callable[[str], tuple[Any, ImageProcessor]] = load_processor,
    work_of: Callable[[Any, ImageProcessor, ImageLimits, int], Work] = decode_work,
) -> int:
    """Runs the process until the daemon closes the socket; returns its exit status.

    Args:
        arguments: arguments of the command line.
        load: reads the image processor of a model directory.
        work_of: makes the work of a child; by default `decode_work`.
    """
    parser = argparse.ArgumentParser(prog="python -m prefixd.images.decode_process", description="decodes images")
    parser.add_argument("--parent", type=int, required=True, help="process id of the daemon; this process ends with it")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket to the daemon")
    parser.add_argument("--memory", type=int, required=True, help="descriptor of the shared memory")
    parser.add_argument("--limits", required=True, help="ImageLimits as JSON")
    parser.add_argument("directory", help="the model's directory")
    options = parser.parse_args(arguments)
    end_with(options.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon decides when this ends, not the terminal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    limits = msgspec.json.decode(options.limits, type=ImageLimits)
    connection = socket.socket(fileno=options.fd)
    try:
        processor, described = load(options.directory)
        work = work_of(processor, described, limits, options.memory)
    except Exception as error:  # each image processor has its own errors
        connection.sendall(encode(Described(None, f"{type(error).__name__}: {' '.join(str(error).split())}")) + b"\n")
        return 1
    connection.sendall(encode(Described(described)) + b"\n")
    with suppress(BrokenPipeError, ConnectionResetError):
        DecodeServer(connection, options.memory, limits.image_seconds, work).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
