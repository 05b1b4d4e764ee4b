"""Small tensors for a device, without waiting for it."""

from __future__ import annotations

from typing import Any

import torch


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`values` (numbers in nested lists) as a tensor on `device`.

    From pinned memory: from any other the host would wait until all that is queued on the stream is done.
    """
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
