"""Makes a recurrent module's forward that goes on from a state, for any number of tokens.

Some of transformers' modules cannot: each mend below replaces a function that such a module calls, in a copy of the
module's forward with its own globals, so that the model itself is not changed. `check_resume` checks the result;
nothing here depends on names of models.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, Protocol

import torch
from torch.nn.functional import silu, softplus

from prefixd.worker.recurrent.griffin import griffin_block, is_griffin_block
from prefixd.worker.recurrent.state_cache import StateCache
from prefixd.worker_protocol.errors import ModelError

_CACHE_ARGUMENTS = ("cache_params", "past_key_values")


class ResumableForward(Protocol):
    """Computes one piece of one sequence."""

    def __call__(self, hidden_states: torch.Tensor, cache: StateCache, position_ids: torch.Tensor) -> torch.Tensor:
        """``[1, tokens, hidden]`` to the same shape; position_ids: ``[1, tokens]``."""
        ...


@dataclass(slots=True)
class _Call:
    """The call of a module that is being computed, for functions that it calls."""

    cache: StateCache | None = None


def resumable_forward(module: Any) -> ResumableForward:
    """The module's forward, mended where it has to be. Raises ModelError if it takes no cache."""
    if is_griffin_block(module):
        return partial(griffin_block, module)
    forward = inspect.unwrap(type(module).forward)  # its decorators serve weights that are not on the device
    argument = next((name for name in _CACHE_ARGUMENTS if name in inspect.signature(forward).parameters), None)
    if argument is None or not isinstance(forward, FunctionType):
        raise ModelError(f"has a recurrent layer, {type(module).__name__}, that takes no cache")
    call = _Call()
    mends = {
        name: mend(module, forward.__globals__[name], call)
        for name, mend in _MENDS.items()
        if name in forward.__code__.co_names and name in forward.__globals__
    }
    mended = FunctionType(
        forward.__code__,
        {**forward.__globals__, **mends},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    mended.__kwdefaults__ = forward.__kwdefaults__

    def compute(hidden_states: torch.Tensor, cache: StateCache, position_ids: torch.Tensor) -> torch.Tensor:
        call.cache = cache
        try:
            result: torch.Tensor = mended(module, hidden_states, **{argument: cache})
        finally:
            call.cache = None
        return result

    return compute


def _scan_from_state(module: Any, scan: Callable[..., Any], call: _Call) -> Callable[..., Any]:
    """`mamba_selective_scan`, which always starts at zero: add what the state contributes.

    The recurrence h[t] = exp(A dt[t]) h[t-1] + ... is linear in its initial state, and so is the output, C[t] h[t]:
    beside the scan from zero, h[-1] contributes exp(A (dt[0] + ... + dt[t])) h[-1] to h[t] (Mamba, equation 2a).
    """

    def scan_from_state(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **kwargs: Any,
    ) -> Any:
        """hidden_states, dt, z: ``[1, channels, tokens]``; A: ``[channels, d_state]``; C: ``[1, d_state, tokens]``."""
        result = scan(
            hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus, return_last_state=return_last_state, **kwargs
        )
        state = None if call.cache is None else call.cache.get_recurrent_state(0)
        if state is None:
            return result
        output, last_state = result
        if delta_bias is not None:
            dt = dt + delta_bias.to(dt.dtype)[..., None]
        if delta_softplus:
            dt = softplus(dt)
        decay = torch.exp(A.float()[None, :, None, :] * dt.float().cumsum(-1)[..., None])
        carried = decay * state.float()[:, :, None, :]  # [1, channels, tokens, d_state]
        added = (carried * C.float().transpose(1, 2)[:, None]).sum(-1)
        if z is not None:
            added = added * silu(z.float())
        return output + added.to(output.dtype), last_state + carried[:, :, -1]

    return scan_from_state


def _clamp_time_step(module: Any, step: Callable[..., Any], call: _Call) -> Callable[..., Any]:
    """`mamba2_selective_state_update`, which omits the clamp of the time step that the scan of many tokens has."""
    low, high = getattr(module, "time_step_limit", (0.0, math.inf))
    if low <= 0.0 and high == math.inf:  # softplus is never below zero
        return step

    def clamped_step(
        state: torch.Tensor,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        *args: Any,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        **kwargs: Any,
    ) -> Any:
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = softplus(dt)
        return step(state, hidden_states, dt.clamp(low, high), *args, **kwargs)

    return clamped_step


def _short_chunks(module: Any, scan: Callable[..., Any], call: _Call) -> Callable[..., Any]:
    """`mamba2_chunk_scan`, which fills up what it is given to a whole chunk, 256 tokens in most models.

    With cells of 32 tokens this halves the time of a layer.
    """

    def short_chunks(hidden_states: torch.Tensor, *args: Any, chunk_size: int, **kwargs: Any) -> Any:
        tokens = hidden_states.shape[1]
        enough = max(16, 1 << (tokens - 1).bit_length())  # GPU kernels take powers of two from 16
        return scan(hidden_states, *args, chunk_size=min(chunk_size, enough), **kwargs)

    return short_chunks


_MENDS = {
    "mamba_selective_scan": _scan_from_state,
    "mamba2_selective_state_update": _clamp_time_step,
    "mamba2_chunk_scan": _short_chunks,
}
