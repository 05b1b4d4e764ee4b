"""Copies every record that still decodes from an index that a start has just set aside.

No block's bytes were overwritten since, and reads compare checksums as always. `salvage.py`, which runs later, has to
compare them first.
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
from prefixd_swap.slab.index.block_record import KEY_BYTES, NAMESPACE_BYTES, check_record
from prefixd_swap.slab.index.lmdb_file import read_trees, tree_entries
from prefixd_swap.slab.index.rows import CHUNK_ROWS, USED_CODECS, USED_KEYS, Row, decode_used_keys

if TYPE_CHECKING:
    from prefixd_swap.slab.index.index import SlabIndex


def bring_back(index: SlabIndex, aside: Path, ops: FileOps) -> None:
    """Enter the readable blocks, namespaces and pins of the index in the folder `aside` into `index`, which is empty.

    Raises:
        StorageError: the file cannot be opened, or the index cannot be written; some records may be entered.
    """

    def pread(fd: int, buffer: memoryview, offset: int) -> int:
        try:
            return ops.pread(fd, buffer, offset)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return 0  # like the end of the file: this page cannot be read, but others may be readable

    try:
        fd = ops.open(aside / "data.mdb", os.O_RDONLY)
        try:
            page_bytes, trees = read_trees(fd, pread)

            def rows(name: bytes) -> Iterator[Row]:
                return tree_entries(fd, pread, page_bytes, trees.get(name))

            named = dict(rows(b"namespaces"))
            specs = {key: spec for key, spec in named.items() if len(key) == NAMESPACE_BYTES}
            index.put_namespaces(specs)
            index.add_used_keys(decode_used_keys(named.get(USED_KEYS, b"")))
            index.add_used_codecs(named.get(USED_CODECS, b""))
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
        check_record(key, value)
    except RecordDamagedError:
        return False
    return True
