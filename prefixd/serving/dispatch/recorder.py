"""Enters what running requests compute into the cache, block by block, and lets go of what they have passed."""

from __future__ import annotations

from itertools import compress

import numpy as np

from prefixd.cache import TieredCache
from prefixd.cache.index.trie import Rows
from prefixd.serving.dispatch.state_keeping import StateKeeping
from prefixd.serving.kv_shape import ONE_FRAME
from prefixd.serving.request.kv_needs import KvNeeds
from prefixd.serving.request.request import Request
from prefixd.serving.request.run import Suspect


class Recorder:
    """Keeps the cache and the footprints of running requests in step with what the worker has filled.

    Args:
        cache: the cache.
        states: knows which states are kept.

    Attributes:
        computing: running requests that still compute blocks of their prompts, by id.
        needs: what is needed of the GPU tier; set with it.
    """

    def __init__(self, cache: TieredCache, states: StateKeeping) -> None:
        self.computing: dict[int, Request] = {}
        self.needs = KvNeeds(ONE_FRAME, 0)
        self._cache = cache
        self._states = states

    def record(self, request: Request, filled: int) -> None:
        """The worker has filled the first so many blocks: they go into the trie, and those passed over are held."""
        tail = request.tail
        if tail is not None and tail.joined and filled >= tail.limit + len(tail.arrived):
            self._record_computed(request, tail.limit)
            if request.run.recording:  # else the tail goes on holding what the run has passed over
                request.footprint.end_tail()
                self.retain(request, request.rows[tail.limit :], tail.limit)
        self._record_computed(request, filled)

    def _record_computed(self, request: Request, filled: int) -> None:
        run, first = request.run, len(request.rows)
        if run.recording and first < filled:
            parent = _parent(request)
            run.recording = parent is not None and self._enter(request, parent, first, filled)
        if not run.recording or len(request.rows) >= run.computes:
            self.computing.pop(request.id, None)

    def _enter(self, request: Request, parent: int, first: int, filled: int) -> bool:
        """Enters the blocks from `first` to `filled` behind the row `parent`; whether all of them could be."""
        run, trie = request.run, request.trie
        homes = run.homes(first, filled)
        rows, taken = self._cache.record(request.namespace, parent, request.chain, first, homes, filled - first)
        wanted, groups = None, int(np.bitwise_or.reduce(trie.part_mask[: run.slots]))
        if trie.has_rules:
            wanted = np.full(len(rows), groups, np.uint8)
        self.retain(request, rows, first)
        request.footprint.record(rows, compress(homes, taken.tolist()), wanted)
        ends = self._states.ends(request)
        self._cache.placement.extend(trie, request.rows, groups, ends)
        self.needs.recorded(trie, request.rows, request.prompt_ends)
        return len(rows) == filled - first

    def retain(self, request: Request, rows: Rows, first_block: int) -> None:
        """Does as its caller wishes for those of `rows`, blocks from `first_block` on, that are its prompt's."""
        if request.wish is not None:
            of_prompt = request.prompt_tokens // request.trie.block_tokens - first_block
            request.wish.apply(rows[: max(of_prompt, 0)], first_block)

    def let_go_of_passed(self, request: Request) -> None:
        """Lets go of what the windows of a run have passed: its blocks' bytes stay as cache while there is room."""
        run, part_mask = request.run, request.trie.part_mask
        if request.kv.windowed and not request.sampling.beams:  # beams begin with all of their prompt
            for first, last, passed in request.kv.passed(run.computed_tokens):
                blocks, homes = run.pass_blocks(first, last, passed)
                if homes:
                    request.footprint.let_go(blocks, int(part_mask[first]), homes)


def _parent(request: Request) -> int | None:
    """The row that the block after `request.rows` continues, one of its own namespace. None where a key of its prefix
    is another block's: then nothing behind it can be cached."""
    namespace, rows = request.namespace, request.rows
    if not len(rows):
        return namespace.root
    if request.trie.namespace[rows[-1]] == namespace.ordinal:
        return int(rows[-1])
    return request.footprint.own_row(len(rows) - 1)


def suspects_of(request: Request) -> list[Suspect]:
    """The first block of each prefix that a request holds, or will load, when it is handed over.

    No token can be chosen from logits that are not finite. Of a run that used cached blocks, or another run's, those
    may be the reason: it is run again without, and leaves nothing in the cache then. If that gives a token, they were
    the reason: they are refused (`RefusedBlocks`). If it does not, the model is, and they stay.
    """
    behind = () if request.beside is None else request.beside.rows[:1].tolist()
    found = [(request.trie, row) for row in request.rows[:1].tolist() or behind]
    if (images := request.image_holds) is not None:
        found += [(images.kv.trie, row) for row in images.first_rows]
    return [Suspect(trie, row, int(trie.generation[row])) for trie, row in found]


def refuse(cache: TieredCache, request: Request) -> None:
    """A request has its tokens now that it runs without what it used before."""
    suspects, request.suspects = request.suspects, []
    for suspect in suspects:
        cache.refused.refuse(suspect.trie, suspect.row, suspect.generation)
