"""Attention on a GPU: one variable-length flash attention kernel a layer, whatever is in the batch.

All sequences lie in one tensor: virtual tensors at a fixed stride (vAttention, section 5.2.3), blocks through a block
table (PagedAttention). `seqused_k` has the length of each sequence, so one call computes prompts and decoding requests,
and nothing behind the last token is read.

The kernel computes windows itself. It reads keys in blocks that begin at multiples of at most `READ_BLOCK` tokens, and
none before the block of the first key that the segment's first query sees: memory before that may be unmapped.

`make gpu-check` runs it on a GPU; without block tables so far, which torch has from 2.12 on. Elsewhere the tests
run it with a stand-in for the kernel.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch

from prefixd.worker.attention.attention import FULL_ATTENTION, AttentionKind
from prefixd.worker.attention.captured import CapturedStep
from prefixd.worker.memory.kv_memory import StepKv
from prefixd.worker.spec.kv_groups import READ_BLOCK as READ_BLOCK
from prefixd.worker.to_device import to_device
from prefixd.worker_protocol.errors import ModelError

VarlenKernel = Callable[..., torch.Tensor]
"""`torch.nn.attention.varlen.varlen_attn`, or a function with the same arguments."""


def find_kernel(
    head_dim: int, dtype: torch.dtype, device: torch.device, *, block_table: bool = False
) -> VarlenKernel | None:
    """The kernel for this shape on this device, with `block_table` one that takes block tables; None without one.

    Flash attention takes 16-bit types and heads of up to 256 in eights, on GPUs from Ampere on. `varlen_attn` knows
    `seqused_k` from torch 2.12 on; the operator below it has known it since 2.5.
    """
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or head_dim % 8 or head_dim > 256:
        return None
    if torch.cuda.get_device_capability(device) < (8, 0):
        return None
    return _public_kernel() or (None if block_table else _operator_kernel())


@functools.cache
def _public_kernel() -> VarlenKernel | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    wanted = {"scale", "window_size", "enable_gqa", "seqused_k", "block_table"}
    kernel: VarlenKernel = varlen_attn  # type: ignore[assignment]
    return kernel if wanted <= set(inspect.signature(varlen_attn).parameters) else None


@functools.cache
def _operator_kernel() -> VarlenKernel | None:
    operator = torch.ops.aten._flash_attention_forward.default
    if "seqused_k" not in {argument.name for argument in operator._schema.arguments}:
        return None

    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: torch.Tensor,
    ) -> torch.Tensor:
        assert window_size[1] == 0 and enable_gqa
        return operator(  # type: ignore[no-any-return]
            query,
            key,
            value,
            cu_seq_q,
            cu_seq_k,
            max_q,
            max_k,
            0.0,
            True,
            False,
            scale=scale,
            window_size_left=window_size[0] if window_size[0] >= 0 else None,
            seqused_k=seqused_k,
        )[0]

    return kernel


class FlashAttention:
    """The backend; `calls` counts kernels, one a layer and pass."""

    def __init__(self, kernel: VarlenKernel) -> None:
        self.calls = 0
        self._kernel = kernel
        # Keys split among thread blocks are read in larger blocks; FlashAttention 2 splits them in decode passes.
        knows_splits = "num_splits" in inspect.signature(kernel).parameters
        self.window_arguments: dict[str, object] = {"num_splits": 1} if knows_splits else {}

    def begin(self, step: StepKv) -> FlashStep:
        """Put the lengths of the pass's segments onto the device."""
        return FlashStep(self, step)

    def refuses(self, kind: AttentionKind) -> str | None:
        """Refuses every kind but windows."""
        if kind.expanded:
            return "it reads keys and values from memory alone; set worker.device to cpu"
        if kind.both_ways:
            return "torch's flash attention is causal within an image, too"
        # Sinks could be computed from the kernel's log-sum-exp, but torch documents different shapes of it.
        if kind.softcap is not None or kind.sinks is not None:
            return "torch's flash attention has neither softcap nor sinks"
        return None

    def compute(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """Call the kernel."""
        self.calls += 1
        return self._kernel(*arguments, **keywords)


class FlashStep:
    """One pass; see `StepAttention`."""

    def __init__(self, backend: FlashAttention, step: StepKv) -> None:
        self._backend = backend
        self._tokens = sum(len(segment) for segment in step.segments)
        self._longest = max(len(segment) for segment in step.segments)
        self._layer, self._arguments = step.varlen_arguments()
        if isinstance(step, CapturedStep):
            self._starts = step.query_starts
        else:
            starts = [0, *itertools.accumulate(len(segment) for segment in step.segments)]
            self._starts = to_device(starts, torch.int32, self._layer(0)[0].device)

    def attend(
        self, query: torch.Tensor, layer: int, scaling: float, kind: AttentionKind = FULL_ATTENTION
    ) -> torch.Tensor:
        """[1, heads, rows, head_dim] to [1, rows, heads, head_dim], by the keys and values in the pass's memory. Causal
        from each sequence's end, so its last query looks at all of it."""
        keys, values = self._layer(layer)
        keywords = dict(self._arguments)
        if kind.window is not None:
            keywords |= self._backend.window_arguments
        result = self._backend.compute(
            query[0, :, : self._tokens].transpose(0, 1).contiguous(),
            keys,
            values,
            self._starts,
            keywords.pop("cu_seq_k"),
            self._longest,
            keywords.pop("max_k"),
            scale=scaling,
            window_size=(-1 if kind.window is None else kind.window - 1, 0),  # the kernel does not count the query
            enable_gqa=True,
            **keywords,
        )
        output = query.new_zeros((query.shape[2], query.shape[1], query.shape[3]))
        output[: self._tokens] = result
        return output.unsqueeze(0)

    def expands(self, layer: int) -> bool:
        """Never."""
        del layer
        return False

    def attend_given(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, kind: AttentionKind
    ) -> torch.Tensor:
        """Refused when the model is loaded."""
        raise ModelError("FlashAttention reads keys and values from memory alone")
