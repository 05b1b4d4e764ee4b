"""Models by name: bytes of their keys and values, and operations of computing a token."""

from __future__ import annotations

import difflib
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from prefixd.base.errors import ConfigError
from prefixd.base.rules.rules import ChunkedWindow, SlidingWindow, Window
from prefixd.serving.kv_shape import KvShape
from prefixd.settings.inference import WorkerSettings
from prefixd.worker_protocol.protocol import GroupShape
from prefixd_swap.block_size import Padding, choose_blocks
from prefixd_swap.group_shape import ELEMENT_BYTES, KvGeometry

_DESCRIBE_S = 120.0


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with attention of one shape.

    Attributes:
        layers: how many.
        kv_heads: heads of keys, and of values.
        head_dim: numbers of a head.
        window: tokens that a layer sees; None for all.
        chunk: tokens of the chunks that it sees its own one of; None for all.
        readers: further layers, which read the keys and values of these and keep none.
    """

    layers: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    chunk: int | None = None
    readers: int = 0

    @property
    def rule(self) -> Window | None:
        """What the layers need; None for all tokens."""
        if self.chunk is not None:
            return ChunkedWindow(self.chunk)
        return None if self.window is None else SlidingWindow(self.window)


@dataclass(frozen=True)
class PlannedModel:
    """A model's sizes, from which a plan computes memory and time.

    Attributes:
        name: by which a user chooses it.
        groups: its layers with attention.
        parameters: number of all weights.
        active_parameters: number of the weights that one token passes; smaller in a mixture of experts.
        query_heads: of each layer, with `head_dim` numbers each as the keys have.
        context_tokens: the longest sequence that it supports.
        source: where these figures are published.
        element_bytes: of a weight, and of a number of a key.
    """

    name: str
    groups: tuple[LayerGroup, ...]
    parameters: float
    active_parameters: float
    query_heads: int
    context_tokens: int
    source: str
    element_bytes: int = 2

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return sum(self._group_bytes(group) for group in self.groups)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.parameters * self.element_bytes

    @cached_property
    def attention(self) -> tuple[tuple[int | None, float, float], ...]:
        """For each group its window, and the operations and read bytes for each token that a token attends to.

        Chunks count as windows: a token of them sees half as much on average, so a plan is on the safe side.
        """
        return tuple(
            (
                group.window or group.chunk,
                4.0 * (group.layers + group.readers) * self.query_heads * group.head_dim,
                float(self._group_bytes(group)) * (1 + group.readers / group.layers),
            )
            for group in self.groups
        )

    def strides(self, chunk_bytes: int, padding: Padding = "auto") -> tuple[int, ...]:
        """Bytes of memory that a token takes in each group, in a worker's blocks on chunks of `chunk_bytes`.

        They are those of a worker by its default of `worker.block_tokens`: a plan's blocks may be longer, for speed.
        """
        dtype = {nbytes: name for name, nbytes in ELEMENT_BYTES.items()}[self.element_bytes]
        tokens = WorkerSettings.model_fields["block_tokens"].default
        asked = [KvGeometry(each.layers, each.kv_heads, each.head_dim, dtype, tokens) for each in self.groups]
        return tuple(each.stride for each in choose_blocks(asked, chunk_bytes, padding))

    def kv(self, block_tokens: int, step_tokens: int, strides: Sequence[int] = ()) -> tuple[KvShape, int]:
        """The model's blocks in frames, and the bytes of a frame: the largest size that divides all groups' blocks.

        strides: bytes of memory of a token in each group, if tokens are padded.
        """
        sizes = [self._group_bytes(group) for group in self.groups]
        strides = strides or sizes
        frame_bytes = math.gcd(*(block_tokens * stride for stride in strides))
        shapes = tuple(
            GroupShape(
                "full" if group.rule is None else f"{'chunks' if group.chunk else 'window'}-{group.rule.tokens}",
                group.rule,
                group.layers,
                block_tokens * stride // frame_bytes,
                *((nbytes, stride) if stride > nbytes else (0, 0)),
            )
            for group, nbytes, stride in zip(self.groups, sizes, strides, strict=True)
        )
        return KvShape(shapes, block_tokens, step_tokens=step_tokens), frame_bytes

    def _group_bytes(self, group: LayerGroup) -> int:
        return group.layers * 2 * group.kv_heads * group.head_dim * self.element_bytes


def _alike(
    name: str, layers: int, kv_heads: int, head_dim: int, parameters: float, query_heads: int, context: int, source: str
) -> PlannedModel:
    group = LayerGroup(layers, kv_heads, head_dim)
    return PlannedModel(name, (group,), parameters, parameters, query_heads, context, source)


_HUB = "huggingface.co/{}/blob/main/config.json"
MODELS = {
    model.name: model
    for model in (
        _alike("llama-3-8b", 32, 8, 128, 8.03e9, 32, 8192, _HUB.format("meta-llama/Meta-Llama-3-8B")),
        _alike("llama-3.1-8b", 32, 8, 128, 8.03e9, 32, 131072, _HUB.format("meta-llama/Llama-3.1-8B")),
        _alike("llama-3-70b", 80, 8, 128, 70.6e9, 64, 8192, _HUB.format("meta-llama/Meta-Llama-3-70B")),
        _alike("llama-3.1-70b", 80, 8, 128, 70.6e9, 64, 131072, _HUB.format("meta-llama/Llama-3.1-70B")),
        _alike("llama-3.2-1b", 16, 8, 64, 1.24e9, 32, 131072, _HUB.format("meta-llama/Llama-3.2-1B")),
        _alike("qwen2.5-0.5b", 24, 2, 64, 4.94e8, 14, 32768, _HUB.format("Qwen/Qwen2.5-0.5B")),
        _alike("qwen2.5-7b", 28, 4, 128, 7.62e9, 28, 131072, _HUB.format("Qwen/Qwen2.5-7B")),
        _alike("qwen2.5-32b", 64, 8, 128, 32.5e9, 40, 131072, _HUB.format("Qwen/Qwen2.5-32B")),
        _alike("qwen3-8b", 36, 8, 128, 8.19e9, 32, 40960, _HUB.format("Qwen/Qwen3-8B")),
        PlannedModel(
            "mistral-7b",
            (LayerGroup(32, 8, 128, 4096),),
            7.24e9,
            7.24e9,
            32,
            32768,
            _HUB.format("mistralai/Mistral-7B-v0.1"),
        ),
        PlannedModel(
            "mixtral-8x7b",
            (LayerGroup(32, 8, 128),),
            46.7e9,
            12.9e9,
            32,
            32768,
            _HUB.format("mistralai/Mixtral-8x7B-v0.1"),
        ),
        PlannedModel(
            "gemma-2-9b",
            (LayerGroup(21, 8, 256), LayerGroup(21, 8, 256, 4096)),
            9.24e9,
            9.24e9,
            16,
            8192,
            _HUB.format("google/gemma-2-9b"),
        ),
        PlannedModel(
            "gemma-3-27b",
            (LayerGroup(10, 16, 128), LayerGroup(52, 16, 128, 1024)),
            27.4e9,
            27.4e9,
            32,
            131072,
            _HUB.format("google/gemma-3-27b-pt"),
        ),
        PlannedModel(
            "embedded",
            (LayerGroup(8, 4, 64),),
            2.37e7,
            2.37e7,
            8,
            8192,
            "prefixd.serving.models.embedded_model",
            element_bytes=4,
        ),
    )
}


def find_model(name: str) -> PlannedModel:
    """A model by its name here, or by a directory with a Hugging Face config.json.

    Raises:
        ConfigError: there is no such model, or its configuration cannot be planned with.
    """
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    path = Path(name).expanduser()
    if path.is_dir():
        return _described(path)
    near = difflib.get_close_matches(name.lower(), MODELS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"there is no model {name!r}; {hint}known are {', '.join(MODELS)}, or name a directory with a Hugging Face "
        "config.json"
    )


def _described(path: Path) -> PlannedModel:
    """Reads the directory as the worker does, in a process of its own, which imports torch."""
    command = [sys.executable, "-m", "prefixd.planner.describe_model", str(path.resolve())]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_DESCRIBE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"reading the model {str(path)!r} took over {_DESCRIBE_S:g} s; is its disk well?") from error
    if told.returncode:
        lines = told.stderr.strip().splitlines() or ["no reason given"]
        raise ConfigError(f"the model {str(path)!r} cannot be planned with: {lines[-1]}")
    fields = json.loads(told.stdout)
    return PlannedModel(**{**fields, "groups": tuple(LayerGroup(**group) for group in fields["groups"])})
