"""The pages that LMDB's own tree says are free: it writes to them next, so none of them may be in use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prefixd_swap.slab.index.lmdb_file import MAX_PAGE, Int64s

_WORD = 8


class FreePages:
    """Collects page numbers from the leaves of that tree: each entry is how many, and then the numbers (u64 each)."""

    def __init__(self) -> None:
        self.found: list[Int64s] = []

    def add(
        self,
        content: npt.NDArray[np.uint8],
        start: Int64s,
        key_bytes: Int64s,
        nbytes: Int64s,
        big: Int64s,
        data: Sequence[bytes],
    ) -> bool:
        """Adds the n entries of some leaves; False where an entry has fewer numbers than it says.

        Args:
            content: has the leaves.
            start: [n]: where each entry's key begins in `content`.
            key_bytes: [n]: bytes of the key.
            nbytes: [n]: bytes of the data, which follow the key.
            big: the entries whose data do not.
            data: the data of these; b"" for those that are behind the end of the file.
        """
        apart = dict(zip(big.tolist(), data, strict=True))
        for at, begin, length in zip(range(len(start)), (start + key_bytes).tolist(), nbytes.tolist(), strict=True):
            value = apart[at] if at in apart else content[begin : begin + length].tobytes()
            words = np.frombuffer(value[: len(value) // _WORD * _WORD], "<u8")
            if not len(words):
                if at in apart:
                    continue
                return False
            if words[0] >= len(words):
                return False
            self.found.append(np.minimum(words[1 : 1 + int(words[0])], np.uint64(MAX_PAGE)).astype(np.int64))
        return True
