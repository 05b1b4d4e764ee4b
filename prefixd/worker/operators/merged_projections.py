"""Linear layers of one input computed as one: queries, keys and values; gate and up.

```
q = q_proj(x)      4096 x 4096 |                                  | q_proj(x) computes all and returns its columns
k = k_proj(x)      4096 x 1024 |  one product of 4096 x 6144      | k_proj(x) returns its columns of the same result
v = v_proj(x)      4096 x 1024 |                                  | v_proj(x) too
```

The model's code stays: each layer's `forward` takes its part of a result that the first of them has computed. The
weights become views of the merged ones, so memory is taken once; while a group is merged, it is taken twice.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import nn

_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class MergedProjections:
    """Linear layers with one input. Each is called once a pass, with the same tensor.

    computed, taken: how often the merged product was computed, and a part of it was returned.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.computed = self.taken = 0
        self._linears = list(linears)
        self._sizes = [linear.out_features for linear in linears]
        self._input: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()
        self._left = 0
        self.weight = torch.cat([linear.weight.data for linear in linears])
        biases: list[torch.Tensor | None] = [linear.bias for linear in linears]
        self.bias = None if biases[0] is None else torch.cat([bias.data for bias in biases if bias is not None])
        for index, linear in enumerate(linears):
            rows = slice(sum(self._sizes[:index]), sum(self._sizes[: index + 1]))
            linear.weight = nn.Parameter(self.weight[rows], requires_grad=False)
            if self.bias is not None:
                linear.bias = nn.Parameter(self.bias[rows], requires_grad=False)
            linear.forward = functools.partial(self._part, index)  # type: ignore[method-assign]

    def whole(self, inputs: torch.Tensor) -> torch.Tensor:
        """All parts, side by side in the last dimension."""
        return nn.functional.linear(inputs, self.weight, self.bias)

    @property
    def wasteful(self) -> bool:
        """Whether passes have computed parts that they did not take, since the layers have different inputs or some are
        skipped; also if no pass has used it, so that nothing is known."""
        return not self.computed or self.taken != self.computed * len(self._linears)

    def undo(self) -> None:
        """Let each layer compute by itself again; the weights stay views."""
        self._input, self._parts = None, ()
        for linear in self._linears:
            del linear.forward

    def _part(self, index: int, inputs: torch.Tensor) -> torch.Tensor:
        if inputs is not self._input:
            self.computed += 1
            self._input, self._parts = inputs, self.whole(inputs).split(self._sizes, dim=-1)
            self._left = len(self._sizes)
        self.taken += 1
        self._left -= 1
        part = self._parts[index]
        if not self._left:  # nobody needs them any more: let go of their memory
            self._input, self._parts = None, ()
        return part


def merge_projections(model: nn.Module) -> Iterator[MergedProjections]:
    """Merges the groups of a model's linear layers, one at each step of the iteration.

    On a GPU, raises torch.OutOfMemoryError when there is no room for one group twice.
    """
    for module in list(model.modules()):
        for names in _GROUPS:
            linears = [getattr(module, name, None) for name in names]
            if _mergeable(linears):
                yield MergedProjections([linear for linear in linears if isinstance(linear, nn.Linear)])


def _mergeable(linears: Sequence[object]) -> bool:
    if not all(type(linear) is nn.Linear for linear in linears):  # a subclass computes something else
        return False
    plain = [linear for linear in linears if isinstance(linear, nn.Linear)]
    if any(type(parameter) is not nn.Parameter for linear in plain for parameter in linear.parameters()):
        return False  # quantised weights have numbers of their own beside them
    kinds = {(linear.in_features, linear.weight.dtype, linear.weight.device, linear.bias is None) for linear in plain}
    return len(kinds) == 1 and len({id(linear) for linear in plain}) == len(plain)
