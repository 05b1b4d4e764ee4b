"""Stores that other hosts read and write, too: named objects behind one small interface."""

from prefixd_swap.stores.base import NAME_BYTES, ObjectStore, Read, Write
from prefixd_swap.stores.mooncake_options import MooncakeOptions
from prefixd_swap.stores.open import StoreOptions, open_store
from prefixd_swap.stores.s3_options import S3Options
from prefixd_swap.stores.valkey import ValkeyOptions

__all__ = [
    "NAME_BYTES",
    "MooncakeOptions",
    "ObjectStore",
    "Read",
    "S3Options",
    "StoreOptions",
    "ValkeyOptions",
    "Write",
    "open_store",
]
