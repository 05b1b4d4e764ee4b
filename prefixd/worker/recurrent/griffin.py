"""RecurrentGemma's recurrent block (Griffin, section 2.4) on a cache.

transformers' own keeps the states of one batch in its modules, and drops the convolution's when more than one token
follows: a prompt computed in two passes has logits that are wrong by 0.1.
"""

from __future__ import annotations

from typing import Any

import torch


def is_griffin_block(module: Any) -> bool:
    """Whether this is such a block, told by its parts."""
    return all(hasattr(module, part) for part in ("rg_lru", "conv_1d", "linear_x", "linear_y", "linear_out"))


def griffin_block(block: Any, hidden_states: torch.Tensor, cache: Any, position_ids: torch.Tensor) -> torch.Tensor:
    """``[1, tokens, hidden]`` to the same shape.

    cache: any with transformers' methods for recurrent states. position_ids: ``[1, tokens]``; the recurrence
    starts anew at 0.
    """
    tokens = hidden_states.shape[1]
    gate = block.act_fn(block.linear_y(hidden_states))
    joined = cache.update_conv_state(
        block.linear_x(hidden_states).transpose(1, 2), 0, conv_kernel_size=block.conv1d_width - 1
    )
    # conv_1d pads with zeros on both sides.
    convolved = block.conv_1d(joined)[..., : joined.shape[-1]][..., -tokens:].transpose(1, 2)
    unit = block.rg_lru
    unit.recurrent_states = cache.get_recurrent_state(0)
    recurred = unit(convolved, position_ids)
    cache.update_recurrent_state(unit.recurrent_states, 0)
    unit.recurrent_states = None
    result: torch.Tensor = block.linear_out(recurred * gate)
    return result
