"""Small tensors for a device, without waiting for it."""

from __future__ import annotations

from typing import Any

import torch


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`values` (numbers in nested lists) as a tensor on `device`.

    It copies from pinned memory: otherwise the host would wait for all work that is queued on the stream.
    """
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
