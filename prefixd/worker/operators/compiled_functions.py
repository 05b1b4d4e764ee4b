"""Element-wise functions of a layer, each compiled to a kernel: rotary positions, and the gated activation.

`torch.compile` makes Triton kernels of them on a GPU. Not yet measured on one.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from prefixd.worker.operators.merged_projections import MergedProjections

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
_ROTARY = "apply_rotary_pos_emb"
_compiled: set[ModuleType] = set()
"""Modules of models' code whose function for rotary positions is a compiled one."""


def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """One kernel for all sizes."""
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled


def compile_rotary(model: nn.Module, compiled: Compile) -> list[Callable[[], None]]:
    """Compiles the function that turns queries and keys by their positions; returns what undoes it.

    It belongs to the module of the model's code, so all models of this architecture in the process use it.
    """
    undo: list[Callable[[], None]] = []
    for code in {sys.modules[type(module).__module__] for module in model.modules() if hasattr(module, "o_proj")}:
        rotary = getattr(code, _ROTARY, None)
        if rotary is not None and code not in _compiled:  # by another model of the process
            _compiled.add(code)
            setattr(code, _ROTARY, compiled(rotary))
            undo.append(functools.partial(_compiled.discard, code))
            undo.append(functools.partial(setattr, code, _ROTARY, rotary))
    return undo


def compile_gated(model: nn.Module, merged: Iterable[MergedProjections], compiled: Compile) -> list[Callable[[], None]]:
    """Compiles activation and product of gated MLPs whose projections are merged; returns what undoes it."""
    by_weight = {projections.weight.data_ptr(): projections for projections in merged}
    kernels: dict[tuple[type, int], Callable[..., Any]] = {}
    undo: list[Callable[[], None]] = []
    for module in model.modules():
        gate, down, activation = (getattr(module, name, None) for name in ("gate_proj", "down_proj", "act_fn"))
        if not isinstance(gate, nn.Linear) or not isinstance(down, nn.Linear) or not isinstance(activation, nn.Module):
            continue
        projections = by_weight.get(gate.weight.data_ptr())
        if projections is None or len(inspect.signature(module.forward).parameters) != 1:
            continue
        key = type(activation), gate.out_features
        if key not in kernels:
            kernels[key] = compiled(functools.partial(_gated, activation, gate.out_features))
        module.forward = functools.partial(_mlp, projections, kernels[key], down)
        undo.append(functools.partial(delattr, module, "forward"))
    return undo


def _gated(activation: nn.Module, width: int, merged: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = activation(merged[..., :width]) * merged[..., width:]
    return product


def _mlp(
    projections: MergedProjections, gated: Callable[..., Any], down: nn.Linear, hidden_state: torch.Tensor
) -> torch.Tensor:
    result: torch.Tensor = down(gated(projections.whole(hidden_state)))
    return result
