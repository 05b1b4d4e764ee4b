"""Reads a cached prefix in slices, each under a lease of its own: no prompt is too long for the daemon's memory.

    Match -> Acquire -> copy -> Release -> Acquire -> copy -> Release ...

Nothing is held while room for the next slice is waited for, so any number of long loads get on beside each other.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from prefixd.client.errors import ExhaustedError
from prefixd.client.spec import MatchResult

SLICE_SHARE = 4
"""A slice takes a quarter of the daemon's memory at the most, so that several loads go on at a time."""
_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.1
_LONGEST_WAIT_S = 2.0
"""For room that others hold; then what has come has to do."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What one call has read.

    Attributes:
        blocks: from the first one asked for.
        cached_blocks: of the prompt, as far as was asked for; 0: the daemon is older and does not say.
    """

    blocks: int
    cached_blocks: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one call is to read.

    Attributes:
        first_block: from here on.
        max_blocks: so many at the most.
        prefix_blocks: they are a slice of a prefix of this length; 0: the prompt goes on behind them.
        found: the answer by which the prompt was counted as asked for; None: this call counts it.
    """

    first_block: int
    max_blocks: int
    prefix_blocks: int = 0
    found: MatchResult | None = None


class Slices(ABC):
    """One prompt's blocks, read slice by slice.

    Args:
        slice_blocks: of one slice, at the most.
        has_rules: some blocks' bytes are needed by prefixes of some lengths only.
        clock: seconds, monotonic.
    """

    def __init__(self, slice_blocks: int, has_rules: bool, clock: Callable[[], float]) -> None:
        self._slice_blocks = slice_blocks
        self._has_rules = has_rules
        self._clock = clock

    @abstractmethod
    async def match(self, end: int) -> MatchResult:
        """Asks what is cached of the first `end` blocks; counts them as asked for."""

    @abstractmethod
    async def read(self, wanted: Wanted) -> Slice:
        """Reads some blocks to where they belong."""

    async def load(self, first_block: int, asked: int) -> int:
        """Reads up to `asked` blocks from `first_block` on; returns how many were read.

        Raises what `match` and `read` raise; ExhaustedError if nothing may be read.
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
        if read is None:  # bytes of a longer prefix are of no use for a shorter one
            read = first_block + (await self.read(Wanted(first_block, asked, found=found))).blocks
        return max(read - first_block, 0)

    async def _load_slices(self, found: MatchResult, done: int, end: int, first_block: int) -> int | None:
        """Reads the blocks from `done` to `end`; returns up to which block they came; None if those are of no use."""
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
