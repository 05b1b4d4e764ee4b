"""Checks that a model's recurrent layers give the same results when they go on from copied states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from prefixd.worker.recurrent.layers import RecurrentLayers
from prefixd.worker.recurrent.segments import StateSegment
from prefixd.worker_protocol.errors import ModelError

_SINGLE_STEPS = 6
# Of the relative error of a layer's results and states. Measured on small models of ten architectures: 2e-6, 4e-3 and
# 2e-3 where all is right, 1.6e-2 and more where a state is lost, 3e-3 and more where a time step is not clamped.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@torch.inference_mode()
def check_resume(model: Any, layers: RecurrentLayers) -> None:
    """Compare with the model's own forward over some tokens at once. Raises ModelError, which names the layer.

    Each layer gets the inputs that it had there, and computes them cut into cells, and a token at a time at the start
    and at the end. It goes on from a copy of its state's bytes each time, and the buffer copied from is spoilt.

    Layers are compared one by one, and not the model's logits, for two reasons. Attention, which does not use a state,
    is left out. And a lost state may not show in the logits: with weights of 0.02, as before training, a state of zeros
    moves the logits of most models by 2e-6. For the same reason the states themselves are compared, too.
    """
    if not layers.modules:
        return
    cell = layers.cell_tokens
    tokens = 2 * cell + _SINGLE_STEPS
    inputs, outputs = _own_forward(model, layers, tokens)
    singles = range(2 * cell + 1, tokens + 1)
    cuts = [[tokens], [cell, tokens], [1, 2, 3, cell, 2 * cell, *singles]]
    for layer, module in enumerate(layers.modules):
        name = type(module).__name__
        whole_states = None
        for ends in cuts:
            result, states = _resumed(layers, layer, inputs[layer], sorted(set(ends)))
            whole_states = whole_states or states
            for ours, theirs in zip([result, *states], [outputs[layer], *whole_states], strict=True):
                error = _error(ours, theirs)
                if not error <= _TOLERANCE[outputs[layer].dtype]:
                    raise ModelError(
                        f"has recurrent layers ({name}, {layer + 1} of {len(layers.modules)}) that compute something "
                        f"else when they go on from a kept state (relative error {error:.2g}); it cannot be run"
                    )


def _own_forward(model: Any, layers: RecurrentLayers, tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Inputs and outputs of each recurrent layer when the model computes `tokens` tokens by itself."""
    inputs, outputs = list[torch.Tensor](), list[torch.Tensor]()

    def note(module: Any, args: Any, kwargs: Any, result: Any) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])
        outputs.append(result[0] if isinstance(result, tuple) else result)

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in layers.modules]
    device = next(model.parameters()).device
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = [[(7 * index + 3) % vocabulary for index in range(tokens)]]
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        model.base_model(input_ids=torch.tensor(ids, device=device), use_cache=False)
    finally:
        model.set_attn_implementation(before)
        for handle in handles:
            handle.remove()
    return inputs, outputs


def _resumed(
    layers: RecurrentLayers, layer: int, hidden_states: torch.Tensor, ends: Sequence[int]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A layer's results and its last states, computed in passes that end at `ends`."""
    state = torch.full((layers.layout.nbytes,), 0xFF, dtype=torch.uint8, device=hidden_states.device)  # NaNs
    results = []
    start = 0
    for stop in ends:
        results.append(layers.compute(layer, hidden_states[:, start:stop], [StateSegment(start, stop, state)]))
        copied = state.clone()
        state.fill_(0xFF)
        state = copied
        start = stop
    views = layers.layout.views(state, layer)
    return torch.cat(results, dim=1), [view for view in views if view is not None]


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative, where numbers are large enough to have a relative error."""
    smallest = torch.finfo(theirs.dtype).smallest_normal * theirs.numel() ** 0.5
    return float((ours.float() - theirs.float()).norm() / (theirs.float().norm() + smallest))
