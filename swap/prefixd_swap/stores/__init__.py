"""Stores that other hosts read and write, too: named objects behind one small interface."""

from prefixd_swap.stores.base import ObjectStore, Read, Write

__all__ = ["ObjectStore", "Read", "Write"]
