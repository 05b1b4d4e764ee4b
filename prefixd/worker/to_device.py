"""Small tensors to a device and back, without waiting for it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
import torch


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`values` (numbers in nested lists) as a tensor on `device`.

    It copies from pinned memory: otherwise the host would wait for all work that is queued on the stream.
    """
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def array_to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy of `array` on `device`, from pinned memory as in `to_device`."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def uploaded(columns: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Several lists as tensors on `device`, by one copy."""
    whole = to_device(list(itertools.chain.from_iterable(columns)), dtype, device)
    return list(whole.split([len(column) for column in columns]))


class HostCopy:
    """A copy of a small tensor in host memory, which the device makes when it has computed the tensor."""

    def __init__(self, source: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._copy = source
        if source.is_cuda:
            self._copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._copy.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(source.device))

    def read(self) -> list[Any]:
        """The numbers. Waits for this copy, not for what is queued behind it."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[Any] = self._copy.tolist()
        return numbers


class UnreadTokens(NamedTuple):
    """Tokens of a pass that an earlier pass samples, and that the host has not read.

    ids: [n] int64 on the device. The token of row rows[i] of the pass is ids[sources[i]].
    """

    ids: torch.Tensor
    rows: Sequence[int]
    sources: Sequence[int]

    def put(self, tokens: torch.Tensor) -> None:
        """Write them among the pass's tokens, queued on the device behind the pass that samples them."""
        rows, sources = to_device([self.rows, self.sources], torch.int64, tokens.device)
        tokens.index_copy_(0, rows, self.ids.index_select(0, sources))
