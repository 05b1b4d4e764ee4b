"""Estimates a model's device memory besides the KV, from its configuration alone.

The daemon sizes the GPU tier (`gpu.bytes = "auto"`) before the weights are loaded, so that loading and creating the
tier go on side by side.

- **weights**: every parameter in the worker's type, and 5% for buffers and for the tensor that is being loaded.
- **working**: the tensors of one step. For each token of the step: the hidden states (residual, normed,
  queries, keys, values, output of attention: 8 widths) and the MLP's (gate, up, product: 3 widths, times the experts of
  a token). For each sequence: its logits in float32, sorted once for the filters (4 vocabularies). A margin of half,
  and on CUDA 1.5 GiB for what the driver, the libraries' work spaces, the allocator's rounding and CUDA graphs take.
"""

from __future__ import annotations

from typing import Any

_WEIGHTS_MARGIN = 1.05
_WORKING_MARGIN = 1.5
_HIDDEN_WIDTHS = 8
_MLP_WIDTHS = 3
_LOGITS = 4
_CUDA_BYTES = 3 << 29


def weights_bytes(parameters: int, element_bytes: int) -> int:
    """Bytes of the weights."""
    return int(parameters * element_bytes * _WEIGHTS_MARGIN)


def working_bytes(
    config: Any, hidden: int, element_bytes: int, step_tokens: int, sequences: int, *, on_cuda: bool
) -> int:
    """Bytes of one step's activations, and of the process's other device memory.

    Args:
        config: transformers' configuration of the model.
        hidden: width of the hidden states.
        element_bytes: of the activations' type.
        step_tokens: most tokens of a step.
        sequences: most sequences of a step.
        on_cuda: whether the model runs on a GPU.
    """
    widths = getattr(config, "intermediate_size", None) or 4 * hidden
    mlp = max(widths) if isinstance(widths, list | tuple) else int(widths)  # Gemma 3n has one for each layer
    mlp *= int(getattr(config, "num_experts_per_tok", None) or 1)
    per_token = (_HIDDEN_WIDTHS * hidden + _MLP_WIDTHS * mlp) * element_bytes
    per_sequence = _LOGITS * int(config.vocab_size) * 4
    return int((step_tokens * per_token + sequences * per_sequence) * _WORKING_MARGIN) + on_cuda * _CUDA_BYTES
