"""Stores that hosts share: named objects behind one small interface.

`base` is the interface, and `open` makes the configured store; `names` has the names of objects, `sealed` their format.
"""

from prefixd_swap.stores.base import NAME_BYTES, ObjectStore, Read, Write
from prefixd_swap.stores.mooncake.mooncake_options import MooncakeOptions
from prefixd_swap.stores.names import BlockIdentity, TenantKeys, object_name
from prefixd_swap.stores.open import StoreOptions, open_store
from prefixd_swap.stores.s3.s3_options import S3Options
from prefixd_swap.stores.valkey.valkey_store import ValkeyOptions

__all__ = [
    "NAME_BYTES",
    "BlockIdentity",
    "MooncakeOptions",
    "ObjectStore",
    "Read",
    "S3Options",
    "StoreOptions",
    "TenantKeys",
    "ValkeyOptions",
    "Write",
    "object_name",
    "open_store",
]
