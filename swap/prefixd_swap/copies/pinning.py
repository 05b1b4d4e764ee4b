"""Host memory registered with CUDA in the background, so that copies of it run at full speed.

Registering touches and locks every page: 100 GB take tens of seconds. So a thread registers slice by slice, and copies
go on meanwhile: copies of registered slices are fast, the others are correct but slower. The driver refuses a copy if
its host memory is registered in part or by two calls (CUDA driver API, `cuMemcpy` on host memory: "entirely registered
[...] or not registered at all"), so `pieces` cuts every copy at the borders of the slices.

`make gpu-check` runs it on a GPU; elsewhere the tests run it against a stand-in driver.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise

from prefixd_swap.errors import OutOfMemoryError, SwapError
from prefixd_swap.threads import started_threads
from prefixd_swap.vmem.backends import linux
from prefixd_swap.vmem.backends.cuda_driver import register_host, unregister_host

_SLICE_BYTES = 1 << 30

_changing = threading.Lock()
_borders: list[int] = []  # ascending; a change replaces the list, so that readers need no lock


class HostPin:
    """Keeps `nbytes` of shared memory at `address` registered with CUDA until `close`. Never raises.

    Args:
        address: the start of the memory, a multiple of the page. It has to stay mapped until `close`.
        nbytes: its size.
        ordinal: the CUDA device that registers it; it counts as pinned for all devices.
        on_failure: called once, in a thread, with one line, when a part cannot be registered: the limit of locked
            memory (RLIMIT_MEMLOCK) is too low, or no thread can be started. Copies of that part go on unpinned.
    """

    def __init__(self, address: int, nbytes: int, ordinal: int, on_failure: Callable[[str], None]) -> None:
        self.nbytes = nbytes
        self.pinned_bytes = 0
        """Bytes that are registered now."""
        self._slices = {
            start: min(_SLICE_BYTES, address + nbytes - start)
            for start in range(address, address + nbytes, _SLICE_BYTES)
        }
        self._ordinal = ordinal
        self._on_failure = on_failure
        self._registered: list[int] = []
        self._stopping = threading.Event()
        _add_borders([*self._slices, address + nbytes])
        linux.advise_huge_pages(address, nbytes)
        self._thread: ThreadPoolExecutor | None = None
        try:
            self._thread = started_threads(1, "prefixd-pin")
        except OutOfMemoryError as error:
            self._fail(error)
            return
        self._thread.submit(self._register)

    def close(self) -> None:
        """Unregister the memory; nothing may be copied to or from it any more. Can be called twice.

        Waits for the slice that is being registered.
        """
        self._stopping.set()
        if self._thread is not None:
            self._thread.shutdown()
        while self._registered:
            with suppress(SwapError):  # after an error the driver has lost its context and the registration
                unregister_host(self._registered.pop(), self._ordinal)
        if self._slices:
            _remove_borders([*self._slices, max(start + nbytes for start, nbytes in self._slices.items())])
        self._slices = {}
        self.pinned_bytes = 0

    def _register(self) -> None:
        for start, nbytes in self._slices.items():
            if self._stopping.is_set():
                return
            try:
                register_host(start, nbytes, self._ordinal)
            except SwapError as error:
                self._fail(error)
                return
            self._registered.append(start)
            self.pinned_bytes += nbytes

    def _fail(self, error: SwapError) -> None:
        done = f"{self.pinned_bytes} of {self.nbytes} bytes"
        self._on_failure(f"{done} are pinned, copies of the rest are slower: {error}")


def pieces(address: int, nbytes: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the parts of a host range, in order; each part needs its own copy."""
    borders = _borders
    first, stop = bisect_right(borders, address), bisect_left(borders, address + nbytes)
    if first == stop:
        return [(0, nbytes)]
    cuts = [0, *(border - address for border in borders[first:stop]), nbytes]
    return [(start, end - start) for start, end in pairwise(cuts) if end > start]


def _add_borders(borders: list[int]) -> None:
    global _borders
    with _changing:
        _borders = sorted([*_borders, *borders])


def _remove_borders(borders: list[int]) -> None:
    global _borders
    with _changing:
        left = list(_borders)
        for border in borders:
            left.remove(border)  # once: the end of one memory may be the start of another
        _borders = left
