"""A hash of every prefix of a prompt, in numpy: 10 us for 1,000 blocks of 16 tokens.

The hash of n blocks is f * sum of r**j * (c + sum of m_k * t_jk) over blocks j and their tokens t_jk, taken two by two,
mod 2**64, with random odd f, r, c, m. Its upper bits depend on all tokens and their places; the lower ones are weak.

The keys of a prompt's blocks would do, but a look-up computes them only up to the first block that is missing, and the
rest takes 0.2 us a block: more than the ghosts may cost. These hashes are secret and differ in every process. Two
prefixes with the same hash make an estimate wrong by a block, and nothing else.
"""

from __future__ import annotations

import secrets

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

_COPIED_AT_ONCE = 1 << 15  # tokens


class PrefixHashes:
    """Hashes prompts.

    Args:
        random_bytes: where the secret numbers are from; replaced in tests, so that a run can be repeated.
        most_blocks: blocks behind this number of a prompt are not hashed.
    """

    def __init__(self, random_bytes: bytes | None = None, most_blocks: int = 1 << 16) -> None:
        drawn = secrets.token_bytes(24) if random_bytes is None else random_bytes
        if len(drawn) < 24:
            raise ValueError(f"{len(drawn)} random bytes; give 24 or more")
        seed, step, final = (int(number) | 1 for number in np.frombuffer(drawn[:24], np.uint64))
        self._draw = np.random.default_rng(seed)
        self._step, self._final = np.uint64(step), np.uint64(final)
        self._most = most_blocks
        self._powers = np.ones(0, np.uint64)
        self._of_width: dict[int, npt.NDArray[np.uint64]] = {}

    def of_blocks(self, token_rows: npt.NDArray[np.uint32], seed: int) -> Hashes:
        """[blocks]: for each block the hash of all tokens up to its last; the upper half of the bits is uniform.

        Args:
            token_rows: [blocks, tokens of a block], contiguous.
            seed: prompts of two namespaces with different seeds have no hash in common.
        """
        rows = token_rows[: self._most]
        hashes = self._of_each(rows)
        if not len(hashes):
            return hashes
        hashes += self._final  # a block of zeros counts too
        hashes *= self._powers_to(len(hashes))
        hashes[:1] += np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
        np.cumsum(hashes, out=hashes)
        hashes *= self._final
        return hashes

    def _of_each(self, rows: npt.NDArray[np.uint32]) -> Hashes:
        """[blocks]: for each block the sum of m_k * t_jk. An odd number of tokens is copied to be aligned, in slices:
        touching 16 MiB of new memory takes 70 ms."""
        width = rows.shape[1]
        multipliers = self._multipliers(-(-width // 2))
        if width % 2 == 0:
            return rows.view(np.uint64) @ multipliers
        hashes, step = np.empty(len(rows), np.uint64), max(1, _COPIED_AT_ONCE // width)
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            hashes[start : start + step] = (
                part[:, :-1].view(np.uint64) @ multipliers[:-1] + part[:, -1] * multipliers[-1]
            )
        return hashes

    def _multipliers(self, width: int) -> Hashes:
        found = self._of_width.get(width)
        if found is None:
            if len(self._of_width) >= 64:  # as many lengths of blocks as one daemon hardly has
                self._of_width.clear()
            drawn = self._draw.integers(0, 1 << 63, width, np.uint64, endpoint=True)
            found = self._of_width[width] = drawn << np.uint64(1) | np.uint64(1)
        return found

    def _powers_to(self, blocks: int) -> Hashes:
        """[blocks]: a factor for each place, so that the order of blocks matters."""
        if blocks > len(self._powers):
            size = min(self._most, max(1024, 2 * blocks))
            self._powers = np.cumprod(np.full(size, self._step), dtype=np.uint64)
        return self._powers[:blocks]
