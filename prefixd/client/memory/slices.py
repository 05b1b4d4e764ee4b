"""Loads a prompt that may be longer than the daemon's memory: slice by slice."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable

from prefixd.client.errors import ExhaustedError
from prefixd.client.memory.streaming import Slice, Wanted
from prefixd.client.spec import MatchResult

SLICE_SHARE = 4
"""A slice takes at most a quarter of the daemon's memory, so that several loads can run at a time."""
_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.1
_LONGEST_WAIT_S = 2.0
"""Longest wait for memory that others hold; then a load ends with the blocks that it has."""


class Slices(ABC):
    """Reads one prompt's blocks slice by slice, so that a prompt may be longer than the daemon's memory.

        Match -> Acquire -> copy -> Release -> Acquire -> copy -> Release ...

    It holds no lease while it waits for the next slice's memory, so that several long loads do not block each other.

    Args:
        slice_blocks: most blocks of one slice.
        has_rules: some KV group needs a part of a prefix only, which depends on the prefix's length.
        clock: seconds, monotonic.
    """

    def __init__(self, slice_blocks: int, has_rules: bool, clock: Callable[[], float]) -> None:
        self._slice_blocks = slice_blocks
        self._has_rules = has_rules
        self._clock = clock

    @abstractmethod
    async def match(self, end: int) -> MatchResult:
        """Matches the first `end` blocks, and counts them as asked for."""

    @abstractmethod
    async def read(self, wanted: Wanted) -> Slice:
        """Reads some blocks into their buffers."""

    async def load(self, first_block: int, asked: int) -> int:
        """Reads up to `asked` blocks from `first_block` on; returns the number of blocks that were read.

        Raises the errors of `match` and `read`; ExhaustedError if there is no memory for a slice.
        """
        if asked <= self._slice_blocks:
            whole = await self.read(Wanted(first_block, asked))
            if first_block + whole.blocks >= whole.cached_blocks:
                return whole.blocks
            found, end = MatchResult(whole.cached_blocks, ()), whole.cached_blocks
            done = first_block if self._has_rules else first_block + whole.blocks
        else:
            found = await self.match(first_block + asked)
            done, end = first_block, found.blocks
        read = await self._load_slices(found, done, end, first_block)
        if read is None:
            read = first_block + (await self.read(Wanted(first_block, asked, found=found))).blocks
        return max(read - first_block, 0)

    async def _load_slices(self, found: MatchResult, done: int, end: int, first_block: int) -> int | None:
        """Reads the blocks `done` to `end`; returns the block up to which they were read.

        None if these bytes are useless: a shorter prefix needs other bytes of the KV groups with rules.
        """
        pause_s, waiting_since_s = _FIRST_PAUSE_S, self._clock()
        while done < end:
            late = self._clock() - waiting_since_s > _LONGEST_WAIT_S
            try:
                some = await self.read(Wanted(done, min(self._slice_blocks, end - done), end, found))
            except ExhaustedError:
                if late and done == first_block:
                    raise
                some = Slice(0, end)
            done += some.blocks
            if some.blocks and not some.cached_blocks:
                return None
            if some.cached_blocks < end:  # some were evicted
                end = some.cached_blocks
                if self._has_rules:
                    done = first_block
            elif some.blocks:
                pause_s, waiting_since_s = _FIRST_PAUSE_S, self._clock()
            elif late:
                return None if self._has_rules else done
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return done
