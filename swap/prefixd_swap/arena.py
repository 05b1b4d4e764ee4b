"""The CPU tier's memory: one memfd. `pages` cuts it into large pages, and those into slots."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import resource
import threading

import numpy as np
from numpy.typing import NDArray

from prefixd_swap.errors import MemoryMisuseError, OutOfMemoryError
from prefixd_swap.pages.pages import PageAllocator
from prefixd_swap.slots import PAGE_BYTES
from prefixd_swap.spans import Span

POPULATE_STEP_BYTES = 16 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MLOCK_ONFAULT = 1  # absent from the resource module
MADV_POPULATE_WRITE = 23  # Linux 5.14; absent from the mmap module

log = logging.getLogger(__name__)
libc = ctypes.CDLL(None, use_errno=True)


class CpuArena:
    """`nbytes` of shared memory. One thread gives out its bytes as slots of `pages`; any thread may use them."""

    def __init__(self, nbytes: int, *, huge_pages: bool = False, populate: bool = False) -> None:
        """Create the memory; whole pages of 4096 bytes are used, the rest of `nbytes` is not.

        Args:
            nbytes: capacity in bytes.
            huge_pages: ask for transparent huge pages; the kernel's `shmem_enabled` decides.
            populate: have a background thread touch every page, see `wait_populated`.

        Raises:
            OutOfMemoryError: the memory cannot be made.
        """
        self.capacity_bytes = nbytes // PAGE_BYTES * PAGE_BYTES
        if self.capacity_bytes <= 0:
            raise OutOfMemoryError(f"a CPU arena of {nbytes} bytes holds nothing; give at least {PAGE_BYTES}")
        self.fd = -1
        try:
            self.fd = os.memfd_create("prefixd-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, self.capacity_bytes)
            # Clients map this memory too. If a client could shrink the file, reads here would get SIGBUS.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self._map = mmap.mmap(self.fd, self.capacity_bytes)
        except (OSError, OverflowError, ValueError) as error:
            if self.fd >= 0:
                os.close(self.fd)
            raise OutOfMemoryError(
                f"a CPU arena of {self.capacity_bytes} bytes cannot be made ({error}); lower its capacity"
            ) from error
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(self._map, dtype=np.uint8)
        self._address = int(self._bytes.ctypes.data)
        if huge_pages:
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError as error:
                log.warning("no huge pages for the CPU arena (%s); it works with small ones", error)
        self.pages = PageAllocator(self.capacity_bytes)
        self.pages.add(0, self.capacity_bytes)
        self._stop = threading.Event()
        self._populated = threading.Event()
        self._populator: threading.Thread | None = None
        if populate:
            populator = threading.Thread(target=self._populate, name="prefixd-populate", daemon=True)
            try:
                populator.start()
                self._populator = populator
            except RuntimeError as error:
                log.warning(
                    "the CPU arena's pages are touched on first use: no thread can be started (%s); raise the limit of "
                    "processes (`ulimit -u`, TasksMax= of systemd)",
                    error,
                )

    def lock(self) -> None:
        """Keep every page in memory once it was touched; the system never swaps it out.

        Raises:
            OutOfMemoryError: the limit of locked memory is too low; the arena works as before.
        """
        if libc.mlock2(ctypes.c_void_p(self._address), ctypes.c_size_t(self.capacity_bytes), MLOCK_ONFAULT):
            code = ctypes.get_errno()
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            raise OutOfMemoryError(
                f"the CPU arena of {self.capacity_bytes} bytes is not locked in memory and may be swapped out "
                f"({os.strerror(code)}, {soft} bytes may be locked); raise RLIMIT_MEMLOCK (`ulimit -l`, LimitMEMLOCK= "
                "of systemd) or set cpu.lock = false"
            )

    def untouched_bytes(self) -> int:
        """Bytes that were never written or populated; the system does not count them as used."""
        return max(0, self.capacity_bytes - 512 * os.fstat(self.fd).st_blocks)

    def span(self, offset: int, nbytes: int) -> Span:
        """The bytes at `offset` as raw memory, good until `close`.

        Raises:
            MemoryMisuseError: they reach outside the arena, or it is closed.
        """
        self._check_inside(offset, nbytes)
        return Span(self._address + int(offset), nbytes)

    def array(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """The bytes at `offset` as a writable array without a copy, uint8 [nbytes]; keeps the memory alive.

        Raises:
            MemoryMisuseError: they reach outside the arena, or it is closed.
        """
        return self._check_inside(offset, nbytes)[offset : offset + nbytes]

    def wait_populated(self, timeout_s: float | None = None) -> bool:
        """Wait at most `timeout_s` seconds for the background thread; True once it has touched every page."""
        return self._populated.wait(timeout_s) if self._populator else False

    def close(self) -> None:
        """Give the memory back: spans are invalid at once; arrays from `array` keep it until the last one is gone."""
        if self._bytes is None:
            return
        self._stop.set()
        if self._populator:
            self._populator.join()
        self._bytes = None
        os.close(self.fd)
        self.fd = -1
        try:
            self._map.close()
        except BufferError:
            log.debug("arrays still refer to the arena; its memory is freed with the last of them")

    def _check_inside(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        if self._bytes is None:
            raise MemoryMisuseError("the arena is closed; end every copy before closing it")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.capacity_bytes:
            raise MemoryMisuseError(
                f"{nbytes} bytes at offset {offset} reach outside the arena of {self.capacity_bytes} bytes"
            )
        return self._bytes

    def _populate(self) -> None:
        """Touch all pages in steps, so that first stores take no page faults (0.4 ms per 2 MiB).

        A call through ctypes releases the GIL; `mmap.madvise` does not.
        """
        for offset in range(0, self.capacity_bytes, POPULATE_STEP_BYTES):
            if self._stop.is_set():
                return
            step = min(POPULATE_STEP_BYTES, self.capacity_bytes - offset)
            address = ctypes.c_void_p(self._address + offset)
            if libc.madvise(address, ctypes.c_size_t(step), MADV_POPULATE_WRITE) == 0:
                continue
            try:
                os.posix_fallocate(self.fd, offset, step)  # before Linux 5.14: pages without their mapping
            except OSError as error:
                log.warning("the CPU arena is populated only to byte %d: %s", offset, error)
                return
        self._populated.set()
