"""Which states are kept of a request whose model has recurrent layers, and what that brings.

A state takes as much memory as the KV of hundreds of tokens and serves prefixes of exactly one length, so few are kept
(Marconi, section 4.1):

- after the last full block of the prompt that a request with the same prompt can resume from;
- where the prompt leaves a path that others have computed: who shares that beginning comes again, perhaps;
- every so many tokens, if the settings say so;
- after the last full block of prompt and output (the tail), for who continues the conversation, and for the request
  itself if it has to give its frames to others.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefixd.cache import TieredCache
from prefixd.serving.request.request import Request


@dataclass(frozen=True, slots=True)
class StatePolicy:
    """How many states are kept.

    Attributes:
        per_prompt: at most so many of a prompt; 0 keeps none, nor the tail.
        every_tokens: besides, one each so many tokens of the prompt, the last ones first; 0: none.
    """

    per_prompt: int = 4
    every_tokens: int = 0


EVERY_BLOCK = StatePolicy(per_prompt=1 << 30, every_tokens=1)
"""Keeps the states of all blocks of a prompt."""


@dataclass(slots=True)
class StateCounters:
    """What happened since the start; `StateStats` in `admin.proto` says what each counts."""

    kept: int = 0
    kept_bytes: int = 0
    resumed: int = 0
    resumed_tokens: int = 0
    without_room: int = 0


class StateKeeping:
    """Chooses the states that the worker keeps, and enters them into the cache.

    Args:
        cache: where they go.
        policy: how many.
    """

    def __init__(self, cache: TieredCache, policy: StatePolicy) -> None:
        self.counters = StateCounters()
        self._cache = cache
        self._policy = policy

    def chosen(self, request: Request) -> list[int]:
        """The states of a prompt to keep, ascending: after so many blocks each. For a request that is handed over."""
        block_tokens, cached = request.trie.block_tokens, len(request.rows)
        last = (request.prompt_tokens - 1) // block_tokens
        path = len(request.path)
        every = -(-self._policy.every_tokens // block_tokens)
        blocks = [last, path, *(range(last // every * every, cached, -every) if every else ())]
        wanted = dict.fromkeys(count for count in blocks if count > cached)
        return sorted(list(wanted)[: self._policy.per_prompt])

    def ends(self, request: Request) -> list[int]:
        """Blocks of a prompt after which somebody is likely to resume: its end, and each so many tokens."""
        every = -(-self._policy.every_tokens // request.trie.block_tokens)
        last = request.prompt_ends[-1]
        return [*request.prompt_ends, *(range(every, last, every) if every and request.kv.state_frames else ())]

    @property
    def keeps_tails(self) -> bool:
        """Whether the state at the end of a request is kept."""
        return self._policy.per_prompt > 0

    def handed_over(self, request: Request) -> None:
        """A request runs; it resumes from a state if some of its blocks are cached."""
        if len(request.rows):
            self.counters.resumed += 1
            self.counters.resumed_tokens += len(request.rows) * request.trie.block_tokens

    def stepped(self, request: Request, kept: list[int]) -> None:
        """The worker has computed a step of a request, and kept the states after so many blocks."""
        states = request.run.states
        if states is None:
            return
        if states.resuming:  # it has copied the state by now
            states.resuming = False
            group = int(request.trie.part_mask[len(request.kv.block_widths)])
            request.footprint.let_go(slice(0, len(request.rows)), group)
        for blocks in kept:
            if (frames := states.keep.pop(blocks, None)) is not None:
                self._enter(request, blocks, frames)

    def ended(self, request: Request, tail_blocks: int) -> None:
        """A run has ended, whatever the reason, and the state after so many blocks is in the frames for its tail."""
        states = request.run.states
        if states is not None and states.tail and tail_blocks:
            tail, states.tail = states.tail, []
            self._enter(request, tail_blocks, tail)

    def _enter(self, request: Request, blocks: int, frames: list[int]) -> None:
        """Enters a state behind the blocks that it belongs to, if they are in the trie and it is not.

        What the request has computed does not become a common block's.
        """
        rows = request.rows
        ends = self.ends(request)
        mine = len(rows) >= blocks and request.trie.namespace[rows[blocks - 1]] == request.namespace.ordinal
        if mine and self._cache.record_state(request.trie, rows[:blocks], frames, ends):
            request.footprint.give(frames)
            self.counters.kept += 1
            self.counters.kept_bytes += request.kv.state_frames * self._cache.tiers.frames.frame_bytes
        else:
            request.footprint.free(frames)
