"""Memory calls of Linux that Python's `mmap` module does not have: mappings at chosen addresses."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

from prefixd_swap.errors import DeviceError, OutOfMemoryError
from prefixd_swap.memory_limit import cgroup_limit

PAGE_BYTES = mmap.PAGESIZE

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_HOLE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_FAILED = ctypes.c_void_p(-1).value

# A CDLL releases the GIL during a call, so populating memory does not stop other threads.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def reserve_addresses(nbytes: int, align: int) -> int:
    """Reserve `nbytes` addresses that fault when touched; returns the first address, a multiple of `align`.

    Raises OutOfMemoryError when the address space or the mappings of the process are used up.
    """
    raw = _mmap(0, nbytes + align, _PROT_NONE, _HOLE, -1, 0)
    base = -(-raw // align) * align
    if base > raw:
        _munmap(raw, base - raw)
    tail = raw + align - base
    if tail:
        _munmap(base + nbytes, tail)
    return base


def release_addresses(address: int, nbytes: int) -> None:
    """Give a reservation back, and unmap everything in it."""
    _munmap(address, nbytes)


def map_file(address: int, nbytes: int, fd: int, offset: int) -> None:
    """Map a part of a file, shared and writable, over reserved addresses.

    The call fills the page tables: a prefix is read whole as soon as it is mapped, and populating costs a quarter of
    the faults that it saves.
    """
    flags = mmap.MAP_SHARED | _MAP_FIXED | mmap.MAP_POPULATE
    _mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)


def unmap_to_reserved(address: int, nbytes: int) -> None:
    """Replace mappings by a reservation: the addresses stay taken and fault when touched."""
    _mmap(address, nbytes, _PROT_NONE, _HOLE | _MAP_FIXED, -1, 0)


def punch_hole(fd: int, offset: int, nbytes: int) -> None:
    """Give the memory behind a part of a file back to the system. Raises DeviceError."""
    if _libc.fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, nbytes) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise DeviceError(
            f"the system did not take back {nbytes} bytes at {offset} of a memory file ({reason}); they stay allocated "
            "until they are given back again, or the process ends"
        )


def advise_huge_pages(address: int, nbytes: int) -> None:
    """Request huge pages for shared memory if the system gives them on request ("advise"); otherwise do nothing."""
    try:
        if "[advise]" not in _SHMEM_ENABLED.read_text():
            return
    except OSError:  # a kernel without transparent huge pages
        return
    _libc.madvise(address, nbytes, mmap.MADV_HUGEPAGE)


def available_bytes() -> int:
    """Bytes that can be allocated before the kernel kills a process: the system's, or the control group's if less.

    A memory file of the kernel has no size limit of its own, so check this before allocating.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    kilobytes = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    if kilobytes is None:
        raise OSError(errno.ENOENT, "/proc/meminfo names no MemAvailable; Linux 3.14 or newer is needed")
    available = kilobytes * 1024
    limit = cgroup_limit()
    return available if limit is None else min(available, max(0, limit.nbytes - limit.used_bytes))


def _mmap(address: int, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    mapped = _libc.mmap(address or None, nbytes, protection, flags, fd, offset)
    if mapped != _FAILED:
        return int(mapped)
    raise _mapping_error(ctypes.get_errno(), nbytes)


def _munmap(address: int, nbytes: int) -> None:
    if _libc.munmap(address, nbytes) != 0:
        raise _mapping_error(ctypes.get_errno(), nbytes)


def _mapping_error(number: int, nbytes: int) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"mapping {nbytes} bytes failed ({os.strerror(number)}): the process has too many mappings (sysctl "
        "vm.max_map_count) or no addresses left (ulimit -v); raise that limit, or use larger chunks"
    )
