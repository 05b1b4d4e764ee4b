"""A causal language model on KV memory that is mapped in, and its forward pass over a flattened batch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from prefixd.worker.attention import ATTENTION_NAME, AttentionBackend, register_attention
from prefixd.worker.decode_graphs import DecodeStep
from prefixd.worker.errors import ModelError
from prefixd.worker.experts import STEADY_EXPERTS, register_experts, set_experts
from prefixd.worker.flash_attention import FlashAttention, find_kernel
from prefixd.worker.flex_attention import FlexAttention
from prefixd.worker.kv_cache import StepCache
from prefixd.worker.kv_memory import Segment, StepKv
from prefixd.worker.model_spec import ModelSpec
from prefixd.worker.tile_attention import TileAttention
from prefixd.worker.to_device import to_device
from prefixd.worker.virtual_kv import VirtualStep

# On a CPU a row of a linear layer has the same bits in every batch of at least eight rows; sixteen fills
# the vectors.
ROW_MULTIPLE = 16
_SELF_CHECK_TOKENS = 24
_SELF_CHECK_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}


class CausalModel:
    """A loaded model. Single-threaded; every call runs in inference mode.

    attention: how attention is computed; by default what suits the device, for KV in virtual tensors.
    """

    def __init__(self, spec: ModelSpec, model: Any, attention: AttentionBackend | None = None) -> None:
        self.spec = spec
        self.attention = attention or choose_attention(spec)
        self._model = model

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], step: StepKv, wanted: Sequence[int]) -> torch.Tensor:
        """Compute a pass's tokens, writing their KV, and return the logits of some of them.

        tokens: the ids of all segments' tokens, one segment after the other.
        wanted: rows of that batch. Returns [len(wanted), vocab_size]; on CUDA the work may still be queued.
        """
        rows = _padded(len(tokens))
        positions = [position for segment in step.segments for position in range(segment.start, segment.stop)]
        padding = [0] * (rows - len(tokens))
        ids = to_device([[*tokens, *padding], [*positions, *padding]], torch.int64, self.spec.device)
        if not wanted:  # no need for the vocabulary's projection, which can be a tenth of the work
            self._model.base_model(**self._arguments(ids[0:1], ids[1:2], step))
            return torch.empty(0, self.spec.vocab_size, device=self.spec.device)
        keep = [*wanted, *[wanted[0]] * (_padded(len(wanted)) - len(wanted))]
        return self._logits(ids[0:1], ids[1:2], step, to_device(keep, torch.int64, self.spec.device))[: len(wanted)]

    @torch.inference_mode()
    def decode(self, step: DecodeStep) -> torch.Tensor:
        """Compute the tokens of a captured pass: the logits of all, ``[size, vocab_size]``; see `DecodeGraphs`."""
        return self._logits(step.tokens, step.positions, step, step.all_rows)

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor, step: StepKv, keep: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model(**self._arguments(ids, positions, step), logits_to_keep=keep).logits
        return logits[0]

    def _arguments(self, ids: torch.Tensor, positions: torch.Tensor, step: StepKv) -> dict[str, Any]:
        geometry = self.spec.geometry
        return {
            "input_ids": ids,
            "position_ids": positions,
            "past_key_values": StepCache(step, ids.shape[1], (geometry.kv_heads, geometry.head_dim)),
            "use_cache": True,
            "prefixd_step": self.attention.begin(step),
        }

    @property
    def asynchronous(self) -> bool:
        """Whether a pass may still be computed when `forward` has returned."""
        return self.spec.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until everything queued on the device is done; nothing to wait for on a CPU."""
        if self.spec.device.type == "cuda":
            torch.cuda.synchronize(self.spec.device)

    @torch.inference_mode()
    def check(self) -> None:
        """Compare with transformers' own attention on a few tokens; this also warms up the kernels.

        Catches what the probe cannot see, such as biases that a model adds inside its own attention. Raises
        ModelError.
        """
        geometry = self.spec.geometry
        count = min(_SELF_CHECK_TOKENS, self.spec.max_model_tokens)
        tokens = [(7 * index + 3) % self.spec.vocab_size for index in range(count)]
        capacity = -(-count // geometry.block_tokens) * geometry.block_tokens
        kv = torch.zeros(
            (1, capacity, geometry.layers, 2, geometry.kv_heads, geometry.head_dim),
            dtype=getattr(torch, geometry.dtype),
            device=self.spec.device,
        )
        half = count // 2
        whole = _Blocks(capacity // geometry.block_tokens)
        self.forward(tokens[:half], VirtualStep(kv, [Segment(whole, 0, half)], [0]), [])
        rest = VirtualStep(kv, [Segment(whole, half, count)], [0])
        ours = self.forward(tokens[half:], rest, range(count - half)).float()
        self._model.set_attn_implementation("eager")
        try:
            reference = self._model(input_ids=torch.tensor([tokens], device=self.spec.device), use_cache=False)
        finally:
            self._model.set_attn_implementation(ATTENTION_NAME)
        theirs = reference.logits[0, half:].float()
        error = float((ours - theirs).norm() / theirs.norm())
        if not error <= _SELF_CHECK_TOLERANCE[geometry.dtype]:
            raise ModelError(
                f"architecture {self.spec.architecture} of {str(self.spec.path)!r} computes other logits on "
                f"prefixd's KV cache than by itself (relative error {error:.2g}); it cannot be run"
            )


def load_model(spec: ModelSpec, *, paged: bool = False) -> CausalModel:
    """Load the weights onto the device and check them; `paged` if its KV is in block tables. Raises ModelError."""
    attention = choose_attention(spec, paged=paged)
    register_attention()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                spec.path,
                config=spec.config,
                dtype=getattr(torch, spec.geometry.dtype),
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below: the error would name none of them
            )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
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
    result = CausalModel(spec, model.to(spec.device).eval().requires_grad_(False), attention)
    result.check()
    return result


def choose_attention(spec: ModelSpec, *, paged: bool = False) -> AttentionBackend:
    """What computes attention on the model's device. Raises ModelError when nothing there does."""
    geometry = spec.geometry
    dtype = getattr(torch, geometry.dtype)
    if spec.device.type == "cpu":
        return TileAttention(geometry.block_tokens, spec.query_heads // geometry.kv_heads, dtype)
    kernel = find_kernel(geometry.head_dim, dtype, spec.device, block_table=paged)
    if kernel is None and paged:
        raise ModelError(
            f'worker.kv = "paged" needs a kernel that takes block tables: torch 2.12 or newer (this is '
            f"{torch.__version__}), 16-bit KV and a head size of up to 256 in eights (this is {geometry.dtype}, "
            f'{geometry.head_dim}); set worker.kv to "virtual"'
        )
    return FlashAttention(kernel) if kernel is not None else FlexAttention(geometry.block_tokens)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A sequence of the self check."""

    blocks: int


def _padded(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
