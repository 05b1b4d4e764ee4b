"""Makes the configured store; imports the packages of no other store."""

from __future__ import annotations

from typing import TypeAlias

from prefixd_swap.errors import RemoteStoreError
from prefixd_swap.stores.base import ObjectStore
from prefixd_swap.stores.mooncake.mooncake_options import MooncakeOptions
from prefixd_swap.stores.s3.s3_options import S3Options
from prefixd_swap.stores.valkey.valkey_store import ValkeyOptions, ValkeyStore

StoreOptions: TypeAlias = ValkeyOptions | S3Options | MooncakeOptions


def open_store(options: StoreOptions) -> ObjectStore:
    """A store; it connects with its first call.

    Raises:
        RemoteStoreError: a package that this store needs is not installed, or the client refuses the options.
    """
    if isinstance(options, ValkeyOptions):
        return ValkeyStore(options)
    if isinstance(options, MooncakeOptions):
        from prefixd_swap.stores.mooncake.mooncake_store import MooncakeStore

        return MooncakeStore(options)
    try:
        from prefixd_swap.stores.s3.s3_store import S3Store
    except ImportError as error:
        raise RemoteStoreError(
            f"s3 at {options.address}: the package obstore is missing ({error}); run `pip install 'prefixd[remote]'`"
        ) from error
    return S3Store(options)
