"""Enters the blocks that running requests compute into the cache, and releases the blocks that their windows have
passed.

A state takes as much memory as the KV of hundreds of tokens and serves prefixes of exactly one length, so few are kept
(Marconi, section 4.1):

- after the last full block of the prompt that a request with the same prompt can resume from;
- where the prompt leaves a path that other requests have computed: more requests may share that beginning;
- at regular distances, if the settings say so;
- after the last full block of prompt and output (the tail), for a request that continues the conversation, and for the
  request itself if it is preempted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from prefixd.cache import TieredCache
from prefixd.cache.index.trie import Rows
from prefixd.serving.dispatch.context import DispatchContext
from prefixd.serving.dispatch.options import StatePolicy
from prefixd.serving.kv_shape import ONE_FRAME
from prefixd.serving.request.kv_needs import KvNeeds
from prefixd.serving.request.request import Request
from prefixd.serving.request.worker_run import Run


class Recorder:
    """Enters the blocks that the worker has filled into the cache and into the footprints of their requests.

    Args:
        context: the dispatcher's.

    Attributes:
        states: chooses the states that are kept.
        computing: running requests that still compute blocks of their prompts, by id.
        needs: counts the needed bytes of the GPU tier; set with the tier.
    """

    def __init__(self, context: DispatchContext) -> None:
        self.states = StateKeeping(context.cache, context.options.states)
        self.computing: dict[int, Request] = {}
        self.needs = KvNeeds(ONE_FRAME, 0)
        self._cache = context.cache
        self._cost = context.cost

    def backlog_s(self) -> float:
        """Estimated seconds until the worker has computed the prompts that it has."""
        left = (request.prompt_tokens - request.run.computed_tokens for request in self.computing.values())
        return self._cost.compute_s(sum(tokens for tokens in left if tokens > 0)) or 0.0

    def begin(self, request: Request) -> None:
        """A request runs: applies its retention to its cached blocks, and notes that it computes the others."""
        rows = request.rows
        self.retain(request, rows, 0)
        if len(rows) < request.run.computes:
            self.computing[request.id] = request

    def record_step(self, request: Request, run: Run, filled: int, kept: list[int], images: Sequence[int] = ()) -> None:
        """Records a step of a request: `filled` blocks are full, the states after `kept` blocks are kept, and the
        frames of the `images` of its prompt are filled."""
        self._record(request, run, filled)
        if (holds := request.image_holds) is not None:
            request.footprint.give_to_trie(holds.filled(images))
            if passed := holds.pass_by(run.computed_tokens):
                request.footprint.free(passed)
        self.states.record_step(request, run, kept)
        self._release_passed(request, run)

    def end(self, request: Request, tail_blocks: int) -> None:
        """A run has ended, for any reason; the frames of its tail hold the state after `tail_blocks` blocks."""
        self.computing.pop(request.id, None)
        self.states.record_tail(request, tail_blocks)

    def _record(self, request: Request, run: Run, filled: int) -> None:
        """Enters the first `filled` blocks, which are full, into the trie, and holds the loaded ones among them."""
        tail = request.tail
        if tail is not None and tail.joined and filled >= tail.limit + len(tail.arrived):
            self._record_computed(request, run, tail.limit)
            if run.recording:  # else the tail goes on holding the loaded blocks
                request.footprint.end_tail()
                self.retain(request, request.rows[tail.limit :], tail.limit)
        self._record_computed(request, run, filled)

    def _record_computed(self, request: Request, run: Run, filled: int) -> None:
        rows = request.rows
        first = len(rows)
        if run.recording and first < filled:
            parent = _parent(request, rows)
            run.recording = parent is not None and self._enter(request, run, parent, first, filled)
            first = filled
        if not run.recording or first >= run.computes:
            self.computing.pop(request.id, None)

    def _enter(self, request: Request, run: Run, parent: int, first: int, filled: int) -> bool:
        """Enters the blocks from `first` to `filled` behind the row `parent`; returns whether all were entered."""
        trie = request.trie
        frames = run.frame_ids(first, filled)
        rows, taken = self._cache.record(request.namespace, parent, request.chain, first, frames, filled - first)
        part_bytes = np.array(trie.part_bytes[: run.slots], np.int64)
        _count_stored(self._cache, request, int((taken.reshape(len(rows), run.slots) @ part_bytes).sum()))
        wanted, groups = None, int(np.bitwise_or.reduce(trie.part_mask[: run.slots]))
        if trie.has_rules:
            wanted = np.full(len(rows), groups, np.uint8)
        self.retain(request, rows, first)
        request.footprint.record(rows, compress(frames, taken.tolist()), wanted)
        path, prompt_ends = request.rows, request.prompt_ends
        ends = self.states.ends(request, prompt_ends)
        self._cache.placement.extend(trie, path, groups, ends)
        self.needs.recorded(trie, path, prompt_ends)
        return len(rows) == filled - first

    def retain(self, request: Request, rows: Rows, first_block: int) -> None:
        """Applies the retention that the caller requested to those of `rows`, blocks from `first_block` on, that belong
        to the prompt."""
        if request.retention is not None:
            of_prompt = request.prompt_tokens // request.trie.block_tokens - first_block
            request.retention.apply(rows[: max(of_prompt, 0)], first_block)

    def _release_passed(self, request: Request, run: Run) -> None:
        """Releases the blocks that the windows of a run have passed: they stay cached while there is room."""
        if request.kv.windowed and request.sampling.beam_search is None:  # beams need their whole prompt
            part_mask = request.trie.part_mask
            for first, last, passed in request.kv.passed(run.computed_tokens):
                blocks, frames = run.pass_blocks(first, last, passed)
                if frames:
                    request.footprint.release(blocks, int(part_mask[first]), frames)


def _count_stored(cache: TieredCache, request: Request, nbytes: int) -> None:
    if nbytes:
        cache.measurements.traffic.stored_bytes.add(nbytes, request.record.tenant, request.record.model)


def _parent(request: Request, rows: Rows) -> int | None:
    """The row, in the request's own namespace, behind which the next block is entered. None if another block has a key
    of its prefix: then nothing behind it can be cached."""
    namespace = request.namespace
    if not len(rows):
        return namespace.root
    if request.trie.namespace[rows[-1]] == namespace.ordinal:
        return int(rows[-1])
    return request.footprint.own_row(len(rows) - 1)


@dataclass(slots=True)
class StateCounters:
    """Counters since the start; documented at `StateStats` in `admin.proto`."""

    kept: int = 0
    kept_bytes: int = 0
    resumed: int = 0
    resumed_tokens: int = 0
    without_room: int = 0


class StateKeeping:
    """Chooses the states that the worker keeps, and enters them into the cache.

    Args:
        cache: gets the states.
        policy: how many states are kept.
    """

    def __init__(self, cache: TieredCache, policy: StatePolicy) -> None:
        self.counters = StateCounters()
        self._cache = cache
        self._policy = policy

    def choose(self, request: Request) -> list[int]:
        """The states to keep of a prompt: for each the number of blocks before it, ascending."""
        block_tokens, cached = request.trie.block_tokens, len(request.rows)
        last = (request.prompt_tokens - 1) // block_tokens
        path = len(request.path)
        every = -(-self._policy.every_tokens // block_tokens)
        blocks = [last, path, *(range(last // every * every, cached, -every) if every else ())]
        wanted = dict.fromkeys(count for count in blocks if count > cached)
        return sorted(list(wanted)[: self._policy.per_prompt])

    def ends(self, request: Request, prompt_ends: tuple[int, int]) -> list[int]:
        """Numbers of blocks of a prompt after which a request is likely to resume: its end, and regular distances."""
        every = -(-self._policy.every_tokens // request.trie.block_tokens)
        last = prompt_ends[-1]
        return [*prompt_ends, *(range(every, last, every) if every and request.kv.state_frames else ())]

    @property
    def keeps_tails(self) -> bool:
        """Whether the state at the end of a request is kept."""
        return self._policy.per_prompt > 0

    def count_resumed(self, request: Request) -> None:
        """Counts a request that resumes from a state: one with cached blocks."""
        if len(request.rows):
            self.counters.resumed += 1
            self.counters.resumed_tokens += len(request.rows) * request.trie.block_tokens

    def record_step(self, request: Request, run: Run, kept: list[int]) -> None:
        """Enters the states after `kept` blocks, which the worker has kept in a step."""
        states = run.states
        if states is None:
            return
        if states.resuming:  # with the first step the worker has copied the state
            states.resuming = False
            group = int(request.trie.part_mask[len(request.kv.block_widths)])
            request.footprint.release(slice(0, len(request.rows)), group)
        for blocks in kept:
            if (frames := states.keep.pop(blocks, None)) is not None:
                self._enter(request, blocks, frames)

    def record_tail(self, request: Request, tail_blocks: int) -> None:
        """Enters the tail of a run that has ended: the state after `tail_blocks` blocks."""
        states = request.run.states
        if states is not None and states.tail and tail_blocks:
            tail, states.tail = states.tail, []
            self._enter(request, tail_blocks, tail)

    def _enter(self, request: Request, blocks: int, frames: list[int]) -> None:
        """Enters a state behind its blocks, if they are in the trie and the state is not.

        A common block gets no state from a request: the blocks must be of the request's own namespace.
        """
        rows = request.rows
        ends = self.ends(request, request.prompt_ends)
        mine = len(rows) >= blocks and request.trie.namespace[rows[blocks - 1]] == request.namespace.ordinal
        if mine and self._cache.record_state(request.trie, rows[:blocks], frames, ends):
            request.footprint.give_to_trie(frames)
            self.counters.kept += 1
            self.counters.kept_bytes += request.kv.state_frames * self._cache.tiers.frames.frame_bytes
            _count_stored(self._cache, request, sum(request.trie.part_bytes[-len(frames) :]))
        else:
            request.footprint.free(frames)
