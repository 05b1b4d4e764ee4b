"""The daemon's side of an engine, in this process, on a random model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal

import numpy as np
import torch

from benchmarks.gpu_parts.rig.device import Device
from benchmarks.gpu_parts.rig.model import random_model
from benchmarks.gpu_parts.rig.part import Unavailable
from prefixd.base.sampling import Sampling
from prefixd.worker.attention.choice.pass_plan import Plan
from prefixd.worker.attention.flash_attention import FlashAttention
from prefixd.worker.attention.kernels.flash_kernels import why_no_lse
from prefixd.worker.engine import Engine
from prefixd.worker.graphs.captured import Compute, GraphCapture, Replay
from prefixd.worker.graphs.decode_graphs import FEWEST_KEYS, DecodeGraphs
from prefixd.worker.graphs.pass_graphs import PassGraphs
from prefixd.worker.graphs.prompt_graphs import PromptGraphs
from prefixd.worker.memory.virtual_kv import VirtualKv
from prefixd.worker.model import CausalModel
from prefixd.worker_protocol.protocol import Done, Start, Step
from prefixd_swap.vmem import FrameId, FramePool, VirtualMemory
from prefixd_swap.vtensor import VirtualTensorManager

Graphs = Literal["none", "one length", "graphs"]
"""none: passes operator by operator. one length: graphs that look for as many keys as a row has. graphs: also by powers
of two of keys, as the worker has them."""


class EngineRig:
    """The daemon's side of an engine, in this process: frames of the GPU tier and requests on them."""

    def __init__(
        self,
        model: CausalModel,
        memory: VirtualMemory,
        frames: int,
        requests: int,
        step_tokens: int,
        graphs: Graphs = "none",
        *,
        ahead: bool = False,
    ) -> None:
        self.model = model
        self.geometry = model.spec.geometry
        self.pool = FramePool(memory, self.geometry.block_bytes, frames)
        self.kv = VirtualKv(
            VirtualTensorManager(
                memory,
                self.pool.table,
                self.geometry,
                requests=requests,
                max_tokens=model.spec.sequence_capacity,
            )
        )
        self._graphs = None if graphs == "none" else self._pass_graphs(requests, by_length=graphs == "graphs")
        self._ahead = ahead
        self.engine = self._engine(step_tokens)
        self._next = 0

    def _engine(self, step_tokens: int) -> Engine:
        return Engine(self.model, self.kv, step_tokens, time.monotonic, self._graphs, ahead=self._ahead)

    def _pass_graphs(self, requests: int, *, by_length: bool) -> PassGraphs:
        kv, capture = self.kv.manager.kv, GraphCapture() if self.model.asynchronous else _again
        fewest = FEWEST_KEYS if by_length else kv.shape[1]
        decode = DecodeGraphs(kv, self.model.captured, requests, _no_graphs, capture, fewest)
        return PassGraphs(decode, PromptGraphs(kv, self.model.captured, _no_graphs, capture))

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Has passes computed operator by operator."""
        self.engine._graphs = None
        try:
            yield
        finally:
            self.engine._graphs = self._graphs

    def why_no_plan(self) -> str | None:
        """Why passes cannot be computed in other calls than the worker chooses; None if they can."""
        attention, geometry = self.model.attention, self.geometry
        if not isinstance(attention, FlashAttention):
            return f"attention is {type(attention).__name__}"
        if self.model.spec.device.type != "cuda":
            return None
        return why_no_lse(attention.kernel, geometry.head_dim, getattr(torch, geometry.dtype), self.model.spec.device)

    @contextmanager
    def planned(self, plan: Plan) -> Iterator[None]:
        """Has passes computed in the calls of a plan. Only where `why_no_plan` is None."""
        attention = self.model.attention
        assert isinstance(attention, FlashAttention)
        before, attention.plan = attention.plan, plan
        try:
            yield
        finally:
            attention.plan = before

    @contextmanager
    def step_tokens(self, count: int) -> Iterator[None]:
        """Has so many tokens computed in a step. No request may run at its begin and its end."""
        engine, self.engine = self.engine, self._engine(count)
        try:
            yield
        finally:
            self.engine = engine

    def frames(self, count: int) -> list[FrameId]:
        """Frames that are free. Raises Unavailable when there are too few."""
        taken = self.pool.allocate(count)
        if taken is None:
            raise Unavailable(f"{count} more frames do not fit in {self.pool.capacity}")
        return taken

    def zero(self, frames: Sequence[FrameId]) -> None:
        """Zero what is in frames, a row's worth at a time."""
        manager = self.kv.manager
        for first in range(0, len(frames), manager.virtual.blocks):
            part = frames[first : first + manager.virtual.blocks]
            sequence = self.kv.open(part)
            sequence.kv[: len(part) * self.geometry.block_tokens].zero_()
            self.kv.close(sequence, lambda: None)
            self.kv.poll(wait=True)

    def map_everywhere(self, frames: Sequence[FrameId]) -> None:
        """Leave frames mapped on every row, as other requests do that have ended."""
        sequences = [self.kv.open(frames) for _ in self.kv.manager.virtual.rows]
        for sequence in sequences:
            self.kv.close(sequence, lambda: None)
        self.kv.poll(wait=True)

    def start(
        self,
        tokens: Sequence[int],
        frames: Sequence[int],
        cached_blocks: int,
        max_tokens: int,
        *,
        loading: bool = False,
    ) -> int:
        """Begin a greedy request; returns its number. `loading`: as in `Start`, the engine listens for its layers."""
        request, self._next = self._next, self._next + 1
        refused = self.engine.start(
            Start(
                id=request,
                tokens=np.array(tokens, dtype="<u4").tobytes(),
                generated=0,
                cached_blocks=cached_blocks,
                loading=loading,
                frames=list(frames),
                sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
            )
        )
        self._check(refused)
        if loading and self.engine.listen is not None and (come := self.engine.listen(request)) is not None:
            self._check(self.engine.layers(come))
        return request

    def step(self) -> list[int]:
        messages = self.engine.step()
        self._check(messages)
        return [
            token
            for message in messages
            if isinstance(message, Step)
            for update in message.updates
            for token in update.tokens
        ]

    def first_token(
        self, tokens: Sequence[int], frames: Sequence[int], cached_blocks: int, *, loading: bool = False
    ) -> int:
        """Run a request for one token, and to its end."""
        self.start(tokens, frames, cached_blocks, 1, loading=loading)
        sampled: list[int] = []
        while not sampled:
            sampled = self.step()
        return sampled[0]

    def settle(self) -> None:
        """Wait until nothing of the requests that have ended is left."""
        self._check(self.engine.flush())

    def close(self) -> None:
        self.engine.close()
        self.model.synchronize()
        self.kv.end()
        self.pool.close()

    @staticmethod
    def _check(messages: Sequence[Step | Done]) -> None:
        for message in messages:
            if isinstance(message, Done) and message.reason in ("error", "no_memory"):
                raise RuntimeError(f"a request failed: {message.detail}")


@contextmanager
def engine_rig(
    device: Device, frames: int, requests: int, step_tokens: int, graphs: Graphs = "none", *, ahead: bool = False
) -> Iterator[EngineRig]:
    """An engine on the random model with a GPU tier of its own; `ahead` as in `Engine`."""
    model = random_model(device)
    with ExitStack() as stack:
        memory = stack.enter_context(device.memory())
        rig = EngineRig(model, memory, frames, requests, step_tokens, graphs, ahead=ahead)
        stack.callback(rig.close)
        yield rig


def _again(compute: Compute) -> Replay:
    """In place of a capture where there is no GPU."""
    return compute


def _no_graphs(reason: str) -> None:
    raise RuntimeError(reason)
