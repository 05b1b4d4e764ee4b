"""Stores that other hosts read and write, too: named objects behind one small interface."""

from prefixd_swap.stores.base import ObjectStore, Read, Write
from prefixd_swap.stores.names import BlockIdentity, TenantKeys, object_name

__all__ = ["BlockIdentity", "ObjectStore", "Read", "TenantKeys", "Write", "object_name"]
