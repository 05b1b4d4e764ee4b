"""The errors of memory and storage. Every message names the value and the remedy."""

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
    """`VirtualMemory.stop_creating` ended the creation of chunks."""


class DeviceError(SwapError):
    """The driver (for host memory: the system) refused a call, or the device lacks a feature that is needed."""


class DirectoryInUseError(SwapError):
    """Another process holds the data directory."""


class StorageError(SwapError):
    """A call of the disk tier failed (permission, I/O, read-only file system)."""


class DiskFullError(StorageError):
    """The file system has no room for another slab or index page."""


class FormatError(StorageError):
    """The data directory holds files of another version, or files that are not prefixd's."""


class ShrinkError(StorageError):
    """The capacity is below the bytes of slabs with blocks, and the caller does not allow deleting them."""


class EncodingError(StorageError):
    """Encoded bytes cannot be decoded: no codec of this version has written them."""


class UnavailableCodecError(StorageError):
    """No codec has this name, or a package that it needs is not installed."""


class CodecShortageError(UnavailableCodecError):
    """The system has no descriptors or memory to load a codec, or had none in the middle of it."""


class ChecksumError(StorageError):
    """Bytes read from disk are not the bytes that were written."""


class MissingKeyError(StorageError):
    """Bytes are encrypted with a key that was not given. They are good, and can be read with it."""


class KeyFileError(SwapError):
    """The content of a key file is not a list of keys."""


class MissingDriveError(StorageError):
    """A directory that has some of a store's blocks is not there; the store can be opened without them."""


class LostBytesError(StorageError):
    """The file that had the bytes is gone or too short; retrying the read does not help."""


class RecordDamagedError(StorageError):
    """The index's record of a block is damaged; other blocks' records may be good."""


class IndexUnavailableError(StorageError):
    """The index cannot be read now, so the state of every block is unknown; `SlabStore.revive` opens it again."""


class RemoteStoreError(StorageError):
    """A store on another machine cannot be reached, refuses, or has not answered in time."""


class RemoteFullError(RemoteStoreError):
    """A store on another machine has no room."""


class BadObjectError(StorageError):
    """An object of a shared store must not be used; it counts as missing."""

    kind: str
    """The name in counters and metrics."""


class ForeignObjectError(BadObjectError):
    """The object under a block's name is another block's, or was not written by prefixd."""

    kind = "foreign"


class StaleObjectError(BadObjectError):
    """The object has another version or another way of sealing."""

    kind = "old"


class AlteredObjectError(BadObjectError):
    """The object's bytes are not the bytes that were sealed."""

    kind = "altered"


class UnknownPolicyError(SwapError):
    """No policy has this name."""


class TransferError(SwapError):
    """Memory could not be passed to another process, or attached from one."""


class IntegrityError(SwapError):
    """The accounting contradicts itself: a bug in this package, reported with the numbers that disagree."""


class TransferDroppedError(SwapError):
    """A transfer was cancelled before all of its pieces had started."""
