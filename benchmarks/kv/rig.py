"""An engine in this process, and frames for it as the daemon hands them out."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.common.harness import BenchmarkError
from prefixd.base.sampling import Sampling
from prefixd.serving.models.embedded_model import ensure_embedded_model
from prefixd.worker.engine import Engine
from prefixd.worker.graphs.pass_graphs import PassGraphs
from prefixd.worker.memory.frame_window import FrameWindow
from prefixd.worker.memory.kv_memory import KvMemory
from prefixd.worker.memory.paged_kv import PagedKv
from prefixd.worker.memory.virtual_kv import VirtualKv
from prefixd.worker.model import CausalModel, load_model
from prefixd.worker.spec.model_spec import ModelSpec, read_model_spec
from prefixd.worker_protocol.protocol import Done, Extend, Start, Step
from prefixd.worker_protocol.worker_settings import WorkerSettings
from prefixd_swap.vmem import FrameId, FramePool, create_memory
from prefixd_swap.vtensor import VirtualTensorManager

VIRTUAL, PAGED = "virtual", "paged"


def load_embedded_model(chunk_bytes: int = 0, block_tokens: int = 16) -> CausalModel:
    """The model that comes with prefixd, where the daemon keeps it. Raises BenchmarkError when it cannot be written."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        directory = ensure_embedded_model(Path(home).expanduser() / "prefixd")
    except OSError as error:
        raise BenchmarkError(f"the embedded model cannot be written ({error}); set XDG_CACHE_HOME") from error
    return load(directory, chunk_bytes, block_tokens)


def load(directory: Path, chunk_bytes: int = 0, block_tokens: int = 16) -> CausalModel:
    """A model on the CPU, without transformers' progress bars. Raises ModelError."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    return load_model(
        read_model_spec(WorkerSettings(model=str(directory), chunk_bytes=chunk_bytes, block_tokens=block_tokens))
    )


class Frames:
    """The daemon's side of the memory: a pool of frames that grows when one is wanted and none is free.

    device: as for `create_memory`.  frames: how many to create now.  most: how many there can ever be.
    """

    def __init__(self, spec: ModelSpec, frames: int, most: int | None = None, device: str = "cpu") -> None:
        self.spec = spec
        self.memory = create_memory(device, spec.groups.chunk_bytes)
        self.pool = FramePool(self.memory, spec.geometry.block_bytes, frames, most)

    def take(self, count: int) -> list[FrameId]:
        missing = count - self.pool.free_count
        if missing > 0:
            self.pool.admit(self.pool.create(missing))
        taken = self.pool.allocate(count)
        assert taken is not None
        return taken

    def give(self, frames: Sequence[FrameId]) -> None:
        self.pool.free(frames)

    def kv(self, design: str, requests: int, background: Executor | None = None) -> KvMemory:
        """KV memory of a design ("virtual" or "paged") over these frames, as the worker makes it."""
        spec = self.spec
        if design == PAGED:
            most, longest = self.pool.most, spec.sequence_capacity
            window = FrameWindow(self.memory, self.pool.table, self.pool.frame_bytes, most)
            return PagedKv(window, spec.geometry, max_tokens=longest)
        manager = VirtualTensorManager(
            self.memory,
            self.pool.table,
            spec.geometry,
            requests=requests,
            max_tokens=spec.sequence_capacity,
            background=background,
        )
        return VirtualKv(manager)

    def close(self) -> None:
        """Give the memory back; everything on it has been closed."""
        self.pool.close()
        self.memory.close()


@dataclass(frozen=True, slots=True)
class Request:
    """What to generate.

    prompt: its tokens.  output_tokens: how many to generate.  cached: frames of the prompt's first blocks.
    all_frames: have memory for all tokens from the start on, not a block ahead.
    """

    prompt: Sequence[int]
    output_tokens: int
    cached: Sequence[FrameId] = ()
    all_frames: bool = False


@dataclass(slots=True)
class _Running:
    request: Request
    frames: list[FrameId]
    output: list[int] = field(default_factory=list)


class EngineRig:
    """Runs requests on an engine as the daemon's dispatcher does: a frame more when less than a block is left.

    Greedy, and no token ends a request before its length.

    concurrent: most requests at a time.  outputs: the tokens of requests that have ended, by their numbers.
    """

    def __init__(
        self,
        model: CausalModel,
        kv: KvMemory,
        frames: Frames,
        *,
        concurrent: int,
        max_step_tokens: int,
        graphs: PassGraphs | None = None,
        ahead: bool = False,
    ) -> None:
        self.kv = kv
        self.engine = Engine(model, kv, max_step_tokens, time.monotonic, graphs, ahead=ahead)
        self.outputs: dict[int, list[int]] = {}
        self._frames = frames
        self._concurrent = concurrent
        self._block_tokens = model.spec.geometry.block_tokens
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: dict[int, _Running] = {}
        self._numbers = itertools.count()

    @property
    def busy(self) -> bool:
        """Whether there is a request that has not ended."""
        return bool(self._waiting or self._running)

    @property
    def decoding(self) -> bool:
        """Whether all requests have their first token and none has ended."""
        return not self._waiting and all(running.output for running in self._running.values())

    def submit(self, requests: Sequence[Request]) -> list[int]:
        numbers = [next(self._numbers) for _ in requests]
        self._waiting.extend(zip(numbers, requests, strict=True))
        return numbers

    def step(self) -> None:
        """Start what may run, compute a pass, and give the frames that it made necessary.

        Raises BenchmarkError when a request cannot run.
        """
        while self._waiting and len(self._running) < self._concurrent:
            number, request = self._waiting.popleft()
            tokens = len(request.prompt) + (request.output_tokens if request.all_frames else 1)
            blocks = -(-tokens // self._block_tokens)
            own = self._frames.take(blocks - len(request.cached))
            self._start(number, _Running(request, [*request.cached, *own]), len(request.cached))
        self.take(self.engine.step())

    def run(self, requests: Sequence[Request], after_step: Callable[[], None] = lambda: None) -> list[list[int]]:
        """All requests to their ends; their outputs, in order."""
        numbers = self.submit(requests)
        while self.busy:
            self.step()
            after_step()
        return [self.outputs.pop(number) for number in numbers]

    def compute(self, tokens: Sequence[int], frames: Sequence[FrameId]) -> None:
        """Fill `frames`, which stay the caller's, with the KV of `tokens`: a prefix for `Request.cached`."""
        number = next(self._numbers)
        self._start(number, _Running(Request(tokens, 1, frames), list(frames)), cached_blocks=0)
        while self.busy:
            self.step()
        del self.outputs[number]

    def close(self) -> None:
        """Let go of the memory; `Frames.close` comes last."""
        self.engine.close()
        self.kv.end()

    def _start(self, number: int, running: _Running, cached_blocks: int) -> None:
        self._running[number] = running
        message = Start(
            id=number,
            tokens=np.array(running.request.prompt, dtype="<u4").tobytes(),
            generated=0,
            cached_blocks=cached_blocks,
            frames=[int(frame) for frame in running.frames],
            sampling=Sampling(max_tokens=running.request.output_tokens, ignore_eos=True),
        )
        self.take(self.engine.start(message))

    def take(self, messages: Sequence[Step | Done]) -> None:
        """Notes the engine's answers, and gives frames to the requests that need one."""
        for message in messages:
            if isinstance(message, Done):
                self._end(message)
                continue
            for update in message.updates:
                self._running[update.id].output += update.tokens
                self._extend(update.id)

    def _extend(self, number: int) -> None:
        running = self._running[number]
        left = running.request.output_tokens - len(running.output)
        tokens = len(running.request.prompt) + len(running.output)
        room = len(running.frames) * self._block_tokens - tokens
        if left > 0 and room < min(left, self._block_tokens):
            (frame,) = self._frames.take(1)
            running.frames.append(frame)
            self.take(self.engine.extend(Extend(number, [int(frame)])))

    def _end(self, done: Done) -> None:
        if done.reason not in ("length", "stop"):
            raise BenchmarkError(f"a request ended with {done.reason}: {done.detail}")
        running = self._running.pop(done.id)
        self._frames.give(running.frames[len(running.request.cached) :])
        self.outputs[done.id] = running.output
