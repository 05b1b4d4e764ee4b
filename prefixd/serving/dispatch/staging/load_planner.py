"""Decides which part of a request's cached prefix is loaded and which is computed again, by their estimated times, and
whether it comes layer by layer.

`plan_load` decides (paper `prefix_cache_long_term_memory`, X).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from prefixd.cache.index.trie import Rows
from prefixd.observability.request_record import LoadDecision
from prefixd.serving.dispatch.context import DispatchContext
from prefixd.serving.images.image_kv import ImageHolds
from prefixd.serving.loading.layer_load import LayerLoad
from prefixd.serving.loading.load_bytes import bytes_to_load
from prefixd.serving.loading.load_choice import LoadChoice, LoadCounters
from prefixd.serving.loading.tail_load import TailPlan
from prefixd.serving.request.request import Request
from prefixd_scheduler import LOADED_FROM, Distance, LoadPlan, Stretch, plan_load

MOST_LAYER_BLOCKS = 4096
"""Blocks of a load layer by layer, at most: they are listed in one go, which costs the event loop 1 us a block. What is
longer comes in pieces of whole blocks."""


class LoadPlanner:
    """Chooses what to load for the next requests, and judges its choices later.

    Args:
        context: the dispatcher's.
        backlog_s: estimated seconds until the worker has computed the prompts that it has.
        queued_bytes: bytes that all loads have on their way.

    Attributes:
        counters: the decisions, and the time that they lost.
    """

    def __init__(
        self, context: DispatchContext, backlog_s: Callable[[], float], queued_bytes: Callable[[], int]
    ) -> None:
        self.counters = LoadCounters()
        self._cache = context.cache
        self._cost = context.cost
        self._clock = context.clock
        self._mode = context.options.load
        self._layerwise = context.options.layerwise
        self._backlog_s = backlog_s
        self._queued_bytes = queued_bytes

    def choose(self, request: Request, *, demanded: bool, turn_s: float) -> Rows:
        """The part of the `found` blocks that a request loads before it runs. Sets the request's `cut` and `beside`.

        Args:
            request: waits.
            demanded: whether the worker would run it now.
            turn_s: seconds until its turn comes.
        """
        trie, rows = request.trie, request.found
        request.beside = request.choice = None
        if not trie.lacking(rows, self._cache.tiers.compute.level, request.wanted).any():  # nothing to load
            request.cut = False
            return rows
        request.choice = LoadChoice(tuple(self._stretches(request)), self._clock())
        if demanded:
            self.note_turn(request)
        if self._mode == "always":
            chosen = rows
        elif self._mode == "never":
            chosen = request.usable(rows, trie.there[rows, self._cache.tiers.compute.level])
        elif trie.has_rules or (request.image_kv is not None and request.image_kv.every_row):
            chosen = self._worth_loading(request, turn_s + self._backlog_s())
        else:
            chosen = self._planned(request, request.choice.stretches, demanded, turn_s)
        request.cut = len(chosen) < len(rows)
        if request.cut:
            self._note_cut(request, len(chosen))
        return chosen

    def _note_cut(self, request: Request, loaded: int) -> None:
        """Notes that only the first `loaded` of the found blocks are loaded before the request runs."""
        trie, behind = request.trie, request.found[loaded:]
        wanted = None if request.wanted is None else request.wanted[loaded:]
        lacking = trie.lacking(behind, self._cache.tiers.compute.level, wanted)
        tier = Distance(int(trie.distances(request.found)[loaded:].max(initial=0)))
        tokens, before = len(behind) * trie.block_tokens, loaded * trie.block_tokens
        request.record.note_decision(
            LoadDecision(
                self._clock(),
                len(behind),
                tier.name.lower(),
                bytes_to_load(trie, behind, lacking).load_s(self._cost, tier, self._queued_bytes()),
                self._cost.compute_s(tokens, before),
                by_setting=self._mode == "never",
            )
        )

    def ready_s(self, request: Request) -> float:
        """Estimated seconds of loading and computing until a waiting request's first token; infinite while unknown.

        Blocks in a tier from which no load was observed yet count as loaded: otherwise none would ever be observed.
        """
        plan = self._plan(request, tuple(self._stretches(request)), at_once=False, wait_s=0.0, to_carry_out=False)
        if plan.first_token_s is not None:
            return plan.first_token_s
        cached_tokens = len(request.found) * request.trie.block_tokens
        compute_s = self._cost.compute_s(request.chain.tokens - cached_tokens, cached_tokens)
        return math.inf if compute_s is None else compute_s

    def _planned(self, request: Request, stretches: Sequence[Stretch], demanded: bool, turn_s: float) -> Rows:
        """The blocks to load according to `plan_load`, which does not know windows and states."""
        rows, block_tokens = request.found, request.trie.block_tokens
        plain = len(request.kv.groups) == 1 and request.images is None and request.sampling.beam_search is None
        wait_s = turn_s + self._backlog_s()
        plan = self._plan(request, stretches, at_once=demanded and plain, wait_s=wait_s, to_carry_out=True)
        blocks = request.uncut((plan.ready_tokens + plan.front_tokens) // block_tokens)
        if plan.computed_tokens and plan.loaded_tokens:
            behind = rows[blocks : plan.used_tokens // block_tokens]
            share = plan.computed_tokens / (plan.computed_tokens + plan.loaded_tokens)
            request.beside = TailPlan(behind, request.trie.nearest[behind], share)
        return rows[:blocks]

    def note_turn(self, request: Request) -> None:
        """A request's turn has come: its choice is judged by the time from now to its first token."""
        if request.choice is not None:
            request.choice.note_turn(self._clock(), self._backlog_s())

    def judge(self, request: Request) -> None:
        """A request has its first token: judges the choice that was made for it."""
        choice, request.choice = request.choice, None
        if choice is not None and choice.needs_load:
            tokens, block_tokens, beside = request.prompt_tokens, request.trie.block_tokens, request.beside is not None
            self.counters.judge(
                choice, self._cost, self._clock(), tokens, block_tokens, cut=request.cut and not beside, beside=beside
            )

    def _plan(
        self, request: Request, stretches: Sequence[Stretch], *, at_once: bool, wait_s: float, to_carry_out: bool
    ) -> LoadPlan:
        return plan_load(
            self._cost,
            stretches,
            request.chain.tokens,
            request.trie.block_tokens,
            both_at_once=at_once,
            queued_bytes=dict.fromkeys(LOADED_FROM, self._queued_bytes() if to_carry_out else 0),
            wait_s=wait_s,
            to_carry_out=to_carry_out,
        )

    def _stretches(self, request: Request) -> Iterator[Stretch]:
        """The found blocks as stretches, each farther away than the one before. A nearer block within a farther stretch
        belongs to it, without bytes."""
        trie, rows = request.trie, request.found
        distances = np.maximum.accumulate(trie.distances(rows))
        needed = trie.needed(len(rows)) if trie.has_rules else None
        lacking = trie.lacking(rows, self._cache.tiers.compute.level, needed)
        for distance in np.unique(distances).tolist():
            here = distances == distance
            nbytes = bytes_to_load(trie, rows[here], lacking[here])
            yield Stretch(Distance(distance), int(here.sum()) * trie.block_tokens, nbytes.moved, nbytes.decoded)

    def _worth_loading(self, request: Request, wait_s: float) -> Rows:
        """The prefix up to the first tier from which loading takes longer than computing, which begins in `wait_s`."""
        trie, rows = request.trie, request.found
        needed, nearer = trie.needed(len(rows)), np.zeros(len(rows), np.uint8)
        for distance in LOADED_FROM:
            nearer |= trie.there[rows, distance - 1]
            loaded = needed & ~nearer & trie.there[rows, distance]
            if loaded.any():
                kept = request.usable(rows, nearer)
                tokens = (len(rows) - len(kept)) * trie.block_tokens
                load_s = bytes_to_load(trie, rows, loaded).load_s(self._cost, distance, self._queued_bytes())
                compute_s = self._cost.compute_s(tokens, len(kept) * trie.block_tokens)
                slower = load_s is not None and compute_s is not None and load_s > wait_s + compute_s
                if slower and not self._cost.probes(distance):
                    return kept
        return rows

    def layer_load(self, request: Request, ready: Callable[[], None]) -> LayerLoad | None:
        """The load of a STAGING request's blocks layer by layer; None if it is not possible, or does not pay.

        It is one copy, of blocks that all lie in CPU memory. `ready`: see `LayerLoad`.
        """
        layers, tiers, trie = request.kv.layers, self._cache.tiers, request.trie
        wanted = self._layerwise == "always" or (self._layerwise == "auto" and tiers.compute.on_device)
        plain = request.beside is None and request.images is None and request.sampling.beam_search is None
        if not wanted or not plain or layers is None or request.whole_loads:
            return None
        if not (tiers.compute.backed and tiers.shared.backed):
            return None  # of a planner, which copies nothing
        lacking = trie.lacking(request.rows, tiers.compute.level, request.wanted)
        blocks = int(np.count_nonzero(lacking))
        slabs = layers.slabs(blocks, least=self._layerwise == "always")
        if (
            blocks > MOST_LAYER_BLOCKS
            or len(slabs) < 2
            or (lacking & ~trie.there[request.rows, tiers.shared.level]).any()
        ):
            return None
        return LayerLoad(request.rows, lacking, layers, slabs, ready)

    def load_s(self, request: Request) -> float | None:
        """Estimated seconds to load the blocks that a request lacks."""
        trie, rows = request.trie, request.rows
        lacking = trie.lacking(rows, self._cache.tiers.compute.level, request.wanted)
        far = int(trie.distances(rows[lacking != 0]).max(initial=0))
        return bytes_to_load(trie, rows, lacking).load_s(self._cost, Distance(far))

    def encode_s(self, images: ImageHolds) -> float | None:
        """Estimated seconds to embed the images of a request that are on their way to the GPU tier."""
        lacking = images.lacking
        encode_s = self._cost.encode_s(len(lacking), sum(map(len, lacking)))
        return None if encode_s is None else encode_s + self._backlog_s()

    def compute_s(self, request: Request) -> float | None:
        """Estimated seconds to compute a request's prefix from its first missing block on."""
        trie, rows = request.trie, request.rows
        lacking = trie.lacking(rows, self._cache.tiers.compute.level, request.wanted) != 0
        there = int(lacking.argmax()) if lacking.any() else len(rows)
        compute_s = self._cost.compute_s((len(rows) - there) * trie.block_tokens, there * trie.block_tokens)
        return None if compute_s is None else compute_s + self._backlog_s()
