"""vTensor's virtual tensors on virtual memory (paper, section 5), and vAttention's interface to them."""

from __future__ import annotations

from prefixd_swap.vtensor.attach_costs import AttachCosts
from prefixd_swap.vtensor.manager import VirtualTensorManager
from prefixd_swap.vtensor.physical_set import PhysicalSet
from prefixd_swap.vtensor.row_mapping import MappingCounts
from prefixd_swap.vtensor.virtual_set import VirtualSet
from prefixd_swap.vtensor.virtual_tensor import VirtualTensor

__all__ = [
    "AttachCosts",
    "MappingCounts",
    "PhysicalSet",
    "VirtualSet",
    "VirtualTensor",
    "VirtualTensorManager",
]
