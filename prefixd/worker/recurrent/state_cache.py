"""Transformers' cache interface on the state of one layer and one sequence."""

from __future__ import annotations

from typing import Any

import torch


class StateCache:
    """The cache of a recurrent layer while it computes one piece of a sequence.

    conv, recurrent: the views of `StateLayout.views`, which this writes to. One-token steps change what the `get_`
    methods returned in place, and call no `update_` method.
    started: False if nothing has been computed yet: the views hold anything. Transformers makes a difference between
    no state (None) and a state of zeros: the first token of a sequence never takes the one-token step.

    It has the methods that layers call, not all of `Cache`, so that a layer which calls another one fails loudly. As
    it serves one layer, `layer_idx` means nothing.
    """

    def __init__(self, conv: torch.Tensor, recurrent: torch.Tensor | None, started: bool) -> None:
        self._conv = conv
        self._recurrent = recurrent
        self._started = started

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether tokens have been computed before this piece."""
        return self._started

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: that is for taking back tokens of speculative decoding."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs of the convolution, ``[1, channels, kernel]``, or None at the start of a sequence."""
        return self._conv if self._started else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The recurrent state, ``[1, ...]``, or None at the start of a sequence."""
        return self._recurrent if self._started else None

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Keep the last columns of ``[1, channels, tokens]``; returns the ones kept before and these, joined.

        At the start of a sequence zeros stand to the left of inputs that are fewer than the kernel.
        """
        kernel = self._conv.shape[-1]
        joined = conv_states
        if self._started:
            joined = torch.cat((self._conv.to(conv_states.dtype), conv_states), dim=-1)
        elif conv_states.shape[-1] < kernel:
            joined = torch.nn.functional.pad(conv_states, (kernel - conv_states.shape[-1], 0))
        self._conv.copy_(joined[..., -kernel:])
        return joined

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Keep a recurrent state, ``[1, ...]``."""
        if self._recurrent is None:
            raise TypeError("a layer has a recurrent state that it did not have when its shapes were recorded")
        self._recurrent.copy_(recurrent_states)
        return self._recurrent
