"""Raw memory that a copy reads or writes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """`nbytes` bytes at `address`; `on_device` tells GPU memory from host memory.

    A span does not own the memory: its creator keeps the memory alive until the copy has ended.
    """

    address: int
    nbytes: int
    on_device: bool = False
