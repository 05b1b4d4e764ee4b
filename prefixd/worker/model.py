"""A causal language model on KV memory that is mapped in, and its forward pass over a flattened batch."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError

from prefixd.worker.attention.attention import (
    ATTENTION_NAME,
    AttentionBackend,
    register_attention,
)
from prefixd.worker.attention.choice.backend_choice import choose_attention
from prefixd.worker.attention.cross_attention import CrossStep
from prefixd.worker.graphs.captured import CapturedStep
from prefixd.worker.images import ImageEncoder, attention_names, image_kind, read_processor
from prefixd.worker.memory.grouped_kv import GroupedStep, places
from prefixd.worker.memory.kv_cache import StepCache
from prefixd.worker.memory.kv_memory import Segment, StepKv
from prefixd.worker.memory.virtual_kv import VirtualStep
from prefixd.worker.operators import Operators, Rewritten, rewrite
from prefixd.worker.recurrent import RecurrentLayers, StateSegment, check_resume
from prefixd.worker.recurrent.experts import STEADY_EXPERTS, register_experts, set_experts
from prefixd.worker.spec.model_spec import ModelSpec, auto_class
from prefixd.worker.to_device import UnreadTokens, to_device
from prefixd.worker_protocol.errors import ModelError

# On a CPU a row of a linear layer has the same bits in every batch of at least eight rows; sixteen fills
# the vectors.
ROW_MULTIPLE = 16
_MOST_CELL_TOKENS = 64  # of a cell, which divides the block, at whose end a state may be kept
_SELF_CHECK_TOKENS = 24
_CHECKED_WINDOW = 512  # tokens: the self check reaches beyond windows and chunks of up to this many
_SELF_CHECK_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}


class CausalModel:
    """A loaded model. Single-threaded; every call runs in inference mode.

    cell_tokens: a pass ends a prompt's part at a multiple of this many tokens, or at its end. Recurrent layers compute
        as many tokens at a time, and their bits depend on it. 1 without such layers.
    attention: the backend; by default the one that suits the device, for KV in virtual tensors.
    images: embeds images; None for a model of text alone.

    Attributes:
        operators: how far the layers were rewritten.
    """

    def __init__(
        self,
        spec: ModelSpec,
        model: Any,
        attention: AttentionBackend | None = None,
        images: ImageEncoder | None = None,
    ) -> None:
        self.spec = spec
        self.images = images
        self.attention = attention or choose_attention(spec)
        self.operators = Rewritten("model", "")
        self._model = model
        self._layers = {layer.layer: layer for layer in spec.attention}
        self._chunks = {layer.layer: layer.chunk for layer in spec.attention if layer.chunk is not None}
        self.cell_tokens = math.gcd(spec.block_tokens, _MOST_CELL_TOKENS) if spec.groups.state else 1
        self._recurrent = RecurrentLayers(model, self.cell_tokens) if spec.groups.state else None
        arguments = inspect.signature(model.base_model.forward).parameters
        self._cache_argument = "past_key_values" if "past_key_values" in arguments else "cache_params"
        self._positions = "position_ids" in arguments

    @torch.inference_mode()
    def forward(
        self,
        tokens: Sequence[int],
        step: StepKv,
        wanted: Sequence[int],
        unread: UnreadTokens | None = None,
        before_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Compute a pass's tokens, writing their KV, and return the logits of some of them.

        tokens: the ids of all segments' tokens, one segment after the other.
        wanted: rows of that batch. Returns [len(wanted), vocab_size]; on CUDA the work may still be queued.
        unread: those of the tokens that the host has not read.
        before_layer: called with each attention layer's number before its cached keys and values are read. An error
            that it raises ends the pass.
        """
        rows = _padded(len(tokens))
        positions = [position for segment in step.segments for position in range(segment.start, segment.stop)]
        padding = [0] * (rows - len(tokens))
        ids = to_device([[*tokens, *padding], [*positions, *padding]], torch.int64, self.spec.device)
        if unread is not None:
            unread.put(ids[0])
        places = self._places(ids[1:2], step.segments)
        embeddings = self._embeddings(ids[0:1], step.segments)
        with self._recurring(step.segments):
            if not wanted:  # no need for the vocabulary's projection, which can be a tenth of the work
                self._model.base_model(**self._arguments(ids[0:1], places, step, embeddings, before_layer))
                return torch.empty(0, self.spec.vocab_size, device=self.spec.device)
            keep = to_device(
                [*wanted, *[wanted[0]] * (_padded(len(wanted)) - len(wanted))], torch.int64, self.spec.device
            )
            return self._logits(ids[0:1], places, step, keep, embeddings, before_layer)[: len(wanted)]

    @torch.inference_mode()
    def captured(self, step: CapturedStep) -> torch.Tensor:
        """Compute the tokens of a captured pass; the logits of its wanted rows, ``[wanted, vocab_size]``."""
        return self._logits(step.tokens, step.positions, step, step.wanted)

    def _logits(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepKv,
        keep: torch.Tensor,
        embeddings: torch.Tensor | None = None,
        before_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        arguments = self._arguments(ids, positions, step, embeddings, before_layer)
        logits: torch.Tensor = self._model(**arguments, logits_to_keep=keep).logits
        return logits[0]

    def _embeddings(self, ids: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor | None:
        """Embeddings of tokens and images, ``[1, rows, hidden]``; None if the pass has no rows of images."""
        found = []
        start = 0
        for segment in segments:
            if segment.images is not None:
                found += [(start + row, features) for row, features in segment.images.rows]
            start += len(segment)
        if not found or self.images is None:
            return None
        known = ids.clone()
        for row, features in found:  # a placeholder's id may have no embedding
            known[0, row : row + len(features)] = 0
        embeddings = self.images.rows_of(known)
        for row, features in found:
            embeddings[0, row : row + len(features)] = features
        return embeddings

    def _places(self, positions: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        """Rotary positions: ``[1, rows]``, or ``[3, 1, rows]`` if a segment's have three dimensions."""
        if all(segment.images is None or segment.images.positions is None for segment in segments):
            return positions
        places = positions.expand(3, 1, -1).clone()
        start = 0
        for segment in segments:
            if segment.images is not None and segment.images.positions is not None:
                places[:, 0, start : start + len(segment)] = segment.images.positions.to(places.device)
            start += len(segment)
        return places

    def _arguments(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepKv,
        embeddings: torch.Tensor | None,
        before_layer: Callable[[int], None] | None,
    ) -> dict[str, Any]:
        arguments = {
            **({"input_ids": ids} if embeddings is None else {"inputs_embeds": embeddings}),
            self._cache_argument: StepCache(step, positions, self._layers, before_layer),
            "use_cache": True,
        }
        if self._positions:
            arguments["position_ids"] = positions
        arguments |= self._cross(step.segments, ids.shape[1])
        if self._layers:
            arguments["prefixd_step"] = self.attention.begin(step)
        if self._chunks:
            arguments["prefixd_chunks"] = self._chunks
        return arguments

    def _cross(self, segments: Sequence[Segment], rows: int) -> dict[str, Any]:
        """Arguments for layers with cross-attention; none if no segment has images: the layers are skipped then."""
        parts = [(segment, None if segment.images is None else segment.images.cross) for segment in segments]
        if all(images is None for _, images in parts):
            return {}
        step = CrossStep(parts, rows)
        hidden = self.spec.config.get_text_config(decoder=True).hidden_size
        return {
            "prefixd_cross": step,
            # A dummy row, so that the layers run; keys and values of the images come from the step.
            "cross_attention_states": torch.zeros(
                (1, 1, hidden), dtype=getattr(torch, self.spec.dtype), device=self.spec.device
            ),
            "cross_attention_mask": step.mask.to(self.spec.device),
        }

    def _recurring(self, segments: Sequence[Segment]) -> AbstractContextManager[None]:
        """A context for a pass, in which recurrent layers know the states of its segments."""
        if self._recurrent is None:
            return nullcontext()
        return self._recurrent.running(
            [
                StateSegment(segment.start, segment.stop, cast(WithState, segment.sequence).state.own, segment.keep)
                for segment in segments
            ]
        )

    @property
    def asynchronous(self) -> bool:
        """Whether a pass may still be computed when `forward` has returned."""
        return self.spec.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until everything queued on the device is done; nothing to wait for on a CPU."""
        if self.spec.device.type == "cuda":
            torch.cuda.synchronize(self.spec.device)

    def free_bytes(self) -> int:
        """Bytes of the GPU's memory that nobody has; 0 on a CPU."""
        return torch.cuda.mem_get_info(self.spec.device)[0] if self.spec.device.type == "cuda" else 0

    @torch.inference_mode()
    def check(self) -> None:
        """Compare with transformers' own attention on a few tokens; this also warms up the kernels.

        It catches differences that the probe cannot see, such as biases that a model adds inside its own attention.
        Raises ModelError.
        """
        if self._recurrent is not None:
            try:
                check_resume(self._model, self._recurrent)
            except ModelError as refusal:
                raise ModelError(f"model {str(self.spec.path)!r} ({self.spec.architecture}) {refusal}") from refusal
        tokens, half = self._check_tokens()
        ours = self._check_logits().float()
        config = self.spec.config
        self._model.set_attn_implementation(attention_names(config, "eager"))
        try:
            reference = self._model(input_ids=torch.tensor([tokens], device=self.spec.device), use_cache=False)
        finally:
            self._model.set_attn_implementation(attention_names(config, ATTENTION_NAME))
        theirs = reference.logits[0, half:].float()
        error = float((ours - theirs).norm() / theirs.norm())
        if not error <= _SELF_CHECK_TOLERANCE[self.spec.dtype]:
            raise ModelError(
                f"architecture {self.spec.architecture} of {str(self.spec.path)!r} computes other logits on "
                f"prefixd's KV cache than by itself (relative error {error:.2g}); it cannot be run"
            )

    def rewrite(self, wanted: Operators) -> None:
        """Have passes compute with fewer operators, as far as the logits stay what they were."""
        for undo in reversed(self.operators.undo):
            undo()
        self.operators = rewrite(self._model, wanted, self._check_logits)

    @torch.inference_mode()
    def _check_logits(self) -> torch.Tensor:
        """Logits of the second half of a few tokens, computed on the first half's keys and values."""
        tokens, half = self._check_tokens()
        memory = _PlainMemory(self.spec, len(tokens))
        self.forward(tokens[:half], memory.step(0, half), [])
        return self.forward(tokens[half:], memory.step(half, len(tokens)), range(len(tokens) - half))

    def _check_tokens(self) -> tuple[list[int], int]:
        """Tokens for checks, and half of their number."""
        reaches = [layer.window or layer.chunk or 0 for layer in self.spec.attention]
        windows = [reach for reach in reaches if 0 < reach <= _CHECKED_WINDOW]
        count = min(_SELF_CHECK_TOKENS + max(windows, default=0), self.spec.max_model_tokens)
        return [(7 * index + 3) % self.spec.vocab_size for index in range(count)], count // 2


def load_model(
    spec: ModelSpec,
    *,
    paged: bool = False,
    operators: Operators = "model",
    note: Callable[[str], None] = lambda line: None,
) -> CausalModel:
    """Load the weights onto the device and check them; `paged` if its KV is in block tables. Raises ModelError.

    operators: how far the layers are rewritten, if that does not change the logits.
    note: gets lines for the log.
    """
    attention = choose_attention(spec, paged=paged, note=note)
    register_attention()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded: Any = auto_class(spec.config).from_pretrained(
                spec.path,
                config=spec.config,
                dtype=getattr(torch, spec.dtype),
                attn_implementation=attention_names(spec.config, ATTENTION_NAME),
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below: the error would name none of them
            )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        raise ModelError(
            f"weights of {str(spec.path)!r} cannot be loaded: {' '.join(str(error).split())[:300]}"
        ) from error
    model, loading = loaded
    mismatched = sorted(loading["mismatched_keys"])
    if mismatched:
        name, there, needed = mismatched[0]
        raise ModelError(
            f"weights of {str(spec.path)!r} do not fit config.json: {len(mismatched)} tensors have another shape, such "
            f"as {name!r} with {list(there)} where {spec.architecture} needs {list(needed)}; one of them is another "
            "model's"
        )
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ModelError(
            f"weights of {str(spec.path)!r} lack {len(missing)} tensors that {spec.architecture} needs, "
            f"such as {missing[0]!r}; the download is incomplete or config.json is another model's"
        )
    if spec.device.type == "cpu":  # a GPU's kernels promise no bits to be equal
        register_experts()
        set_experts(model, STEADY_EXPERTS)
    model = model.to(spec.device).eval().requires_grad_(False)
    kind = image_kind(spec.config)
    images = None
    if kind is not None:
        images = ImageEncoder(model, read_processor(spec.path), kind, spec.pixels_fd)
    result = CausalModel(spec, model, attention, images)
    result.check()
    result.rewrite(operators)
    return result


class WithState(Protocol):
    """A sequence of a model with recurrent layers."""

    @property
    def state(self) -> OwnState: ...


class OwnState(Protocol):
    """A sequence's state, with its buffer (`StateLayout`)."""

    @property
    def own(self) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class _Buffer:
    own: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A sequence of the self check."""

    blocks: int
    state: _Buffer


class _PlainMemory:
    """Memory of one sequence for the self check, in ordinary tensors."""

    def __init__(self, spec: ModelSpec, tokens: int) -> None:
        blocks = -(-tokens // spec.block_tokens)
        layout = spec.groups.state and spec.groups.state.layout
        state = torch.zeros(layout.nbytes if layout else 0, dtype=torch.uint8, device=spec.device)
        self._sequence = _Blocks(blocks, _Buffer(state))
        self._groups = spec.groups.own
        self._kv = [
            torch.zeros(
                (1, blocks * spec.block_tokens, shape.layers, 2, shape.kv_heads, shape.head_dim),
                dtype=getattr(torch, spec.dtype),
                device=spec.device,
            )
            for shape in (group.geometry for group in spec.groups.own.attention)
        ]

    def step(self, start: int, stop: int) -> StepKv:
        """A pass over tokens [start, stop)."""
        segments = [Segment(self._sequence, start, stop)]
        steps = [VirtualStep(kv, segments, [0]) for kv in self._kv]
        return steps[0] if self._groups.alone else GroupedStep(segments, steps, places(self._groups.attention))


def _padded(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
