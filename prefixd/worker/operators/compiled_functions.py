"""Element-wise functions of a layer, each compiled to a kernel: rotary positions, and the gated activation.

`torch.compile` makes Triton kernels of them on a GPU. Not yet measured on one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

from prefixd.worker.operators.merged_projections import MergedProjections
from prefixd.worker.operators.same_rows import same_rows

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
_ROTARY = "apply_rotary_pos_emb"
_compiled: set[ModuleType] = set()
"""Modules of models' code whose function for rotary positions is a compiled one."""


def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """One kernel for all sizes."""
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled


def compile_rotary(model: nn.Module, compiled: Compile) -> Iterator[Callable[[], None]]:
    """Compiles the function that turns queries and keys by their positions; yields what undoes it.

    It belongs to the module of the model's code, so all models of this architecture in the process use it.
    """
    for code in {sys.modules[type(module).__module__] for module in model.modules() if hasattr(module, "o_proj")}:
        rotary = getattr(code, _ROTARY, None)
        if rotary is not None and code not in _compiled:  # by another model of the process
            setattr(code, _ROTARY, compiled(rotary))
            _compiled.add(code)
            yield functools.partial(_restore_rotary, code, rotary)


def compile_gated(
    model: nn.Module, merged: Iterable[MergedProjections], compiled: Compile
) -> Iterator[Callable[[], None]]:
    """Compiles activation and product of gated MLPs whose projections are merged; yields what undoes each.

    An MLP with another formula (Falcon-H1 scales, Gemma 3n drops small activations, some clamp) is left as it is: each
    is compared on random rows. MLPs whose activations are alike share a kernel.
    """
    by_weight = {projections.weight.data_ptr(): projections for projections in merged}
    kernels: dict[tuple[type, int], tuple[Callable[..., Any], Callable[..., Any]]] = {}  # the function, and compiled
    for module in model.modules():
        gate, down, activation = (getattr(module, name, None) for name in ("gate_proj", "down_proj", "act_fn"))
        if not isinstance(gate, nn.Linear) or not isinstance(down, nn.Linear) or not isinstance(activation, nn.Module):
            continue
        key, projections = (type(activation), gate.out_features), by_weight.get(gate.weight.data_ptr())
        gated, kernel = kernels.get(key, (functools.partial(_gated, activation, gate.out_features), None))
        if projections is None or not same_rows(module, functools.partial(_mlp, projections, gated, down), gate.weight):
            continue
        if kernel is None:
            kernel = compiled(gated)
            kernels[key] = gated, kernel
        module.forward = functools.partial(_mlp, projections, kernel, down)
        yield functools.partial(delattr, module, "forward")


def _restore_rotary(code: ModuleType, rotary: Callable[..., Any]) -> None:
    setattr(code, _ROTARY, rotary)
    _compiled.discard(code)


def _gated(activation: nn.Module, width: int, merged: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = activation(merged[..., :width]) * merged[..., width:]
    return product


def _mlp(
    projections: MergedProjections, gated: Callable[..., Any], down: nn.Linear, hidden_state: torch.Tensor
) -> torch.Tensor:
    result: torch.Tensor = down(gated(projections.whole(hidden_state)))
    return result
