"""Rewrites a model as far as its logits stay what they were."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import nn

from prefixd.worker.operators.compiled_functions import Compile, compile_function, compile_gated, compile_rotary
from prefixd.worker.operators.merged_projections import MergedProjections, merge_projections
from prefixd.worker.operators.single_norms import single_norms

Operators = Literal["model", "merged", "fused"]
"""model: as transformers has them. merged: merged projections, and a norm is one operator. fused: also compiled
functions."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.03}
"""Largest relative norm of the logits' difference: other orders of summation, and one rounding less a norm."""


class Rewritten(NamedTuple):
    """What a model computes with, and why not with what was asked for; empty if it does.

    undo: have it compute as before, each in reverse order. The weights stay views of merged ones.
    """

    operators: Operators
    reason: str
    undo: Sequence[Callable[[], None]] = ()


def rewrite(
    model: nn.Module,
    wanted: Operators,
    logits: Callable[[], torch.Tensor],
    *,
    compiled: Compile = compile_function,
) -> Rewritten:
    """Rewrites a model in place.

    Args:
        model: with its weights on the device.
        wanted: how far.
        logits: computes logits of a few tokens with the model.
        compiled: compiles a function.
    """
    if wanted == "model":
        return Rewritten("model", "")
    expected = logits().float()
    tolerance = TOLERANCE[next(model.parameters()).dtype]

    def apply(steps: Iterable[Callable[[], None]], errors: type[Exception]) -> tuple[list[Callable[[], None]], str]:
        """What undoes the steps; nothing, and the reason, if they fail or change the logits."""
        done: list[Callable[[], None]] = []
        try:
            for undo_one in steps:
                done.append(undo_one)
            why_not = _differs(expected, logits(), tolerance)
        except errors as error:
            why_not = _line(error)
        if why_not:
            _undo(done)
            done = []
        return done, why_not

    merged: list[MergedProjections] = []
    undo, why_not = apply(_merge(model, merged), RuntimeError)  # no memory for a group of weights twice, among others
    if why_not:
        return Rewritten("model", f"merged projections: {why_not}")
    used = [projections for projections in merged if not projections.wasteful]
    for projections in merged:
        if projections not in used:
            projections.undo()
            undo.remove(projections.undo)
    norms, why_not = apply((functools.partial(delattr, norm, "forward") for norm in single_norms(model)), RuntimeError)
    undo += norms
    reasons = [f"norms in one operator: {why_not}"] if why_not else []
    if wanted == "merged":
        return Rewritten("merged", "; ".join(reasons), undo)
    compiling = itertools.chain(compile_rotary(model, compiled), compile_gated(model, used, compiled))
    functions, why_not = apply(compiling, Exception)  # a compiler's errors have no common type
    if why_not:
        reasons.append(f"compiled functions: {why_not}")
    return Rewritten("merged" if why_not else "fused", "; ".join(reasons), [*undo, *functions])


def _merge(model: nn.Module, merged: list[MergedProjections]) -> Iterator[Callable[[], None]]:
    """Merges projections and enters them in `merged`; yields what undoes each."""
    for projections in merge_projections(model):
        merged.append(projections)
        yield projections.undo
        if projections.weight.is_cuda:  # what the single weights had is too small for the next group
            torch.cuda.empty_cache()


def _undo(steps: Sequence[Callable[[], None]]) -> None:
    for step in reversed(steps):
        step()


def _differs(expected: torch.Tensor, found: torch.Tensor, tolerance: float) -> str:
    """How the logits differ; empty if they are equal within the tolerance."""
    norm, difference = float(expected.norm()), float((found.float() - expected).norm())
    if difference <= tolerance * norm:
        return ""
    return f"the logits differ by {difference:.2g} of {norm:.2g}"


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
