"""Opens the parts of a store, and recovers from a crash, a lost file or a damaged index."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from prefixd_swap.codecs.registry import CODECS, NAMES, find_codec
from prefixd_swap.errors import MissingKeyError, StorageError, UnavailableCodecError
from prefixd_swap.sealing.rest_keys import RestKeys, key_name
from prefixd_swap.sealing.sealed_objects import sealed_key
from prefixd_swap.slab.data_directory import DataDirectory
from prefixd_swap.slab.files.file_ops import FileOps, storage_error
from prefixd_swap.slab.files.io import DiskIo
from prefixd_swap.slab.files.slab_file import MAX_NUMBER
from prefixd_swap.slab.files.slab_files import SlabFiles
from prefixd_swap.slab.index.bring_back import bring_back
from prefixd_swap.slab.index.index import SlabIndex
from prefixd_swap.slab.index.record_columns import IndexTable, Records
from prefixd_swap.slab.index.recovery import Recovery, recover, slabs_named
from prefixd_swap.slab.index.rows import IndexDamagedError
from prefixd_swap.slab.index.set_aside import list_set_aside, note_rest, set_copy_aside

log = logging.getLogger(__name__)


def open_parts(
    path: Path,
    capacity_bytes: int,
    slab_bytes: int | None,
    io: DiskIo,
    ops: FileOps,
    *,
    shrink: bool,
    more_paths: Sequence[Path],
    drop_missing: bool,
    keys: RestKeys,
) -> tuple[DataDirectory, SlabIndex, SlabFiles, Recovery, Records]:
    """The parts of a store and the recovered blocks; arguments and errors as `SlabStore.open`."""
    with ExitStack() as undo:
        directory = DataDirectory(path, ops, more_paths, drop_missing=drop_missing)
        undo.callback(directory.close)
        _note_absent(directory, ops)
        index = SlabIndex(directory.index, ops)
        undo.callback(index.close)
        io = directory.usable_io(io)
        table = _read_index(index, ops, keys)
        _refuse_missing_keys(table, index.namespaces(), keys, path)
        if table.has_coded:
            _refuse_missing_codecs(index.used_codecs(), path)
        # Blocks of an index that was set aside may be brought back, and any slab may hold them.
        holding = range(MAX_NUMBER + 1) if list_set_aside(directory.index) else slabs_named(table)
        slabs = SlabFiles(directory.slabs, capacity_bytes, ops, slab_bytes, io, holding=holding, shrink=shrink)
        recovery, recovered, dropped = recover(table, slabs, index.damage)
        if dropped and None in index.apply([(key, None) for key in dropped]):
            index.replace("it does not find what it has")
            table = _bring_back(index, ops, keys)
            slabs = SlabFiles(directory.slabs, capacity_bytes, ops, slab_bytes, io)
            recovery, recovered, dropped = recover(table, slabs, index.damage)
            index.apply([(key, None) for key in dropped])
        if dropped:
            log.warning("%s: blocks are dropped: %s", path, recovery.losses())
        if index.aside is not None:
            note_rest(index.aside, ops, index.damage, recovery.kept)
        undo.pop_all()
    return directory, index, slabs, recovery, recovered


def _note_absent(directory: DataDirectory, ops: FileOps) -> None:
    """Reports lost blocks if the index is gone and slabs are there: without the index their blocks are unknown."""
    try:
        if (directory.index / "data.mdb").exists():
            return
        slabs = [path for folder in directory.slabs for path in folder.glob("*.slab") if path.stat().st_size]
        if slabs and not list_set_aside(directory.index):  # else a crash interrupted its replacement
            reason = f"the index is gone, and {len(slabs)} slab files are there"
            set_copy_aside(directory.index, ops, reason, None)
    except OSError as error:
        raise storage_error(f"looking for the index in {directory.index}", error) from error


def _refuse_missing_keys(table: IndexTable, specs: Mapping[bytes, bytes], keys: RestKeys, path: Path) -> None:
    """Raise MissingKeyError if blocks, or namespaces that have blocks, are encrypted with other keys."""
    of_specs = {namespace: key_id for namespace, spec in specs.items() if (key_id := sealed_key(spec))}
    lacking = set(keys.missing(of_specs.values()))
    lacking = {key_id for namespace, key_id in of_specs.items() if key_id in lacking and table.has(namespace)}
    if missing := sorted({*table.missing_keys(), *lacking}):
        names = ", ".join(map(key_name, missing))
        raise MissingKeyError(
            f"blocks are encrypted with keys that no key file has ({names}); put each of these keys back into a key "
            f"file, as a line after the first; if one is lost, so are its blocks: delete {path} to start with an empty "
            "cache"
        )


def _refuse_missing_codecs(numbers: Iterable[int], path: Path) -> None:
    """Raise UnavailableCodecError if blocks are stored by codecs that cannot be used here."""
    for number in numbers:
        if number not in NAMES:
            raise UnavailableCodecError(
                f"blocks are stored by codec number {number}, of a newer prefixd than this one, which has "
                f"{', '.join(CODECS)}; upgrade prefixd, choose another directory, or delete {path} to start with an "
                "empty cache"
            )
        try:
            find_codec(number)
        except UnavailableCodecError as error:
            raise UnavailableCodecError(
                f"blocks are stored by a codec: {error}, or delete {path} to start with an empty cache"
            ) from error


def _read_index(index: SlabIndex, ops: FileOps, keys: RestKeys) -> IndexTable:
    try:
        if index.aside is None:
            table = IndexTable(index.packed(), keys, index.used_keys())
            if table.in_order:
                return table
            raise IndexDamagedError("its keys are out of order")
    except IndexDamagedError as error:
        index.replace(str(error))
    return _bring_back(index, ops, keys)


def _bring_back(index: SlabIndex, ops: FileOps, keys: RestKeys) -> IndexTable:
    """Enter the readable records of the index that was just set aside into the new one."""
    assert index.aside is not None, "it was replaced"
    try:
        bring_back(index, index.aside, ops)
    except StorageError as error:
        log.error("the readable blocks of %s cannot be brought back, try `prefixd recover`: %s", index.aside, error)
    return IndexTable(index.chunks(), keys, index.used_keys())
