"""Copies rows of vLLM's host pool from and to the daemon's memory.

The pool is one table, and a chunk is one of its rows, with the bytes of all workers:

    | worker 0, chunk 0 | worker 1, chunk 0 | padding |
    | worker 0, chunk 1 | worker 1, chunk 1 | padding |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixd.integrations.engine.pages_by_key.engine_pages import Bytes, PagesUnusable, WholePages


class Rows:
    """The pool's memory, until `close`: vLLM cannot free memory while other objects refer to it."""

    def __init__(self, pool: memoryview) -> None:
        self._bytes: Bytes | None = np.asarray(pool).view(np.uint8)
        self.count, self.row_bytes = self._bytes.shape

    def at(self, chunks: Sequence[int]) -> RowsAt:
        """Some chunks, ready to be copied. Raises PagesUnusable for a chunk outside of the pool."""
        if chunks and not 0 <= min(chunks) <= max(chunks) < self.count:
            raise PagesUnusable(f"chunks {min(chunks)} to {max(chunks)} of a pool of {self.count}")
        return RowsAt(self, chunks)

    def row(self, chunk: int) -> Bytes:
        """A chunk's bytes. Raises PagesUnusable once the pool is closed."""
        if self._bytes is None:
            raise PagesUnusable("vLLM has closed its host pool")
        row: Bytes = self._bytes[chunk]
        return row

    def close(self) -> None:
        """Drops the reference to the memory. No copy may be under way."""
        self._bytes = None


class RowsAt(WholePages):
    """Chunks, in the order of a call's keys."""

    def __init__(self, rows: Rows, chunks: Sequence[int]) -> None:
        self._rows = rows
        self._chunks = chunks

    def bytes_of(self, page: int) -> Bytes:
        return self._rows.row(self._chunks[page])
