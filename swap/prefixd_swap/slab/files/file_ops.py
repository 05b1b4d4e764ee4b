"""The file calls of the disk tier, in one place so that a test can make any of them fail."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

from prefixd_swap.errors import DiskFullError, StorageError
from prefixd_swap.spans import Span

if TYPE_CHECKING:
    import lmdb

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class _IoVec(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)  # its functions run without the GIL
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.POINTER(_IoVec),
    ctypes.c_ulong,
    ctypes.POINTER(_IoVec),
    ctypes.c_ulong,
    ctypes.c_ulong,
)
_MAP_FAILED = ctypes.c_void_p(-1).value


class FileOps:
    """The real calls, each raising OSError. Override one to inject a fault or to record what was synced."""

    def open(self, path: Path, flags: int) -> int:
        """Descriptor of the file, readable by its owner only."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def mkdir(self, path: Path) -> None:
        """Make a directory for its owner only, with its parents, unless it is there."""
        path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def rename(self, old: Path, new: Path) -> None:
        """Give `old` another name; a file that had this name is replaced."""
        old.rename(new)

    def fallocate(self, fd: int, nbytes: int) -> None:
        """Give the file `nbytes` of disk space, so that no later write into it can lack room."""
        os.posix_fallocate(fd, 0, nbytes)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Read into `buffer`; the number of bytes read, 0 at the end of the file."""
        return os.preadv(fd, [buffer], offset)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Write `buffer`; the number of bytes written."""
        return os.pwrite(fd, buffer, offset)

    def map(self, fd: int, nbytes: int) -> int:
        """Address of a read-only mapping of the file's first `nbytes` bytes, shared with writers of the file.

        Faults on pages that `read_ahead` has not requested read ahead sequentially (MADV_SEQUENTIAL): the kernel cuts
        its requests to the device's largest.
        """
        address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address is None or address == _MAP_FAILED:
            raise _last_error()
        if _libc.madvise(address, nbytes, mmap.MADV_SEQUENTIAL):
            error = _last_error()
            self.unmap(address, nbytes)
            raise error
        return int(address)

    def unmap(self, address: int, nbytes: int) -> None:
        """End a mapping; no thread may be reading it."""
        if _libc.munmap(address, nbytes):
            raise _last_error()

    def read_ahead(self, address: int, nbytes: int) -> None:
        """Have the device read exactly these pages of a mapping, without waiting for it.

        A hint, which the kernel may refuse. Without it each fault reads the device's read-ahead, up to 8 MiB for a slot
        of 64 KiB.
        """
        _libc.madvise(address, nbytes, mmap.MADV_WILLNEED)

    def copy_mapped(self, address: int, buffer: memoryview) -> int:
        """Copy from a mapping into `buffer`; the number of bytes copied, at least one.

        Raises OSError with EFAULT where a touch of the mapping would raise SIGBUS.
        """
        local = _IoVec(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer))
        remote = _IoVec(address, len(buffer))
        copied = int(_libc.process_vm_readv(os.getpid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0))
        if copied < 0:
            raise _last_error()
        if not copied:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        return copied

    def unmap_pages(self, address: int, nbytes: int) -> None:
        """Take pages of a mapping out of this process's memory; they stay in the page cache."""
        if _libc.madvise(address, nbytes, mmap.MADV_DONTNEED):
            raise _last_error()

    def drop_cached(self, fd: int, offset: int, nbytes: int) -> None:
        """Drop a range of the file from the page cache: its pages that are clean and not mapped."""
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def fdatasync(self, fd: int) -> None:
        """Return when the file's data, and the metadata needed to find it, are on the disk."""
        os.fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        """Return when the directory's entries are on the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: Path) -> None:
        """Remove the file's name."""
        path.unlink()

    def commit(self, transaction: lmdb.Transaction[bytes]) -> None:
        """Commit an index transaction durably. LMDB does the writing; unlike the rest this raises lmdb.Error."""
        transaction.commit()

    def free_bytes(self, path: Path) -> int:
        """Bytes that the file system of `path` has left for this user."""
        stat = os.statvfs(path)
        return stat.f_bavail * stat.f_frsize


def host_bytes(span: Span, nbytes: int) -> memoryview:
    """The first `nbytes` bytes of a span in host memory, writable, without a copy.

    Raises:
        StorageError: the span is on a GPU or too short.
    """
    if span.on_device or not 0 < nbytes <= span.nbytes:
        where = "on a GPU" if span.on_device else "in host memory"
        raise StorageError(
            f"{nbytes} bytes cannot move between disk and a span of {span.nbytes} bytes {where}; "
            "give a host span that is long enough"
        )
    return memoryview((ctypes.c_char * nbytes).from_address(span.address)).cast("B")


def storage_error(doing: str, error: OSError) -> StorageError:
    """`error` as a StorageError with a remedy; `doing` names the action and the file."""
    if error.errno in _NO_ROOM:
        return DiskFullError(f"{error.strerror} while {doing}; free space or lower the disk capacity")
    remedy = {
        errno.EACCES: "give this user the right to read and write there",
        errno.EPERM: "give this user the right to read and write there",
        errno.EROFS: "the file system is read-only: remount it or choose another directory",
        errno.EIO: "the device failed: look at the kernel log",
        errno.EMFILE: "raise this process's limit of open files (ulimit -n, LimitNOFILE=)",
        errno.ENFILE: "raise the system's limit of open files (fs.file-max)",
        errno.ENOMEM: "free memory or raise this process's limits (ulimit -v, vm.max_map_count)",
    }.get(error.errno or 0, "check the directory and its file system")
    return StorageError(f"{error.strerror or error} while {doing}; {remedy}")


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
