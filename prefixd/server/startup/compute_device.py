"""The device that the GPU tier and the worker use."""

from __future__ import annotations

import ctypes

from prefixd.base.errors import ConfigError
from prefixd.settings import Settings


def resolve_device(settings: Settings) -> str:
    """Returns the device that `gpu.device` names on this machine: "cpu" or "cuda:N".

    Raises:
        ConfigError: a CUDA device is named, and torch sees none.
    """
    wanted = settings.gpu.device
    if wanted == "cpu" or (wanted == "auto" and not _has_cuda_driver()):
        return "cpu"
    import torch

    available = torch.cuda.is_available()
    if wanted == "auto":
        return "cuda:0" if available else "cpu"
    if not available:
        raise ConfigError(f"gpu.device = {wanted}, but torch sees no CUDA device here; use auto or cpu")
    return wanted if ":" in wanted else f"{wanted}:0"


def _has_cuda_driver() -> bool:
    """True if CUDA's driver can be loaded. Checked before torch, which takes 2 s of CPU time and 250 MiB to load."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
