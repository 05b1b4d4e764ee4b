"""Mixtures of experts whose results do not depend on the batch, to the last bit, on a CPU.

A router sends each token to a few experts, so how many rows an expert's matrix product has depends on everything
else in the batch. On a CPU a row's bits depend on the number of rows while they are few, and stop doing so at
`MIN_EXPERT_ROWS` (measured: 8 are not always enough). So every expert that has work gets rows of zeros up to that
number. In a layer of Qwen3-30B-A3B's size this takes 1.2 times as long for 256 tokens, and 3 times for 16 that wake
80 of the 128 experts. transformers' own way to equal bits, "batched_mm", copies an expert's weights for each token
that it gets: 13 times as long for those 16 tokens, and tens of GiB for a prompt of 512.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    from transformers.integrations import moe
except ImportError:  # transformers 4: experts compute in a loop of their own, and bits may differ
    moe = None  # type: ignore[assignment]

STEADY_EXPERTS = "prefixd"
PROBE_EXPERTS = "prefixd-probe"
MIN_EXPERT_ROWS = 16


def steady_experts(
    experts: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' grouped experts with at least `MIN_EXPERT_ROWS` rows for each that has any.

    hidden_states: [tokens, hidden]; top_k_index and top_k_weights: [tokens, k]. Returns [tokens, hidden].
    """
    tokens, k = top_k_index.shape
    counts = torch.bincount(top_k_index.flatten())
    lacking = (MIN_EXPERT_ROWS - counts).clamp_(min=0) * (counts > 0)
    lacking[top_k_index[0, 0]] += -int(lacking.sum()) % k  # whole rows of k
    fill = torch.arange(len(counts), device=counts.device).repeat_interleave(lacking).reshape(-1, k)
    result: torch.Tensor = moe.grouped_mm_experts_forward(
        experts,
        torch.cat((hidden_states, hidden_states.new_zeros(len(fill), hidden_states.shape[1]))),
        torch.cat((top_k_index, fill)),
        torch.cat((top_k_weights, top_k_weights.new_zeros(fill.shape))),
    )
    return result[:tokens]


def _no_experts(experts: torch.nn.Module, hidden_states: torch.Tensor, *args: Any) -> torch.Tensor:
    """For the meta device, where nothing can be routed."""
    return torch.empty_like(hidden_states)


def register_experts() -> None:
    """Make `STEADY_EXPERTS` and `PROBE_EXPERTS` known to transformers; may be called again."""
    if moe is not None:
        moe.ExpertsInterface.register(STEADY_EXPERTS, steady_experts)
        moe.ExpertsInterface.register(PROBE_EXPERTS, _no_experts)


def set_experts(model: Any, name: str) -> None:
    """Choose how the experts of `model` are computed, if it has any and lets it be chosen."""
    if moe is not None:
        model.set_experts_implementation(name)
