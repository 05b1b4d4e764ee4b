"""The disk tier: blocks in slab files, durable before they are visible, verified when they are read.

A block's bytes are written and synced, then one index transaction names them; a removed block's slots become free only
after the index durably no longer names them. So after a crash at any point every record points at complete bytes, and
slots without a record are free.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from prefixd_swap.codecs.coded_part import CodedPart
from prefixd_swap.errors import (
    RecordDamagedError,
    StorageError,
)
from prefixd_swap.pages.page_eviction import Allow, Victims, Worths
from prefixd_swap.sealing.rest_keys import RestKey, RestKeys
from prefixd_swap.sealing.sealed_objects import sealed_key
from prefixd_swap.slab.changes import StoreChanges
from prefixd_swap.slab.data_directory import DataDirectory
from prefixd_swap.slab.files.file_ops import FileOps
from prefixd_swap.slab.files.io import DiskIo
from prefixd_swap.slab.files.slab_files import SlabFiles
from prefixd_swap.slab.group_commit import Commit
from prefixd_swap.slab.index.block_record import (
    NAMESPACE_BYTES,
    BlockRecord,
    DiskPart,
    NewBlock,
    decode_record,
    index_key,
    without_parts,
)
from prefixd_swap.slab.index.namespace_specs import NamespaceSpecs, stored_spec
from prefixd_swap.slab.index.record_columns import Bools, Encryption, IndexTable, Int64s, Records
from prefixd_swap.slab.index.recovery import Recovery, prefix_closed, reconcile
from prefixd_swap.slab.index.rows import Change, IndexDamagedError
from prefixd_swap.slab.index.set_aside import SetAside, list_set_aside
from prefixd_swap.slab.part_decoder import PartDecoder
from prefixd_swap.slab.reader import PartRead, SlabReader
from prefixd_swap.slab.verification import Verification
from prefixd_swap.slab.writer import SlabWriter
from prefixd_swap.slots import round_to_slot
from prefixd_swap.spans import Span

if TYPE_CHECKING:
    from prefixd_swap.slab.index.index import SlabIndex

_ADOPTED_AT_ONCE = 4096
_REMOVED_AT_ONCE = 4096


class SlabStore:
    """Blocks in one directory. Calls block the thread; any thread may call, and concurrent writers share commits."""

    def __init__(
        self,
        directory: DataDirectory,
        index: SlabIndex,
        slabs: SlabFiles,
        recovery: Recovery,
        recovered: Records,
        io_threads: int,
        keys: RestKeys,
    ) -> None:
        """For `open`."""
        self.keys = keys
        """Encrypt and decrypt blocks."""
        self.recovery = recovery
        self._recovered: Records | None = recovered  # until `load`
        self._directory = directory
        self._index = index
        self._specs = NamespaceSpecs(index, keys)
        self._slabs = slabs
        self._reader = SlabReader(slabs, PartDecoder(keys))
        self._changed = threading.Condition()  # guards the slabs
        self._writer = SlabWriter(slabs, self._changed, io_threads)
        self._changes = StoreChanges(directory.path, index, slabs, self._changed, self._writer.sync)
        verification = Verification(index, slabs, self._changes, keys)
        self._used_keys: set[int] = set()  # that the index has noted
        self._used_codecs: set[int] = set()
        self.check = verification.check_block
        self.audit = verification.audit_index

    @classmethod
    def open(
        cls,
        path: Path,
        capacity_bytes: int,
        *,
        slab_bytes: int | None = None,
        io: DiskIo = "direct",
        io_threads: int = 4,
        ops: FileOps | None = None,
        shrink: bool = True,
        more_paths: Sequence[Path] = (),
        drop_missing: bool = False,
        keys: RestKeys | None = None,
    ) -> Self:
        """Open or create the store in `path`, and drop blocks that a crash or a lost file has made unusable.

        A damaged index is set aside, and its readable records are entered into a new one, see `recovery`.

        Args:
            path: a directory that is empty, absent or a store's.
            capacity_bytes: the most bytes of all slab files. Lowering it drops the newest slabs.
            slab_bytes: size of a slab file where the capacity is large enough for several; by default 64 MiB, or a size
                that limits the files to a few hundred.
            io: how slabs are read and written. If the file system or the kernel does not support it, the page cache is
                used and logged. `benchmarks.disk` compares the ways.
            io_threads: parts that one `write` writes at a time.
            ops: file calls, for tests that inject faults.
            shrink: whether slabs with blocks may be deleted to meet a lowered capacity.
            more_paths: further directories for slabs, each on a drive of its own; every prefix is spread over all.
            drop_missing: open without further directories that are gone, and drop their blocks.
            keys: encrypt and decrypt blocks; by default there are none.

        Raises:
            ShrinkError: slabs with blocks would be deleted, and `shrink` is false; nothing has changed.
            MissingDriveError: a further directory is gone, and `drop_missing` is false; nothing has changed.
            MissingKeyError: blocks are encrypted with other keys; nothing has changed.
            UnavailableCodecError: blocks are stored by a codec that is not there; nothing has changed.
            DirectoryInUseError: another store holds the directory.
            FormatError: the directory has files of another version.
            StorageError: it cannot be made, read or written.
        """
        from prefixd_swap.slab.opening import open_parts  # LMDB: engines, which import this package, have none

        keys = RestKeys() if keys is None else keys
        opened = open_parts(
            path,
            capacity_bytes,
            slab_bytes,
            io,
            ops or FileOps(),
            shrink=shrink,
            more_paths=more_paths,
            drop_missing=drop_missing,
            keys=keys,
        )
        return cls(*opened, io_threads, keys)

    @property
    def capacity_bytes(self) -> int:
        """The most bytes of all slab files."""
        return self._slabs.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of allocated slots, including those being written or removed."""
        return self._slabs.used_bytes

    @property
    def io(self) -> DiskIo:
        """How slabs are read and written."""
        return self._slabs.io

    @property
    def page_bytes(self) -> int:
        """Current bytes of a page, the unit in which space moves between slot sizes."""
        return self._slabs.page_bytes

    @property
    def commits(self) -> int:
        """Durable transactions so far; concurrent calls share one."""
        return self._changes.commits.batches

    @property
    def waiting(self) -> int:
        """Calls that wait for the transaction under way, to share the next."""
        return self._changes.commits.waiting

    def room(self, nbytes: int) -> int:
        """Number of parts of `nbytes` bytes each that could be written now."""
        with self._changed:
            return self._slabs.room(nbytes)

    def free_bytes(self, nbytes: int) -> int:
        """Bytes left for parts of `nbytes` bytes each, in whole slots."""
        return self.room(nbytes) * round_to_slot(nbytes)

    def write(self, blocks: Sequence[NewBlock]) -> list[BlockRecord | None]:
        """Store blocks durably; returns their records, None for blocks without room.

        A stored block is replaced: it keeps parts that are given as its own `DiskPart` and loses all others. No key may
        be in two calls at once or twice in one.

        Raises:
            DiskFullError: the file system is full although the capacity is not reached; nothing was stored.
            StorageError: I/O failed, or a block is malformed or does not have a part that is to be kept; nothing was
                stored.
        """
        if len({(block.namespace, block.key) for block in blocks}) != len(blocks):
            raise StorageError("a block is given twice in one write; give each key once")
        for block in blocks:
            block.check()
        with self._changes.operation():
            if any(isinstance(part, CodedPart) or block.errors for block in blocks for part in block.parts):
                self._directory.allow_coded()
            self._note_keys(key for block in blocks if (key := block.encryption) is not None)
            self._note_codecs(part.codec for block in blocks for part in block.parts if isinstance(part, CodedPart))
            blocks = self._with_kept_parts(blocks)
            slots = self._writer.take(blocks)
            try:
                records, commit = self._writer.write(blocks, slots)
                if commit.changes:
                    self._changes.commits.run(commit)
                return records
            except Exception:
                self._writer.free([slot for taken in slots if taken for slot in taken if slot is not None])
                raise

    def remove(self, ids: Sequence[tuple[bytes, bytes]], *, damaged: bool = False) -> None:
        """Remove blocks by (namespace, key), children before parents; unknown ones are ignored.

        When this returns the removal is durable and the slots are free.

        Args:
            ids: which blocks.
            damaged: their records are damaged and may name other blocks' slots: no slot is freed now. Slots that then
                have no record are freed by `revive`, or when the store is opened again.

        Raises:
            StorageError: I/O failed; the blocks are still there.
        """
        with self._changes.operation():
            self._changes.commits.run(Commit([(index_key(*block_id), None) for block_id in ids], damaged=damaged))

    def drop_parts(self, items: Sequence[tuple[bytes, bytes, Collection[int]]]) -> None:
        """Remove parts, by number, of blocks by (namespace, key); the records stay, see `NewBlock.parts`.

        Blocks and parts that are unknown are ignored. When this returns the removal is durable and the slots are free.

        Raises:
            StorageError: I/O failed; the parts are still there.
        """
        with self._changes.operation():
            changes: list[Change] = [
                (index_key(namespace, key), partial(_drop, parts=parts)) for namespace, key, parts in items
            ]
            self._changes.commits.run(Commit(changes))

    def choose_victims(
        self,
        nbytes: int,
        count: int,
        slots: Int64s,
        worth: Worths,
        evictable: Bools | None = None,
        allow: Allow | None = None,
        *,
        mixed: bool = False,
    ) -> Victims:
        """Choose slots to evict so that `count` more parts of `nbytes` bytes each have room.

        Chooses those of least worth, see `page_eviction.choose_victims` and `mixed_eviction.choose_mixed_victims`.

        Args:
            slots: int64 [n], slots of parts that are stored, each once.
            worth: float64 [n], finite; the lowest is evicted first.
            evictable: bool [n], which may be evicted; all by default.
            allow: see `page_eviction.Allow`.
            mixed: of blocks of which parts are coded (`NewBlock.mixed`).

        Raises:
            MemoryMisuseError: `nbytes` is not positive, or a slot does not exist.
        """
        with self._changed:
            return self._slabs.choose_victims(nbytes, count, slots, worth, evictable, allow, mixed=mixed)

    def read(self, part: DiskPart, into: Span) -> None:
        """Copy what is stored of a part to the start of `into`, coded if it is, and verify it there.

        Raises:
            ChecksumError: the bytes are damaged; `into` holds garbage.
            StorageError: I/O failed, or `into` is too short or not in host memory.
        """
        self._reader.read(part, into)

    def read_all(
        self,
        parts: Sequence[DiskPart],
        addresses: Sequence[int],
        nbytes: int,
        identities: Sequence[bytes] | None = None,
    ) -> list[PartRead]:
        """Read n parts of which each has `nbytes` bytes, decode those that are coded, and verify all of them there.

        Args:
            parts: n; small ones in adjacent slots are read together.
            addresses: n, where the bytes go, in host memory.
            nbytes: bytes of each, decoded.
            identities: n, see `part_identity`; needed for parts that are encrypted.

        Returns:
            Of each part its error, what was decoded, or None for a raw part that is good.
        """
        return self._reader.read_all(parts, addresses, nbytes, identities)

    @property
    def shrunk(self) -> bool:
        """Whether the file system has refused a slab and has not gained room for one since."""
        with self._changed:
            return self._slabs.disk_is_full()

    def try_commit(self) -> None:
        """Check that the index accepts changes.

        Raises:
            StorageError: it does not.
        """
        with self._changes.operation():
            self._index.probe()

    def lost_slots(self) -> Int64s:
        """Slots whose file was deleted or cut off while in use. Such files get no new blocks.

        Raises:
            StorageError: a file cannot be inspected.
        """
        with self._changed:
            return self._slabs.lost_slots()

    def try_read(self) -> None:
        """Check that the device can be read.

        Raises:
            StorageError: it cannot.
        """
        self._directory.try_read(self._slabs.io)

    def revive(self, known: Int64s) -> Int64s:
        """Check that the disk accepts writes again, and clean up after failed ones.

        Opens the index again if a commit's outcome is unknown, or replaces it by an empty one if it is damaged. Removes
        records with slots that the caller does not know: they were being written or removed when the disk failed. Frees
        slots without a record, and uses slabs again whose sync failed.

        Args:
            known: all slots of blocks that the caller considers stored. It must not write or remove meanwhile.

        Returns:
            Those of `known` that the index does not name: the bytes are lost.

        Raises:
            StorageError: the disk still fails; try again later.
        """
        with self._changes.alone():
            self._directory.try_write()
            if self._changes.unsure:
                self._index.reopen()
            self._index.probe()
            try:
                return self._reconcile(known)
            except IndexDamagedError as error:
                self._index.replace(str(error))
                return self._reconcile(known)

    def _reconcile(self, known: Int64s) -> Int64s:
        stored, unknown = reconcile(self._table(), self._slabs, known)
        if unknown:
            self._index.apply([(key, None) for key in unknown])
        with self._changed:
            self._slabs.reclaim(*stored)
            self._changes.orphaned = False
        self._changes.commits.resume()
        return np.setdiff1d(known, stored[0])

    def adopt(
        self,
        rows: Sequence[tuple[bytes, bytes]],
        namespaces: Mapping[bytes, bytes],
        pins: Sequence[bytes],
        used_keys: Collection[int] = (),
        used_codecs: Collection[int] = (),
    ) -> None:
        """Enter blocks that `salvage` has found in free slots. The caller must not write meanwhile.

        Args:
            rows: index key and value of each, parents first.
            namespaces: encoded specs by id; existing ones are kept.
            pins: index keys of pinned blocks.
            used_keys: ids of keys that may encrypt them.
            used_codecs: numbers of codecs that may have made them smaller.

        Raises:
            StorageError: I/O failed; some blocks may have been entered.
        """
        with self._changes.operation():
            if used_keys or used_codecs:
                self._directory.allow_coded()
            self._index.add_used_keys(used_keys)
            self._index.add_used_codecs(used_codecs)
            known = self._index.namespaces()
            self._index.put_namespaces({each: spec for each, spec in namespaces.items() if each not in known})
            for start in range(0, len(rows), _ADOPTED_AT_ONCE):
                self._index.apply(rows[start : start + _ADOPTED_AT_ONCE])
            self._index.pin(pins, True)
        self.revive(self._table().slots())

    def set_aside(self) -> list[SetAside]:
        """Indexes of this directory that were set aside and neither brought back nor discarded.

        Raises:
            StorageError: the directory cannot be read.
        """
        return list_set_aside(self._directory.index)

    def remove_unusable(self, ids: Sequence[tuple[bytes, bytes]], reason: str) -> None:
        """As `remove`, for unusable blocks; a copy of the index before it is set aside, for `reason`.

        Raises:
            StorageError: the copy cannot be made, or I/O failed. Some blocks may be removed; the copy's note counts
                those, and without any there is no copy.
        """
        aside, removed = self._index.set_copy_aside(reason, len(ids)), 0
        try:
            while some := ids[removed : removed + _REMOVED_AT_ONCE]:
                self.remove(some)
                removed += len(some)
        except StorageError:
            self._index.correct_copy(aside, reason, removed)
            raise

    def load(self) -> Records:
        """All blocks as of now, in columns: a million in about a second.

        Leaves out blocks whose parent was removed first. The first call before a change returns the records that `open`
        has read.

        Raises:
            StorageError: the index cannot be read.
        """
        with self._changed:
            recovered, self._recovered = self._recovered, None
        if recovered is not None and not self._changes.begun:
            return recovered
        table = self._table()
        if missing := table.missing_keys():
            self.keys.find(missing[0])
        parent = table.link()
        return table.records(prefix_closed(table.depth, parent, table.readable), parent)

    def used_codecs(self) -> list[int]:
        """Numbers of the codecs that have made blocks smaller.

        Raises:
            StorageError: the index cannot be read.
        """
        return self._index.used_codecs()

    def encryption(self) -> Encryption:
        """Which keys encrypt the blocks.

        Raises:
            StorageError: the index cannot be read.
        """
        found = self._table().encryption
        found.namespaces.update(sealed_key(spec) for spec in self._index.namespaces().values())
        return found

    def records(self) -> Iterator[BlockRecord]:
        """All blocks as of now, parents before children; use `load` for many.

        Raises:
            RecordDamagedError: one of the records is damaged.
            StorageError: the index cannot be read.
        """
        records = [decode_record(key, value, self.keys) for chunk in self._index.chunks() for key, value in chunk]
        yield from sorted(records, key=lambda record: record.depth)

    def put_namespace(self, namespace: bytes, spec: bytes, encryption: RestKey | None = None) -> None:
        """Store a namespace's encoded spec durably, encrypted if there is a key.

        Raises:
            StorageError: I/O failed.
        """
        with self._changes.operation():
            if encryption is not None:
                self._note_keys([encryption])
            self._index.put_namespaces({namespace: stored_spec(namespace, spec, encryption)})

    def remove_namespaces(self, namespaces: Iterable[bytes]) -> None:
        """Remove namespaces durably; unknown ones are ignored.

        Raises:
            StorageError: I/O failed.
        """
        with self._changes.operation():
            self._index.remove_namespaces(namespaces)

    def namespaces(self) -> dict[bytes, bytes]:
        """All namespaces: encoded specs by id. Without those that cannot be decrypted."""
        return self._specs.read()

    def reseal_namespaces(self, encryption: Mapping[bytes, RestKey | None]) -> None:
        """Encrypt the specs of namespaces with other keys, None: store them in clear; those that are so stay.

        Raises:
            StorageError: I/O failed; nothing was changed.
        """
        changed = self._specs.changed(encryption)
        if changed:
            with self._changes.operation():
                self._note_keys(key for key in encryption.values() if key is not None)
                self._index.put_namespaces(changed)

    def open_spec(self, namespace: bytes, stored: bytes) -> bytes | None:
        """A namespace's encoded spec as the index has it, decrypted; None if it cannot be, which is logged."""
        return self._specs.open(namespace, stored)

    def pin(self, ids: Sequence[tuple[bytes, bytes]], pinned: bool) -> int:
        """Pin or unpin blocks, by (namespace, key); durable when this returns.

        A pin is removed with its block, and kept when the block is written again.

        Returns:
            The number of them that are stored; others are ignored.

        Raises:
            StorageError: I/O failed; nothing was changed.
        """
        with self._changes.operation():
            return self._index.pin([index_key(*block_id) for block_id in ids], pinned)

    def pins(self) -> list[tuple[bytes, bytes]]:
        """Namespace and key of every pinned block."""
        return [(name[:NAMESPACE_BYTES], name[NAMESPACE_BYTES:]) for name in self._index.pins()]

    def check_integrity(self) -> None:
        """Check that each allocated slot belongs to one record, a write or removal under way, or a damaged record.

        Raises:
            IntegrityError: one does not.
        """
        self.audit()

    def close(self) -> None:
        """Wait for writes and removals under way, then release the directory. Reads must not follow."""
        with self._changed:
            if not self._changes.close():
                return
            self._writer.close()
            self._index.close()
            self._slabs.close()
            self._directory.close()

    def _table(self) -> IndexTable:
        return IndexTable(self._index.chunks(), self.keys, self._index.used_keys())

    def _note_keys(self, keys: Iterable[RestKey]) -> None:
        """Note in the index which keys encrypt blocks: a record with another one is damaged."""
        if new := {key.id for key in keys} - self._used_keys:
            self._directory.allow_coded()
            self._index.add_used_keys(new)
            self._used_keys |= new

    def _note_codecs(self, numbers: Iterable[int]) -> None:
        """Note in the index which codecs decode blocks: a start without one of them is refused."""
        if new := set(numbers) - self._used_codecs - {0}:
            self._index.add_used_codecs(new)
            self._used_codecs |= new

    def _with_kept_parts(self, blocks: Sequence[NewBlock]) -> list[NewBlock]:
        """The blocks with the parts to keep as they are in the index.

        Refuses to keep parts that the blocks do not have: their slots may belong to other blocks now.
        """
        complete = []
        for block in blocks:
            kept = [(at, part) for at, part in enumerate(block.parts) if isinstance(part, DiskPart)]
            if not kept:
                complete.append(block)
                continue
            value = self._index.get(name := index_key(block.namespace, block.key))
            found = () if value is None else decode_record(name, value, self.keys).parts
            parts = list(block.parts)
            for at, part in kept:
                if at >= len(found) or found[at] != part:
                    raise StorageError(
                        f"part {at} of block {block.key.hex()} is to be kept as {part}, but the block does not have "
                        "it; write the part again"
                    )
                parts[at] = found[at]
            complete.append(replace(block, parts=parts))
        return complete


def _drop(value: bytes, parts: Collection[int]) -> bytes:
    """The record without these parts; a damaged one unchanged, for the scrubber to find."""
    try:
        return without_parts(value, parts)
    except RecordDamagedError:
        return value
