"""A generation request from its arrival to its last token."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from prefixd.cache import BlockChain, Namespace, Trie
from prefixd.cache.index.trie import Rows
from prefixd.errors import PrefixdError
from prefixd.worker.protocol import Sampling
from prefixd_scheduler import QueuedRequest

FinishReason = Literal["stop", "length", "cancelled"]
_NO_ROWS = np.empty(0, np.int64)
_NO_GENERATIONS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens that were sampled."""

    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a request."""

    reason: FinishReason


Event = NewTokens | Ended | Exception


@dataclass(slots=True, eq=False)
class Request:
    """What the daemon knows of a request.

    Attributes:
        chain: prompt and generated tokens, and the keys of their blocks.
        prompt_tokens: how many of them are the prompt.
        queued: the request as the queue sees it.
        rows: cached blocks of the prompt that the request will use; while waiting, as of the last look.
        generations: the rows' generations at that look.
        staged: `rows` are held in the GPU tier (they are there, or on their way).
        frames: while running, frames[i] is the home of block i.
        recorded: while running, how many blocks, from the first, have their row in `rows`.
        claimed: while running, the prompt's blocks that this run computes for everybody.
        cut: `rows` is shorter than what is cached, on purpose or because the rest could not be brought up.
        own: frames that belong to this run and to no trie.
        failure: what the caller is told instead of the reason for which a run that was ended from outside ended.
        hit_tokens: prompt tokens found, by tier, when the request was looked up for its turn.
    """

    id: int
    name: str
    namespace: Namespace
    trie: Trie
    chain: BlockChain
    prompt_tokens: int
    sampling: Sampling
    queued: QueuedRequest
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    rows: Rows = field(default_factory=lambda: _NO_ROWS)
    generations: npt.NDArray[np.int32] = field(default_factory=lambda: _NO_GENERATIONS)
    staged: bool = False
    staging: asyncio.Task[None] | None = None
    frames: list[int] = field(default_factory=list)
    recorded: int = 0
    recording: bool = True
    own: set[int] = field(default_factory=set)
    claimed: range = range(0)
    cut: bool = False
    hit_tokens: list[int] | None = None
    handed_over_s: float | None = None
    first_token_s: float | None = None
    resumed: int = 0
    attempts: int = 0
    setbacks: int = 0
    cancelled: bool = False
    failure: PrefixdError | None = None
    preempted: bool = False
    extending: bool = False

    @property
    def generated(self) -> int:
        """Tokens generated so far, in all runs."""
        return self.chain.tokens - self.prompt_tokens

    @property
    def usable_blocks(self) -> int:
        """Full blocks that may come from the cache: at least one token has to be computed, for its logits."""
        return (self.chain.tokens - 1) // self.trie.block_tokens

    @property
    def next_key(self) -> bytes | None:
        """Key of the first usable block that is not cached."""
        return self.chain.key(len(self.rows)) if len(self.rows) < self.usable_blocks else None

    @property
    def ready(self) -> bool:
        """Whether the prefix is up."""
        return self.staged and (self.staging is None or self.staging.done())

    def forget_rows(self) -> None:
        """Starts over with nothing found."""
        self.rows, self.generations = _NO_ROWS, _NO_GENERATIONS
