"""The hash that decides where the search for a block key begins: a secret function of the whole key.

Clients choose tokens, and XXH3-128 with a known seed can be inverted, so clients choose keys. A client that knows where
keys are placed can place thousands of them together, and every search that passes there is slow, also for others.

Two steps, with numbers that are random in each process and never leave it:

1. Multiply-shift over the key's four 32-bit words: the upper 33 bits of a1*x1 + ... + a4*x4 mod 2**64. For two
   different keys, chosen without knowledge of the a's, they are equal with a probability of at most 2**-32: the words
   differ by some 2**j*odd with j < 32, so that the difference of the sums takes 2**(64-j) values with equal
   probability, of which at most 2**(32-j) are closer to 0 than 2**31. (M. Thorup, "High speed hashing for integers and
   strings", arXiv:1504.06804, section 3.) So a key meets 0.0002 others for each million keys in the index.
2. Simple tabulation of these 33 bits, 11 at a time. With it, linear probing in a table that is at most half full takes
   an expected constant number of steps for any set of keys (M. Patrascu, M. Thorup, "The power of simple tabulation
   hashing", J. ACM 59(3), 2012, section 3), which step 1 alone does not promise.
"""

from __future__ import annotations

import secrets
from functools import cache
from struct import Struct

import numpy as np
import numpy.typing as npt

HASH_BITS = 32

Hashes = npt.NDArray[np.uint32]
Keys = npt.NDArray[np.uint64]
"""[m, 2]: the halves of each key, 16 bytes side by side."""

_WORDS = 4
_CHARACTERS, _CHARACTER_BITS = 3, 11
_SECOND_BITS = 2 * _CHARACTER_BITS
_SHIFT = 64 - _CHARACTERS * _CHARACTER_BITS
_LOWEST = (1 << _CHARACTER_BITS) - 1
_words_at = Struct(f"<{_WORDS}I").unpack_from


class KeyHash:
    """A function from keys to 32 bits.

    Args:
        multipliers: [4] of 64 bits.
        tables: [3, 2048] of 32 bits.
    """

    def __init__(self, multipliers: npt.NDArray[np.uint64], tables: Hashes) -> None:
        if multipliers.shape != (_WORDS,) or tables.shape != (_CHARACTERS, _LOWEST + 1):
            raise ValueError(
                f"a key hash takes [{_WORDS}] multipliers and [{_CHARACTERS}, {_LOWEST + 1}] table entries, not "
                f"{multipliers.shape} and {tables.shape}"
            )
        self._multipliers = multipliers
        self._tables = tuple(tables)
        self._a: list[int] = multipliers.tolist()
        self._t: list[list[int]] = tables.tolist()

    @classmethod
    def random(cls) -> KeyHash:
        """A random function."""
        multipliers = np.frombuffer(secrets.token_bytes(8 * _WORDS), np.uint64)
        tables = np.frombuffer(secrets.token_bytes(4 * _CHARACTERS * (_LOWEST + 1)), np.uint32)
        return cls(multipliers, tables.reshape(_CHARACTERS, -1))

    def one(self, keys: bytes | memoryview[int], at: int = 0) -> int:
        """The hash of the 16 bytes at `at`; 0.5 us."""
        a1, a2, a3, a4 = self._a
        t1, t2, t3 = self._t
        x1, x2, x3, x4 = _words_at(keys, at)
        mixed = x1 * a1 + x2 * a2 + x3 * a3 + x4 * a4 >> _SHIFT
        hashed: int = t1[mixed & _LOWEST] ^ t2[mixed >> _CHARACTER_BITS & _LOWEST] ^ t3[mixed >> _SECOND_BITS & _LOWEST]
        return hashed

    def each(self, keys: bytes) -> list[int]:
        """The hash of each of a few keys, 16 bytes each, one behind the other."""
        return [self.one(keys, at) for at in range(0, len(keys), 4 * _WORDS)]

    def all(self, keys: Keys) -> Hashes:
        """[m]: the hashes of [m, 2] halves of keys; 27 us for 1,000 keys."""
        words = keys.view("<u4").reshape(-1, _WORDS)
        mixed = (words.astype(np.uint64) @ self._multipliers >> np.uint64(_SHIFT)).view(np.int64)
        t1, t2, t3 = self._tables
        hashes: Hashes = t1.take(mixed & _LOWEST)
        hashes ^= t2.take(mixed >> _CHARACTER_BITS & _LOWEST)
        hashes ^= t3.take(mixed >> _SECOND_BITS)
        return hashes


@cache
def process_hash() -> KeyHash:
    """The function of this process. All indexes share it: it takes 0.2 MB, and no result depends on it."""
    return KeyHash.random()
