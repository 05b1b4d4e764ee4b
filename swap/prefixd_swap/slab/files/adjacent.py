"""Memory for one call that moves the parts of adjacent slots.

Where the parts are adjacent in memory too, the call moves them from or to there. Else small parts go through a buffer
of the thread: a call for each costs more than the copy.

    slots    |    a    |    b    |  c   0|    the last page of a slot behind its part has zeros
    memory   |    a    |    b    |  c   |
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from prefixd_swap.slab.files.file_ops import host_bytes
from prefixd_swap.slab.files.pread_io import scratch
from prefixd_swap.slots import round_to_slot
from prefixd_swap.spans import Span

SMALL_BYTES = 64 << 10
"""Parts up to this size are copied to move with their neighbours."""


def are_adjacent(spans: Sequence[Span]) -> bool:
    """Whether parts lie in memory as in adjacent slots, each but the last filling whole slots."""
    return all(
        after.address == before.address + round_to_slot(before.nbytes) and before.nbytes == round_to_slot(before.nbytes)
        for before, after in pairwise(spans)
    )


def join_spans(spans: Sequence[Span], nbytes: int) -> memoryview:
    """The bytes of parts as they lie in adjacent slots of `nbytes` bytes in all.

    It is a copy, which the thread's next call or read overwrites, unless the parts are adjacent in memory.

    Raises:
        StorageError: a span is on a GPU.
    """
    on_device = any(span.on_device for span in spans)
    if are_adjacent(spans):
        first, last = spans[0].address, spans[-1]
        whole = Span(first, last.address + last.nbytes - first, on_device)
        return host_bytes(whole, whole.nbytes)
    buffer = scratch()[:nbytes]
    start = 0
    for span in spans:
        data, end = host_bytes(span, span.nbytes), start + round_to_slot(span.nbytes)
        copy_bytes(data, buffer[start:end])
        buffer[start + span.nbytes : end] = bytes(end - start - span.nbytes)
        start = end
    return buffer


def copy_bytes(data: memoryview, into: memoryview) -> None:
    """Copy `data` to the start of `into`, without the interpreter's lock."""
    np.copyto(np.frombuffer(into, np.uint8)[: len(data)], np.frombuffer(data, np.uint8))
