"""What can go wrong in memory and storage. Every message names the value and the remedy."""

from __future__ import annotations


class SwapError(Exception):
    """Base of every error this package raises on purpose."""


class GeometryError(SwapError):
    """A KV geometry that cannot be stored in the chunks it was given."""


class MemoryMisuseError(SwapError):
    """A call that breaks the contract of virtual memory (mapped twice, unaligned, unknown chunk)."""


class OutOfMemoryError(SwapError):
    """Physical memory, address space or mappings are used up."""


class CreationStoppedError(SwapError):
    """Chunks were being created, and `VirtualMemory.stop_creating` was called."""


class DeviceError(SwapError):
    """The driver, or the system for host memory, refused a call, or the device lacks something that is needed."""


class DirectoryInUseError(SwapError):
    """Another process holds the data directory."""


class StorageError(SwapError):
    """The disk tier could not do what was asked (permission, I/O, read-only file system)."""


class DiskFullError(StorageError):
    """The file system has no room for another slab or index page."""


class FormatError(StorageError):
    """The data directory holds another version's, or nobody's, files."""


class ShrinkError(StorageError):
    """The capacity is below what slabs with blocks take, and nobody has said that they may be deleted."""


class ChecksumError(StorageError):
    """Bytes read from disk are not the bytes that were written."""


class LostBytesError(StorageError):
    """The file that had the bytes is gone or too short; reading again will not help."""


class RecordDamagedError(StorageError):
    """The index's record of a block is not one that was written; other blocks' records may be good."""


class IndexUnavailableError(StorageError):
    """The index cannot be read now, so nothing is known about any block; `SlabStore.revive` opens it again."""


class RemoteStoreError(StorageError):
    """A store on another machine is away, refuses, or has not answered in time."""


class RemoteFullError(RemoteStoreError):
    """A store on another machine has no room."""


class BadObjectError(StorageError):
    """An object of a shared store that may not be used; it counts as missing."""

    kind: str
    """In counters and metrics."""


class ForeignObjectError(BadObjectError):
    """Somebody else's object, or another block's, lies under a block's name."""

    kind = "foreign"


class StaleObjectError(BadObjectError):
    """An object of another version or another way of sealing."""

    kind = "old"


class AlteredObjectError(BadObjectError):
    """An object whose bytes are not those that were sealed."""

    kind = "altered"


class UnknownPolicyError(SwapError):
    """A policy name that does not exist."""


class TransferError(SwapError):
    """Memory could not be handed to, or taken over from, another process."""


class IntegrityError(SwapError):
    """Accounting that contradicts itself: a bug in this package, reported with the numbers that disagree."""


class TransferDroppedError(SwapError):
    """A transfer was cancelled before all of its pieces had started."""
