"""Keeps every waiting request's distance true while blocks come, move and go."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from prefixd.cache import NONE, TieredCache
from prefixd.server.request import Request
from prefixd_scheduler import Distance


class PrefixTracker:
    """Looks all waiting requests up again, in one pass over the trie's columns, when anything changed.

    Args:
        cache: where the blocks are.
    """

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self._epoch = -1

    def look_up(self, request: Request) -> None:
        """Finds a request's longest cached prefix and its distance."""
        trie = request.trie
        request.rows = trie.match(request.namespace.root, request.chain, request.usable_blocks).rows
        request.generations = trie.generation[request.rows]
        distance = int(trie.nearest[request.rows].max()) if len(request.rows) else NONE
        self._note(request, Distance(distance))

    def refresh(self, waiting: Iterable[Request]) -> None:
        """Brings all waiting requests up to date. Staged ones are held, so theirs cannot have changed."""
        if self._epoch == self._cache.mover.epoch:
            return
        self._epoch = self._cache.mover.epoch
        in_flight = [request for request in waiting if not request.staged]
        found = [request for request in in_flight if len(request.rows)]
        for request in in_flight:
            if not len(request.rows) and request.next_key in request.trie:
                self.look_up(request)
        if not found:
            return
        trie = found[0].trie  # the worker has one geometry, so all its requests have one trie
        lengths = np.array([len(request.rows) for request in found])
        starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        rows = np.concatenate([request.rows for request in found])
        stale = trie.generation[rows] != np.concatenate([request.generations for request in found])
        far = np.maximum.reduceat(np.where(stale, NONE, trie.nearest[rows]), starts)
        for request, distance in zip(found, far.tolist(), strict=True):
            if distance == NONE or request.next_key in trie:
                self.look_up(request)
            else:
                self._note(request, Distance(distance))

    def _note(self, request: Request, distance: Distance) -> None:
        queued = request.queued
        queued.distance = distance
        queued.cached_tokens = min(len(request.rows) * request.trie.block_tokens, queued.prompt_tokens)
        queued.prefix = request.chain.key(len(request.rows) - 1) if len(request.rows) else None
