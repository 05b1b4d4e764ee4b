"""A secret number of 128 bits for each namespace, by which its keys differ from all other namespaces' in a key index.

Clients choose tokens, and XXH3-128 with a known seed can be inverted, so clients choose keys: also the key that a block
of somebody else has in his namespace. Were a key one block's for all namespaces of a trie, whoever has it first would
keep the other from being cached. So a key stands in the index exclusive-or its namespace's mask. Keys of two namespaces
meet there with a probability of 2**-128, whoever chooses them: the masks are random in each process and never leave it.
"""

from __future__ import annotations

import secrets
from functools import cache

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.key_index import KEY_BYTES

Ordinals = npt.NDArray[np.int32] | npt.NDArray[np.int64]
MaskedKeys = npt.NDArray[np.uint64]
"""[m, 2]: the halves of each key, masked."""


class KeyMasks:
    """The masks, by the namespace's ordinal."""

    def __init__(self) -> None:
        self._masks = np.empty((0, 2), np.uint64)

    def apply(self, namespaces: int | Ordinals, keys: bytes | npt.NDArray[np.uint8]) -> MaskedKeys:
        """Masks keys, one behind the other, all of one namespace or each of its own; takes the masks off, too."""
        if (last := namespaces if isinstance(namespaces, int) else int(namespaces.max(initial=0))) >= len(self._masks):
            more = last + 64 - len(self._masks)
            random = np.frombuffer(secrets.token_bytes(KEY_BYTES * more), np.uint64).reshape(-1, 2)
            self._masks = np.concatenate([self._masks, random])
        masked: MaskedKeys = np.frombuffer(keys, np.uint64).reshape(-1, 2) ^ self._masks[namespaces]
        return masked


@cache
def process_masks() -> KeyMasks:
    """This process's masks, for all tries."""
    return KeyMasks()
