"""Tunes glibc's heap, so that unused memory returns to the system, and the objects that Python's collector visits."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGE_BYTES = 1 << 20
_SPARE_BYTES = 4 << 20
_LARGEST_BYTES = 32 << 20  # glibc accepts no larger limit


def keep_large_arrays_apart() -> None:
    """Places arrays of 1 MiB and more outside the heap, so that their memory returns to the system when they are freed.

    By default glibc raises that limit up to 32 MiB after the first such array, and memory that is freed between arrays
    in use stays resident: 100 bytes a block after a start that reads a million blocks.
    """
    _call_libc("mallopt", _M_MMAP_THRESHOLD, _LARGE_BYTES)
    _call_libc("mallopt", _M_TRIM_THRESHOLD, _SPARE_BYTES)


def reuse_large_arrays() -> None:
    """Places arrays of less than 32 MiB in the heap again, where they reuse memory.

    Touching memory for the first time costs as much as copying it five times: a message of 16 MiB, which gRPC puts
    together on the event loop, takes 25 ms outside the heap and 5 ms inside. Up to 64 MiB more may stay resident.
    """
    _call_libc("mallopt", _M_MMAP_THRESHOLD, _LARGEST_BYTES)
    _call_libc("mallopt", _M_TRIM_THRESHOLD, 2 * _LARGEST_BYTES)


def give_back() -> None:
    """Returns free memory between used parts of the heap to the system."""
    _call_libc("malloc_trim", 0)


def exempt_from_collection() -> None:
    """Exempts all present objects from garbage collection: objects that a start has made stay until the end.

    A full collection would visit all of them: 50 ms with torch loaded, in which no other thread runs.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def imports() -> Iterator[None]:
    """Stops garbage collection during the imports in this block, and exempts the objects that they have made.

    Modules are never garbage, but after every few thousand new objects the collector visits all earlier ones, which
    takes a quarter of the time that torch and transformers need to load.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if enabled:
            gc.enable()


def _call_libc(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:  # only glibc has these functions
        function(*arguments)
