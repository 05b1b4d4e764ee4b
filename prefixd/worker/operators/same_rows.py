"""Whether a function computes what a module of a model does: compared on random rows, small and large ones.

The logits of a whole model say too little: in 16 bits they may differ by some hundredths for other reasons, and a few
tokens reach neither the place where a model clamps an activation nor rows so small that a norm's epsilon counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn

_SCALES = 2.0 ** torch.arange(-8, 6)


def same_rows(
    module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor, tolerance: float = 0.0
) -> bool:
    """Whether `function` computes what the module's forward does, of its one argument.

    weight: of the module; its last dimension is the width of a row.
    tolerance: the largest relative norm of a row's difference.
    """
    if len(inspect.signature(module.forward).parameters) != 1:
        return False
    generator = torch.Generator(weight.device).manual_seed(0)
    shape = 1, len(_SCALES), weight.shape[-1]
    rows = torch.randn(shape, dtype=weight.dtype, device=weight.device, generator=generator)
    rows *= _SCALES.to(weight)[:, None]
    with torch.inference_mode():
        theirs, ours = module(rows), function(rows)
        if theirs.dtype != ours.dtype:
            return False
        difference = (ours.float() - theirs.float()).norm(dim=-1)
        return torch.equal(ours, theirs) or bool((difference <= tolerance * theirs.float().norm(dim=-1)).all())
