"""Makes the store that is configured, and imports nothing of the others."""

from __future__ import annotations

from typing import TypeAlias

from prefixd_swap.stores.base import ObjectStore
from prefixd_swap.stores.valkey import ValkeyOptions, ValkeyStore

StoreOptions: TypeAlias = ValkeyOptions


def open_store(options: StoreOptions) -> ObjectStore:
    """A store; it connects with its first call.

    Raises:
        RemoteStoreError: a package that this store needs is not installed.
    """
    return ValkeyStore(options)
