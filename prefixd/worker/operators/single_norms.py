"""RMSNorm as one operator, where a model's own code has seven.

Llama's code rounds the normed row to 16 bits and then multiplies by the weight; torch's operator rounds once. A norm
with another formula (Gemma multiplies by 1 + weight) is left as it is: each is compared on random rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import nn

from prefixd.worker.operators.same_rows import same_rows

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def single_norms(model: nn.Module) -> Iterator[nn.Module]:
    """Has the RMSNorm modules of a model compute with one operator, and yields each."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and "forward" not in vars(module):
            found = _as_one(module)
            if found is not None:
                module.forward = found
                yield module


def _as_one(module: nn.Module) -> functools.partial[torch.Tensor] | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    tolerance = _TOLERANCE.get(weight.dtype)
    single = functools.partial(_norm, weight, eps)
    return single if tolerance is not None and same_rows(module, single, weight, tolerance) else None


def _norm(weight: torch.Tensor, eps: float, hidden_states: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(hidden_states, weight.shape, weight, eps)
