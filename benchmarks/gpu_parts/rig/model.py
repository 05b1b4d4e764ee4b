"""A random model of the size of an 8B one, made on the device, and an engine on it."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.engines.varlen_reference import varlen_reference
from benchmarks.gpu_parts.rig.device import CHUNK_BYTES, Device
from benchmarks.gpu_parts.rig.part import Unavailable
from prefixd.base.sampling import Sampling
from prefixd.worker.attention.attention import ATTENTION_NAME, register_attention
from prefixd.worker.attention.flash_attention import FlashAttention
from prefixd.worker.engine import Engine
from prefixd.worker.graphs.captured import Compute, GraphCapture, Replay
from prefixd.worker.graphs.decode_graphs import FEWEST_KEYS, DecodeGraphs
from prefixd.worker.graphs.pass_graphs import PassGraphs
from prefixd.worker.graphs.prompt_graphs import PromptGraphs
from prefixd.worker.memory.virtual_kv import VirtualKv
from prefixd.worker.model import CausalModel
from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker_protocol.protocol import Done, Start, Step
from prefixd.worker_protocol.worker_settings import WorkerSettings
from prefixd_swap.group_shape import Layout
from prefixd_swap.vmem import FrameId, FramePool, VirtualMemory
from prefixd_swap.vtensor import VirtualTensorManager

LONGEST_TOKENS = 33 << 10
_SPARE_BYTES = 6 << 30  # for activations and the logits
_VOCAB = 128256
_LAYERS = 32


@functools.lru_cache(maxsize=1)
def random_model(device: Device, layout: Layout = "token") -> CausalModel:
    """A Llama of the shape of an 8B one with as many layers as memory allows; its weights are on no disk.

    Raises Unavailable when not even four layers fit. `random_model.cache_clear()` lets go of it.
    """
    layers = _layers(device)
    config = _config(device, layers)
    with tempfile.TemporaryDirectory(prefix="prefixd-model-") as folder:
        config.save_pretrained(folder)
        spec = read_model_spec(
            WorkerSettings(
                model=folder,
                device=str(device.torch_device),
                dtype="bfloat16" if device.measures else "float32",
                layout=layout,
                chunk_bytes=CHUNK_BYTES,
                max_model_tokens=min(LONGEST_TOKENS, config.max_position_embeddings),
            )
        )
    register_attention()
    torch.manual_seed(0)
    with torch.device(device.torch_device):
        model: Any = AutoModelForCausalLM.from_config(
            spec.config, dtype=getattr(torch, spec.geometry.dtype), attn_implementation=ATTENTION_NAME
        )
    # Without a GPU, what stands in for its kernel, so that passes have the same shapes.
    attention = None if device.measures else FlashAttention(varlen_reference)
    made = CausalModel(spec, model.eval().requires_grad_(False), attention)
    made.check()
    return made


def write(model: CausalModel, folder: Path) -> None:
    """Write a model as one that `worker.model` names, without a tokenizer."""
    model._model.save_pretrained(folder)


def shape(model: CausalModel) -> dict[str, Any]:
    """The model in a result."""
    geometry = model.spec.geometry
    return {
        "parameters": model.spec.parameters,
        "layers": geometry.layers,
        "dtype": geometry.dtype,
        "layout": geometry.layout,
        "block_tokens": geometry.block_tokens,
        "token_bytes": geometry.token_bytes,
        "attention": type(model.attention).__name__,
    }


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
        self.engine = Engine(model, self.kv, step_tokens, time.monotonic, self._graphs, ahead=ahead)
        self._next = 0

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

    def start(self, tokens: Sequence[int], frames: Sequence[int], cached_blocks: int, max_tokens: int) -> int:
        """Begin a greedy request; returns its number."""
        request, self._next = self._next, self._next + 1
        refused = self.engine.start(
            Start(
                id=request,
                tokens=np.array(tokens, dtype="<u4").tobytes(),
                generated=0,
                cached_blocks=cached_blocks,
                frames=list(frames),
                sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
            )
        )
        self._check(refused)
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

    def first_token(self, tokens: Sequence[int], frames: Sequence[int], cached_blocks: int) -> int:
        """Run a request for one token, and to its end."""
        self.start(tokens, frames, cached_blocks, 1)
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


def random_tokens(seed: int, count: int) -> list[int]:
    """Token ids of the model's vocabulary."""
    drawn: list[int] = np.random.default_rng(seed).integers(0, 256, count).tolist()
    return drawn


def _layers(device: Device) -> int:
    if not device.measures:
        return 2
    free = device.free_bytes()
    for layers in (_LAYERS, 16, 8, 4):
        kv = 3 * LONGEST_TOKENS * layers * 4096
        parameters = layers * 218_000_000 + 2 * _VOCAB * 4096
        if 2 * parameters + kv + _SPARE_BYTES <= free:
            return layers
    raise Unavailable(f"{free} bytes are free on the device, too few for four layers of an 8B model")


def _config(device: Device, layers: int) -> Any:
    common: dict[str, Any] = {
        "num_hidden_layers": layers,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    if device.measures:
        return LlamaConfig(
            vocab_size=_VOCAB,
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=64 << 10,
            **common,
        )
    return LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=1024,
        initializer_range=0.2,
        **common,
    )
