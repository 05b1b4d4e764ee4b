"""What a start keeps of an index that it has just set aside: every record that still decodes.

Nothing was written over the blocks' bytes yet, and their checksums are compared when they are read, as always. Later,
`salvage.py` compares them first.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from prefixd_swap.errors import RecordDamagedError
from prefixd_swap.slab.files.file_ops import FileOps, storage_error
from prefixd_swap.slab.index.block_record import KEY_BYTES, NAMESPACE_BYTES, decode_record
from prefixd_swap.slab.index.lmdb_file import read_trees, tree_entries
from prefixd_swap.slab.index.rows import CHUNK_ROWS, Row

if TYPE_CHECKING:
    from prefixd_swap.slab.index.index import SlabIndex


def bring_back(index: SlabIndex, aside: Path, ops: FileOps) -> None:
    """Enter into `index`, which is empty, what can be read of the one in the folder `aside`: blocks, what their
    namespaces stand for, and pins.

    Raises:
        StorageError: the file cannot be opened, or the index not written; part of it may be there.
    """

    def pread(fd: int, buffer: memoryview, offset: int) -> int:
        try:
            return ops.pread(fd, buffer, offset)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return 0  # as if the file ended here: this page cannot be read, others may be

    try:
        fd = ops.open(aside / "data.mdb", os.O_RDONLY)
        try:
            page_bytes, trees = read_trees(fd, pread)

            def rows(name: bytes) -> Iterator[Row]:
                return tree_entries(fd, pread, page_bytes, trees.get(name))

            specs = {key: spec for key, spec in rows(b"namespaces") if len(key) == NAMESPACE_BYTES}
            index.put_namespaces(specs)
            blocks = (row for row in rows(b"blocks") if row[0][:NAMESPACE_BYTES] in specs and _decodes(*row))
            while chunk := list(islice(blocks, CHUNK_ROWS)):
                index.apply(chunk)
            index.pin([key for key, _ in rows(b"pins") if len(key) == NAMESPACE_BYTES + KEY_BYTES], True)
        finally:
            os.close(fd)
    except OSError as error:
        raise storage_error(f"reading {aside}", error) from error


def _decodes(key: bytes, value: bytes) -> bool:
    try:
        decode_record(key, value)
    except RecordDamagedError:
        return False
    return True
