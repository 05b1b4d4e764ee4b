"""The process's heap: glibc's, kept from holding on to memory that nobody uses, and what Python's collector visits."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGE_BYTES = 1 << 20
_SPARE_BYTES = 4 << 20
_LARGEST_BYTES = 32 << 20  # glibc takes no larger limit


def keep_large_arrays_apart() -> None:
    """Has arrays of 1 MiB and more lie outside the heap, so that their memory is the system's again once they are gone.

    By default glibc moves that limit up to 32 MiB after the first such array, and what is freed between arrays that are
    used stays resident: 100 bytes a block with a million blocks that a start reads.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _SPARE_BYTES)


def reuse_large_arrays() -> None:
    """Has arrays of less than 32 MiB lie in the heap again, where they get memory that has been used before.

    Memory that is touched for the first time costs as much as copying it five times: a message of 16 MiB, which gRPC
    puts together on the event loop, takes 25 ms apart and 5 ms in the heap. Up to 64 MiB more may stay resident.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_BYTES)


def give_back() -> None:
    """Returns to the system what is free in the heap between what is used."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def exempt_from_collection() -> None:
    """Has the garbage collector leave alone what is there now: what a start has made stays until the end.

    A full collection would go through all of it, 50 ms with torch loaded, in which no other thread runs.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def imports() -> Iterator[None]:
    """Keeps the garbage collector out of the imports in this block, and exempts what they have made.

    Modules are not garbage, but with each some thousand objects the collector goes through all that were made before:
    a quarter of the time that torch and transformers take to load.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if enabled:
            gc.enable()
